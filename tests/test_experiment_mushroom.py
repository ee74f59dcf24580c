"""The mushroom experiment: what is measured, kept, said and drawn; and killed runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.test_experiments import Silent

from bayesify import Delta, MeanFieldGaussian
from bayesify.bandits import EpsilonGreedy, Record, ThompsonSampler
from bayesify.experiments import Context, Experiment, Row, Unit, find_experiment, reproduce
from bayesify.experiments import mushroom as experiment
from bayesify.plots.regret import RegretCurves, cumulative_regret

EXPERIMENT = find_experiment("mushroom")
NAMES = ("bayes-by-backprop", "greedy", "epsilon-1", "epsilon-5")


class Quiet(Silent):
    """Whose rows have other metrics."""

    def on_done(self, unit: Unit, row: Row) -> None:
        self.said.append(f"end {unit.name} {row['seed']}")


def tiny() -> Experiment:
    def units(seeds: Sequence[int], quick: bool) -> list[Unit]:
        small = {"interactions": 60, "hidden": [5]}
        return [
            replace(unit, config={**unit.config, **small})
            for unit in EXPERIMENT.units(seeds, True)
            if unit.name in NAMES[::3]
        ]

    return replace(EXPERIMENT, units=units)


def without_times(row: Row) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "seconds"}


def test_the_quick_run_leaves_rows_a_table_and_a_figure(tmp_path: Path) -> None:
    outcome = reproduce(EXPERIMENT, tmp_path, Quiet(), quick=True)
    assert [row["unit"] for row in outcome.rows] == [*NAMES]
    assert outcome.table.read_text().startswith("**Quick run")
    assert [path.name for path in outcome.figures] == ["mushroom-regret.png"]
    for row in outcome.rows:
        metrics = row["metrics"]
        curve = metrics["curve"]
        assert curve["interactions"][-1] == 300
        assert curve["regret"][-1] == metrics["regret"] == metrics["regret_last"]
        assert json.loads(json.dumps(metrics)) == metrics
        assert set(metrics["eaten_last"]) == {"edible", "poisonous"}


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from tests.test_experiment_mushroom import Quiet, tiny
    from bayesify.bandits import MushroomBandit
    from bayesify.experiments import mushroom, reproduce

    mushroom.EVERY = 20

    def step(self, action):
        if self._interaction == 47:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, action)

    whole = MushroomBandit.step
    MushroomBandit.step = step
    reproduce(tiny(), Path(sys.argv[1]), Quiet())
"""


def test_a_killed_run_gives_the_same_rows(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "killed")],
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ended.returncode == -signal.SIGKILL
    (kept,) = (path for path in (tmp_path / "killed" / ".work").iterdir() if path.is_dir())
    assert (kept / "checkpoint.safetensors").exists()
    watcher = Quiet()
    resumed = reproduce(tiny(), tmp_path / "killed", watcher, seeds=(0,))
    whole = reproduce(tiny(), tmp_path / "whole", Quiet(), seeds=(0,))
    assert [*map(without_times, resumed.rows)] == [*map(without_times, whole.rows)]
    assert resumed.table.read_bytes() == whole.table.read_bytes()


def test_full_and_quick_are_the_same_agents() -> None:
    full = {unit.file_name: unit for unit in EXPERIMENT.units(EXPERIMENT.seeds, False)}
    assert len(full) == 20
    for unit in full.values():
        assert unit.config["interactions"] == 50_000
        assert unit.config["hidden"] == [100, 100]
        assert unit.config["buffer_size"] == unit.config["interactions"]
        assert unit.config["least_data"] == 4096
        assert unit.datasets == ("mushroom",)
    for unit in EXPERIMENT.units((0,), True):
        whole = full[unit.file_name].config
        changed = {key for key in unit.config if unit.config[key] != whole[key]}
        assert changed <= {
            "interactions",
            "hidden",
            "least_data",
            "batch_size",
            "early_interactions",
        }
        assert unit.config.keys() == whole.keys()


def test_the_agents_are_what_their_names_say() -> None:
    for unit in EXPERIMENT.units((3,), True):
        agent = experiment.make_agent(unit.config, 117, unit.seed)
        rewards = agent.rewards
        assert rewards.bnn.seed == 3
        assert rewards.buffer.capacity == unit.config["buffer_size"]
        if isinstance(agent, ThompsonSampler):
            assert unit.name == NAMES[0]
            assert isinstance(rewards.bnn.posterior, MeanFieldGaussian)
            assert rewards.elbo.temperature == 1.0
        else:
            assert isinstance(agent, EpsilonGreedy)
            assert agent.epsilon == dict(zip(NAMES[1:], (0.0, 0.01, 0.05), strict=True))[unit.name]
            assert isinstance(rewards.bnn.posterior, Delta)
            assert rewards.elbo.temperature == 0.0
        # More minibatches while there are few data.
        updates, early = rewards.learning.updates, unit.config["early_interactions"]
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


def row(name: str, seed: int, wrong_until: int) -> Row:
    config = {**experiment.PROTOCOL, **experiment.AGENTS[name]}
    metrics = experiment.measured(record(3000, wrong_until))
    return {"unit": name, "seed": seed, "config": config, "metrics": metrics}


def test_the_table_names_each_run_and_who_never_learnt() -> None:
    rows = [row("greedy", 1, 3000), row(NAMES[0], 0, 100), row("greedy", 0, 2000)]
    lines = experiment.table(rows).splitlines()
    ours = [line for line in lines if line.startswith(("| Bayes", "| greedy"))]
    assert ours[0].startswith("| Bayes by Backprop | 1 | 1750 | 1,750 | 0 | 50 | 100.0 % | 0.0 % |")
    assert ours[1].startswith("| greedy | 2 | 43750 +- 8750 | 35,000, 52,500 |")
    assert [line.split(" | ")[-1] for line in ours] == ["0 |", "1 |"]
    # A twentieth of acting at random, which 5 % of random actions cost, is no failure to learn.
    few = [row("epsilon-5", 0, 2016), row("epsilon-5", 1, 2070), row("epsilon-5", 2, 2080)]
    [line] = [each for each in experiment.table(few).splitlines() if each.startswith("| 5 %")]
    assert line.endswith("| 1 |")
    assert [line for line in lines if "6,700" in line or "9,700" in line]
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_the_figure_has_a_line_for_each_run_and_agent() -> None:
    rows = [row(name, seed, 100 + 50 * seed) for name in NAMES for seed in range(2)]
    (figure,) = experiment.figures(rows).values()
    (ax,) = figure.axes
    assert len(ax.lines) == 4 * 3
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == [each["agent"] for each in experiment.AGENTS.values()]
    assert ax.get_yscale() == "log"
    with pytest.raises(ValueError, match="at least one agent"):
        cumulative_regret([])
    with pytest.raises(ValueError, match=r"each of 2 values .* runs of \[1\]"):
        cumulative_regret([RegretCurves("a", [1, 2], [[1.0]])])


def test_a_run_tells_how_far_it_is() -> None:
    told: list[float] = []
    (unit,) = tiny().units((0,), True)[1:]
    experiment.run(unit, Context(on_progress=told.append))
    assert told[-1] == 1.0
