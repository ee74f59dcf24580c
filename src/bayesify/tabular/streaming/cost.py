"""Estimate what streaming a table will cost, from its first rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bayesify.tabular.files import TableFile, no_rows
from bayesify.tabular.rows import TableRows
from bayesify.tabular.streaming.encoded import STREAM_NAME
from bayesify.tabular.streaming.memory import TrainingMemory, gigabytes
from bayesify.tabular.streaming.scan import StreamScan
from bayesify.tabular.table_memory import available_memory, memory_needed

__all__ = ["StreamCost", "fitting_memory"]

_FIRST_ROWS = 20_000
#: Part of the free memory that a table may fill before it is streamed.
_MOST_FILLED = 0.8


@dataclass(frozen=True)
class StreamCost:
    """Size of a table, and the time that a pass over it takes.

    Args:
        rows: number of rows; an estimate for text.
        columns: number of columns that are used.
        size: bytes on disk.
        is_exact: whether the number of rows is known.
        seconds: estimated seconds of a pass.
    """

    rows: int
    columns: int
    size: int
    is_exact: bool
    seconds: float

    @classmethod
    def of(cls, file: TableFile, drop: Sequence[str] = (), limit: int | None = None) -> Self:
        """Read the first 20,000 rows of a table, and estimate from them.

        Raises:
            TableError: it cannot be read, or has no rows.

        Example:
            >>> import pandas as pd
            >>> from bayesify.tabular.files import table_of
            >>> cost = StreamCost.of(table_of(pd.DataFrame({"x": range(5)})))
            >>> cost.rows, cost.columns, cost.is_exact
            (5, 1, True)
        """
        names = [name for name in file.columns if name not in drop]
        begun = time.perf_counter()
        first = _first_rows(file, names)
        for name in names:
            StreamScan(name, decimal_commas=file.has_decimal_commas).read(first)
        each = (time.perf_counter() - begun) / len(first)
        rows = _rows_of(file, first, names)
        rows = rows if limit is None else min(rows, limit)
        exact = file.num_rows is not None
        return cls(rows, len(names), file.num_bytes, exact, rows * each)

    def words(self, memory: TrainingMemory, folder: Path) -> str:
        """Return the cost in words: rows, bytes, time and memory.

        Args:
            memory: how much of the table is in memory.
            folder: folder of the run.
        """
        about = "" if self.is_exact else "about "
        disk = 4 * self.rows * self.columns
        return (
            f"streaming {about}{self.rows:,} rows x {self.columns:,} columns, "
            f"{gigabytes(self.size)} on disk: two passes over them of about {_time(self.seconds)} "
            f"each, within {gigabytes(memory.cap)} of memory ({memory.rows:,} rows at once, "
            f"{memory.sample_rows + memory.held_rows:,} kept); then 4 bytes for each input and "
            f"row, {gigabytes(disk)} if each column is one input, in {folder / STREAM_NAME} until "
            "the training has ended"
        )


def fitting_memory(
    file: TableFile, dropped: int = 0, limit: int | None = None, *, processes: int = 1
) -> int | None:
    """Return the memory within which to stream a table; None if it fits into the free memory.

    Args:
        file: the table.
        dropped: number of its columns that are not used.
        limit: rows from the top that are used; None for all.
        processes: those that each hold the table; the memory returned is of one.

    Example:
        >>> import pandas as pd
        >>> from bayesify.tabular.files import table_of
        >>> print(fitting_memory(table_of(pd.DataFrame({"x": range(5)}))))
        None
    """
    free = available_memory()
    if free is None:
        return None
    free //= processes
    columns = max(1, len(file.columns) - dropped)
    rows = file.num_rows
    if rows is None:
        # A row of text has at least two bytes a column.
        most = file.text_bytes // (2 * len(file.columns))
        rows = min(most, limit or most)
        if memory_needed(rows, columns, columns) < _MOST_FILLED * free:
            return None
        names = list(file.columns)
        rows = _rows_of(file, _first_rows(file, names), names)
    rows = rows if limit is None else min(rows, limit)
    needed = memory_needed(rows, columns, columns)
    return None if needed < _MOST_FILLED * free else int(_MOST_FILLED * free)


def _first_rows(file: TableFile, names: Sequence[str]) -> TableRows:
    for rows in file.batches(_FIRST_ROWS, columns=names, size=_FIRST_ROWS):
        return rows
    raise no_rows(file.path)


def _rows_of(file: TableFile, first: TableRows, names: Sequence[str]) -> int:
    """Return the number of rows; for text an estimate by the length of the first ones."""
    if file.num_rows is not None:
        return file.num_rows
    if len(first) < _FIRST_ROWS:
        return len(first)
    size = sum(len(text) + 1 for name in names for text in first.texts(name).tolist())
    share = len(file.columns) / len(names)
    return max(len(first), int(file.text_bytes * len(first) / (size * share)))


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120.0 else f"{seconds / 60.0:.0f} min"
