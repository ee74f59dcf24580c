"""Define what every column of a table does: parse cells, encode values, measure what is outside.

The values of a column are float64: numbers, days since 1970, 0 and 1, indices of levels, or F
features for each text. nan is a missing value. inf is a value that the column cannot hold: an
infinite number, text among numbers, a level that is not in the training table.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from bayesify.tabular.cells import Floats, Texts, by_value, is_missing

__all__ = ["LARGEST_INPUT", "Column", "Features", "UnusedColumn"]

#: Inputs of the network, shape (N, number of features).
Features = npt.NDArray[np.float32]
#: Inputs are clipped to this, far from overflow in float32; such rows are far outside anyhow.
LARGEST_INPUT = 1e6


@dataclass(frozen=True, kw_only=True)
class Column(ABC):
    """Input column of a table.

    Args:
        name: name in the table's header.
        missing: whether training had missing values; then they have an input of their own.
    """

    name: str
    missing: bool = False

    kind: ClassVar[str]

    def parse(self, texts: Texts) -> Floats:
        """Return the values of some cells, shape (N,), or (N, F) for texts."""
        codes, unique = by_value(texts)
        values = self._parse(unique).copy()
        strange = ~np.isfinite(values)
        values[strange] = np.where(is_missing(unique[strange]), math.nan, math.inf)
        return values[codes]

    @abstractmethod
    def _parse(self, texts: Texts) -> Floats:
        """Return the values of stripped cells; not finite for a cell without one."""

    def within(self, folder: Path) -> Self:
        """Return the column for a table in a folder, to which paths in its cells are relative."""
        del folder
        return self

    def fit(self, values: Floats, *, tail: int = 1, weights: Floats | None = None) -> Self:
        """Return this column with the statistics of its training values.

        Args:
            values: values of the training rows, shape (N,).
            tail: the range is from the ``tail``-th smallest to the ``tail``-th largest value.
            weights: the number of times that each row counts, shape (N,); None for once.
        """
        del tail, weights
        return dataclasses.replace(self, missing=bool(self._is_missing(values).any()))

    @property
    @abstractmethod
    def own_features(self) -> tuple[str, ...]:
        """Names of the inputs, without that of missing values."""

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return (*self.own_features, *((f"{self.name} is missing",) if self.missing else ()))

    @abstractmethod
    def _encode(self, values: Floats) -> Sequence[npt.NDArray[Any]]:
        """Return the inputs but that of missing values; zeros for values that are not finite."""

    def _is_missing(self, values: Floats) -> npt.NDArray[np.bool_]:
        return ~np.isfinite(values)

    def encode(self, values: Floats) -> Features:
        """Return the inputs of the network, shape (N, number of features)."""
        inputs = [*self._encode(values)]
        if self.missing:
            inputs.append(self._is_missing(values))
        return np.array(inputs, np.float32).reshape(len(inputs), len(values)).T

    def outside(self, values: Floats) -> Floats:
        """Return how far values lie outside training's, shape (N,).

        It is 0 within, and inf for a value that the column cannot hold and for a missing value
        where training had none.
        """
        far = np.where(np.isposinf(values), math.inf, 0.0)
        return far if self.missing else np.where(np.isnan(values), math.inf, far)

    def to_json(self) -> dict[str, Any]:
        """Return the column as JSON."""
        return {"kind": self.kind, **dataclasses.asdict(self)}


@dataclass(frozen=True, kw_only=True)
class UnusedColumn(Column):
    """Column without inputs, in which nothing lies outside.

    Example:
        >>> column = UnusedColumn(name="id")
        >>> column.encode(column.parse(np.array(["a", "b"], dtype=object))).shape
        (2, 0)
    """

    kind: ClassVar[str] = "unused"

    def _parse(self, texts: Texts) -> Floats:
        return np.zeros(len(texts))

    def fit(self, values: Floats, *, tail: int = 1, weights: Floats | None = None) -> Self:
        """Return the column as it is."""
        del values, tail, weights
        return self

    @property
    def own_features(self) -> tuple[str, ...]:
        """None."""
        return ()

    def _encode(self, values: Floats) -> list[Floats]:
        del values
        return []

    def outside(self, values: Floats) -> Floats:
        """Return zeros."""
        return np.zeros(len(values))
