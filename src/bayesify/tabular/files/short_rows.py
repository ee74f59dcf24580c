"""Find rows of a text that have fewer values than its header."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

import numpy as np

from bayesify.tabular.files.csv_records import records_of

__all__ = ["SeparatorCount", "short_rows_remark"]

_QUOTE = ord('"')


class SeparatorCount:
    r"""Number of separators and of lines in a text, outside quotes.

    No row has more values than the header, so that all rows are whole if the numbers agree. They
    may also disagree for other reasons, such as empty lines or quotes within a value.

    Args:
        separators: the characters to count, of ASCII.
        utf16: whether the text is UTF-16; else ASCII characters are one byte each.

    Example:
        >>> counts = SeparatorCount(",;")
        >>> counts.update(b'x,y\n1,"2,\n3"\n')
        >>> counts.agree(",", 2), counts.agree(",", 3)
        (True, False)
    """

    def __init__(self, separators: Iterable[str], *, utf16: bool = False) -> None:
        self._counts = dict.fromkeys(separators, 0)
        self._lines = 0
        self._is_quoted = 0
        self._last = b""
        self._decoder = codecs.getincrementaldecoder("utf-16")("replace") if utf16 else None

    def update(self, block: bytes) -> None:
        """Count those of the next bytes."""
        if self._decoder is not None:
            block = self._decoder.decode(block).encode()
        if not block:
            return
        before, self._last = self._last, block[-1:]
        if self._is_quoted or _QUOTE in block:
            codes = np.frombuffer(block, np.uint8)
            # An odd number of quotes before a byte; a sum of bytes keeps its parity.
            odd = np.cumsum(codes == _QUOTE, dtype=np.uint8) + np.uint8(self._is_quoted) & 1
            self._is_quoted = int(odd[-1]) if len(odd) else self._is_quoted
            block = codes[odd == 0].tobytes()
        for separator in self._counts:
            self._counts[separator] += block.count(separator.encode())
        # A lone carriage return ends a line as well, in a file whose other lines end otherwise too.
        pairs = block.count(b"\r\n") + (before == b"\r" and block.startswith(b"\n"))
        self._lines += block.count(b"\n") + block.count(b"\r") - pairs

    def agree(self, separator: str, width: int) -> bool:
        """Return whether there are as many as if every line had ``width`` values."""
        lines = self._lines + (self._last not in (b"\n", b"\r"))
        return self._counts[separator] == lines * (width - 1)


def short_rows_remark(lines: Iterable[str], separator: str, width: int) -> list[str]:
    r"""Return a remark on the rows that have fewer values than the header, if there are any.

    Rows are counted from the header, which is the first, without empty lines.

    Example:
        >>> short_rows_remark(["x,y\n", "1\n", "2,3\n"], ",", 2)
        ['1 row has fewer values than the header, row 2; what lacks is read as missing']
    """
    count = first = 0
    for number, record in enumerate(_rows(lines, separator), start=1):
        if len(record) < width:
            count += 1
            first = first or number
    if not count:
        return []
    what = (
        f"1 row has fewer values than the header, row {first:,}"
        if count == 1
        else f"{count:,} rows have fewer values than the header, the first is row {first:,}"
    )
    return [f"{what}; what lacks is read as missing"]


def _rows(lines: Iterable[str], separator: str) -> Iterator[list[str]]:
    for record in records_of(lines, separator):
        if len(record) > 1 or (record and record[0].strip()):
            yield record
