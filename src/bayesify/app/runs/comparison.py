"""Runs that a report compares: whether they can be compared, and their labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from bayesify.app.runs.folder import Run
from bayesify.app.runs.run_files import RunError

__all__ = ["check_comparable", "kind_of_run", "labels_of"]


def check_comparable(run: Run, others: Sequence[Run]) -> None:
    """Check that other runs are measured by the same test data as a run.

    Raises:
        RunError: the task, the target, the data or the held-out part of one is another.
    """
    own = _measured_by(run)
    for other in others:
        found = _measured_by(other)
        for name, value in own.items():
            if found.get(name) != value:
                raise RunError(
                    f"--compare needs a run with the same {name} as {run.folder}, {value}, but "
                    f"{other.folder} has {found.get(name, 'other data')}; leave it out, or train "
                    "it on the same data"
                )


def _measured_by(run: Run) -> dict[str, Any]:
    """Return by name what decides on the test data and their measures."""
    config = run.config
    found: dict[str, Any] = {"task": config.task, "target": config.target}
    schema = run.table or run.images
    if schema is None:
        return found | {"data": config.dataset}
    split = schema.split
    if run.table is not None:
        source = run.table.source
        found["digest of the data"] = source["sha256"] + source.get("images", "")
        # Which rows are held out follows from other numbers where they are streamed.
        found["rows that are read"] = "streamed" if "streamed" in split else "in memory"
        found["limit"] = split["limit"]
    elif run.images is not None:
        found["digest of the data"] = run.images.sha256
    return found | {"seed": split["seed"], "test fraction": split["fraction"]}


def labels_of(runs: Sequence[Run]) -> list[str]:
    """Return a label for each run: its kind and the name of its folder, or the path if it needs it.

    Example:
        >>> from pathlib import Path
        >>> from bayesify.app.runs import RunConfig
        >>> config = RunConfig.of("mnist", baseline="sgd")
        >>> labels_of([Run(Path(name), config) for name in ("a/run", "b/run", "a/other")])
        ['Plain network (a/run)', 'Plain network (b/run)', 'Plain network (other)']
    """
    short = [f"{kind_of_run(run)} ({run.folder.name})" for run in runs]
    counts = Counter(short)
    return [
        label if counts[label] == 1 else f"{kind_of_run(run)} ({run.folder})"
        for label, run in zip(short, runs, strict=True)
    ]


def kind_of_run(run: Run) -> str:
    """Return what a run trained, as words.

    Example:
        >>> from pathlib import Path
        >>> from bayesify.app.runs import RunConfig
        >>> kind_of_run(Run(Path("run"), RunConfig.of("mnist")))
        'Bayes by Backprop'
        >>> kind_of_run(Run(Path("run"), RunConfig.of("mnist", objective="f-quad")))
        'PAC-Bayes, f-quad'
    """
    config = run.config
    if config.objective != "elbo":
        return f"PAC-Bayes, {config.objective}"
    kinds = {None: "Bayes by Backprop", "sgd": "Plain network", "dropout": "Dropout network"}
    drops = config.baseline is None and (config.dropout_input or config.dropout_hidden)
    return f"{kinds[config.baseline]}, dropout" if drops else kinds[config.baseline]
