"""Encode columns of dates: the day, and its place in the year, the week and the day."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from bayesify.tabular.cells import Floats, Texts, as_days
from bayesify.tabular.columns.numbers import RangedColumn

__all__ = ["CYCLES", "DateColumn", "calendar_parts"]

#: Lengths of the cycles of a date, in days.
CYCLES = {"year": 365.2425, "week": 7.0, "day": 1.0}


@dataclass(frozen=True, kw_only=True)
class DateColumn(RangedColumn):
    """Dates: the standardised day, and its place in the year, the week and the day.

    Args:
        form: how dates are written, as for ``pandas.to_datetime``.
        cycles: those among year, week and day over which training's dates vary.
        month_days: the days of the month of training's dates, if they are few; else none.
        months: the months, likewise.
        weekdays: the days of the week, likewise, 0 for Monday.
        zoned: whether training's times have a time zone; None where some do, or it is not known.

    Example:
        >>> column = DateColumn(name="sold", form="ISO8601")
        >>> values = column.parse(np.array(["2024-01-01", "2024-12-31"], dtype=object))
        >>> len(column.fit(values).features)
        5
    """

    form: str = "ISO8601"
    cycles: tuple[str, ...] = ()
    month_days: tuple[int, ...] = ()
    months: tuple[int, ...] = ()
    weekdays: tuple[int, ...] = ()
    zoned: bool | None = None
    kind: ClassVar[str] = "date"

    def _parse(self, texts: Texts) -> Floats:
        return as_days(texts, self.form)

    def fit(self, values: Floats, *, tail: int = 1, weights: Floats | None = None) -> Self:
        """Also find the cycles over which the training dates vary."""
        column = super().fit(values, tail=tail, weights=weights)
        finite = values[np.isfinite(values)]
        span = float(np.ptp(finite)) if len(finite) else 0.0
        cycles = [name for name, least in (("year", 180.0), ("week", 7.0)) if span >= least]
        if "week" in cycles and not np.ptp(np.floor(finite) % 7.0):
            cycles.remove("week")
        if len(finite) and np.ptp(finite % 1.0) > 0.0:
            cycles.append("day")
        calendar = [_few(part) for part in calendar_parts(finite)]
        return dataclasses.replace(
            column,
            cycles=tuple(cycles),
            month_days=calendar[0],
            months=calendar[1],
            weekdays=calendar[2],
        )

    @property
    def own_features(self) -> tuple[str, ...]:
        """The day, and two for each cycle."""
        waves = (f"{self.name} {wave} of {c}" for c in self.cycles for wave in ("sin", "cos"))
        return (self.name, *waves)

    def _encode(self, values: Floats) -> list[Floats]:
        known = np.isfinite(values)
        inputs = [self._standardised(values)]
        for cycle in self.cycles:
            angle = 2.0 * math.pi * np.where(known, values, 0.0) / CYCLES[cycle]
            inputs += [np.where(known, np.sin(angle), 0.0), np.where(known, np.cos(angle), 0.0)]
        return inputs


def calendar_parts(days: Floats) -> list[npt.NDArray[np.int64]]:
    """Return day of the month, month and day of the week of days since 1970.

    Example:
        >>> [part.tolist() for part in calendar_parts(np.array([0.0, 31.5]))]
        [[1, 1], [1, 2], [3, 6]]
    """
    dates = np.floor(days).astype("datetime64[D]")
    months = dates.astype("datetime64[M]")
    return [
        (dates - months).astype(np.int64) + 1,
        months.astype(np.int64) % 12 + 1,
        (np.floor(days).astype(np.int64) + 3) % 7,
    ]


def _few(parts: npt.NDArray[np.int64]) -> tuple[int, ...]:
    """Return the distinct values if each occurs five times on average, so that they are all."""
    distinct = np.unique(parts)
    return tuple(distinct.tolist()) if 5 * len(distinct) <= len(parts) else ()
