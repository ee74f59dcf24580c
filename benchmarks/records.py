"""How the scripts here write down what they measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bayesify.runs import Run
from bayesify.runs.environment import commit, hardware, versions

RESULTS = Path(__file__).resolve().parents[1] / "results"


def write(
    experiment: str,
    run: Run,
    config: dict[str, Any],
    rows: list[dict[str, Any]],
    table: str,
    seconds: float,
) -> None:
    """Write ``results/EXPERIMENT``: every number with what it was measured on, and its table.

    Args:
        experiment: its name.
        run: the run whose network was measured.
        config: the script's own settings.
        rows: the numbers.
        table: the same in Markdown.
        seconds: how long it took.
    """
    document = {
        "experiment": experiment,
        "quick": False,
        "config": {"run": run.command, **config, "settings": run.config.to_json()},
        "seed": run.config.seed,
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "metrics": {"rows": rows},
        "seconds": seconds,
    }
    folder = RESULTS / experiment
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.json").write_text(json.dumps(document, indent=2) + "\n")
    (folder / "table.md").write_text(table)
    print(table)
