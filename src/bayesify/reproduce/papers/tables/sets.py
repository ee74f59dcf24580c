"""Tables of the comparison, real and generated, and their splits.

The sets form two groups. On the development sets settings may be chosen, by validation rows out of
their training rows. The decision sets are used for no choice at all. Categories are one-hot
columns, so that every model gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bayesify.datasets import load_mushroom, load_regression
from bayesify.reproduce.harness.experiment import Context

__all__ = [
    "MOST_ROWS",
    "SETS",
    "SPLITS",
    "Array",
    "Group",
    "Kind",
    "Part",
    "Parts",
    "TableSet",
    "find_set",
    "parts",
]

Array = npt.NDArray[Any]
#: Inputs (N, F) in float64; targets (N,), numbers in float64 or classes 0..K-1.
Table = tuple[Array, Array]
Kind = Literal["numbers", "classes"]
Group = Literal["development", "decision"]
Part = Literal["test", "validation"]

#: Number of random splits into 80 % and 20 %.
SPLITS = 5
#: Most rows of a training part, and of a test part; larger tables are drawn from.
MOST_ROWS = 2000


@dataclass(frozen=True)
class TableSet:
    """A table with one target.

    Args:
        name: unique among the sets.
        kind: whether the target is a number or a class.
        group: whether settings may be chosen on it.
        load: returns inputs and targets.
        datasets: the data sets that it needs, as in ``bayesify data list``.
    """

    name: str
    kind: Kind
    group: Group
    load: Callable[[Context], Table]
    datasets: tuple[str, ...] = ()


class Parts(NamedTuple):
    """Rows to train on and rows to predict."""

    train_inputs: Array
    train_targets: Array
    test_inputs: Array
    test_targets: Array


def find_set(name: str) -> TableSet:
    """Return the set called ``name``.

    Raises:
        ValueError: there is none; the message lists the known ones.

    Example:
        >>> find_set("yacht").group
        'development'
    """
    if name not in SETS:
        raise ValueError(f"there is no set {name!r}; known are {', '.join(SETS)}")
    return SETS[name]


def parts(name: str, split: int, part: Part = "test", context: Context | None = None) -> Parts:
    """Return the training rows of a split, and the rows to predict.

    Args:
        name: the set.
        split: number of the random split, at least 0.
        part: ``"test"``, or ``"validation"`` to divide the training rows of the split once more
            in 80 % and 20 %; the test rows are in neither part then.
        context: where the data are.

    Raises:
        ValueError: there is no such set or part.
        DataError: the data cannot be found.

    Example:
        >>> [len(rows) for rows in parts("friedman-1", 0)[::2]]
        [640, 160]
        >>> [len(rows) for rows in parts("friedman-1", 0, "validation")[::2]]
        [512, 128]
    """
    if part not in ("test", "validation"):
        raise ValueError(f'part must be "test" or "validation", got {part!r}')
    table = find_set(name)
    inputs, targets = table.load(context or Context())
    strata = targets if table.kind == "classes" else None
    train, test = _divided(np.arange(len(targets)), strata, split)
    if part == "validation":
        train, test = _divided(train, strata, split)
    return Parts(inputs[train], targets[train], inputs[test], targets[test])


def _divided(rows: Array, strata: Array | None, seed: int) -> tuple[Array, Array]:
    """Return 80 % and 20 % of some rows, of each class alike, and at most ``MOST_ROWS`` each."""
    from sklearn.model_selection import train_test_split

    num_test = round(0.2 * len(rows))
    train, test = train_test_split(
        rows,
        train_size=min(len(rows) - num_test, MOST_ROWS),
        test_size=min(num_test, MOST_ROWS),
        random_state=seed,
        stratify=None if strata is None else strata[rows],
    )
    return train, test


# ---------------------------------------------------------------------------------------- tables


def _literature(name: str) -> Callable[[Context], Table]:
    def load(context: Context) -> Table:
        data = load_regression(name, context.data_dir, progress=context.on_download)
        return data.inputs, data.targets

    return load


def _thirds(name: str) -> Callable[[Context], Table]:
    """Return three classes of equal size: low, middle and high targets of a table of numbers."""

    def load(context: Context) -> Table:
        inputs, targets = _literature(name)(context)
        return inputs, np.searchsorted(np.quantile(targets, [1 / 3, 2 / 3]), targets)

    return load


def _mushroom(context: Context) -> Table:
    data = load_mushroom(context.data_dir, progress=context.on_download)
    return data.contexts.double().numpy(), data.poisonous.long().numpy()


def _scikit_learn(name: str, **given: Any) -> Callable[[Context], Table]:
    """Return a function for a table or a generator of scikit-learn."""

    def load(context: Context) -> Table:  # noqa: ARG001
        from sklearn import datasets

        drawn = getattr(datasets, name)
        inputs, targets = drawn(return_X_y=True) if name.startswith("load") else drawn(**given)
        return np.asarray(inputs, dtype=np.float64), targets

    return load


def _generated(draw: Callable[[np.random.Generator], Table]) -> Callable[[Context], Table]:
    return lambda context: draw(np.random.default_rng(0))  # noqa: ARG005


def _heteroscedastic(rng: np.random.Generator) -> Table:
    x = rng.uniform(-2.0, 2.0, (600, 2))
    noise = 0.05 + 0.5 * np.abs(x[:, 0])
    return x, np.sin(2.0 * x[:, 0]) + x[:, 1] + noise * rng.normal(size=600)


def _heavy_tailed(rng: np.random.Generator) -> Table:
    x = rng.uniform(-2.0, 2.0, (600, 5))
    y = np.sin(2.0 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * x[:, 3]
    return x, y + 0.3 * rng.standard_t(3, size=600)


def _many_columns(rng: np.random.Generator) -> Table:
    x = rng.normal(size=(600, 500))
    y = x[:, 0] - x[:, 1] + 2.0 * np.tanh(x[:, 2]) + x[:, 3] * (x[:, 4] > 0.0)
    return x, y + 0.5 * rng.normal(size=600)


def _piecewise(rng: np.random.Generator) -> Table:
    x = rng.uniform(0.0, 1.0, (800, 4))
    step = np.where(x[:, 0] < 0.4, -1.0, np.where(x[:, 1] < 0.5, 0.5, 2.0))
    return x, step + x[:, 2] * (x[:, 0] > 0.7) + 0.2 * rng.normal(size=800)


def _categories(rng: np.random.Generator) -> tuple[Array, Array]:
    """Return three categories as one-hot columns next to two numbers, and a score of each row.

    The score depends on the pair of the first two categories, and by the third on a number.
    """
    codes = np.stack([rng.integers(0, levels, 1000) for levels in (6, 5, 3)], 1)
    numbers = rng.normal(size=(1000, 2))
    pairs, slopes = rng.normal(size=(6, 5)), np.array([-1.0, 0.0, 1.0])
    score = pairs[codes[:, 0], codes[:, 1]] + slopes[codes[:, 2]] * numbers[:, 0]
    one_hot = [np.eye(levels)[codes[:, place]] for place, levels in enumerate((6, 5, 3))]
    return np.concatenate([*one_hot, numbers], 1), score


def _category_numbers(rng: np.random.Generator) -> Table:
    inputs, score = _categories(rng)
    return inputs, score + 0.3 * rng.normal(size=len(score))


def _category_classes(rng: np.random.Generator) -> Table:
    inputs, score = _categories(rng)
    return inputs, (rng.uniform(size=len(score)) < 1.0 / (1.0 + np.exp(-2.0 * score))).astype(int)


def _classification(**given: Any) -> Callable[[Context], Table]:
    return _scikit_learn("make_classification", random_state=0, **given)


def _sets() -> list[TableSet]:
    made = []

    def add(group: Group, kind: Kind, name: str, load: Any, *datasets: str) -> None:
        made.append(TableSet(name, kind, group, load, datasets))

    for name in ("concrete", "energy", "yacht", "wine"):
        add("development", "numbers", name, _literature(name), name)
    friedman = {"n_samples": 800, "random_state": 0}
    for name, load in {
        "diabetes": _scikit_learn("load_diabetes"),
        "friedman-1": _scikit_learn("make_friedman1", noise=1.0, **friedman),
        "noise-by-input": _generated(_heteroscedastic),
        "heavy-tails": _generated(_heavy_tailed),
        "many-columns": _generated(_many_columns),
    }.items():
        add("development", "numbers", name, load)
    for name, load in {
        "iris": _scikit_learn("load_iris"),
        "breast-cancer": _scikit_learn("load_breast_cancer"),
        "wine-kinds": _scikit_learn("load_wine"),
        "digits": _scikit_learn("load_digits"),
        "moons": _scikit_learn("make_moons", n_samples=500, noise=0.3, random_state=0),
        "unbalanced": _classification(n_samples=1000, weights=[0.95]),
        "many-columns-classes": _classification(
            n_samples=600, n_features=500, n_informative=5, n_redundant=0
        ),
    }.items():
        add("development", "classes", name, load)
    for name in ("boston", "kin8nm", "naval", "power", "protein"):
        add("decision", "numbers", name, _literature(name), name)
    for name, load in {
        "friedman-2": _scikit_learn("make_friedman2", noise=50.0, **friedman),
        "friedman-3": _scikit_learn("make_friedman3", noise=0.1, **friedman),
        "piecewise": _generated(_piecewise),
        "categories": _generated(_category_numbers),
    }.items():
        add("decision", "numbers", name, load)
    add("decision", "classes", "mushroom", _mushroom, "mushroom")
    for name in ("kin8nm", "protein"):
        add("decision", "classes", f"{name}-thirds", _thirds(name), name)
    for name, load in {
        "clusters": _classification(n_samples=1000, n_classes=3, n_informative=6, flip_y=0.1),
        "shells": _scikit_learn(
            "make_gaussian_quantiles", n_samples=800, n_features=4, n_classes=3, random_state=0
        ),
        "categories-classes": _generated(_category_classes),
    }.items():
        add("decision", "classes", name, load)
    return made


#: All sets by name, the development sets of numbers first.
SETS: dict[str, TableSet] = {table.name: table for table in _sets()}
