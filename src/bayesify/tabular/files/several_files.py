"""Several files with the same columns as one table, one below the other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bayesify.tabular.files.errors import TableError
from bayesify.tabular.files.table_file import TableFile
from bayesify.tabular.rows import TableRows, as_text

__all__ = ["as_one_table"]


@dataclass(frozen=True)
class _SeveralFiles(TableFile):
    """Files with the same columns, one below the other."""

    files: tuple[TableFile, ...]
    #: Columns that not all files store alike, which are read as text.
    mixed: frozenset[str]

    @property
    def folder(self) -> Path:
        return self.files[0].folder

    @property
    def image_folder(self) -> Path:
        other = next((file for file in self.files if file.folder != self.folder), None)
        if other is not None:
            raise TableError(
                "all files of a table that names images must lie in one folder, to which their "
                f"paths are relative, but {other.path} and {self.files[0].path} do not; write "
                "one table with the paths from its folder"
            )
        return self.folder

    @property
    def has_decimal_commas(self) -> bool:
        return all(file.has_decimal_commas for file in self.files)

    @property
    def num_rows(self) -> int | None:
        counts = [file.num_rows for file in self.files]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def text_bytes(self) -> int:
        return sum(file.text_bytes for file in self.files)

    def parts(self, limit: int | None, columns: Sequence[str], size: int) -> Iterator[TableRows]:
        left = limit
        for file in self.files:
            if left == 0:
                return
            for rows in file.batches(left, columns=columns, size=size):
                left = None if left is None else left - len(rows)
                table = rows.table
                for place, name in enumerate(columns):
                    if name in self.mixed:
                        table = table.set_column(place, name, as_text(table[name]))
                yield TableRows(table)


def as_one_table(path: Path, files: Sequence[TableFile]) -> TableFile:
    """Return several files as one table, in their order.

    Args:
        path: their folder or pattern, which the table is named by.
        files: the open files, at least one.

    Raises:
        TableError: their columns or their separators differ.
    """
    first = files[0]
    for file in files[1:]:
        if set(file.columns) != set(first.columns):
            lacking = sorted(set(first.columns) ^ set(file.columns))
            raise TableError(
                f"all files of a table must have the same columns, but {file.path} and "
                f"{first.path} differ in {', '.join(map(repr, lacking[:5]))}; move the others "
                "elsewhere, or name one file"
            )
        if file.has_decimal_commas != first.has_decimal_commas:
            raise TableError(
                f"all files of a table must separate values alike, but {file.path} and "
                f"{first.path} do not; write them with one separator"
            )
    types = [file.stored_types() for file in files]
    mixed = frozenset(name for name in first.columns if len({each[name] for each in types}) > 1)
    digest = hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()
    remarks = dict.fromkeys(remark for file in files for remark in file.remarks)
    remarks = {f"{len(files):,} files were read as one table": None, **remarks}
    return _SeveralFiles(path, first.columns, digest, tuple(remarks), tuple(files), mixed)
