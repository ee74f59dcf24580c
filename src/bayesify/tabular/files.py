"""Open a table, one file or several, CSV or Parquet, and read its rows a chunk at a time.

The rows of both formats have a text, so that a typed Parquet column and the same column in a CSV
file give the same inputs. Rows are read in chunks, so that memory does not grow with the file.
pandas and pyarrow read them; the encoding and the separator of a text are found here, because
pandas finds no encoding, and its search for a separator splits a table of one column into two.
"""

from __future__ import annotations

import codecs
import csv
import glob
import gzip
import hashlib
import io
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from bayesify.tabular.rows import TableRows, as_text, rechunked

__all__ = ["CHUNK_ROWS", "TableError", "TableFile", "available_memory", "open_table", "table_of"]

#: Rows that are in memory as text at once.
CHUNK_ROWS = 50_000
_SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
_SAMPLE, _BLOCK = 1 << 18, 1 << 20
#: Names that a file of a table in a folder ends with.
_SUFFIXES = (".csv", ".tsv", ".txt", ".gz", ".parquet")
#: Bytes of a column that are read from a Parquet file at once.
_PARQUET_BUFFER = 1 << 20


class TableError(ValueError):
    """A table cannot be used as it is; the message tells why and how to mend it."""


@dataclass(frozen=True)
class TableFile(ABC):
    """File with a table, opened but not read; see :func:`open_table`.

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

    @abstractmethod
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

    def chunks(self, limit: int | None = None) -> Iterator[pd.DataFrame]:
        """Read the rows as text, at most ``CHUNK_ROWS`` at a time.

        Args:
            limit: stop after this number of rows.

        Raises:
            TableError: as :meth:`batches`.
        """
        for rows in self.batches(limit):
            yield pd.DataFrame({name: rows.texts(name) for name in rows.names})


def open_table(path: Path, *, headless: bool = False) -> TableFile:
    r"""Open a table: a file, or all files of a folder or a pattern, one below the other.

    A suffix ``.parquet`` tells a Parquet file, any other file is text. All bytes are read once, and
    none is kept. Several files are read in the order of their names and must have the same columns;
    of a folder those count whose names end like those of tables, without its subfolders.

    Args:
        path: path of a file or a folder, or a pattern such as ``sales/*.parquet``; text may be
            compressed by gzip.
        headless: whether a first row of numbers is data instead of names.

    Raises:
        TableError: the file is missing, empty, neither text nor Parquet, or its header cannot be
            used.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.csv")
        ...     _ = path.write_text("x;y\n1,5;2\n")
        ...     file = open_table(path)
        ...     print(file.columns, [len(rows) for rows in file.chunks()])
        ('x', 'y') [1]
    """
    if path.is_dir() or (not path.exists() and glob.has_magic(str(path))):
        return _open_several(path)
    if not path.exists():
        raise TableError(f"there is no file {path}")
    if path.suffix.lower() == ".parquet":
        return _open_parquet(path)
    return _open_text(path, headless=headless)


def available_memory() -> int | None:
    """Return the bytes of memory that are free for use; None if the system does not tell."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if found:
            return 1024 * int(found[1])
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


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

    def batches(
        self,
        limit: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        size: int | None = None,
    ) -> Iterator[TableRows]:
        wanted = self.columns if columns is None else tuple(columns)
        rows = size or CHUNK_ROWS
        yield from rechunked(self._groups(limit, wanted, rows), rows)

    def _groups(self, limit: int | None, wanted: Sequence[str], size: int) -> Iterator[TableRows]:
        """Read one row group after the other: a reader of several keeps the buffers of all."""
        left = limit
        names: list[str] | None = list(wanted)
        places: list[int] | list[str] = list(wanted)
        if self.places is not None:
            names = None
            places = [self.places[self.columns.index(name)] for name in wanted]
        try:
            # Buffered, so that a row group of any size is read a piece at a time.
            with parquet.ParquetFile(self.path, buffer_size=_PARQUET_BUFFER) as file:
                for group in range(file.num_row_groups):
                    for batch in file.iter_batches(size, row_groups=[group], columns=names):
                        rows = batch if left is None else batch.slice(0, left)
                        left = None if left is None else left - len(rows)
                        if len(rows):
                            arrays = [rows.column(place) for place in places]
                            yield TableRows(pa.Table.from_arrays(arrays, list(wanted)))
                        if left == 0:
                            return
        except (pa.ArrowException, OSError) as error:
            raise TableError(f"{self.path} cannot be read: {_one_line(error)}") from error


def _open_parquet(path: Path) -> TableFile:
    try:
        with path.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        described = parquet.read_metadata(path)
        schema = described.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as error:
        raise TableError(f"{path} cannot be read as Parquet: {_one_line(error)}") from error
    remarks = [
        f"{field.name}: a column of {field.type} is no column of a table and is not read"
        for field in schema
        if not _is_text(field.type)
    ]
    places = tuple(place for place, field in enumerate(schema) if _is_text(field.type))
    if not places:
        raise TableError(f"{path} has no column of numbers, text, dates or truth values")
    names, more = _numbered([schema.field(place).name for place in places])
    return _ParquetFile(
        path, names, digest, (*remarks, *more), places if more else None, described.num_rows
    )


def table_of(frame: pd.DataFrame) -> TableFile:
    """Return a data frame as a table, its cells the texts of the same table in a Parquet file.

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
    names, remarks = _numbered([str(name) for name in frame.columns])
    plain = frame.set_axis(list(names), axis=1)
    arrays = []
    for name in names:
        try:
            arrays.append(as_text(pa.array(plain[name], from_pandas=True)))
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            # A column of several types, as a CSV file read by pandas may have, or of huge integers.
            cells = ["" if pd.isna(cell) is True else str(cell) for cell in plain[name]]
            arrays.append(pa.array(cells, pa.large_string()))
    return _Frame(Path("the data frame"), names, "", tuple(remarks), pa.table(arrays, list(names)))


@dataclass(frozen=True)
class _Frame(TableFile):
    """Data frame in memory, as texts."""

    texts: pa.Table

    @property
    def num_rows(self) -> int:
        return int(self.texts.num_rows)

    def batches(
        self,
        limit: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        size: int | None = None,
    ) -> Iterator[TableRows]:
        table = self.texts.select(list(self.columns if columns is None else columns))
        for batch in table.slice(0, limit).to_batches(size or CHUNK_ROWS):
            yield TableRows(pa.Table.from_batches([batch]))


@dataclass(frozen=True)
class _SeveralFiles(TableFile):
    """Files with the same columns, one below the other."""

    files: tuple[TableFile, ...]
    #: Columns that not all files store alike, which are read as text.
    mixed: frozenset[str]

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

    def batches(
        self,
        limit: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        size: int | None = None,
    ) -> Iterator[TableRows]:
        wanted = list(self.columns if columns is None else columns)
        rows = size or CHUNK_ROWS
        yield from rechunked(self._rows(limit, wanted, rows), rows)

    def _rows(self, limit: int | None, wanted: list[str], size: int) -> Iterator[TableRows]:
        left = limit
        for file in self.files:
            if left == 0:
                return
            for rows in file.batches(left, columns=wanted, size=size):
                left = None if left is None else left - len(rows)
                table = rows.table
                for place, name in enumerate(wanted):
                    if name in self.mixed:
                        table = table.set_column(place, name, as_text(table[name]))
                yield TableRows(table)


def _open_several(path: Path) -> TableFile:
    if path.is_dir():
        found = (each for each in path.iterdir() if each.suffix.lower() in _SUFFIXES)
        what = f"{path} holds no table: a folder must have files that end in {_listed(_SUFFIXES)}"
    else:
        # Path.glob wants the folder and the pattern apart.
        found = (Path(each) for each in glob.glob(str(path), recursive=True))  # noqa: PTH207
        what = f"no file matches {path}; a pattern such as 'sales/*.parquet' must match one"
    paths = sorted(each for each in found if each.is_file() and not each.name.startswith("."))
    if not paths:
        raise TableError(what)
    files = [open_table(each) for each in paths]
    if len(files) == 1:
        return files[0]
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
    kinds = [_kinds(file) for file in files]
    mixed = frozenset(name for name in first.columns if len({each[name] for each in kinds}) > 1)
    digest = hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()
    remarks = dict.fromkeys(remark for file in files for remark in file.remarks)
    remarks = {f"{len(files):,} files were read as one table": None, **remarks}
    return _SeveralFiles(path, first.columns, digest, tuple(remarks), tuple(files), mixed)


def _kinds(file: TableFile) -> dict[str, str]:
    """Return how each column of a file is stored; all of a text's are text."""
    if not isinstance(file, _ParquetFile):
        return dict.fromkeys(file.columns, "text")
    schema = parquet.read_schema(file.path)
    places = file.places or [schema.get_field_index(name) for name in file.columns]
    return {
        name: str(schema.field(place).type)
        for name, place in zip(file.columns, places, strict=True)
    }


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _numbered(names: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return the names, with a number after each that occurred before, and remarks on these."""
    found: list[str] = []
    remarks = []
    for name in names:
        number, free = 1, name
        # A number that a later column has for its name is not free either.
        while free in found or (number > 1 and free in names):
            number += 1
            free = f"{name} ({number})"
        if number > 1:
            remarks.append(f"the column name {name!r} occurs again; this column is {free!r}")
        found.append(free)
    return tuple(found), remarks


def _is_text(kind: pa.DataType) -> bool:
    """Return whether values of a type have a text, as nested ones and bytes do not."""
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return False
    try:
        as_text(pa.array([], kind))
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return False
    return not pa.types.is_fixed_size_binary(kind)


@dataclass(frozen=True)
class _TextFile(TableFile):
    """CSV file, or text with another separator, perhaps compressed by gzip."""

    encoding: str
    separator: str
    has_header: bool

    @property
    def has_decimal_commas(self) -> bool:
        return self.separator == ";"

    def batches(
        self,
        limit: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        size: int | None = None,
    ) -> Iterator[TableRows]:
        wanted = list(self.columns if columns is None else columns)
        try:
            with pd.read_csv(
                self.path,
                sep=self.separator,
                encoding=self.encoding,
                compression="gzip" if _is_gzip(self.path) else None,
                header=0 if self.has_header else None,
                names=list(self.columns),
                index_col=False,
                dtype=object,
                na_filter=False,
                nrows=limit,
                chunksize=size or CHUNK_ROWS,
            ) as reader:
                for rows in reader:
                    if len(rows):
                        arrays = [pa.array(rows[name], pa.large_string()) for name in wanted]
                        yield TableRows(pa.Table.from_arrays(arrays, wanted))
        except pd.errors.EmptyDataError as error:
            raise TableError(f"{self.path} has no rows below its header") from error
        except pd.errors.ParserError as error:
            reason = _one_line(error).replace("Error tokenizing data. C error: ", "")
            raise TableError(
                f"{self.path} cannot be read as a table: {reason}; put quotes around values that "
                "hold the separator, and close every quote"
            ) from error
        except (OSError, EOFError, UnicodeError) as error:
            raise TableError(f"{self.path} cannot be read: {error}") from error


def _open_text(path: Path, *, headless: bool) -> TableFile:
    encoding, sha256, remarks = _examined(path)
    with _opened(path) as file:
        text = file.read(_SAMPLE).decode(encoding, errors="replace")
        whole = not file.read(1)
    if not whole:  # the last row may be cut off
        text = text[: max(text.rfind("\n"), text.rfind("\r")) + 1] or text
    if not text.strip():
        raise TableError(f"{path} is empty; it must begin with a row of column names")
    separator, records = _separated(text, path)
    header = records[0]
    has_header = not headless or not _are_numbers(header)
    if separator != ",":
        remarks.append(f"values are separated by {_SEPARATORS[separator]}s")
    for number, record in enumerate(records[1:], start=2):
        if any(value.strip() for value in record[len(header) :]):
            raise TableError(
                f"{path} must have as many values in every row as names in its first, "
                f"{len(header)}, but row {number} has {len(record)}; put quotes around values "
                "that hold the separator"
            )
    columns = tuple(
        (name.strip() if has_header else "") or f"column {place}"
        for place, name in enumerate(header, start=1)
    )
    columns, more = _numbered(columns)
    return _TextFile(path, columns, sha256, (*remarks, *more), encoding, separator, has_header)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _are_numbers(texts: Sequence[str]) -> bool:
    return not pd.to_numeric(pd.Series(texts), errors="coerce").isna().any()


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if _is_gzip(path) else path.open("rb")


def _examined(path: Path) -> tuple[str, str, list[str]]:
    """Return encoding and digest of a file's text, and remarks."""
    digest = hashlib.sha256()
    decoder: codecs.IncrementalDecoder | None = None
    utf16 = valid = True
    size = 0
    try:
        with _opened(path) as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                if decoder is None:
                    utf16 = block[:2] in (b"\xff\xfe", b"\xfe\xff")
                    decoder = codecs.getincrementaldecoder("utf-8")()
                    _check_is_text(path, block)
                if not utf16 and b"\0" in block:
                    raise TableError(f"{path} is not text: byte {size + block.index(0)} is zero")
                size += len(block)
                if valid:
                    try:
                        decoder.decode(block)
                    except UnicodeDecodeError:
                        valid = False
            if decoder is None:
                raise TableError(f"{path} is empty; it must begin with a row of column names")
            if valid:
                try:
                    decoder.decode(b"", final=True)
                except UnicodeDecodeError:
                    valid = False
    except (OSError, EOFError) as error:
        raise TableError(f"{path} cannot be read: {error}") from error
    if utf16:
        return "utf-16", digest.hexdigest(), []
    if valid:
        return "utf-8-sig", digest.hexdigest(), []
    # Latin-1 decodes every byte, and equals Windows-1252 for the letters of Western languages.
    return (
        "latin-1",
        digest.hexdigest(),
        ["the file is not UTF-8 and was read as Latin-1; if names look wrong, save it as UTF-8"],
    )


def _check_is_text(path: Path, block: bytes) -> None:
    if block[:4] == b"PK\x03\x04":
        raise TableError(f"{path} is a zip archive or an Excel workbook; save the table as CSV")
    if block[:4] == b"PAR1":
        raise TableError(f"{path} is a Parquet file; give it a name that ends in .parquet")


def _separated(text: str, path: Path) -> tuple[str, list[list[str]]]:
    """Return the separator that gives the most columns in every row alike, and the first rows."""
    best: tuple[tuple[float, int], str, list[list[str]]] | None = None
    for separator in _SEPARATORS:
        try:
            reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
            records = [record for record, _ in zip(reader, range(200), strict=False) if any(record)]
        except csv.Error as error:
            raise TableError(f"{path} cannot be read as a table: {error}") from error
        if not records:
            continue
        width = len(records[0])
        alike = sum(len(record) == width for record in records) / len(records)
        rank = (round(alike, 1) if width > 1 else -1.0, width)
        if best is None or rank > best[0]:
            best = rank, separator, records
    if best is None:
        raise TableError(f"{path} is empty; it must begin with a row of column names")
    return best[1], best[2]
