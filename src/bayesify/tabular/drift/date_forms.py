"""Formats of dates: the order of day and month, and the formats with these exchanged."""

from __future__ import annotations

import re

from bayesify.tabular.cells import DATE_FORMATS

__all__ = ["FORMS", "date_words", "is_sure", "order", "reordered"]


def order(form: str) -> str:
    """Return the order of day, month and a year of two digits; "" for ISO and names of months."""
    if form == "ISO8601" or form.startswith("%Y") or "%b" in form or "%B" in form:
        return ""
    return "".join(letter for letter in form[:8] if letter in "dmy")


def is_sure(form: str) -> bool:
    """Return whether the order of day and month is beyond doubt."""
    return not order(form) or form.startswith("%d.%m.")


def reordered(form: str) -> list[str]:
    """Return the forms with day and month, or day and a year of two digits, exchanged."""
    swaps = ["dm", "dy"] if "%y" in form else ["dm"]
    return [form.translate(str.maketrans(pair, pair[::-1])) for pair in swaps]


def date_words(form: str) -> str:
    """Return how dates of a format are written, for example "dd.mm.yyyy"."""
    if form == "ISO8601":
        return "YYYY-MM-DD"
    names = {"%d": "dd", "%m": "mm", "%Y": "yyyy", "%y": "yy", "%b": "Mon", "%B": "Month"}
    names |= {"%H": "hh", "%M": "mm", "%S": "ss", "%I": "hh", "%p": "AM"}
    return re.sub(r"%[A-Za-z]", lambda found: names[found[0]], form)


_UNSURE = [form for form in DATE_FORMATS if not is_sure(form)]
FORMS = list(dict.fromkeys([*DATE_FORMATS, *(each for f in _UNSURE for each in reordered(f))]))
