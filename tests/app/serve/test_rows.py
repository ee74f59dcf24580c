"""The cells of a row: numbers, truth values and texts, read as those of a table are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bayesify.app.serve.model import ModelCard
from bayesify.app.serve.openapi import request_body
from bayesify.app.serve.request_rows import RequestRows
from bayesify.app.serve.requests import Examples, InputError, parse_examples
from bayesify.app.serve.rows import RowReader
from bayesify.tabular.columns import CategoryColumn, NumberColumn
from bayesify.tabular.files import TableError
from bayesify.tabular.new_table import NewTable
from bayesify.tabular.schema import TableSchema
from bayesify.tabular.training_table import fit_table


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
        # Codes, of which some look like numbers to Python.
        (("1E3", "2B7", "1_2", "inf"), [1000, 12, 1e3, 12.0], 4 * [math.inf]),
        (("1E3", "2B7", "1_2"), ["1E3", "1_2", "1000"], [0.0, 2.0, math.inf]),
        (("1e-3", "1E5", "unknown"), [0.001, 100_000, 1e5], [0.0, 1.0, 1.0]),
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
        name="run",
        source="run",
        task="regression",
        input="rows",
        unit="1",
        columns=[column],
        num_samples=1,
        level=0.9,
        threshold=None,
        threshold_origin="",
    )
    schema = request_body(card, most=1)["content"]["application/json"]["schema"]
    cell = schema["properties"]["examples"]["items"]["properties"]["x"]
    assert cell["description"] == f"From {span} in training."
    assert cell["examples"] == [example]


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> TableSchema:
    """Of a table of percentages, one column with small ones; two kinds of levels; words for yes."""
    path = tmp_path_factory.mktemp("units") / "old.csv"
    rows = (
        f"{i % 80 + 10} %;0,{i % 90 + 10} %;{('New York', 'Rome', 'Oslo')[i % 3]};"
        f"{'a' if i % 2 else 'A'};{'ja' if i % 4 else 'no'};{i * i / 7}"
        for i in range(120)
    )
    path.write_text("\n".join(["rate;small;city;case;word;y", *rows]))
    return fit_table(path, "y")[1]


TYPICAL = {"rate": "45 %", "small": "0,5 %", "city": "Rome", "case": "a", "word": "ja"}


def read_alone(
    schema: TableSchema, row: dict[str, Any], folder: Path
) -> tuple[list[float], str] | str:
    """Return the inputs and the column outside of a table of one row, or its error."""
    path = folder / "new.csv"
    path.write_text(f"{';'.join(row)}\n{';'.join(map(str, row.values()))}\n")
    try:
        [rows] = NewTable.open(path, schema)
    except TableError as error:
        reason = str(error).partition(": ")[2].removesuffix(", or go on with --lenient")
        return reason.replace("got cells like", "got numbers like")  # a CSV has only texts
    return rows.inputs[0].tolist(), str(rows.outside[0])


@pytest.mark.parametrize(
    "change",
    [
        {"rate": 45},
        {"rate": 45.5},
        {"rate": 0.45},
        {"rate": 900.5},
        {"small": 0.5},
        {"city": "rome"},
        {"city": "new  YORK"},
        {"city": "Paris"},
        {"case": "A"},
        {"word": "JA"},
        {"word": "Nein"},
        {"word": "perhaps"},
    ],
)
def test_a_row_is_read_as_in_a_table_of_its_own_whatever_its_neighbours(
    schema: TableSchema, change: dict[str, Any], tmp_path: Path
) -> None:
    row = TYPICAL | change
    expected = read_alone(schema, row, tmp_path)
    reader = RequestRows(schema)
    others = [TYPICAL | {"rate": rate, "city": "oslo"} for rate in (11, 50, 60)]
    for examples in ([row], [row, *others]):
        if isinstance(expected, str):
            with pytest.raises(InputError) as caught:
                reader.read(Examples(examples))
            assert str(caught.value) == f"examples[0].{next(iter(change))}: {expected}"
        else:
            found = reader.encode(reader.read(Examples(examples)))
            assert (found.inputs[0].tolist(), found.outside[0]) == expected


def test_the_example_of_a_number_with_a_unit_has_the_unit(schema: TableSchema) -> None:
    reader = RequestRows(schema)
    examples = {column.name: column.example for column in reader.columns}
    assert (examples["rate"], examples["small"]) == ("39.5 %", "0,375 %")
    assert reader.encode(reader.read(Examples([examples]))).outside == [""]
