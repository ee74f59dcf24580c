"""A Parquet file gives the same inputs as the same table in a CSV file."""

from __future__ import annotations

import datetime
import decimal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from bayesify.tabular.files import TableError, open_table, table_file, table_of
from bayesify.tabular.new_table import NewTable
from bayesify.tabular.training_table import fit_table, load_table

ROWS = 60


def typed() -> pa.Table:
    """A table with a column of every type that has a text."""
    generator = np.random.default_rng(0)
    numbers = generator.normal(size=ROWS) * 10.0 ** generator.integers(-20, 20, ROWS)
    day = datetime.datetime(2024, 1, 5)
    times = [day + datetime.timedelta(days=5 * i, minutes=i) for i in range(ROWS)]
    columns = {
        "double": pa.array([None if i % 9 == 0 else x for i, x in enumerate(numbers)]),
        "nan": pa.array(np.where(np.arange(ROWS) % 7 == 0, np.nan, numbers)),
        "single": pa.array(numbers.astype(np.float32)),
        "whole": pa.array([None if i % 5 == 0 else i * i % 37 for i in range(ROWS)]),
        "flag": pa.array([i % 3 == 0 for i in range(ROWS)]),
        "day": pa.array([time.date() for time in times]),
        "time": pa.array(times, pa.timestamp("us")),
        "zone": pa.array(times, pa.timestamp("ms", tz="Europe/Berlin")),
        "money": pa.array([decimal.Decimal(i * i).scaleb(-2) for i in range(ROWS)]),
        "text": pa.array([(None, "Rome", "Oslo, N", 'a "b"')[i % 4] for i in range(ROWS)]),
        "level": pa.array(["x", "y", "z"] * (ROWS // 3)).dictionary_encode(),
        "target": pa.array(generator.normal(size=ROWS)),
    }
    return pa.table(columns)


def written(folder: Path, table: pa.Table) -> tuple[Path, Path]:
    """The table as a CSV and as a Parquet file of several row groups."""
    parquet.write_table(table, folder / "t.parquet", row_group_size=25)
    table.to_pandas().to_csv(folder / "t.csv", index=False)
    return folder / "t.csv", folder / "t.parquet"


@pytest.mark.parametrize(("target", "limit"), [("target", None), ("level", None), ("whole", 31)])
def test_inputs_and_targets_equal_those_of_the_csv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, limit: int | None
) -> None:
    monkeypatch.setattr(table_file, "CHUNK_ROWS", 17)
    paths = written(tmp_path, typed())
    (one, schema), (other, typed_schema) = (fit_table(p, target, limit=limit) for p in paths)
    assert typed_schema.columns == schema.columns
    assert typed_schema.target == schema.target
    for name in ("train_inputs", "train_targets", "test_inputs", "test_targets"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert torch.equal(load_table(paths[1], typed_schema).test_inputs, other.test_inputs)
    # A network that was trained on one predicts from the other.
    new = [torch.cat([rows.inputs for rows in NewTable.open(p, schema)]) for p in paths]
    assert torch.equal(*new)
    kinds = {column.name: column.kind for column in schema.columns}
    expected = {
        **dict.fromkeys(("double", "nan", "single", "whole", "money"), "number"),
        **dict.fromkeys(("day", "time", "zone"), "date"),
        "flag": "flag",
        "text": "category",
        "level": "category",
    }
    assert kinds.items() <= {**expected, "target": "number"}.items()
    assert kinds.keys() | {target} == {*expected, "target"}


def test_columns_without_a_text_are_named_and_not_read(tmp_path: Path) -> None:
    table = typed().select(["double", "target"])
    table = table.append_column("list", pa.array([[1, 2]] * ROWS))
    table = table.append_column("bytes", pa.array([b"\xff"] * ROWS))
    parquet.write_table(table, tmp_path / "t.parquet")
    data, schema = fit_table(tmp_path / "t.parquet", "target")
    assert [column.name for column in schema.columns] == ["double"]
    assert data.train_inputs.shape == (48, len(schema.features))
    assert [remark.partition(":")[0] for remark in schema.remarks[:2]] == ["list", "bytes"]
    assert "of binary is no column of a table" in schema.remarks[1]


def test_an_index_that_numbers_the_rows_is_dropped(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": np.arange(9) ** 2 / 7, "y": np.arange(9) ** 3 / 7})
    frame.index = pd.Index([5 * i * i + 3 for i in range(9)])
    frame.to_parquet(tmp_path / "t.parquet")
    _, schema = fit_table(tmp_path / "t.parquet", "y")
    assert [column.name for column in schema.columns] == ["x"]
    assert "identifies rows" in schema.dropped["__index_level_0__"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_text("x,y\n1,2\n")
    with pytest.raises(TableError, match=r"cannot be read as Parquet: .*magic bytes"):
        open_table(path)
    parquet.write_table(pa.table({"x": [[1]]}), path)
    with pytest.raises(TableError, match="has no column of numbers, text, dates or truth values"):
        open_table(path)
    parquet.write_table(pa.table({"x": pa.array([1.0] * 9), "y": pa.array([2.0] * 9)}), path)
    (tmp_path / "t.csv").write_bytes(path.read_bytes())
    with pytest.raises(TableError, match=r"is a Parquet file; give it a name that ends in \.parq"):
        open_table(tmp_path / "t.csv")
    file = open_table(path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(TableError, match="cannot be read"):
        list(file.chunks())
    parquet.write_table(pa.table({"x": pa.array([], pa.float64()), "y": [][:0]}), path)
    with pytest.raises(TableError, match="has no rows"):
        fit_table(path, "x")


@pytest.mark.parametrize("unit", ["", " m²"])
def test_stored_numbers_have_one_meaning_however_training_wrote_them(
    tmp_path: Path, unit: str
) -> None:
    """12.345 is no twelve thousand though training has points between thousands."""

    def german(number: float) -> str:
        return f"{number:,.2f}".translate(str.maketrans(",.", ".,")) + unit

    areas = [float(each) for each in np.geomspace(2.0, 60_000.0, 50).round(2)]
    lines = ["area;price", *(f"{german(area)};{german(2 * area)}" for area in areas)]
    (tmp_path / "t.csv").write_text("\n".join(lines), encoding="utf-8")
    _, schema = fit_table(tmp_path / "t.csv", "price")
    [column] = schema.columns
    assert (column.decimal_comma, column.thousands, column.unit) == (True, ".", unit.strip())
    cells = pd.Series([12.345, 20.125, 7.875, 33.333, 45.217, 2.561])
    same = [cells, cells.map(lambda each: decimal.Decimal(str(each)))]
    frames = [pd.DataFrame({"area": each, "price": each}) for each in same]
    for frame in frames:
        frame.to_parquet(tmp_path / "new.parquet")
        for file in (open_table(tmp_path / "new.parquet"), table_of(frame)):
            table = NewTable.open(file, schema)
            [rows] = table
            expected = schema.encode([np.asarray(cells, dtype=np.float64)])
            assert np.array_equal(rows.inputs.numpy(), expected)
            assert rows.targets == pytest.approx(cells.tolist())
            assert table.remarks == ()
    if unit:
        small = pd.DataFrame({"area": cells / 1000.0})
        with pytest.raises(TableError, match="the unit may be another one"):
            NewTable.open(table_of(small), schema)


def test_a_duration_is_a_number_of_days_whatever_its_unit(tmp_path: Path) -> None:
    hours = [None if i % 9 == 0 else i * i % 37 for i in range(ROWS)]
    days = [None if each is None else each / 24.0 for each in hours]
    target = np.random.default_rng(0).normal(size=ROWS)
    parquet.write_table(pa.table({"x": days, "y": target}), tmp_path / "days.parquet")
    plain, schema = fit_table(tmp_path / "days.parquet", "y")
    _, of_days = fit_table(tmp_path / "days.parquet", "x")
    for unit in ("s", "ms", "us", "ns"):
        ticks = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit] * 3600
        cells = pa.array([each and each * ticks for each in hours], pa.duration(unit))
        parquet.write_table(pa.table({"x": cells, "y": target}), tmp_path / "t.parquet")
        data, found = fit_table(tmp_path / "t.parquet", "y")
        assert found.columns == schema.columns
        assert torch.equal(data.train_inputs, plain.train_inputs)
        assert fit_table(tmp_path / "t.parquet", "x")[1].target == of_days.target
    frame = pd.DataFrame({"x": pd.to_timedelta(pd.Series(days), unit="D")})
    tables = [NewTable.open(table_of(each), schema) for each in (frame, pd.DataFrame({"x": days}))]
    one, other = (torch.cat([rows.inputs for rows in table]) for table in tables)
    assert torch.equal(one, other)


@pytest.mark.parametrize("unit", ["Y", "M", "D"])
def test_a_period_is_its_text(unit: str, tmp_path: Path) -> None:
    """Its storage is a number of years, months or days since 1970."""
    periods = pd.Series(pd.period_range("2021-03-05", periods=3, freq=unit), name="when")
    frame = pd.DataFrame({"when": [*periods[:2], None], "x": [1.0, 2.0, 3.0]})
    frame["when"] = frame["when"].astype(periods.dtype)
    frame.to_parquet(tmp_path / "a.parquet")
    expected = [*map(str, periods[:2]), ""]
    for table in (table_of(frame), open_table(tmp_path / "a.parquet")):
        (rows,) = table.batches(columns=["when", "x"])
        assert rows.texts("when").tolist() == expected
        assert rows.numbers("when") is None


def test_a_period_is_its_text_in_a_process_that_has_seen_none(tmp_path: Path) -> None:
    """Arrow knows the type only once pandas has converted one."""
    frame = pd.DataFrame({"when": pd.period_range("2021-03", periods=2, freq="M")})
    frame.to_parquet(tmp_path / "a.parquet")
    code = (
        "import sys; from pathlib import Path; from bayesify.tabular.files import open_table; "
        "(rows,) = open_table(Path(sys.argv[1])).batches(); print(*rows.texts('when'))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a.parquet"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "2021-03 2021-04\n"
