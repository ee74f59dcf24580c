"""Estimate the memory that a table needs, and compare it with what is free."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from bayesify.tabular.columns import Column, EncodedColumn
from bayesify.tabular.files import TableError

__all__ = ["available_memory", "check_memory", "memory_needed"]


def available_memory() -> int | None:
    """Return the bytes of memory that are free for use; None if the system does not tell."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if found:
            return 1024 * int(found[1])
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def memory_needed(rows: int, columns: int, inputs: int, classes: int = 0) -> int:
    """Return the bytes that training on a table in memory needs.

    Args:
        rows: rows of the table.
        columns: columns that are used, without the target.
        inputs: inputs of the network.
        classes: number of classes; 0 for a regression.

    Example:
        >>> memory_needed(1_000_000, 20, 20)
        720000000
    """
    # The peak is measuring the trained network on all rows; these are measured bytes a row.
    answering = 4 * inputs + (64 + 48 * classes if classes else 640)
    return rows * max(8 * (columns + 1 + inputs), answering)


def check_memory(path: Path, rows: int, columns: Sequence[Column], classes: int) -> None:
    """Check that a table fits into the free memory.

    Args:
        path: its file.
        rows: number of rows.
        columns: columns that are used, before they are fitted.
        classes: number of classes; 0 for a regression.

    Raises:
        TableError: it does not.

    Example:
        >>> check_memory(Path("a.csv"), 10**15, [], 0)
        Traceback (most recent call last):
        bayesify.tabular.files.errors.TableError: a.csv needs about 640000000.0 GB of memory ...
    """
    inputs = sum(len(column.own_features) + 1 for column in columns)
    needed = memory_needed(rows, len(columns), inputs, classes)
    free = available_memory()
    if free is not None and needed > free:
        encoded = any(isinstance(column, EncodedColumn) for column in columns)
        stream = "" if encoded else "--max-memory to stream it, "
        raise TableError(
            f"{path} needs about {needed / 1e9:.1f} GB of memory ({rows:,} rows of {inputs} "
            f"inputs), but {free / 1e9:.1f} GB are free; use {stream}--limit N for its first N "
            "rows, or leave columns out with --drop"
        )
