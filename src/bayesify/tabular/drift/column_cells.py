"""Count the cells of a column, and those that the format of training does not read."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bayesify.tabular.cells import Floats, Texts, by_value, is_missing
from bayesify.tabular.columns import CategoryColumn, Column, NumberColumn
from bayesify.tabular.drift.target import Labels
from bayesify.tabular.number_form import NumberForm
from bayesify.tabular.rows import TableRows

__all__ = ["ColumnCells"]

#: Share of unreadable cells above which a column is not read, if there are at least two.
_MOST_UNREAD = 0.2
#: A category is not read if more than half of at least so many cells have levels that are new.
_FEWEST_LEVELS = 5
#: Distinct cells of a column by which a format is chosen; all cells are then checked by it.
_MOST_TEXTS = 10_000


@dataclass
class ColumnCells:
    """Cells of a column: counts of all of them, and the first distinct texts.

    Args:
        column: training's column.
        known: number of cells with a value.
        unread: number of those that training's format does not read.
        infinite: number of those that are infinite numbers.
        sizes: the first distinct cells and how often they occur.
        unread_texts: the first distinct cells that are not read.
        is_whole: whether ``sizes`` has every cell with a value.
        are_numbers: whether the cells are stored as numbers; ``sizes`` has them where training's
            numbers have a unit.
        fate: what happens to one cell that is not read, and to several.
    """

    column: Column
    known: int = 0
    unread: int = 0
    infinite: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    unread_texts: dict[str, int] = field(default_factory=dict)
    is_whole: bool = True
    are_numbers: bool = False
    fate: tuple[str, str] = ("lies outside", "lie outside")

    def read(self, rows: TableRows) -> None:
        """Count the next cells, those of a column of this name."""
        column = self.column
        numbers = rows.numbers(column.name) if isinstance(column, NumberColumn) else None
        if numbers is None:
            self.update(rows.texts(column.name))
        else:
            self.update_numbers(numbers)

    def update_numbers(self, numbers: Floats) -> None:
        """Count the next cells, which are stored as numbers, nan for a missing one."""
        column = self.column
        self.are_numbers = True
        infinite = np.isinf(numbers)
        self.known += int((~np.isnan(numbers)).sum())
        self.unread += int(infinite.sum())
        self.infinite += int(infinite.sum())
        if infinite.any():
            names, counts = np.unique(numbers[infinite].astype(str), return_counts=True)
            _keep(self.unread_texts, names.astype(object), counts)
        if self.is_whole and isinstance(column, NumberColumn) and column.unit:
            found, counts = np.unique(numbers[np.isfinite(numbers)], return_counts=True)
            self.is_whole = _keep(self.sizes, found.astype(str).astype(object), counts)

    def update(self, cells: Texts) -> None:
        """Count the next cells."""
        codes, unique = by_value(cells)
        counts = np.bincount(codes, minlength=len(unique))
        present = ~is_missing(unique)
        texts, counts = unique[present], counts[present]
        unread = ~np.isfinite(self.column.parse(texts)) if len(texts) else np.zeros(0, np.bool_)
        self.known += int(counts.sum())
        self.unread += int(counts[unread].sum())
        if isinstance(self.column, NumberColumn) and not self.column.unit:
            self.infinite += int(counts[unread & np.isinf(NumberForm().parse(texts))].sum())
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
        if isinstance(self.column, CategoryColumn) and not isinstance(self.column, Labels):
            return self.known >= _FEWEST_LEVELS and self.unread > 0.5 * self.known
        unread = self.unread
        if isinstance(self.column, NumberColumn) and self.column.infinite:
            unread -= self.infinite  # written as in training, where they count as missing
        every = 0 < self.known == unread
        return every or (unread > 1 and unread > _MOST_UNREAD * self.known)


def _keep(kept: dict[str, int], texts: Texts, counts: npt.NDArray[np.int64]) -> bool:
    for text, count in zip(texts, counts.tolist(), strict=True):
        if text in kept:
            kept[text] += count
        elif len(kept) < _MOST_TEXTS:
            kept[text] = count
        else:
            return False
    return True
