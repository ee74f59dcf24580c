"""Frames at prediction whose cells are written otherwise than in training: right, or refused."""

from __future__ import annotations

import datetime
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from bayesify.sklearn import BayesianMLPRegressor
from bayesify.tabular import TableWarning
from bayesify.tabular.columns import CategoryColumn
from bayesify.tabular.drift import levels_of_cells

pytestmark = pytest.mark.filterwarnings("ignore:.*converged")


def trained(cells: Any, y: Any) -> BayesianMLPRegressor:
    model = BayesianMLPRegressor(steps=60, hidden_layer_sizes=(10,), random_state=0)
    return model.fit(pd.DataFrame({"x": cells}), y)


def read(model: BayesianMLPRegressor, cells: Any) -> list[float]:
    """The predictions, without a warning."""
    with warnings.catch_warnings(action="error"):
        return list(model.predict(pd.DataFrame({"x": cells})))


@pytest.fixture(scope="module")
def flags() -> BayesianMLPRegressor:
    cells = np.arange(60) % 2 == 0
    return trained(cells, 10.0 * cells)


@pytest.fixture(scope="module")
def bits() -> BayesianMLPRegressor:
    cells = np.arange(60) % 2
    return trained(cells, 10.0 * cells)


@pytest.fixture(scope="module")
def prices() -> BayesianMLPRegressor:
    cells = np.linspace(-100.0, 200.0, 61) + 0.25
    return trained(cells, cells)


@pytest.fixture(scope="module")
def days() -> BayesianMLPRegressor:
    dates = pd.date_range("2024-01-01", periods=200)
    return trained(dates.strftime("%d/%m/%Y"), np.arange(200.0))


@pytest.mark.parametrize("cells", [[1, 0], [1.0, 0.0], ["True", "false"]])
def test_flags_may_be_numbers(flags: BayesianMLPRegressor, cells: list[Any]) -> None:
    assert read(flags, cells) == read(flags, [True, False])
    assert flags.outside_scores(pd.DataFrame({"x": cells})).tolist() == [0.0, 0.0]


def test_flags_may_lack_some_cells(flags: BayesianMLPRegressor) -> None:
    nullable = pd.DataFrame({"x": pd.array([True, None, False], dtype="boolean")})
    floats = pd.DataFrame({"x": [1.0, np.nan, 0.0]})
    assert flags.predict(nullable).tolist() == flags.predict(floats).tolist()


def test_zero_and_one_may_be_flags(bits: BayesianMLPRegressor) -> None:
    assert read(bits, [True, False]) == read(bits, [1, 0])


@pytest.mark.parametrize(
    "cells",
    [
        [datetime.date(2024, 2, 3), None, datetime.date(2024, 5, 20)],
        [datetime.datetime(2024, 2, 3), None, datetime.datetime(2024, 5, 20)],
        [pd.Timestamp("2024-02-03", tz="UTC"), pd.NaT, pd.Timestamp("2024-05-20", tz="UTC")],
        [np.datetime64("2024-02-03"), None, np.datetime64("2024-05-20T00:00")],
    ],
    ids=["date", "datetime", "Timestamp", "datetime64"],
)
def test_date_objects_are_read_where_training_had_texts(
    days: BayesianMLPRegressor, cells: list[Any]
) -> None:
    objects = pd.Series(cells, dtype=object)
    assert read(days, objects) == read(days, pd.to_datetime(objects))


