"""A streamed table: the same schema and inputs as in memory, one split, a fair order."""

from __future__ import annotations

import dataclasses
import math
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from bayesify.tabular.columns import CategoryColumn, NumberColumn
from bayesify.tabular.files import TableError
from bayesify.tabular.rows import TableRows
from bayesify.tabular.schema import TableSchema
from bayesify.tabular.streaming.encoded import EncodedRows, write_encoded
from bayesify.tabular.streaming.fit import fit_stream, load_stream, write_stream
from bayesify.tabular.streaming.memory import TrainingMemory
from bayesify.tabular.streaming.sample import RowSample, hash_key, row_hashes
from bayesify.tabular.streaming.scan import StreamScan
from bayesify.tabular.table_data import TableData
from bayesify.tabular.training_table import fit_table

ROWS = 3000
#: All rows are in the sample; a part of them is.
WHOLE = TrainingMemory(0, 500, 5000, 600, 10**6)
PART = TrainingMemory(0, 400, 1500, 300, 10**6)


def frame(rows: int = ROWS) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 3))
    x[:, 1] = np.exp(2.0 * x[:, 1])
    x[generator.random(rows) < 0.1, 2] = np.nan
    city = np.array(["Rome", "Oslo", "Ulm"])[generator.integers(3, size=rows)]
    when = pd.Timestamp("2020-01-01") + pd.to_timedelta(generator.integers(900, size=rows), "D")
    y = np.sin(x[:, 0]) + (city == "Oslo") + 0.1 * generator.normal(size=rows)
    table = {"id": np.arange(1, rows + 1), "a": x[:, 0], "skewed": x[:, 1], "gaps": x[:, 2]}
    return pd.DataFrame({**table, "city": city, "when": when, "y": y})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("streamed") / "table.parquet"
    frame().to_parquet(found, row_group_size=700)
    return found


def streamed(
    path: Path, folder: Path, memory: TrainingMemory = WHOLE, target: str = "y", **options: object
) -> tuple[TableData, TableSchema]:
    data, schema = fit_stream(path, target, memory=memory, folder=folder, **options)
    assert data.stream is not None
    write_stream(path, schema, data.stream)
    return data, schema


