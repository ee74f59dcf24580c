"""Errors of tables, and of their cells, that cannot be used as they are."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CellError", "TableError", "no_rows"]


class TableError(ValueError):
    """A table cannot be used as it is; the message tells why and how to mend it."""


class CellError(TableError):
    """A cell of a column cannot be used.

    Args:
        message: why, without the row.
        place: index of the cell among those that were read.
    """

    def __init__(self, message: str, place: int) -> None:
        super().__init__(message)
        self.place = place

    def in_row(self, path: Path, first: int) -> TableError:
        """Return the error with the file and the row.

        Args:
            path: the file of the table.
            first: number of the row, from 1, of the first cell that was read.

        Example:
            >>> str(CellError("there is no image x.png", 2).in_row(Path("a.csv"), 1))
            'a.csv, row 3: there is no image x.png'
        """
        return TableError(f"{path}, row {first + self.place:,}: {self}")


def no_rows(path: Path) -> TableError:
    """Return the error of a table that is a header alone.

    Example:
        >>> print(no_rows(Path("a.csv")))
        a.csv has no rows below its header; give a file with at least one
    """
    return TableError(f"{path} has no rows below its header; give a file with at least one")
