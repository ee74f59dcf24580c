"""The experiments on widths and estimators: quick runs as a whole, and tables of made-up rows."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.killable import Silent3

from bayesify import BayesianModule, Delta, Flipout, LocalReparameterization, WeightSampling
from bayesify.datasets import load_images
from bayesify.module.networks import mlp
from bayesify.reproduce import Context, Experiment, Job, Result, find_experiment, reproduce
from bayesify.reproduce.harness.image_runs import held_out, sampled_weights
from bayesify.reproduce.papers.estimator_comparison import gradient_variance
from bayesify.reproduce.papers.koca_dittmann import REPORTED as KOCA
from bayesify.reproduce.papers.rahmanto.widths import REPORTED as RAHMANTO

pytestmark = [
    pytest.mark.filterwarnings("ignore:the posterior's standard deviations"),
    pytest.mark.filterwarnings("ignore:free energy:UserWarning"),
]
NAMES = ("koca-dittmann", "rahmanto-widths", "estimators")


def only(experiment: Experiment, *names: str) -> Experiment:
    """The quick experiment with some of its jobs, on MNIST alone."""

    def jobs(seeds: Any, quick: bool) -> list[Job]:
        found = [job for job in experiment.jobs(seeds, quick) if job.name in names]
        assert len(found) == len(names)
        return found

    return replace(experiment, jobs=jobs)


SHOWN = {
    "koca-dittmann": ("mnist-200", "mnist-200-less-noise", "plain", "dropout", "mnist-400-long"),
    "rahmanto-widths": ("bayes-400", "dropout-400", "plain-400", "bayes-1200"),
    "estimators": ("sampling", "local", "flipout", "step-time"),
}


def without_times(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if not key.endswith("_ms")}


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
@pytest.mark.parametrize("name", NAMES)
def test_quick_runs_are_whole_and_repeat(name: str, tmp_path: Path) -> None:
    experiment = only(find_experiment(name), *SHOWN[name])
    outcome = reproduce(experiment, tmp_path / "one", Silent3(), quick=True)
    assert [row["job"] for row in outcome.results] == list(SHOWN[name])
    assert all(path.stat().st_size > 10_000 for path in outcome.figures)
    assert outcome.table.read_text().startswith("**Quick run: ")
    json.dumps(outcome.results, allow_nan=False)
    if name == "estimators":
        for row in outcome.results[:3]:
            for state in row["metrics"]["gradient_variance"].values():
                assert (state["own"] == state["sampling"]) == (row["job"] == "sampling")
    again = find_experiment(name).jobs((0,), True)
    for number, job in enumerate(job for job in again if job.name in SHOWN[name]):
        row = outcome.results[number]
        # Of a job of times nothing is left to compare.
        if number in (0, len(outcome.results) - 1) and without_times(row["metrics"]):
            # By another way, too: with nothing kept in between.
            metrics = json.loads(json.dumps(experiment.run(job, Context())))
            assert without_times(metrics) == without_times(row["metrics"])


def test_the_settings_are_those_of_the_documents() -> None:
    jobs = {job.name: job for job in find_experiment("koca-dittmann").jobs((0,), False)}
    for name in ("mnist-1200", "fashion-mnist-200", "mnist-400-long"):
        settings = jobs[name].config["settings"]
        assert (settings["prior"], settings["prior_std"]) == ("gaussian", 1.0)
        assert (settings["optimizer"], settings["schedule"]) == ("sgd", "constant")
        assert settings["lr"] == pytest.approx(0.001 * settings["batch_size"])
        assert settings["init_std"] == pytest.approx(math.log1p(math.exp(-3.0)), abs=1e-4)
        assert (settings["mean_init_std"], settings["kl_warmup"]) == (0.1, 0.0)
    lengths = {name: job.config["settings"]["epochs"] for name, job in jobs.items()}
    assert (lengths["mnist-200"], lengths["mnist-400-long"], lengths["dropout"]) == (10, 228, 50)
    assert {name: jobs[name].config["settings"]["hidden"][0] for name in KOCA} == {
        name: int(parts[-1]) if (parts := re.findall(r"\d+", name)) else 400 for name in KOCA
    }
    for job in find_experiment("rahmanto-widths").jobs((0,), False):
        settings = job.config["settings"]
        if job.config["method"] == "bayes":
            mixture = (settings["pi"], settings["std1"], settings["std2"])
            assert mixture == pytest.approx((0.25, 1.0, math.exp(-8.0)), rel=2e-3)
            assert settings["train_samples"] == 5
        assert settings["hidden"] == [job.config["width"]] * 2


def test_what_is_held_out_is_not_trained_on() -> None:
    data = load_images("mnist", limit=60)
    for generator in (None, torch.Generator().manual_seed(0)):
        parts = held_out(data, 25, generator)
        inside, outside = parts.train_inputs, parts.test_inputs
        assert (len(inside), len(outside)) == (35, 25)
        both = torch.cat([inside, outside])
        assert torch.equal(both.sort(0).values, data.train_inputs.sort(0).values)
        ordered = torch.equal(both, data.train_inputs)
        assert ordered == (generator is None)
        for images, targets in (
            (inside, parts.train_targets),
            (outside, parts.test_targets),
        ):
            places = [int((data.train_inputs == image).all(1).nonzero()) for image in images]
            assert torch.equal(targets, data.train_targets[places])


def test_the_density_of_weights_is_of_a_sample() -> None:
    """Of the means alone it would be narrower: N(0, .3^2) against N(0, .4^2 + .3^2)."""
    net = mlp(300, (300,), 10, init_std=0.3)
    drawn = sampled_weights(BayesianModule(net, init_std=0.4), seed=0).detach()
    assert float(drawn.std()) == pytest.approx(0.5, rel=0.01)
    plain = BayesianModule(net, posterior=Delta)
    assert torch.equal(sampled_weights(plain, seed=0), plain.posterior.mean)


def koca_row(job: str, seed: int, error: float | None) -> Result:
    [made] = [u for u in find_experiment("koca-dittmann").jobs((seed,), False) if u.name == job]
    metrics: dict[str, Any] = {"diverged": "at step 17"}
    if error is not None:
        test = {"error_mean_weights": error, "error_predictive": error + 0.1, "nll": 0.07}
        curves = {f"{part}_error_by_epoch": [9.0, error] for part in ("test", "train")}
        metrics = {"test": test, **curves}
    return {"job": job, "seed": seed, "config": made.config, "metrics": metrics}


def test_the_table_of_widths_sets_ours_beside_theirs() -> None:
    table = find_experiment("koca-dittmann").table
    rows = [koca_row("mnist-400", 0, 2.2), koca_row("mnist-400", 1, 2.4)]
    rows += [koca_row("mnist-400-less-noise", 0, 2.0), koca_row("plain", 0, 1.8)]
    text = table(rows)
    assert (
        "| MNIST, 2x400 | 10 | 2.33 | 2.30 +- 0.10 | 2.40 +- 0.10 | 0.0700 +- 0.0000 | 2.00 | 2.10 "
        "| 0.0700 | 2 and 1 |"
    ) in text
    assert "| MNIST, plain, Adam | 50 | 1.74 | 1.80 |  | 0.0700 |  |  |  | 1 |" in text
    assert (
        "With the study's settings: no higher than reported in 1 of 1. With a smaller start and a "
        "falling rate: no higher than reported in 1 of 1. Plain and dropout networks: no higher "
        "than reported in 0 of 1; higher: plain."
    ) in text
    assert KOCA["mnist-400"] == 2.33
    assert KOCA["mnist-400-long"] == 1.63
    assert KOCA["fashion-mnist-200"] == 12.63


def test_what_diverged_is_said_and_is_no_success() -> None:
    job = "fashion-mnist-800"
    table = find_experiment("koca-dittmann").table
    assert "| Fashion-MNIST, 2x800 | 10 | 12.81 | diverges |" in table([koca_row(job, 0, None)])
    both = table([koca_row(job, 0, None), koca_row(job, 1, 12.0)])
    assert "| 12.00 (1 diverged) | 12.10 |" in both
    assert "no higher than reported in 0 of 1; diverged: fashion-mnist-800." in both
    alone = table([koca_row("mnist-200-less-noise", 0, 2.0)])
    assert "| MNIST, 2x200 | 10 | 2.51 |  |  |  | 2.00 | 2.10 | 0.0700 | 1 |" in alone
    assert find_experiment("koca-dittmann").figures([koca_row(job, 0, None)]) == {}


def test_a_run_that_diverges_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = find_experiment("koca-dittmann")
    [job] = [u for u in experiment.jobs((0,), True) if u.name == "mnist-200"]
    settings = {**job.config["settings"], "lr": 1e6, "limit": 1000}
    metrics = experiment.run(replace(job, config={**job.config, "settings": settings}), Context())
    assert set(metrics) == {"diverged"}
    assert "NaN or infinite" in metrics["diverged"]


def widths_row(method: str, width: int, seed: int, accuracy: float) -> Result:
    jobs = find_experiment("rahmanto-widths").jobs((seed,), False)
    [made] = [job for job in jobs if job.name == f"{method}-{width}"]
    names = ("train_accuracy", "test_accuracy", "train_nll", "test_nll")
    metrics = {
        "test": {"nll": 0.05},
        "test_accuracy_mean_weights": accuracy,
        "test_accuracy_averaged": accuracy + 0.1,
        "curves": {name: [90.0, accuracy] for name in names},
    }
    config = made.config
    return {"job": made.name, "seed": seed, "config": config, "metrics": metrics, "quick": False}


def test_the_documents_widths_and_its_files() -> None:
    experiment = find_experiment("rahmanto-widths")
    rows = [widths_row("bayes", 400, 0, 98.2), widths_row("bayes", 400, 1, 98.4)]
    rows += [widths_row("plain", 1200, 0, 98.5)]
    text = experiment.table(rows)
    assert text.startswith("**15 epochs of the document's 300.**")
    assert (
        "| 2x400 | Bayes by Backprop | 15 | 98.07 | 98.30 +- 0.10 | 98.40 +- 0.10 | "
        "0.0500 +- 0.0000 | 2 |"
    ) in text
    assert "| 2x1200 | plain network | 15 | 98.41 | 98.50 |  | 0.0500 | 1 |" in text
    assert RAHMANTO["bayes"] == (98.07, 98.05, 98.00)
    files = experiment.files(rows)
    curves = list(csv.DictReader(io.StringIO(files["curves.csv"])))
    assert len(curves) == 6
    assert curves[3] == {
        "method": "bayes",
        "width": "400",
        "seed": "1",
        "epoch": "2",
        "quick": "false",
        "train_accuracy": "98.4",
        "test_accuracy": "98.4",
        "train_nll": "98.4",
        "test_nll": "98.4",
    }
    summary = list(csv.DictReader(io.StringIO(files["summary.csv"])))
    assert [line["accuracy_averaged"] for line in summary] == ["98.30", "98.50", "98.60"]
    assert [
        panel.get_title(loc="left") for panel in experiment.figures(rows)["rahmanto-widths"].axes
    ] == ["2x400", "2x1200"]


def test_estimators_are_compared_at_the_same_weights() -> None:
    experiment = find_experiment("estimators")
    variance = {"mean": 2.0, "rho": 1.0}
    state = {"own": {"mean": 0.5, "rho": 0.01}, "sampling": variance}
    metrics = {
        "test": {"error_mean_weights": 1.5, "error_predictive": 1.6, "nll": 0.05},
        "gradient_variance": {"start": state, "end": {"own": variance, "sampling": variance}},
    }
    rows = [
        {"job": "local", "seed": 0, "metrics": metrics},
        {
            "job": "step-time",
            "seed": 0,
            "metrics": {"steps_ms": [{"estimator": "local", "path": "fused", "ratio": 2.25}]},
        },
    ]
    text = experiment.table(rows)
    assert (
        "| local reparametrisation | 1.50 | 1.60 | 0.0500 | 0.25 | 1 | 0.01 | 1 | 2.25 | - | 1 |"
    ) in text
    assert "| Flipout | - | - | - | - | - | - | - | - | - | 0 |" in text


@pytest.mark.slow
def test_the_variance_of_the_gradient_is_the_textbooks() -> None:
    """Against the gradients themselves, for each estimator: the same noise, the same sums."""
    x, y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    for estimator in (WeightSampling(), LocalReparameterization(), Flipout()):
        bnn = BayesianModule(mlp(4, (5,), 3), init_std=0.1, estimator=estimator)
        found = gradient_variance(bnn, x, y, repeats=20)
        assert found["mean"] > 0.0
        assert found["rho"] > 0.0
    bnn = BayesianModule(mlp(4, (5,), 3).double(), init_std=0.1)
    noise, gradients = torch.Generator().manual_seed(1), []
    for _ in range(1500):
        draw = bnn.posterior.draw(
            torch.randn(1, bnn.layout.num_weights, generator=noise, dtype=torch.float64)
        )
        outputs = torch.func.functional_call(
            bnn.to_module(), bnn.layout.unflatten(draw.weights[0]), (x.double(),)
        )
        nll = torch.nn.functional.cross_entropy(outputs, y)
        gradients.append(torch.autograd.grad(nll, bnn.posterior.mean)[0])
    stacked = torch.stack(gradients)
    truth = float(stacked.var(0).sum())
    per_draw = (stacked - stacked.mean(0)).square().sum(1)
    found = gradient_variance(bnn, x.double(), y, repeats=1500)["mean"]
    # Both are means of 1500 draws; five standard errors, two-sided, are wrong once in 2 million.
    assert abs(found - truth) < 5.0 * math.sqrt(2.0) * float(per_draw.std()) / math.sqrt(1500)
    assert abs(2.0 * found - truth) > 5.0 * math.sqrt(2.0) * float(per_draw.std()) / math.sqrt(1500)
