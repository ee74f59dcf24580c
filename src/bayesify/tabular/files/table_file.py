"""File with a table: its columns, and its rows in chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from bayesify.tabular.rows import TableRows, rechunked

__all__ = ["CHUNK_ROWS", "TableFile", "path_of_image"]

#: Rows that are in memory as text at once.
CHUNK_ROWS = 50_000


@dataclass(frozen=True)
class TableFile(ABC):
    """File with a table, opened but not read; see :func:`open_table`.

    A format adds :meth:`parts`.

    Args:
        path: path of the file.
        columns: names of the columns, all different.
        sha256: digest of its bytes, of a compressed text of the uncompressed ones.
        remarks: notes for the user on how the file is read.
    """

    path: Path
    columns: tuple[str, ...]
    sha256: str
    remarks: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """The folder to which paths in its cells are relative."""
        return self.path.parent

    @property
    def image_folder(self) -> Path:
        """The same folder, where its cells do name files.

        Raises:
            TableError: the table has files in several folders.
        """
        return self.folder

    @property
    def has_decimal_commas(self) -> bool:
        """Whether a comma in a number is surely the decimal point."""
        return False

    @property
    def num_rows(self) -> int | None:
        """Number of rows, if it is known without reading them; None for text."""
        return None

    @property
    def num_bytes(self) -> int:
        """Bytes on disk; 0 for a table in memory."""
        return self.path.stat().st_size if self.path.is_file() else 0

    @property
    def text_bytes(self) -> int:
        """Bytes of its text, which may be compressed on disk."""
        return self.num_bytes

    def stored_types(self) -> dict[str, str]:
        """Return the type in which each column is stored; all of a text's are text.

        Raises:
            OSError: the file cannot be read.
        """
        return dict.fromkeys(self.columns, "text")

    @abstractmethod
    def parts(self, limit: int | None, columns: Sequence[str], size: int) -> Iterator[TableRows]:
        """Read the rows as they are stored, in parts of any size.

        Args:
            limit: stop after this number of rows; None for all.
            columns: names of the columns to read.
            size: rows that are needed at a time; more of them cost memory.

        Raises:
            TableError: as :meth:`batches`.
        """

    def batches(
        self,
        limit: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        size: int | None = None,
    ) -> Iterator[TableRows]:
        """Read the rows as they are stored, at most ``size`` at a time.

        Args:
            limit: stop after this number of rows.
            columns: names of the columns to read; None for all.
            size: rows at a time; None for ``CHUNK_ROWS``.

        Raises:
            TableError: the file cannot be read; a row of a CSV file has too many values, or a quote
                is not closed.
        """
        wanted = self.columns if columns is None else columns
        rows = size or CHUNK_ROWS
        yield from rechunked(self.parts(limit, wanted, rows), rows)

    def chunks(self) -> Iterator[pd.DataFrame]:
        """Read the rows as text, at most ``CHUNK_ROWS`` at a time.

        Raises:
            TableError: as :meth:`batches`.
        """
        for rows in self.batches():
            yield pd.DataFrame({name: rows.texts(name) for name in rows.names})


def path_of_image(folder: Path, cell: str) -> Path:
    """Return the path of an image that a table in a folder names.

    Example:
        >>> path_of_image(Path("photos"), "cats/1.png").as_posix()
        'photos/cats/1.png'
    """
    path = folder / cell
    return path if path.exists() else folder / cell.replace("\\", "/")
