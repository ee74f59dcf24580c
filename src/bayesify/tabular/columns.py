"""Turn the columns of a table into inputs of the network, and measure what lies outside training.

The values of a column are float64: numbers, days since 1970, 0 and 1, indices of levels, or F
features for each text. nan is a missing value. inf is a value that the column cannot hold: an
infinite number, text among numbers, a level that is not in the training table.

scikit-learn's encoders are not used: they do not say how far a value lies outside the training
data, and a run stores its columns as JSON that every version reads.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from bayesify.tabular import robust
from bayesify.tabular.cells import (
    Floats,
    Texts,
    as_days,
    as_flags,
    by_value,
    is_missing,
)
from bayesify.tabular.files import TableError
from bayesify.tabular.number_form import NumberForm
from bayesify.tabular.scaling import Scaling
from bayesify.tabular.skew import scores_without_skew
from bayesify.tabular.text_encoder import text_encoder

__all__ = [
    "FEW_LEVELS",
    "MOST_LEVELS",
    "CategoryColumn",
    "Column",
    "DateColumn",
    "Features",
    "FlagColumn",
    "NumberColumn",
    "RangedColumn",
    "TextColumn",
    "UnusedColumn",
    "calendar_parts",
    "column_from_json",
    "facts_of",
]

#: Inputs of the network, shape (N, number of features).
Features = npt.NDArray[np.float32]

#: Levels of a category that can have an input of their own; the rest share one.
MOST_LEVELS = 256
#: So few texts can be levels, even if almost every row has a text of its own.
FEW_LEVELS = 50
#: Inputs are clipped to this, far from overflow in float32; such rows are far outside anyhow.
_LARGEST = 1e6
#: Numbers farther from their central part than so many sigmas are wild.
_REACH = 4.0
#: Inputs are left as they are up to a size between these: the largest that is not wild, or that of
#: this share of the training values.
_PLAIN, _RARE = (1.5, 10.0), 0.99
#: Correlation of inputs and normal scores below which a column of numbers has both.
_NEARLY_NORMAL = 0.93
#: Stands for infinity in JSON; no other finite float64 of use is larger.
_HUGE = 1.7e308
#: Lengths of the cycles of a date, in days.
_CYCLES = {"year": 365.2425, "week": 7.0, "day": 1.0}


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
    low: float = -_HUGE
    high: float = _HUGE
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
        ends = robust.bounds(finite, counts, _REACH)
        central = torch.from_numpy(np.clip(finite, *ends)).unsqueeze(-1)
        scaling = Scaling.of(central, torch.from_numpy(counts))
        mean, std = scaling.shift.item(), scaling.scale.item()
        sizes = np.abs(finite / std - mean / std)
        ordinary = sizes[(ends[0] <= finite) & (finite <= ends[1])].max()
        plain = min(max(_PLAIN[0], ordinary, robust.quantile(sizes, counts, _RARE)), _PLAIN[1])
        finite = np.sort(finite)
        rounding = 4.0 * np.finfo(np.float64).eps * abs(mean)
        if finite[-1] - finite[0] <= rounding:
            ends = float(finite[0] - rounding), float(finite[-1] + rounding)
            return dataclasses.replace(
                column, mean=mean, std=0.0, low=ends[0], high=ends[1], spread=0.0
            )
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
            plain=plain,
            low=max(low - spread, -_HUGE),
            high=min(high + spread, _HUGE),
            spread=spread,
        )

    def _standardised(self, values: Floats) -> Floats:
        if not self.std:
            return np.zeros(len(values))
        known = torch.from_numpy(np.where(np.isfinite(values), values, self.mean))
        scaled = Scaling.of_numbers(self.mean, self.std).standardised(known)
        inputs = np.asarray(scaled.clamp(-_LARGEST, _LARGEST).numpy(), np.float64)
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


@dataclass(frozen=True, kw_only=True)
class DateColumn(RangedColumn):
    """Dates: the standardised day, and its place in the year, the week and the day.

    Args:
        form: how dates are written, as for ``pandas.to_datetime``.
        cycles: those among year, week and day over which training's dates vary.
        month_days: the days of the month of training's dates, if they are few; else none.
        months: the months, likewise.
        weekdays: the days of the week, likewise, 0 for Monday.

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
            angle = 2.0 * math.pi * np.where(known, values, 0.0) / _CYCLES[cycle]
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


