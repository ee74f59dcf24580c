"""Write the measurements of a script to ``results/EXPERIMENT``, as JSON and as a table.

:func:`write` stores those of a run at once, :func:`store_rows` those of a data set one after the
other, so that a script that was stopped resumes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bayesify.app.runs import Run
from bayesify.app.runs.environment import commit, hardware, versions
from bayesify.io import atomic_write

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
    document = _document(
        experiment,
        {"run": run.command, **config, "settings": run.config.to_json()},
        seed=run.config.seed,
    )
    document["metrics"]["rows"], document["seconds"] = rows, seconds
    folder = RESULTS / experiment
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.json").write_text(json.dumps(document, indent=2) + "\n")
    (folder / "table.md").write_text(table)
    print(table)


def stored(experiment: str, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return what is stored of a data set, or a document without rows."""
    path = RESULTS / experiment / f"{name}.json"
    if not path.exists():
        return _document(experiment, {"set": name, **config}, seed="the split")
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def resumed(experiment: str, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return what is stored of a data set, to add rows.

    Raises:
        SystemExit: the code is not that of a commit, or the stored rows are those of another one.
    """
    if str(commit()).endswith("-dirty"):
        raise SystemExit("results must be of a commit, but the code in src differs; commit it")
    document = stored(experiment, name, config)
    if document["commit"] != commit():
        raise SystemExit(
            f"{RESULTS / experiment / name}.json holds results of {document['commit']}, but the "
            f"code is that of {commit()}; remove the file, or check out that commit"
        )
    return document


def store_rows(document: dict[str, Any], rows: list[dict[str, Any]], seconds: float) -> None:
    """Add rows and the time that they took to a document of :func:`resumed`, and store it."""
    document["metrics"]["rows"] += rows
    document["seconds"] += seconds
    folder = RESULTS / document["experiment"]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{document['config']['set']}.json"
    atomic_write(path, json.dumps(document, indent=1) + "\n")


def _document(experiment: str, config: dict[str, Any], seed: int | str) -> dict[str, Any]:
    return {
        "experiment": experiment,
        "quick": False,
        "config": config,
        "seed": seed,
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "metrics": {"rows": []},
        "seconds": 0.0,
    }
