"""Three estimators of the same gradient on one network: weight sampling, local, Flipout.

2x400 units on MNIST with the same settings, seeds and minibatches; only the way that noise enters
the forward pass differs. Measured for each: error and nll, the variance of the gradients, and the
time of a training step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.app.bench.cases import perceptron
from bayesify.app.bench.contestants import contestants_of
from bayesify.app.bench.measuring import Group, measure
from bayesify.app.runs import RunConfig
from bayesify.app.runs.folder import Run
from bayesify.app.runs.measure import evaluate
from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.estimators import Estimator, WeightSampling
from bayesify.module.bayesian import BayesianModule
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.reproduce.harness.experiment import (
    Context,
    Experiment,
    Job,
    Result,
    of_job,
)
from bayesify.reproduce.harness.image_runs import curve, mnist_of, settings_of, trained
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "gradient_variance"]

METHODS = {
    "sampling": "weight sampling",
    "local": "local reparametrisation",
    "flipout": "Flipout",
}
_STEP = "step-time"
#: Names of the timed backends, with those in results of earlier versions.
_PATHS = (("compiled", "fused"), ("closed-form", "plain"))

_SETTINGS: dict[str, Any] = {
    "hidden": [400, 400],
    "prior": "gaussian",
    "prior_std": 0.4,
    "init_std": 0.02,
    "optimizer": "adam",
    "lr": 1e-3,
    "rho_lr_scale": 1.0,
    "schedule": "cosine",
    "kl_warmup": 0.5,
    "epochs": 20,
    "batch_size": 256,
    "test_samples": 100,
}
#: Size of the minibatch and number of draws for the variance of the gradient.
_VARIANCE: dict[str, int] = {"batch_size": 128, "repeats": 100}
_TIME: dict[str, Any] = {"width": 400, "batch_size": 128, "rounds": 100}
#: Seconds on one core.
_SECONDS = {"sampling": 90.0, "local": 160.0, "flipout": 220.0, _STEP: 60.0}


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return three jobs for each seed, and one that times their training steps."""
    settings, variance, time = dict(_SETTINGS), dict(_VARIANCE), dict(_TIME)
    if quick:
        settings |= {"hidden": [50], "epochs": 2, "limit": 2000, "test_samples": 10}
        variance["repeats"] = 10
        time |= {"width": 50, "rounds": 3}
    made = [
        Job(
            name,
            seed,
            {"settings": {**settings, "estimator": name}, "variance": variance},
            5.0 if quick else _SECONDS[name],
            ("mnist",),
        )
        for seed in seeds
        for name in METHODS
    ]
    return [*made, Job(_STEP, seeds[0], time, 10.0 if quick else _SECONDS[_STEP])]


def run(job: Job, context: Context) -> dict[str, Any]:
    """Train and measure one network, or time the training steps of all estimators."""
    if job.name == _STEP:
        return step_time(job.config)
    settings = settings_of(job.config["settings"])
    data = mnist_of(job, context)
    config = RunConfig.of("mnist", **settings, seed=job.seed)
    bnn, history = trained(config, data, context)
    measured, _ = evaluate(bnn, data, num_samples=config.test_samples, with_train=False)
    size, repeats = job.config["variance"]["batch_size"], job.config["variance"]["repeats"]
    inputs, targets = data.train_inputs[:size], data.train_targets[:size]

    def variance(network: BayesianModule, estimator: Estimator) -> dict[str, float]:
        network.estimator = estimator
        return gradient_variance(network, inputs, targets, repeats)

    own = config.make_estimator()
    untrained = Run(Path(), config).make_module()  # the folder of an untrained run is not used
    return {
        "test": measured["test"],
        "kl_nats": measured["kl_nats"],
        "test_error_by_epoch": curve(history, "validation_error"),
        "train_nll_by_epoch": curve(history, "nll"),
        "gradient_variance": {
            state: {"own": variance(network, own), "sampling": variance(network, WeightSampling())}
            for state, network in (("start", untrained), ("end", bnn))
        },
    }


