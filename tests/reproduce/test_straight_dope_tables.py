"""The experiments on The Straight Dope: what their tables and figures say of made-up rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.reproduce.test_straight_dope import NAMES

import bayesify as bf
from bayesify.reproduce import Experiment, Result, find_experiment
from bayesify.reproduce.papers.straight_dope import scratch


def test_the_reported_numbers_are_the_documents() -> None:
    # As its log prints them.
    test = "0.9455 0.9593 0.9641 0.9684 0.9723 0.9733 0.9756 0.9749 0.9765 0.9775"
    train = "0.945617 0.962783 0.969783 0.9753 0.978633 0.980483 0.9823 0.984 0.985883 0.9878"
    pruned = "0.1 0.9777 0.25 0.9779 0.5 0.9756 0.75 0.9602 0.95 0.7259 0.99 0.3753 1.0 0.098"
    for part, log in (("test", test), ("train", train)):
        typed = [100.0 * float(word) for word in log.split()]
        assert scratch.REPORTED[part] == pytest.approx(typed, abs=1e-9)
    words = [float(word) for word in pruned.split()]
    shares = {share: 100.0 * value for share, value in zip(words[::2], words[1::2], strict=True)}
    assert scratch.REPORTED["pruned"] == pytest.approx({0.0: 97.75, **shares})
    assert scratch.jobs((0,), False)[0].config["fractions"] == [*shares]


def row(job: str, seed: int, last: float, config: Any, epochs: int = 10) -> Result:
    fractions = config["fractions"]
    accuracy = [last - 0.1 * (epochs - epoch - 1) for epoch in range(epochs)]
    pruning = [
        {
            "fraction": share,
            "weights_left": round(1000 * (1.0 - share)),
            "error_mean_weights": 100.0 - last + share,
            **({"unused_left": round(300 * (1.0 - share))} if job == "as-run" else {}),
        }
        for share in (0.0, *fractions)
    ]
    metrics = {
        "test_accuracy": accuracy,
        "train_accuracy": accuracy,
        "pruning": pruning,
        "loss": [20.0] * epochs,
        "nll": [0.1] * epochs,
        "kl_nats": 1000.0,
        "test_samples": 20,
        "weight": {"mean": -0.02, "std": 0.05},
        "test": {"error_predictive": 100.0 - last, "nll": 0.08},
    }
    return {"job": job, "seed": seed, "config": config, "metrics": metrics}


def rows_of(experiment: Experiment, accuracies: Sequence[float]) -> list[Result]:
    jobs = experiment.jobs(range(len(accuracies)), False)
    return [row(job.name, job.seed, accuracies[job.seed], job.config) for job in jobs]


@pytest.mark.parametrize(
    ("accuracies", "said"),
    [
        (
            (97.8, 98.0),
            "97.90 +- 0.10 % after 10 epochs (seeds: 2) against 97.75 % reported: beaten.",
        ),
        (
            (97.75, 97.5),
            "97.62 +- 0.12 % after 10 epochs (seeds: 2) against 97.75 % reported: matched",
        ),
        ((97.5,), "97.50 % after 10 epochs (seeds: 1) against 97.75 % reported: not reached."),
    ],
)
def test_the_table_says_whether_the_document_is_reached(
    accuracies: Sequence[float], said: str
) -> None:
    experiment = find_experiment(NAMES[0])
    text = experiment.table(rows_of(experiment, accuracies))
    assert f"**The network as described: {said}" in text
    lines = text.splitlines()
    (tenth,) = (line for line in lines if line.startswith("| 10 |"))
    assert tenth.startswith("| 10 | 97.75 | ")
    (half,) = (line for line in lines if line.startswith("| 50 % |"))
    assert half.startswith("| 50 % | 97.56 | ")
    assert "300 of 1,000 weights, 30 %, belong to the hidden layer that is not used" in text
    width = {line.count("|") for line in lines if line.startswith("| ")}
    assert width == {5, 8}  # the head has a space first, too


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("job", [0, 1])
def test_a_part_of_the_rows_is_a_table_and_figures(name: str, job: int) -> None:
    experiment = find_experiment(name)
    part = rows_of(experiment, (97.0, 97.2))[job::2]
    text = experiment.table(part)
    assert "nan" not in text
    assert "97.10 +- 0.10" in text
    figures = experiment.figures(part)
    assert set(figures) == {f"{name}-{part}" for part in ("accuracy", "pruning", "weight")}
    assert len(figures[f"{name}-weight"].axes) == 1
    axes = figures[f"{name}-accuracy"].axes
    assert [len(ax.lines) for ax in axes] == [2 if name == NAMES[0] else 1] * 2
    assert experiment.table(rows_of(experiment, (97.0,))[job : job + 1])


def test_of_the_other_document_nothing_is_reported() -> None:
    experiment = find_experiment(NAMES[1])
    rows = rows_of(experiment, (97.0, 97.2))
    text = experiment.table(rows)
    assert text.startswith("Reported: nothing.")
    assert "reported" not in text.split("\n", 1)[1]
    # Each weight with the prior that it was trained with.
    peaks = [
        max(line.get_ydata().max() for line in ax.lines if line.get_label() == "prior")
        for ax in experiment.figures(rows)[f"{NAMES[1]}-weight"].axes
    ]
    density = [
        math.exp(float(bf.ScaleMixture(pi, 0.75, 0.01).log_prob(torch.zeros(()))))
        for pi in (0.5, 0.25)
    ]
    assert peaks == pytest.approx(density, rel=1e-6)
