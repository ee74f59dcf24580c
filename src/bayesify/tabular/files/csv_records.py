"""Read the records of a text with separators, whatever the length of their values."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator

__all__ = ["records_of"]

#: Characters of a value; the module's own limit is 131,072, which a long text or an image exceeds.
_LONGEST = 2**31 - 1


def records_of(lines: Iterable[str], separator: str) -> Iterator[list[str]]:
    r"""Yield the values of each record, which may span several lines.

    Raises:
        csv.Error: a record cannot be read.

    Example:
        >>> list(records_of(['x,y\n', '1,"2,\n', '3"\n'], ","))
        [['x', 'y'], ['1', '2,\n3']]
    """
    reader = csv.reader(lines, delimiter=separator)
    while True:
        before = csv.field_size_limit(_LONGEST)  # of the whole process, hence for one record only
        try:
            record = next(reader, None)
        finally:
            csv.field_size_limit(before)
        if record is None:
            return
        yield record
