"""Encode columns of categories, and of yes and no."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from bayesify.tabular.cells import Floats, Texts, as_flags
from bayesify.tabular.columns.column import Column

__all__ = ["FEW_LEVELS", "MOST_LEVELS", "CategoryColumn", "FlagColumn"]

#: Levels of a category that can have an input of their own; the rest share one.
MOST_LEVELS = 256
#: So few texts can be levels, even if almost every row has a text of its own.
FEW_LEVELS = 50


@dataclass(frozen=True, kw_only=True)
class FlagColumn(Column):
    """Yes or no: 1 or -1.

    Args:
        words: those for no and yes, in lower case.
        only: the one value, 0 or 1, that training had, outside of which the other lies infinitely
            far; None where it had both. Runs of earlier versions have None.

    Example:
        >>> column = FlagColumn(name="sold", words=("no", "yes"))
        >>> column.encode(column.parse(np.array(["Yes", "no"], dtype=object))).tolist()
        [[1.0], [-1.0]]
        >>> column.fit(np.ones(3)).outside(np.array([1.0, 0.0])).tolist()
        [0.0, inf]
    """

    words: tuple[str, str]
    only: float | None = None
    kind: ClassVar[str] = "flag"

    def _parse(self, texts: Texts) -> Floats:
        return as_flags(texts, self.words)

    def fit(self, values: Floats, *, tail: int = 1, weights: Floats | None = None) -> Self:
        """Add the one value of training, if it had one only."""
        column = super().fit(values, tail=tail, weights=weights)
        found = np.unique(values[np.isfinite(values)]).tolist()
        return dataclasses.replace(column, only=found[0] if len(found) == 1 else None)

    @property
    def own_features(self) -> tuple[str, ...]:
        """The column's name."""
        return (self.name,)

    def _encode(self, values: Floats) -> list[Floats]:
        return [np.where(np.isfinite(values), 2.0 * values - 1.0, 0.0)]

    def outside(self, values: Floats) -> Floats:
        """Return infinity for the value that training did not have."""
        far = super().outside(values)
        if self.only is None:
            return far
        return np.where(np.isfinite(values) & (values != self.only), math.inf, far)


@dataclass(frozen=True, kw_only=True)
class CategoryColumn(Column):
    """Levels: an input for each of the most frequent ones, and one for all others.

    A level that is not in the training table counts as one of the others, and lies outside. A
    column with one level has no inputs if none is kept.

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
        places = pd.Index(self.levels, dtype=object).get_indexer(pd.Index(texts, dtype=object))
        return np.where(places < 0, math.inf, places)

    def _is_missing(self, values: Floats) -> npt.NDArray[np.bool_]:
        return np.isnan(values)  # an unknown level, inf, is not missing

    def without_unseen(self, seen: npt.NDArray[np.bool_]) -> Self:
        """Return the column without the levels that no training row has, unless all are such.

        Args:
            seen: whether a training row has each level.

        Example:
            >>> column = CategoryColumn(name="city", levels=("Rome", "Oslo", "Pau"), kept=2)
            >>> smaller = column.without_unseen(np.array([True, False, True]))
            >>> smaller.levels, smaller.kept, smaller.codes_of(column, np.arange(3.0)).tolist()
            (('Rome', 'Pau'), 1, [0.0, inf, 1.0])
        """
        if not seen.any():
            return self
        levels = tuple(itertools.compress(self.levels, seen))
        return dataclasses.replace(self, levels=levels, kept=int(seen[: self.kept].sum()))

    def codes_of(self, other: Self, values: Floats) -> Floats:
        """Return the values of another column as those of this one, by the names of the levels."""
        if self.levels == other.levels:
            return values
        known = np.isfinite(values)
        codes = self._parse(np.array(other.levels, dtype=object))
        return np.where(known, codes[np.where(known, values, 0.0).astype(np.int64)], values)

    @property
    def own_features(self) -> tuple[str, ...]:
        """The levels."""
        other = ("another",) if self._shared else ()
        return tuple(f"{self.name} = {level}" for level in (*self.levels[: self.kept], *other))

    def _encode(self, values: Floats) -> list[npt.NDArray[np.bool_]]:
        # Hundreds of inputs take an eighth of the memory that numbers take.
        inputs = [values == place for place in range(self.kept)]
        return [*inputs, values >= self.kept] if self._shared else inputs

    @property
    def _shared(self) -> bool:
        """Whether there is an input for all other levels."""
        return max(1, self.kept) < len(self.levels)
