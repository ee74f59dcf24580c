"""CSV file as a table: find its encoding, its separator and its header, and read its rows.

pandas reads the rows; the encoding and the separator are found here, because pandas finds no
encoding, and its search for a separator splits a table of one column into two.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO, cast

import pandas as pd
import pyarrow as pa

from bayesify.io.files import one_line
from bayesify.tabular.files.column_names import numbered
from bayesify.tabular.files.csv_records import records_of
from bayesify.tabular.files.errors import TableError, no_rows
from bayesify.tabular.files.short_rows import SeparatorCount, short_rows_remark
from bayesify.tabular.files.table_file import TableFile
from bayesify.tabular.rows import TableRows

__all__ = ["open_csv"]

_SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
_SAMPLE, _BLOCK = 1 << 18, 1 << 20
_JSON = (".json", ".jsonl", ".ndjson")
#: A row of one column that a comma splits in two.
_DECIMAL_COMMA = re.compile(r"[+-]?\d+(,\d+)?")
#: Bytes that are no character of Windows-1252.
_NOT_WINDOWS = b"\x81\x8d\x8f\x90\x9d"


@dataclass(frozen=True)
class _CsvFile(TableFile):
    """CSV file, or text with another separator, perhaps compressed by gzip.

    Args:
        encoding: encoding of its text.
        separator: what is between two values.
        has_header: whether the first row holds the names.
        skipped: lines without a value above the first row.
        blank_end: empty lines at the end of a single column, in which an empty line is a row.
        unnamed: columns without a name, which separators at the ends of the rows make.
        text_size: bytes of its text, not compressed.
    """

    encoding: str
    separator: str
    has_header: bool
    skipped: int
    blank_end: int
    unnamed: int
    text_size: int

    @property
    def text_bytes(self) -> int:
        return self.text_size

    @property
    def has_decimal_commas(self) -> bool:
        return self.separator == ";"

    def parts(self, limit: int | None, columns: Sequence[str], size: int) -> Iterator[TableRows]:
        for rows in _without_end(self._frames(limit, size), self.blank_end):
            arrays = [pa.array(rows[name], pa.large_string()) for name in columns]
            yield TableRows(pa.Table.from_arrays(arrays, list(columns)))

    def _frames(self, limit: int | None, size: int) -> Iterator[pd.DataFrame]:
        try:
            with pd.read_csv(
                self.path,
                sep=self.separator,
                encoding=self.encoding,
                compression="gzip" if _is_gzip(self.path) else None,
                header=0 if self.has_header else None,
                skiprows=self.skipped,
                skip_blank_lines=len(self.columns) > 1,
                # pandas drops what has no name, without an error.
                names=[*self.columns, *range(self.unnamed)],
                index_col=False,
                dtype=object,
                na_filter=False,
                nrows=None if limit is None else limit + self.blank_end,
                chunksize=size,
            ) as reader:
                for rows in reader:
                    self._check_unnamed(rows)
                    yield rows
        except pd.errors.EmptyDataError as error:
            raise no_rows(self.path) from error
        except pd.errors.ParserError as error:
            reason = one_line(error).replace("Error tokenizing data. C error: ", "")
            raise TableError(
                f"{self.path} cannot be read as a table: {reason}; put quotes around values that "
                "hold the separator, and close every quote"
            ) from error
        except (OSError, EOFError, UnicodeError, zlib.error) as error:
            raise TableError(f"{self.path} cannot be read: {error}") from error

    def _check_unnamed(self, rows: pd.DataFrame) -> None:
        """Raise TableError where a value lies beyond the names, as after a decimal comma."""
        cells = rows.iloc[:, len(self.columns) :].astype(str)
        wrong = cells.apply(lambda column: column.str.strip() != "").any(axis=1)
        if wrong.any():
            raise TableError(
                f"{self.path} must have as many values in every row as names, {len(self.columns)}, "
                f"but row {wrong.idxmax() + 1 + self.has_header:,} has more; put quotes around "
                "values that hold the separator"
            )


def open_csv(path: Path, *, headless: bool, latin1: bool = False) -> TableFile:
    """Open a file of text, whose encoding and separator are found.

    Args:
        path: path of the file.
        headless: whether a first row of numbers is data instead of names.
        latin1: as for ``open_table``.

    Raises:
        TableError: it cannot be read, is empty or no text, or its first rows are not alike.
    """
    encoding, sha256, remarks, counts, text_size = _examined(path, latin1=latin1)
    with _opened(path) as file:
        text = file.read(_SAMPLE).decode(encoding, errors="replace")
        whole = not file.read(1)
    if not whole:  # the last row may be cut off
        text = text[: max(text.rfind("\n"), text.rfind("\r")) + 1] or text
    if not text.strip():
        raise TableError(f"{path} is empty; it must begin with a row of column names")
    separator, records, skipped = _separated(text, path)
    header = records[0]
    has_header = not headless or not _are_numbers(header)
    _check_first_line(path, records)
    if separator != "," and len(header) > 1:
        remarks.append(f"values are separated by {_SEPARATORS[separator]}s")
    for number, record in enumerate(records[1:], start=2):
        if any(value.strip() for value in record[len(header) :]):
            raise TableError(
                f"{path} must have as many values in every row as names in its first, "
                f"{len(header)}, but row {number} has {len(record)}; put quotes around values "
                "that hold the separator"
            )
    if not counts.agree(separator, len(header)):
        with io.TextIOWrapper(_opened(path), encoding, "replace", newline="") as lines:
            remarks += short_rows_remark(lines, separator, len(header))
    columns = tuple(
        (name.strip() if has_header else "") or f"column {place}"
        for place, name in enumerate(header, start=1)
    )
    columns, more = numbered(columns)
    blank_end = 0
    if len(columns) == 1:
        with io.TextIOWrapper(_opened(path), encoding, "replace") as lines:
            blank_end = _blank_end(lines)
    remarks += more
    return _CsvFile(
        path,
        columns,
        sha256,
        tuple(remarks),
        encoding,
        separator,
        has_header,
        skipped if has_header else 0,  # without names every line may be a row
        blank_end,
        max(map(len, records)) - len(header),
        text_size,
    )


def _blank_end(lines: Iterable[str]) -> int:
    """Return the number of empty lines at the end."""
    count = 0
    for line in lines:
        count = count + 1 if line == "\n" else 0
    return count


def _without_end(parts: Iterable[pd.DataFrame], count: int) -> Iterator[pd.DataFrame]:
    """Yield the rows of all parts but the last ``count``, no part empty."""
    waiting: pd.DataFrame | None = None
    for part in parts:
        rows = part if waiting is None else pd.concat([waiting, part], ignore_index=True)
        kept = len(rows) - count
        if kept > 0:
            yield rows.iloc[:kept]
        waiting = rows.iloc[max(0, kept) :] if count else None


def _check_first_line(path: Path, records: Sequence[Sequence[str]]) -> None:
    """Raise TableError where the first line holds no names of columns."""
    header, others = records[0], records[1:]
    first = header[0].strip().lower()
    if first.startswith("sep="):
        raise TableError(
            f"{path} must begin with the names of its columns, got a line that begins with "
            f"{header[0].strip()!r}; remove it"
        )
    wider = sum(len(record) > 1 for record in others)
    if len(header) == 1 and 2 * wider > len(others):
        raise TableError(
            f"{path} must begin with the names of its columns, got {header[0].strip()!r} above "
            f"rows of {max(map(len, others))} values; remove the lines above the names"
        )


def _are_numbers(texts: Sequence[str]) -> bool:
    return not pd.to_numeric(pd.Series(texts), errors="coerce").isna().any()


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if _is_gzip(path) else path.open("rb")


def _examined(path: Path, *, latin1: bool) -> tuple[str, str, list[str], SeparatorCount, int]:
    """Return encoding and digest of a file's text, remarks, the number of separators, and bytes."""
    digest = hashlib.sha256()
    decoder: codecs.IncrementalDecoder | None = None
    utf16 = valid = True
    windows = not latin1
    size = 0
    try:
        with _opened(path) as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                if decoder is None:
                    utf16 = block[:2] in (b"\xff\xfe", b"\xfe\xff")
                    decoder = codecs.getincrementaldecoder("utf-8")()
                    _check_is_text(path, block)
                    counts = SeparatorCount(_SEPARATORS, utf16=utf16)
                if not utf16 and b"\0" in block:
                    raise TableError(f"{path} is not text: byte {size + block.index(0)} is zero")
                size += len(block)
                counts.update(block)
                windows = windows and not any(byte in block for byte in _NOT_WINDOWS)
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
    except (OSError, EOFError, zlib.error) as error:
        raise TableError(f"{path} cannot be read: {error}") from error
    if utf16:
        return "utf-16", digest.hexdigest(), [], counts, size
    if valid:
        return "utf-8-sig", digest.hexdigest(), [], counts, size
    # Latin-1 decodes every byte, but those of the euro sign, curly quotes and dashes to controls.
    encoding, name = ("cp1252", "Windows-1252") if windows else ("latin-1", "Latin-1")
    remark = f"the file is not UTF-8 and was read as {name}; if names look wrong, save it as UTF-8"
    return encoding, digest.hexdigest(), [remark], counts, size


