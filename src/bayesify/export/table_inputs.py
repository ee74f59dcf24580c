"""Encode the values of a table's columns by tensor operations that can be exported.

``tabular.columns`` does the same in NumPy, one column at a time, and defines every number here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from bayesify.tabular.columns import (
    CategoryColumn,
    Column,
    DateColumn,
    FlagColumn,
    NumberColumn,
    RangedColumn,
)
from bayesify.tabular.columns.column import LARGEST_INPUT
from bayesify.tabular.columns.dates import CYCLES
from bayesify.tabular.robust import MOST

__all__ = ["TableInputs"]

_Kind = TypeVar("_Kind", bound=Column)


class _Part(NamedTuple):
    """Some inputs of the network."""

    #: The column and the place within its features of each input.
    keys: list[tuple[int, int]]
    #: Maps values (N, C), and the mask of those that are finite, to the inputs (N, keys), float64.
    compute: Callable[[Tensor, Tensor], Tensor]


class TableInputs:
    """Map the values of a table's columns to the network's inputs, and to distances outside.

    Values are as in ``tabular.columns.column``, and all in one float64 tensor: numbers, days since
    1970, 0 and 1, indices of levels; nan for a missing value, inf for one that a column cannot
    hold. All columns of a kind are encoded at once, so that the number of operations does not grow
    with that of the columns.

    Args:
        columns: C fitted columns of numbers, dates, categories, and yes and no.

    Raises:
        TypeError: a column is of another kind.

    Example:
        >>> inputs = TableInputs([NumberColumn(name="x", mean=1.0, std=2.0, high=9.0)])
        >>> inputs(torch.tensor([[5.0], [10.0]], dtype=torch.float64))
        (tensor([[2.0000],
                [4.5000]]), tensor([[0.],
                [1.]], dtype=torch.float64))
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        for column in columns:
            if not isinstance(column, NumberColumn | DateColumn | CategoryColumn | FlagColumn):
                raise TypeError(
                    f"columns must be numbers, dates, categories or flags, got {column.kind!r}"
                )
        builders = (_standardised, _scores, _waves, _signs, _levels, _others, _missing)
        parts = [build(columns) for build in builders]
        self._parts = [part for part in parts if part.keys]
        keys = [key for part in self._parts for key in part.keys]
        self._order = _places(sorted(range(len(keys)), key=keys.__getitem__))
        self._outside = _outside(columns)

    def __call__(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs (N, F), float32, and distances outside (N, C), for values (N, C)."""
        infinite = _is_infinite(values)
        values = torch.where(infinite, math.inf, values)
        finite = ~(infinite | values.isnan())
        distances = self._outside(values, finite)
        if not self._parts:
            return values[:, :0].float(), distances
        blocks = [part.compute(values, finite) for part in self._parts]
        return torch.cat(blocks, 1).index_select(1, self._order).float(), distances


def _standardised(columns: Sequence[Column]) -> _Part:
    """As ``RangedColumn``: standardised, and those beyond ``plain`` moved to below a limit."""
    placed = [(place, each) for place, each in enumerate(columns) if isinstance(each, RangedColumn)]
    which = _places([place for place, _ in placed])
    mean = _numbers([each.mean for _, each in placed])
    std = _numbers([each.std or 1.0 for _, each in placed])
    varies = torch.tensor([each.std > 0.0 for _, each in placed])
    plain = _numbers([each.plain or math.inf for _, each in placed])
    span = _numbers([(MOST - 1.0) * each.plain or 1.0 for _, each in placed])

    def compute(values: Tensor, finite: Tensor) -> Tensor:
        known = torch.where(finite[:, which], values[:, which], mean)
        scaled = ((known - mean) / std).clamp(-LARGEST_INPUT, LARGEST_INPUT)
        size = scaled.abs()
        far = plain + span * torch.tanh((size - plain) / span)
        moderate = torch.where(size > plain, scaled.sign() * far, scaled)
        return torch.where(varies, moderate, 0.0)

    return _Part([(place, 0) for place, _ in placed], compute)


def _scores(columns: Sequence[Column]) -> _Part:
    """As ``NumberColumn``: the scores without skew, by piecewise linear maps.

    The rows of the tables of knots and scores are as long as the longest.
    """
    placed = [(place, each) for place, each in _of(NumberColumn, columns) if each.knots]
    which = _places([place for place, _ in placed])
    mean = _numbers([each.mean for _, each in placed])
    most = max((len(each.knots) for _, each in placed), default=0)
    knots = _table([each.knots for _, each in placed], most)
    scores = _table([each.scores for _, each in placed], most).flatten()
    row = most * torch.arange(len(placed))
    last_part = _places([len(each.knots) - 2 for _, each in placed])
    low = _numbers([each.knots[0] for _, each in placed])
    high = _numbers([each.knots[-1] for _, each in placed])
    ends = knots.flatten()

    def compute(values: Tensor, finite: Tensor) -> Tensor:
        known = torch.where(finite[:, which], values[:, which], mean).maximum(low).minimum(high)
        part = ((known.unsqueeze(-1) >= knots).long().sum(-1) - 1).minimum(last_part)
        left = row + part
        rise = (scores[left + 1] - scores[left]) / (ends[left + 1] - ends[left])
        found = scores[left] + rise * (known - ends[left])
        return torch.where(finite[:, which], found, 0.0)

    return _Part([(place, 1) for place, _ in placed], compute)


def _waves(columns: Sequence[Column]) -> _Part:
    """As ``DateColumn``: sine and cosine of the place in each cycle."""
    waves = [
        (place, 1 + 2 * number, CYCLES[cycle])
        for place, each in _of(DateColumn, columns)
        for number, cycle in enumerate(each.cycles)
    ]
    which = _places([place for place, _, _ in waves])
    length = _numbers([length for _, _, length in waves])
    # Plain numbers are rounded to float32 by the exporter.
    whole = _numbers([2.0 * math.pi])

    def compute(values: Tensor, finite: Tensor) -> Tensor:
        known = finite[:, which]
        angle = whole * torch.where(known, values[:, which], 0.0) / length
        both = [torch.where(known, wave, 0.0) for wave in (angle.sin(), angle.cos())]
        return torch.cat(both, 1)

    return _Part([(p, first + wave) for wave in (0, 1) for p, first, _ in waves], compute)


def _signs(columns: Sequence[Column]) -> _Part:
    """As ``FlagColumn``: 1 or -1."""
    placed = _of(FlagColumn, columns)
    which = _places([place for place, _ in placed])

    def compute(values: Tensor, finite: Tensor) -> Tensor:
        return torch.where(finite[:, which], 2.0 * values[:, which] - 1.0, 0.0)

    return _Part([(place, 0) for place, _ in placed], compute)


def _levels(columns: Sequence[Column]) -> _Part:
    """As ``CategoryColumn``: an input for each level that has one of its own."""
    placed = _of(CategoryColumn, columns)
    keys = [(place, level) for place, each in placed for level in range(each.kept)]
    which = _places([place for place, _ in keys])
    level = _numbers([level for _, level in keys])
    return _Part(keys, lambda values, _: (values[:, which] == level).double())


def _others(columns: Sequence[Column]) -> _Part:
    """As ``CategoryColumn``: an input for all other levels, unknown ones (inf) among them."""
    placed = _of(CategoryColumn, columns)
    keys = [(place, each.kept) for place, each in placed if len(each.own_features) > each.kept]
    which = _places([place for place, _ in keys])
    first = _numbers([kept for _, kept in keys])
    return _Part(keys, lambda values, _: (values[:, which] >= first).double())


def _missing(columns: Sequence[Column]) -> _Part:
    """As ``Column``: an input for missing values, if training had some."""
    placed = [(place, each) for place, each in enumerate(columns) if each.missing]
    which = _places([place for place, _ in placed])
    # An unknown level is not missing; a number that cannot be read is.
    has_levels = torch.tensor([isinstance(each, CategoryColumn) for _, each in placed])

    def compute(values: Tensor, finite: Tensor) -> Tensor:
        is_unreadable = ~(finite[:, which] | has_levels)
        return (values[:, which].isnan() | is_unreadable).double()

    return _Part([(place, len(each.own_features)) for place, each in placed], compute)


def _outside(columns: Sequence[Column]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what computes ``Column.outside`` of all columns."""
    may_be_missing = torch.tensor([each.missing for each in columns])
    ranges = [_range(each) for each in columns]
    mean, low, high, spreads = (_numbers(each) for each in zip(*ranges, strict=True))
    has_spread = spreads > 0.0
    spread = torch.where(has_spread, spreads, 1.0)

    def compute(values: Tensor, finite: Tensor) -> Tensor:
        known = torch.where(finite, values, mean)
        excess = (low - known).maximum(known - high)
        jump = torch.where(excess > 0.0, math.inf, 0.0)
        beyond = torch.where(has_spread, excess / spread, jump).clamp(min=0.0)
        is_wrong = _is_infinite(values) | (values.isnan() & ~may_be_missing)
        return torch.where(is_wrong, math.inf, beyond)

    return compute


def _is_infinite(values: Tensor) -> Tensor:
    """As ``isinf``, which ONNX has in float32 only."""
    return values.abs() > _numbers([sys.float_info.max])


def _range(column: Column) -> tuple[float, float, float, float]:
    """Return a value within training's, the ends of their range, and the unit of distances."""
    if isinstance(column, RangedColumn):
        return column.mean, column.low, column.high, column.spread
    if isinstance(column, FlagColumn) and column.only is not None:
        return column.only, column.only, column.only, 0.0
    return 0.0, -math.inf, math.inf, 1.0


def _of(kind: type[_Kind], columns: Sequence[Column]) -> list[tuple[int, _Kind]]:
    return [(place, each) for place, each in enumerate(columns) if isinstance(each, kind)]


def _places(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _numbers(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _table(rows: Sequence[Sequence[float]], length: int) -> Tensor:
    padded = [[*row, *[math.inf] * (length - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.float64)
