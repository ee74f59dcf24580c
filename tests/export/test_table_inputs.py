"""Values of a table's columns as tensors: the inputs and distances of ``tabular.columns``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from bayesify.export.table_inputs import TableInputs
from bayesify.tabular.columns import (
    CategoryColumn,
    Column,
    DateColumn,
    FlagColumn,
    NumberColumn,
    TextColumn,
)

ROWS = 300
RNG = np.random.default_rng(0)
WILD = np.array([math.nan, math.inf, 0.0, 1e300, -1e300, 1e9, -1e9, 3.0])


def with_missing(values: np.ndarray) -> np.ndarray:
    return np.where(RNG.uniform(size=len(values)) < 0.1, math.nan, values)


def fitted() -> list[Column]:
    """Columns of every kind, with and without missing values, and degenerate ones."""
    normal, skewed = RNG.normal(5.0, 2.0, ROWS), RNG.lognormal(0.0, 1.5, ROWS)
    days = 19_000.0 + RNG.uniform(0.0, 900.0, ROWS)
    columns = [
        NumberColumn(name="normal").fit(normal),
        NumberColumn(name="skewed").fit(with_missing(skewed)),
        NumberColumn(name="skewed too").fit(np.round(RNG.lognormal(3.0, 2.0, 50))),
        NumberColumn(name="constant").fit(np.full(ROWS, 7.0)),
        NumberColumn(name="huge").fit(1e306 * normal),
        NumberColumn(name="of an earlier version", mean=2.0, std=3.0),
        DateColumn(name="when").fit(with_missing(days)),
        DateColumn(name="day").fit(np.floor(days[:100] % 5.0)),
        FlagColumn(name="sold", words=("no", "yes")).fit(with_missing(RNG.integers(0, 2, ROWS))),
        FlagColumn(name="ok", words=("no", "yes")),
        CategoryColumn(name="city", levels=("Rome", "Oslo", "Pau"), kept=2, missing=True),
        CategoryColumn(name="few", levels=("a", "b"), kept=2),
        CategoryColumn(name="one", levels=("a",), kept=0),
        CategoryColumn(name="shared", levels=("a", "b"), kept=0, missing=True),
        FlagColumn(name="never", words=("no", "yes")).fit(np.zeros(ROWS)),
        FlagColumn(name="always", words=("no", "yes")).fit(with_missing(np.ones(ROWS))),
    ]
    assert sum(bool(getattr(each, "knots", ())) for each in columns) >= 2
    return columns


def values_of(column: Column) -> np.ndarray:
    if isinstance(column, CategoryColumn):
        return RNG.choice([0.0, 1.0, 2.0, math.inf, math.nan], ROWS)
    if isinstance(column, FlagColumn):
        return RNG.choice([0.0, 1.0, math.inf, math.nan], ROWS)
    near = column.mean + 3.0 * (column.std or 1.0) * RNG.normal(size=ROWS)
    ends = [getattr(column, name) for name in ("low", "high", "mean")]
    knots = getattr(column, "knots", ())
    some = np.concatenate([WILD, ends, knots, near])[:ROWS]
    return np.where(np.isneginf(some), math.inf, some)


def check(columns: Sequence[Column], inputs: TableInputs) -> None:
    values = [values_of(column) for column in columns]
    with np.errstate(over="ignore"):
        features = np.concatenate(
            [column.encode(each) for column, each in zip(columns, values, strict=True)], axis=1
        )
        distances = np.stack(
            [column.outside(each) for column, each in zip(columns, values, strict=True)], axis=1
        )
    found = inputs(torch.from_numpy(np.stack(values, axis=1)))
    assert found[0].dtype == torch.float32
    np.testing.assert_allclose(found[0].numpy(), features, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found[1].numpy(), distances, rtol=1e-12, atol=1e-12)


def test_all_kinds_of_columns() -> None:
    columns = fitted()
    check(columns, TableInputs(columns))
    for column in columns:  # a table may have columns of one kind only
        check([column], TableInputs([column]))


FAULTS: dict[str, tuple[int, dict[str, Any]]] = {
    "mean": (0, {"mean": 5.1}),
    "plain": (0, {"plain": 2.0}),
    "range": (0, {"high": 1.0}),
    "missing": (0, {"missing": True}),
    "knots": (1, {"knots": (0.0, 1.0), "scores": (-1.0, 1.0)}),
    "cycles": (6, {"cycles": ("week", "year", "day")}),
    "levels": (10, {"levels": ("Rome", "Oslo", "Pau", "Ulm"), "kept": 3}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_notices_a_fault(fault: str) -> None:
    columns = fitted()
    place, values = FAULTS[fault]
    wrong = [*columns]
    wrong[place] = dataclasses.replace(columns[place], **values)
    with pytest.raises(AssertionError):
        check(columns, TableInputs(wrong))


def test_minus_infinity_is_a_value_that_a_column_cannot_hold() -> None:
    columns = fitted()
    inputs = TableInputs(columns)
    for value in (math.inf, -math.inf):
        row = torch.full((1, len(columns)), value, dtype=torch.float64)
        assert inputs(row)[1].isinf().all()


def test_texts_have_no_such_operations() -> None:
    text = TextColumn(name="note", encoder="folder", sha256="", size=3)
    with pytest.raises(TypeError, match="must be numbers, dates, categories or flags, got 'text'"):
        TableInputs([text])
