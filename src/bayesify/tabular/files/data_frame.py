"""Data frame as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa

from bayesify.tabular.files.column_names import numbered
from bayesify.tabular.files.errors import TableError
from bayesify.tabular.files.table_file import TableFile
from bayesify.tabular.rows import TableRows, as_text, is_number

__all__ = ["table_of"]


@dataclass(frozen=True)
class _Frame(TableFile):
    """Data frame in memory: numbers as they are, all else as texts."""

    cells: pa.Table

    @property
    def num_rows(self) -> int:
        return int(self.cells.num_rows)

    def parts(self, limit: int | None, columns: Sequence[str], size: int) -> Iterator[TableRows]:  # noqa: ARG002
        yield TableRows(self.cells.select(list(columns)).slice(0, limit))


def table_of(frame: pd.DataFrame) -> TableFile:
    """Return a data frame as a table, its cells those of the same table in a Parquet file.

    Args:
        frame: the rows; its index is not read.

    Raises:
        TableError: there is no row.

    Example:
        >>> frame = pd.DataFrame({"x": [1.5, None], "y": [True, False]})
        >>> next(table_of(frame).chunks()).to_numpy().tolist()
        [['1.5', 'true'], ['', 'false']]
    """
    if not len(frame):
        raise TableError("the data frame has no rows; give it one at least")
    names, remarks = numbered([str(name) for name in frame.columns])
    plain = frame.set_axis(list(names), axis=1)
    arrays = []
    for name in names:
        try:
            cells = pa.array(plain[name], from_pandas=True)
            arrays.append(cells if is_number(cells.type) else as_text(cells))
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            # A column of several types, as a CSV file read by pandas may have, or of huge integers.
            texts = ["" if pd.isna(cell) is True else str(cell) for cell in plain[name]]
            arrays.append(pa.array(texts, pa.large_string()))
    return _Frame(Path("the data frame"), names, "", tuple(remarks), pa.table(arrays, list(names)))
