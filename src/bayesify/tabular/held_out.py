"""Hold out a part of a table's rows."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from bayesify.noise.keys import Stream, derived_seed
from bayesify.tabular.cells import Floats
from bayesify.tabular.files import TableError

__all__ = ["MOST_TEST_ROWS", "Places", "check_enough", "split_rows"]

#: More rows than this make the measures hardly more precise, and take long to predict.
MOST_TEST_ROWS = 50_000
_FEWEST_ROWS = 4

#: Places of rows in a table, in order.
Places = npt.NDArray[np.int64]


def check_enough(path: Path, count: int) -> None:
    """Check that enough rows of a table have a target.

    Args:
        path: its file.
        count: number of such rows.

    Raises:
        TableError: there are fewer than four.

    Example:
        >>> check_enough(Path("a.csv"), 3)
        Traceback (most recent call last):
        bayesify.tabular.files.errors.TableError: a.csv must have at least 4 rows with a target, to
        train on some and measure on others, got 3
    """
    if count < _FEWEST_ROWS:
        raise TableError(
            f"{path} must have at least {_FEWEST_ROWS} rows with a target, to train on some and "
            f"measure on others, got {count}"
        )


def split_rows(
    targets: Floats, known: npt.NDArray[np.bool_], task: str, fraction: float, seed: int, path: Path
) -> tuple[Places, Places]:
    """Draw the rows for training and those held out; return their places, in order.

    The held-out part has each class's share, and at least one row of each class is for training.

    Args:
        targets: class indices or numbers, shape (N,); nan where there is none.
        known: whether a row has a target, shape (N,).
        task: ``"classification"`` or ``"regression"``.
        fraction: part of the rows that is held out, at least 0 and below 1.
        seed: the held-out rows are a function of it.
        path: file of the table, for messages.

    Raises:
        TableError: fewer than four rows have a target, or each has a class of its own.

    Example:
        >>> targets, known = np.arange(5.0), np.ones(5, dtype=np.bool_)
        >>> train, test = split_rows(targets, known, "regression", 0.4, 0, Path("a.csv"))
        >>> len(train), len(test)
        (3, 2)
    """
    places = np.flatnonzero(known)
    count = len(places)
    check_enough(path, count)
    generator = torch.Generator()
    generator.manual_seed(derived_seed(seed, Stream.SHUFFLE, 0, 1))
    if not fraction:
        return places, places[:0]
    order = places[torch.randperm(count, generator=generator).numpy()]
    held = max(1, min(round(fraction * count), MOST_TEST_ROWS, count - 2))
    test = np.zeros(len(targets), dtype=np.bool_)
    if task == "classification":
        labels = targets[order].astype(np.int64)
        sizes = np.bincount(labels)
        # Place of each row within its class, in random order.
        by_class = np.argsort(labels, kind="stable")
        rank = np.empty(count, dtype=np.int64)
        rank[by_class] = np.arange(count) - (np.cumsum(sizes) - sizes)[labels[by_class]]
        # The rows that come first relative to the size of their class, except the last of each.
        due = np.where(rank < sizes[labels] - 1, (rank + 0.5) / sizes[labels], math.inf)
        chosen = np.argsort(due, kind="stable")[:held]
        test[order[chosen[np.isfinite(due[chosen])]]] = True
        if not test.any():
            raise TableError(
                f"{path} has a class of its own for every row, so that none can be held out; add "
                "rows, use another target, or keep all rows for training with --test-fraction 0"
            )
    else:
        test[order[:held]] = True
    return np.flatnonzero(known & ~test), np.flatnonzero(test)
