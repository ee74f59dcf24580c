"""Number the names of columns that occur again in a table."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["numbered"]


def numbered(names: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return the names, with a number after each that occurred before, and remarks on these.

    Example:
        >>> numbered(["x", "y", "x"])
        (('x', 'y', 'x (2)'), ["the column name 'x' occurs again; this column is 'x (2)'"])
    """
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
