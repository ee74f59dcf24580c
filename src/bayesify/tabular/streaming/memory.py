"""Divide a cap on memory among the parts of reading, training on and predicting a large table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from bayesify.tabular.files import CHUNK_ROWS, TableError

__all__ = ["PREDICTED_AT_ONCE", "TrainingMemory", "gigabytes", "rows_at_once"]

#: Predictions are computed so many rows at a time: their last digits depend on it.
PREDICTED_AT_ONCE = 10_000
_FEWEST_ROWS = 1000
#: Bytes that a cell takes while rows are read: of text with its Python strings, and of numbers.
_TEXT, _NUMBER = 320, 40
#: Bytes of a cell's value, its distance from training's and their intermediate results; bytes of an
#: input of the network; bytes of a row's predictions and their text.
_VALUE, _INPUT, _ROW = 64, 12, 1200
#: Bytes of the network's passes, of Arrow's buffers and of what Python keeps.
_RESERVE = 250_000_000
#: Bytes of the distinct texts of a column that a scan counts; it stops at 100,000.
_COUNTED = 17_000_000
#: Rows of a sample from which quantiles come, and held out; fewer where memory is short.
_SAMPLE_ROWS, _HELD_ROWS, _FEWEST_SAMPLED = 200_000, 50_000, 5000
#: Bytes that such a row takes, but for its cells, while the trained network is measured on it.
_MEASURED = 900
#: Parts of the memory that is left for a training.
_READ, _SAMPLED, _SHUFFLED = 0.25, 0.55, 0.2
#: Rows that are shuffled together.
_BUFFER_ROWS, _FEWEST_BUFFERED = 262_144, 8192


def gigabytes(size: float) -> str:
    """Format a number of bytes.

    Example:
        >>> gigabytes(1_260_000_000), gigabytes(31_000_000)
        ('1.3 GB', '31 MB')
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def rows_at_once(cap: int, used: int, *, columns: int, inputs: int, as_text: bool) -> int:
    """Return how many rows of a table may be in memory at once while it is predicted.

    Args:
        cap: bytes that the process may use.
        used: bytes that it uses before a row is read.
        columns: columns that are read.
        inputs: inputs of the network.
        as_text: whether the rows are read from text; from Parquet otherwise.

    Returns:
        At most ``CHUNK_ROWS``, and a multiple of 10,000 if it is more than that, so that the
        predictions are the same bytes as without a cap.

    Raises:
        TableError: the cap allows fewer than 1,000 rows.

    Example:
        >>> rows_at_once(2_000_000_000, 600_000_000, columns=20, inputs=20, as_text=False)
        50000
        >>> rows_at_once(10**9, 6 * 10**8, columns=400, inputs=900, as_text=True)
        Traceback (most recent call last):
        bayesify.tabular.files.errors.TableError: max-memory must be at least 1.1 GB here, got 1.0
        GB: the process itself uses 850 MB, and 1,000 rows of 400 columns 166 MB; raise it, or leave
        it out
    """
    each = columns * (_VALUE + (_TEXT if as_text else _NUMBER)) + _INPUT * inputs + _ROW
    fixed = used + _RESERVE
    rows = min(CHUNK_ROWS, (cap - fixed) // each)
    if rows < _FEWEST_ROWS:
        least = fixed + _FEWEST_ROWS * each
        raise TableError(
            f"max-memory must be at least {gigabytes(least + 5e7)} here, got {gigabytes(cap)}: the "
            f"process itself uses {gigabytes(fixed)}, and {_FEWEST_ROWS:,} rows of {columns:,} "
            f"columns {gigabytes(_FEWEST_ROWS * each)}; raise it, or leave it out"
        )
    return int(rows if rows < PREDICTED_AT_ONCE else rows - rows % PREDICTED_AT_ONCE)


@dataclass(frozen=True)
class TrainingMemory:
    """How much of a table is in memory at once while it is read and trained on.

    Args:
        cap: bytes that the process may use.
        rows: rows that are read at once.
        sample_rows: training rows of which all is kept, for quantiles and measures.
        held_rows: most rows that are held out, and kept.
        buffer: bytes for the rows that are shuffled together.

    Example:
        >>> memory = TrainingMemory.of(2 * 10**9, 6 * 10**8, columns=20, as_text=False)
        >>> memory.rows, memory.sample_rows, memory.held_rows, memory.buffer_rows(20)
        (50000, 200000, 50000, 262144)
        >>> TrainingMemory.of(10**9, 6 * 10**8, columns=300, as_text=True)
        Traceback (most recent call last):
        bayesify.tabular.files.errors.TableError: max-memory must be at least 6.8 GB here, got 1.0
        GB: the process itself uses 850 MB, and a table of 300 columns the rest; raise it, or leave
        columns out with --drop
    """

    cap: int
    rows: int
    sample_rows: int
    held_rows: int
    buffer: int

    @classmethod
    def of(cls, cap: int, used: int, *, columns: int, as_text: bool) -> Self:
        """Divide a cap among the parts of a training.

        Args:
            cap: bytes that the process may use.
            used: bytes that it uses already.
            columns: columns of the table.
            as_text: whether the rows are read from text; from Parquet otherwise.

        Raises:
            TableError: the cap is too small.
        """
        fixed = used + _RESERVE
        counted = columns * _COUNTED if as_text else 0
        free = cap - fixed - counted
        each = columns * (_VALUE + (_TEXT if as_text else _NUMBER))
        sampled = 3 * each // 4 + _MEASURED
        rows = min(CHUNK_ROWS, int(_READ * free) // each)
        sample = min(_SAMPLE_ROWS + _HELD_ROWS, int(_SAMPLED * free) // sampled)
        if rows < _FEWEST_ROWS or sample < _FEWEST_SAMPLED:
            least = fixed + counted
            least += int(max(_FEWEST_ROWS * each / _READ, _FEWEST_SAMPLED * sampled / _SAMPLED))
            raise TableError(
                f"max-memory must be at least {gigabytes(least + 5e7)} here, got {gigabytes(cap)}: "
                f"the process itself uses {gigabytes(fixed)}, and a table of {columns:,} columns "
                "the rest; raise it, or leave columns out with --drop"
            )
        held = min(_HELD_ROWS, sample // 3)
        return cls(cap, rows, sample - held, held, int(_SHUFFLED * free))

    def buffer_rows(self, inputs: int) -> int:
        """Return how many rows are shuffled together, for a number of inputs of the network."""
        return max(_FEWEST_BUFFERED, min(_BUFFER_ROWS, self.buffer // (4 * inputs + 8)))
