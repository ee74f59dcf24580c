"""Read dates in another format than in training, where one meaning is likely."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import numpy.typing as npt

from bayesify.tabular.cells import Floats, Texts, offsets_of
from bayesify.tabular.columns import DateColumn, calendar_parts
from bayesify.tabular.drift.column_cells import ColumnCells
from bayesify.tabular.drift.date_forms import FORMS, date_words, is_sure, order, reordered
from bayesify.tabular.drift.reading import Reading, as_in_training, refused, shown

__all__ = ["date_reading"]

#: Offsets of UTC, and that of a time without one.
_UTC = {"", "Z", "UTC", "GMT", "+00", "+0000", "+00:00", "-00:00"}
_ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d")


def date_reading(column: DateColumn, cells: ColumnCells) -> Reading:
    """Return how dates are read: as in training, or in the one other format that is meant."""
    texts = cells.texts
    if _has_other_zones(column, texts):
        has, mend = "without", "write them in the zone of training's, without an offset"
        if column.zoned:
            has, mend = "with", "write their offset too, such as +02:00, or Z for UTC"
        looks = f"cells like {shown(_of_other_zones(column, texts))}"
        return refused(cells, f"{looks}, where training has times {has} a time zone", mend)
    if not cells.unread:
        return _doubted_date(column, cells)
    values = {form: days for form in FORMS if (days := _complete(column, form, texts)) is not None}
    looks = f"cells like {shown(cells.unread_texts)}"
    if not values:
        fits = [np.isfinite(_days(column, form, texts)) for form in (column.form, *FORMS)]
        read = [int(cells.counts[each].sum()) for each in fits]
        if max(read) > read[0]:
            return refused(cells, f"{looks}, in several formats", "write them as YYYY-MM-DD")
        return as_in_training(cells)
    form = next((form for form in values if is_sure(form)), None)
    if form is None:
        form = _likely_form(column, values, cells.counts)
    if form is None:
        several = " or ".join(date_words(form) for form in values)
        return refused(cells, f"{looks}, which can be {several}", "write them as YYYY-MM-DD")
    reader = dataclasses.replace(column, form=form)
    own = order(column.form)[:2]
    if not is_sure(form) and own and order(form)[:2] != own:
        return refused(
            cells, f"{looks}, which are {date_words(form)}", "write them as YYYY-MM-DD", reader
        )
    return Reading(
        reader,
        f"{column.name}: dates read as {date_words(form)}, where training has "
        f"{date_words(column.form)}",
    )


def _has_other_zones(column: DateColumn, texts: Texts) -> bool:
    """Return whether times have a zone where training's have none, or none where they have one."""
    if not _of_other_zones(column, texts):
        return False
    # Of days alone UTC is a zone like none.
    is_utc = all(each.upper() in _UTC for each in offsets_of(texts))
    return "day" in column.cycles or not is_utc


def _of_other_zones(column: DateColumn, texts: Texts) -> list[str]:
    if column.zoned is None:
        return []
    offsets = zip(texts, offsets_of(texts), strict=True)
    return [text for text, offset in offsets if bool(offset) != column.zoned]


def _doubted_date(column: DateColumn, cells: ColumnCells) -> Reading:
    """Return training's reading, or an error if the dates rather are in another order."""
    if is_sure(column.form):
        return Reading(column)
    texts, counts = cells.texts, cells.counts
    own = _days(column, column.form, texts)
    remark = ""
    for form in reordered(column.form):
        days = _complete(column, form, texts)
        if days is None or np.array_equal(days, own):
            continue
        if _unlike(column, days, counts) < _unlike(column, own, counts):
            return refused(
                cells,
                f"cells like {shown(texts)}, which fit training's dates better as "
                f"{date_words(form)}",
                "write them as YYYY-MM-DD",
                dataclasses.replace(column, form=form),
            )
        remark = (
            f"{column.name}: dates read as {date_words(column.form)}, as in training, though all "
            f"fit {date_words(form)} too; YYYY-MM-DD has one meaning only"
        )
    return Reading(column, remark)


def _likely_form(
    column: DateColumn, values: dict[str, Floats], counts: npt.NDArray[np.int64]
) -> str | None:
    """Return the one form that is meant, of several that read all dates; None if nothing tells."""
    meanings: dict[bytes, str] = {}
    for form in sorted(values, key=lambda each: order(each) != order(column.form)):
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
