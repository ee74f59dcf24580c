"""Write the measurements of a script to ``results/EXPERIMENT``, as JSON and as a table.

:func:`write` stores those of a run at once, :func:`store_rows` those of a data set one after the
other, so that a script that was stopped resumes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bayesify.app.runs import Run
from bayesify.app.runs.environment import commit as commit_of
from bayesify.app.runs.environment import hardware, versions
from bayesify.io import atomic_write

RESULTS = Path(__file__).resolve().parents[1] / "results"
#: Options with which a script stores no measurement.
READ_ONLY = {
    "--check",
    "--help",
    "-h",
    "--list-survivors",
    "--report",
    "--show",
    "--table",
    "--words",
}


def commit() -> str | None:
    """Return the commit of the package and of the benchmarks, with ``-dirty`` if either differs."""
    return commit_of("benchmarks")


def require_clean_tree() -> bool:
    """Refuse to measure code that differs from its commit, unless ``--uncommitted`` is given.

    Every script that stores results calls this first. It takes the option from the command line,
    so that the script's own options need not name it.

    Returns:
        Whether the option was given. Results then name a commit that ends in ``-dirty``.

    Raises:
        SystemExit: src, pyproject.toml or benchmarks differ from their commit.
    """
    uncommitted = "--uncommitted" in sys.argv
    if uncommitted:
        sys.argv.remove("--uncommitted")
    if not READ_ONLY & set(sys.argv):
        code = "the code in src, pyproject.toml or benchmarks"
        require_clean(commit(), code, uncommitted=uncommitted)
    return uncommitted


def require_clean(found: str | None, what: str, *, uncommitted: bool) -> None:
    """Raise SystemExit if something was made by code that differs from its commit."""
    if found is not None and found.endswith("-dirty") and not uncommitted:
        raise SystemExit(
            f"results must be of a commit, but {what} differs from "
            f"{found.removesuffix('-dirty')[:12]}; commit or undo the changes, or pass "
            "--uncommitted to store results that are marked as made by uncommitted code"
        )


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


def stored(
    experiment: str, name: str, config: dict[str, Any], *, seed: int | str | None = None
) -> dict[str, Any]:
    """Return what is stored of a data set, or a document without rows.

    Args:
        experiment: name of the folder in ``results``.
        name: of the data set.
        config: settings of the script.
        seed: what determines all rows; None where the settings or the rows have their seeds.
    """
    path = RESULTS / experiment / f"{name}.json"
    if not path.exists():
        return _document(experiment, {"set": name, **config}, seed=seed)
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def resumed(
    experiment: str, name: str, config: dict[str, Any], *, seed: int | str | None = None
) -> dict[str, Any]:
    """Return what is stored of a data set, to add rows; its arguments are those of `stored`.

    Raises:
        SystemExit: the stored rows are those of another commit.
    """
    document = stored(experiment, name, config, seed=seed)
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


def _document(experiment: str, config: dict[str, Any], seed: int | str | None) -> dict[str, Any]:
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
