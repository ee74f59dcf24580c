"""Encode columns of numbers: standardised, and skewed ones a second time without skew."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch

from bayesify.tabular import robust
from bayesify.tabular.cells import Floats, Texts
from bayesify.tabular.columns.column import LARGEST_INPUT, Column
from bayesify.tabular.number_form import NumberForm
from bayesify.tabular.scaling import Scaling
from bayesify.tabular.skew import scores_without_skew

__all__ = ["HUGE", "NumberColumn", "RangedColumn", "facts_of"]

#: Inputs are left as they are up to a size between these: the largest that is not wild, or that of
#: this share of the training values.
_PLAIN, _RARE = (1.5, 10.0), 0.99
#: Correlation of inputs and normal scores below which a column of numbers has both.
_NEARLY_NORMAL = 0.93
#: Stands for infinity in JSON; no other finite float64 of use is larger.
HUGE = 1.7e308


@dataclass(frozen=True, kw_only=True)
class RangedColumn(Column):
    """Column of numbers on an axis, standardised so that no value is far from 0.

    Mean and standard deviation are those of the training values within a wide range around their
    central part, those beyond moved to its ends, so that a wild value has no effect on the others.
    Large inputs are moved smoothly to below a limit. Runs of earlier versions have neither.

    Args:
        mean: mean of the training values.
        std: their standard deviation; 0 for a constant column, whose input is 0.
        low: values below it lie far outside training's.
        high: values above it lie far outside training's.
        spread: interquartile range of the training values, the unit of ``outside``; 0 for a
            constant column, outside of which any other value lies infinitely far.
        plain: size up to which inputs are left as they are; 0 leaves them all.
    """

    mean: float = 0.0
    std: float = 1.0
    low: float = -HUGE
    high: float = HUGE
    spread: float = 1.0
    plain: float = 0.0

    def fit(self, values: Floats, *, tail: int = 1, weights: Floats | None = None) -> Self:
        """Add mean, standard deviation and range of the finite training values."""
        column = super().fit(values)
        known = np.isfinite(values)
        if not known.any():
            return column
        counts = np.ones(len(values)) if weights is None else weights
        finite, counts = values[known], counts[known]
        ends = robust.bounds(finite, counts, robust.WILD)
        central = torch.from_numpy(np.clip(finite, *ends)).unsqueeze(-1)
        scaling = Scaling.of(central, torch.from_numpy(counts))
        mean, std = scaling.shift.item(), scaling.scale.item()
        sizes = np.abs(finite / std - mean / std)
        ordinary = sizes[(ends[0] <= finite) & (finite <= ends[1])].max()
        plain = min(max(_PLAIN[0], ordinary, robust.quantile(sizes, counts, _RARE)), _PLAIN[1])
        rounding = 4.0 * float(np.finfo(np.float64).eps) * abs(mean)
        if finite.max() - finite.min() <= rounding:
            low, high = float(finite.min()), float(finite.max())
            # The same number as float32 does not lie outside.
            narrow = [float(np.float32(end)) for end in (low, high)]
            ends = min(low - rounding, *narrow), max(high + rounding, *narrow)
            return dataclasses.replace(
                column, mean=mean, std=0.0, low=ends[0], high=ends[1], spread=0.0
            )
        # Weights of a small sum tell which rows count more, but not that there are few rows.
        counts = counts * max(1.0, len(counts) / counts.sum())
        low, high = robust.extremes(finite, counts, tail)
        halved = finite / 2.0  # so that differences are finite
        quarter, three = robust.interpolated_quantiles(halved, counts, np.array([0.25, 0.75]))
        spread = min(2.0 * float(three - quarter), HUGE)
        if not spread:
            spread = min(high / 2.0 - low / 2.0, 0.5 * HUGE) * 2.0 or abs(mean) or 1.0
        return dataclasses.replace(
            column,
            mean=mean,
            std=std,
            plain=plain,
            low=max(low - spread, -HUGE),
            high=min(high + spread, HUGE),
            spread=spread,
        )

    def _standardised(self, values: Floats) -> Floats:
        if not self.std:
            return np.zeros(len(values))
        known = torch.from_numpy(np.where(np.isfinite(values), values, self.mean))
        scaled = Scaling.of_numbers(self.mean, self.std).standardised(known)
        inputs = np.asarray(scaled.clamp(-LARGEST_INPUT, LARGEST_INPUT).numpy(), np.float64)
        return robust.moderated(inputs, self.plain) if self.plain else inputs

    def outside(self, values: Floats) -> Floats:
        """Return the distance beyond the range, in interquartile ranges."""
        known = np.where(np.isfinite(values), values, self.mean)
        excess = np.maximum(self.low - known, known - self.high)
        if self.spread:
            with np.errstate(over="ignore"):
                beyond = np.maximum(excess / self.spread, 0.0)
        else:
            beyond = np.where(excess > 0.0, math.inf, 0.0)
        return np.maximum(super().outside(values), beyond)


def facts_of(values: Floats) -> tuple[bool, tuple[float, ...]]:
    """Return whether the finite values are whole; and their minimum, quartiles and maximum.

    Example:
        >>> facts_of(np.array([4.0, 1.0, 2.0, math.nan]))
        (True, (1.0, 1.5, 2.0, 3.0, 4.0))
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return False, ()
    halved = np.quantile(finite / 2.0, (0.0, 0.25, 0.5, 0.75, 1.0))  # differences do not overflow
    return bool((finite == np.round(finite)).all()), tuple((2.0 * halved).tolist())


