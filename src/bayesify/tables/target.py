"""What is to be predicted: classes, or a number that is standardised for training."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bayesify.tables.columns import NumberColumn
from bayesify.tables.files import TableError
from bayesify.tables.scan import ColumnScan
from bayesify.tables.text import Floats, Texts, as_numbers, by_value, is_missing

__all__ = ["MOST_CLASSES", "TASKS", "Target", "find_target"]

TASKS = ("classification", "regression")
MOST_CLASSES = 1000
#: Whole numbers with at most so many values, each in so many rows on average, are classes.
_FEW_VALUES, _ROWS_EACH = 10, 5


@dataclass(frozen=True)
class Target:
    """The target column.

    Args:
        name: of the column.
        task: ``"classification"`` or ``"regression"``.
        classes: the labels, as text, in order; none for regression.
        decimal_comma: whether 1.5 is written 1,5.
        shift: mean of the training targets, for regression.
        scale: their standard deviation.

    Example:
        >>> target = Target("grade", "classification", classes=("bad", "good"))
        >>> target.parse(np.array(["good", "bad", ""], dtype=object))
        array([ 1.,  0., nan])
    """

    name: str
    task: str
    classes: tuple[str, ...] = ()
    decimal_comma: bool = False
    shift: float = 0.0
    scale: float = 1.0

    def parse(self, texts: Texts) -> Floats:
        """Class indices or numbers, shape (N,), nan where there is none."""
        codes, unique = by_value(texts)
        if self.task == "regression":
            values = as_numbers(unique, decimal_comma=self.decimal_comma).copy()
            values[~np.isfinite(values)] = np.nan
        else:
            places = {label: float(place) for place, label in enumerate(self.classes)}
            labels = (_label(text) for text in unique)
            values = np.array([places.get(label, np.nan) for label in labels])
        values[is_missing(unique)] = np.nan
        return values[codes]

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON."""
        return {**vars(self), "classes": list(self.classes)}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Target:
        """What :meth:`to_json` wrote.

        Raises:
            TableError: it is not of this form.
        """
        try:
            return cls(**{**stored, "classes": tuple(stored["classes"])})
        except (KeyError, TypeError) as error:
            raise TableError(f"the stored target cannot be read: {error}") from error


def find_target(scan: ColumnScan, task: str | None) -> Target:
    """The target that a column holds, as classes or as a number.

    Args:
        scan: the column, seen whole.
        task: what to take it for; None decides by what it holds: numbers are for regression, but
            for whole numbers of at most 10 values that come 5 times each on average.

    Raises:
        TableError: it is empty or constant, has too many classes, or numbers are asked of text.
    """
    name = scan.name
    if not scan.count:
        raise TableError(f"the target {name!r} is empty; choose another column with --target")
    if scan.is_ambiguous:
        raise TableError(
            f"the commas in the numbers of the target {name!r} may part thousands or be decimal "
            "points; write them without"
        )
    labels = sorted({_label(text) for text in scan.texts}, key=_in_order)
    numbers = as_numbers(np.array(labels, dtype=object), decimal_comma=scan.decimal_comma)
    if 1 in (
        len(labels),
        len(set(numbers.tolist())),
    ):  # 3.5 and 3.50 are one; no nan equals another
        raise TableError(
            f"the target {name!r} has one value only, {labels[0]!r} (rows: {scan.count:,}), so "
            "there is nothing to learn; use another column for --target, or add rows with others"
        )
    number = scan.is_number or scan.decimal_comma
    if task is None:
        few = len(labels) <= _FEW_VALUES and scan.count >= _ROWS_EACH * len(labels)
        classes = not number or (scan.is_whole and (len(labels) == 2 or few))
        task = "classification" if classes else "regression"
    if task == "regression":
        if not number:
            raise TableError(
                f"the target {name!r} must hold numbers for regression, got "
                f"{labels[0]!r} and other text; use --task classification"
            )
        column = scan.column()
        assert isinstance(column, NumberColumn)
        return Target(name, task, decimal_comma=column.decimal_comma)
    if scan.overflowed or len(labels) > MOST_CLASSES:
        mend = "--task regression" if number else "another column with --target"
        raise TableError(
            f"the target {name!r} must have at most {MOST_CLASSES:,} classes, got "
            f"{'more than ' if scan.overflowed else ''}{len(labels):,}; use {mend}"
        )
    return Target(name, task, tuple(labels))


def _label(text: str) -> str:
    """One label for 1 and 1.0, and one for 0 and -0.0; other text as it is."""
    whole = text.partition(".")[0] if re.fullmatch(r"[+-]?\d+\.0+", text) else text
    return "0" if whole == "-0" else whole


def _in_order(label: str) -> tuple[float, str]:
    """Numbers by size, then text by its letters."""
    try:
        number = float(label)
    except ValueError:
        number = math.inf
    return (math.inf if math.isnan(number) else number, label)
