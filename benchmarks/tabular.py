"""The scikit-learn estimators on scikit-learn's own tables compared with its own models.

python benchmarks/tabular.py [--only SET ...] [--table]

Five-fold cross-validation, shuffled with seed 0 (stratified for classes), one seed, every model
with its default settings and one thread. Each set's numbers go to ``results/tabular/SET.json``,
and the tables of all that are there into ``docs/scikit-learn.md``, between two marks; ``--table``
does only the latter.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from records import commit, require_clean_tree
from sklearn import datasets
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import BayesianRidge, LogisticRegression, Ridge
from sklearn.metrics import log_loss, root_mean_squared_error
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bayesify.app.runs.environment import hardware, versions
from bayesify.sklearn import BayesianMLPClassifier, BayesianMLPRegressor

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "tabular"
PAGE = ROOT / "docs" / "scikit-learn.md"
BEGIN, END = "<!-- written by benchmarks/tabular.py: begin -->", "<!-- end -->"
CLASSES = ("iris", "wine", "breast_cancer", "digits", "moons")
NUMBERS = ("diabetes", "friedman1")
LEVEL = 0.95
SEED = 0


def load(name: str) -> tuple[Any, Any]:
    """A set's table and targets."""
    if name == "friedman1":
        return datasets.make_friedman1(400, noise=1.0, random_state=SEED)
    if name == "moons":
        return datasets.make_moons(200, noise=0.2, random_state=SEED)
    return getattr(datasets, f"load_{name}")(return_X_y=True)


def models(name: str) -> dict[str, Any]:
    """The models by the names in the table."""
    if name in CLASSES:
        mlp = MLPClassifier(random_state=SEED)
        return {
            "BayesianMLPClassifier": BayesianMLPClassifier(random_state=SEED),
            "MLPClassifier": mlp,
            "MLPClassifier, scaled": make_pipeline(StandardScaler(), mlp),
            "LogisticRegression, scaled": make_pipeline(StandardScaler(), LogisticRegression()),
            "RandomForestClassifier": RandomForestClassifier(random_state=SEED),
        }
    mlp = MLPRegressor(random_state=SEED)
    scaled = TransformedTargetRegressor(
        make_pipeline(StandardScaler(), mlp), transformer=StandardScaler()
    )
    return {
        "BayesianMLPRegressor": BayesianMLPRegressor(random_state=SEED),
        "BayesianMLPRegressor, noise learned": BayesianMLPRegressor(
            noise="learned", random_state=SEED
        ),
        "MLPRegressor": mlp,
        "MLPRegressor, X and y scaled": scaled,
        "Ridge, scaled": make_pipeline(StandardScaler(), Ridge()),
        "BayesianRidge, scaled": make_pipeline(StandardScaler(), BayesianRidge()),
        "RandomForestRegressor": RandomForestRegressor(random_state=SEED),
    }


def of_classes(model: Any, x: Any, y: Any) -> dict[str, float]:
    """Accuracy in percent, log loss in nats."""
    probabilities = model.predict_proba(x)
    accuracy = 100.0 * float(np.mean(model.classes_[probabilities.argmax(1)] == y))
    return {"accuracy": accuracy, "log_loss": log_loss(y, probabilities, labels=model.classes_)}


def of_numbers(model: Any, x: Any, y: Any) -> dict[str, float]:
    """RMSE in units of y; where there is a distribution, nll in nats, and its 95 % intervals."""
    found = {"rmse": float(root_mean_squared_error(y, model.predict(x)))}
    if isinstance(model, BayesianMLPRegressor):
        lower, upper = model.predict_interval(x, LEVEL)
        found["nll"] = -float(model.predictive(x).log_prob(torch.as_tensor(y)).mean())
    elif "bayesianridge" in getattr(model, "named_steps", {}):
        mean, std = model.predict(x, return_std=True)
        half = float(torch.special.ndtri(torch.tensor(0.5 + 0.5 * LEVEL)))
        lower, upper = mean - half * std, mean + half * std
        nll = 0.5 * ((y - mean) / std) ** 2 + np.log(std) + 0.5 * math.log(2.0 * math.pi)
        found["nll"] = float(nll.mean())
    else:
        return found
    found["coverage"] = 100.0 * float(np.mean((lower <= y) & (y <= upper)))
    found["width"] = float(np.mean(upper - lower))
    return found


def measure(name: str) -> dict[str, Any]:
    """All models on one set: of each metric the mean over the folds and its standard error."""
    x, y = load(name)
    kind = StratifiedKFold if name in CLASSES else KFold
    folds = list(kind(5, shuffle=True, random_state=SEED).split(x, y))
    rows: dict[str, Any] = {}
    for label, model in models(name).items():
        found: list[dict[str, float]] = []
        for train, test in folds:
            one = clone(model)
            started = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                one.fit(x[train], y[train])
            seconds = time.process_time() - started
            row = (of_classes if name in CLASSES else of_numbers)(one, x[test], y[test])
            found.append({**row, "fit_cpu_seconds": seconds})
        rows[label] = {}
        for metric in found[0]:
            values = np.array([row[metric] for row in found])
            error = float(values.std(ddof=1) / math.sqrt(len(values)))
            rows[label][metric] = {"mean": float(values.mean()), "standard_error": error}
        print(name, label, {k: round(v["mean"], 4) for k, v in rows[label].items()}, flush=True)
    return {"rows": np.shape(x)[0], "columns": np.shape(x)[1], "models": rows}


def table() -> str:
    """Markdown of all stored sets."""
    parts = []
    for names, metrics in (
        (CLASSES, {"accuracy": ("accuracy (%)", 1), "log_loss": ("log loss (nats)", 3)}),
        (
            NUMBERS,
            {
                "rmse": ("RMSE", 3),
                "nll": ("nll (nats)", 3),
                "coverage": ("95 % intervals hold (%)", 1),
                "width": ("their width", 2),
            },
        ),
    ):
        # Without CPU seconds, which are stored: the machine had other work.
        heads = ["set", "model", *(head for head, _ in metrics.values())]
        lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
        for name in names:
            path = RESULTS / f"{name}.json"
            if not path.exists():
                continue
            stored = json.loads(path.read_text())["metrics"]
            title = f"{name} ({stored['rows']} x {stored['columns']})"
            for label, found in stored["models"].items():
                cells = []
                for metric, (_, digits) in metrics.items():
                    value = found.get(metric)
                    numbers = () if value is None else (value["mean"], value["standard_error"])
                    cells.append(" ± ".join(f"{number:.{digits}f}" for number in numbers))
                lines.append(f"| {' | '.join([title, label, *cells])} |")
                title = ""
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def main() -> None:
    """Measure, and write the tables."""
    require_clean_tree()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=(*CLASSES, *NUMBERS))
    parser.add_argument("--table", action="store_true", help="only write the tables")
    options = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in () if options.table else options.only or (*CLASSES, *NUMBERS):
        started = time.perf_counter()
        metrics = measure(name)
        document = {
            "experiment": "tabular",
            "quick": False,
            "config": {"set": name, "folds": 5, "defaults": True},
            "seed": SEED,
            "commit": commit(),
            "hardware": hardware(),
            "versions": {**versions(), "scikit-learn": metadata.version("scikit-learn")},
            "metrics": metrics,
            "seconds": time.perf_counter() - started,
        }
        (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}")


if __name__ == "__main__":
    main()
