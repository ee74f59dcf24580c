"""Read numbers with other separators or units than in training, where one meaning is likely."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bayesify.tabular.cells import Floats
from bayesify.tabular.columns import NumberColumn
from bayesify.tabular.drift.column_cells import ColumnCells
from bayesify.tabular.drift.reading import Reading, as_in_training, refused, shown
from bayesify.tabular.drift.word_readings import words_reading
from bayesify.tabular.number_form import SHAPES, NumberForm, same_unit, split_unit

__all__ = ["number_reading"]

#: A reading is doubted if it lies so far from training's median, in shares of its values, and
#: another lies so much nearer.
_FAR, _NEARER = 0.45, 0.1
#: Share of cells that must be outside training's range by one reading, and inside by another.
_NEARLY_ALL = 0.9
#: A reading is reported where it rests on fewer distinct cells than this.
_FEW_CELLS = 5


def number_reading(column: NumberColumn, cells: ColumnCells, *, decimal_commas: bool) -> Reading:
    """Return how numbers are read: as in training, or by the one other form that is meant.

    Args:
        column: training's column.
        cells: the cells of the new table.
        decimal_commas: whether the new table's file has decimal commas.
    """
    if cells.are_numbers:
        return _stored_numbers(column, cells)
    texts, counts = cells.texts, cells.counts
    if not cells.unread:
        return _doubted_number(column, cells)
    if column.whole and column.typical[:1] == (0.0,) and column.typical[-1:] == (1.0,):
        words = words_reading(column, cells)
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
            looks = f"cells like {shown(cells.unread_texts)}, most of them {best.words}"
            return refused(cells, looks)
        return as_in_training(cells)
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
    looks = f"cells like {shown(cells.unread_texts)}"
    if meant is None:
        return refused(
            cells, f"{looks}, where commas or points may separate thousands or be decimal points"
        )
    if not same_unit(meant.unit, column.unit):
        wrong = _wrong_unit(column, meant.unit, values[meant], counts)
        if wrong:
            return refused(cells, f"{looks}: {wrong}")
    reader = dataclasses.replace(column, **dataclasses.asdict(meant))
    return Reading(
        reader, f"{column.name}: read as {meant.words}, where training has {column.form.words}"
    )


def _stored_numbers(column: NumberColumn, cells: ColumnCells) -> Reading:
    """Return training's reading, or an error if the numbers seem to be in another unit."""
    if column.unit and cells.sizes:
        values = np.array(list(cells.sizes), dtype=np.float64)
        wrong = _wrong_unit(column, "", values, np.array(list(cells.sizes.values())))
        if wrong:
            return refused(cells, f"numbers like {shown(cells.sizes)}: {wrong}")
    return as_in_training(cells)


def _doubted_number(column: NumberColumn, cells: ColumnCells) -> Reading:
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
            return refused(
                cells,
                f"cells like {shown(differ)}, which fit training's values as {form.words}",
                rival=dataclasses.replace(column, **dataclasses.asdict(form)),
            )
        if column.thousands and len(differ) < _FEW_CELLS:
            remark = f"{column.name}: {shown(differ)} read as {column.form.words}, as in training"
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
