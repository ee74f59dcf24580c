"""The cells of a row that come as JSON numbers and truth values, in a column of categories."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from bayesify.app.serve.model import ModelCard
from bayesify.app.serve.openapi import request_body
from bayesify.app.serve.requests import parse_examples
from bayesify.app.serve.rows import RowReader
from bayesify.tabular.columns import CategoryColumn, NumberColumn


def codes(levels: tuple[str, ...], cells: list[Any]) -> list[float]:
    """The indices of the levels that the cells are read as; infinity is a level that is new."""
    reader = RowReader([CategoryColumn(name="x", levels=levels, kept=len(levels))], [])
    body = json.dumps({"examples": [{"x": cell} for cell in cells]}).encode()
    [values] = reader.read(parse_examples(body, most=len(cells)))
    return [float(each) for each in values]


def test_whole_numbers_beyond_those_of_a_float_are_themselves() -> None:
    levels = ("guest", "912345678901234569", "912345678901234567")
    numbers = [912345678901234567, 912345678901234569, 912345678901234560]
    expected = [2.0, 1.0, math.inf]
    assert codes(levels, numbers) == expected
    assert codes(levels, [str(number) for number in numbers]) == expected


@pytest.mark.parametrize(
    ("levels", "cells", "expected"),
    [
        (("03", "4.0", "5", "x"), [3, 4, 5, 5.0, 6], [0.0, 1.0, 2.0, 2.0, math.inf]),
        (("0.1", "1e3", "inf"), [0.1, 1000, 1000.0], [0.0, 1.0, 1.0]),
        (("False", "True", "maybe"), [True, "True", False], [1.0, 1.0, 0.0]),
        (("TRUE", "true", "x"), [True, "TRUE", False], [1.0, 0.0, math.inf]),
    ],
)
def test_numbers_and_truth_values_are_the_levels_that_they_mean(
    levels: tuple[str, ...], cells: list[Any], expected: list[float]
) -> None:
    assert codes(levels, cells) == expected


@pytest.mark.parametrize(
    ("typical", "example", "span"),
    [
        # Seconds since 1970 of one hour, of which six digits are another day.
        (
            (1700000005.25, 1700000900.5, 1700001801.75, 1700002700.0, 1700003599.5),
            1700001801.75,
            "1700000005.25 to 1700003599.5",
        ),
        ((0.1, 0.5, 2.0 / 3.0, 0.75, 1234567.5), 0.666667, "0.1 to 1234567.5"),
        ((2.0, 3.0, 4.0, 5.0, 6.0), 4.0, "2 to 6"),
    ],
)
def test_typical_numbers_lie_within_training(
    typical: tuple[float, ...], example: float, span: str
) -> None:
    [column] = RowReader([NumberColumn(name="x", typical=typical)], []).columns
    assert column.example == example
    card = ModelCard(
        **{"name": "run", "source": "run", "task": "regression", "input": "rows", "unit": "1"},
        **{"columns": [column], "num_samples": 1, "level": 0.9, "threshold": None},
        threshold_origin="",
    )
    schema = request_body(card, most=1)["content"]["application/json"]["schema"]
    cell = schema["properties"]["examples"]["items"]["properties"]["x"]
    assert cell["description"] == f"From {span} in training."
    assert cell["examples"] == [example]
