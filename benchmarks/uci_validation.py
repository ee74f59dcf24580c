"""Compare settings of ``bayesify reproduce uci`` on validation parts of the training parts.

python benchmarks/uci_validation.py boston yacht wine energy

Each setting differs from the experiment's in one value. The result of each is a file in
results/uci-validation; finished ones are not run again. The table is written to
docs/reproductions.md.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from records import RESULTS, commit, require_clean_tree

from bayesify.app.runs.environment import hardware, versions
from bayesify.datasets import load_regression, standard_splits
from bayesify.io import atomic_write
from bayesify.reproduce import Context
from bayesify.reproduce.papers.uci import (
    PROTOCOL,
    evaluate,
    standardised,
    train,
    validation_splits,
)

SPLITS, STEPS = 10, 4000
LEVERS: dict[str, dict[str, Any]] = {
    "as taken, but 4,000 steps": {},
    "rate .01": {"lr": 0.01},
    "rate .0025": {"lr": 0.0025},
    "warm-up 0": {"kl_warmup": 0.0},
    "warm-up 0.5": {"kl_warmup": 0.5},
    "gain 1": {"prior_gain": 1.0},
    "gain 2": {"prior_gain": 2.0},
    "gain 8": {"prior_gain": 8.0},
    "2,000 steps": {"steps": 2000},
}
INTRODUCTION = (
    "`python benchmarks/uci_validation.py` measures what remains of these in the code, in the\n"
    "same way, each setting one step away from the one that was taken:"
)
DOCS = Path(__file__).resolve().parents[1] / "docs" / "reproductions.md"


def measured(name: str, change: dict[str, Any]) -> dict[str, Any]:
    """Train with one setting on one table, and return the result."""
    config = {**PROTOCOL, "dataset": name, "hidden": 50, "steps": STEPS, "splits": SPLITS, **change}
    data = load_regression(name)
    table = standardised(data, validation_splits(standard_splits(len(data.targets), SPLITS)))
    started = time.perf_counter()
    with warnings.catch_warnings(action="ignore"):
        networks, _ = train(table, config, 0, Context())
        found = evaluate(networks, table, config["test_samples"])
    return {
        "experiment": "uci-validation",
        "quick": False,
        "config": config,
        "seed": 0,
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "metrics": {f"validation_{metric}": values for metric, values in found.items()},
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    """Measure the missing settings, then write the table and the page."""
    require_clean_tree()
    torch.set_num_threads(1)
    folder = RESULTS / "uci-validation"
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:]:
        for number, change in enumerate(LEVERS.values()):
            path = folder / f"{name}-{number}.json"
            if not path.exists():
                atomic_write(path, json.dumps(measured(name, change), indent=2) + "\n")
                print(path, flush=True)
    names = sorted({path.name.rpartition("-")[0] for path in folder.glob("*.json")})
    lines = [f"| validation nll, {SPLITS} splits | {' | '.join(names)} |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for number, lever in enumerate(LEVERS):
        cells = []
        for name in names:
            path = folder / f"{name}-{number}.json"
            cells.append(_cell(json.loads(path.read_text())) if path.exists() else "")
        lines.append(f"| {lever} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    atomic_write(folder / "table.md", table + "\n")
    page = DOCS.read_text(encoding="utf-8")
    before, begin, rest = page.partition("<!-- uci-validation: begin -->")
    _, end, after = rest.partition("<!-- uci-validation: end -->")
    if not (begin and end):
        raise ValueError(f"{DOCS} must have both marks of uci-validation")
    atomic_write(DOCS, f"{before}{begin}\n\n{INTRODUCTION}\n\n{table}\n\n{end}{after}")


def _cell(row: dict[str, Any]) -> str:
    values = row["metrics"]["validation_nll"]
    return f"{mean(values):.2f} +- {stdev(values) / len(values) ** 0.5:.2f}"


if __name__ == "__main__":
    main()