def gradient_variance(
    bnn: BayesianModule, inputs: Tensor, targets: Tensor, repeats: int, num_samples: int = 1
) -> dict[str, float]:
    """Estimate the variance of the nll's gradient over the noise, in nats^2, summed over weights.

    Args:
        bnn: network with its weights and its estimator.
        inputs: one minibatch, of shape (B, ...).
        targets: its targets, of shape (B, ...).
        repeats: number of gradients from which the variance is estimated, at least 2.
        num_samples: number of weight samples of each gradient.

    Returns:
        ``mean``, the variance of the gradient in the means, and ``rho``, that in rho.

    Example:
        >>> bnn = BayesianModule(torch.nn.Linear(3, 2))
        >>> x, y = torch.ones(4, 3), torch.tensor([0, 1, 0, 1])
        >>> gradient_variance(bnn, x, y, repeats=5)["mean"] > 0.0
        True
    """
    posterior = bnn.posterior
    assert isinstance(posterior, MeanFieldGaussian)
    vectors = {"mean": posterior.mean, "rho": posterior.rho}
    sums = {name: torch.zeros(2, vector.numel()).double() for name, vector in vectors.items()}
    for repeat in range(repeats):
        key = NoiseKey(bnn.seed, Stream.TRAINING, repeat)
        outputs, _ = bnn.sample_outputs(inputs, key, range(num_samples))
        nll = -bnn.likelihood.log_prob(outputs, targets).mean()
        gradients = torch.autograd.grad(nll, list(vectors.values()))
        for name, gradient in zip(vectors, gradients, strict=True):
            sums[name] += torch.stack([gradient, gradient.square()]).double()
    return {
        name: float((squares - total.square() / repeats).sum() / (repeats - 1))
        for name, (total, squares) in sums.items()
    }


def step_time(config: Mapping[str, Any]) -> dict[str, Any]:
    """Time a training step of each estimator and of the plain network, in turns, in ms."""
    width, batch = config["width"], config["batch_size"]
    case = perceptron(f"mlp-{width}", width)
    entered = [each for each in contestants_of(case, batch) if each.optimizer == "adam"]
    found = measure([Group(case, batch, entered, with_floor=False)], rounds=config["rounds"])
    keys = ("estimator", "path", "ms_median", "ms_iqr", "ratio")
    return {"steps_ms": [{key: row[key] for key in keys} for row in found.rows]}


def table(results: Sequence[Result]) -> str:
    """Return the table of error, nll, variance and time by estimator."""
    steps = [each for result in of_job(results, _STEP) for each in result["metrics"]["steps_ms"]]
    lines = table_head(
        "| | error, mean weights | error, averaged | nll, nats | variance in the means, at the "
        "start | at the end | in rho, at the start | at the end | time of a step, compiled | "
        "closed-form | seeds |"
    )
    for name, title in METHODS.items():
        found = [result["metrics"] for result in of_job(results, name)]
        tests = [each["test"] for each in found]
        cells = [
            mean_and_error([test["error_mean_weights"] for test in tests], 2),
            mean_and_error([test["error_predictive"] for test in tests], 2),
            mean_and_error([test["nll"] for test in tests], 4),
        ]
        for part in ("mean", "rho"):
            cells += [_variance(found, state, part) for state in ("start", "end")]
        for paths in _PATHS:
            ratios = [s["ratio"] for s in steps if s["estimator"] == name and s["path"] in paths]
            cells.append(mean_and_error(ratios, 2))
        lines.append(f"| {title} | {' | '.join(cells)} | {len(found)} |")
    return (
        "Test error in percent and nll, mean +- standard error over seeds. Variance: of the nll's "
        "gradient over the noise, on one minibatch, relative to weight sampling's at the same "
        "weights, which are those before training and each network's own after it (geometric mean "
        "over seeds). Time: relative to the plain network's step with Adam, timed in turns.\n\n"
        + "\n".join(lines)
        + "\n"
    )


def _variance(found: Sequence[Mapping[str, Any]], state: str, part: str) -> str:
    ratios = []
    for metrics in found:
        measured = metrics["gradient_variance"][state]
        ratios.append(measured["own"][part] / measured["sampling"][part])
    return f"{geometric_mean(ratios):.3g}" if ratios else "-"


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the nll of the training data and the test error by epoch."""
    from bayesify.plots.compared import Curve, curves_compared

    made = {}
    for name, key, title, job in (
        ("nll", "train_nll_by_epoch", "Training data, sampled weights", "nll (nats per example)"),
        ("error", "test_error_by_epoch", "Test data, mean weights", "test error (%)"),
    ):
        curves = []
        for method, called in METHODS.items():
            runs = [result["metrics"][key] for result in of_job(results, method)]
            if runs:
                curves.append(Curve.by_epoch(called, runs))
        if curves:
            made[f"estimators-{name}"] = curves_compared({title: curves}, ylabel=job)
    return made


EXPERIMENT = Experiment(
    name="estimators",
    source="Blundell et al. 2015, Kingma et al. 2015 and Wen et al. 2018, side by side",
    reported="lower variance of the gradients; no common table",
    seeds=(0,),
    memory_mb=700,
    jobs=jobs,
    run=run,
    table=table,
    figures=figures,
    on_gpu=True,
)
