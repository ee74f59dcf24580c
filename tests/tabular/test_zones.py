"""Times of text files with and without a time zone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bayesify.tabular.cells import offsets_of
from bayesify.tabular.columns import DateColumn, column_from_json
from bayesify.tabular.files import TableError
from bayesify.tabular.new_table import NewTable
from bayesify.tabular.schema import TableSchema
from bayesify.tabular.training_table import fit_table


def hours(offset: str) -> list[str]:
    return [f"2024-01-{1 + i % 28:02d}T{i % 24:02d}:00:00{offset}" for i in range(60)]


def written(path: Path, times: list[str], *, target: bool) -> Path:
    rows = (f"{time},{i % 7}" if target else time for i, time in enumerate(times))
    path.write_text("\n".join(["when,y" if target else "when", *rows, ""]))
    return path


def trained(path: Path, times: list[str]) -> tuple[TableSchema, DateColumn]:
    _, schema = fit_table(written(path, times, target=True), "y")
    [column] = schema.columns
    assert isinstance(column, DateColumn)
    assert column_from_json(column.to_json()) == column
    return schema, column


def test_offsets_end_a_time_of_day() -> None:
    texts = ["2024-01-05 10:00+0200", "2024-01-05T10:00:00.5Z", "10:00 utc", "2024-01-05", "5-02"]
    assert offsets_of(np.array(texts, dtype=object)) == ["+0200", "Z", "utc", "", ""]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("+02:00", "", "where training has times with a time zone; write their offset too"),
        ("", "+02:00", "where training has times without a time zone; write them in the zone of"),
        ("", "Z", "where training has times without a time zone"),
        ("+02:00", "Z", ""),
        ("", "", ""),
    ],
)
def test_new_times_have_a_zone_as_training_has(
    before: str, after: str, message: str, tmp_path: Path
) -> None:
    schema, column = trained(tmp_path / "a.csv", hours(before))
    assert column.zoned == bool(before)
    new = written(tmp_path / "new.csv", hours(after)[:5], target=False)
    if not message:
        assert NewTable.open(new, schema).remarks == ()
        return
    with pytest.raises(TableError, match=message):
        NewTable.open(new, schema)
    [remark] = NewTable.open(new, schema, lenient=True).remarks
    assert remark.startswith("--lenient reads on: ")


def test_where_training_has_both_kinds_both_are_read(tmp_path: Path) -> None:
    schema, column = trained(tmp_path / "a.csv", [*hours("")[:30], *hours("+02:00")[30:]])
    assert column.zoned is None
    assert "when: some times have a time zone; those without one were read as UTC" in schema.remarks
    for offset in ("", "+02:00"):
        new = written(tmp_path / "new.csv", hours(offset)[:5], target=False)
        assert NewTable.open(new, schema).remarks == ()
