"""The nine tables on which Bayesian networks are compared in regression, and their splits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bayesify.datasets.catalog import REGRESSION_DATASETS, find_dataset
from bayesify.datasets.download import Progress, get_file
from bayesify.datasets.files import DataError

__all__ = ["RegressionData", "Split", "load_regression", "standard_splits"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

#: Of the 18 columns of naval, 16 and 17 are two kinds of wear; the custom is to predict the first.
_TARGET_COLUMNS = {"naval": (16, 16)}


@dataclass(frozen=True, eq=False)
class RegressionData:
    """A table of numbers: N data of d features and one target, as published."""

    #: As in ``load_regression``.
    name: str
    #: (N, d) float64.
    inputs: Floats
    #: (N,) float64.
    targets: Floats


class Split(NamedTuple):
    """Indices into a table's rows."""

    train: Indices
    test: Indices


def load_regression(
    name: str, data_dir: str | Path | None = None, *, progress: Progress | None = None
) -> RegressionData:
    """Load one of the nine tables, downloading it into the user's cache where it is nowhere else.

    The file is checked by the SHA-256 of its uncompressed text each time; see ``find_file`` for
    the order of the search. The target is the last column, but for naval, whose last is unused.

    Args:
        name: boston, concrete, energy, kin8nm, naval, power, protein, wine or yacht.
        data_dir: look in this directory and in no other, and do not download.
        progress: told how a download gets on.

    Raises:
        DataError: the name is unknown, or the file is missing or damaged.

    Example:
        >>> data = load_regression("yacht")
        >>> data.inputs.shape, data.targets.shape
        ((308, 6), (308,))
    """
    (file,) = find_dataset(name, REGRESSION_DATASETS).files
    found = get_file(file, data_dir, progress=progress)
    table = np.loadtxt(found.content.decode("ascii").splitlines(), dtype=np.float64, ndmin=2)
    num_features, target = _TARGET_COLUMNS.get(name, (table.shape[1] - 1, table.shape[1] - 1))
    if not np.isfinite(table).all():
        raise DataError(f"{found.path} must hold finite numbers, got NaN or infinity")
    return RegressionData(name, table[:, :num_features].copy(), table[:, target].copy())


def standard_splits(num_data: int, num_splits: int = 20) -> list[Split]:
    """The random splits into 90 % and 10 % on which published results were measured.

    Those of Hernandez-Lobato and Adams (2015), which Gal and Ghahramani (2016) published: a
    sequence of permutations from one generator of seed 1, so that the first splits are the same
    however many are asked for.

    Args:
        num_data: N, the number of rows of the table.
        num_splits: how many; the custom is 20, for protein 5.

    Returns:
        The splits; ``train`` has round(0.9 N) rows, ``test`` the rest.

    Raises:
        ValueError: there are fewer than 5 data, which leave no test part, or ``num_splits`` is
            below 1.

    Example:
        >>> [split.test.tolist() for split in standard_splits(10, 3)]
        [[5], [7], [2]]
    """
    if num_data < 5 or num_splits < 1:
        raise ValueError(
            "a split needs at least 5 data and there must be at least 1 split, got "
            f"num_data={num_data}, num_splits={num_splits}"
        )
    # The old generator, since it made the published splits.
    generator = np.random.RandomState(1)
    num_train = round(0.9 * num_data)
    splits = []
    for _ in range(num_splits):
        order = generator.choice(range(num_data), num_data, replace=False).astype(np.int64)
        splits.append(Split(order[:num_train], order[num_train:]))
    return splits
