"""Read words for yes and no, and levels in another case or spacing."""

from __future__ import annotations

import dataclasses
import math
import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np

from bayesify.tabular.cells import FLAG_WORDS, Floats, Texts
from bayesify.tabular.columns import CategoryColumn, Column, FlagColumn
from bayesify.tabular.drift.column_cells import ColumnCells
from bayesify.tabular.drift.reading import Reading, as_in_training, written
from bayesify.tabular.schema import label_of

__all__ = ["category_reading", "levels_of_cells", "words_reading"]

_NO_WORDS = {words[0] for words in FLAG_WORDS} | {"0", "0.0"}
_YES_WORDS = {words[1] for words in FLAG_WORDS} | {"1", "1.0"}


@dataclass(frozen=True, kw_only=True)
class _Words(FlagColumn):
    """Words for no and yes of several languages, and 0 and 1."""

    def _parse(self, texts: Texts) -> Floats:
        values = {**dict.fromkeys(_NO_WORDS, 0.0), **dict.fromkeys(_YES_WORDS, 1.0)}
        return np.array([values.get(text.lower(), math.nan) for text in texts])


def words_reading(column: Column, cells: ColumnCells) -> Reading | None:
    """Return the reading by words for no and yes, if every cell is one."""
    found = {text.lower() for text in cells.texts}
    if not found <= _NO_WORDS | _YES_WORDS:
        return None
    pairs = [
        f"{' and '.join(map(repr, sorted(found & words)))} as {meaning!r}"
        for words, meaning in ((_NO_WORDS, "no"), (_YES_WORDS, "yes"))
        if found & words
    ]
    remark = f"{column.name}: {', '.join(pairs)}, where training has {written(column)}"
    return Reading(_Words(name=column.name, words=("no", "yes")), remark)


@dataclass(frozen=True, kw_only=True)
class _Folded(CategoryColumn):
    """Levels in whatever case and with whatever blanks they are written.

    Where levels differ in these only, other cells are read as the one of them that is not rare; if
    several are not, nobody knows which is meant.
    """

    def _parse(self, texts: Texts) -> Floats:
        exact = {level: float(place) for place, level in enumerate(self.levels)}
        alike: dict[str, list[float]] = {}
        for level, place in exact.items():
            alike.setdefault(_folded(level), []).append(place)
        folded = {}
        for text, places in alike.items():
            frequent = [place for place in places if place < self.kept] or places
            if len(frequent) == 1:
                folded[text] = frequent[0]
        return np.array([exact.get(t, folded.get(_folded(t), math.inf)) for t in texts])


def _folded(text: str) -> str:
    # A letter with its accent may be one character or two.
    return " ".join(unicodedata.normalize("NFC", label_of(text)).casefold().split())


@dataclass(frozen=True, kw_only=True)
class _WordLabels(CategoryColumn):
    """Classes that are words for no and yes, written by other such words."""

    def _parse(self, texts: Texts) -> Floats:
        no = 0.0 if self.levels[0].lower() in _NO_WORDS else 1.0
        places = {**dict.fromkeys(_NO_WORDS, no), **dict.fromkeys(_YES_WORDS, 1.0 - no)}
        return np.array([places.get(text.lower(), math.inf) for text in texts])


def category_reading(column: CategoryColumn, cells: ColumnCells) -> Reading:
    """Return how levels are read: in any case and spacing, or other words for yes and no."""
    word_labels = _word_labels(column)
    if word_labels is not None:
        words = words_reading(column, cells)
        if words is not None:
            return Reading(word_labels, words.remark)
    folded = _folded_levels(column)
    read = np.isfinite(folded.parse(cells.texts))
    unread = int(cells.counts[~read].sum())
    if unread >= cells.unread:
        return as_in_training(cells)
    rest = dict(zip(cells.texts[~read], cells.counts[~read].tolist(), strict=True))
    left = dataclasses.replace(cells, unread=unread, unread_texts=rest)
    reading = as_in_training(left)
    if reading.error:
        return reading
    remark = f"{column.name}: levels read in any case and spacing, where training has "
    return Reading(folded, remark + written(column).removeprefix("levels such as "))


def levels_of_cells(column: CategoryColumn, cells: Texts) -> Floats:
    """Return the levels of cells, each of which is read as in a table of its own.

    Args:
        column: training's column.
        cells: the cells as text, "" where there is none.

    Returns:
        Values as of ``Column.parse``, shape (N,).

    Example:
        >>> column = CategoryColumn(name="city", levels=("New York", "Rome"), kept=2)
        >>> levels_of_cells(column, np.array(["rome", "new  york", "Oslo"], dtype=object)).tolist()
        [1.0, 0.0, inf]
    """
    values = column.parse(cells)
    for find_reader in (_word_labels, _folded_levels):
        unread = np.isposinf(values)
        reader = find_reader(column) if unread.any() else None
        if reader is not None:
            values[unread] = reader.parse(cells[unread])
    return values


def _word_labels(column: CategoryColumn) -> _WordLabels | None:
    """Return the reader of other words for yes and no; None if the levels are not such words."""
    levels = {level.lower() for level in column.levels}
    if len(levels) != 2 or any(len(levels & words) != 1 for words in (_NO_WORDS, _YES_WORDS)):
        return None
    return _WordLabels(**_fields(column))


def _folded_levels(column: CategoryColumn) -> _Folded:
    """Return the reader of any case and spacing."""
    return _Folded(**_fields(column))


def _fields(column: CategoryColumn) -> dict[str, Any]:
    return {each.name: getattr(column, each.name) for each in dataclasses.fields(column)}