@dataclass(frozen=True, kw_only=True)
class TextColumn(Column):
    """Texts: standardised features of a pretrained network.

    A text lies outside if its features are farther from their means than those of training's texts,
    in units of their standard deviations. A text on another topic need not be.

    Args:
        encoder: folder of the pretrained network, or its name on Hugging Face's hub.
        sha256: of its weights.
        size: number F of its features.
        means: F means of the training texts' features.
        stds: F standard deviations.
        high: root mean square of standardised features above which a text lies outside.
        spread: interquartile range of the training texts' root mean squares.
    """

    encoder: str
    sha256: str
    size: int
    means: tuple[float, ...] = ()
    stds: tuple[float, ...] = ()
    high: float = _HUGE
    spread: float = 1.0
    kind: ClassVar[str] = "text"

    @classmethod
    def of(cls, name: str, encoder: str) -> TextColumn:
        """Return the column of a pretrained network's features.

        Raises:
            TableError: there is no such network.
        """
        network = text_encoder(encoder)
        return cls(name=name, encoder=encoder, sha256=network.sha256, size=network.size)

    def parse(self, texts: Texts) -> Floats:
        """Return the features of some texts, shape (N, F); nan for a cell without one.

        Raises:
            TableError: the pretrained network is not there, or has other weights than in training.
        """
        codes, unique = by_value(texts)
        known = ~is_missing(unique)
        features = np.full((len(unique), self.size), math.nan)
        if known.any():
            network = text_encoder(self.encoder)
            if network.sha256 != self.sha256:
                raise TableError(
                    f"the encoder {self.encoder} must have the weights of the training, with "
                    f"SHA-256 {self.sha256}, got {network.sha256}; use that one, or train again"
                )
            features[known] = network.features(unique[known].tolist())
        return features[codes]

    def _parse(self, texts: Texts) -> Floats:
        return self.parse(texts)

    def fit(self, values: Floats, *, tail: int = 1, weights: Floats | None = None) -> TextColumn:
        """Add the features' means and standard deviations, and the range of their distance."""
        del weights
        known = values[~self._is_missing(values)]
        if not len(known):
            return super().fit(values)
        scaling = Scaling.of(torch.from_numpy(known))
        means, stds = (tuple(part.flatten().tolist()) for part in (scaling.shift, scaling.scale))
        column = dataclasses.replace(super().fit(values), means=means, stds=stds)
        distances = np.sort(column._distances(known))
        spread = float(np.subtract(*np.quantile(distances, (0.75, 0.25)))) or 1.0
        high = float(distances[-min(tail, len(distances))]) + spread
        return dataclasses.replace(column, high=high, spread=spread)

    @property
    def own_features(self) -> tuple[str, ...]:
        """The pretrained network's features by number."""
        return tuple(f"{self.name} {place}" for place in range(1, self.size + 1))

    def _is_missing(self, values: Floats) -> npt.NDArray[np.bool_]:
        return np.isnan(values[:, 0])

    def _standardised(self, values: Floats) -> Floats:
        scaled = (values - np.asarray(self.means)) / np.asarray(self.stds)
        return np.asarray(np.clip(np.nan_to_num(scaled), -_LARGEST, _LARGEST))

    def _distances(self, values: Floats) -> Floats:
        return np.asarray(np.sqrt(np.square(self._standardised(values)).mean(axis=1)))

    def _encode(self, values: Floats) -> list[Floats]:
        return list(self._standardised(values).T)

    def outside(self, values: Floats) -> Floats:
        """Return the distance beyond training's, in interquartile ranges of its distances."""
        beyond = np.maximum(self._distances(values) - self.high, 0.0) / self.spread
        return np.maximum(super().outside(values[:, 0]), beyond)


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


_KINDS: dict[str, type[Column]] = {
    kind.kind: kind
    for kind in (NumberColumn, DateColumn, FlagColumn, CategoryColumn, TextColumn, UnusedColumn)
}


def column_from_json(stored: Mapping[str, Any]) -> Column:
    """Return the column that :meth:`Column.to_json` wrote.

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
