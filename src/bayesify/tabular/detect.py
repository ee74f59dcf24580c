"""Detect what each column of a table holds, from all its rows; no row is kept."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bayesify.tabular.cells import (
    DATE_FORMATS,
    FLAG_WORDS,
    Floats,
    Texts,
    are_zoned,
    as_days,
    by_value,
    is_missing,
)
from bayesify.tabular.columns import (
    FEW_LEVELS,
    MOST_LEVELS,
    CategoryColumn,
    Column,
    DateColumn,
    FlagColumn,
    NumberColumn,
)
from bayesify.tabular.files import TableError
from bayesify.tabular.number_form import SEPARATORS, FormCounts, NumberForm
from bayesify.tabular.schema import Target, label_of

__all__ = ["ColumnScan", "find_target", "may_be_counts"]

_MOST_CLASSES = 1000
_OTHER_TARGET = "use another column for --target"
#: Whole numbers with at most so many values, each in so many rows on average, are classes.
_FEW_VALUES, _ROWS_EACH = 10, 5
#: Greater integers are more often years, amounts or codes than counts.
_LARGEST_SMALL = 100
#: Distinct texts of a column that are counted; one with more holds identifiers or free text.
_MOST_TEXTS = 100_000
#: Share of its cells that must be numbers, or dates, in a column of numbers, or dates.
_MOSTLY = 0.9
#: Cells by which the likely formats of dates are found.
_SAMPLE = 50
_DIGIT = re.compile(r"\d")
_TWO_MEANINGS = "the commas or points in its numbers may separate thousands or be decimal points"
_ID_NAME = re.compile(
    r"(?:^|[_\W])(?:id|idx|index|uuid|guid|key|row|row_?n(?:r|o|um|umber)?)$"
    r"|^unnamed: \d+$|^__index_level_\d+__$|[a-z]ID$|^ID$"
)
#: Number with the sign of a currency, or of percent.
_AMOUNT = re.compile(r"[+-]?(?:[$€£¥] ?[+-]?[\d.,]*\d|[\d.,]*\d ?[$€£¥%])")


class ColumnScan:
    """Statistics of a column's cells, updated chunk by chunk, that tell what it holds.

    Args:
        name: name of the column.
        decimal_commas: whether a comma in a number is surely the decimal point.

    Example:
        >>> scan = ColumnScan("size")
        >>> scan.update(np.array(["1.5", "2.5", "2", "", "7"], dtype=object))
        >>> scan.column().kind, scan.missing
        ('number', 1)
    """

    def __init__(self, name: str, *, decimal_commas: bool = False) -> None:
        self.name = name
        self.count = self.missing = 0
        self.texts: Counter[str] = Counter()
        #: Texts that stand for no value, such as NA, and how often each does.
        self.words_for_missing: Counter[str] = Counter()
        self.overflowed = False
        #: Whether a text occurred twice, as far as texts were counted.
        self._repeats = False
        self.remarks: list[str] = []
        self._numbers = self._infinite = 0
        self._forms, self._decimal_commas = FormCounts(), decimal_commas
        self._whole = self._numbers_whole = True
        self._last: float | None = None
        self._first: float | None = None
        self._consecutive = True
        self._like_dates = 0
        #: Distinct texts when formats of dates were last looked for.
        self._num_searched = 0
        #: Cells that each likely format of dates reads.
        self._dates: Counter[str] = Counter()

    def update(self, cells: Texts) -> None:
        """Count the next cells."""
        codes, unique = by_value(cells)
        sizes = np.bincount(codes, minlength=len(unique))
        numbers = NumberForm().parse(unique)
        absent = np.isnan(numbers)
        absent[absent] = is_missing(unique[absent])
        self.missing += int(sizes[absent].sum())
        words = zip(unique[absent].tolist(), sizes[absent].tolist(), strict=True)
        self.words_for_missing.update({text: size for text, size in words if text})
        known, sizes, numbers = unique[~absent], sizes[~absent], numbers[~absent]
        if not len(known):
            return
        self.count += int(sizes.sum())
        if not self.overflowed:
            self.texts.update(dict(zip(known.tolist(), sizes.tolist(), strict=True)))
            self.overflowed = len(self.texts) > _MOST_TEXTS
            self._repeats = len(self.texts) < self.texts.total()
        elif not self._repeats:
            self._repeats = int(sizes.max()) > 1 or any(map(self.texts.__contains__, known))
        self._numbers += int(sizes[~np.isnan(numbers)].sum())
        self._infinite += int(sizes[np.isinf(numbers)].sum())
        self._forms.update(known, sizes, ~np.isnan(numbers))
        if self._numbers < _MOSTLY * self.count:
            self._update_dates(known, sizes)
        finite = numbers[np.isfinite(numbers)]
        self._add_numbers(finite, sizes[np.isfinite(numbers)])
        self._numbers_whole &= bool((finite == np.round(finite)).all())
        self._whole &= self._numbers_whole and len(finite) == len(known)
        if self._whole and self._consecutive:
            in_order = np.full(len(unique), np.nan)
            in_order[~absent] = numbers
            self._update_order(in_order[codes])

    def _add_numbers(self, values: Floats, sizes: npt.NDArray[np.int64]) -> None:
        """Add distinct finite numbers, each as often as it occurs; a scan may measure them."""

    def _update_order(self, values: Floats) -> None:
        before = np.concatenate(([self._last] if self._last is not None else [], values))
        self._consecutive = bool((np.diff(before) == 1.0).all())
        self._first = float(values[0]) if self._first is None else self._first
        self._last = float(values[-1])

    def _update_dates(self, known: Texts, sizes: npt.NDArray[np.int64]) -> None:
        looks = [6 <= len(text) <= 40 and _DIGIT.search(text) is not None for text in known]
        self._like_dates += int(sizes[looks].sum())
        likely = self._like_dates >= _MOSTLY * self.count
        is_due = len(self.texts) >= 2 * self._num_searched
        if likely and not self._dates and is_due and self.texts.total() == self.count:
            self._num_searched = len(self.texts)
            # By all cells so far: the first ones may be the few that are no dates.
            known = np.array(list(self.texts), dtype=object)
            sizes = np.array(list(self.texts.values()))
            self._dates = Counter(dict.fromkeys(_likely_dates(known, sizes), 0))
        for form in list(self._dates):
            fits = np.isfinite(as_days(known, form))
            self._dates[form] += int(sizes[fits].sum())
            if self._dates[form] < 0.5 * self.count:
                del self._dates[form]

    def count_unread_dates(self, form: str) -> int:
        """Return the number of cells that are no dates of a form which reads most of them."""
        return self.count - self._dates[form]

    @property
    def all_different(self) -> bool:
        """Whether no text occurs twice, as far as texts were counted."""
        return not self._repeats and (self.overflowed or len(self.texts) == self.count)

    @property
    def form(self) -> NumberForm | None:
        """How the numbers are written; None if the cells are not numbers, but for a few."""
        return self._forms.form(_MOSTLY * self.count, decimal_commas=self._decimal_commas)

    @property
    def is_whole(self) -> bool:
        """Whether every cell with a value is a whole number."""
        return self._whole and self.form == NumberForm()

    @property
    def numbers_are_whole(self) -> bool:
        """Whether every finite number is whole, as far as texts were counted."""
        form = self.form
        if form is None:
            return False
        if form == NumberForm():
            return self._numbers_whole
        values = form.parse(np.array(list(self.texts), dtype=object))
        finite = values[np.isfinite(values)]
        return not self.overflowed and bool((finite == np.round(finite)).all())

    @property
    def is_ambiguous(self) -> bool:
        """Whether the cells are numbers whose separators have two meanings, as in 1,234."""
        return self.form is None and bool(self._forms.tied(_MOSTLY * self.count))

    @property
    def is_ambiguous_in_part(self) -> bool:
        """Whether the separators of some of the numbers have two meanings."""
        least = _MOSTLY * self.count
        return self._forms.has_two_meanings(least, decimal_commas=self._decimal_commas)

    def reason_to_drop(self) -> str | None:
        """Return why the column is of no use as an input; None if it is of use."""
        if not self.count:
            return "it is empty"
        if len(self.texts) == 1 and not self.missing:
            return f"it is {_shown(next(iter(self.texts)))} in every row"
        named = _ID_NAME.search(self.name) or _ID_NAME.search(self.name.lower())
        if self.count > 1 and self.is_whole and self.all_different:
            if self._consecutive and not self.missing and self._first in (0.0, 1.0):
                return "it numbers the rows"
            if named:
                return "it identifies rows: whole numbers, all different"
        if self.form is not None or self._date_form() or self._flag_words():
            return None
        if self.is_ambiguous:
            return f"{_TWO_MEANINGS}; write the numbers without"
        if self.all_different and (amounts := self._amounts()):
            return amounts
        if self.overflowed and not self.all_different:
            return "it has too many different texts to be levels; --text with --encoder reads texts"
        if self.count > 1 and (
            self.all_different
            or (len(self.texts) > FEW_LEVELS and len(self.texts) > 0.5 * self.count)
        ):
            if mixed := self._mixed():
                return f"it identifies rows or is free text, although {mixed} if all should be"
            return (
                "it identifies rows or is free text: almost every row has a text of its own; "
                "--text with --encoder reads texts"
            )
        return None

    def mend_of_target(self) -> str:
        """Return what to do with a target whose texts are no classes."""
        if self._date_form() is not None:
            return "convert its dates to numbers, such as days, and use --task regression"
        return self._mixed(0.25) or _OTHER_TARGET

    def column(self) -> Column:
        """Return the column, before it is fitted to its training values."""
        name = self.name
        if (numbers := self.form) is not None:
            self._remark_form(numbers)
            strange = self.count - self._forms.count(numbers)
            if strange:
                texts = [text for text in self.texts if np.isnan(numbers.parse(_array(text)))[0]]
                self._remark(strange, f"no number, such as {_shown(texts[0])}," if texts else "")
            infinite = 0 if numbers.unit else self._infinite  # without the unit they are no numbers
            if infinite:
                self._remark(infinite, "infinite")
            return NumberColumn(name=name, infinite=infinite > 0, **dataclasses.asdict(numbers))
        if (form := self._date_form()) is not None:
            strange = self.count_unread_dates(form)
            if strange:
                self._remark(strange, f"no date like {form}")
            other = form.translate(str.maketrans("dm", "md"))
            if self._dates.get(other) == self._dates[form] and other != form:
                self.remarks.append(
                    f"{name}: read as {form}, though all its dates fit {other} too; write dates as "
                    "YYYY-MM-DD"
                )
            if "%y" in form:
                self.remarks.append(
                    f"{name}: years of two digits were read as 1969 to 2068; write years of four "
                    "digits if others are meant"
                )
            zoned = are_zoned(np.array(list(self.texts), dtype=object))
            if zoned is None:
                self.remarks.append(
                    f"{name}: some times have a time zone; those without one were read as UTC"
                )
            return DateColumn(name=name, form=form, zoned=zoned)
        if (words := self._flag_words()) is not None:
            return FlagColumn(name=name, words=words)
        if amounts := self._amounts():
            self.remarks.append(f"{name}: {amounts}; they were taken for categories")
        elif len(self.texts) > _FEW_VALUES and (mixed := self._mixed()):
            self.remarks.append(f"{name}: {mixed} if all should be; they were taken for categories")
        levels = sorted(self.texts, key=lambda text: (-self.texts[text], text))
        repeated = sum(self.texts[level] > 1 for level in levels)
        kept = len(levels) if len(levels) <= 2 else max(1, min(MOST_LEVELS, repeated))
        return CategoryColumn(name=name, levels=tuple(levels), kept=kept)

    def _remark_form(self, form: NumberForm) -> None:
        if form == NumberForm() and self._forms.all_points_may_group(_MOSTLY * self.count):
            self.remarks.append(
                f"{self.name}: its points were read as decimal points, though all of them may "
                "separate thousands"
            )
        if form.decimal_comma:
            self.remarks.append(f"{self.name}: its commas were read as decimal points")
        if form.thousands:
            separators = SEPARATORS[form.thousands]
            self.remarks.append(
                f"{self.name}: its {separators} were read as separators of thousands"
            )
        if form.unit:
            self.remarks.append(f"{self.name}: numbers with the unit {form.unit!r}")

    def _amounts(self) -> str:
        """Return a remark if the cells are numbers with several signs of currencies, else ""."""
        fits = sum(size for text, size in self.texts.items() if _AMOUNT.fullmatch(text))
        if fits < _MOSTLY * self.count:
            return ""
        return (
            f"its cells look like {_shown(next(iter(self.texts)))}, with several units or none; "
            "write the numbers alone"
        )

    @property
    def other_text(self) -> str | None:
        """The first text that is no number, as far as texts were counted; None if all are."""
        texts = np.array(list(self.texts), dtype=object)
        others = texts[np.isnan(NumberForm().parse(texts))]
        return others[0] if len(others) else None

    def _mixed(self, least: float = 0.5) -> str:
        """Return what to do if so many of the cells, and not all, are numbers, else ""."""
        if self._numbers < least * self.count or (other := self.other_text) is None:
            return ""
        return (
            f"{self._numbers:,} of its {self.count:,} cells are numbers: write cells such as "
            f"{_shown(other)} as numbers too"
        )

    def _remark(self, count: int, what: str) -> None:
        verb = "is" if count == 1 else "are"
        self.remarks.append(
            f"{self.name}: {count:,} value{'s'[: count > 1]} {verb} {what or 'no number'} and "
            f"count{'s' if count == 1 else ''} as missing"
        )

    def _date_form(self) -> str | None:
        if not self._dates or self.form is not None:
            return None
        form, fits = max(self._dates.items(), key=lambda item: item[1])
        return form if fits >= _MOSTLY * self.count else None

    def _flag_words(self) -> tuple[str, str] | None:
        found = {text.lower() for text in self.texts} if len(self.texts) <= 6 else set()
        return next((words for words in FLAG_WORDS if found and found <= set(words)), None)


def _likely_dates(texts: Texts, sizes: npt.NDArray[np.int64]) -> list[str]:
    """Return the formats of dates that read half of some cells, evenly spaced in their order.

    The share of the sample may differ from that of all cells, by which the format is then chosen.
    """
    order = np.argsort(texts)
    ends = np.cumsum(sizes[order])
    places = np.searchsorted(ends, (np.arange(_SAMPLE) + 0.5) / _SAMPLE * ends[-1])
    some = texts[order[places]]
    return [form for form in DATE_FORMATS if np.isfinite(as_days(some, form)).mean() >= 0.5]


def _array(text: str) -> Texts:
    return np.array([text], dtype=object)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def find_target(scan: ColumnScan, task: str | None, ordered: Sequence[str] = ()) -> Target:
    """Return the target that a column holds, classes or numbers.

    Args:
        scan: the scan of the whole column.
        task: ``"classification"`` or ``"regression"``; None decides by what the column holds:
            text that repeats, and whole numbers of at most 10 values that occur 5 times each on
            average, are classes.
        ordered: all classes in their order, where the user names them.

    Raises:
        TableError: the target is empty or constant, has too many classes, is text that hardly
            repeats where ``task`` is None, or text in a regression.
    """
    name = scan.name
    if not scan.count:
        raise TableError(f"the target {name!r} is empty; choose another column with --target")
    if scan.is_ambiguous or (task != "classification" and scan.is_ambiguous_in_part):
        raise TableError(
            f"the target {name!r} cannot be read: {_TWO_MEANINGS}; write the numbers without"
        )
    labels = sorted({label_of(text) for text in scan.texts}, key=_in_order)
    numbers = (scan.form or NumberForm()).parse(np.array(labels, dtype=object))
    # 3.5 and 3.50 are one number; no nan equals another.
    if 1 in (len(labels), len(set(numbers.tolist()))):
        raise TableError(
            f"the target {name!r} has one value only, {labels[0]!r} (rows: {scan.count:,}), so "
            "there is nothing to learn; use another column for --target, or add rows with others"
        )
    number = scan.form is not None
    is_chosen_here = task is None and not ordered
    if task is None:
        few = len(labels) <= _FEW_VALUES and scan.count >= _ROWS_EACH * len(labels)
        classes = not number or (scan.is_whole and (len(labels) == 2 or few))
        task = "classification" if classes else "regression"
    one_row_each = len(labels) == scan.count > 2
    if task == "regression":
        if not number:
            mend = scan.mend_of_target()
            if mend == _OTHER_TARGET and not one_row_each:
                mend = "use --task classification"
            raise TableError(
                f"the target {name!r} must hold numbers for regression, got "
                f"{_shown(scan.other_text or labels[0])} and other text; {mend}"
            )
        column = scan.column()
        assert isinstance(column, NumberColumn)
        return Target(name, task, **dataclasses.asdict(column.form))
    if scan.overflowed or len(labels) > _MOST_CLASSES:
        mend = "--task regression" if number else "another column with --target"
        raise TableError(
            f"the target {name!r} must have at most {_MOST_CLASSES:,} classes, got "
            f"{'more than ' if scan.overflowed else ''}{len(labels):,}; use {mend}"
        )
    if one_row_each and not number:
        raise TableError(
            f"the target {name!r} has a class of its own for every row, such as {labels[0]!r}, so "
            f"that none can be learned; {scan.mend_of_target()}"
        )
    if is_chosen_here and not number:
        _check_classes(scan, labels)
    return Target(name, task, tuple(labels))


def _check_classes(scan: ColumnScan, labels: Sequence[str]) -> None:
    """Check texts that were taken for classes, and remark on them.

    Raises:
        TableError: hardly any text occurs twice.
    """
    many = f"{len(labels):,} different texts in {scan.count:,} rows, such as {_shown(labels[0])}"
    mend = scan.mend_of_target()
    if len(labels) > FEW_LEVELS and len(labels) > 0.5 * scan.count:
        raise TableError(
            f"the target {scan.name!r} has {many}, too many for classes; {mend}, or, if they are "
            "classes, use --task classification"
        )
    some_other = mend != _OTHER_TARGET and len(labels) > _FEW_VALUES
    if some_other or scan._date_form() is not None:
        scan.remarks.append(f"{scan.name}: its {many}, were taken for classes; {mend}")
    by_word: dict[str, list[str]] = {}
    for label in labels:
        by_word.setdefault(label.casefold(), []).append(label)
    alike = [words for words in by_word.values() if len(words) > 1]
    if alike:
        more = ", as others do" if len(alike) > 1 else ""
        scan.remarks.append(
            f"{scan.name}: {' and '.join(map(_shown, alike[0]))} are {len(alike[0])} classes, "
            f"though they differ in upper and lower case only{more}; write them alike if they are "
            "one"
        )


def may_be_counts(target: Target) -> bool:
    """Return whether a target holds more than two small integers from 0, and no other values.

    Example:
        >>> may_be_counts(Target("visits", "classification", classes=("0", "1", "2")))
        True
    """
    if target.task == "regression":
        return target.whole and target.typical[0] >= 0.0 and target.typical[-1] <= _LARGEST_SMALL
    whole = all(re.fullmatch(r"\d{1,3}", label) for label in target.classes)
    return whole and len(target.classes) > 2 and int(target.classes[-1]) <= _LARGEST_SMALL


def _in_order(label: str) -> tuple[float, str]:
    """Return the sort key of a label: numbers by size, then text by its letters."""
    try:
        number = float(label)
    except ValueError:
        number = math.inf
    return (math.inf if math.isnan(number) else number, label)
