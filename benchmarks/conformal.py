"""Coverage and width of intervals and sets: of the posterior alone, split conformal and CV+.

python benchmarks/conformal.py [--only SET ...] [--splits N]    hours; resumes after each split
python benchmarks/conformal.py --show                           writes tables in docs/conformal.md

Splits are ``standard_splits``, 90 % of the rows for training. Split conformal prediction holds out
a fifth of these for calibration, CV+ has five folds. Estimators have their default settings, with
the split as their seed, and one thread. Results go to ``results/conformal/SET.json``.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pages import DOCS, insert
from records import require_clean_tree, resumed, store_rows, stored
from sklearn import datasets
from torch import Tensor

from bayesify.datasets import load_regression, standard_splits
from bayesify.prediction import GaussianPredictive
from bayesify.prediction.conformal import ConformalIntervals
from bayesify.sklearn import BayesianMLPClassifier, BayesianMLPRegressor

PAGE = DOCS / "conformal.md"
NUMBERS = ("yacht", "energy", "concrete", "wine")
CLASSES = ("wine-classes", "digits")
SPLITS, FOLDS, HELD_OUT, LEVEL = 20, 5, 0.2, 0.9
CONFIG = {"level": LEVEL, "folds": FOLDS, "held_out": HELD_OUT}
#: Methods of the first table; what else is stored compares scores of split conformal prediction.
METHODS = ("bayes", "split", "cv+")
SCORES = {
    "split": "chosen",
    "absolute": "`abs(y - mean)`",
    "tail": "tail probability",
    "one": "`1 - p(y)`",
    "with own": "total with the class",
}


def load(name: str) -> tuple[Any, Any]:
    """Return a set's rows and targets."""
    if name in NUMBERS:
        data = load_regression(name)
        return data.inputs, data.targets
    return getattr(datasets, f"load_{name.removesuffix('-classes')}")(return_X_y=True)


def quantile(scores: Tensor) -> float:
    """Return the conformal quantile of one network's scores."""
    zero = torch.zeros(1, dtype=scores.dtype)
    return float(ConformalIntervals((scores,)).interval(zero, zero + 1.0, LEVEL)[1])


def of_intervals(lower: Any, upper: Any, y: Any, unit: float) -> dict[str, float]:
    """Return the share of targets that are held, and the mean width in standard deviations of y."""
    held = (np.asarray(lower) <= y) & (y <= np.asarray(upper))
    return {"coverage": float(held.mean()), "size": float(np.mean(upper - lower)) / unit}


def of_sets(member: Any, y: Any) -> dict[str, float]:
    """Return the share of classes that are held, and the mean number of classes in a set."""
    return {
        "coverage": float(member[np.arange(len(y)), y].mean()),
        "size": float(member.sum(axis=1).mean()),
    }


def tail(p: GaussianPredictive, y: Tensor) -> Tensor:
    """Return minus the probability of a target as far out, on its side: the PIT score."""
    mirrored = GaussianPredictive(-p.means, p.noise_std)
    return -torch.minimum(p.cdf(y), mirrored.cdf(-y))


