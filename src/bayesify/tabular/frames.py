"""Columns of the tables that the estimators get: data frames and arrays."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pandas.api import types

from bayesify.tabular.advice import TableWarning
from bayesify.tabular.cells import Floats, Texts, are_zoned, by_value, days_of, is_missing
from bayesify.tabular.columns import (
    FEW_LEVELS,
    MOST_LEVELS,
    CategoryColumn,
    Column,
    DateColumn,
    FlagColumn,
    NumberColumn,
    UnusedColumn,
)
from bayesify.tabular.detect import ColumnScan
from bayesify.tabular.drift import reading_of, reading_of_numbers

__all__ = ["columns_of", "frame_of", "number_columns", "takes_any_number", "values_of"]

_DAY = pd.Timedelta(days=1)


#: Kinds of the cells of an array of objects that are no numbers: texts, dates and durations.
_NO_NUMBERS = (str, date, timedelta, np.datetime64, np.timedelta64)


def frame_of(table: Any, *, always: bool = False) -> pd.DataFrame | None:
    """Return a table as a pandas data frame; None if it is an array of numbers.

    An array of dates or durations is a frame: its numbers depend on its unit.

    Args:
        table: a pandas data frame, another that has ``to_pandas`` such as polars', or anything
            that NumPy makes an array of.
        always: whether to return a frame for an array of numbers too.

    Raises:
        ValueError: the table is lazy, as polars' ``LazyFrame`` is.

    Example:
        >>> frame_of([[1, 2], [3, 4]]) is None, frame_of([["a", 2], ["b", 4]]).shape
        (True, (2, 2))
    """
    if isinstance(table, pd.DataFrame):
        return table
    if hasattr(table, "to_pandas") and hasattr(table, "columns"):
        frame = table.to_pandas()
        return frame if isinstance(frame, pd.DataFrame) else None
    if hasattr(table, "collect") and hasattr(table, "lazy"):
        raise ValueError("X must be a data frame or an array, got a lazy frame; use X.collect()")
    if not isinstance(table, np.ndarray | list | tuple):
        return None
    try:
        array = np.asarray(table)
    except ValueError:  # rows of different lengths
        return None
    texts = array.dtype.kind in "US" or (
        array.dtype == object
        and any(cell is pd.NA or isinstance(cell, _NO_NUMBERS) for cell in array.flat)
    )
    times = array.dtype.kind in "mM"
    if array.ndim != 2 or not (texts or times or always):
        return None
    if times:
        return pd.DataFrame(array)
    return pd.DataFrame(array.astype(object)).infer_objects()


def number_columns(values: Floats, names: Sequence[str] | None) -> tuple[Column, ...]:
    """Return columns of numbers, before they are fitted; those of no number at all are unused.

    Args:
        values: shape (N, F), nan for a missing value.
        names: names of the columns; None numbers them.

    Example:
        >>> [column.kind for column in number_columns(np.array([[1.0, np.nan]]), None)]
        ['number', 'unused']
    """
    found = names if names is not None else [f"x{place}" for place in range(values.shape[1])]
    empty = [bool(np.isnan(column).all()) for column in values.T]
    return tuple(
        UnusedColumn(name=str(name)) if none else NumberColumn(name=str(name))
        for name, none in zip(found, empty, strict=True)
    )


def takes_any_number(column: Column) -> bool:
    """Return whether numbers are read as they are: not where training's cells had a unit.

    Example:
        >>> [takes_any_number(NumberColumn(name="x", unit=unit)) for unit in ("", "%")]
        [True, False]
    """
    if isinstance(column, NumberColumn):
        return not column.unit
    return isinstance(column, UnusedColumn)


def columns_of(frame: pd.DataFrame) -> tuple[Column, ...]:
    """Return what the columns of a frame hold, before they are fitted.

    The type of a column decides. Texts are read as those of a file: they may be numbers, dates, yes
    and no, or levels.

    Warns:
        TableWarning: a column or some of its cells are not used, or frequent levels share an input.

    Example:
        >>> frame = pd.DataFrame({"x": [1, None], "city": ["Rome", "Oslo"], "ok": [True, False]})
        >>> [column.kind for column in columns_of(frame)]
        ['number', 'category', 'flag']
    """
    columns, remarks = [], []
    for place, name in enumerate(frame.columns):
        column, found = _column(str(name), _cells(frame, place))
        columns.append(column)
        remarks += found
    if remarks:
        warnings.warn("; ".join(remarks), TableWarning, stacklevel=6)
    return tuple(columns)


def _cells(frame: pd.DataFrame, place: int) -> pd.Series:
    """Return the cells of a column; those of Arrow's types in the types of NumPy."""
    cells = frame.iloc[:, place]
    if isinstance(cells.dtype, pd.ArrowDtype):
        # Integers next to missing values as objects: float64 would round those above 2**53.
        options = {"date_as_object": False, "integer_object_nulls": True}
        cells = pa.array(cells, from_pandas=True).to_pandas(**options)
    return cells