def _check_is_text(path: Path, block: bytes) -> None:
    if block[:4] == b"PK\x03\x04":
        raise TableError(f"{path} is a zip archive or an Excel workbook; save the table as CSV")
    if block[:4] in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):  # the first begins as UTF-16 does
        raise TableError(f"{path} must be UTF-8, got UTF-32; save it as UTF-8")
    if PurePath(path.name.removesuffix(".gz")).suffix.lower() in _JSON:
        raise TableError(f"{path} is JSON by its name; save the table as CSV or Parquet")
    if block[:4] == b"PAR1":
        raise TableError(f"{path} is a Parquet file; give it a name that ends in .parquet")


def _separated(text: str, path: Path) -> tuple[str, list[list[str]], int]:
    """Return the separator that gives the most columns in every row alike, and the first rows.

    The number of lines without a value above them comes last. Where another separator leaves
    commas in the rows only within numbers, these are decimal commas, and it is the separator,
    although a comma in a name may give the comma as many columns. A name above numbers that one
    comma splits is a column with decimal commas.
    """
    best: tuple[tuple[float, int], str, list[list[str]], int] | None = None
    for separator in _SEPARATORS:
        try:
            lines = io.StringIO(text, newline="")
            found = list(itertools.islice(records_of(lines, separator), 200))
        except csv.Error as error:
            raise TableError(f"{path} cannot be read as a table: {error}") from error
        records = [record for record in found if any(record)]
        if not records:
            continue
        width = len(records[0])
        alike = sum(len(record) == width for record in records) / len(records)
        rank = (round(alike, 1) if width > 1 else -1.0, width)
        is_decimal = separator != "," and rank >= (1.0, 2) and _has_decimal_commas(records[1:])
        if best is None or rank > best[0] or (best[1] == "," and is_decimal):
            best = rank, separator, records, found.index(records[0])
    if best is None:
        raise TableError(f"{path} is empty; it must begin with a row of column names")
    _, separator, records, skipped = best
    values = [",".join(record) for record in records[1:]]
    split = len(records[0]) == 1 and separator == "," and any("," in value for value in values)
    if split and all(map(_DECIMAL_COMMA.fullmatch, values)):
        return ";", [records[0], *([value] for value in values)], skipped
    return separator, records, skipped


def _has_decimal_commas(records: Sequence[Sequence[str]]) -> bool:
    """Return whether there are commas, all of them within numbers."""
    cells = [cell.strip() for record in records for cell in record if "," in cell]
    return bool(cells) and all(map(_DECIMAL_COMMA.fullmatch, cells))