def other_intervals(model: Any, old: Any, y: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Return the intervals of other scores, from the same model and calibration rows."""
    p, q, y = model.predictive(old), model.predictive(new), torch.as_tensor(y)
    width = quantile((y - p.mean).abs())
    far = -quantile(tail(p, y))
    mirrored = GaussianPredictive(-q.means, q.noise_std)
    return {
        "absolute": (q.mean.numpy() - width, q.mean.numpy() + width),
        "tail": (q.quantile(far).numpy(), -mirrored.quantile(far).numpy()),
    }


def with_own(p: Any) -> Any:
    """Return for each class the probability of it and of all classes before it: the APS score."""
    order = np.argsort(-p, axis=1, kind="stable")
    total = np.empty_like(p)
    np.put_along_axis(total, order, np.take_along_axis(p, order, 1).cumsum(1), 1)
    return total


def other_sets(model: Any, old: Any, y: Any, new: Any) -> dict[str, Any]:
    """Return the sets of other scores, which get the most probable class where they are empty."""
    p, q = model.predict_proba(old), model.predict_proba(new)
    scores: dict[str, Callable[[Any], Any]] = {"one": lambda p: 1.0 - p, "with own": with_own}
    found = {}
    for name, score in scores.items():
        member = score(q) <= quantile(torch.as_tensor(score(p)[np.arange(len(y)), y]))
        member[np.arange(len(q)), q.argmax(axis=1)] |= ~member.any(axis=1)
        found[name] = member
    return found


def measure(name: str, split: int) -> list[dict[str, Any]]:
    """Return a row for each method on one split."""
    x, y = load(name)
    train, test = standard_splits(len(x), SPLITS)[split]
    kind = BayesianMLPRegressor if name in NUMBERS else BayesianMLPClassifier
    cut = round(HELD_OUT * len(train))
    held_out, rest = train[:cut], train[cut:]
    rows = []

    def add(method: str, found: Any, seconds: float | None) -> None:
        measured = (
            of_intervals(*found, y[test], float(y.std()))
            if name in NUMBERS
            else of_sets(found, y[test])
        )
        rows.append({"split": split, "method": method, **measured, "cpu_seconds": seconds})

    def answer(model: Any, method: str) -> Any:
        ask = model.predict_interval if name in NUMBERS else model.predict_set
        return ask(x[test], LEVEL, method)

    started = time.process_time()
    model = kind(random_state=split).fit(x[train], y[train])
    add("bayes", answer(model, "bayes"), time.process_time() - started)
    model.calibrate(x[train], y[train], cv=FOLDS)
    add("cv+", answer(model, "conformal"), time.process_time() - started)
    started = time.process_time()
    model = kind(random_state=split).fit(x[rest], y[rest]).calibrate(x[held_out], y[held_out])
    add("split", answer(model, "conformal"), time.process_time() - started)
    others = other_intervals if name in NUMBERS else other_sets
    for method, found in others(model, x[held_out], y[held_out], x[test]).items():
        add(method, found, None)
    return rows


def run(name: str, splits: int) -> None:
    """Measure the splits of a set that are not stored yet."""
    document = resumed("conformal", name, CONFIG, seed="the split")
    there = {row["split"] for row in document["metrics"]["rows"]}
    for split in sorted(set(range(splits)) - there):
        started = time.perf_counter()
        rows = measure(name, split)
        store_rows(document, rows, time.perf_counter() - started)
        print(f"{name}: split {split}", flush=True)


def cells(rows: list[dict[str, Any]], method: str) -> list[str]:
    """Return coverage and width of a method, means over the splits with standard errors."""
    texts = []
    for key, factor, places in (("coverage", 100.0, 1), ("size", 1.0, 2)):
        values = factor * np.array([row[key] for row in rows if row["method"] == method])
        text = f"{values.mean():.{places}f}"
        if len(values) > 1:
            text += f" ± {values.std(ddof=1) / math.sqrt(len(values)):.{places}f}"
        texts.append(text)
    return texts


def table(part: str) -> str:
    """Return a table of all stored sets: ``methods`` or ``scores``."""
    lines = [
        f"| set | splits | {part.removesuffix('s')} | holds, % | width or size |",
        "|---|---|---|---|---|",
    ]
    machines = set()
    for name in (*NUMBERS, *CLASSES):
        document = stored("conformal", name, CONFIG)
        rows = document["metrics"]["rows"]
        splits = len({row["split"] for row in rows})
        if not splits:
            continue
        machines.add(document["hardware"])
        methods = METHODS if part == "methods" else [m for m in SCORES if _has(rows, m)]
        for method in methods:
            shown = method if part == "methods" else SCORES[method]
            lines.append(f"| {' | '.join([name, str(splits), shown, *cells(rows, method)])} |")
    return "\n".join([*lines, "", f"On {'; '.join(sorted(machines))}."])


def _has(rows: list[dict[str, Any]], method: str) -> bool:
    return any(row["method"] == method for row in rows)


def main() -> None:
    """Measure, or show what was measured."""
    require_clean_tree()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=(*NUMBERS, *CLASSES))
    parser.add_argument("--splits", type=int, default=SPLITS, choices=range(1, SPLITS + 1))
    parser.add_argument("--show", action="store_true", help="only write the tables")
    options = parser.parse_args()
    if options.show:
        for part in ("methods", "scores"):
            insert(PAGE, f"conformal-{part}", table(part))
        return
    torch.set_num_threads(1)
    for name in options.only or (*NUMBERS, *CLASSES):
        run(name, options.splits)


if __name__ == "__main__":
    main()
