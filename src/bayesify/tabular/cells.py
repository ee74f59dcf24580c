"""Parse the text of table cells: missing values, numbers, yes and no, dates.

The parsers are pandas' own. The words for a missing value and the date formats are ours, because a
run must read the same values with every version of pandas.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

__all__ = [
    "DATE_FORMATS",
    "FLAG_WORDS",
    "MISSING",
    "Floats",
    "Texts",
    "are_zoned",
    "as_days",
    "as_flags",
    "as_numbers",
    "by_value",
    "days_of",
    "is_missing",
    "offsets_of",
]

Floats = npt.NDArray[np.float64]
Texts = npt.NDArray[np.object_]

_DIGIT = re.compile(r"\d")
#: The offset from UTC at the end of a time of day.
_OFFSET = re.compile(r":\d\d(?:\.\d+)? ?(Z|UTC|GMT|[+-]\d\d(?::?\d\d)?)$", re.IGNORECASE)
#: Cells without a value, in lower case.
MISSING = frozenset(
    ("", "na", "n/a", "#n/a", "#na", "<na>", "nan", "-nan", "null", "#null!", "none", "nil")
) | {"?", "-", "--", "missing"}
#: Words for no and for yes, in lower case.
FLAG_WORDS = (
    ("false", "true"),
    ("no", "yes"),
    ("f", "t"),
    ("n", "y"),
    ("off", "on"),
    ("nein", "ja"),
    ("n", "j"),
    ("falsch", "wahr"),
    ("non", "oui"),
    ("faux", "vrai"),
    ("no", "si"),
    ("no", "sí"),
    ("não", "sim"),
    ("nee", "ja"),
    ("nej", "ja"),
)
#: The first of several formats that fit is used.
_DAYS = (
    "ISO8601",
    "%d.%m.%Y",
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%d-%m-%Y",
    "%Y/%m/%d",
    "%d %b %Y",
    "%b %d, %Y",
    "%d %B %Y",
    "%B %d, %Y",
    "%d-%b-%Y",
    "%d-%b-%y",
    "%d.%m.%y",
    "%d/%m/%y",
    "%m/%d/%y",
)
_TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
DATE_FORMATS = (
    *(day + time for day in _DAYS for time in (("",) if day == "ISO8601" else _TIMES)),
    # ISO 8601 has clocks of 24 hours only.
    "%Y-%m-%d %I:%M %p",
    "%Y-%m-%d %I:%M:%S %p",
)


def by_value(texts: Texts) -> tuple[npt.NDArray[np.intp], Texts]:
    """Return the distinct texts without blanks around them, and the index of each cell's text.

    Example:
        >>> by_value(np.array(["b ", "a", "b"], dtype=object))
        (array([0, 1, 0]), array(['b', 'a'], dtype=object))
    """
    codes, values = pd.factorize(texts)
    stripped = np.array([str(value).strip() for value in values], dtype=object)
    again, unique = pd.factorize(stripped) if len(stripped) else (codes, stripped)
    return again[codes], np.asarray(unique, dtype=object)


def is_missing(texts: Texts) -> npt.NDArray[np.bool_]:
    """Return which texts stand for a missing value.

    Example:
        >>> is_missing(np.array(["", "NA", "none", "0"], dtype=object)).tolist()
        [True, True, True, False]
    """
    return np.fromiter((text.lower() in MISSING for text in texts), np.bool_, len(texts))


def as_numbers(texts: Texts, *, decimal_comma: bool = False) -> Floats:
    """Parse numbers, which may be infinite; nan for a text that is no number.

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
    """Parse the words for no and yes, in any case, as 0 and 1; nan for other texts.

    Example:
        >>> as_flags(np.array(["No", "YES", "?"], dtype=object), ("no", "yes")).tolist()
        [0.0, 1.0, nan]
    """
    values = {words[0]: 0.0, words[1]: 1.0}
    return np.array([values.get(text.lower(), np.nan) for text in texts], dtype=np.float64)


def as_days(texts: Texts, form: str) -> Floats:
    """Parse dates as days since 1970, with fractions; nan for a text that is no date of this form.

    Words are no dates. Digits beyond microseconds are not read.

    Example:
        >>> as_days(np.array(["1970-01-02 12:00", "soon"], dtype=object), "ISO8601").tolist()
        [1.5, nan]
    """
    # Words such as "now" are the time of the day to pandas.
    texts = np.array([text if _DIGIT.search(text) else "" for text in texts], dtype=object)
    # It stores all dates in nanoseconds if one has them, and then reads 1677 to 2262 only.
    series = pd.Series(texts, dtype=object).str.replace(r"(?<=\.\d{6})\d+", "", regex=True)
    options: dict[str, Any] = {"format": form, "errors": "coerce", "utc": True}
    return days_of(pd.to_datetime(series, **options))


def offsets_of(texts: Texts) -> list[str]:
    """Return the offset from UTC that each time has, such as +02:00 or Z; "" for one without.

    Example:
        >>> offsets_of(np.array(["2024-01-05 10:00", "2024-01-05T10:00:00+02:00"], dtype=object))
        ['', '+02:00']
    """
    found = (_OFFSET.search(text) for text in texts)
    return ["" if each is None else each[1] for each in found]


def are_zoned(texts: Texts) -> bool | None:
    """Return whether times have a time zone; None where only some do.

    Example:
        >>> are_zoned(np.array(["2024-01-05 10:00", "2024-01-05"], dtype=object))
        False
    """
    found = set(map(bool, offsets_of(texts)))
    return found.pop() if len(found) == 1 else None


def days_of(times: pd.Series) -> Floats:
    """Return dates as days since 1970, with fractions; those with a time zone in UTC.

    Args:
        times: a series of type datetime64, shape (N,).

    Example:
        >>> days_of(pd.Series(pd.to_datetime(["1970-01-02 12:00", None]))).tolist()
        [1.5, nan]
    """
    # In the unit of the dates: a year such as -821 is no date of 64 bits in nanoseconds.
    values = (times if times.dt.tz is None else times.dt.tz_convert(None)).to_numpy()
    start = np.zeros((), dtype=values.dtype)
    return np.asarray((values - start) / np.timedelta64(1, "D"), dtype=np.float64)
