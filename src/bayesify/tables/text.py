"""What the text in a table's cells means: missing, a number, yes or no, a date."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

__all__ = [
    "DATE_FORMATS",
    "FLAG_WORDS",
    "Floats",
    "Texts",
    "as_days",
    "as_flags",
    "as_numbers",
    "by_value",
    "is_missing",
]

Floats = npt.NDArray[np.float64]
Texts = npt.NDArray[np.object_]

#: Cells that hold no value, in lower case.
_MISSING = frozenset(
    ("", "na", "n/a", "#n/a", "#na", "<na>", "nan", "-nan", "null", "#null!", "none", "nil")
) | {"?", "-", "--", "missing"}
#: What stands for no and for yes, in lower case.
FLAG_WORDS = (("false", "true"), ("no", "yes"), ("f", "t"), ("n", "y"), ("off", "on"))
#: In the order in which they are preferred where several fit.
_DAYS = (
    "ISO8601",
    *("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%Y/%m/%d", "%d %b %Y", "%b %d, %Y"),
    *("%d %B %Y", "%B %d, %Y", "%d-%b-%Y", "%d.%m.%y", "%d/%m/%y", "%m/%d/%y"),
)
DATE_FORMATS = tuple(
    day + time
    for day in _DAYS
    for time in (("",) if day == "ISO8601" else ("", " %H:%M", " %H:%M:%S"))
)


def by_value(texts: Texts) -> tuple[npt.NDArray[np.intp], Texts]:
    """Each cell as an index into the different texts, which are stripped of blanks around them.

    Example:
        >>> by_value(np.array(["b ", "a", "b"], dtype=object))
        (array([0, 1, 0]), array(['b', 'a'], dtype=object))
    """
    codes, values = pd.factorize(texts)
    stripped = np.array([str(value).strip() for value in values], dtype=object)
    again, unique = pd.factorize(stripped) if len(stripped) else (codes, stripped)
    return again[codes], np.asarray(unique, dtype=object)


def is_missing(texts: Texts) -> npt.NDArray[np.bool_]:
    """Which texts stand for no value.

    Example:
        >>> is_missing(np.array(["", "NA", "none", "0"], dtype=object)).tolist()
        [True, True, True, False]
    """
    return np.fromiter((text.lower() in _MISSING for text in texts), np.bool_, len(texts))


def as_numbers(texts: Texts, *, decimal_comma: bool = False) -> Floats:
    """Numbers, perhaps infinite; nan where a text is none.

    Example:
        >>> as_numbers(np.array(["1e3", "1,5", "inf"], dtype=object)).tolist()
        [1000.0, nan, inf]
        >>> as_numbers(np.array(["1,5", "2"], dtype=object), decimal_comma=True).tolist()
        [1.5, 2.0]
    """
    series = pd.Series(texts, dtype=object)
    if decimal_comma:
        plain = series.str.fullmatch(r"[+-]?\d*,?\d*(?:[eE][+-]?\d+)?")
        series = series.where(plain.astype(bool), "").str.replace(",", ".", regex=False)
    return np.asarray(pd.to_numeric(series, errors="coerce"), dtype=np.float64)


def as_flags(texts: Texts, words: tuple[str, str]) -> Floats:
    """0 and 1 for the words of no and yes in any case; nan for others.

    Example:
        >>> as_flags(np.array(["No", "YES", "?"], dtype=object), ("no", "yes")).tolist()
        [0.0, 1.0, nan]
    """
    values = {words[0]: 0.0, words[1]: 1.0}
    return np.array([values.get(text.lower(), np.nan) for text in texts], dtype=np.float64)


def as_days(texts: Texts, form: str) -> Floats:
    """Days since 1970, with their fractions; nan where a text is no date of this form.

    Example:
        >>> as_days(np.array(["1970-01-02 12:00", "soon"], dtype=object), "ISO8601").tolist()
        [1.5, nan]
    """
    options: dict[str, Any] = {"format": form, "errors": "coerce", "utc": True}
    times = pd.to_datetime(pd.Series(texts, dtype=object), **options)
    return np.asarray((times - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(days=1), dtype=np.float64)
