"""All kinds of columns: those of yes and no and of levels, and numbers and dates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from bayesify.tables.column import Column, Features
from bayesify.tables.files import TableError
from bayesify.tables.ranged import DateColumn, NumberColumn
from bayesify.tables.text import Floats, Texts, as_flags

__all__ = [
    "MOST_LEVELS",
    "CategoryColumn",
    "Column",
    "DateColumn",
    "Features",
    "FlagColumn",
    "NumberColumn",
    "column_from_json",
]

#: Levels of a category that have an input of their own; the rest share one.
MOST_LEVELS = 50


@dataclass(frozen=True, kw_only=True)
class FlagColumn(Column):
    """Yes or no: 1 or -1.

    Args:
        words: those for no and yes, in lower case.

    Example:
        >>> column = FlagColumn(name="sold", words=("no", "yes"))
        >>> column.encode(column.parse(np.array(["Yes", "no"], dtype=object))).tolist()
        [[1.0], [-1.0]]
    """

    words: tuple[str, str]
    kind: ClassVar[str] = "flag"

    def _parse(self, texts: Texts) -> Floats:
        return as_flags(texts, self.words)

    @property
    def own_features(self) -> tuple[str, ...]:
        """The column's name."""
        return (self.name,)

    def _encode(self, values: Floats) -> list[Floats]:
        return [np.where(np.isfinite(values), 2.0 * values - 1.0, 0.0)]


@dataclass(frozen=True, kw_only=True)
class CategoryColumn(Column):
    """One of some levels: an input for each of the first, and one for all others.

    A level that training never saw counts as one of the others, and lies outside.

    Args:
        levels: those of the training table, the most frequent first.
        kept: how many have an input of their own.

    Example:
        >>> column = CategoryColumn(name="city", levels=("Rome", "Oslo", "Pau"), kept=2)
        >>> column.features
        ('city = Rome', 'city = Oslo', 'city = another')
        >>> values = column.parse(np.array(["Oslo", "Pau", "Ulm"], dtype=object))
        >>> column.encode(values).tolist(), column.outside(values).tolist()
        ([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]], [0.0, 0.0, inf])
    """

    levels: tuple[str, ...]
    kept: int
    kind: ClassVar[str] = "category"

    def _parse(self, texts: Texts) -> Floats:
        places = {level: float(place) for place, level in enumerate(self.levels)}
        return np.array([places.get(text, math.inf) for text in texts], dtype=np.float64)

    def fit(self, values: Floats, *, tail: int = 1) -> Self:
        """Whether values are missing; a level without a place is not."""
        del tail
        return dataclasses.replace(self, missing=bool(np.isnan(values).any()))

    @property
    def own_features(self) -> tuple[str, ...]:
        """The levels."""
        other = ("another",) if self.kept < len(self.levels) else ()
        return tuple(f"{self.name} = {level}" for level in (*self.levels[: self.kept], *other))

    def _encode(self, values: Floats) -> list[Floats]:
        inputs = [np.where(values == place, 1.0, 0.0) for place in range(self.kept)]
        if self.kept < len(self.levels):
            inputs.append(np.where(values >= self.kept, 1.0, 0.0))
        return inputs

    def encode(self, values: Floats) -> Features:
        """The network's inputs; a level that training never saw is not a missing value."""
        inputs = self._encode(values)
        if self.missing:
            inputs.append(np.where(np.isnan(values), 1.0, 0.0))
        return np.stack(inputs, axis=1).astype(np.float32)


_KINDS: dict[str, type[Column]] = {
    kind.kind: kind for kind in (NumberColumn, DateColumn, FlagColumn, CategoryColumn)
}


def column_from_json(stored: Mapping[str, Any]) -> Column:
    """The column that :meth:`Column.to_json` wrote.

    Raises:
        TableError: it is not of this form.

    Example:
        >>> column_from_json(FlagColumn(name="sold", words=("no", "yes")).to_json()).name
        'sold'
    """
    try:
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in stored.items()
            if name != "kind"
        }
        return _KINDS[stored["kind"]](**fields)
    except (KeyError, TypeError) as error:
        raise TableError(f"a stored column cannot be read: {error}") from error
