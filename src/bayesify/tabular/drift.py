"""Find how each column of a new table is written, and refuse what cannot be read surely.

A column is read in the format of training. Where that does not read a share of the cells, or where
another format fits training's values far better, another reading is chosen if it is unambiguous;
otherwise the table is refused.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bayesify.tabular.cells import DATE_FORMATS, FLAG_WORDS, Floats, Texts, by_value, is_missing
from bayesify.tabular.columns import (
    CategoryColumn,
    Column,
    DateColumn,
    FlagColumn,
    NumberColumn,
    TextColumn,
    calendar_parts,
)
from bayesify.tabular.files import TableError, TableFile
from bayesify.tabular.number_form import SHAPES, NumberForm, same_unit, split_unit
from bayesify.tabular.schema import Target, label_of, texts_of

__all__ = ["Reading", "read_columns", "target_column"]

#: Share of unreadable cells above which a column is refused, if there are at least two.
_MOST_UNREAD = 0.2
#: A category is refused if more than half of at least so many cells have levels that are new.
_FEWEST_LEVELS = 5
#: Distinct cells of a column by which a format is chosen; all cells are then checked by it.
_MOST_TEXTS = 10_000
#: A reading is doubted if it lies so far from training's median, in shares of its values, and
#: another lies so much nearer.
_FAR, _NEARER = 0.45, 0.1
#: Share of cells that must be outside training's range by one reading, and inside by another.
_NEARLY_ALL = 0.9
#: A reading is reported where it rests on fewer distinct cells than this.
_FEW_CELLS = 5
_NO_WORDS = {words[0] for words in FLAG_WORDS} | {"0", "0.0"}
_YES_WORDS = {words[1] for words in FLAG_WORDS} | {"1", "1.0"}


@dataclass(frozen=True)
class Reading:
    """How one column of a new table is read.

    Args:
        column: column that parses the cells, to values of training's column.
        remark: note for the user; "" if it is read as in training, and whole.
        error: why the column must not be read; "" if it may.
    """

    column: Column
    remark: str = ""
    error: str = ""


@dataclass
class _Cells:
    """Cells of a column: counts of all of them, and the first distinct texts.

    Args:
        column: training's column.
        known: number of cells with a value.
        unread: number of those that training's format does not read.
        sizes: the first distinct cells and how often they occur.
        unread_texts: the first distinct cells that are not read.
        is_whole: whether ``sizes`` has every cell with a value.
        fate: what happens to one cell that is not read, and to several.
    """

    column: Column
    known: int = 0
    unread: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    unread_texts: dict[str, int] = field(default_factory=dict)
    is_whole: bool = True
    fate: tuple[str, str] = ("lies outside", "lie outside")

    def update(self, cells: Texts) -> None:
        """Count the next cells."""
        codes, unique = by_value(cells)
        counts = np.bincount(codes, minlength=len(unique))
        present = ~is_missing(unique)
        texts, counts = unique[present], counts[present]
        unread = ~np.isfinite(self.column.parse(texts)) if len(texts) else np.zeros(0, np.bool_)
        self.known += int(counts.sum())
        self.unread += int(counts[unread].sum())
        _keep(self.unread_texts, texts[unread], counts[unread])
        self.is_whole &= _keep(self.sizes, texts, counts)

    @property
    def texts(self) -> Texts:
        """Distinct cells."""
        return np.array(list({**self.sizes, **self.unread_texts}), dtype=object)

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """How often each of :attr:`texts` occurs."""
        return np.array(list({**self.sizes, **self.unread_texts}.values()), dtype=np.int64)

    @property
    def many_unread(self) -> bool:
        """Whether too many cells are not read by training's format."""
        if isinstance(self.column, CategoryColumn) and not isinstance(self.column, _Labels):
            return self.known >= _FEWEST_LEVELS and self.unread > 0.5 * self.known
        every = 0 < self.known == self.unread
        return every or (self.unread > 1 and self.unread > _MOST_UNREAD * self.known)


