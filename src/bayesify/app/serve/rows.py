"""Read rows of a table from JSON, by the names of the columns and in the forms of training."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

from bayesify.app.serve import model
from bayesify.app.serve.images import PixelLimit, example_file, image_file
from bayesify.app.serve.requests import Examples, InputError, described
from bayesify.tabular.cells import Floats, Texts, as_days, as_flags, is_missing
from bayesify.tabular.columns import (
    CategoryColumn,
    Column,
    DateColumn,
    EncodedColumn,
    FlagColumn,
    ImageColumn,
    NumberColumn,
    TextColumn,
    TokenColumn,
    UnusedColumn,
)
from bayesify.tabular.drift import levels_of_cells, reading_of_numbers

__all__ = ["RowReader", "check_names"]

Path = tuple[str | int, ...]
#: Values of a column, or what a pretrained network is to read.
Cells = Floats | Texts
#: Levels of a category that are numbers, without and with an exponent.
_DECIMAL = re.compile(r"[+-]?\d+(\.\d*)?|[+-]?\.\d+")
_NUMBER = re.compile(rf"({_DECIMAL.pattern})(e[+-]?\d+)?|[+-]?inf", re.IGNORECASE)
#: Levels of a category that a description lists.
_MOST_OPTIONS = 100


class RowReader:
    """Reader of rows for a trained network.

    A number is a JSON number, or text as the training table has it; one without the table's unit is
    refused where it may be in another. Yes and no are true and false, or the table's words; a date
    is ISO 8601, or text as in the table; a category is its text in any case and spacing; an image
    is a file in base64; null is a missing value.

    Args:
        columns: the columns of the trained network.
        unused: names that a row may have too; they are not read.

    Example:
        >>> reader = RowReader([NumberColumn(name="x")], unused=["y"])
        >>> reader.read(Examples([{"x": 1.5}, {"x": "2", "y": 3}]))[0].tolist()
        [1.5, 2.0]
    """

    def __init__(self, columns: Sequence[Column], unused: Sequence[str]) -> None:
        self._columns = columns
        self._needed = [c for c in columns if not isinstance(c, UnusedColumn)]
        names = {column.name for column in self._needed}
        #: Names that a row may have and that are not read.
        self.unused = sorted({*unused, *(column.name for column in columns)} - names)

    @property
    def columns(self) -> list[model.Column]:
        """Descriptions of the columns that a row must have."""
        return [_description(column) for column in self._needed]

    def read(self, examples: Examples) -> list[Cells]:
        """Return the values of each column, each of shape (N,).

        Those of a column that a pretrained network reads are its texts, or bytes of image files and
        None: the network reads those of several requests at a time.

        Raises:
            InputError: a row has not the columns, or has a value that its column cannot hold.
        """
        check_names(examples, [column.name for column in self._needed], self.unused)
        limit = PixelLimit()
        known = {
            column.name: _values(column, [row[column.name] for row in examples.items], limit)
            for column in self._needed
        }
        zeros = np.zeros(len(examples.items))
        return [known.get(column.name, zeros) for column in self._columns]


def check_names(examples: Examples, needed: Sequence[str], unused: Sequence[str]) -> None:
    """Check that every row has the columns, and no unknown ones.

    Raises:
        InputError: a row is no object, lacks a column, or has an unknown one.

    Example:
        >>> check_names(Examples([{"x": 1, "z": 2}]), ["x"], ["y"])
        Traceback (most recent call last):
        bayesify.app.serve.requests.InputError: examples[0].z: the training table had no such column
    """
    allowed = {*needed, *unused}
    if examples.pixels is not None:
        raise InputError(("pixels",), "is for images, and this model takes rows; leave it out")
    for place, row in enumerate(examples.items):
        path: Path = ("examples", place)
        if not isinstance(row, dict):
            raise InputError(
                path, f"must be an object with a value for each column, got {described(row)}"
            )
        for name in needed:
            if name not in row:
                raise InputError(
                    (*path, name), "is missing; add it, with null where the value is not known"
                )
        for name in row:
            if name not in allowed:
                raise InputError((*path, name), "the training table had no such column")


def _values(column: Column, cells: list[Any], limit: PixelLimit) -> Cells:
    """Return the values of a column's cells, as ``Column.parse`` has them, or what it parses.

    JSON numbers and truth values are values; texts are parsed as in training.
    """
    if isinstance(column, ImageColumn):
        files = [
            None if cell is None else image_file(cell, ("examples", place, column.name), limit)
            for place, cell in enumerate(cells)
        ]
        return np.array(files, dtype=object)
    texts: Texts = np.full(len(cells), "", dtype=object)
    numbers = np.full(len(cells), math.nan)
    for place, cell in enumerate(cells):
        path = ("examples", place, column.name)
        if isinstance(cell, str):
            texts[place] = cell.strip()
        elif isinstance(cell, bool):
            if not isinstance(column, FlagColumn | CategoryColumn):
                raise InputError(path, f"must be {_wanted(column)}, got {described(cell)}")
            if isinstance(column, FlagColumn):
                numbers[place] = float(cell)
            else:
                word = str(cell).lower()
                fits = [level for level in column.levels if level.lower() == word]
                texts[place] = word if word in fits or not fits else fits[0]
        elif isinstance(cell, int | float):
            if not abs(cell) <= sys.float_info.max:  # NaN too
                raise InputError(
                    path,
                    f"must be a finite number, got {described(cell)}; write null for a missing "
                    "value",
                )
            if isinstance(column, NumberColumn):
                numbers[place] = float(cell)
            elif isinstance(column, CategoryColumn):
                texts[place] = _level(column, cell)
            elif isinstance(column, FlagColumn) and cell in (0, 1):
                numbers[place] = float(cell)
            else:
                raise InputError(path, f"must be {_wanted(column)}, got {described(cell)}")
        elif cell is not None:
            raise InputError(path, f"must be {_wanted(column)}, got {described(cell)}")
    if isinstance(column, EncodedColumn):
        return texts
    if isinstance(column, CategoryColumn):
        return levels_of_cells(column, texts)
    if isinstance(column, NumberColumn) and column.unit:
        _check_unit(column, numbers)
    found = column.parse(texts)
    found = np.where(np.isnan(numbers), found, numbers)
    return _other_forms(column, texts, found)


def _check_unit(column: NumberColumn, numbers: Floats) -> None:
    """Check each number without its unit as that of a table with one row is checked.

    Raises:
        InputError: a number may be in another unit than training's.
    """
    for place in np.flatnonzero(~np.isnan(numbers)).tolist():
        error = reading_of_numbers(column, numbers[place : place + 1]).error
        if error:
            raise InputError(("examples", place, column.name), error)


def _other_forms(column: Column, texts: Texts, values: Floats) -> Floats:
    """Read texts that are not in the form of training as ISO dates, or as true and false.

    Raises:
        InputError: a text cannot be read.
    """
    unread = np.isposinf(values) & ~is_missing(texts)
    if unread.any() and isinstance(column, DateColumn):
        values[unread] = as_days(texts[unread], "ISO8601")
    if unread.any() and isinstance(column, FlagColumn):
        values[unread] = as_flags(texts[unread], ("false", "true"))
    wrong = unread & ~np.isfinite(values)
    if wrong.any():
        place = int(wrong.argmax())
        raise InputError(
            ("examples", place, column.name),
            f"must be {_wanted(column)}, got {described(texts[place])}",
        )
    return values


def _level(column: CategoryColumn, cell: float) -> str:
    """Return the text of a category that JSON has as a number: 3 is the level 3, 3.0 or 03."""
    # A whole number may have more digits than a float.
    is_whole = isinstance(cell, int)
    plain = str(cell) if is_whole else f"{cell:.15g}"
    if plain in column.levels:
        return plain
    # Among codes, such as 2B7, 1E3 is a code too.
    form = _DECIMAL if any(map(_is_code, column.levels)) else _NUMBER
    for level in filter(form.fullmatch, column.levels):
        if (Decimal(level) if is_whole else float(level)) == cell:
            return level
    return plain


def _is_code(level: str) -> bool:
    """Return whether a level has digits and letters that are no number."""
    has_both = any(map(str.isdigit, level)) and any(map(str.isalpha, level))
    return has_both and not _NUMBER.fullmatch(level)


def _wanted(column: Column) -> str:
    if isinstance(column, NumberColumn):
        return f"a number or null, or a text in the form of training: {column.form.words}"
    if isinstance(column, FlagColumn):
        no, yes = column.words
        return f'true, false, "{yes}", "{no}" or null'
    if isinstance(column, DateColumn):
        return 'a date such as "2024-12-31", or null'
    if isinstance(column, CategoryColumn):
        return "the text of a category, or null"
    return "a text or null"


def _with_unit(column: NumberColumn, number: float) -> float | str:
    """Return a number as a row may have it: as text with the unit where the column has one."""
    if not column.unit:
        return number
    digits = f"{number:.15g}"
    return f"{digits.replace('.', ',') if column.decimal_comma else digits} {column.unit}"


def _description(column: Column) -> model.Column:
    common: dict[str, Any] = {"name": column.name, "can_be_missing": column.missing}
    if isinstance(column, NumberColumn):
        typical = column.typical or (column.mean,) * 5
        middle = float(f"{typical[2]:.6g}")
        if not typical[1] <= middle <= typical[3]:  # such as a time in seconds since 1970
            middle = typical[2]
        return model.Column(
            kind="number",
            example=_with_unit(column, middle),
            low=typical[0],
            high=typical[-1],
            whole=column.whole,
            **common,
        )
    if isinstance(column, FlagColumn):
        return model.Column(kind="flag", example=True, options=[*column.words], **common)
    if isinstance(column, DateColumn):
        # A span of days beyond what datetime holds has the epoch for an example.
        days = column.mean if abs(column.mean) < 700_000 else 0.0
        time = datetime(1970, 1, 1) + timedelta(days=days)
        has_times = "day" in column.cycles
        example = time.isoformat(timespec="minutes") if has_times else time.date().isoformat()
        return model.Column(kind="date", example=example, **common)
    if isinstance(column, CategoryColumn):
        options = [*column.levels[:_MOST_OPTIONS]]
        return model.Column(
            kind="category", example=options[0] if options else "", options=options, **common
        )
    if isinstance(column, ImageColumn):
        return model.Column(kind="image", example=example_file(), **common)
    assert isinstance(column, TextColumn | TokenColumn)
    return model.Column(kind="text", example="some text", longest=column.longest, **common)
