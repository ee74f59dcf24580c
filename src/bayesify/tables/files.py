"""A CSV file as it lies on the disk: its encoding, separator, header, and its rows in pieces."""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import pandas as pd

__all__ = ["CHUNK_ROWS", "TableError", "TableFile", "available_memory"]

#: Rows that are in memory as text at once.
CHUNK_ROWS = 50_000
_SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
_SAMPLE, _BLOCK = 1 << 18, 1 << 20


class TableError(ValueError):
    """A table cannot be used as it is; the message says why and how to mend it."""


@dataclass(frozen=True)
class TableFile:
    r"""A table in a text file, perhaps compressed by gzip, that was looked at but not read.

    Args:
        path: where it lies.
        encoding: of its text.
        separator: between two values.
        columns: the names in its first row.
        sha256: of its bytes.
        remarks: what a reader of the results must know of how it was read.
        has_header: whether the names are the first row's.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.csv")
        ...     _ = path.write_text("x;y\n1,5;2\n")
        ...     file = TableFile.look(path)
        ...     print(file.separator, file.columns, [len(rows) for rows in file.pieces()])
        ; ('x', 'y') [1]
    """

    path: Path
    encoding: str
    separator: str
    columns: tuple[str, ...]
    sha256: str
    remarks: tuple[str, ...] = ()
    has_header: bool = True

    @classmethod
    def look(cls, path: Path, *, headless: bool = False) -> TableFile:
        """Find out how a file is to be read: all its bytes are looked at, none is kept.

        Args:
            path: where it lies.
            headless: whether a first row of numbers is data rather than names.

        Raises:
            TableError: it is missing, empty, no text, or its header cannot be used.
        """
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
        has_header = not headless or any(not _is_number(name) for name in header)
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
        doubled = [name for name, count in Counter(columns).items() if count > 1]
        if doubled:
            places = [str(place) for place, name in enumerate(columns, 1) if name == doubled[0]]
            raise TableError(
                f"{path} has the column name {doubled[0]!r} more than once (columns "
                f"{', '.join(places)}); names must differ, so rename or remove one"
            )
        return cls(path, encoding, separator, columns, sha256, tuple(remarks), has_header)

    def pieces(self, limit: int | None = None) -> Iterator[pd.DataFrame]:
        """The rows below the header, as stripped text, so many at a time; blank lines are left out.

        Args:
            limit: stop after so many rows.

        Raises:
            TableError: a row has too many values, or a quote is not closed.
        """
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
                chunksize=CHUNK_ROWS,
            ) as reader:
                yield from (piece for piece in reader if len(piece))
        except pd.errors.EmptyDataError as error:
            raise TableError(f"{self.path} has no rows below its header") from error
        except pd.errors.ParserError as error:
            reason = " ".join(str(error).replace("Error tokenizing data. C error: ", "").split())
            raise TableError(
                f"{self.path} cannot be read as a table: {reason}; put quotes around values that "
                "hold the separator, and close every quote"
            ) from error
        except (OSError, EOFError, UnicodeError) as error:
            raise TableError(f"{self.path} cannot be read: {error}") from error


def available_memory() -> int | None:
    """Bytes of memory that are free for use, where the system says so."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if found:
            return 1024 * int(found[1])
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if _is_gzip(path) else path.open("rb")


def _examined(path: Path) -> tuple[str, str, list[str]]:
    """Encoding and digest of a file's text, and remarks."""
    if path.is_dir():
        raise TableError(f"{path} is a folder; a table must be a text file such as data.csv")
    if not path.exists():
        raise TableError(f"there is no file {path}")
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
                    if block[:4] == b"PK\x03\x04":
                        raise TableError(
                            f"{path} is a zip archive or an Excel workbook; save the table as CSV"
                        )
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
    # Every byte is a letter in it, and it equals Windows-1252 for those of Western languages.
    return (
        "latin-1",
        digest.hexdigest(),
        ["the file is not UTF-8 and was read as Latin-1; if names look wrong, save it as UTF-8"],
    )


def _separated(text: str, path: Path) -> tuple[str, list[list[str]]]:
    """The separator that gives the most columns in every row alike, and the first rows."""
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
