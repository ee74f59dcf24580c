"""Whole tables: files in every form, the held-out part, and remarks."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from bayesify.tabular import table_memory, training_table
from bayesify.tabular.columns import CategoryColumn
from bayesify.tabular.files import TableError, open_table, table_file
from bayesify.tabular.new_table import NewTable
from bayesify.tabular.rows import rechunked
from bayesify.tabular.schema import TableSchema
from bayesify.tabular.training_table import fit_table, load_table


def messy(rows: int = 60) -> str:
    """A table with a column of every kind."""
    generator = np.random.default_rng(0)
    lines = ["id,name,city,size,sold,when,const,empty,price"]
    for i in range(rows):
        size = "" if i % 9 == 0 else f"{generator.normal():.4f}"
        lines.append(
            f"{i + 1},person {i},{('Rome', 'Oslo', 'Ulm')[i % 3]},{size},{('no', 'yes')[i % 2]},"
            f"2024-{1 + i % 12:02d}-05,7,,{i + generator.normal():.3f}"
        )
    return "\n".join(lines) + "\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table.csv"


def test_everything_in_one_table(path: Path) -> None:
    path.write_text(messy())
    data, schema = fit_table(path, "price")
    assert [column.name for column in schema.columns] == ["city", "size", "sold", "when"]
    assert sorted(schema.dropped) == ["const", "empty", "id", "name"]
    assert schema.carried == ("id", "name")
    assert data.train_inputs.shape == (48, len(schema.features))
    assert data.test_inputs.shape == (12, len(schema.features))
    assert float(data.train_targets.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(data.train_targets.std(correction=0)) == pytest.approx(1.0, abs=1e-6)


def test_a_table_that_is_there_several_times_is_told(path: Path) -> None:
    lines = messy().splitlines()
    path.write_text("\n".join([lines[0], *lines[1:] * 5]) + "\n")
    remarks = fit_table(path, "price")[1].remarks
    (told,) = (remark for remark in remarks if "every row" in remark)
    assert told.startswith("every row occurs about 5 times: of 300 rows only 60 differ; each count")
    assert told.endswith("any rows held out are among those of training too; keep each row once")
    path.write_text(messy())
    assert not any("every row" in remark for remark in fit_table(path, "price")[1].remarks)


def test_a_level_that_only_held_out_rows_have_lies_outside(path: Path) -> None:
    rng = np.random.default_rng(0)
    town = rng.zipf(1.4, 1000)
    pd.DataFrame({"town": [f"t{i}" for i in town], "y": rng.normal(size=1000)}).to_csv(
        path, index=False
    )
    data, schema = fit_table(path, "y")
    (column,) = schema.columns
    assert isinstance(column, CategoryColumn)
    again = load_table(path, schema)
    assert torch.equal(again.train_inputs, data.train_inputs)
    assert torch.equal(again.test_inputs, data.test_inputs)
    assert torch.equal(again.test_distances, data.test_distances)
    alone = len(set(town)) - len(column.levels)  # levels that only held-out rows have
    assert alone > 10
    assert schema.split["test_outside"] >= alone
    assert int((data.test_distances > 0.0).sum()) == schema.split["test_outside"]
    # Every row for training has an input of its own level, or that of the rare ones.
    assert bool((data.train_inputs.sum(1) == 1.0).all())


def test_two_hundred_levels_have_an_input_each(path: Path) -> None:
    rng = np.random.default_rng(0)
    level = rng.permutation(np.arange(4000) % 200)
    target = rng.normal(size=200)[level] + 0.1 * rng.normal(size=4000)
    pd.DataFrame({"level": [f"level {i}" for i in level], "y": target}).to_csv(path, index=False)
    data, schema = fit_table(path, "y")
    assert len(schema.features) == 200
    assert not any("share one input" in remark for remark in schema.remarks)
    weights = torch.linalg.lstsq(data.train_inputs, data.train_targets).solution
    errors = data.test_targets - data.test_inputs @ weights
    assert float(1.0 - errors.var() / data.test_targets.var()) > 0.98  # 0.99 is not noise


def test_the_schema_gives_the_same_tensors_again(path: Path, tmp_path: Path) -> None:
    path.write_text(messy())
    data, schema = fit_table(path, "price", seed=3)
    schema.save(tmp_path)
    stored = TableSchema.load(tmp_path)
    assert stored == schema
    again = load_table(path, stored)
    for name in ("train_inputs", "train_targets", "test_inputs", "test_targets"):
        assert torch.equal(getattr(again, name), getattr(data, name))
    other = fit_table(path, "price", seed=4)[0]
    assert not torch.equal(other.test_targets, data.test_targets)
    path.write_text(messy() + messy().splitlines()[-1] + "\n")
    with pytest.raises(TableError, match=r"was changed after the run was made: its SHA-256 must"):
        load_table(path, stored)
    path.unlink()
    with pytest.raises(TableError, match="there is no file"):
        load_table(path, stored)


def test_chunks_make_no_difference(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(messy())
    whole, schema = fit_table(path, "price")
    monkeypatch.setattr(table_file, "CHUNK_ROWS", 7)
    pieces, other = fit_table(path, "price")
    assert other == schema
    assert torch.equal(pieces.train_inputs, whole.train_inputs)
    table = NewTable.open(path, schema)
    assert [rows.first for rows in table] == list(range(1, 61, 7))
    assert torch.equal(
        torch.cat([rows.inputs for rows in table]),
        torch.from_numpy(
            schema.encode(schema.parse(next(rechunked(open_table(path).batches(), 60))))
        ),
    )


def test_statistics_are_of_the_training_rows_only(path: Path) -> None:
    path.write_text(messy())
    data, schema = fit_table(path, "price")
    place = schema.features.index("size")
    missing = data.train_inputs[:, schema.features.index("size is missing")] > 0
    known = data.train_inputs[~missing, place].double()
    assert float(known.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(known.std(correction=0)) == pytest.approx(1.0, abs=1e-6)
    assert not data.train_inputs[missing, place].any()


def test_classes_are_held_out_by_their_shares(path: Path) -> None:
    labels = ["a"] * 50 + ["b"] * 30 + ["c"] * 20 + ["once"]
    path.write_text("x,y\n" + "".join(f"{i * 0.37},{y}\n" for i, y in enumerate(labels)))
    data, schema = fit_table(path, "y")
    assert schema.target.classes == ("a", "b", "c", "once")
    assert torch.bincount(data.test_targets, minlength=4).tolist() == [10, 6, 4, 0]
    assert torch.bincount(data.train_targets, minlength=4).tolist() == [40, 24, 16, 1]


WRITINGS = {
    "utf-8 with a mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "utf-16": lambda text: text.encode("utf-16"),
    "gzip": lambda text: gzip.compress(text.encode()),
    "windows lines": lambda text: text.replace("\n", "\r\n").encode(),
    "semicolons": lambda text: text.replace(",", ";").encode(),
    "tabs": lambda text: text.replace(",", "\t").encode(),
    "bars": lambda text: text.replace(",", "|").encode(),
    "blanks": lambda text: text.replace(",", ", ").encode(),
    "blank lines": lambda text: text.replace("\n", "\n\n").encode(),
    "quotes": lambda text: text.replace("Rome", '"Rome"').encode(),
    "trailing separators": lambda text: (
        text.replace("\n", ",\n").replace("price,", "price").encode()
    ),
    "comma decimals": lambda text: text.replace(",", ";").replace(".", ",").encode(),
}


@pytest.mark.parametrize("writing", WRITINGS)
def test_one_table_however_it_is_written(path: Path, writing: str) -> None:
    path.write_text(messy())
    plain, _ = fit_table(path, "price")
    path.write_bytes(WRITINGS[writing](messy()))
    data, schema = fit_table(path, "price")
    assert torch.equal(data.train_inputs, plain.train_inputs)
    assert torch.equal(data.test_targets, plain.test_targets)
    said = " ".join(schema.remarks)
    assert ("separated by" in said) == (writing in ("semicolons", "tabs", "bars", "comma decimals"))


def test_quoted_lines_and_separators_are_text(path: Path) -> None:
    path.write_text(
        "x,note,y\n" + "".join(f'{i * 0.3},"a, {i % 2}\nb",{i * 0.7}\n' for i in range(30))
    )
    _, schema = fit_table(path, "y")
    assert schema.features == ("x", "note = a, 0\nb", "note = a, 1\nb")


def test_text_that_is_not_utf_8_is_read_and_reported(path: Path) -> None:
    rows = "".join(f"{('Köln', 'Bern')[i % 2]},{i * 0.7}\n" for i in range(30))
    path.write_bytes(("city,y\n" + rows).encode("latin-1"))
    _, schema = fit_table(path, "y")
    assert schema.features == ("city = Bern", "city = Köln")
    assert "not UTF-8" in schema.remarks[0]


def test_rows_without_a_target_are_left_out_and_reported(path: Path) -> None:
    rows = [f"{i * 0.3},{i * 0.7}" for i in range(20)] + ["1,", "2,NA", "3,inf", "4,abc"]
    path.write_text("x,y\n" + "\n".join(rows) + "\n")
    data, schema = fit_table(path, "y", task="regression")
    assert len(data.train_targets) + len(data.test_targets) == 20
    said = "4 rows have no usable target 'y' and are left out; 'NA' counts as missing"
    assert said in schema.remarks


@pytest.mark.parametrize(
    ("cell", "remark"),
    [
        ("{}.456", "its points were read as decimal points, though all of them may separate"),
        ('"{},45 €"', "its commas were read as decimal points"),
        ('"{},45 €"', "numbers with the unit '€'"),
        ("{}.5", ""),
    ],
)
def test_the_form_of_the_target_is_reported_as_that_of_an_input(
    path: Path, cell: str, remark: str
) -> None:
    numbers = [cell.format(100 + 7 * i) for i in range(40)]
    path.write_text("x,y\n" + "".join(f"{each},{each}\n" for each in numbers))
    _, schema = fit_table(path, "y")
    for name in ("x", "y"):
        found = [each for each in schema.remarks if each.startswith(f"{name}: ")]
        assert any(remark in each for each in found) == bool(remark), name


def test_targets_that_are_quoted_numbers(path: Path) -> None:
    path.write_text("x,y\n" + "".join(f'{i * 0.3},"{i * 0.7}"\n' for i in range(20)))
    assert fit_table(path, "y")[1].target.task == "regression"


@pytest.mark.parametrize(
    ("targets", "task"),
    [
        ([str(i % 2) for i in range(40)], "classification"),
        ([str(3 + i % 6) for i in range(60)], "classification"),
        ([str(i % 11) for i in range(99)], "regression"),
        ([str(i % 8) for i in range(12)], "regression"),
        ([f"{i % 3}.5" for i in range(40)], "regression"),
        (["yes", "no"] * 20, "classification"),
    ],
)
def test_the_task_follows_the_target(path: Path, targets: list[str], task: str) -> None:
    path.write_text("x,y\n" + "".join(f"{i * 0.3},{y}\n" for i, y in enumerate(targets)))
    assert fit_table(path, "y")[1].target.task == task
    other = "regression" if task == "classification" else "classification"
    if targets[0] != "yes":
        assert fit_table(path, "y", task=other)[1].target.task == other


def test_a_table_too_large_for_memory_is_an_error_before_it_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text(messy())
    monkeypatch.setattr(table_memory, "available_memory", lambda: 1000)
    monkeypatch.setattr(training_table, "_values", lambda *_: pytest.fail("it was read"))
    with pytest.raises(TableError, match=r"needs about .* GB of memory \(60 rows of .*--limit N"):
        fit_table(path, "price")


def test_few_rows_are_reported_and_a_limit_is_kept(path: Path) -> None:
    path.write_text(messy(200))
    data, schema = fit_table(path, "price", limit=12)
    assert len(data.train_targets) + len(data.test_targets) == 12
    assert any("only 10 rows to train on and 2 held out" in remark for remark in schema.remarks)
    assert load_table(path, schema).train_inputs.shape == data.train_inputs.shape


def test_new_rows_that_lie_outside_are_found(path: Path, tmp_path: Path) -> None:
    path.write_text(messy())
    _, schema = fit_table(path, "price")
    new = tmp_path / "new.csv"
    lines = ["sold,city,size,when,other", "yes,Rome,0.5,2024-03-05,x", "no,Paris,,2024-04-05,x"]
    lines += ["yes,Ulm,1e300,2024-03-05,x", "maybe,Oslo,abc,2031-01-01,x", ",Rome,0,,x"]
    new.write_text("\n".join(lines) + "\n")
    table = NewTable.open(new, schema)
    rows = list(table)
    assert rows[0].outside.tolist() == ["", "city", "size", "size", "sold"]
    assert torch.isfinite(rows[0].inputs).all()
    assert (table.rows, table.outside) == (5, 4)
    assert table.warning() == (
        "4 of 5 rows lie far outside the training data, most often in column 'size'"
    )
    assert "'other'" in table.remarks[0]
    inside = NewTable.open(path, schema)
    assert not any(rows.outside.any() for rows in inside)
    assert inside.warning() is None


#: Of a run that an earlier version made; spread over lines.
STORED = """{"format": 1, "versions": {"numpy": "2.4.6", "pandas": "3.1.1"},
"target": {"name": "price", "task": "regression", "classes": [], "decimal_comma": false,
 "shift": 14.90625, "scale": 9.493778801799628},
"columns": [
 {"kind": "category", "name": "city", "missing": false, "levels": ["Oslo", "Rome", "Ulm"],
  "kept": 3},
 {"kind": "number", "name": "size", "missing": true, "mean": 3.7569230769230773,
  "std": 2.2381702163061155, "low": -3.7, "high": 11.100000000000001, "spread": 4.07,
  "decimal_comma": false},
 {"kind": "flag", "name": "sold", "missing": false, "words": ["no", "yes"]},
 {"kind": "date", "name": "when", "missing": false, "mean": 19846.625, "std": 92.87281289484022,
  "low": 19620.25, "high": 20168.75, "spread": 106.75, "form": "ISO8601",
  "cycles": ["year", "week"]}],
"dropped": {"id": "it numbers the rows"}, "carried": ["id"],
"source": {"path": "old.csv",
 "sha256": "e6f2c496877998bb9b905ed502178f9bee31bc6cbcb803b68d22a968f2f07497",
 "columns": ["id", "city", "size", "sold", "when", "price"]},
"split": {"seed": 0, "fraction": 0.2, "limit": null, "train": 16, "test": 4, "test_outside": 0},
"remarks": []}"""
#: The held-out inputs of that run, as it computed them.
STORED_INPUTS = """\
0 1 0 -0.6866872906684875 0 -1 0.6716174483299255 -0.05645957961678505 -0.998404860496521
0.7818315029144287 0.6234897971153259
1 0 0 -0.5213736891746521 0 1 1.0054072141647339 -0.556174635887146 -0.8310654163360596
-0.4338837265968323 -0.9009688496589661
0 0 1 -0.35606008768081665 0 -1 1.339197039604187 -0.9014301896095276 -0.4329244792461395
1.0412982596411796e-13 1
1 0 0 -0.02543286234140396 0 -1 1.996009349822998 -0.8244113922119141 0.5659910440444946
-0.9749279022216797 -0.22252093255519867"""


def test_the_schema_of_an_older_run_gives_the_inputs_that_it_gave(path: Path) -> None:
    lines = ["id,city,size,sold,when,price"]
    for i in range(20):
        size = "" if i % 9 == 0 else f"{i * 0.37:.2f}"
        lines.append(
            f"{i + 1},{('Rome', 'Oslo', 'Ulm')[i % 3]},{size},{('no', 'yes')[i % 2]},"
            f"2024-{1 + i % 12:02d}-05,{i * 1.5:.1f}"
        )
    path.write_text("\n".join(lines) + "\n")
    (path.parent / "table.json").write_text(STORED)
    data = load_table(path, TableSchema.load(path.parent))
    expected = np.array(STORED_INPUTS.split(), dtype=np.float32).reshape(4, -1)
    assert torch.equal(data.test_inputs, torch.from_numpy(expected))


@pytest.mark.parametrize("damage", ["", "[]", '{"format": 1}', '{"format": 9}', "nonsense"])
def test_a_damaged_schema_is_an_error(tmp_path: Path, damage: str) -> None:
    (tmp_path / "table.json").write_text(damage)
    with pytest.raises(TableError, match=r"table\.json cannot be read"):
        TableSchema.load(tmp_path)


def test_an_altered_schema_is_an_error(path: Path, tmp_path: Path) -> None:
    """A digit of a mean would change every prediction."""
    path.write_text(messy())
    schema = fit_table(path, "price")[1]
    schema.save(tmp_path)
    file = tmp_path / "table.json"
    text = file.read_text()
    mean = re.search(r'"mean": -?\d', text)
    assert mean is not None
    digit = mean[0][-1]
    file.write_text(text.replace(mean[0], f"{mean[0][:-1]}{(int(digit) + 1) % 10}", 1))
    with pytest.raises(
        TableError, match=r"table\.json cannot be read: it was altered after it was"
    ):
        TableSchema.load(tmp_path)
    # Runs of earlier versions have no digest.
    file.write_text(re.sub(r',\s*"document_sha256": "\w*"', "", text))
    assert file.read_text() != text
    assert TableSchema.load(tmp_path) == schema


def test_a_name_that_is_not_utf_8_is_read_again(path: Path, tmp_path: Path) -> None:
    path.write_text(messy())
    schema = fit_table(path, "price")[1]
    # As the operating system's functions give the name of a file in Latin-1.
    source = {**schema.source, "path": "caf\udce9.csv"}
    schema = dataclasses.replace(schema, source=source)
    schema.save(tmp_path)
    assert b"caf\xe9.csv" in (tmp_path / "table.json").read_bytes()
    assert TableSchema.load(tmp_path) == schema


def test_the_schema_is_plain_json(path: Path, tmp_path: Path) -> None:
    path.write_text(messy())
    fit_table(path, "price")[1].save(tmp_path)
    stored = json.loads(
        (tmp_path / "table.json").read_text(), parse_constant=lambda name: pytest.fail(name)
    )
    assert stored["versions"].keys() == {"numpy", "pandas"}


@pytest.mark.parametrize("texts", [["3.5", "3.50"], ["0", "-0.0"], ["2,5", "2,50"]])
def test_one_number_written_in_two_ways_is_one_value(path: Path, texts: list[str]) -> None:
    rows = "".join(f"{i / 7};{texts[i % 2]}\n" for i in range(40))
    path.write_text("x;y\n" + rows)
    with pytest.raises(TableError, match="one value only"):
        fit_table(path, "y")


@pytest.mark.parametrize("prefix", ["", "c"], ids=["numbers", "20 classes"])
def test_what_measuring_takes_is_counted_before_training(
    path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    path.write_text("x,y\n" + "".join(f"{i / 7},{prefix}{i % 20}.5\n" for i in range(60)))
    monkeypatch.setattr(table_memory, "available_memory", lambda: 60 * 600)
    with pytest.raises(TableError, match="GB of memory"):
        fit_table(path, "y")
    monkeypatch.setattr(table_memory, "available_memory", lambda: 60 * 1200)
    assert fit_table(path, "y")[0].train_inputs.shape == (48, 1)


def test_a_wild_target_moves_neither_the_scaling_nor_the_other_rows(path: Path) -> None:
    rows = [f"{i / 7},{i * 1.5}\n" for i in range(60)]
    path.write_text("x,y\n" + "".join(rows))
    clean = fit_table(path, "y")[1]
    rows[31] = f"{31 / 7},1e9\n"
    path.write_text("x,y\n" + "".join(rows))
    data, schema = fit_table(path, "y")
    assert schema.target.scale == pytest.approx(clean.target.scale, rel=0.05)
    assert data.train_targets.abs().max() < 3.0
    assert any("1 target lies more than 10" in remark for remark in schema.remarks)
    again = load_table(path, schema)
    assert torch.equal(again.train_targets, data.train_targets)


Rows = list[list[str]]


def cells(path: Path, text: str, limit: int | None = None) -> tuple[tuple[str, ...], Rows]:
    """The names and the rows of a file of this text."""
    path.write_text(text, newline="")
    file = open_table(path)
    rows = [row for part in file.chunks() for row in part.to_numpy().tolist()]
    return file.columns, rows[:limit]


def test_an_empty_line_of_a_single_column_is_a_row(path: Path) -> None:
    text = "x\n1.0\n\n-1.0\n\n0.5\n"
    rows = [["1.0"], [""], ["-1.0"], [""], ["0.5"]]
    assert cells(path, text) == cells(path, f"{text}\n\n") == (("x",), rows)
    assert cells(path, text.replace("\n", "\r\n"))[1] == rows
    for limit in range(1, 7):
        assert cells(path, f"{text}\n\n", limit=limit)[1] == rows[:limit]
    assert cells(path, 'x\n""\n1\n""\n')[1] == [[""], ["1"], [""]]
    assert cells(path, "x,y\n1,2\n\n3,4\n\n")[1] == [["1", "2"], ["3", "4"]]


def test_without_names_a_line_without_a_value_is_a_row(path: Path) -> None:
    path.write_text(",\n1,2\n3,4\n")
    rows = [part.to_numpy().tolist() for part in open_table(path, headless=True).chunks()]
    assert rows == [[["", ""], ["1", "2"], ["3", "4"]]]


@pytest.mark.parametrize("above", ["\n", ",\n", "\n,\n\n", ";;\n"])
def test_lines_without_a_value_above_the_names_are_no_header(path: Path, above: str) -> None:
    separator = ";" if ";" in above else ","
    text = f"{above}x,z\n1.0,a\n-1.0,b\n".replace(",", separator)
    assert cells(path, text) == (("x", "z"), [["1.0", "a"], ["-1.0", "b"]])


def test_a_single_column_may_have_decimal_commas(path: Path) -> None:
    assert cells(path, "area\n12,5\n13\n-0,25\n") == (("area",), [["12,5"], ["13"], ["-0,25"]])
    assert open_table(path).has_decimal_commas
    with pytest.raises(TableError, match="remove the lines above the names"):
        cells(path, "My areas\n12,5,1\n13,2,4\n")


def test_years_of_two_digits_are_named(path: Path) -> None:
    rows = "".join(f"{1 + i % 28:02d}.{1 + i % 12:02d}.{40 + i},{i * 0.7}\n" for i in range(40))
    path.write_text("born,y\n" + rows)
    _, schema = fit_table(path, "y")
    assert any("born: years of two digits were read as 1969 to 2068" in r for r in schema.remarks)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (
            [f"2024-01-{1 + i % 20:02}" for i in range(60)],
            "y: its 20 different texts in 60 rows, such as '2024-01-01', were taken for classes; "
            "convert its dates to numbers, such as days, and use --task regression",
        ),
        (
            ["TRUE", "true", "False"] * 20,
            "y: 'TRUE' and 'true' are 2 classes, though they differ in upper and lower case only; "
            "write them alike if they are one",
        ),
        (["TRUE", "False"] * 30, None),
        ([f"level {i % 12}" for i in range(60)], None),
    ],
)
def test_what_was_taken_for_classes_is_said_where_it_may_be_wrong(
    tmp_path: Path, cells: list[str], said: str | None
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + "".join(f"{i * i / 7},{cell}\n" for i, cell in enumerate(cells)))
    _, schema = fit_table(path, "y")
    assert schema.target.classes == tuple(sorted(set(cells)))
    found = [each for each in schema.remarks if "classes" in each]
    assert found == ([said] if said else [])
    for options in ({"task": "classification"}, {"ordered": sorted(set(cells))}):
        _, asked = fit_table(path, "y", **options)  # type: ignore[arg-type]
        assert not [each for each in asked.remarks if "classes" in each]


def test_labels_that_differ_in_case_are_one_note(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    cells = ["low", "Low", "high", "High", "HIGH"] * 12
    path.write_text("x,y\n" + "".join(f"{i * i / 7},{cell}\n" for i, cell in enumerate(cells)))
    found = [each for each in fit_table(path, "y")[1].remarks if "case only" in each]
    assert found == [
        "y: 'HIGH' and 'High' and 'high' are 3 classes, though they differ in upper and lower case "
        "only, as others do; write them alike if they are one"
    ]
