"""Parts of a report and the formats of their numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Part", "Table", "decimals", "fixed", "shown_number"]


class Table(NamedTuple):
    """Texts of a table: column heads, and rows that start with their name.

    Args:
        heads: heads of the columns.
        rows: cells of each row, the first of which is its name.
        title: heading of the table, if it needs one.
        shades: for each cell but the names a share from 0 to 1, which colours it: positive for
            what is right, negative for what is wrong; none for a plain table.
        has_texts: whether cells hold texts, which are broken into lines.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    shades: Sequence[Sequence[float]] = ()
    has_texts: bool = False


class Part(NamedTuple):
    """Part of a report under its heading.

    Args:
        name: its anchor in the page.
        heading: its heading; empty for that of its first figure.
        lead: a sentence at its top.
        tables: its tables.
        figures: names of its figures.
        side_by_side: whether the figures are narrow and share lines on a wide screen.
        caption: explanation of the whole part.
    """

    name: str
    heading: str = ""
    lead: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[str] = ()
    side_by_side: bool = False
    caption: str = ""


def fixed(value: Any, digits: int | None) -> str:
    """Format a number with this many decimals; None chooses them by its size.

    Example:
        >>> fixed(0.5, 2), fixed(1234567.0, None), fixed("text", 2)
        ('0.50', '1,234,567', 'text')
    """
    if not isinstance(value, int | float):
        return str(value)
    return shown_number(value) if digits is None else f"{value:z,.{digits}f}"


def shown_number(value: float) -> str:
    """Format a number in the unit of a target with four digits or more, none of them rounded off.

    Example:
        >>> [shown_number(value) for value in (35.33519, 0.02, 0.0, 1234567.8, 2e-9)]
        ['35.34', '0.02000', '0', '1,234,568', '2e-09']
    """
    if value == 0.0 or not math.isfinite(value):
        return f"{value:g}"
    size = math.floor(math.log10(abs(value)))
    return f"{value:,.{decimals(value)}f}" if -4 <= size <= 15 else f"{value:.4g}"


def decimals(value: float) -> int:
    """Return the decimals of a number with four digits, at most 12.

    Example:
        >>> decimals(35.3), decimals(0.02), decimals(1e6), decimals(0.0)
        (2, 5, 0, 4)
    """
    if value == 0.0 or not math.isfinite(value):
        return 4
    return min(12, max(0, 3 - math.floor(math.log10(abs(value)))))