def _keep(kept: dict[str, int], texts: Texts, counts: npt.NDArray[np.int64]) -> bool:
    for text, count in zip(texts, counts.tolist(), strict=True):
        if text in kept:
            kept[text] += count
        elif len(kept) < _MOST_TEXTS:
            kept[text] = count
        else:
            return False
    return True


def read_columns(
    file: TableFile, columns: Sequence[Column], target: Column | None = None
) -> list[Reading]:
    """Return how each column of a new table is read, from all of its cells; the target's is last.

    Args:
        file: the new table.
        columns: training's columns, fitted; the table must have them all.
        target: the target's, from :func:`target_column`; None if it is not read.

    Raises:
        TableError: the file has no rows, or cannot be read.
    """
    checked = {c.name: _Cells(c) for c in columns if not isinstance(c, TextColumn)}
    if target is not None:
        checked[target.name] = _Cells(target, fate=("is not measured", "are not measured"))
    rows = 0
    for chunk in file.chunks():
        rows += len(chunk)
        for name, cells in checked.items():
            cells.update(texts_of(chunk, name))
    if not rows:
        raise TableError(f"{file.path} has no rows below its header")
    readings = [
        _reading(checked[column.name], decimal_commas=file.has_decimal_commas)
        if column.name in checked
        else Reading(column)
        for column in (*columns, *([] if target is None else [target]))
    ]
    # A format that was found by the first cells must read the others too.
    unsure = [
        each
        for each in readings
        if each.column.name in checked
        and not checked[each.column.name].is_whole
        and each.column is not checked[each.column.name].column
    ]
    if not unsure:
        return readings
    again = {each.column.name: _Cells(each.column) for each in unsure}
    for chunk in file.chunks():
        for name, cells in again.items():
            cells.update(texts_of(chunk, name))
    return [_verified(each, checked, again) for each in readings]


def _verified(reading: Reading, checked: dict[str, _Cells], again: dict[str, _Cells]) -> Reading:
    name = reading.column.name
    if name not in again or not again[name].unread or isinstance(reading.column, CategoryColumn):
        return reading
    if reading.error:  # the other format, for which training's was doubted, is impossible
        return _as_in_training(checked[name])
    return _refused(checked[name], f"cells like {_shown(again[name].unread_texts)}")


def _reading(cells: _Cells, *, decimal_commas: bool) -> Reading:
    column = cells.column
    if not cells.known:
        return Reading(column)
    if isinstance(column, NumberColumn):
        return _number(column, cells, decimal_commas=decimal_commas)
    if isinstance(column, DateColumn):
        return _date(column, cells)
    if not cells.unread:
        return Reading(column)
    if isinstance(column, FlagColumn):
        return _with_words(column, cells) or _as_in_training(cells)
    assert isinstance(column, CategoryColumn)
    return _category(column, cells)


def _refused(
    cells: _Cells, looks: str, mend: str = "write them as in training", rival: Column | None = None
) -> Reading:
    name = cells.column.name
    return Reading(
        rival or cells.column,
        error=f"the column {name!r} must hold {_written(cells.column)}, as in training, got "
        f"{looks}; {mend}",
    )


def _as_in_training(cells: _Cells) -> Reading:
    """Return training's own reading, unless it does not read too many cells."""
    column = cells.column
    if not cells.unread:
        return Reading(column)
    examples = _shown(cells.unread_texts)
    if cells.many_unread:
        return _refused(cells, f"{cells.unread:,} of {cells.known:,} cells like {examples}")
    if isinstance(column, CategoryColumn) and not isinstance(column, _Labels):
        return Reading(column)  # a new level is no other format
    what, verb = ("cell", cells.fate[0]) if cells.unread == 1 else ("cells", cells.fate[1])
    return Reading(
        column,
        f"{column.name}: {cells.unread:,} {what} like {examples} {verb}, for training has "
        f"{_written(column)}",
    )


def _shown(texts: Sequence[str] | dict[str, int] | Texts) -> str:
    short = [text if len(text) <= 40 else f"{text[:37]}..." for text in list(texts)[:3]]
    return ", ".join(map(repr, short))


