"""Scan a column of a large table: what it holds, its levels, and the moments of its numbers."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bayesify.tabular.cells import Floats
from bayesify.tabular.detect import ColumnScan
from bayesify.tabular.number_form import NumberForm
from bayesify.tabular.rows import TableRows, as_text

__all__ = ["Moments", "StreamScan"]

#: Distinct numbers of a column that are told apart; more are not classes.
_MOST_NUMBERS = 100_000
#: Distinct numbers whose texts are made: one more than there may be classes.
_MOST_NAMED = 1001
#: Texts of numbers that are kept of a column with very many, as examples.
_EXAMPLES = 100
#: Letters of the distinct texts of a column that are counted; one with more holds free text.
_MOST_LETTERS = 17_000_000


@dataclass
class Moments:
    """Count, mean, variance and range of numbers that come in parts.

    Sums are of differences to the mean of the first part, so that numbers far from 0 keep their
    digits.

    Example:
        >>> moments = Moments()
        >>> moments.add(np.array([1.0, 2.0])), moments.add(np.array([3.0, 9.0]))
        (None, None)
        >>> moments.without(np.array([9.0])), moments.low, moments.high
        ((2.0, 0.816496580927726), 1.0, 9.0)
    """

    count: int = 0
    low: float = math.inf
    high: float = -math.inf
    _origin: float = 0.0
    _sum: float = 0.0
    _squares: float = 0.0

    def add(self, values: Floats, sizes: npt.NDArray[np.int64] | None = None) -> None:
        """Add finite numbers (N,), each as often as ``sizes`` (N,) has it; None for once."""
        if not len(values):
            return
        if not self.count:
            self._origin = float(np.clip(values, -1e150, 1e150).mean())
        counts = 1 if sizes is None else sizes
        with np.errstate(over="ignore", invalid="ignore"):
            offsets = values - self._origin
            self._sum += float((offsets * counts).sum())
            self._squares += float((np.square(offsets) * counts).sum())
        self.count += len(values) if sizes is None else int(sizes.sum())
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))

    def without(self, values: Floats) -> tuple[float, float] | None:
        """Return mean and standard deviation of all numbers but some of them; None if too large.

        Args:
            values: finite numbers that were added, shape (N,).
        """
        count = self.count - len(values)
        with np.errstate(over="ignore", invalid="ignore"):
            offsets = values - self._origin
            mean = (self._sum - float(offsets.sum())) / max(1, count)
            square = (self._squares - float(np.square(offsets).sum())) / max(1, count)
        variance = square - mean * mean
        if count < 1 or not (math.isfinite(square) and variance > 0.0):
            return None
        return self._origin + mean, math.sqrt(variance)


class StreamScan(ColumnScan):
    """Scan of a column whose memory does not grow with its cells, with the moments of its numbers.

    Args:
        name: name of the column.
        decimal_commas: whether a comma in a number is surely the decimal point.

    Example:
        >>> scan = StreamScan("size")
        >>> scan.read(TableRows(pa.table({"size": [1.5, 2.5, None, 2.0]})))
        >>> scan.finish()
        >>> scan.column().kind, scan.missing, scan.moments.high
        ('number', 1, 2.5)
    """

    def __init__(self, name: str, *, decimal_commas: bool = False) -> None:
        super().__init__(name, decimal_commas=decimal_commas)
        #: Of the numbers with a point as the decimal sign and no unit.
        self.moments = Moments()
        self._stored = 0
        self._values: Floats = np.zeros(0)
        self._sizes: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._trimmed = False
        #: Texts of numbers that float64 may not tell apart or write as they are stored.
        self._exact: Counter[str] | None = None

    def read(self, rows: TableRows) -> None:
        """Count the cells of the next rows, in the column of this name."""
        numbers = rows.numbers(self.name)
        if numbers is not None:
            self._read_numbers(numbers)
            self._count_exact(rows.table[self.name])
            return
        self.update(rows.texts(self.name))
        self._drop_long_texts()
        if self.overflowed and not self._trimmed and (form := self.form) is not None:
            # A hundred thousand texts of numbers take 17 MB and tell nothing more.
            known = np.array(list(self.texts), dtype=object)
            strange = known[np.isnan(form.parse(known))].tolist()
            kept = [*strange, *known[:_EXAMPLES].tolist()]
            self.texts = Counter({text: self.texts[text] for text in dict.fromkeys(kept)})
            self._trimmed = True

    def _drop_long_texts(self) -> None:
        """Stop counting texts where they are too long to be levels, and keep some as examples."""
        if self.overflowed:
            return
        letters = itertools.accumulate(map(len, self.texts))
        short = sum(1 for _ in itertools.takewhile(lambda total: total <= _MOST_LETTERS, letters))
        if short < len(self.texts):
            self.overflowed = True
            self.texts = Counter(dict(itertools.islice(self.texts.items(), max(2, short))))

    def _add_numbers(self, values: Floats, sizes: npt.NDArray[np.int64]) -> None:
        self.moments.add(values, sizes)

    def _read_numbers(self, values: Floats) -> None:
        absent = np.isnan(values)
        self.missing += int(absent.sum())
        known = values[~absent]
        if not len(known):
            return
        self.count += len(known)
        self._stored += len(known)
        self._numbers += len(known)
        self._forms.add_numbers(len(known))
        finite = known[np.isfinite(known)]
        self._infinite += len(known) - len(finite)
        self.moments.add(finite)
        self._numbers_whole &= bool((finite == np.round(finite)).all())
        self._whole &= self._numbers_whole and len(finite) == len(known)
        if self._whole and self._consecutive:
            self._update_order(values)
        if not self.overflowed:
            found, sizes = np.unique(known, return_counts=True)
            merged, places = np.unique(np.concatenate([self._values, found]), return_inverse=True)
            counts = np.concatenate([self._sizes, sizes])
            self._sizes = np.bincount(places, weights=counts).astype(np.int64)
            self._values = merged
            self._repeats = len(merged) < int(self._sizes.sum())
            self.overflowed = len(merged) > _MOST_NUMBERS
        elif not self._repeats:
            found, sizes = np.unique(known, return_counts=True)
            self._repeats = int(sizes.max()) > 1 or bool(np.isin(found, self._values).any())

    def _count_exact(self, cells: pa.ChunkedArray) -> None:
        """Count the texts of integers and decimals, as far as there can be so many classes."""
        kind = cells.type
        if not (pa.types.is_integer(kind) or pa.types.is_decimal(kind)):
            return
        if self._exact is None:
            self._exact = Counter()
        if len(self._exact) >= _MOST_NAMED or self.overflowed:
            return
        counts = as_text(cells).value_counts()
        texts = counts.field("values").to_pylist()
        sizes = counts.field("counts").to_pylist()
        self._exact.update({text: size for text, size in zip(texts, sizes, strict=True) if text})

    def finish(self) -> None:
        """Name the distinct numbers, as far as there can be so many classes."""
        if not self._stored:
            return
        if self._exact is not None:
            self.texts.update(dict(self._exact.most_common(_MOST_NAMED)))
            return
        some = self._values[:_MOST_NAMED]
        whole = bool((np.isfinite(some) & (some == np.round(some)) & (np.abs(some) < 1e15)).all())
        texts = as_text(pa.array(some.astype(np.int64) if whole else some)).to_pylist()
        self.texts.update(dict(zip(texts, self._sizes.tolist(), strict=False)))

    @property
    def all_different(self) -> bool:
        """Whether no cell occurs twice, as far as distinct cells were counted."""
        if self._stored:
            return not self._repeats and (self.overflowed or len(self._values) == self.count)
        return super().all_different

    @property
    def usable_numbers(self) -> int:
        """Number of cells that are finite numbers in the column's form."""
        form = self.form
        if form is None:
            return 0
        # "inf" has no unit, and so is no number of a form with a unit.
        return self._forms.count(form) - (0 if form.unit else self._infinite)

    @property
    def is_plain(self) -> bool:
        """Whether :attr:`moments` are those of every number of the column."""
        return self.form == NumberForm() and self.moments.count == self.usable_numbers