@pytest.mark.parametrize(
    ("kind", "cells", "plain", "remark"),
    [
        ("flags", ["yes", "no"], [True, False], "'no' as 'no', 'yes' as 'yes', where training"),
        ("bits", ["yes", "no"], [1, 0], "where training has numbers"),
        ("prices", ["50,5", "120,25"], [50.5, 120.25], "decimal comma"),
        ("prices", ["$50.5", "$120.25"], [50.5, 120.25], r"the unit '\$'"),
        ("days", ["2024-02-03", "2024-05-20"], ["03/02/2024", "20/05/2024"], "YYYY-MM-DD"),
    ],
)
def test_another_form_with_one_meaning_is_read(
    kind: str, cells: list[Any], plain: list[Any], remark: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    with pytest.warns(TableWarning, match=remark):
        found = model.predict(pd.DataFrame({"x": cells}))
    with warnings.catch_warnings(action="ignore", category=TableWarning):
        expected = model.predict(pd.DataFrame({"x": plain}))
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("kind", "cells", "message"),
    [
        ("flags", ["maybe", "no"], "'x' must hold 'false' or 'true', as in training, got 2 of 2"),
        ("flags", [2, 0], "must hold 'false' or 'true'"),
        ("prices", ["low", "high"], "'x' must hold numbers with a decimal point, as in training"),
        ("prices", [True, False], "must hold numbers"),
        ("days", ["02/13/2024", "03/14/2024", "04/15/2024"], "dd/mm/yyyy, as in training, got"),
    ],
)
def test_what_cannot_be_read_surely_is_refused(
    kind: str, cells: list[Any], message: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    for predict in (model.predict, model.outside_scores):
        with pytest.raises(ValueError, match=message):
            predict(pd.DataFrame({"x": cells}))


def test_a_single_cell_that_is_no_number_lies_outside(prices: BayesianMLPRegressor) -> None:
    frame = pd.DataFrame({"x": ["50.5", "20.25", "1.5", "7.5", "9.5", "abc"]})
    with pytest.warns(TableWarning, match="1 cell like 'abc' lies outside"):
        assert prices.outside_scores(frame)[-1] == np.inf


def test_new_levels_are_no_error_and_told_where_most_are_new() -> None:
    model = trained(["a", "b", "c"] * 20, np.arange(60.0))
    some = read(model, ["d", "e", "f", "a", "b", "c"])
    with pytest.warns(TableWarning, match="'x' must hold levels .* got 6 of 6 cells like 'd', 'e'"):
        found = model.predict(pd.DataFrame({"x": ["d", "e", "f", "g", "h", "i"]}))
    assert found.tolist() == [some[0]] * 6


def test_a_level_in_another_case_is_read_although_training_has_one_that_is_miswritten() -> None:
    cells = ["Rome", "Oslo", "Bern"] * 40 + ["oslo"]
    model = trained(cells, np.array([1.0, 5.0, 9.0] * 40 + [5.0]))
    expected = read(model, ["Rome", "Bern", "Oslo", "oslo"])
    assert len(set(expected)) == 4
    with pytest.warns(TableWarning, match="levels read in any case and spacing"):
        found = model.predict(pd.DataFrame({"x": ["ROME", "bern ", "OSLO", "oslo"]}))
    unknown = model.predict(pd.DataFrame({"x": ["Pau"]}))[0]
    # Which of two frequent levels is meant nobody knows.
    np.testing.assert_allclose(found, [*expected[:2], unknown, expected[3]], rtol=1e-12)


def test_of_levels_that_differ_in_case_the_one_that_is_not_rare_is_meant() -> None:
    column = CategoryColumn(name="city", levels=("Rome", "Oslo", "OSLO", "bern", "Bern"), kept=2)
    cells = np.array(["oslo", "OSLO", "Oslo", " rome", "BERN", "bern"], dtype=object)
    assert levels_of_cells(column, cells).tolist() == [1.0, 2.0, 1.0, 0.0, np.inf, 3.0]


def test_a_letter_and_its_accent_may_be_one_character_or_two() -> None:
    cities = ["K\u00f6ln", "Z\u00fcrich", "Rome"] * 20
    model = BayesianMLPRegressor(steps=100, random_state=0)
    model.fit(pd.DataFrame({"city": cities}), np.arange(60) % 3 + 0.01 * np.arange(60))
    other = pd.DataFrame({"city": ["Ko\u0308ln", "Zu\u0308rich"]})
    with pytest.warns(TableWarning, match="levels read in any case and spacing"):
        found = model.predict(other)
    np.testing.assert_array_equal(found, model.predict(pd.DataFrame({"city": cities[:2]})))


def test_whole_numbers_of_arrow_that_are_levels_keep_their_digits() -> None:
    large = 2**53
    model = trained(pd.Categorical([large, large + 1] * 30), np.arange(60) % 2)
    cells = pd.Series([large + 1, None], dtype=pd.ArrowDtype(pa.int64()))
    assert read(model, cells) == read(model, [str(large + 1), None])


def test_durations_are_no_targets() -> None:
    hours = pd.to_timedelta(np.arange(20.0), unit="h")
    with pytest.raises(ValueError, match="convert dates and durations to numbers"):
        trained(np.arange(20.0), hours)


def test_complex_numbers_are_no_inputs(prices: BayesianMLPRegressor) -> None:
    cells = np.arange(20.0) + 1j
    with pytest.raises(ValueError, match="'x' must hold real numbers, got complex ones"):
        trained(cells, np.arange(20.0))
    with pytest.raises(ValueError, match="'x' must hold real numbers, got complex ones"):
        prices.predict(pd.DataFrame({"x": cells}))


@pytest.fixture(scope="module")
def rates() -> BayesianMLPRegressor:
    cells = np.linspace(1.0, 30.0, 60)
    with pytest.warns(TableWarning, match="numbers with the unit '%'"):
        return trained([f"{cell} %" for cell in cells], cells)


def test_numbers_in_the_unit_of_training_need_no_unit(rates: BayesianMLPRegressor) -> None:
    for cells in ([2.0, 25.0], ["2 %", "25 %"]):
        np.testing.assert_array_equal(
            rates.predict(pd.DataFrame({"x": cells})), read(rates, [2, 25])
        )


@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
@pytest.mark.parametrize("table", [pd.DataFrame, np.array])
def test_numbers_that_may_be_in_another_unit_are_refused(
    rates: BayesianMLPRegressor, table: Any
) -> None:
    with pytest.raises(ValueError, match="1 may stand for 1 % or for 100 %"):
        rates.predict(table({"x": [0.02, 0.25]} if table is pd.DataFrame else [[0.02], [0.25]]))


@pytest.mark.parametrize("cell", ["", "NA", " "])
def test_a_column_of_nothing_but_missing_values_is_not_used(cell: str) -> None:
    model = trained([cell] * 60, np.arange(60.0))
    assert [column.kind for column in model.columns_] == ["unused"]
    assert read(model, ["anything"]) == read(model, [cell])


HOURS = pd.Series(pd.date_range("2024-01-01", periods=60, freq="h"))
DAYS = pd.Series(pd.date_range("2024-01-01", periods=60, freq="D"))


def in_zone(times: pd.Series, zone: str = "America/New_York") -> pd.Series:
    return times.dt.tz_localize(zone)


def as_text(times: pd.Series) -> pd.Series:
    return times.astype(str)


@pytest.mark.parametrize(
    ("trained", "new", "message"),
    [
        (HOURS, in_zone(HOURS), "where training has times without a time zone; write them in"),
        (HOURS, as_text(in_zone(HOURS)), "where training has times without a time zone"),
        (as_text(HOURS), in_zone(HOURS), "where training has times without a time zone"),
        (in_zone(HOURS), HOURS, "where training has times with a time zone; write their offset"),
        (in_zone(HOURS), as_text(HOURS), "where training has times with a time zone"),
        (as_text(in_zone(HOURS)), HOURS, "where training has times with a time zone"),
        (DAYS, in_zone(DAYS), "where training has times without a time zone"),
        # Of days alone, and of any times with and without, UTC is the zone.
        (DAYS, in_zone(DAYS, "UTC"), ""),
        (in_zone(DAYS, "UTC"), DAYS, ""),
        (DAYS, as_text(DAYS) + "T00:00:00Z", ""),
        (HOURS, as_text(HOURS), ""),
        (in_zone(HOURS), as_text(in_zone(HOURS)), ""),
        (as_text(in_zone(HOURS)), in_zone(HOURS), ""),
    ],
)
def test_times_with_and_without_a_zone_are_not_exchanged(
    trained: pd.Series, new: pd.Series, message: str
) -> None:
    y = np.arange(60.0)
    model = BayesianMLPRegressor(steps=2, random_state=0).fit(pd.DataFrame({"t": trained}), y)
    if message:
        with pytest.raises(ValueError, match=message):
            model.predict(pd.DataFrame({"t": new}))
        return
    expected = model.predict(pd.DataFrame({"t": trained}))
    np.testing.assert_array_equal(model.predict(pd.DataFrame({"t": new})), expected)


def test_time_spans_and_numbers_are_not_exchanged() -> None:
    hours = pd.DataFrame({"x": np.arange(40.0)})
    spans = pd.DataFrame({"x": pd.to_timedelta(hours["x"], "h")})
    for trained, new, message in (
        (hours, spans, r"must hold numbers, as in training, got time spans; .*pd\.Timedelta"),
        (spans, hours, r"must hold time spans, as in training, got numbers; .*pd\.to_timed"),
    ):
        model = BayesianMLPRegressor(steps=2, random_state=0).fit(trained, hours["x"])
        with pytest.raises(ValueError, match=message):
            model.predict(new)
        assert len(model.predict(trained.astype(object))) == 40