def _written(column: Column) -> str:
    """Return how training's cells are written, in words."""
    if isinstance(column, NumberColumn):
        return column.form.words
    if isinstance(column, DateColumn):
        return f"dates as {_date_words(column.form)}"
    if isinstance(column, FlagColumn):
        return " or ".join(map(repr, column.words))
    assert isinstance(column, CategoryColumn)
    more = ", ..." if len(column.levels) > 3 else ""
    return f"levels such as {_shown(column.levels)}{more}"


# ---------------------------------------------------------------------------------------- numbers


def _number(column: NumberColumn, cells: _Cells, *, decimal_commas: bool) -> Reading:
    texts, counts = cells.texts, cells.counts
    if not cells.unread:
        return _doubted_number(column, cells)
    if column.whole and column.typical[:1] == (0.0,) and column.typical[-1:] == (1.0,):
        words = _with_words(column, cells)
        if words is not None:
            return words
    units = dict.fromkeys(part.unit for part in map(split_unit, texts) if part is not None)
    # Training's own separators first, so that they stand for others of the same meaning.
    own = NumberForm(column.decimal_comma, column.thousands)
    separators = [own, *(shape for shape in SHAPES if shape != own)]
    forms = [
        dataclasses.replace(shape, unit=unit)
        for unit in [column.unit, *(unit for unit in units if unit != column.unit)][:4]
        for shape in separators
    ]
    values = {form: form.parse(texts) for form in forms}
    read = {form: int(counts[np.isfinite(each)].sum()) for form, each in values.items()}
    if max(read.values()) < counts.sum():
        best = max(read, key=lambda form: read[form])
        if read[best] > read[forms[0]]:
            looks = f"cells like {_shown(cells.unread_texts)}, most of them {best.words}"
            return _refused(cells, looks)
        return _as_in_training(cells)
    meanings: dict[bytes, NumberForm] = {}
    for form in forms:
        if np.isfinite(values[form]).all():
            meanings.setdefault(values[form].tobytes(), form)
    meant = _one_meaning(
        column,
        {form: values[form] for form in meanings.values()},
        counts,
        decimal_commas=decimal_commas,
    )
    looks = f"cells like {_shown(cells.unread_texts)}"
    if meant is None:
        return _refused(
            cells, f"{looks}, where commas or points may separate thousands or be decimal points"
        )
    if not same_unit(meant.unit, column.unit):
        wrong = _wrong_unit(column, meant.unit, values[meant], counts)
        if wrong:
            return _refused(cells, f"{looks}: {wrong}")
    reader = dataclasses.replace(column, **dataclasses.asdict(meant))
    return Reading(
        reader, f"{column.name}: read as {meant.words}, where training has {column.form.words}"
    )


def _doubted_number(column: NumberColumn, cells: _Cells) -> Reading:
    """Return training's reading, or an error if points and commas rather mean the reverse."""
    texts, counts = cells.texts, cells.counts
    own = column.form.parse(texts)
    remark = ""
    for shape in SHAPES:
        if shape.decimal_comma == column.decimal_comma:
            continue
        form = dataclasses.replace(shape, unit=column.unit)
        other = form.parse(texts)
        if not np.isfinite(other).all() or np.array_equal(own, other):
            continue
        differ = texts[own != other]
        if _one_meaning(column, {column.form: own, form: other}, counts) != column.form:
            return _refused(
                cells,
                f"cells like {_shown(differ)}, which fit training's values as {form.words}",
                rival=dataclasses.replace(column, **dataclasses.asdict(form)),
            )
        if column.thousands and len(differ) < _FEW_CELLS:
            remark = f"{column.name}: {_shown(differ)} read as {column.form.words}, as in training"
    return Reading(column, remark)


