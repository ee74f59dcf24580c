"""Collect finished runs into results/NAME: one JSON object a run, and a Markdown table.

python benchmarks/collect_runs.py first-run runs/first runs/seed-1 runs/sgd ...
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from records import RESULTS, require_clean, require_clean_tree

from bayesify.app.runs import Run

COLUMNS = {
    "error_predictive": ("error, averaged %", 2),
    "error_mean_weights": ("error, mean weights %", 2),
    "nll": ("nll, nats", 4),
    "brier": ("Brier", 4),
    "ece": ("ECE", 4),
}


def record(experiment: str, folder: Path) -> dict[str, Any]:
    """Return a run as one JSON object."""
    run = Run.open(folder)
    document, metrics = run.document, run.metrics()
    pruning = folder / "pruning.json"
    return {
        "experiment": experiment,
        "quick": False,
        "run": folder.name,
        "config": document["settings"],
        "command": document["command"],
        "seed": run.config.seed,
        "commit": document["commit"],
        "hardware": document["hardware"],
        "versions": document["versions"],
        "metrics": metrics,
        "pruning": json.loads(pruning.read_text()) if pruning.exists() else None,
        "seconds": metrics["seconds_train"],
    }


def table(records: list[dict[str, Any]]) -> str:
    """Return the table of test metrics: mean and standard deviation over seeds."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for each in records:
        settings = {name: value for name, value in each["config"].items() if name != "seed"}
        groups.setdefault(json.dumps(settings), []).append(each)
    lines = [
        "| run | seeds | "
        + " | ".join(label for label, _ in COLUMNS.values())
        + " | derivative in log std, worst group | seconds |",
        "|---" * (len(COLUMNS) + 4) + "|",
    ]
    for members in groups.values():
        cells = [members[0]["run"], str(len(members))]
        for name, (_, places) in COLUMNS.items():
            values = [each["metrics"]["test"][name] for each in members]
            spread = f" +- {statistics.stdev(values):.{places}f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.{places}f}{spread}")
        residuals = [each["metrics"].get("std_residual_worst") for each in members]
        known = all(residual is not None for residual in residuals)
        cells.append(f"{statistics.mean(residuals):+.2f}" if known else "-")
        cells.append(f"{statistics.mean(each['seconds'] for each in members):.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the results of the runs named on the command line."""
    uncommitted = require_clean_tree()
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    experiment = sys.argv[1]
    records = [record(experiment, Path(name)) for name in sys.argv[2:]]
    for each in records:
        require_clean(each["commit"], f"run {each['run']}", uncommitted=uncommitted)
    results = RESULTS / experiment
    results.mkdir(parents=True, exist_ok=True)
    for each in records:
        (results / f"{each['run']}.json").write_text(json.dumps(each, indent=2) + "\n")
    (results / "table.md").write_text(table(records))
    print(table(records))


if __name__ == "__main__":
    main()
