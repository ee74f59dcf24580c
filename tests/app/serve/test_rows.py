"""The cells of a row that come as JSON numbers and truth values, in a column of categories."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from bayesify.app.serve.requests import parse_examples
from bayesify.app.serve.rows import RowReader
from bayesify.tabular.columns import CategoryColumn


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