def _one_meaning(
    column: NumberColumn,
    values: dict[NumberForm, Floats],
    counts: npt.NDArray[np.int64],
    *,
    decimal_commas: bool = False,
) -> NumberForm | None:
    """Return the form that is meant, of those that read all cells; None if nothing tells."""
    if column.whole and len(values) > 1:
        whole = {form: each for form, each in values.items() if (each == np.round(each)).all()}
        values = whole or values
    if len(values) == 1:
        return next(iter(values))
    fits = {form: _Fit.of(column, each, counts) for form, each in values.items()}
    usual = [
        *(
            f
            for f in fits
            if (f.decimal_comma, f.thousands) == (column.decimal_comma, column.thousands)
        ),
        *(f for f in fits if f.decimal_comma and decimal_commas),
    ]
    if usual:
        doubted = any(fits[form].is_better_than(fits[usual[0]]) for form in fits)
        return None if doubted else usual[0]
    inside = [form for form in fits if fits[form].outside <= 1.0 - _NEARLY_ALL]
    others = [form for form in fits if form not in inside]
    if len(inside) == 1 and all(fits[form].outside >= _NEARLY_ALL for form in others):
        return inside[0]
    return None


@dataclass(frozen=True)
class _Fit:
    """How well numbers fit training's.

    Args:
        outside: share of them below training's minimum or above its maximum.
        distance: distance of their mean rank among training's values from the median, 0 to 0.5.
    """

    outside: float = 0.0
    distance: float = 0.0

    @classmethod
    def of(cls, column: NumberColumn, values: Floats, counts: npt.NDArray[np.int64]) -> _Fit:
        if not column.typical:  # of a run of an older version
            return cls()
        points, places = np.unique(column.typical, return_inverse=True)
        ranks = np.bincount(places, weights=np.linspace(0.0, 1.0, 5)) / np.bincount(places)
        found = np.interp(values, points, ranks, left=0.0, right=1.0)
        beyond = (values < points[0]) | (values > points[-1])
        mean = float(np.average(found, weights=counts))
        return cls(float(np.average(beyond, weights=counts)), abs(mean - 0.5))

    def is_better_than(self, other: _Fit) -> bool:
        """Return whether the other reading is in doubt because of this one."""
        if other.outside >= _NEARLY_ALL and self.outside <= 1.0 - _NEARLY_ALL:
            return True
        return other.distance > _FAR and self.distance + _NEARER < other.distance


def _wrong_unit(
    column: NumberColumn, unit: str, values: Floats, counts: npt.NDArray[np.int64]
) -> str:
    """Return why numbers are not in training's unit; "" if they can be."""
    if unit and column.unit:
        return "another unit"
    if not column.typical:
        return "with a unit" if unit else "without a unit"
    low, high = column.typical[0], column.typical[-1]
    fractions = high <= 1.0 and low >= -1.0 if unit else bool((np.abs(values) <= 1.0).all())
    if "%" in (unit, column.unit) and fractions:
        return "1 may stand for 1 % or for 100 %"
    near = (values >= low) & (values <= high)
    if 2 * int(counts[near].sum()) <= int(counts.sum()):
        return "their size does not fit training's values, so that the unit may be another one"
    return ""


# ------------------------------------------------------------------------------------------ dates


def _date(column: DateColumn, cells: _Cells) -> Reading:
    if not cells.unread:
        return _doubted_date(column, cells)
    texts = cells.texts
    values = {form: days for form in _FORMS if (days := _complete(column, form, texts)) is not None}
    looks = f"cells like {_shown(cells.unread_texts)}"
    if not values:
        fits = [np.isfinite(_days(column, form, texts)) for form in (column.form, *_FORMS)]
        read = [int(cells.counts[each].sum()) for each in fits]
        if max(read) > read[0]:
            return _refused(cells, f"{looks}, in several formats", "write them as YYYY-MM-DD")
        return _as_in_training(cells)
    form = next((form for form in values if _is_sure(form)), None)
    if form is None:
        form = _likely_form(column, values, cells.counts)
    if form is None:
        several = " or ".join(_date_words(form) for form in values)
        return _refused(cells, f"{looks}, which can be {several}", "write them as YYYY-MM-DD")
    reader = dataclasses.replace(column, form=form)
    own = _order(column.form)[:2]
    if not _is_sure(form) and own and _order(form)[:2] != own:
        return _refused(
            cells, f"{looks}, which are {_date_words(form)}", "write them as YYYY-MM-DD", reader
        )
    return Reading(
        reader,
        f"{column.name}: dates read as {_date_words(form)}, where training has "
        f"{_date_words(column.form)}",
    )


