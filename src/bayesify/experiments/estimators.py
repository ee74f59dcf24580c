"""One network by three estimators of the same gradient: weight sampling, local, Flipout.

2x400 on MNIST, the same settings, seeds and minibatches; only the way that noise enters the passes
differs. Of each: error and nll, how noisy its gradients are, and what its step costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.bench.cases import perceptron
from bayesify.bench.contestants import contestants_of
from bayesify.bench.measuring import Group, measure
from bayesify.datasets import load_images
from bayesify.experiments.cells import cell
from bayesify.experiments.experiment import Context, Experiment, Row, Unit
from bayesify.experiments.networks import curve, settings_of, trained
from bayesify.module import BayesianModule
from bayesify.noise import NoiseKey, Stream
from bayesify.perturbations import Perturbation, WeightSampling
from bayesify.posteriors import MeanFieldGaussian
from bayesify.runs import RunConfig
from bayesify.runs.folder import Run
from bayesify.runs.measure import evaluate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "gradient_variance"]

METHODS = {
    "sampling": "weight sampling",
    "local": "local reparametrisation",
    "flipout": "Flipout",
}
_STEP = "step-time"

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
#: Minibatch and number of draws of which the variance is taken.
_VARIANCE: dict[str, int] = {"batch_size": 128, "repeats": 100}
_TIME: dict[str, Any] = {"width": 400, "batch_size": 128, "rounds": 100}
#: Seconds on one core.
_SECONDS = {"sampling": 90.0, "local": 160.0, "flipout": 220.0, _STEP: 60.0}


def units(seeds: Sequence[int], quick: bool) -> list[Unit]:
    """Three for each seed, and one that times their steps."""
    settings, variance, time = dict(_SETTINGS), dict(_VARIANCE), dict(_TIME)
    if quick:
        settings |= {"hidden": [50], "epochs": 2, "limit": 2000, "test_samples": 10}
        variance["repeats"] = 10
        time |= {"width": 50, "rounds": 3}
    made = [
        Unit(
            name,
            seed,
            {"settings": {**settings, "estimator": name}, "variance": variance},
            5.0 if quick else _SECONDS[name],
            ("mnist",),
        )
        for seed in seeds
        for name in METHODS
    ]
    return [*made, Unit(_STEP, seeds[0], time, 10.0 if quick else _SECONDS[_STEP])]


def run(unit: Unit, context: Context) -> dict[str, Any]:
    """Train and measure one network, or time the steps of all."""
    if unit.name == _STEP:
        return step_time(unit.config)
    settings = settings_of(unit.config["settings"])
    data = load_images(
        "mnist", context.data_dir, limit=settings.get("limit"), progress=context.on_download
    )
    config = RunConfig.of("mnist", **settings, seed=unit.seed)
    bnn, history = trained(config, data, context)
    measured, _ = evaluate(bnn, data, num_samples=config.test_samples, with_train=False)
    size, repeats = unit.config["variance"]["batch_size"], unit.config["variance"]["repeats"]
    inputs, targets = data.train_inputs[:size], data.train_targets[:size]

    def variance(network: BayesianModule, perturbation: Perturbation) -> dict[str, float]:
        network.perturbation = perturbation
        return gradient_variance(network, inputs, targets, repeats)

    own = config.make_perturbation()
    untrained = Run(Path(), config).make_module()  # nothing of which is in a file
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
    """Variance of the nll's gradient over the weights' noise, in nats^2, summed over coordinates.

    Args:
        bnn: at whose weights, and by whose estimator.
        inputs: one minibatch, of shape (B, ...).
        targets: of shape (B, ...).
        repeats: gradients of which the variance is taken, at least 2.
        num_samples: weight samples of each.

    Returns:
        That of the gradient in the means, ``mean``, and in rho, ``rho``.

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
    """Milliseconds of a step of each, and of the plain network's, timed in turns in one run."""
    width, batch = config["width"], config["batch_size"]
    case = perceptron(f"mlp-{width}", width)
    entered = [each for each in contestants_of(case, batch) if each.optimizer == "adam"]
    found = measure([Group(case, batch, entered, with_floor=False)], rounds=config["rounds"])
    keys = ("estimator", "path", "ms_median", "ms_iqr", "ratio")
    rows = [{key: row[key] for key in keys} for row in found.rows]
    return {"steps_ms": rows}


def table(rows: Sequence[Row]) -> str:
    """Error, nll, variance and time by estimator."""
    steps = [each for row in rows if row["unit"] == _STEP for each in row["metrics"]["steps_ms"]]
    lines = [
        "| | error, mean weights | error, averaged | nll, nats | variance in the means, at the "
        "start | at the end | in rho, at the start | at the end | time of a step, fused | plain "
        "path | seeds |",
        "|---" * 11 + "|",
    ]
    for name, title in METHODS.items():
        found = [row["metrics"] for row in rows if row["unit"] == name]
        tests = [each["test"] for each in found]
        cells = [
            cell([test["error_mean_weights"] for test in tests], 2),
            cell([test["error_predictive"] for test in tests], 2),
            cell([test["nll"] for test in tests], 4),
        ]
        for part in ("mean", "rho"):
            cells += [_variance(found, state, part) for state in ("start", "end")]
        for path in ("fused", "plain"):
            ratios = [s["ratio"] for s in steps if (s["estimator"], s["path"]) == (name, path)]
            cells.append(cell(ratios, 2))
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


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """The nll of the training data and the test error by epoch."""
    from bayesify.plots.compared import Curve, curves_compared

    made = {}
    for name, key, title, unit in (
        ("nll", "train_nll_by_epoch", "Training data, sampled weights", "nll (nats per example)"),
        ("error", "test_error_by_epoch", "Test data, mean weights", "test error (%)"),
    ):
        curves = []
        for method, called in METHODS.items():
            runs = [row["metrics"][key] for row in rows if row["unit"] == method]
            if runs:
                curves.append(Curve.by_epoch(called, runs))
        if curves:
            made[f"estimators-{name}"] = curves_compared({title: curves}, ylabel=unit)
    return made


EXPERIMENT = Experiment(
    name="estimators",
    source="Blundell et al. 2015, Kingma et al. 2015 and Wen et al. 2018, side by side",
    reported="lower variance of the gradients; no common table",
    seeds=(0,),
    memory_mb=700,
    units=units,
    run=run,
    table=table,
    figures=figures,
)
