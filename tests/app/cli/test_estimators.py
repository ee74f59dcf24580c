"""Estimators, the convolutional network and half precision on the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.app.cli.test_cli import as_json, quick_runs
from torch import nn

from bayesify import BayesianModule, Estimator, Flipout, LocalReparameterization, WeightSampling
from bayesify.app.runs import Run, RunConfig

OPTIONS = ["--epochs", "1", "--limit", "100", "--batch-size", "50", "--test-samples", "2"]
MLP = ["--hidden", "8"]
LENET = ["--net", "lenet5"]
CASES: dict[str, tuple[list[str], Estimator, str]] = {
    "sampling": (MLP, WeightSampling(), "sampled"),
    "antithetic": (MLP, WeightSampling(antithetic=True), "sampled"),
    "local": (MLP, LocalReparameterization(), "exact"),
    "local-per-position": (LENET, LocalReparameterization(per_position=True), "per-position"),
    "flipout": (MLP, Flipout(), "exact"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_trains_with_the_estimator_that_was_asked_for(name: str, tmp_path: Path) -> None:
    options, estimator, treatment = CASES[name]
    out = tmp_path / "run"
    with quick_runs():
        as_json("train", "mnist", "--out", out, "--estimator", name, *options, *OPTIONS)
        found = as_json("inspect", out)
    assert Run.open(out).load_module().estimator == estimator
    assert found["parameters"][0]["treatment"] == treatment
    assert found["parameters"][-1]["treatment"] == (
        "exact" if treatment != "sampled" else treatment
    )
    assert all(row["reason"] for row in found["parameters"])
    num_weights = 61_706 if options == LENET else 784 * 8 + 8 + 80 + 10
    assert found["num_weights"] == num_weights


def test_half_precision_is_for_training_only(tmp_path: Path) -> None:
    losses = {}
    for precision in ("float32", "bfloat16"):
        out = tmp_path / precision
        with quick_runs():
            as_json("train", "mnist", "--out", out, "--precision", precision, *MLP, *OPTIONS)
        run = Run.open(out)
        losses[precision] = run.history()[-1]["nll"]
        assert run.load_module().posterior.mean.dtype is torch.float32
    assert losses["float32"] == pytest.approx(losses["bfloat16"], rel=0.01)
    assert losses["float32"] != losses["bfloat16"]


def test_a_convolutional_baseline(tmp_path: Path) -> None:
    with quick_runs():
        options = ["--baseline", "dropout", *LENET, *OPTIONS[:-2]]
        metrics = as_json("train", "mnist", "--out", tmp_path / "run", *options)
        found = as_json("inspect", tmp_path / "run")
    assert metrics["num_weights"] == 61_706
    assert found["parameters"][0]["treatment"] is None


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, []),
        ({"dropout_input": 0.2}, [0.2]),
        ({"dropout_input": 0.2, "dropout_hidden": 0.3}, [0.2, 0.3]),
        ({"baseline": "dropout"}, [0.2, 0.5]),
    ],
)
def test_units_are_dropped_in_training_where_it_is_asked_for(
    settings: dict[str, Any], asked: list[float], tmp_path: Path
) -> None:
    bnn = Run(tmp_path, RunConfig.of("mnist", hidden=(8,), **settings)).make_module()
    assert dropped(bnn) == asked
    # Not in predictions, which are the same each time.
    inputs = torch.rand(5, 784)
    predictions = [bnn.predict(inputs, num_samples=2).mean for _ in range(2)]
    assert torch.equal(*predictions)


def dropped(bnn: BayesianModule) -> list[float]:
    return [layer.p for layer in bnn.net.modules() if isinstance(layer, nn.Dropout)]


def test_dropout_is_on_in_training_and_a_run_says_so(tmp_path: Path) -> None:
    nll = {}
    for name, options in (("with", ["--dropout-input", "0.3"]), ("without", [])):
        with quick_runs():
            as_json("train", "mnist", "--out", tmp_path / name, *MLP, *OPTIONS, *options)
        nll[name] = Run.open(tmp_path / name).history()[-1]["nll"]
        title = (tmp_path / name / "report.html").read_text()
        assert ("Bayes by Backprop, dropout" in title) == (name == "with")
    assert nll["with"] != nll["without"]


@pytest.mark.parametrize("baseline", [None, "sgd", "dropout"])
def test_a_run_from_before_bayesian_dropout_is_the_run_that_it_was(
    baseline: str | None, tmp_path: Path
) -> None:
    """It had the baseline's probabilities among its settings, where they did nothing."""
    config = RunConfig.of("mnist", hidden=(8,), baseline=baseline)
    run = Run.create(tmp_path / "run", config, data_dir=None)
    old = {"dropout_input": 0.2, "dropout_hidden": 0.5, "step": "auto"}
    stored_as(run, 1, old)
    again = Run.open(run.folder)
    assert again.command == run.command
    assert dropped(again.make_module()) == ([0.2, 0.5] if baseline == "dropout" else [])


@pytest.mark.parametrize(
    ("given", "step", "backend"),
    [
        ({}, "auto", "auto"),
        ({}, "fused", "compiled"),
        ({}, "plain", "closed-form"),
        (
            {"estimator": "local", "train_samples": 2, "prior": "gaussian"},
            "plain",
            "closed-form",
        ),
        (
            {"estimator": "local", "train_samples": 2, "prior": "scale-mixture"},
            "plain",
            "autograd",
        ),
    ],
)
def test_a_run_from_before_backends_computes_its_steps_as_before(
    given: dict[str, Any], step: str, backend: str, tmp_path: Path
) -> None:
    config = RunConfig.of("mnist", hidden=(8,), **given)
    run = Run.create(tmp_path / "run", config, data_dir=None)
    stored_as(run, 2, {"step": step})
    assert Run.open(run.folder).config == replace(config, backend=backend)


def stored_as(run: Run, version: int, old: dict[str, Any]) -> None:
    """Write config.json as an earlier version did."""
    path = run.folder / "config.json"
    document = json.loads(path.read_text())
    del document["settings"]["backend"]
    document["settings"] |= old
    path.write_text(json.dumps({**document, "format": version}))
