"""Rows of a table as they are stored: cells as text, and as numbers where they are numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import compute

from bayesify.tabular.cells import Floats, Texts

__all__ = ["TableRows", "as_text", "is_number", "rechunked"]

_TICKS_A_DAY = {unit: 86_400 * 1000**place for place, unit in enumerate(("s", "ms", "us", "ns"))}


@dataclass(frozen=True, eq=False)
class TableRows:
    """Some rows of a table, in Arrow's memory.

    Cells are converted when they are asked for, a column at a time, so that a wide table needs no
    more memory for its texts than one column of them.

    Args:
        table: the rows; all names differ.

    Example:
        >>> rows = TableRows(pa.table({"x": [1.5, None], "city": ["Rome", "Oslo"]}))
        >>> rows.texts("x").tolist(), rows.numbers("x").tolist(), rows.numbers("city")
        (['1.5', ''], [1.5, nan], None)
    """

    table: pa.Table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self.table.column_names)

    def texts(self, name: str) -> Texts:
        """Return the cells of a column as text, shape (N,); "" for an empty one."""
        return np.asarray(as_text(self.table[name]).to_numpy(), dtype=object)

    def numbers(self, name: str) -> Floats | None:
        """Return the cells of a column of numbers, float64, shape (N,); nan for an empty one.

        They are the numbers that their texts stand for with a decimal point: those of a column in
        single precision are its shortest decimals, and durations are days. None for a column that
        is not stored as numbers.
        """
        cells = _in_days(self.table[name])
        if not is_number(cells.type):
            return None
        if pa.types.is_float32(cells.type) or pa.types.is_decimal(cells.type):
            cells = cells.cast(pa.large_string())
        return np.asarray(cells.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)

    def taken(self, names: Sequence[str], places: npt.NDArray[np.int64]) -> TableRows:
        """Return some of the rows, by their places, with some of the columns."""
        some = self.table.select(list(names))
        for place, name in enumerate(names):
            kind = some[name].type
            # The dictionaries of two parts differ; Arrow takes no cells of views.
            if pa.types.is_dictionary(kind) or pa.types.is_string_view(kind):
                some = some.set_column(place, name, as_text(some[name]))
        return TableRows(some.take(pa.array(places)))


def is_number(kind: pa.DataType) -> bool:
    """Return whether a column of this type is read as numbers without their texts.

    Example:
        >>> is_number(pa.int8()), is_number(pa.decimal128(5, 2)), is_number(pa.string())
        (True, True, False)
    """
    kinds = pa.types
    is_float = kinds.is_float32(kind) or kinds.is_float64(kind)
    is_exact = kinds.is_integer(kind) or kinds.is_decimal(kind)
    return bool(is_exact or is_float or kinds.is_duration(kind))


def as_text(values: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return values as text, durations as numbers of days; an empty one as "".

    Example:
        >>> as_text(pa.array([1.5, None])).to_pylist()
        ['1.5', '']
    """
    if getattr(values.type, "extension_name", "") == "pandas.period":
        # Stored as numbers of years, months or days since 1970.
        texts = [str(period) if period == period else None for period in values.to_pandas()]
        cells = pa.array(texts, pa.large_string())
        values = pa.chunked_array([cells]) if isinstance(values, pa.ChunkedArray) else cells
    return _in_days(values).cast(pa.large_string()).fill_null("")


def _in_days(values: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return durations as numbers of days, whatever their unit, and other values as they are."""
    if not pa.types.is_duration(values.type):
        return values
    ticks = values.cast(pa.int64()).cast(pa.float64(), safe=False)
    return compute.divide(ticks, float(_TICKS_A_DAY[values.type.unit]))


def rechunked(parts: Iterable[TableRows], size: int) -> Iterator[TableRows]:
    """Yield the same rows, ``size`` at a time but for the last; several files read as one does.

    Args:
        parts: rows with the same columns.
        size: at least 1.

    Example:
        >>> parts = [TableRows(pa.table({"x": [1, 2]})), TableRows(pa.table({"x": [3, 4, 5]}))]
        >>> [rows.texts("x").tolist() for rows in rechunked(parts, 3)]
        [['1', '2', '3'], ['4', '5']]
    """
    waiting: list[pa.Table] = []
    count = 0
    for part in parts:
        table = part.table
        while count + table.num_rows >= size:
            cut = size - count
            yield TableRows(pa.concat_tables([*waiting, table.slice(0, cut)]))
            table, waiting, count = table.slice(cut), [], 0
        if table.num_rows:
            waiting.append(table)
            count += table.num_rows
    if count:
        yield TableRows(pa.concat_tables(waiting))
