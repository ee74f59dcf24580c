"""Read every column of a new table, from all of its cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bayesify.tabular.cells import Floats, Texts
from bayesify.tabular.columns import (
    CategoryColumn,
    Column,
    DateColumn,
    EncodedColumn,
    FlagColumn,
    NumberColumn,
)
from bayesify.tabular.drift.column_cells import ColumnCells
from bayesify.tabular.drift.date_readings import date_reading
from bayesify.tabular.drift.number_readings import number_reading
from bayesify.tabular.drift.reading import Reading, as_in_training, refused, shown
from bayesify.tabular.drift.word_readings import category_reading, words_reading
from bayesify.tabular.files import TableFile, no_rows

__all__ = ["read_columns", "reading_of", "reading_of_numbers"]


def read_columns(
    file: TableFile,
    columns: Sequence[Column],
    target: Column | None = None,
    *,
    size: int | None = None,
    on_rows: Callable[[int], None] | None = None,
) -> list[Reading]:
    """Return how each column of a new table is read, from all of its cells; the target's is last.

    Args:
        file: the new table.
        columns: training's columns, fitted; the table must have them all.
        target: the target's, from :func:`target_column`; None if it is not read.
        size: rows in memory at once; None for ``CHUNK_ROWS``.
        on_rows: called with the number of rows that were read.

    Raises:
        TableError: the file has no rows, or cannot be read.
    """
    checked = {c.name: ColumnCells(c) for c in columns if not isinstance(c, EncodedColumn)}
    if target is not None:
        checked[target.name] = ColumnCells(target, fate=("is not measured", "are not measured"))
    rows = 0
    for chunk in file.batches(columns=list(checked) or None, size=size):
        rows += len(chunk)
        for cells in checked.values():
            cells.read(chunk)
        if on_rows is not None:
            on_rows(rows)
    if not rows:
        raise no_rows(file.path)
    readings = [
        _reading(checked[column.name], decimal_commas=file.has_decimal_commas)
        if column.name in checked
        else Reading(column)
        for column in (*columns, *([] if target is None else [target]))
    ]
    # A format that was found by the first cells must read the others too.
    unsure = [
        each
        for each in readings
        if each.column.name in checked
        and not checked[each.column.name].is_whole
        and each.column is not checked[each.column.name].column
    ]
    if not unsure:
        return readings
    again = {each.column.name: ColumnCells(each.column) for each in unsure}
    for chunk in file.batches(columns=list(again), size=size):
        for cells in again.values():
            cells.read(chunk)
    return [_verified(each, checked, again) for each in readings]


def reading_of(column: Column, cells: Texts) -> Reading:
    """Return how new cells of one column are read, all of which are at hand.

    Args:
        column: training's column, fitted.
        cells: the cells as text, "" where there is none.

    Example:
        >>> import numpy as np
        >>> column = FlagColumn(name="member", words=("false", "true"))
        >>> reading_of(column, np.array(["1", "0", ""], dtype=object)).remark
        "member: '0' as 'no', '1' as 'yes', where training has 'false' or 'true'"
    """
    if isinstance(column, EncodedColumn):
        return Reading(column)
    counted = ColumnCells(column)
    counted.update(cells)
    reading = _reading(counted, decimal_commas=False)
    if counted.is_whole or reading.column is column:
        return reading
    again = ColumnCells(reading.column)
    again.update(cells)
    return _verified(reading, {column.name: counted}, {column.name: again})


def reading_of_numbers(column: Column, numbers: Floats) -> Reading:
    """Return how new cells of one column are read that are stored as numbers.

    Args:
        column: training's column, fitted.
        numbers: the cells, shape (N,), nan where there is none.

    Example:
        >>> import numpy as np
        >>> rate = NumberColumn(name="rate", unit="%").fit(np.array([3.0, 5.0, 12.0]))
        >>> reading_of_numbers(rate, np.array([0.04, 0.11])).error.partition(", got ")[2]
        "numbers like '0.04', '0.11': 1 may stand for 1 % or for 100 %; write them as in training"
    """
    counted = ColumnCells(column)
    counted.update_numbers(numbers)
    return _reading(counted, decimal_commas=False)


def _verified(
    reading: Reading, checked: dict[str, ColumnCells], again: dict[str, ColumnCells]
) -> Reading:
    name = reading.column.name
    if name not in again or not again[name].unread or isinstance(reading.column, CategoryColumn):
        return reading
    if reading.error:  # the other format, for which training's was doubted, is impossible
        return as_in_training(checked[name])
    return refused(checked[name], f"cells like {shown(again[name].unread_texts)}")


def _reading(cells: ColumnCells, *, decimal_commas: bool) -> Reading:
    column = cells.column
    if not cells.known:
        return Reading(column)
    if isinstance(column, NumberColumn):
        return number_reading(column, cells, decimal_commas=decimal_commas)
    if isinstance(column, DateColumn):
        return date_reading(column, cells)
    if not cells.unread:
        return Reading(column)
    if isinstance(column, FlagColumn):
        return words_reading(column, cells) or as_in_training(cells)
    assert isinstance(column, CategoryColumn)
    return category_reading(column, cells)
