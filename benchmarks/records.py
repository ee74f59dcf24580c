"""Write the measurements of a script to ``results/EXPERIMENT``, as JSON and as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bayesify.app.runs import Run
from bayesify.app.runs.environment import commit, hardware, versions

RESULTS = Path(__file__).resolve().parents[1] / "results"


def write(
    experiment: str,
    run: Run,
    config: dict[str, Any],
    rows: list[dict[str, Any]],
    table: str,
    seconds: float,
) -> None:
    """Write all numbers with the hardware and versions that they were measured on, and a table.

    Args:
        experiment: name of the folder in ``results``.
        run: the run whose network was measured.
        config: settings of the script.
        rows: the numbers.
        table: the same as Markdown.
        seconds: duration of the measurement.
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
