"""Choose the values along which the effect of a table's column is shown, as network inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from bayesify.tabular.cells import Floats
from bayesify.tabular.columns import (
    CategoryColumn,
    Column,
    DateColumn,
    Features,
    FlagColumn,
    RangedColumn,
)
from bayesify.tabular.schema import TableSchema

__all__ = ["Grid", "column_places", "grids_of"]

#: Numbers with at most this many values are shown at each of them.
_FEW_VALUES = 12
_MOST_LEVELS = 11
_NUMBERS, _DATES = 25, 48
#: The axis extends over this share of the training values, those in the middle.
_SHOWN = 0.98
_TAIL = 0.5 - 0.5 * _SHOWN
_WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
#: A Monday, in days since 1970.
_MONDAY = 4.0


@dataclass(frozen=True, eq=False)
class Grid:
    """Values of a column, or of one of a date's cycles, and the network inputs that encode them.

    Args:
        name: name of the column, with that of the cycle.
        kind: numbers on an axis, dates on an axis, or levels with names.
        places: indices of the network's inputs that the values set.
        inputs: what they are set to, shape (G, number of places).
        axis: numbers, or days since 1970, shape (G,); none for levels.
        labels: names of the levels; none for an axis.
        tenths: deciles of the training values on the axis.
    """

    name: str
    kind: Literal["number", "date", "level"]
    places: tuple[int, ...]
    inputs: Features
    axis: Floats
    labels: tuple[str, ...] = ()
    tenths: tuple[float, ...] = ()


_NO_AXIS: Floats = np.empty(0)


def column_places(schema: TableSchema) -> dict[str, tuple[int, ...]]:
    """Return the indices of the network inputs of each column, by its name.

    Example:
        >>> from bayesify.tabular.columns import NumberColumn
        >>> from bayesify.tabular.schema import Target
        >>> columns = (NumberColumn(name="x", missing=True), NumberColumn(name="z"))
        >>> column_places(TableSchema(columns, Target("y", "regression")))
        {'x': (0, 1), 'z': (2,)}
    """
    places, first = {}, 0
    for column in schema.columns:
        count = len(column.features)
        places[column.name] = tuple(range(first, first + count))
        first += count
    return places


def grids_of(column: Column, places: tuple[int, ...], inputs: Features) -> list[Grid]:
    """Return the grids of a column; none for texts, and for a column without a known value.

    A date has one for its day and the place in the year, and one for each shorter cycle. Wild
    values are left out: their inputs are not their distance from the mean.

    Args:
        column: the column.
        places: indices of its inputs.
        inputs: the training rows, shape (N, D).

    Example:
        >>> column = FlagColumn(name="sold", words=("no", "yes"))
        >>> (grid,) = grids_of(column, (3,), np.zeros((1, 4), np.float32))
        >>> grid.labels, grid.inputs.tolist()
        (('no', 'yes'), [[-1.0], [1.0]])
    """
    if isinstance(column, FlagColumn):
        return [_levels(column, places, list(column.words), [0.0, 1.0])]
    if isinstance(column, CategoryColumn):
        shown = min(column.kept, _MOST_LEVELS)
        labels, codes = list(column.levels[:shown]), [float(code) for code in range(shown)]
        if column.kept < len(column.levels):
            labels.append("another")
            codes.append(float(column.kept))
        return [_levels(column, places, labels, codes)]
    if not isinstance(column, RangedColumn):
        return []
    own = inputs[:, list(places)].astype(np.float64)
    known = own[:, 0] if not column.missing else own[own[:, -1] == 0.0, 0]
    if column.plain:  # inputs beyond it were moved closer, so that no value follows from them
        known = known[np.abs(known) <= column.plain * (1.0 + 1e-6)]
    if not len(known):
        return []
    values = known * column.std + column.mean
    low, high, *tenths = np.quantile(values, (_TAIL, 1.0 - _TAIL, *np.linspace(0.1, 0.9, 9)))
    if not isinstance(column, DateColumn):
        unique = np.unique(values)
        few = len(unique) <= _FEW_VALUES
        axis = unique if few else np.linspace(low, high, _NUMBERS)
        return [Grid(column.name, "number", places, column.encode(axis), axis, (), tuple(tenths))]
    return _dates(column, places, np.linspace(low, high, _DATES), tuple(tenths))


def _levels(column: Column, places: tuple[int, ...], labels: list[str], codes: list[float]) -> Grid:
    if column.missing:
        labels, codes = [*labels, "(missing)"], [*codes, np.nan]
    inputs = column.encode(np.array(codes))
    return Grid(column.name, "level", places, inputs, _NO_AXIS, tuple(labels))


def _dates(
    column: DateColumn, places: tuple[int, ...], days: Floats, tenths: tuple[float, ...]
) -> list[Grid]:
    """Return the grids of a date.

    Each varies some of the inputs only: along the years the day of the week stays what it is in
    each row, so that no arbitrary one is chosen.
    """
    pairs = {cycle: [1 + 2 * number, 2 + 2 * number] for number, cycle in enumerate(column.cycles)}
    mark = [len(places) - 1] if column.missing else []

    def grid(
        name: str,
        kind: Literal["number", "date", "level"],
        own: list[int],
        values: Floats,
        axis: Floats,
        labels: tuple[str, ...] = (),
    ) -> Grid:
        chosen: npt.NDArray[np.intp] = np.array([*own, *mark])
        some = tuple(places[place] for place in chosen)
        marks = tenths if kind == "date" else ()
        return Grid(name, kind, some, column.encode(values)[:, chosen], axis, labels, marks)

    grids = [grid(column.name, "date", [0, *pairs.get("year", [])], days, days)]
    if "week" in pairs:
        noon = 0.5 if "day" in pairs else 0.0
        week = _MONDAY + noon + np.arange(7.0)
        name = f"{column.name}, day of the week"
        grids.append(grid(name, "level", pairs["week"], week, _NO_AXIS, _WEEKDAYS))
    if "day" in pairs:
        hours = np.arange(25.0)
        name = f"{column.name}, hour of the day"
        grids.append(grid(name, "number", pairs["day"], hours / 24.0, hours))
    return grids
