"""The values along which an effect is shown are encoded as the cells of the table are."""

import numpy as np
import pytest

from bayesify.tabular.columns import (
    CategoryColumn,
    Column,
    DateColumn,
    FlagColumn,
    NumberColumn,
    TextColumn,
)
from bayesify.tabular.grids import column_places, grids_of
from bayesify.tabular.schema import TableSchema, Target


def fitted(column: Column, cells: list[str]) -> tuple[Column, np.ndarray]:
    """The column fitted to cells, and their inputs."""
    values = column.parse(np.array(cells, dtype=object))
    column = column.fit(values)
    return column, column.encode(values)


def of_cells(column: Column, *cells: str) -> np.ndarray:
    return column.encode(column.parse(np.array(cells, dtype=object)))


def all_places(column: Column) -> tuple[int, ...]:
    return tuple(range(len(column.features)))


def test_numbers_are_shown_over_the_middle_of_the_training_values() -> None:
    cells = [str(value) for value in range(1000)]
    column, inputs = fitted(NumberColumn(name="x"), [*cells, "", "1e9"])
    (grid,) = grids_of(column, all_places(column), inputs)
    assert (grid.name, grid.kind, grid.places, len(grid.axis)) == ("x", "number", (0, 1), 25)
    assert grid.axis[0] == pytest.approx(10.0, abs=1.0)
    assert grid.axis[-1] == pytest.approx(990.0, abs=1.0)
    assert grid.tenths[4] == pytest.approx(500.0, abs=1.0)
    expected = of_cells(column, *(repr(float(value)) for value in grid.axis))
    np.testing.assert_allclose(grid.inputs, expected, atol=1e-6)
    assert not grid.inputs[:, 1].any()  # not missing


def test_few_numbers_are_shown_each() -> None:
    column, inputs = fitted(NumberColumn(name="x"), ["3", "7", "3", "28", "nan"])
    (grid,) = grids_of(column, all_places(column), inputs)
    np.testing.assert_allclose(grid.axis, [3.0, 7.0, 28.0], atol=1e-5)


@pytest.mark.parametrize(("sentinel", "kept"), [("999", [1.0, 2.0, 3.0]), ("-9999", [1.0, 2.0])])
def test_wild_values_are_on_no_axis(sentinel: str, kept: list[float]) -> None:
    """A network input that is moderated stands for no value that can be told from it."""
    cells = [f"{value:g}" for value in kept] * 40
    column, inputs = fitted(NumberColumn(name="x"), [*cells, *([sentinel] * 3)])
    (grid,) = grids_of(column, all_places(column), inputs)
    np.testing.assert_allclose(grid.axis, kept, atol=1e-5)
    np.testing.assert_allclose(grid.inputs, inputs[: len(kept)], atol=1e-6)


def test_levels_have_their_names() -> None:
    cells = ["b", "a", "b", "c", ""]
    column, inputs = fitted(CategoryColumn(name="k", levels=("b", "a", "c"), kept=2), cells)
    (grid,) = grids_of(column, all_places(column), inputs)
    assert (grid.kind, grid.labels) == ("level", ("b", "a", "another", "(missing)"))
    np.testing.assert_array_equal(grid.inputs, of_cells(column, "b", "a", "c", ""))


def test_flags_and_many_levels() -> None:
    flag = FlagColumn(name="f", words=("no", "yes"))
    (grid,) = grids_of(flag, (5,), np.zeros((2, 6), np.float32))
    np.testing.assert_array_equal(grid.inputs, of_cells(flag, "no", "yes"))
    many = CategoryColumn(name="k", levels=tuple(f"l{i}" for i in range(30)), kept=30)
    (grid,) = grids_of(many, all_places(many), np.zeros((2, 30), np.float32))
    assert grid.labels == tuple(f"l{i}" for i in range(11))


def test_the_cycles_of_a_date_are_shown_apart() -> None:
    cells = [
        str(np.datetime64("2022-01-01T00") + np.timedelta64(7 * hours, "h"))
        for hours in range(2000)
    ]
    column, inputs = fitted(DateColumn(name="t"), [*cells, ""])
    assert column.features == (
        "t",
        "t sin of year",
        "t cos of year",
        "t sin of week",
        "t cos of week",
        "t sin of day",
        "t cos of day",
        "t is missing",
    )
    along, week, day = grids_of(column, tuple(range(2, 10)), np.pad(inputs, ((0, 0), (2, 0))))
    assert (along.kind, along.places) == ("date", (2, 3, 4, 9))
    assert str(np.datetime64(round(along.axis[0]), "D"))[:7] == "2022-01"
    np.testing.assert_allclose(along.inputs, column.encode(along.axis)[:, [0, 1, 2, 7]])
    assert (week.name, week.places) == ("t, day of the week", (5, 6, 9))
    noons = [f"2024-01-0{k}T12:00" for k in range(1, 8)]  # from a Monday
    np.testing.assert_allclose(week.inputs, of_cells(column, *noons)[:, [3, 4, 7]], atol=1e-5)
    assert week.labels[0] == "Mon"
    assert (day.name, day.places, day.axis[6]) == ("t, hour of the day", (7, 8, 9), 6.0)
    six = of_cells(column, "2024-01-01T06:00")[0, [5, 6, 7]]
    np.testing.assert_allclose(day.inputs[6], six, atol=1e-5)


def test_texts_and_unknown_columns_have_none() -> None:
    text = TextColumn(name="t", encoder="none", sha256="", size=2)
    assert grids_of(text, (0, 1), np.zeros((3, 2), np.float32)) == []
    column, inputs = fitted(NumberColumn(name="x"), ["", ""])
    assert grids_of(column, all_places(column), inputs) == []


def test_every_input_belongs_to_one_column() -> None:
    columns = (
        NumberColumn(name="x", missing=True),
        CategoryColumn(name="k", levels=("a", "b", "c"), kept=2),
        DateColumn(name="t", cycles=("year",)),
    )
    schema = TableSchema(columns, Target("y", "regression"))
    places = column_places(schema)
    assert places == {"x": (0, 1), "k": (2, 3, 4), "t": (5, 6, 7)}
    assert sum(places.values(), ()) == tuple(range(len(schema.features)))
