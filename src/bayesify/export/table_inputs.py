"""Encode the values of a table's columns by tensor operations that can be exported.

``tabular.columns`` does the same in NumPy, one column at a time, and defines every number here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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


class TableInputs(nn.Module):
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

    order: Tensor

    def __init__(self, columns: Sequence[Column]) -> None:
        super().__init__()
        known = NumberColumn | DateColumn | CategoryColumn | FlagColumn
        for column in columns:
            if not isinstance(column, known):
                raise TypeError(
                    f"columns must be numbers, dates, categories or flags, got {column.kind!r}"
                )
        placed = list(enumerate(columns))
        ranged = [(place, each) for place, each in placed if isinstance(each, RangedColumn)]
        categories = [(place, each) for place, each in placed if isinstance(each, CategoryColumn)]
        #: Places of the features of each part, as (column, place within the column).
        self._keys: list[tuple[int, int]] = []
        #: What computes each part, from the values and the mask of those that are finite.
        self._parts: list[Callable[[Tensor, Tensor], Tensor]] = []

        self._add(self._standardised, ((place, 0) for place, _ in ranged))
        self._keep("ranged", [place for place, _ in ranged], torch.int64)
        for name in ("mean", "std", "plain"):
            self._keep(name, [getattr(each, name) for _, each in ranged])
        self._add_scores(placed)
        self._add_waves(placed)
        flags = [place for place, each in placed if isinstance(each, FlagColumn)]
        self._keep("flags", flags, torch.int64)
        self._add(self._signs, ((place, 0) for place in flags))
        levels = [(place, level) for place, each in categories for level in range(each.kept)]
        self._keep("level_columns", [place for place, _ in levels], torch.int64)
        self._keep("levels", [level for _, level in levels])
        self._add(self._is_level, levels)
        shared = [(p, each.kept) for p, each in categories if len(each.own_features) > each.kept]
        self._keep("sharing", [place for place, _ in shared], torch.int64)
        self._keep("first_shared", [kept for _, kept in shared])
        self._add(self._is_another, shared)
        self._add_missing(placed)
        places = sorted(range(len(self._keys)), key=self._keys.__getitem__)
        self._keep("order", places, torch.int64)
        self._keep_ranges(columns)

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs (N, F), float32, and distances outside (N, C), for values (N, C)."""
        values = torch.where(values.isinf(), math.inf, values)
        finite = ~(values.isinf() | values.isnan())
        if self._parts:
            blocks = [part(values, finite) for part in self._parts]
            features = torch.cat(blocks, 1).index_select(1, self.order).float()
        else:
            features = values[:, :0].float()
        return features, self._outside(values, finite)

    def _add(
        self, part: Callable[[Tensor, Tensor], Tensor], keys: Iterable[tuple[int, int]]
    ) -> None:
        found = list(keys)
        if found:
            self._keys += found
            self._parts.append(part)

    def _keep(self, name: str, values: Sequence[Any], dtype: torch.dtype = torch.float64) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=dtype))

    def _standardised(self, values: Tensor, finite: Tensor) -> Tensor:
        """As ``RangedColumn``: standardised, and those beyond ``plain`` moved to below a limit."""
        values, finite = values[:, self.ranged], finite[:, self.ranged]
        known = torch.where(finite, values, self.mean)
        is_constant = self.std == 0.0
        scaled = (known - self.mean) / torch.where(is_constant, 1.0, self.std)
        scaled = scaled.clamp(-LARGEST_INPUT, LARGEST_INPUT)
        size = scaled.abs()
        span = torch.where(self.plain > 0.0, (MOST - 1.0) * self.plain, 1.0)
        far = self.plain + span * torch.tanh((size - self.plain) / span)
        moved = (self.plain > 0.0) & (size > self.plain)
        return torch.where(is_constant, 0.0, torch.where(moved, scaled.sign() * far, scaled))

    def _add_scores(self, placed: Sequence[tuple[int, Column]]) -> None:
        """Prepare piecewise linear maps, padded to the number of knots of the longest."""
        bent = [(p, each) for p, each in placed if isinstance(each, NumberColumn) and each.knots]
        self._keep("bent", [place for place, _ in bent], torch.int64)
        self._keep("bent_mean", [each.mean for _, each in bent])
        most = max((len(each.knots) for _, each in bent), default=0)
        rest = [most - len(each.knots) for _, each in bent]
        self._keep(
            "knots", [(*e.knots, *[math.inf] * r) for (_, e), r in zip(bent, rest, strict=True)]
        )
        self._keep(
            "scores", [(*e.scores, *[0.0] * r) for (_, e), r in zip(bent, rest, strict=True)]
        )
        self._keep("last_knot", [len(each.knots) - 1 for _, each in bent], torch.int64)
        self._keep("first_of_row", [most * row for row in range(len(bent))], torch.int64)
        self._add(self._scores, ((place, 1) for place, _ in bent))

    def _scores(self, values: Tensor, finite: Tensor) -> Tensor:
        values, finite = values[:, self.bent], finite[:, self.bent]
        known = torch.where(finite, values, self.bent_mean)
        ends = self.knots[:, 0], self.knots.flatten()[self.first_of_row + self.last_knot]
        known = known.maximum(ends[0]).minimum(ends[1])
        below = (known.unsqueeze(-1) >= self.knots).sum(-1) - 1
        left = self.first_of_row + below.minimum(self.last_knot - 1)
        (x, next_x), (y, next_y) = (
            (table.flatten()[left], table.flatten()[left + 1])
            for table in (self.knots, self.scores)
        )
        found = y + (next_y - y) / (next_x - x) * (known - x)
        return torch.where(finite, found, 0.0)

    def _add_waves(self, placed: Sequence[tuple[int, Column]]) -> None:
        waves = [
            (place, 1 + 2 * number, CYCLES[cycle])
            for place, each in placed
            if isinstance(each, DateColumn)
            for number, cycle in enumerate(each.cycles)
        ]
        self._keep("cyclic", [place for place, _, _ in waves], torch.int64)
        self._keep("length", [length for _, _, length in waves])
        keys = [(place, first + wave) for wave in (0, 1) for place, first, _ in waves]
        self._add(self._waves, keys)

    def _waves(self, values: Tensor, finite: Tensor) -> Tensor:
        values, finite = values[:, self.cyclic], finite[:, self.cyclic]
        angle = 2.0 * math.pi * torch.where(finite, values, 0.0) / self.length
        waves = torch.cat([angle.sin(), angle.cos()], 1)
        return torch.where(torch.cat([finite, finite], 1), waves, 0.0)

    def _signs(self, values: Tensor, finite: Tensor) -> Tensor:
        return torch.where(finite[:, self.flags], 2.0 * values[:, self.flags] - 1.0, 0.0)

    def _is_level(self, values: Tensor, _: Tensor) -> Tensor:
        return (values[:, self.level_columns] == self.levels).double()

    def _is_another(self, values: Tensor, _: Tensor) -> Tensor:
        return (values[:, self.sharing] >= self.first_shared).double()

    def _add_missing(self, placed: Sequence[tuple[int, Column]]) -> None:
        lacking = [(p, len(each.own_features)) for p, each in placed if each.missing]
        self._keep("lacking", [place for place, _ in lacking], torch.int64)
        # An unknown level is not missing; a number that cannot be read is.
        levels = [isinstance(placed[place][1], CategoryColumn) for place, _ in lacking]
        self._keep("lacking_levels", levels, torch.bool)
        self._add(self._is_missing, lacking)

    def _is_missing(self, values: Tensor, finite: Tensor) -> Tensor:
        values, finite = values[:, self.lacking], finite[:, self.lacking]
        return torch.where(self.lacking_levels, values.isnan(), ~finite).double()

    def _keep_ranges(self, columns: Sequence[Column]) -> None:
        self._keep("may_be_missing", [each.missing for each in columns], torch.bool)
        usual = {"mean": 0.0, "low": -math.inf, "high": math.inf, "spread": 1.0}
        for name, value in usual.items():
            found = [getattr(each, name, value) for each in columns]
            self._keep(f"range_{name}", found)

    def _outside(self, values: Tensor, finite: Tensor) -> Tensor:
        known = torch.where(finite, values, self.range_mean)
        excess = (self.range_low - known).maximum(known - self.range_high)
        has_spread = self.range_spread > 0.0
        spread = torch.where(has_spread, self.range_spread, 1.0)
        beyond = torch.where(has_spread, excess / spread, torch.where(excess > 0.0, math.inf, 0.0))
        is_wrong = values.isinf() | (values.isnan() & ~self.may_be_missing)
        return torch.where(is_wrong, math.inf, beyond.clamp(min=0.0))
