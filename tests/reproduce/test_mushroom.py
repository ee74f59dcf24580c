"""The mushroom experiment: what is measured, kept, said and drawn; and killed runs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.killable import Forked, Quiet, without_times

from bayesify import Delta, MeanFieldGaussian
from bayesify.bandits import EpsilonGreedy, MushroomBandit, Record, ThompsonSampler
from bayesify.plots.regret import RegretCurves, cumulative_regret
from bayesify.reproduce import Context, Experiment, Job, Result, find_experiment, reproduce
from bayesify.reproduce.papers.blundell import figure6_mushroom as experiment

EXPERIMENT = find_experiment("mushroom")
NAMES = ("bayes-by-backprop", "bayes-input-noise", "greedy", "epsilon-1", "epsilon-5")


def tiny() -> Experiment:
    def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
        small = {"interactions": 60, "hidden": [5]}
        return [
            replace(job, config={**job.config, **small})
            for job in EXPERIMENT.jobs(seeds, True)
            if job.name in NAMES[::4]
        ]

    return replace(EXPERIMENT, jobs=jobs)


@pytest.mark.slow
def test_the_quick_run_leaves_rows_a_table_and_a_figure(tmp_path: Path) -> None:
    outcome = reproduce(EXPERIMENT, tmp_path, Quiet(), quick=True)
    assert [row["job"] for row in outcome.results] == [*NAMES]
    assert outcome.table.read_text().startswith("**Quick run")
    assert [path.name for path in outcome.figures] == ["mushroom-regret.png"]
    for row in outcome.results:
        metrics = row["metrics"]
        curve = metrics["curve"]
        assert curve["interactions"][-1] == 300
        assert curve["regret"][-1] == metrics["regret"] == metrics["regret_last"]
        assert json.loads(json.dumps(metrics)) == metrics
        assert set(metrics["eaten_last"]) == {"edible", "poisonous"}


@pytest.mark.slow
def test_a_killed_run_gives_the_same_results(tmp_path: Path) -> None:
    whole_step = MushroomBandit.step

    def step(self: MushroomBandit, action: int) -> Any:
        if self._interaction == 47:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole_step(self, action)

    def run() -> None:
        experiment.EVERY = 20
        MushroomBandit.step = step  # type: ignore[method-assign]
        reproduce(tiny(), tmp_path / "killed", Quiet())

    assert Forked(run).wait() == -signal.SIGKILL
    (kept,) = (path for path in (tmp_path / "killed" / ".work").iterdir() if path.is_dir())
    assert (kept / "checkpoint.safetensors").exists()
    watcher = Quiet()
    resumed = reproduce(tiny(), tmp_path / "killed", watcher, seeds=(0,))
    whole = reproduce(tiny(), tmp_path / "whole", Quiet(), seeds=(0,))
    assert [*map(without_times, resumed.results)] == [*map(without_times, whole.results)]
    assert resumed.table.read_bytes() == whole.table.read_bytes()


def test_full_and_quick_are_the_same_agents() -> None:
    full = {job.file_name: job for job in EXPERIMENT.jobs(EXPERIMENT.seeds, False)}
    assert len(full) == 10 * len(NAMES)
    for job in full.values():
        assert job.config["interactions"] == 50_000
        assert job.config["hidden"] == [100, 100]
        assert job.config["buffer_size"] == job.config["interactions"]
        assert job.config["least_data"] == 4096
        assert job.datasets == ("mushroom",)
    for job in EXPERIMENT.jobs((0,), True):
        whole = full[job.file_name].config
        changed = {key for key in job.config if job.config[key] != whole[key]}
        assert changed <= {
            "interactions",
            "hidden",
            "least_data",
            "batch_size",
            "early_interactions",
        }
        assert job.config.keys() == whole.keys()


def test_the_agents_are_what_their_names_say() -> None:
    for job in EXPERIMENT.jobs((3,), True):
        agent = experiment.make_agent(job.config, 117, job.seed)
        rewards = agent.rewards
        assert rewards.bnn.seed == 3
        assert rewards.buffer.capacity == job.config["buffer_size"]
        if isinstance(agent, ThompsonSampler):
            assert job.name in NAMES[:2]
            noise = rewards.bnn.likelihood.config()
            assert noise.get("input_dependent", False) == (job.name == "bayes-input-noise")
            assert isinstance(rewards.bnn.posterior, MeanFieldGaussian)
            assert rewards.elbo.temperature == 1.0
        else:
            assert isinstance(agent, EpsilonGreedy)
            assert agent.epsilon == dict(zip(NAMES[2:], (0.0, 0.01, 0.05), strict=True))[job.name]
            assert isinstance(rewards.bnn.posterior, Delta)
            assert rewards.elbo.temperature == 0.0
        # More minibatches while there are few data.
        updates, early = rewards.learning.updates, job.config["early_interactions"]
        assert callable(updates)
        assert [updates(seen) for seen in (1, early, early + 1)] == [16, 16, 1]


# ------------------------------------------------------------------------- what is made of a record


def record(steps: int, wrong_until: int) -> Record:
    """Every other mushroom is poisonous; up to some step all are eaten, then the edible only."""
    poisonous = torch.arange(steps) % 2 == 1
    eaten = (torch.arange(steps) < wrong_until) | ~poisonous
    rewards = torch.where(poisonous, -35.0, 5.0) * eaten
    best = torch.where(poisonous, 0.0, 5.0)
    return Record(eaten.long(), rewards.double(), best.double())


def test_the_numbers_are_those_of_their_definitions() -> None:
    metrics = experiment.measured(record(3000, 2010))
    assert metrics["regret"] == 35.0 * 1005
    assert metrics["regret_last"] == 35.0 * 5
    assert metrics["poisonous_eaten"] == 1005
    assert metrics["eaten_last"] == {"edible": 100.0, "poisonous": 1.0}
    curve = dict(zip(*metrics["curve"].values(), strict=True))
    assert (curve[1], curve[2], curve[3000]) == (0.0, 35.0, metrics["regret"])
    worse = experiment.measured(record(3000, 2020))
    assert worse["regret_last"] == 350.0
    # The first of the last 1,000 is eaten too, and poisonous.
    assert experiment.measured(record(3001, 2011))["regret_last"] == 35.0 * 5


def test_of_few_interactions_all_are_the_last() -> None:
    metrics = experiment.measured(record(1, 0))
    assert metrics["regret"] == metrics["regret_last"] == 0.0
    assert metrics["eaten_last"] == {"edible": 100.0, "poisonous": 0.0}
    assert metrics["curve"] == {"interactions": [1], "regret": [0.0]}


@pytest.mark.parametrize("steps", [1, 2, 7, 300, 50_000])
def test_the_places_of_the_curve(steps: int) -> None:
    places = experiment.log_spaced(steps)
    assert places[0] == 1
    assert places[-1] == steps
    assert places == sorted(set(places))
    assert len(places) <= 200


def row(name: str, seed: int, wrong_until: int) -> Result:
    config = {**experiment.PROTOCOL, **experiment.AGENTS[name]}
    metrics = experiment.measured(record(3000, wrong_until))
    return {"job": name, "seed": seed, "config": config, "metrics": metrics}


def test_the_table_names_each_run_and_who_never_learnt() -> None:
    rows = [row("greedy", 1, 3000), row(NAMES[0], 0, 100), row("greedy", 0, 2000)]
    lines = experiment.table(rows).splitlines()
    ours = [line for line in lines if line.startswith(("| Bayes", "| greedy"))]
    cells = "1 | 1750 | 1,750 | 1,750 | 0 | 50 | 100.0 % | 0.0 %"
    assert ours[0].startswith(f"| Bayes by Backprop | {cells} |")
    assert ours[1].startswith("| greedy | 2 | 43750 +- 8750 | 43,750 | 35,000, 52,500 |")
    assert [line.split(" | ")[-1] for line in ours] == ["0 |", "1 |"]
    # A twentieth of acting at random, which 5 % of random actions cost, is no failure to learn.
    few = [row("epsilon-5", 0, 2016), row("epsilon-5", 1, 2070), row("epsilon-5", 2, 2080)]
    [line] = [each for each in experiment.table(few).splitlines() if each.startswith("| 5 %")]
    assert line.endswith("| 1 |")
    # A regret of exactly 1,250 is "1,250 or more".
    for regret, never in ((1249.0, 0), (1250.0, 1)):
        at = row("greedy", 0, 100)
        at = {**at, "metrics": {**at["metrics"], "regret_last": regret}}
        [line] = [each for each in experiment.table([at]).splitlines() if each[:8] == "| greedy"]
        assert line.endswith(f"| {never} |")
    assert [line for line in lines if "6,700" in line or "9,700" in line]
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_the_figure_has_a_line_for_each_run_and_agent() -> None:
    rows = [row(name, seed, 100 + 50 * seed) for name in NAMES for seed in range(2)]
    (figure,) = experiment.figures(rows).values()
    (ax,) = figure.axes
    assert len(ax.lines) == len(NAMES) * 3
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == [each["agent"] for each in experiment.AGENTS.values()]
    assert ax.get_yscale() == "log"
    with pytest.raises(ValueError, match="at least one agent"):
        cumulative_regret([])
    with pytest.raises(ValueError, match=r"each with 2 values .* runs of \[1\]"):
        cumulative_regret([RegretCurves("a", [1, 2], [[1.0]])])


def test_a_run_tells_how_far_it_is() -> None:
    told: list[float] = []
    (job,) = tiny().jobs((0,), True)[1:]
    experiment.run(job, Context(on_progress=told.append))
    assert told[-1] == 1.0
