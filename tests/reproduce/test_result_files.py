"""Files of results: every stored one opens, old names are read, and damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bayesify.io import StorageError
from bayesify.reproduce import (
    EXPERIMENTS,
    Job,
    find_experiment,
    read_results,
    results_of,
    stored_result,
)

RESULTS = Path(__file__).resolve().parents[2] / "results"


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_every_stored_result_is_one_of_a_job(name: str) -> None:
    experiment, folder = EXPERIMENTS[name], RESULTS / name
    jobs = {job.file_name: job for job in experiment.jobs(experiment.seeds, False)}
    paths = sorted(folder.glob("*-seed-*.json"))
    assert paths
    for path, result in zip(paths, read_results(folder), strict=True):
        # Raises if a setting differs from the experiment's.
        assert stored_result(experiment, folder, jobs[path.name], quick=False) == result
        assert result["job"] == jobs[path.name].name
        assert "unit" not in result


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_a_stored_table_is_that_of_the_stored_results_in_the_order_of_the_jobs(name: str) -> None:
    experiment, folder = EXPERIMENTS[name], RESULTS / name
    table = experiment.table(results_of(experiment, folder))
    assert (folder / "table.md").read_text(encoding="utf-8").strip() == table.strip()


def test_every_other_stored_file_is_an_object() -> None:
    paths = [path for path in RESULTS.glob("*/*.json") if path.parent.name not in EXPERIMENTS]
    assert paths
    for path in paths:
        assert isinstance(json.loads(path.read_text(encoding="utf-8")), dict), path


def test_names_of_earlier_versions_are_read(tmp_path: Path) -> None:
    experiment = find_experiment("rahmanto-grid")
    job = experiment.jobs((0,), False)[0]
    [path] = RESULTS.glob(f"rahmanto-grid/{job.file_name}")
    written = json.loads(path.read_text(encoding="utf-8"))
    assert (written["unit"], written["config"]["settings"]["step"]) == (job.name, "auto")
    read = stored_result(experiment, path.parent, job, quick=False)
    assert read is not None
    assert read["config"]["settings"]["backend"] == "auto"
    written["config"]["settings"]["step"] = "fused"
    (tmp_path / job.file_name).write_text(json.dumps(written))
    with pytest.raises(StorageError, match=r"settings\.backend must be auto, got compiled"):
        stored_result(experiment, tmp_path, job, quick=False)
    assert stored_result(experiment, tmp_path, Job("other", 0, {}, 1.0), quick=False) is None
