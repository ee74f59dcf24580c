"""What the hyperprior of relevance does to generated tables of 500 columns.

python benchmarks/many_columns.py [--only TABLE ...]    half an hour; resumes where it stopped
python benchmarks/many_columns.py --show                writes the table in docs/adr/0008

The tables are in no comparison of this repository. Each is trained on at the defaults, but for the
density 1 / t of the hyperprior at 0, see ``bayesify.tabular.relevance``; 1,000 new rows measure it.
Results go to ``results/many-columns/TABLE.json``.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from pages import DOCS, insert
from records import require_clean_tree, resumed, store_rows, stored
from sklearn.datasets import make_classification

from bayesify.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from bayesify.tabular import recipe
from bayesify.tabular.relevance import sparse_relevance
from bayesify.training import ConvergenceWarning

PAGE = DOCS / "adr" / "0008-recipe-for-tables.md"
COLUMNS, NEW_ROWS, SEEDS = 500, 1000, (0, 1)
CONFIG = {"columns": COLUMNS, "new_rows": NEW_ROWS}
#: 0 is no hyperprior; 8 is the default for 500 columns.
DENSITIES = (0.0, 2.0, 4.0, 8.0, 16.0)
#: What a row of the table shows: key, title, digits.
SHOWN = (
    ("nll", "nll", 2),
    ("accuracy", "accuracy, %", 1),
    ("coverage", "90 % intervals hold, %", 1),
)
Floats = npt.NDArray[np.float64]


def few_matter(rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return 480 rows and the new ones, whose target depends on five columns."""
    x = rng.normal(size=(480 + NEW_ROWS, COLUMNS))
    y = x[:, 0] - x[:, 1] + 2.0 * np.tanh(x[:, 2]) + x[:, 3] * (x[:, 4] > 0.0)
    return x, y + 0.5 * rng.normal(size=len(x))


def all_matter(rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return 1,000 rows and the new ones, whose target is linear in all columns."""
    x = rng.normal(size=(1000 + NEW_ROWS, COLUMNS))
    y = x @ rng.normal(size=COLUMNS) * 1.5 / np.sqrt(COLUMNS)
    return x, y + 0.5 * rng.normal(size=len(x))


def few_tell_the_class(rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return 480 rows and the new ones of two classes, told by five columns."""
    found: tuple[Floats, Floats] = make_classification(
        n_samples=480 + NEW_ROWS,
        n_features=COLUMNS,
        n_informative=5,
        n_redundant=0,
        random_state=int(rng.integers(2**31)),
    )
    return found


TABLES: dict[str, tuple[str, Callable[[np.random.Generator], tuple[Floats, Floats]]]] = {
    "few-matter": ("numbers, 5 columns matter, 480 rows", few_matter),
    "few-tell-the-class": ("two classes, 5 columns matter, 480 rows", few_tell_the_class),
    "all-matter": ("numbers, all columns matter alike, 1,000 rows", all_matter),
}


def measure(name: str, density: float, seed: int) -> dict[str, float]:
    """Return the nll of new rows in nats, and the error or the coverage of 90 % intervals."""
    x, y = TABLES[name][1](np.random.default_rng(1000 + seed))
    train, new = slice(len(x) - NEW_ROWS), slice(len(x) - NEW_ROWS, None)
    total = (COLUMNS - 100) / density if density else float("inf")
    has_classes = name == "few-tell-the-class"
    model: Any = (BayesianMLPClassifier if has_classes else BayesianMLPRegressor)(random_state=seed)
    with (
        mock.patch.object(recipe, "sparse_relevance", partial(sparse_relevance, total=total)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(x[train], y[train])
    if has_classes:
        p = model.predict_proba(x[new])
        right = p[np.arange(NEW_ROWS), y[new].astype(int)]
        correct = p.argmax(1) == y[new]
        return {"nll": float(-np.log(right).mean()), "accuracy": 100.0 * float(correct.mean())}
    low, high = model.predict_interval(x[new], 0.9)
    inside = (low <= y[new]) & (y[new] <= high)
    error = model.predict(x[new]) - y[new]
    return {
        "nll": float(-model.predictive(x[new]).log_prob(torch.from_numpy(y[new])).mean()),
        "rmse": float(np.sqrt(np.mean(error**2))),
        "coverage": 100.0 * float(inside.mean()),
    }


def run(name: str) -> None:
    """Measure a table with the densities and seeds that are not stored yet."""
    document = resumed("many-columns", name, CONFIG)
    there = {(row["density"], row["seed"]) for row in document["metrics"]["rows"]}
    for seed in SEEDS:
        for density in DENSITIES:
            if (density, seed) in there:
                continue
            started = time.perf_counter()
            measured = measure(name, density, seed)
            found = {key: float(f"{value:.6g}") for key, value in measured.items()}
            row = {"density": density, "seed": seed, **found}
            store_rows(document, [row], time.perf_counter() - started)
            print(f"{name}, seed {seed}, 1 / t = {density:g}: {found}", flush=True)


def table() -> str:
    """Return nll, and accuracy or coverage, by table and density: the means over the seeds."""
    lines = [
        f"| 1 / t | {' | '.join(f'{density:g}' for density in DENSITIES)} |",
        f"|---|{'---|' * len(DENSITIES)}",
    ]
    for name, (title, _) in TABLES.items():
        rows = stored("many-columns", name, CONFIG)["metrics"]["rows"]
        for key, label, digits in SHOWN:
            cells = []
            for density in DENSITIES:
                values = [row[key] for row in rows if row["density"] == density and key in row]
                cells.append(f"{fmean(values):.{digits}f}" if values else "")
            if any(cells):
                lines.append(f"| {title}: {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, or show what was measured."""
    require_clean_tree()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=tuple(TABLES))
    parser.add_argument("--show", action="store_true", help="only write the table")
    options = parser.parse_args()
    if options.show:
        insert(PAGE, "many-columns", table())
        return
    torch.set_num_threads(1)
    for name in options.only or TABLES:
        run(name)


if __name__ == "__main__":
    main()
