"""A column of a table: from text to values, to the network's inputs, and to what is far outside.

A column's values are float64, whatever it holds: a number, days since 1970, 0 or 1, or the index
of a level. nan is a missing value, and inf one that the column has no place for: an infinite
number, text among numbers, a level that training never saw.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from bayesify.tables.text import Floats, Texts, by_value, is_missing

__all__ = ["Column", "Features"]

#: Inputs of the network, shape (N, number of features).
Features = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Column(ABC):
    """A column that the network is given.

    Args:
        name: as in the table's first row.
        missing: whether training had missing values, which then have an input of their own.
    """

    name: str
    missing: bool = False

    kind: ClassVar[str]

    def parse(self, texts: Texts) -> Floats:
        """The values of some cells, shape (N,)."""
        codes, unique = by_value(texts)
        values = self._parse(unique).copy()
        strange = ~np.isfinite(values)
        values[strange] = np.where(is_missing(unique[strange]), math.nan, math.inf)
        return values[codes]

    @abstractmethod
    def _parse(self, texts: Texts) -> Floats:
        """The values of stripped cells; not finite where they have none."""

    def fit(self, values: Floats, *, tail: int = 1) -> Self:
        """This column with what it needs to know of its training values.

        Args:
            values: of the training rows, shape (N,).
            tail: the range is from the ``tail``-th smallest to the ``tail``-th largest.
        """
        del tail
        return dataclasses.replace(self, missing=bool((~np.isfinite(values)).any()))

    @property
    @abstractmethod
    def own_features(self) -> tuple[str, ...]:
        """The names of its inputs, but for that of missing values."""

    @property
    def features(self) -> tuple[str, ...]:
        """The names of its inputs."""
        return (*self.own_features, *((f"{self.name} is missing",) if self.missing else ()))

    @abstractmethod
    def _encode(self, values: Floats) -> list[Floats]:
        """Its own inputs; of a value that is not finite zeros, training's mean."""

    def encode(self, values: Floats) -> Features:
        """The network's inputs, shape (N, number of features)."""
        inputs = self._encode(values)
        if self.missing:
            inputs.append(np.where(np.isfinite(values), 0.0, 1.0))
        return np.stack(inputs, axis=1).astype(np.float32)

    def outside(self, values: Floats) -> Floats:
        """How far values lie outside training's, shape (N,): 0 within, inf where it has no place.

        A missing value lies outside where training had none.
        """
        far = np.where(np.isposinf(values), math.inf, 0.0)
        return far if self.missing else np.where(np.isnan(values), math.inf, far)

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON."""
        return {"kind": self.kind, **dataclasses.asdict(self)}