def read(data: TableData, batch_size: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    """All training rows from the file."""
    assert data.stream is not None
    parts = list(data.stream.loader(batch_size, seed=0))
    x, y = (torch.cat(part) for part in zip(*parts, strict=True))
    return x, y


def in_order(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.lexsort(x.numpy().T[::-1]).copy())


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_a_sample_of_all_rows_gives_what_memory_gives(
    path: Path, tmp_path: Path, suffix: str
) -> None:
    file = tmp_path / f"t.{suffix}"
    if suffix == "csv":
        frame().to_csv(file, index=False)
    else:
        file.write_bytes(path.read_bytes())
    data, schema = streamed(file, tmp_path)
    _, in_memory = fit_table(file, "y")
    assert schema.dropped == in_memory.dropped
    assert schema.carried == in_memory.carried == ("id",)
    # The rows for training alone, in memory.
    hashes = row_hashes(0, ROWS, hash_key(0))
    train = hashes > schema.split["streamed"]["threshold"]
    assert train.sum() == data.num_train == ROWS - len(data.test_inputs)
    frame()[train].to_parquet(tmp_path / "train.parquet")
    same, known = fit_table(tmp_path / "train.parquet", "y", test_fraction=0.0, drop=["id"])
    by_name = {column.name: column for column in known.columns}
    for column in schema.columns:
        if not isinstance(column, CategoryColumn):  # whose levels are in the order of all rows
            assert column == by_name[column.name]
    assert schema.target == known.target
    x, y = read(data)
    order, other = in_order(x), in_order(data.train_inputs)
    assert torch.equal(x[order], data.train_inputs[other])
    assert torch.equal(y[order], data.train_targets[other])
    assert torch.equal(data.train_targets, same.train_targets)


@pytest.mark.parametrize("memory", [WHOLE, PART], ids=["all", "a part"])
def test_a_level_that_only_held_out_rows_have_lies_outside(
    tmp_path: Path, memory: TrainingMemory
) -> None:
    rng = np.random.default_rng(0)
    town = np.array([f"t{i}" for i in rng.zipf(1.5, ROWS)], dtype=object)
    table = pd.DataFrame({"town": town, "y": rng.normal(size=ROWS)})
    table.to_parquet(tmp_path / "t.parquet")
    data, schema = streamed(tmp_path / "t.parquet", tmp_path, memory)
    train = row_hashes(0, ROWS, hash_key(0)) > schema.split["streamed"]["threshold"]
    (column,) = schema.columns
    assert isinstance(column, CategoryColumn)
    assert set(column.levels) == set(town[train])
    unknown = set(town) - set(column.levels)
    assert len(unknown) > 10
    expected = sum(name in unknown for name in town[~train])
    assert schema.split["test_outside"] == expected == int((data.test_distances > 0.0).sum())


@pytest.mark.parametrize("in_order", [True, False])
def test_a_number_that_repeats_is_no_identifier_however_many_there_are(in_order: bool) -> None:
    ids = np.tile(np.arange(5, 150_010), 2)  # the first repeats after there were too many to count
    table = pd.DataFrame({"customer_id": np.sort(ids) if in_order else ids})
    for cells in (
        pa.Table.from_pandas(table),
        pa.table({"customer_id": table["customer_id"].astype(str)}),
    ):
        scan = StreamScan("customer_id")
        for start in range(0, len(table), 50_000):
            scan.read(TableRows(cells.slice(start, 50_000)))
        scan.finish()
        assert scan.overflowed
        assert scan.reason_to_drop() is None
    once = StreamScan("customer_id")
    once.read(TableRows(pa.table({"customer_id": np.random.default_rng(0).permutation(200_000)})))
    once.finish()
    assert once.reason_to_drop() == "it identifies rows: whole numbers, all different"


def test_levels_that_are_too_many_to_count_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bayesify.tabular.detect._MOST_TEXTS", 200)
    rng = np.random.default_rng(0)
    town = np.array([f"t{i}" for i in rng.integers(400, size=ROWS)], dtype=object)
    town[1] = "late"
    town[ROWS // 2 :][rng.random(ROWS - ROWS // 2) < 0.6] = "late"
    table = pd.DataFrame({"town": town, "y": rng.normal(size=ROWS)})
    table.to_parquet(tmp_path / "t.parquet")
    _, schema = streamed(tmp_path / "t.parquet", tmp_path, PART, keep=["town"])
    (column,) = schema.columns
    assert isinstance(column, CategoryColumn)
    assert "late" in column.levels


def test_statistics_of_a_sample_are_close_to_those_of_all_rows(path: Path, tmp_path: Path) -> None:
    data, schema = streamed(path, tmp_path, PART)
    assert len(data.train_inputs) == 1500
    assert schema.split["sample"] == 1500
    train = ROWS - len(data.test_inputs)
    assert schema.split["train"] == train
    x, y = read(data)
    assert len(x) == train
    assert any("quantiles are of a sample of 1,500 training rows" in r for r in schema.remarks)
    # Means and standard deviations of columns without wild numbers are of all training rows.
    numbers = {column.name: column for column in schema.columns if column.kind == "number"}
    places = {name: place for place, name in enumerate(schema.features)}
    column = x[:, places["a"]].double()
    assert abs(float(column.mean())) < 1e-3
    assert abs(float(column.std(correction=0)) - 1.0) < 1e-3
    assert abs(float(y.double().mean())) < 1e-5
    in_memory = {each.name: each for each in fit_table(path, "y")[1].columns}
    for name, found in numbers.items():
        known = in_memory[name]
        assert isinstance(found, NumberColumn)
        assert isinstance(known, NumberColumn)
        assert found.missing == known.missing
        for q, value in zip((0.25, 0.5, 0.75), found.typical[1:-1], strict=True):
            below = float((frame()[name] <= value).sum() / frame()[name].notna().sum())
            assert abs(below - q) < 4.0 * 0.5 / math.sqrt(1500)
    levels = [each for each in schema.columns if isinstance(each, CategoryColumn)]
    assert levels[0] == in_memory["city"]


def test_every_pass_and_every_size_of_chunks_hold_out_the_same_rows(
    path: Path, tmp_path: Path
) -> None:
    one, schema = streamed(path, tmp_path)
    (tmp_path / "other").mkdir()
    smaller = dataclasses.replace(WHOLE, rows=111)
    other, again = streamed(path, tmp_path / "other", smaller)
    assert torch.equal(one.test_inputs, other.test_inputs)
    assert torch.equal(one.train_inputs, other.train_inputs)
    assert again.columns == schema.columns
    assert [torch.equal(*pair) for pair in zip(read(one), read(other), strict=True)] == [True] * 2
    (tmp_path / "seed").mkdir()
    third, _ = streamed(path, tmp_path / "seed", seed=1)
    assert not torch.equal(one.test_targets, third.test_targets)
    # No row is in both parts.
    both = torch.cat([read(one)[0], one.test_inputs])
    assert len(torch.unique(both, dim=0)) == ROWS


def test_a_word_that_the_sample_lacks_is_not_outside(tmp_path: Path) -> None:
    table, lacks = frame()[["a", "y"]], False
    for row in range(4):
        table["sold"] = np.where(np.arange(ROWS) == row, "no", "yes")
        table.to_parquet(tmp_path / f"{row}.parquet")
        data, schema = streamed(tmp_path / f"{row}.parquet", tmp_path, PART)
        lacks |= bool((data.train_inputs[:, schema.features.index("sold")] == 1.0).all())
        flag = next(each for each in schema.columns if each.name == "sold")
        assert flag.outside(np.array([0.0, 1.0])).tolist() == [0.0, 0.0]
    assert lacks, "no case was a test"


def test_classes_have_the_shares_of_all_training_rows(path: Path, tmp_path: Path) -> None:
    data, schema = streamed(path, tmp_path, PART, "city")
    _, y = read(data)
    assert data.class_names == ("Oslo", "Rome", "Ulm")
    shares = y.bincount(minlength=3).double() / len(y)
    assert schema.target.marginal == pytest.approx(shares.tolist(), abs=1e-12)


def test_whole_numbers_stored_as_such_can_be_classes(tmp_path: Path) -> None:
    table = frame().assign(grade=lambda each: (each["a"] > 0.0).astype(int) + 1)
    for name, stored in (("int", table), ("float", table.assign(grade=table["grade"] * 1.0))):
        stored.to_parquet(tmp_path / f"{name}.parquet")
        data, schema = fit_stream(
            tmp_path / f"{name}.parquet", "grade", memory=WHOLE, folder=tmp_path
        )
        assert schema.target.classes == ("1", "2") == data.class_names
        in_memory = fit_table(tmp_path / f"{name}.parquet", "grade")[1]
        assert in_memory.target.classes == schema.target.classes
        assert in_memory.dropped.keys() == schema.dropped.keys()


@pytest.mark.parametrize(
    "classes",
    [
        pa.array([Decimal("1.50"), Decimal("2.50"), Decimal("3.00")]),
        pa.array([7, 10**15, 10**15 + 1]),
        pa.array([7, 2**60, 2**60 + 1]),
    ],
)
def test_classes_stored_as_exact_numbers_keep_their_rows(classes: pa.Array, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=300)
    path = tmp_path / "t.parquet"
    stored = classes.take(pa.array(np.arange(300) % len(classes)))
    parquet.write_table(pa.table({"x": x, "y": stored}), path)
    data, schema = streamed(path, tmp_path, task="classification")
    assert schema.target.classes == fit_table(path, "y", task="classification")[1].target.classes
    _, y = read(data)
    assert len(y) == 240
    assert len(y.unique()) == len(classes)


def test_a_column_of_views_is_text(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    table = pa.Table.from_pandas(frame(), preserve_index=False)
    place = table.column_names.index("city")
    views = table["city"].cast(pa.string()).cast(pa.string_view())
    parquet.write_table(table.set_column(place, "city", views), path)
    _, schema = streamed(path, tmp_path)
    assert next(each for each in schema.columns if each.name == "city").kind == "category"


def test_a_scan_keeps_few_of_many_long_texts() -> None:
    scan = StreamScan("note")
    for start in (0, 3000):
        texts = ["word " * 1800 + str(place) for place in range(start, start + 3000)]
        scan.read(TableRows(pa.table({"note": texts})))
    assert scan.count == 6000
    assert sum(map(len, scan.texts)) <= 17_000_000
    assert "free text" in str(scan.reason_to_drop())


def test_rows_without_a_target_are_left_out(tmp_path: Path) -> None:
    table = frame()
    table.loc[::7, "y"] = None
    table.to_parquet(tmp_path / "t.parquet")
    data, schema = streamed(tmp_path / "t.parquet", tmp_path, PART)
    known = int(table["y"].notna().sum())
    assert schema.split["train"] + schema.split["test"] == known
    assert any("429 rows have no usable target" in remark for remark in schema.remarks)
    assert len(read(data)[0]) == schema.split["train"]


@pytest.mark.parametrize("odd", ["n.d.", "inf"])
@pytest.mark.parametrize("form", ["{}", "\u20ac{}"])
def test_cells_that_are_no_numbers_are_left_out_as_in_memory(
    odd: str, form: str, tmp_path: Path
) -> None:
    texts = [form.format(13 + 7 * i % 90) for i in range(600)]
    texts[8] = odd
    lines = [f"{i % 17 + 0.5},{text}" for i, text in enumerate(texts)]
    (tmp_path / "t.csv").write_text("\n".join(["x,visits", *lines]) + "\n")
    _, in_memory = fit_table(tmp_path / "t.csv", "visits", likelihood="poisson")
    data, schema = streamed(tmp_path / "t.csv", tmp_path, PART, "visits", likelihood="poisson")
    assert schema.split["train"] + schema.split["test"] == 599
    assert len(read(data)[0]) == schema.split["train"]
    for found in (schema, in_memory):
        assert sum("as missing" in remark for remark in found.remarks) == 1
        assert any("1 row has no usable target" in remark for remark in found.remarks)


def test_counts_with_points_between_thousands_are_whole(tmp_path: Path) -> None:
    texts = [f"{1 + i % 9}.{i % 1000:03d}" if i % 2 else f"{i}" for i in range(1, 601)]
    texts[3] = "1.234.567"
    lines = [f"{i % 17};{text}" for i, text in enumerate(texts)]
    (tmp_path / "t.csv").write_text("\n".join(["x;visits", *lines]) + "\n")
    _, schema = streamed(tmp_path / "t.csv", tmp_path, PART, "visits", likelihood="poisson")
    assert schema.target.thousands == "."
    assert schema.split["train"] + schema.split["test"] == 600


def test_counts_that_are_not_whole_are_an_error(tmp_path: Path) -> None:
    lines = [f"{i % 17 + 0.5},{13 + 7 * i % 90}" for i in range(600)]
    lines[300] = "1.5,2.5"
    (tmp_path / "t.csv").write_text("\n".join(["x,visits", *lines]) + "\n")
    with pytest.raises(TableError, match="must hold counts, integers"):
        streamed(tmp_path / "t.csv", tmp_path, PART, "visits", likelihood="poisson")


def test_few_rows_of_a_sample_are_not_few_rows(tmp_path: Path) -> None:
    table = frame()
    table.loc[np.arange(len(table)) % 20 > 0, "y"] = None
    table.to_parquet(tmp_path / "t.parquet")
    _, schema = streamed(tmp_path / "t.parquet", tmp_path, PART)
    assert schema.split["train"] > 100
    assert not [remark for remark in schema.remarks if "there are only" in remark]


def test_wild_targets_count_as_the_nearest_of_the_others(tmp_path: Path) -> None:
    table = frame()
    table.loc[5::50, "y"] = 1e9
    table.to_parquet(tmp_path / "t.parquet")
    data, _ = streamed(tmp_path / "t.parquet", tmp_path)
    x, y = read(data)
    order, other = in_order(x), in_order(data.train_inputs)
    assert torch.equal(y[order], data.train_targets[other])
    assert float(y.abs().max()) < 10.0


def test_no_row_is_held_out_on_request(path: Path, tmp_path: Path) -> None:
    data, _ = streamed(path, tmp_path, PART, test_fraction=0.0)
    assert len(data.test_inputs) == 0
    assert len(read(data)[0]) == ROWS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "nothing"}, "has no column 'nothing'"),
        ({"target": "y", "drop": ["a", "skewed", "gaps", "city", "when"]}, "no column to predict"),
        ({"target": "y", "likelihood": "poisson"}, "must hold counts, integers from 0"),
    ],
)
def test_a_table_that_cannot_be_used(
    path: Path, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(TableError, match=message):
        streamed(path, tmp_path, **options)  # type: ignore[arg-type]


def test_a_table_that_was_changed_between_the_passes(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "t.parquet"
    copy.write_bytes(path.read_bytes())
    data, schema = fit_stream(copy, "y", memory=WHOLE, folder=tmp_path)
    frame(100).to_parquet(copy)
    assert data.stream is not None
    with pytest.raises(TableError, match="was changed after the run was made"):
        write_stream(copy, schema, data.stream)
    assert not data.stream.path.exists()
    with pytest.raises(TableError, match=r"must have table\.safetensors"):
        load_stream(copy, schema, tmp_path)


def test_too_few_or_too_many_encoded_rows_leave_no_file(tmp_path: Path) -> None:
    rows = EncodedRows(tmp_path / "t.arrow", 5, 2, (1,), 100, "sha")
    for count in (4, 6):
        with pytest.raises(TableError, match=f"must have 5 rows to train on, got {count}"):
            write_encoded(rows, [(torch.zeros(count, 2), torch.zeros(count, 1))])
    assert list(tmp_path.iterdir()) == []
    write_encoded(rows, [(torch.zeros(5, 2), torch.zeros(5, 1))])
    assert rows.is_there()
    assert not dataclasses.replace(rows, source="other").is_there()
    rows.path.write_bytes(rows.path.read_bytes()[:-100])
    assert not rows.is_there()


def sorted_rows(folder: Path, count: int, buffer_rows: int) -> EncodedRows:
    """Rows whose only input grows with their number: the worst case of a shuffle by blocks."""
    rows = EncodedRows(folder / "sorted.arrow", count, 1, (), buffer_rows, "sha")
    if not rows.path.exists():
        x = torch.linspace(0.0, 1.0, count)
        write_encoded(rows, [(x.unsqueeze(1), torch.arange(count))])
    return rows


def test_an_epoch_has_every_row_once_in_another_order_than_the_last(tmp_path: Path) -> None:
    rows = sorted_rows(tmp_path, 10_000, 2048)
    loader = rows.loader(300, seed=0)
    epochs = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        batches = [y for _, y in loader]
        assert [len(y) for y in batches] == [300] * 33 + [100]
        assert len(batches) == len(loader)
        epochs.append(torch.cat(batches))
        assert torch.equal(epochs[-1].sort().values, torch.arange(10_000))
    assert torch.equal(epochs[0], epochs[2])
    assert not torch.equal(epochs[0], epochs[1])


def test_minibatches_of_a_sorted_table_vary_as_the_documentation_says(tmp_path: Path) -> None:
    batch, count = 128, 40_000
    rows = sorted_rows(tmp_path, count, 8192)  # 32 blocks at once
    means = []
    for seed in range(40):
        batches = rows.loader(batch, seed=seed)
        means += [float(x.mean()) for x, _ in batches if len(x) == batch]
    full = 1.0 / 12.0 / batch * (1.0 - batch / count)
    blocks, together = -(-count // rows.block_rows), 8192 // rows.block_rows
    expected = 1.0 + batch / together * (1.0 - together / blocks)
    assert np.var(means) / full == pytest.approx(expected, rel=0.25)


def test_a_minibatch_may_be_larger_than_the_table(tmp_path: Path) -> None:
    loader = sorted_rows(tmp_path, 40, 40).loader(100, seed=0)
    assert [len(y) for _, y in loader] == [40]


def test_a_buffer_for_all_rows_is_a_permutation_of_all(tmp_path: Path) -> None:
    batch, count = 128, 40_000
    rows = sorted_rows(tmp_path, count, count)
    means = [
        float(x.mean())
        for seed in range(12)
        for x, _ in rows.loader(batch, seed=seed)
        if len(x) == batch
    ]
    full = 1.0 / 12.0 / batch * (1.0 - batch / count)
    assert np.var(means) / full == pytest.approx(1.0, rel=0.15)


def test_hashes_are_uniform_and_a_sample_is_the_smallest(tmp_path: Path) -> None:
    hashes = row_hashes(0, 100_000, key=7) / 2.0**64
    counts = np.histogram(hashes, bins=50, range=(0.0, 1.0))[0]
    assert ((counts - 2000.0) ** 2 / 2000.0).sum() < 100.0  # chi-square with 49 degrees
    assert np.array_equal(row_hashes(50, 10, key=7), row_hashes(0, 60, key=7)[50:])
    sample = RowSample(100, ["x"], key=7)
    for start in range(0, 5000, 300):
        count = min(300, 5000 - start)
        sample.update(TableRows(pa.table({"x": np.arange(start, start + count)})))
    smallest = np.sort(np.argsort(row_hashes(0, 5000, key=7))[:100])
    assert sample.numbers().tolist() == smallest.tolist()
    assert sample.rows().numbers("x").tolist() == smallest.tolist()


def test_a_remark_names_the_row_of_the_table_and_not_its_place_in_the_sample(
    tmp_path: Path,
) -> None:
    table = frame()
    hashes = row_hashes(0, ROWS, hash_key(0))
    row = int(np.flatnonzero(hashes == np.sort(hashes)[PART.held_rows + 10])[0])
    table.loc[row, "y"] = 1e9
    path = tmp_path / "t.parquet"
    table.to_parquet(path)
    _, schema = fit_stream(path, "y", memory=PART, folder=tmp_path)
    assert any(f"'y' is 1e+09 in row {row + 1:,}, where" in each for each in schema.remarks)
    assert any("wild or at a limit, are of the rows drawn" in each for each in schema.remarks)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (1, 2)])
def test_the_bytes_of_encoded_rows_are_told_beforehand(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    rows = EncodedRows(tmp_path / "t.arrow", 50_000, 2, shape, 100, "sha")
    kind = torch.float32 if shape else torch.int64
    write_encoded(rows, [(torch.zeros(50_000, 2), torch.zeros(50_000, *shape, dtype=kind))])
    assert 1.0 <= rows.path.stat().st_size / rows.num_bytes < 1.1


def test_dates_that_cannot_be_read_count_as_missing_wherever_they_are(tmp_path: Path) -> None:
    table = frame()
    table["when"] = table["when"].dt.strftime("%Y-%m-%d")
    for name, cells in (("none", []), ("some", [5, 777])):
        table.loc[cells, "when"] = "soon"
        path = tmp_path / f"{name}.csv"
        table.to_csv(path, index=False)
        memory = dataclasses.replace(PART, sample_rows=100)
        (tmp_path / name).mkdir()
        _, schema = streamed(path, tmp_path / name, memory)
        [column] = [each for each in schema.columns if each.name == "when"]
        assert column.missing == bool(cells)
