"""Estimators, the convolutional network and half precision on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.test_cli import as_json, quick_runs
from torch import nn

from bayesify import Flipout, LocalReparameterization, Perturbation, WeightSampling
from bayesify.runs import Run

OPTIONS = ["--epochs", "1", "--limit", "100", "--batch-size", "50", "--test-samples", "2"]
MLP = ["--hidden", "8"]
LENET = ["--net", "lenet5"]
CASES: dict[str, tuple[list[str], Perturbation, str]] = {
    "sampling": (MLP, WeightSampling(), "sampled"),
    "antithetic": (MLP, WeightSampling(antithetic=True), "sampled"),
    "local": (MLP, LocalReparameterization(), "exact"),
    "local-per-position": (LENET, LocalReparameterization(per_position=True), "per-position"),
    "flipout": (LENET, Flipout(), "exact"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_trains_with_the_estimator_that_was_asked_for(name: str, tmp_path: Path) -> None:
    options, perturbation, treatment = CASES[name]
    out = tmp_path / "run"
    with quick_runs():
        as_json("train", "mnist", "--out", out, "--estimator", name, *options, *OPTIONS)
        found = as_json("inspect", out)
    assert Run.open(out).load_module().perturbation == perturbation
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


@pytest.mark.parametrize("baseline", ["sgd", "dropout"])
def test_a_convolutional_baseline(baseline: str, tmp_path: Path) -> None:
    with quick_runs():
        options = ["--baseline", baseline, *LENET, *OPTIONS[:-2]]
        metrics = as_json("train", "mnist", "--out", tmp_path / "run", *options)
        found = as_json("inspect", tmp_path / "run")
    assert metrics["num_weights"] == 61_706
    assert found["parameters"][0]["treatment"] is None


PROBABILITIES = {
    "none": ([], []),
    "pixels": (["--dropout-input", "0.2"], [0.2]),
    "both": (["--dropout-input", "0.2", "--dropout-hidden", "0.3"], [0.2, 0.3]),
    "baseline": (["--baseline", "dropout"], [0.2, 0.5]),
}


@pytest.mark.parametrize("name", PROBABILITIES)
def test_units_are_dropped_in_training_where_it_is_asked_for(name: str, tmp_path: Path) -> None:
    options, asked = PROBABILITIES[name]
    out = tmp_path / "run"
    samples = [] if "--baseline" in options else OPTIONS[-2:]
    with quick_runs():
        as_json("train", "mnist", "--out", out, *MLP, *OPTIONS[:-2], *samples, *options)
    bnn = Run.open(out).load_module()
    assert [layer.p for layer in bnn.net.modules() if isinstance(layer, nn.Dropout)] == asked
    # Not in answers: they are the same each time.
    inputs = torch.rand(5, 784)
    answers = [bnn.predict(inputs, num_samples=2).mean for _ in range(2)]
    assert torch.equal(*answers)


def test_dropout_is_on_in_training_and_a_run_says_so(tmp_path: Path) -> None:
    nll = {}
    for name, options in (("with", ["--dropout-input", "0.3"]), ("without", [])):
        with quick_runs():
            as_json("train", "mnist", "--out", tmp_path / name, *MLP, *OPTIONS, *options)
        nll[name] = Run.open(tmp_path / name).history()[-1]["nll"]
        title = (tmp_path / name / "report.html").read_text()
        assert ("Bayes by Backprop, dropout" in title) == (name == "with")
    assert nll["with"] != nll["without"]


@pytest.mark.parametrize("options", [[], ["--baseline", "sgd"], ["--baseline", "dropout"]])
def test_a_run_from_before_bayesian_dropout_is_the_run_that_it_was(
    options: list[str], tmp_path: Path
) -> None:
    """It had the baseline's probabilities among its settings, where they did nothing."""
    samples = [] if options else OPTIONS[-2:]
    with quick_runs():
        as_json("train", "mnist", "--out", tmp_path, *MLP, *OPTIONS[:-2], *samples, *options)
    path = tmp_path / "config.json"
    document = json.loads(path.read_text())
    command = Run.open(tmp_path).command
    del document["format"]
    document["settings"] |= {"dropout_input": 0.2, "dropout_hidden": 0.5}
    path.write_text(json.dumps(document))
    run = Run.open(tmp_path)
    assert run.command == command
    layers = run.load_module().net.modules()
    drops = [layer.p for layer in layers if isinstance(layer, nn.Dropout)]
    assert drops == ([0.2, 0.5] if "dropout" in options else [])