def _column(name: str, cells: pd.Series) -> tuple[Column, list[str]]:
    if not cells.notna().any():
        return UnusedColumn(name=name), []
    kind = _kind(cells)
    if kind == "number":
        return NumberColumn(name=name, spans=_are_spans(cells)), []
    if kind == "flag":
        return FlagColumn(name=name, words=("false", "true")), []
    if kind == "date":
        return DateColumn(name=name, zoned=are_zoned(_texts(_few(cells)))), []
    texts = _texts(cells)
    if kind == "text":
        scan = ColumnScan(name)
        scan.update(texts)
        if not scan.count:  # words for a missing value alone
            return UnusedColumn(name=name), []
        reason = scan.reason_to_drop()
        # Few texts can be levels, even if each is in one row.
        if reason is not None and (scan.is_ambiguous or len(scan.texts) > FEW_LEVELS):
            reason = reason.partition(";")[0]  # what follows is for the command line
            return UnusedColumn(name=name), [f"the column {name!r} is not used: {reason}"]
        column = scan.column()
        if not isinstance(column, CategoryColumn):
            return column, scan.remarks
    category = _category(name, texts)
    shared = len(category.levels) - category.kept
    if kind == "text" and category.kept == MOST_LEVELS and shared:
        return category, [
            f"the column {name!r} has {len(category.levels):,} levels: the {MOST_LEVELS} most "
            f"frequent have an input each, the other {shared:,} share one"
        ]
    return category, []


def _kind(cells: pd.Series) -> str:
    """Return number, flag, date, category or text.

    Raises:
        ValueError: the numbers are complex.
    """
    dtype = cells.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return "category"
    if types.is_bool_dtype(dtype):
        return "flag"
    if types.is_complex_dtype(dtype):
        raise ValueError(
            f"the column {cells.name!r} must hold real numbers, got complex ones; give their real "
            "and imaginary parts as two columns"
        )
    if types.is_numeric_dtype(dtype) or types.is_timedelta64_dtype(dtype):
        return "number"
    if types.is_datetime64_any_dtype(dtype):
        return "date"
    inferred = types.infer_dtype(cells, skipna=True)
    if inferred == "boolean":
        return "flag"
    if inferred in ("integer", "floating", "mixed-integer-float", "decimal", "timedelta"):
        return "number"
    return "date" if inferred in ("datetime", "datetime64", "date") else "text"


def _category(name: str, texts: Texts) -> CategoryColumn:
    """Return a category with the levels of some cells.

    Up to 50 levels have an input each. Of more levels, the 256 most frequent of those that occur
    twice or more have one: one row says little about its level.
    """
    codes, unique = by_value(texts)
    counts = np.bincount(codes, minlength=len(unique))
    levels = [
        (-count, level)
        for count, level, absent in zip(
            counts.tolist(), unique.tolist(), is_missing(unique), strict=True
        )
        if not absent
    ]
    repeated = sum(count < -1 for count, _ in levels)
    kept = len(levels) if len(levels) <= FEW_LEVELS else min(MOST_LEVELS, repeated)
    if kept == len(levels):  # their order then does not depend on how often they occur
        levels = [(0, level) for _, level in levels]
    ordered = tuple(level for _, level in sorted(levels))
    kept = 0 if len(ordered) == 1 else kept
    return CategoryColumn(name=name, levels=ordered, kept=kept)


