"""The reading of one column: its parser, a remark or an error, and their words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bayesify.tabular.cells import Texts
from bayesify.tabular.columns import CategoryColumn, Column, DateColumn, FlagColumn, NumberColumn
from bayesify.tabular.drift.column_cells import ColumnCells
from bayesify.tabular.drift.date_forms import date_words
from bayesify.tabular.drift.target import Labels

__all__ = ["Reading", "as_in_training", "refused", "shown", "written"]


@dataclass(frozen=True)
class Reading:
    """How one column of a new table is read.

    Args:
        column: column that parses the cells, to values of training's column.
        remark: note for the user; "" if it is read as in training, and whole.
        error: why the column must not be read; "" if it may.
    """

    column: Column
    remark: str = ""
    error: str = ""


def refused(
    cells: ColumnCells,
    looks: str,
    mend: str = "write them as in training",
    rival: Column | None = None,
) -> Reading:
    """Return an error that names the column, how training writes it and how the cells look.

    Args:
        cells: the cells.
        looks: the cells that cannot be read, in words.
        mend: what to do about it.
        rival: the reading that fits better than training's; None if there is none.
    """
    name = cells.column.name
    return Reading(
        rival or cells.column,
        error=f"the column {name!r} must hold {written(cells.column)}, as in training, got "
        f"{looks}; {mend}",
    )


def as_in_training(cells: ColumnCells) -> Reading:
    """Return training's own reading, unless it does not read too many cells."""
    column = cells.column
    if not cells.unread:
        return Reading(column)
    examples = shown(cells.unread_texts)
    if cells.many_unread:
        return refused(cells, f"{cells.unread:,} of {cells.known:,} cells like {examples}")
    if isinstance(column, CategoryColumn) and not isinstance(column, Labels):
        return Reading(column)  # a new level is no other format
    what, verb = ("cell", cells.fate[0]) if cells.unread == 1 else ("cells", cells.fate[1])
    return Reading(
        column,
        f"{column.name}: {cells.unread:,} {what} like {examples} {verb}, for training has "
        f"{written(column)}",
    )


def shown(texts: Sequence[str] | dict[str, int] | Texts) -> str:
    """Return the first three texts, cut short, for a message."""
    short = [text if len(text) <= 40 else f"{text[:37]}..." for text in list(texts)[:3]]
    return ", ".join(map(repr, short))


def written(column: Column) -> str:
    """Return how training's cells are written, in words."""
    if isinstance(column, NumberColumn):
        return column.form.words
    if isinstance(column, DateColumn):
        return f"dates as {date_words(column.form)}"
    if isinstance(column, FlagColumn):
        return " or ".join(map(repr, column.words))
    assert isinstance(column, CategoryColumn)
    more = ", ..." if len(column.levels) > 3 else ""
    return f"levels such as {shown(column.levels)}{more}"
