"""Loader of the nine tables of the usual regression comparison, and their published splits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bayesify.datasets.catalog import REGRESSION_DATASETS, find_dataset
from bayesify.datasets.download import Progress, get_file
from bayesify.datasets.files import DataError

__all__ = ["RegressionData", "Split", "gap_splits", "load_regression", "standard_splits"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

#: Columns 16 and 17 of naval are two kinds of wear; the custom is to predict the first.
_TARGET_COLUMNS = {"naval": (16, 16)}


@dataclass(frozen=True, eq=False)
class RegressionData:
    """A table of numbers: N examples of d features and one target, as published.

    Example:
        >>> data = load_regression("yacht")
        >>> data.name, len(data.targets)
        ('yacht', 308)
    """

    #: Name of the table, as in ``load_regression``.
    name: str
    #: Features, shape (N, d), float64.
    inputs: Floats
    #: Targets, shape (N,), float64.
    targets: Floats


class Split(NamedTuple):
    """Row indices of a table, divided into a training and a test part.

    Example:
        >>> data = load_regression("yacht")
        >>> first = standard_splits(len(data.targets), 1)[0]
        >>> data.inputs[first.train].shape, data.inputs[first.test].shape
        ((277, 6), (31, 6))
    """

    train: Indices
    test: Indices


def load_regression(
    name: str, data_dir: str | Path | None = None, *, progress: Progress | None = None
) -> RegressionData:
    """Load one of the nine tables; if it is not on this machine, download it into the user's cache.

    The uncompressed text is checked by SHA-256 on every call; see ``find_file`` for the search
    order. The target is the last column, except for naval, whose last column is unused.

    Args:
        name: boston, concrete, energy, kin8nm, naval, power, protein, wine or yacht.
        data_dir: search only this directory, and do not download.
        progress: called as a download proceeds.

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
    """Return the random splits into 90 % and 10 % on which published results were measured.

    They are those of Hernandez-Lobato and Adams (2015), published by Gal and Ghahramani (2016): a
    sequence of permutations from one generator of seed 1. The first splits are therefore the same
    for any ``num_splits``.

    Args:
        num_data: N, the number of rows of the table.
        num_splits: number of splits; the custom is 20, and 5 for protein.

    Returns:
        The splits; ``train`` has round(0.9 N) rows, ``test`` has the others.

    Raises:
        ValueError: there are fewer than 5 rows, which leave no test part, or ``num_splits`` is
            below 1.

    Example:
        >>> [split.test.tolist() for split in standard_splits(10, 3)]
        [[5], [7], [2]]
    """
    if num_data < 5 or num_splits < 1:
        raise ValueError(
            "num_data must be at least 5 and num_splits at least 1, got "
            f"num_data={num_data}, num_splits={num_splits}"
        )
    # The legacy generator, because the published splits were drawn from it.
    generator = np.random.RandomState(1)
    num_train = round(0.9 * num_data)
    splits = []
    for _ in range(num_splits):
        order = generator.choice(range(num_data), num_data, replace=False).astype(np.int64)
        splits.append(Split(order[:num_train], order[num_train:]))
    return splits


def gap_splits(inputs: Floats) -> list[Split]:
    """Return a split for each feature, whose test part is the middle third of the feature's values.

    A network is then asked about rows between those that it was trained on (Foong et al. 2019,
    "In-between" uncertainty in Bayesian neural networks, section 4.2). Rows with equal values keep
    their order; a constant feature has no middle and gets no split.

    Args:
        inputs: features, shape (N, d).

    Returns:
        The splits by feature; ``test`` has N // 3 rows, and both parts are sorted by the feature.

    Raises:
        ValueError: ``inputs`` is no table of at least 3 finite rows, or all features are constant.

    Example:
        >>> [split.test.tolist() for split in gap_splits(np.array([[1.0, 7], [2, 7], [0, 7]]))]
        [[0]]
    """
    table = np.asarray(inputs, dtype=np.float64)
    if table.ndim != 2 or len(table) < 3 or not np.isfinite(table).all():
        raise ValueError(
            "inputs must be finite numbers of shape (N, d) with at least 3 rows, got shape "
            f"{table.shape}"
        )
    size = len(table) // 3
    first = (len(table) - size) // 2
    splits = []
    for feature in table.T:
        if feature.min() < feature.max():
            order = feature.argsort(kind="stable").astype(np.int64)
            outer = np.concatenate([order[:first], order[first + size :]])
            splits.append(Split(outer, order[first : first + size]))
    if not splits:
        raise ValueError("inputs must have a feature that is not constant, got none")
    return splits
