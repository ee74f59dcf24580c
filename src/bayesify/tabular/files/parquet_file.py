"""Parquet file as a table: its typed columns have the texts that a CSV file would have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from bayesify.io.files import one_line
from bayesify.tabular.files.column_names import numbered
from bayesify.tabular.files.errors import TableError
from bayesify.tabular.files.table_file import TableFile
from bayesify.tabular.rows import TableRows, as_text

__all__ = ["open_parquet"]

#: Bytes of a column that are read from a file at once.
_BUFFER = 1 << 20


@dataclass(frozen=True)
class _ParquetFile(TableFile):
    """Parquet file whose typed columns are cast to text."""

    #: Places of the columns in the file if names occur twice; None reads by name.
    places: tuple[int, ...] | None

    #: Number of rows, from the file's own description.
    rows: int

    @property
    def num_rows(self) -> int:
        return self.rows

    def stored_types(self) -> dict[str, str]:
        schema = parquet.read_schema(self.path)
        places = self.places or [schema.get_field_index(name) for name in self.columns]
        return {
            name: str(schema.field(place).type)
            for name, place in zip(self.columns, places, strict=True)
        }

    def parts(self, limit: int | None, columns: Sequence[str], size: int) -> Iterator[TableRows]:
        """Read one row group after the other: a reader of several keeps the buffers of all."""
        left = limit
        names: list[str] | None = list(columns)
        places: list[int] | list[str] = list(columns)
        if self.places is not None:
            names = None
            places = [self.places[self.columns.index(name)] for name in columns]
        try:
            # Buffered, so that a row group of any size is read a piece at a time.
            with parquet.ParquetFile(self.path, buffer_size=_BUFFER) as file:
                for group in range(file.num_row_groups):
                    for batch in file.iter_batches(size, row_groups=[group], columns=names):
                        rows = batch if left is None else batch.slice(0, left)
                        left = None if left is None else left - len(rows)
                        if len(rows):
                            arrays = [rows.column(place) for place in places]
                            yield TableRows(pa.Table.from_arrays(arrays, list(columns)))
                        if left == 0:
                            return
        except (pa.ArrowException, OSError) as error:
            raise TableError(f"{self.path} cannot be read: {one_line(error)}") from error


def open_parquet(path: Path) -> TableFile:
    """Open a Parquet file, whose nested columns and those of bytes are left out.

    Raises:
        TableError: it cannot be read as Parquet, or has no other column.

    Example:
        >>> open_parquet(Path("nowhere.parquet"))
        Traceback (most recent call last):
        bayesify.tabular.files.errors.TableError: nowhere.parquet cannot be read as Parquet: [Err...
    """
    # The first conversion of a period makes its type known to Arrow, which else reads integers.
    pa.array(pd.PeriodIndex([], freq="D"))
    try:
        with path.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        described = parquet.read_metadata(path)
        schema = described.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as error:
        raise TableError(f"{path} cannot be read as Parquet: {one_line(error)}") from error
    remarks = [
        f"{field.name}: a column of {field.type} is no column of a table and is not read"
        for field in schema
        if not _is_text(field.type)
    ]
    places = tuple(place for place, field in enumerate(schema) if _is_text(field.type))
    if not places:
        raise TableError(f"{path} has no column of numbers, text, dates or truth values")
    names, more = numbered([schema.field(place).name for place in places])
    return _ParquetFile(
        path, names, digest, (*remarks, *more), places if more else None, described.num_rows
    )


def _is_text(kind: pa.DataType) -> bool:
    """Return whether values of a type have a text, as nested ones and bytes do not."""
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return False
    try:
        as_text(pa.array([], kind))
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return False
    return not pa.types.is_fixed_size_binary(kind)
