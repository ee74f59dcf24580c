"""Detection of what the columns of a table hold, and their inputs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest

from bayesify.tabular.cells import Texts, as_days
from bayesify.tabular.columns import (
    CategoryColumn,
    Column,
    DateColumn,
    FlagColumn,
    NumberColumn,
    column_from_json,
)
from bayesify.tabular.detect import ColumnScan, find_target
from bayesify.tabular.files import TableError
from bayesify.tabular.number_form import NumberForm


def cells(*texts: str) -> Texts:
    return np.array(texts, dtype=object)


def scanned(texts: Sequence[str], name: str = "column", pieces: int = 1) -> ColumnScan:
    scan = ColumnScan(name)
    for part in np.array_split(cells(*texts), pieces):
        scan.update(part)
    return scan


NUMBERS = [f"{x:.2f}" for x in np.random.default_rng(0).normal(size=60)]
CITIES = ["Rome", "Oslo", "Pau"] * 20
KINDS = {
    "number": (NUMBERS, NumberColumn),
    "whole": ([str(i * i % 37) for i in range(60)], NumberColumn),
    "huge": ([str(10**25 + i * 10**22) for i in range(60)], NumberColumn),
    "few strays": (["unknown", *NUMBERS], NumberColumn),
    "decimal comma": ([text.replace(".", ",") for text in NUMBERS], NumberColumn),
    "zero and one": (["0", "1"] * 30, NumberColumn),
    "yes": (["yes", "No", "YES", "no"] * 15, FlagColumn),
    "true": (["True", "False"] * 30, FlagColumn),
    "iso": ([f"2024-{1 + i % 12:02d}-{1 + i % 28:02d}" for i in range(60)], DateColumn),
    "iso time": ([f"2024-01-{1 + i % 28:02d}T{i % 24:02d}:30:00Z" for i in range(60)], DateColumn),
    "german": ([f"{1 + i % 28:02d}.{1 + i % 12:02d}.2024" for i in range(60)], DateColumn),
    "american": ([f"{1 + i % 12:02d}/{13 + i % 15:02d}/2024" for i in range(60)], DateColumn),
    "category": (CITIES, CategoryColumn),
    "one and missing": (["x", ""] * 30, CategoryColumn),
}


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("case", KINDS)
def test_the_kind_is_found(case: str, pieces: int) -> None:
    texts, kind = KINDS[case]
    scan = scanned(texts, pieces=pieces)
    assert scan.reason_to_drop() is None
    column = scan.column()
    assert type(column) is kind
    values = column.parse(cells(*texts))
    known = [text not in ("", "unknown") for text in texts]
    assert np.isfinite(values).tolist() == known
    fitted = column.fit(values)
    inputs = fitted.encode(values)
    assert inputs.shape == (len(texts), len(fitted.features))
    assert inputs.dtype == np.float32
    assert np.isfinite(inputs).all()
    again = column_from_json(json.loads(json.dumps(fitted.to_json(), allow_nan=False)))
    assert again == fitted


@pytest.mark.parametrize(
    ("texts", "name", "reason"),
    [
        ([""] * 9, "a", "it is empty"),
        (["NA", "", "?"], "a", "it is empty"),
        (["7"] * 9, "a", "it is '7' in every row"),
        ([str(i) for i in range(1, 13)], "a", "numbers the rows"),
        ([str(i) for i in range(12)], "column 1", "numbers the rows"),
        ([str(i * 7919 % 1009) for i in range(50)], "customer_id", "it identifies rows"),
        ([f"person {i}" for i in range(12)], "who", "identifies rows or is free text"),
        (["1,234", "950", "5,001"], "price", "may separate thousands"),
        ([f"{'$€'[i % 2]}{i}.50" for i in range(12)], "price", "write the numbers alone"),
        (["1,234 €", "950 €", "5,001 €"], "price", "may separate thousands"),
        (["1.234 €", "950 €", "5.001 €"], "price", "may separate thousands"),
    ],
)
def test_columns_of_no_use_are_dropped(texts: list[str], name: str, reason: str) -> None:
    found = scanned(texts, name).reason_to_drop()
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    ("texts", "name"),
    [
        ([str(1990 + i) for i in range(30)], "year"),
        ([str(i * 7919 % 1009) for i in range(50)], "area"),
        (NUMBERS, "idea"),
        ([*[str(i) for i in range(1, 30)], "5"], "place"),
    ],
)
def test_columns_of_possible_use_are_kept(texts: list[str], name: str) -> None:
    assert scanned(texts, name).reason_to_drop() is None


def test_numbers_that_turn_to_commas_later_are_still_numbers() -> None:
    texts = ["1", "2", "3"] * 20 + ["1,5", "2,75"] * 20
    scan = scanned(texts, pieces=5)
    assert scan.form == NumberForm(decimal_comma=True)
    assert scan.column().parse(cells("1,5", "3")).tolist() == [1.5, 3.0]
    assert "decimal points" in scan.remarks[0]


@pytest.mark.parametrize("share", [0.03, 0.08, 0.3])
def test_a_target_of_which_some_numbers_have_two_meanings_is_an_error(share: float) -> None:
    """To leave them out would take away the largest."""
    count = round(200 * share)
    texts = [str(100 + i % 800) for i in range(200 - count)] + [f"1,{i:03d}" for i in range(count)]
    with pytest.raises(TableError, match="may separate thousands or be decimal points"):
        find_target(scanned(texts), "regression")
    sure = scanned([*texts, "1,234.5"])
    assert find_target(sure, "regression").thousands == ","


def test_only_points_are_remarked_as_points() -> None:
    plain = [str(100 + i) for i in range(190)]
    for odd, remarked in (("1,000", False), ("1.000", True)):
        scan = scanned([*plain, *[odd] * 5])
        scan.column()
        assert any("its points were read" in remark for remark in scan.remarks) == remarked, odd


FORMS = {
    "percent": (["12 %", "7.5%", "-3%"], NumberForm(unit="%"), [12.0, 7.5, -3.0]),
    "euros": (["€1,234.50", "€ 12", "-€3"], NumberForm(thousands=",", unit="€"), [1234.5, 12, -3]),
    "dollars": (["$1,234", "$950"], NumberForm(thousands=",", unit="$"), [1234.0, 950.0]),
    "code": (["12 EUR", "1.5 €"], NumberForm(unit="EUR"), [12.0, 1.5]),
    "kilograms": (["12 kg", "1.5kg"], NumberForm(unit="kg"), [12.0, 1.5]),
    "german": (["1.234,5", "12"], NumberForm(decimal_comma=True, thousands="."), [1234.5, 12.0]),
    "english": (["1,234.5", "12"], NumberForm(thousands=","), [1234.5, 12.0]),
    "millions": (["1,234,567", "12"], NumberForm(thousands=","), [1234567.0, 12.0]),
    "french": (
        ["1\u202f234,5", "12"],
        NumberForm(decimal_comma=True, thousands=" "),
        [1234.5, 12.0],
    ),
    "swiss": (["1'234.5", "12"], NumberForm(thousands="'"), [1234.5, 12.0]),
    "plain": (["1.234", "0.5"], NumberForm(), [1.234, 0.5]),
    "typographic minus": (["\u22125", "3", "\u22121.5"], NumberForm(), [-5.0, 3.0, -1.5]),
    "swedish": (["\u22125,5", "3,2"], NumberForm(decimal_comma=True), [-5.5, 3.2]),
    "german minus": (["\u22121.234", "1,5"], NumberForm(True, "."), [-1234.0, 1.5]),
    "blank after the sign": (["- 5", "3"], NumberForm(), [-5.0, 3.0]),
    "arabic": (["\u0661", "\u0662\u0663"], NumberForm(), [1.0, 23.0]),
    "full width": (["\uff11", "\uff12"], NumberForm(), [1.0, 2.0]),
}


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("case", FORMS)
def test_numbers_however_they_are_written(case: str, pieces: int) -> None:
    texts, form, values = FORMS[case]
    scan = scanned(texts * 5, pieces=pieces)
    assert scan.reason_to_drop() is None
    column = scan.column()
    assert isinstance(column, NumberColumn)
    assert column.form == form
    assert column.parse(cells(*texts)).tolist() == values
    assert any("unit" in remark for remark in scan.remarks) == bool(form.unit)
    assert any("thousands" in remark for remark in scan.remarks) == bool(form.thousands)
    again = column_from_json(json.loads(json.dumps(column.to_json())))
    assert again.parse(cells(*texts)).tolist() == values


@pytest.mark.parametrize("texts", [["lot 3", "lot 5", "lot 7"], ["12 kg", "500 g", "7 t"]])
def test_texts_with_numbers_are_not_numbers(texts: list[str]) -> None:
    assert scanned(texts * 5).column().kind == "category"


def test_days_before_months_unless_that_cannot_be() -> None:
    both = scanned([f"{1 + i % 12:02d}/{1 + i % 11:02d}/2024" for i in range(60)])
    column = both.column()
    assert isinstance(column, DateColumn)
    assert column.form == "%d/%m/%Y"
    assert "all its dates fit %m/%d/%Y too" in both.remarks[0]
    months_first = scanned(KINDS["american"][0]).column()
    assert isinstance(months_first, DateColumn)
    assert months_first.form == "%m/%d/%Y"


@pytest.mark.parametrize("pieces", [1, 7])
def test_the_order_of_the_rows_does_not_decide_whether_there_are_dates(pieces: int) -> None:
    days = [f"{1 + i % 28:02d}.{1 + i % 12:02d}.{2000 + i % 20}" for i in range(188)]
    strays = [f"unknown {i:02d}" for i in range(12)]
    for texts in ([*strays, *days], [*days, *strays], [*days[:90], *strays, *days[90:]]):
        column = scanned(texts, pieces=pieces).column()
        assert isinstance(column, DateColumn)
        assert column.form == "%d.%m.%Y"


def test_the_value_of_a_date_does_not_depend_on_the_other_cells() -> None:
    texts = cells("9999-12-31", "2024-01-01T10:00:00.1234567", "-821-01-01", "2024-01-01", "soon")
    alone = [as_days(cells(text), "ISO8601")[0] for text in texts]
    np.testing.assert_array_equal(as_days(texts, "ISO8601"), alone)
    assert alone[1] == pytest.approx(19723.0 + 36000.1234567 / 86400.0, abs=1e-10)


@pytest.mark.parametrize("day", ["%m/%d/%Y", "%d-%b-%y", "%B %d, %Y", "%Y-%m-%d"])
@pytest.mark.parametrize("clock", ["", " %I:%M %p", " %I:%M:%S %p", " %H:%M"])
def test_dates_of_many_forms_are_read(day: str, clock: str) -> None:
    times = pd.date_range("2021-01-01 00:05", periods=60, freq="9h37min")
    texts = [time.strftime(day + clock) for time in times]
    column = scanned(texts).column()
    assert column.kind == "date"
    read = pd.to_datetime(pd.Series(column.parse(cells(*texts)) * 86400.0).round(), unit="s")
    exact = times.floor("min") if clock else times.floor("D")
    assert list(read) == list(exact)


def test_words_for_the_time_of_the_day_are_no_dates() -> None:
    texts = cells("now", "today", "2024-01-01")
    assert np.isnan(as_days(texts, "ISO8601")).tolist() == [True, True, False]


def test_strays_and_infinities_are_reported() -> None:
    scan = scanned([*NUMBERS, "oops", "inf", "1e999"])
    scan.column()
    assert scan.remarks == [
        "column: 1 value is no number, such as 'oops', and counts as missing",
        "column: 2 values are infinite and count as missing",
    ]


def test_a_point_alone_is_no_number() -> None:
    scan = scanned([*NUMBERS, "."])
    assert math.isinf(scan.column().parse(cells("."))[0])
    assert scan.remarks == ["column: 1 value is no number, such as '.', and counts as missing"]


def test_whole_numbers_with_a_typographic_minus_are_whole() -> None:
    assert scanned(["\u22121", "2", "3"] * 5).is_whole


def test_amounts_that_are_taken_for_categories_are_reported() -> None:
    scan = scanned(["€1.5", "-$2", "+£3"] * 5)
    assert scan.column().kind == "category"
    assert any("write the numbers alone" in remark for remark in scan.remarks)
    plain = scanned(["c1", "$", "lot 3"] * 5)
    plain.column()
    assert not plain.remarks


def test_a_column_of_which_most_are_numbers_is_told_what_the_others_are() -> None:
    limits = [f"{number / 10}" for number in range(12)] * 2 + ["<0.1"] * 6
    scan = scanned(limits)
    assert scan.column().kind == "category"
    assert scan.remarks == [
        "column: 24 of its 30 cells are numbers: write cells such as '<0.1' as numbers too if all "
        "should be; they were taken for categories"
    ]
    # Codes with letters are none, nor are a few levels.
    for codes in (["A1", "B2", "7"] * 10, ["1", "2", "3", "other"] * 8):
        scan = scanned(codes)
        scan.column()
        assert not scan.remarks


def test_numbers_are_standardised_by_training() -> None:
    values = np.array([1.0, 3.0, math.nan, math.inf])
    column = NumberColumn(name="x").fit(values)
    assert column.features == ("x", "x is missing")
    assert column.encode(values).tolist() == [[-1, 0], [1, 0], [0, 1], [0, 1]]
    shifted = NumberColumn(name="x").fit(1e15 + np.array([0.0, 2.0, 4.0]))
    assert shifted.encode(1e15 + np.array([0.0, 2.0, 4.0]))[:, 0].std() == pytest.approx(1.0, 1e-6)


@pytest.mark.parametrize("size", [1e-300, 1.0, 1e150, 1e307])
def test_no_number_overflows(size: float) -> None:
    values = size * np.array([-1.0, 0.5, 2.0, 8.0])
    column = NumberColumn(name="x").fit(values)
    assert column.encode(values)[:, 0].std() == pytest.approx(1.0, 1e-5)
    assert np.isfinite(column.encode(np.array([1.7e308, -1.7e308]))).all()
    json.dumps(column.to_json(), allow_nan=False)


def test_a_constant_in_training_is_no_input_of_its_own() -> None:
    column = NumberColumn(name="x").fit(np.full(9, 0.1))
    assert not column.encode(np.full(3, 0.1)).any()


def test_levels_by_frequency_with_one_input_for_the_rare() -> None:
    scan = scanned(["b"] * 5 + ["a"] * 9 + ["c", "d"])
    column = scan.column()
    assert isinstance(column, CategoryColumn)
    assert column.features == ("column = a", "column = b", "column = another")
    values = column.parse(cells("a", "c", "new", ""))
    assert column.encode(values).tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 1], [0, 0, 0]]
    assert column.outside(values).tolist() == [0, 0, math.inf, math.inf]
    many = scanned([f"level {i % 300}" for i in range(3000)]).column()
    assert len(many.features) == 257


@pytest.mark.parametrize(
    ("distinct", "rows", "dropped"),
    [(200, 300, True), (151, 300, True), (150, 300, False), (51, 100, True), (50, 90, False)],
)
def test_free_text_is_told_from_categories_by_its_share_of_distinct_texts(
    distinct: int, rows: int, dropped: bool
) -> None:
    scan = scanned([f"a remark of words, number {i % distinct}" for i in range(rows)])
    assert (scan.reason_to_drop() is not None) == dropped


def test_a_remark_that_is_made_once_has_no_input_of_its_own() -> None:
    scan = scanned(["no remark"] * 700 + [f"a remark, number {i}" for i in range(300)])
    assert scan.reason_to_drop() is None
    assert scan.column().features == ("column = no remark", "column = another")


def test_missing_values_are_outside_only_where_training_had_none() -> None:
    values = np.array([0.0, 1.0, math.nan])
    for column in (
        NumberColumn(name="x"),
        FlagColumn(name="x", words=("no", "yes")),
        CategoryColumn(name="x", levels=("a", "b"), kept=2),
        DateColumn(name="x"),
    ):
        knows = column.fit(values)
        without = column.fit(values[:2])
        assert knows.outside(values).tolist() == [0, 0, 0], column.kind
        assert without.outside(values).tolist() == [0, 0, math.inf], column.kind
        assert len(knows.features) == len(without.features) + 1


def test_the_value_that_training_did_not_have_is_outside() -> None:
    flag, both = FlagColumn(name="x", words=("no", "yes")), np.array([0.0, 1.0])
    for only in both:
        fitted = flag.fit(np.array([only, only, math.nan]))
        assert fitted.outside(both).tolist() == np.where(both == only, 0.0, math.inf).tolist()
        assert fitted.outside(np.array([math.nan, math.inf])).tolist() == [0.0, math.inf]
        assert column_from_json(fitted.to_json()) == fitted
    assert flag.fit(both).outside(both).tolist() == [0.0, 0.0]
    assert flag.fit(np.array([math.nan])).outside(both).tolist() == [0.0, 0.0]


def test_the_promised_share_of_rows_like_training_lies_outside() -> None:
    """The k-th smallest and largest of N leave out 2k / (N + 1) of new values, exactly.

    With the interquartile range beyond them taken away again. 400 tables of 99 values and 50 new
    ones each; the share's standard error over tables is measured. 4 of them: 6e-5 false alarms.
    """
    generator = np.random.default_rng(0)
    shares = []
    for _ in range(400):
        column = NumberColumn(name="x").fit(generator.standard_cauchy(99), tail=3)
        new = generator.standard_cauchy(50)
        low, high = column.low + column.spread, column.high - column.spread
        shares.append(float(((new < low) | (new > high)).mean()))
        assert column.outside(new).tolist() == [
            max(column.low - x, x - column.high, 0.0) / column.spread for x in new
        ]
    error = float(np.std(shares)) / math.sqrt(len(shares))
    assert abs(np.mean(shares) - 0.06) < 4 * error
    assert abs(np.mean(shares) - 0.08) > 4 * error  # that of tail=4 would be caught


def test_dates_run_through_the_cycles_they_cover() -> None:
    days = np.arange(400.0)
    full: Column = DateColumn(name="d").fit(days)
    assert full.features[1:] == tuple(
        f"d {wave} of {cycle}" for cycle in ("year", "week") for wave in ("sin", "cos")
    )
    assert len(DateColumn(name="d").fit(days[:3]).features) == 1
    assert len(DateColumn(name="d").fit(7.0 * days[:20]).features) == 1  # always the same weekday
    assert DateColumn(name="d").fit(days[:5] / 24).features[-1] == "d cos of day"
    encoded = full.encode(days)
    assert encoded[0, 3:5] == pytest.approx(encoded[7, 3:5], abs=1e-5)


@pytest.mark.parametrize("stored", [{}, {"kind": "wood", "name": "x"}, {"kind": "flag"}])
def test_a_damaged_column_is_an_error(stored: dict[str, str]) -> None:
    with pytest.raises(TableError, match="a stored column cannot be read"):
        column_from_json(stored)