def values_of(columns: Sequence[Column], frame: pd.DataFrame, *, fitted: bool = False) -> Floats:
    """Return the values of each column of a frame, shape (N, F); see :class:`Column`.

    Args:
        columns: the columns.
        frame: the frame.
        fitted: whether the columns are fitted, and the frame is another one, whose cells may be
            written in another way; they are then read as those of a new file are.

    Raises:
        ValueError: a number is infinite, or the cells of a fitted column cannot be read surely.

    Warns:
        TableWarning: texts are read in another way than in training.

    Example:
        >>> frame = pd.DataFrame({"x": [1, None], "city": ["Rome", "Oslo"]})
        >>> values_of(columns_of(frame), frame).tolist()
        [[1.0, 1.0], [nan, 0.0]]
    """
    values = np.empty((len(frame), len(columns)))
    remarks: list[str] = []
    for place, column in enumerate(columns):
        cells = _cells(frame, place)
        reader, remark = _reader(column, cells) if fitted else (column, "")
        values[:, place] = _values(reader, cells)
        remarks += [remark] if remark else []
    if remarks:
        warnings.warn("; ".join(remarks), TableWarning, stacklevel=5)
    return values


def _reader(column: Column, cells: pd.Series) -> tuple[Column, str]:
    """Return what reads new cells of a fitted column, and a remark if they are written otherwise.

    Cells of the type of training's are not looked at, but for numbers of a column that was written
    with a unit, time spans among numbers and the time zone of dates; nor are levels refused that
    are new, but where most are, the remark says so.
    """
    kind = _kind(cells) if cells.notna().any() else ""
    spans = column.spans if isinstance(column, NumberColumn) else None
    if spans is not None and kind == "number" and _are_spans(cells) != spans:
        must, got, mend = "numbers", "time spans", "column / pd.Timedelta(1, unit)"
        if spans:
            must, got, mend = "time spans", "numbers", "pd.to_timedelta(column, unit)"
        raise ValueError(
            f"the column {column.name!r} must hold {must}, as in training, got {got}; convert "
            f"them, as by {mend}"
        )
    is_native = kind == {NumberColumn: "number", DateColumn: "date"}.get(type(column))
    if is_native and isinstance(column, NumberColumn) and not takes_any_number(column):
        reading = reading_of_numbers(column, _values(column, cells))
    elif is_native and isinstance(column, DateColumn):
        reading = reading_of(dataclasses.replace(column, form="ISO8601"), _texts(_few(cells)))
    elif not kind or is_native or isinstance(column, UnusedColumn):
        return column, ""
    else:
        reading = reading_of(column, _texts(cells))
    if reading.error:
        if isinstance(column, CategoryColumn):  # as scikit-learn's own plots may set them
            return column, f"{reading.error}; until then they are unknown levels"
        raise ValueError(reading.error)
    if is_native and isinstance(column, DateColumn):
        return column, ""
    # Another type than text has one meaning, as 1.0 for True.
    return reading.column, reading.remark if kind in ("text", "category") else ""


def _values(column: Column, cells: pd.Series) -> Floats:
    kind = _kind(cells) if cells.notna().any() else ""
    if isinstance(column, NumberColumn) and kind == "number":
        if _are_spans(cells):
            return np.asarray(pd.to_timedelta(cells) / _DAY, dtype=np.float64)
        numbers = pd.to_numeric(cells).to_numpy(dtype=np.float64, na_value=np.nan)
        if np.isinf(numbers).any():
            raise ValueError(
                f"Input X contains infinity in column {column.name!r}; numbers must be finite or "
                "missing"
            )
        return np.asarray(numbers)
    if isinstance(column, DateColumn) and kind == "date":
        if types.is_datetime64_any_dtype(cells.dtype):
            return days_of(cells)
        # The texts of date objects are ISO 8601, whatever the format of training's texts.
        column = dataclasses.replace(column, form="ISO8601")
    return column.parse(_texts(cells))


def _are_spans(cells: pd.Series) -> bool:
    found: str = types.infer_dtype(cells, skipna=True)
    return found.startswith("timedelta")


def _few(cells: pd.Series) -> pd.Series:
    """Return the first cells with a value, by which the time zone of typed dates is known."""
    return cells.dropna().iloc[:20]


def _texts(cells: pd.Series) -> Texts:
    """Return cells as text, "" for a missing one and "1" for 1.0."""
    missing = cells.isna().to_numpy(dtype=np.bool_)
    texts = [
        "" if absent else _text(cell)
        for cell, absent in zip(cells.astype(object), missing.tolist(), strict=True)
    ]
    return np.array(texts, dtype=object)


def _text(cell: object) -> str:
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)