def _doubted_date(column: DateColumn, cells: _Cells) -> Reading:
    """Return training's reading, or an error if the dates rather are in another order."""
    if _is_sure(column.form):
        return Reading(column)
    texts, counts = cells.texts, cells.counts
    own = _days(column, column.form, texts)
    remark = ""
    for form in _reordered(column.form):
        days = _complete(column, form, texts)
        if days is None or np.array_equal(days, own):
            continue
        if _unlike(column, days, counts) < _unlike(column, own, counts):
            return _refused(
                cells,
                f"cells like {_shown(texts)}, which fit training's dates better as "
                f"{_date_words(form)}",
                "write them as YYYY-MM-DD",
                dataclasses.replace(column, form=form),
            )
        remark = (
            f"{column.name}: dates read as {_date_words(column.form)}, as in training, though all "
            f"fit {_date_words(form)} too; YYYY-MM-DD has one meaning only"
        )
    return Reading(column, remark)


def _likely_form(
    column: DateColumn, values: dict[str, Floats], counts: npt.NDArray[np.int64]
) -> str | None:
    """Return the one form that is meant, of several that read all dates; None if nothing tells."""
    meanings: dict[bytes, str] = {}
    for form in sorted(values, key=lambda each: _order(each) != _order(column.form)):
        meanings.setdefault(values[form].tobytes(), form)
    forms = list(meanings.values())
    unlike = {form: _unlike(column, values[form], counts) for form in forms}
    best = min(forms, key=lambda form: unlike[form])
    others = [unlike[form] for form in forms if form != best]
    if not others:
        return best
    same = [form for form in forms if form.startswith(column.form)]  # with a time of day
    if same and unlike[same[0]] <= unlike[best]:
        return same[0]
    sure = unlike[best] == 0 and 2 * min(others) >= int(counts.sum())
    return best if sure else None


def _unlike(column: DateColumn, days: Floats, counts: npt.NDArray[np.int64]) -> int:
    """Return how many dates are beyond training's range, or on a day or month it never had."""
    strange = column.outside(days) > 0.0
    had = (column.month_days, column.months, column.weekdays)
    for part, known in zip(calendar_parts(days), had, strict=True):
        if known:
            strange |= ~np.isin(part, known)
    return int(counts[strange].sum())


def _days(column: DateColumn, form: str, texts: Texts) -> Floats:
    return dataclasses.replace(column, form=form).parse(texts)


def _complete(column: DateColumn, form: str, texts: Texts) -> Floats | None:
    """Return the days of all cells; None if the form does not read one."""
    if form == "ISO8601" and not all(_ISO_DATE.match(text) for text in texts):
        return None  # a number such as 20240105 may be anything
    for few in (texts[:20], texts):
        days = _days(column, form, few)
        if not np.isfinite(days).all():
            return None
    return days


def _order(form: str) -> str:
    """Return the order of day, month and a year of two digits; "" for ISO and names of months."""
    if form == "ISO8601" or "%Y/" in form or "%b" in form or "%B" in form:
        return ""
    return "".join(letter for letter in form[:8] if letter in "dmy")


def _is_sure(form: str) -> bool:
    """Return whether the order of day and month is beyond doubt."""
    return not _order(form) or form.startswith("%d.%m.")


def _reordered(form: str) -> list[str]:
    """Return the forms with day and month, or day and a year of two digits, exchanged."""
    swaps = ["dm", "dy"] if "%y" in form else ["dm"]
    return [form.translate(str.maketrans(pair, pair[::-1])) for pair in swaps]


def _date_words(form: str) -> str:
    if form == "ISO8601":
        return "YYYY-MM-DD"
    names = {"%d": "dd", "%m": "mm", "%Y": "yyyy", "%y": "yy", "%b": "Mon", "%B": "Month"}
    names |= {"%H": "hh", "%M": "mm", "%S": "ss"}
    return re.sub(r"%[A-Za-z]", lambda found: names[found[0]], form)


_ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_UNSURE = [form for form in DATE_FORMATS if not _is_sure(form)]
_FORMS = list(dict.fromkeys([*DATE_FORMATS, *(each for f in _UNSURE for each in _reordered(f))]))


