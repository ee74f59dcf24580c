"""Parse numbers as people write them: decimal commas, thousands separators, units, currencies."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bayesify.tabular.cells import Floats, Texts, as_numbers

__all__ = ["SEPARATORS", "SHAPES", "FormCounts", "NumberForm", "same_unit", "split_unit"]

_CODES = "EUR|USD|GBP|JPY|CHF|CNY|CAD|AUD|NZD|SEK|NOK|DKK|PLN|CZK|HUF|INR|KRW|BRL|ZAR|MXN|RUB|TRY"
#: \x80 is the euro sign of a Windows-1252 file that was read as Latin-1.
_SIGNS = r"€$£¥₹₽\x80"
#: A unit, of letters and signs, such as kg, m², km/h or sq ft.
_UNIT = rf"(?:[^\W\d_]|[%‰°µ{_SIGNS}])(?:[^\W\d_]|[%‰°µ²³/·^*.{_SIGNS}]| (?=[^\W\d_]))*[23]?"
_CELL = re.compile(
    rf"(?P<sign>[+\-\u2212]?)\s?(?P<before>(?:[A-Z]{{1,2}})?[{_SIGNS}]|{_CODES})?\s?"
    r"(?P<inner>[+\-\u2212]?)"
    r"(?P<body>[\d.,](?:[\d.,]|['\u2019 \u00a0\u2009\u202f](?=\d))*(?:[eE][+-]?\d+)?)\s?"
    rf"(?P<after>{_UNIT})?"
)
#: One name for each way to write a unit.
_SAME_UNIT = {
    "€": "EUR",
    "\x80": "EUR",
    "$": "USD",
    "US$": "USD",
    "£": "GBP",
    "¥": "JPY",
    "₹": "INR",
    "₽": "RUB",
    "percent": "%",
    "pct": "%",
    "μ": "µ",
}
#: Separators of thousands, in words.
SEPARATORS = {",": "commas", ".": "points", " ": "blanks", "'": "apostrophes"}
#: Units of a column that are told apart; a column with more has no unit.
_MOST_UNITS = 20
_GROUPED_POINTS = re.compile(r"[+\-\u2212]?\s{0,2}[1-9]\d{0,2}(?:\.\d{3})+")
_BLANKS = str.maketrans("\u2019\u00a0\u2009\u202f\u2212", "'   -")


class Split(NamedTuple):
    """A cell taken apart: the number, its unit as written, and whether the unit comes first."""

    number: str
    unit: str
    is_prefix: bool


def split_unit(text: str) -> Split | None:
    """Return number and unit of a cell; None if it is no number with one unit or none.

    Example:
        >>> split_unit("-$1,200.50"), split_unit("12 kg").unit, split_unit("lot 3")
        (Split(number='-1,200.50', unit='$', is_prefix=True), 'kg', None)
    """
    found = _CELL.fullmatch(text)
    if found is None or (found["before"] and found["after"]) or (found["sign"] and found["inner"]):
        return None
    number = (found["sign"] + found["inner"] + found["body"]).translate(_BLANKS)
    return Split(number, found["before"] or found["after"] or "", bool(found["before"]))


def same_unit(one: str, other: str) -> bool:
    """Return whether two units are one, such as € and EUR.

    Example:
        >>> same_unit("€", "EUR"), same_unit("kg", "g")
        (True, False)
    """
    return _name_of(one) == _name_of(other)


def _name_of(unit: str) -> str:
    return _SAME_UNIT.get(unit, unit).rstrip(".")


@dataclass(frozen=True)
class NumberForm:
    """How the numbers of a column are written.

    Args:
        decimal_comma: whether 1.5 is written 1,5.
        thousands: what may separate thousands: a comma, a point, a blank, an apostrophe or nothing.
        unit: unit or sign of a currency or of percent around every number.

    Example:
        >>> form = NumberForm(thousands=",", unit="€")
        >>> form.parse(np.array(["€1,234.50", "2 €", "3"], dtype=object)).tolist()
        [1234.5, 2.0, nan]
        >>> form.words
        "numbers with a decimal point, commas between thousands and the unit '€'"
    """

    decimal_comma: bool = False
    thousands: str = ""
    unit: str = ""

    def parse(self, texts: Texts) -> Floats:
        """Return the numbers of stripped cells; nan for a text that is not of this form."""
        values = np.full(len(texts), math.nan)
        if not (self.thousands or self.unit):
            values = as_numbers(texts, decimal_comma=self.decimal_comma).copy()
        # Also -5 with a typographic minus or a blank, and digits of other scripts.
        left = np.isnan(values)
        values[left] = [self._value(text) for text in texts[left]]
        return values

    def _value(self, text: str) -> float:
        part = split_unit(text)
        if part is None or _name_of(part.unit) != _name_of(self.unit):
            return math.nan
        if not self.reads(part.number):
            return math.nan
        plain = part.number.replace(self.thousands, "") if self.thousands else part.number
        return float(plain.replace(",", ".") if self.decimal_comma else plain)

    def reads(self, number: str) -> bool:
        """Return whether a number without its unit is of this form."""
        return _PATTERNS[self.decimal_comma, self.thousands].fullmatch(number) is not None

    @property
    def words(self) -> str:
        """Description for messages."""
        parts = [f"a decimal {'comma' if self.decimal_comma else 'point'}"]
        if self.thousands:
            parts.append(f"{SEPARATORS[self.thousands]} between thousands")
        if self.unit:
            parts.append(f"the unit {self.unit!r}")
        most, last = ", ".join(parts[:-1]), parts[-1]
        return f"numbers with {most} and {last}" if most else f"numbers with {last}"


#: The separators that are tried, the most usual first.
SHAPES = tuple(
    NumberForm(decimal_comma, thousands)
    for decimal_comma, thousands in (
        (False, ""),
        (True, ""),
        (False, ","),
        (True, "."),
        (False, " "),
        (True, " "),
        (False, "'"),
    )
)
_PATTERNS = {
    (form.decimal_comma, form.thousands): re.compile(
        r"[+-]?(?=[.,]?\d)(?:"  # a point alone is no number
        + (rf"[1-9]\d{{0,2}}(?:{re.escape(form.thousands)}\d{{3}})+|" if form.thousands else "")
        + r"\d*)(?:"
        + ("," if form.decimal_comma else r"\.")
        + r"\d*)?(?:[eE][+-]?\d+)?"
    )
    for form in SHAPES
}


class FormCounts:
    """Numbers of a column's cells, by unit and by the separators that can be meant.

    Example:
        >>> counts = FormCounts()
        >>> cells = np.array(["1,234.5 kg", "12 kg"], dtype=object)
        >>> counts.update(cells, np.array([1, 1]), np.array([False, False]))
        >>> counts.form(2)
        NumberForm(decimal_comma=False, thousands=',', unit='kg')
    """

    def __init__(self) -> None:
        self._reads: Counter[tuple[str, int]] = Counter()
        self._sizes: Counter[str] = Counter()
        self._marked: Counter[str] = Counter()
        #: Numbers without a unit that have a point.
        self._pointed = 0
        self._prefixed: Counter[str] = Counter()
        self._written: dict[str, str] = {}

    def update(
        self, texts: Texts, sizes: npt.NDArray[np.int64], is_plain: npt.NDArray[np.bool_]
    ) -> None:
        """Count the next distinct cells.

        Args:
            texts: distinct stripped cells, none of them missing.
            sizes: how often each occurs.
            is_plain: which of them are numbers with a decimal point, or whole, without a unit.
        """
        self._update_plain(texts[is_plain], sizes[is_plain])
        for text, size in zip(texts[~is_plain], sizes[~is_plain].tolist(), strict=True):
            part = split_unit(text)
            if part is None:
                continue
            name = _name_of(part.unit)
            places = [place for place, form in enumerate(SHAPES) if form.reads(part.number)]
            if not places or (name not in self._sizes and len(self._sizes) >= _MOST_UNITS):
                continue
            self._written.setdefault(name, part.unit)
            self._sizes[name] += size
            self._prefixed[name] += size * part.is_prefix
            self._marked[name] += size * ("," in part.number or "." in part.number)
            self._pointed += size * (not name and "." in part.number)
            for place in places:
                self._reads[name, place] += size

    def _update_plain(self, texts: Texts, sizes: npt.NDArray[np.int64]) -> None:
        # Without a loop over separators: most cells of most tables are such numbers.
        if not len(texts):
            return
        pointed = np.fromiter(("." in text for text in texts), np.bool_, len(texts))
        grouped = pointed.copy()
        grouped[pointed] = [bool(_GROUPED_POINTS.fullmatch(text)) for text in texts[pointed]]
        total, with_point = int(sizes.sum()), int(sizes[pointed].sum())
        self._written.setdefault("", "")
        self._sizes[""] += total
        self._marked[""] += with_point
        self._pointed += with_point
        for place, form in enumerate(SHAPES):
            also = int(sizes[grouped].sum()) if form.thousands == "." else 0
            self._reads["", place] += total - (with_point - also if form.decimal_comma else 0)

    def add_numbers(self, count: int) -> None:
        """Count cells that are stored as numbers, so that their form is beyond doubt."""
        self._written.setdefault("", "")
        self._sizes[""] += count
        self._reads["", SHAPES.index(NumberForm())] += count

    def form(self, least: float, *, decimal_commas: bool = False) -> NumberForm | None:
        """Return the form that reads most cells; None if it reads too few or several forms tie.

        A form without separators and unit wins a tie.

        Args:
            least: number of cells that it must read.
            decimal_commas: whether a comma is the decimal point where it may be either.
        """
        if self.has_two_meanings(least, decimal_commas=decimal_commas):
            return SHAPES[0] if self._reads["", 0] >= least else None
        tied = self.tied(least)
        if not tied:
            return None
        points = [form for form in tied if not form.decimal_comma]
        commas = [form for form in tied if form.decimal_comma]
        if not (points and commas) or not self._is_marked(tied):
            return tied[0]
        return commas[0] if decimal_commas else points[0]

    def has_two_meanings(self, least: float, *, decimal_commas: bool = False) -> bool:
        """Return whether the separators of some numbers may be decimal signs or not.

        Args:
            least: as for :meth:`form`.
            decimal_commas: as for :meth:`form`.
        """
        tied = self.tied(least)
        points = [form for form in tied if not form.decimal_comma]
        if decimal_commas or not points or len(points) == len(tied) or not self._is_marked(tied):
            return False
        # $1,234: where the sign comes first, the comma is no decimal point.
        name = _name_of(tied[0].unit)
        return self._prefixed[name] < self._sizes[name] or points[0].thousands != ","

    def _is_marked(self, tied: list[NumberForm]) -> bool:
        """Return whether some numbers have a separator that the plain form does not read."""
        return tied[0] != SHAPES[0] and self._marked[_name_of(tied[0].unit)] > 0

    def tied(self, least: float) -> list[NumberForm]:
        """Return the forms that read the most cells, at least ``least``, the most usual first."""
        if not self._sizes:
            return []
        name = max(self._sizes, key=lambda each: self._sizes[each])
        counts = {form: self._reads[name, place] for place, form in enumerate(SHAPES)}
        most = max(counts.values())
        if not 0 < least <= most:
            return []
        return [
            dataclasses.replace(form, unit=self._written[name])
            for form, count in counts.items()
            if count == most
        ]

    def all_points_may_group(self, least: float) -> bool:
        """Return whether there are points in numbers, and all may separate thousands."""
        grouped = NumberForm(decimal_comma=True, thousands=".")
        return self._pointed > 0 and grouped in self.tied(least)

    def count(self, form: NumberForm) -> int:
        """Return the number of cells that a form reads."""
        place = SHAPES.index(dataclasses.replace(form, unit=""))
        return self._reads[_name_of(form.unit), place]
