"""Draw rows of a table at random in one pass, by a hash of each row's number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bayesify.noise.keys import Stream, derived_seed
from bayesify.tabular.rows import TableRows

__all__ = ["Hashes", "RowSample", "hash_key", "row_hashes"]

Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
#: Rows beyond its capacity that a sample holds before it drops them, as a share.
_ROOM = 0.25


def hash_key(seed: int) -> int:
    """Return the key of a run's hashes.

    Example:
        >>> hash_key(0) == hash_key(1)
        False
    """
    return derived_seed(seed, Stream.SHUFFLE, 0, 4)


def row_hashes(first: int, count: int, key: int) -> Hashes:
    """Return a hash of the numbers of consecutive rows, 64 bits each, shape (count,).

    It is SplitMix64 (Steele, Lea and Flood 2014), started at ``key``: all hashes of a table differ.

    Args:
        first: number of the first row, from 0.
        count: number of rows.
        key: of the run, at least 0 and below 2**64.

    Example:
        >>> [hex(number) for number in row_hashes(0, 2, 0).tolist()]
        ['0xe220a8397b1dcdaf', '0x6e789e6aa1b965f4']
    """
    numbers = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = np.uint64(key) + numbers * _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MULTIPLIERS[0]
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MULTIPLIERS[1]
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


class RowSample:
    """The rows with the smallest hashes of all rows so far: a uniform sample without replacement.

    Which rows they are depends on their numbers and the key alone, so that every pass over the
    table finds the same.

    Args:
        capacity: number of rows, at least 1.
        columns: names of the columns that are kept.
        key: as for :func:`row_hashes`.

    Example:
        >>> sample = RowSample(2, ["x"], key=0)
        >>> sample.update(TableRows(pa.table({"x": [10, 11, 12, 13]})))
        >>> sample.rows().texts("x").tolist(), sample.numbers().tolist()
        (['11', '12'], [1, 2])
    """

    def __init__(self, capacity: int, columns: Sequence[str], *, key: int) -> None:
        #: Number of rows so far.
        self.seen = 0
        self._capacity, self._columns, self._key = capacity, list(columns), key
        self._hashes: Hashes = np.zeros(0, np.uint64)
        self._numbers: Numbers = np.zeros(0, np.int64)
        self._parts: list[pa.Table] = []
        self._limit: np.uint64 | None = None

    def update(self, rows: TableRows) -> None:
        """Consider the next rows."""
        hashes = row_hashes(self.seen, len(rows), self._key)
        chosen = np.arange(len(rows))
        if self._limit is not None:
            chosen = np.flatnonzero(hashes < self._limit)
        if len(chosen):
            self._hashes = np.concatenate([self._hashes, hashes[chosen]])
            self._numbers = np.concatenate([self._numbers, self.seen + chosen])
            self._parts.append(rows.taken(self._columns, chosen).table)
        self.seen += len(rows)
        if len(self._hashes) > (1.0 + _ROOM) * self._capacity:
            self._drop()

    def _drop(self) -> None:
        """Keep ``capacity`` rows, in the order of their numbers."""
        kept = np.sort(np.argsort(self._hashes)[: self._capacity])
        table = pa.concat_tables(self._parts).take(pa.array(kept)).combine_chunks()
        self._hashes, self._numbers, self._parts = self._hashes[kept], self._numbers[kept], [table]
        if self.seen > self._capacity:
            self._limit = self._hashes.max()

    @property
    def is_whole(self) -> bool:
        """Whether the sample has every row."""
        return self.seen <= self._capacity

    def rows(self) -> TableRows:
        """Return the rows of the sample, in the order of their numbers."""
        self._drop()
        return TableRows(self._parts[0])

    def hashes(self) -> Hashes:
        """Return the hashes of :meth:`rows`."""
        self._drop()
        return self._hashes

    def numbers(self) -> Numbers:
        """Return the numbers of :meth:`rows`, from 0."""
        self._drop()
        return self._numbers
