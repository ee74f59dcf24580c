"""The frame of ``reproduce``: jobs, their files, going on after any end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from bayesify.datasets import DataError
from bayesify.io import StorageError
from bayesify.reproduce import (
    EXPERIMENTS,
    Context,
    Experiment,
    Job,
    Result,
    find_experiment,
    reproduce,
)


class Silent:
    def __init__(self) -> None:
        self.said: list[str] = []

    def on_start(self, jobs: Sequence[Job], left: Sequence[Job]) -> None:
        self.said.append(f"{len(left)} of {len(jobs)}")

    def on_cluster(self, size: str) -> None:
        self.said.append(size)

    def on_job(self, job: Job) -> None:
        self.said.append(f"begin {job.name} {job.seed}")

    def on_progress(self, part: float) -> None:
        self.said.append(f"{part:g}")

    def on_wait(self, job: Job) -> None:
        self.said.append(f"wait {job.name} {job.seed}")

    def on_done(self, job: Job, row: Result) -> None:
        self.said.append(f"end {job.name} {row['metrics']['value']:.3f}")


def toy(fail_at: str = "", size: int = 3) -> Experiment:
    def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
        config = {"size": 1 if quick else size, "pair": (1, 2)}
        return [Job(name, seed, config, 2.0) for seed in seeds for name in ("a", "b")]

    def run(job: Job, context: Context) -> dict[str, Any]:
        if job.name == fail_at:
            raise KeyboardInterrupt
        assert context.on_progress is not None
        context.on_progress(0.5)
        drawn = torch.randn(job.config["size"], generator=torch.Generator().manual_seed(job.seed))
        return {"value": float(drawn.sum()), "threads": torch.get_num_threads()}

    def table(rows: Sequence[Result]) -> str:
        return "".join(f"| {row['job']} | {row['metrics']['value']:.3f} |\n" for row in rows)

    def figures(rows: Sequence[Result]) -> dict[str, Figure]:
        figure = Figure()
        figure.add_subplot().plot([row["metrics"]["value"] for row in rows])
        return {"toy": figure}

    return Experiment("toy", "a test", "nothing", (0, 1), 100, jobs, run, table, figures)


def test_each_unit_is_a_file(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    watcher = Silent()
    outcome = reproduce(toy(), tmp_path / "new" / "toy", watcher)
    assert torch.get_num_threads() == before
    assert watcher.said[:4] == ["4 of 4", "begin a 0", "0.5", f"end a {first(outcome.results):.3f}"]
    assert sorted(path.name for path in (tmp_path / "new" / "toy").iterdir()) == [
        "a-seed-0.json",
        "a-seed-1.json",
        "b-seed-0.json",
        "b-seed-1.json",
        "table.md",
        "toy.png",
    ]
    row = json.loads((tmp_path / "new" / "toy" / "b-seed-1.json").read_text())
    contract = {"experiment", "quick", "config", "seed", "commit", "hardware", "versions"}
    assert contract | {"metrics", "seconds", "load"} <= set(row)
    assert (row["experiment"], row["quick"], row["seed"], row["job"]) == ("toy", False, 1, "b")
    assert row["metrics"]["threads"] == 1
    assert "1 thread" in row["hardware"]
    assert outcome.table.read_text().count("\n") == 4


def first(rows: Sequence[Result]) -> float:
    return float(rows[0]["metrics"]["value"])


def test_two_runs_differ_in_their_times_only(tmp_path: Path) -> None:
    for name in ("one", "other"):
        reproduce(toy(), tmp_path / name, Silent(), quick=True)
    paths = list((tmp_path / "one").glob("*.json"))
    assert paths
    for path in paths:
        one, other = (json.loads((tmp_path / n / path.name).read_text()) for n in ("one", "other"))
        assert one.pop("seconds") > 0.0
        del other["seconds"], one["load"], other["load"]
        assert one == other


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        reproduce(toy(fail_at="b"), tmp_path, Silent())
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["a-seed-0.json"]
    kept = (tmp_path / "a-seed-0.json").read_bytes()
    watcher = Silent()
    outcome = reproduce(toy(), tmp_path, watcher)
    assert watcher.said[:2] == ["3 of 4", "begin b 0"]
    assert (tmp_path / "a-seed-0.json").read_bytes() == kept
    assert len(outcome.results) == 4
    whole = reproduce(toy(), tmp_path / "whole", Silent())
    assert [row["metrics"] for row in outcome.results] == [row["metrics"] for row in whole.results]
    watcher = Silent()
    reproduce(toy(), tmp_path, watcher)
    assert watcher.said == ["0 of 4"]


def test_results_of_other_settings_are_not_taken_for_these(tmp_path: Path) -> None:
    reproduce(toy(), tmp_path, Silent())
    with pytest.raises(StorageError, match=r"its config.size must be 4, got 3"):
        reproduce(toy(size=4), tmp_path, Silent())
    with pytest.raises(StorageError, match="its quick must be True, got False"):
        reproduce(toy(), tmp_path, Silent(), quick=True)


def test_quick_is_written_everywhere(tmp_path: Path) -> None:
    outcome = reproduce(toy(), tmp_path, Silent(), quick=True)
    assert len(outcome.results) == 2  # one seed
    assert all(row["quick"] is True for row in outcome.results)
    assert outcome.table.read_text().startswith("**Quick run: ")
    plain = reproduce(toy(), tmp_path / "full", Silent(), seeds=(0,))
    assert not plain.table.read_text().startswith("**")
    assert outcome.figures[0].read_bytes() != plain.figures[0].read_bytes()


@pytest.mark.parametrize("seeds", [(1, 1), (0, -1)])
def test_seeds_are_checked(tmp_path: Path, seeds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="seeds must be different numbers of at least 0"):
        reproduce(toy(), tmp_path, Silent(), seeds=seeds)


def test_what_is_warned_of_is_stored(tmp_path: Path) -> None:
    import warnings

    experiment = toy()

    def run(job: Job, context: Context) -> dict[str, Any]:
        warnings.warn("far too hot", UserWarning, stacklevel=1)
        return experiment.run(job, context)

    outcome = reproduce(replace(experiment, run=run), tmp_path, Silent(), quick=True)
    assert outcome.results[0]["notes"] == ["far too hot"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_are_well_formed(name: str) -> None:
    experiment = find_experiment(name)
    assert experiment.name == name
    assert experiment.source
    assert experiment.reported
    for quick in (False, True):
        jobs = experiment.jobs((0, 5), quick)
        assert len({job.file_name for job in jobs}) == len(jobs)
        assert {job.seed for job in jobs} == {0, 5}
        json.dumps([dict(job.config) for job in jobs], allow_nan=False)
    assert experiment.seconds(quick=True) < 100.0 < experiment.seconds()


def test_missing_data_are_named_before_anything_is_run(tmp_path: Path) -> None:
    experiment = toy()
    jobs = experiment.jobs

    def with_data(seeds: Sequence[int], quick: bool) -> list[Job]:
        *first, last = jobs(seeds, quick)
        return [*first, replace(last, datasets=("mnist",))]

    nowhere = Context(data_dir=tmp_path / "nowhere")
    watcher = Silent()
    with pytest.raises(DataError, match=r"train-images.* of mnist is not in .*nowhere"):
        reproduce(replace(experiment, jobs=with_data), tmp_path / "out", watcher, context=nowhere)
    assert watcher.said == ["4 of 4"]
    assert not (tmp_path / "out").exists()


def test_an_unknown_experiment_lists_the_known() -> None:
    with pytest.raises(ValueError, match=f"'table-1'; known are {', '.join(EXPERIMENTS)}$"):
        find_experiment("table-1")


#: Without those that need data which the repository does not have.
ON_GPU = [
    name
    for name, each in EXPERIMENTS.items()
    if each.on_gpu and each.jobs((0,), True)[0].datasets == ("mnist",)
]


@pytest.mark.parametrize("name", ON_GPU)
def test_an_experiment_that_takes_a_device_trains_on_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training is stopped where it is told the device."""
    told = []

    def train(*arguments: Any) -> None:
        told.append(torch.device(arguments[-1]).type)
        raise KeyboardInterrupt

    monkeypatch.setattr("bayesify.reproduce.harness.image_runs.train", train)
    monkeypatch.setattr(nn.Module, "to", train)
    experiment = EXPERIMENTS[name]
    with pytest.raises(KeyboardInterrupt):
        experiment.run(experiment.jobs((0,), True)[0], Context(device="cuda"))
    assert told == ["cuda"]