@dataclass(frozen=True, kw_only=True)
class NumberColumn(RangedColumn):
    """Numbers: standardised, and if they are far from normal also with the skew removed.

    The second input, a logarithm or the normal score of the rank, tells apart values that lie close
    together next to much larger ones; see :func:`bayesify.tabular.skew.scores_without_skew`.

    Args:
        decimal_comma: whether 1.5 is written 1,5.
        knots: values at which the map to scores bends; none for a column without.
        scores: their scores.
        thousands: what separates thousands, if anything.
        unit: unit around every number, or sign of a currency or of percent.
        whole: whether the training values are whole.
        typical: minimum, quartiles and maximum of the training values.
        infinite: whether training had infinite cells, which count as missing.
        spans: whether training had time spans, which count in days; None if it is not known.

    Example:
        >>> column = NumberColumn(name="age")
        >>> values = column.parse(np.array(["1", "3", "old", ""], dtype=object))
        >>> values
        array([ 1.,  3., inf, nan])
        >>> column.fit(values).encode(values)
        array([[-1.,  0.],
               [ 1.,  0.],
               [ 0.,  1.],
               [ 0.,  1.]], dtype=float32)
    """

    decimal_comma: bool = False
    knots: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()
    thousands: str = ""
    unit: str = ""
    whole: bool = False
    typical: tuple[float, ...] = ()
    infinite: bool = False
    spans: bool | None = None
    kind: ClassVar[str] = "number"

    @property
    def form(self) -> NumberForm:
        """How the numbers are written."""
        return NumberForm(self.decimal_comma, self.thousands, self.unit)

    def _parse(self, texts: Texts) -> Floats:
        return self.form.parse(texts)

    def fit(self, values: Floats, *, tail: int = 1, weights: Floats | None = None) -> Self:
        """Also find what new numbers are recognised by, and scores for numbers far from normal."""
        whole, typical = facts_of(values)
        column = dataclasses.replace(
            super().fit(values, tail=tail, weights=weights), whole=whole, typical=typical
        )
        known = np.isfinite(values)
        if not known.any() or not column.std:
            return column
        finite = values[known]
        counts = np.ones(len(finite)) if weights is None else weights[known]
        by_rank = np.interp(finite, *robust.normal_scores(finite, counts))
        inputs = column._standardised(finite)
        if robust.correlation(inputs, by_rank, counts) >= _NEARLY_NORMAL:
            return column
        knots, scores = scores_without_skew(finite, counts)
        return dataclasses.replace(
            column, knots=tuple(knots.tolist()), scores=tuple(scores.tolist())
        )

    @property
    def own_features(self) -> tuple[str, ...]:
        """The column's name, and another for its ranks."""
        return (self.name, f"{self.name} by rank") if self.knots else (self.name,)

    def _encode(self, values: Floats) -> list[Floats]:
        inputs = [self._standardised(values)]
        if self.knots:
            known = np.isfinite(values)
            scores = np.interp(np.where(known, values, self.mean), self.knots, self.scores)
            inputs.append(np.where(known, scores, 0.0))
        return inputs