# ------------------------------------------------------------------------------ words and levels


@dataclass(frozen=True, kw_only=True)
class _Words(FlagColumn):
    """Words for no and yes of several languages, and 0 and 1."""

    def _parse(self, texts: Texts) -> Floats:
        values = {**dict.fromkeys(_NO_WORDS, 0.0), **dict.fromkeys(_YES_WORDS, 1.0)}
        return np.array([values.get(text.lower(), math.nan) for text in texts])


def _with_words(column: Column, cells: _Cells) -> Reading | None:
    """Return the reading by words for no and yes, if every cell is one."""
    found = {text.lower() for text in cells.texts}
    if not found <= _NO_WORDS | _YES_WORDS:
        return None
    pairs = [
        f"{' and '.join(map(repr, sorted(found & words)))} as {meaning!r}"
        for words, meaning in ((_NO_WORDS, "no"), (_YES_WORDS, "yes"))
        if found & words
    ]
    remark = f"{column.name}: {', '.join(pairs)}, where training has {_written(column)}"
    return Reading(_Words(name=column.name, words=("no", "yes")), remark)


@dataclass(frozen=True, kw_only=True)
class _Folded(CategoryColumn):
    """Levels in whatever case and with whatever blanks they are written."""

    def _parse(self, texts: Texts) -> Floats:
        places = {_folded(level): float(place) for place, level in enumerate(self.levels)}
        return np.array([places.get(_folded(text), math.inf) for text in texts])


def _folded(text: str) -> str:
    return " ".join(label_of(text).casefold().split())


@dataclass(frozen=True, kw_only=True)
class _Labels(CategoryColumn):
    """Classes of a target, whose 1 may be written 1.0."""

    def _parse(self, texts: Texts) -> Floats:
        return super()._parse(np.array([label_of(text) for text in texts], dtype=object))


@dataclass(frozen=True, kw_only=True)
class _WordLabels(CategoryColumn):
    """Classes that are words for no and yes, written by other such words."""

    def _parse(self, texts: Texts) -> Floats:
        no = 0.0 if self.levels[0].lower() in _NO_WORDS else 1.0
        places = {**dict.fromkeys(_NO_WORDS, no), **dict.fromkeys(_YES_WORDS, 1.0 - no)}
        return np.array([places.get(text.lower(), math.inf) for text in texts])


def _category(column: CategoryColumn, cells: _Cells) -> Reading:
    fields = {each.name: getattr(column, each.name) for each in dataclasses.fields(column)}
    levels = {level.lower() for level in column.levels}
    if len(levels) == 2 and all(len(levels & words) == 1 for words in (_NO_WORDS, _YES_WORDS)):
        words = _with_words(column, cells)
        if words is not None:
            return Reading(_WordLabels(**fields), words.remark)
    if len({_folded(level) for level in column.levels}) < len(column.levels):
        return _as_in_training(cells)
    folded = _Folded(**fields)
    read = np.isfinite(folded.parse(cells.texts))
    unread = int(cells.counts[~read].sum())
    if unread >= cells.unread:
        return _as_in_training(cells)
    rest = dict(zip(cells.texts[~read], cells.counts[~read].tolist(), strict=True))
    left = dataclasses.replace(cells, unread=unread, unread_texts=rest)
    reading = _as_in_training(left)
    if reading.error:
        return reading
    remark = f"{column.name}: levels read in any case and spacing, where training has "
    return Reading(folded, remark + _written(column).removeprefix("levels such as "))


def target_column(target: Target) -> Column:
    """Return the column of a target, to find how a new table writes it.

    Example:
        >>> target = Target("grade", "classification", classes=("bad", "good"))
        >>> target_column(target).parse(np.array(["good", "worst"], dtype=object)).tolist()
        [1.0, inf]
    """
    if target.task == "classification":
        return _Labels(name=target.name, levels=target.classes, kept=len(target.classes))
    return NumberColumn(
        name=target.name,
        whole=target.whole,
        typical=target.typical,
        **dataclasses.asdict(target.form),
    )
