"""Columns of numbers and of dates: standardised, and with a range that training gives them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from bayesify.tables.column import Column
from bayesify.tables.text import Floats, Texts, as_days, as_numbers

__all__ = ["DateColumn", "NumberColumn", "RangedColumn", "mean_and_std"]

#: Inputs are kept from overflowing float32; such rows are far outside anyhow.
_LARGEST = 1e6
#: Beyond every float64 but infinity, which JSON has no word for.
_HUGE = 1.7e308
_CYCLES = {"year": 365.2425, "week": 7.0, "day": 1.0}


def mean_and_std(values: Floats) -> tuple[float, float]:
    """Mean and standard deviation of finite values; 1 for the latter where it is only rounding.

    Example:
        >>> mean_and_std(np.array([1e200, 3e200])), mean_and_std(np.array([0.1, 0.1]))
        ((2e+200, 1e+200), (0.1, 1.0))
    """
    # Scaled, exactly, so that squares of huge values are finite; shifted, so that little is lost.
    exponent = int(np.frexp(np.abs(values).max())[1])
    parts = np.ldexp(values, -exponent)
    differences = parts - parts[0]
    mean = float(parts[0] + differences.mean())
    std = float(differences.std())
    constant = std <= 4.0 * np.finfo(np.float64).eps * abs(mean)
    return math.ldexp(mean, exponent), 1.0 if constant else math.ldexp(std, exponent)


@dataclass(frozen=True, kw_only=True)
class RangedColumn(Column):
    """A column of numbers on an axis.

    Args:
        mean: of the training values.
        std: their standard deviation.
        low: values below it lie far outside training's.
        high: values above it do.
        spread: training's interquartile range, the unit of ``outside``.
    """

    mean: float = 0.0
    std: float = 1.0
    low: float = -_HUGE
    high: float = _HUGE
    spread: float = 1.0

    def fit(self, values: Floats, *, tail: int = 1) -> Self:
        """Mean, std and range of the training values that are finite."""
        column = super().fit(values)
        finite = np.sort(values[np.isfinite(values)])
        if not len(finite):
            return column
        mean, std = mean_and_std(finite)
        tail = min(tail, (len(finite) + 1) // 2)
        low, high = float(finite[tail - 1]), float(finite[-tail])
        quarter, three = np.quantile(finite / 2.0, (0.25, 0.75))  # whose difference is finite
        spread = min(2.0 * float(three - quarter), _HUGE)
        if not spread:
            spread = min(high / 2.0 - low / 2.0, 0.5 * _HUGE) * 2.0 or abs(mean) or 1.0
        return dataclasses.replace(
            column,
            mean=mean,
            std=std,
            low=max(low - spread, -_HUGE),
            high=min(high + spread, _HUGE),
            spread=spread,
        )

    def _standardised(self, values: Floats) -> Floats:
        known = np.where(np.isfinite(values), values, self.mean)
        with np.errstate(over="ignore"):
            return np.asarray(np.clip((known - self.mean) / self.std, -_LARGEST, _LARGEST))

    def outside(self, values: Floats) -> Floats:
        """In interquartile ranges beyond the range."""
        known = np.where(np.isfinite(values), values, self.mean)
        with np.errstate(over="ignore"):
            beyond = np.maximum(self.low - known, known - self.high) / self.spread
        return np.maximum(super().outside(values), np.maximum(beyond, 0.0))


@dataclass(frozen=True, kw_only=True)
class NumberColumn(RangedColumn):
    """Numbers: standardised by training's mean and standard deviation.

    Args:
        decimal_comma: whether 1.5 is written 1,5.

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
    kind: ClassVar[str] = "number"

    def _parse(self, texts: Texts) -> Floats:
        return as_numbers(texts, decimal_comma=self.decimal_comma)

    @property
    def own_features(self) -> tuple[str, ...]:
        """The column's name."""
        return (self.name,)

    def _encode(self, values: Floats) -> list[Floats]:
        return [self._standardised(values)]


@dataclass(frozen=True, kw_only=True)
class DateColumn(RangedColumn):
    """Dates: the standardised day, and where it lies in the year, the week and the day.

    Args:
        form: how they are written, as for ``pandas.to_datetime``.
        cycles: those among year, week and day over which training's dates vary.

    Example:
        >>> column = DateColumn(name="sold", form="ISO8601")
        >>> values = column.parse(np.array(["2024-01-01", "2024-12-31"], dtype=object))
        >>> len(column.fit(values).features)
        5
    """

    form: str = "ISO8601"
    cycles: tuple[str, ...] = ()
    kind: ClassVar[str] = "date"

    def _parse(self, texts: Texts) -> Floats:
        return as_days(texts, self.form)

    def fit(self, values: Floats, *, tail: int = 1) -> Self:
        """Also which cycles the training dates run through."""
        column = super().fit(values, tail=tail)
        finite = values[np.isfinite(values)]
        span = float(np.ptp(finite)) if len(finite) else 0.0
        cycles = [name for name, least in (("year", 180.0), ("week", 7.0)) if span >= least]
        if "week" in cycles and not np.ptp(np.floor(finite) % 7.0):
            cycles.remove("week")
        if len(finite) and np.ptp(finite % 1.0) > 0.0:
            cycles.append("day")
        return dataclasses.replace(column, cycles=tuple(cycles))

    @property
    def own_features(self) -> tuple[str, ...]:
        """The day, and two for each cycle."""
        waves = (f"{self.name} {wave} of {c}" for c in self.cycles for wave in ("sin", "cos"))
        return (self.name, *waves)

    def _encode(self, values: Floats) -> list[Floats]:
        known = np.isfinite(values)
        inputs = [self._standardised(values)]
        for cycle in self.cycles:
            angle = 2.0 * math.pi * np.where(known, values, 0.0) / _CYCLES[cycle]
            inputs += [np.where(known, np.sin(angle), 0.0), np.where(known, np.cos(angle), 0.0)]
        return inputs
