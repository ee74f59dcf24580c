"""Open a table by its path: a file, or all files of a folder or a pattern."""

from __future__ import annotations

import glob
from pathlib import Path

from bayesify.tabular.files.csv_file import open_csv
from bayesify.tabular.files.errors import TableError
from bayesify.tabular.files.parquet_file import open_parquet
from bayesify.tabular.files.several_files import as_one_table
from bayesify.tabular.files.table_file import TableFile
from bayesify.tabular.suffixes import TABLE_SUFFIXES

__all__ = ["open_table", "table_paths"]


def open_table(path: Path, *, headless: bool = False, latin1: bool = False) -> TableFile:
    r"""Open a table: a file, or all files of a folder or a pattern, one below the other.

    A suffix ``.parquet`` tells a Parquet file, any other file is text. All bytes are read once, and
    none is kept. Several files are read in the order of their names and must have the same columns;
    of a folder those count whose names end like those of tables, without its subfolders.

    Args:
        path: path of a file or a folder, or a pattern such as ``sales/*.parquet``; text may be
            compressed by gzip.
        headless: whether a first row of numbers is data instead of names.
        latin1: whether text that is not UTF-8 is Latin-1 in any case, as earlier versions read
            it, instead of Windows-1252 where it can be.

    Raises:
        TableError: the file is missing, empty, a pipe, neither text nor Parquet, or its header
            cannot be used.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.csv")
        ...     _ = path.write_text("x;y\n1,5;2\n")
        ...     file = open_table(path)
        ...     print(file.columns, [len(rows) for rows in file.chunks()])
        ('x', 'y') [1]
    """
    if _is_several(path):
        files = [open_table(each, latin1=latin1) for each in table_paths(path)]
        return files[0] if len(files) == 1 else as_one_table(path, files)
    is_stdin = path.name == "-" and not path.exists()
    if is_stdin or (path.exists() and not path.is_file()):
        raise TableError(
            f"a table must be a file, since it is read more than once, got "
            f"{'standard input' if is_stdin else f'a device or pipe, {path}'}; save it as a file "
            "first"
        )
    if not path.exists():
        raise TableError(f"there is no file {path}")
    if path.suffix.lower() == ".parquet":
        return open_parquet(path)
    return open_csv(path, headless=headless, latin1=latin1)


def table_paths(path: Path) -> list[Path]:
    r"""Return the files of a table, in the order in which ``open_table`` reads them.

    Args:
        path: as for ``open_table``.

    Raises:
        TableError: a folder or a pattern has no file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("b.csv", "a.csv", "notes.md"):
        ...         _ = Path(folder, name).write_text("x\n1\n")
        ...     [path.name for path in table_paths(Path(folder))]
        ['a.csv', 'b.csv']
    """
    if not _is_several(path):
        return [path]
    if path.is_dir():
        found = (each for each in path.iterdir() if each.suffix.lower() in TABLE_SUFFIXES)
        suffixes = f"{', '.join(TABLE_SUFFIXES[:-1])} or {TABLE_SUFFIXES[-1]}"
        what = f"{path} holds no table: a folder must have files that end in {suffixes}"
    else:
        # Path.glob wants the folder and the pattern apart.
        found = (Path(each) for each in glob.glob(str(path), recursive=True))  # noqa: PTH207
        what = f"no file matches {path}; a pattern such as 'sales/*.parquet' must match one"
    paths = sorted(each for each in found if each.is_file() and not each.name.startswith("."))
    if not paths:
        raise TableError(what)
    return paths


def _is_several(path: Path) -> bool:
    return path.is_dir() or (not path.exists() and glob.has_magic(str(path)))
