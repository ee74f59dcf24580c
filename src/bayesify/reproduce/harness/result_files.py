"""Files of finished jobs: one JSON object for each, readable by every later version.

The keys of a result are those of ``RESULT_KEYS``. Earlier versions called a job ``unit`` and had
another name for one setting of a run; such results are read as if they had the present names.
Results of this version also have ``load``, the machine's load average during the job.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bayesify.app.runs import renamed_settings
from bayesify.io import StorageError
from bayesify.reproduce.harness.experiment import Experiment, Job, Result

__all__ = [
    "RESULT_KEYS",
    "check_same_settings",
    "job_settings",
    "read_object",
    "read_result",
    "read_results",
    "results_of",
    "stored_result",
]

RESULT_KEYS = (
    "experiment",
    "quick",
    "job",
    "config",
    "seed",
    "commit",
    "hardware",
    "versions",
    "metrics",
    "notes",
    "seconds",
)


def stored_result(experiment: Experiment, out: Path, job: Job, *, quick: bool) -> Result | None:
    """Return the result of a job from a folder of results, or None if it is not there.

    Raises:
        StorageError: the file is damaged, or holds a result of other settings.
    """
    path = out / job.file_name
    if not path.exists():
        return None
    result = read_result(path)
    check_same_settings(path, job_settings(experiment, job, quick=quick), result, "a result")
    return result


def read_result(path: Path) -> Result:
    """Read the file of a finished job.

    Raises:
        StorageError: the file cannot be read, or is no result of a job.
    """
    result = read_object(path)
    if not set(RESULT_KEYS) <= set(result):
        raise StorageError(f"{path} is no result of an experiment; remove it")
    return result


def read_results(folder: Path) -> list[Result]:
    """Read all results in a folder, in the order of their file names.

    Returns:
        An empty list if there is no such folder.

    Raises:
        StorageError: a file is damaged.
    """
    return [read_result(path) for path in sorted(folder.glob("*-seed-*.json"))]


def results_of(experiment: Experiment, folder: Path) -> list[Result]:
    """Read the results of an experiment in the order of its jobs, that of its table.

    Returns:
        An empty list if there is no such folder.

    Raises:
        StorageError: a file is damaged.
    """
    jobs = experiment.jobs(experiment.seeds, False)
    order = {name: place for place, name in enumerate(dict.fromkeys(job.name for job in jobs))}
    results = read_results(folder)
    return sorted(results, key=lambda each: (order.get(each["job"], len(order)), each["seed"]))


def read_object(path: Path) -> dict[str, Any]:
    """Read one JSON object that describes a job, and give it the present names.

    Raises:
        StorageError: the file cannot be read, or holds no object.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # as json raises for [[[[...
        raise StorageError(f"{path} cannot be read as a result ({error}); remove it") from error
    if not isinstance(document, dict):
        raise StorageError(f"{path} is no result of an experiment; remove it")
    if "unit" in document:
        document = {"job" if key == "unit" else key: value for key, value in document.items()}
    if "config" in document:
        document["config"] = _with_present_names(document["config"])
    return document


def job_settings(experiment: Experiment, job: Job, *, quick: bool) -> dict[str, Any]:
    """Return the part of a result that is known before the job is run, as JSON."""
    return {
        "experiment": experiment.name,
        "quick": quick,
        "job": job.name,
        "seed": job.seed,
        "config": _with_present_names(json.loads(json.dumps(job.config))),
    }


def check_same_settings(path: Path, wanted: Result, found: Result, what: str) -> None:
    """Check that a file belongs to the job that is wanted.

    Raises:
        StorageError: a setting differs; the message names the first one.
    """
    for name, here, there in _differences(wanted, found):
        raise StorageError(
            f"{path} holds {what} of other settings: its {name} must be {here}, got {there}; "
            "choose another folder with --out, or remove it"
        )


def _differences(wanted: Result, found: Result, within: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the settings that differ, by dotted name, with the two values."""
    for key in {**wanted, **(found if within else {})}:
        here, there, name = wanted.get(key), found.get(key), f"{within}{key}"
        if isinstance(here, dict) and isinstance(there, dict):
            yield from _differences(here, there, f"{name}.")
        elif here != there:
            yield name, here, there


def _with_present_names(config: Any) -> Any:
    """Return a job's config with the present names of the settings of a run, at any depth."""
    if not isinstance(config, Mapping):
        return config
    return renamed_settings({key: _with_present_names(value) for key, value in config.items()})
