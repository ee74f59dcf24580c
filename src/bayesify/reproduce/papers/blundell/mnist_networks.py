"""Train, measure and prune a network for the paper's experiments on MNIST; settings and references.

Blundell et al. 2015, section 5.1: two hidden layers of ReLU units, pixels divided by 126.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bayesify.app.runs import RunConfig
from bayesify.app.runs.measure import evaluate, prune_table
from bayesify.datasets import ImageData
from bayesify.distributions.posteriors import Delta
from bayesify.metrics import classification_metrics
from bayesify.module.bayesian import BayesianModule
from bayesify.module.pruning import snr_decibels
from bayesify.noise.keys import Stream, derived_seed
from bayesify.reproduce.harness.experiment import Context, Job, Result
from bayesify.reproduce.harness.image_runs import (
    curve,
    histogram,
    mnist_of,
    sampled_weights,
    settings_of,
    trained,
)
from bayesify.reproduce.papers.blundell.weight_average import TrajectoryMean
from bayesify.training.deep_ensemble import DeepEnsemble
from bayesify.training.history import History

__all__ = [
    "DROPOUT",
    "DROPPED",
    "FRACTIONS",
    "GAUSSIAN",
    "PRUNABLE",
    "REPORTED",
    "REPORTED_PRUNED",
    "SCALE_MIXTURE",
    "SGD",
    "TEMPERED",
    "WIDTHS",
    "by_job",
    "network_job",
    "pruned_errors",
    "run_network",
]

WIDTHS = (400, 800, 1200)
#: Table 1: test error in percent, by method, in the order of the widths.
REPORTED: dict[str, tuple[float, float, float]] = {
    "sgd": (1.83, 1.84, 1.88),
    "dropout": (1.51, 1.33, 1.36),
    "gaussian": (1.82, 1.99, 2.04),
    "scale-mixture": (1.36, 1.34, 1.32),
}
#: Table 2, as others quote it: test error in percent of 2x1200 with a share of weights removed.
REPORTED_PRUNED = {0.0: 1.24, 0.5: 1.24, 0.75: 1.24, 0.95: 1.29, 0.98: 1.39}

_ALL: dict[str, Any] = {"schedule": "cosine", "batch_size": 256, "precision": "bfloat16"}
SGD: dict[str, Any] = {**_ALL, "baseline": "sgd", "lr": 0.1, "momentum": 0.9, "epochs": 40}
DROPOUT: dict[str, Any] = {
    **_ALL,
    "baseline": "dropout",
    "dropout_input": 0.2,
    "dropout_hidden": 0.5,
    "lr": 0.1,
    "momentum": 0.9,
    "epochs": 60,
}
_COMMON: dict[str, Any] = {
    **_ALL,
    "estimator": "sampling",
    "optimizer": "adam",
    "lr": 1.5e-3,
    "test_samples": 100,
}
#: The evidence lower bound, with the best settings of ``blundell-recipe``. The spike has a std that
#: weights can reach: the paper's exp(-8) is far below the std at the start, and its spike stays
#: empty. The KL rises late, when the learning rate is low.
SCALE_MIXTURE: dict[str, Any] = {
    **_COMMON,
    "prior": "scale-mixture",
    "pi": 0.1,
    "std1": 1.0,
    "std2": 0.01,
    "init_std": 0.02,
    "rho_lr_scale": 2.0,
    "kl_warmup": 0.95,
    "kl_warmup_power": 4.0,
    "epochs": 100,
}
#: The same with a fifth of the pixels dropped at random from each training image. This prevents
#: over-fitting while the KL is weak, so that the KL can rise earlier.
DROPPED: dict[str, Any] = {**SCALE_MIXTURE, "dropout_input": 0.2, "kl_warmup_power": 2.0}
GAUSSIAN: dict[str, Any] = {
    **_COMMON,
    "prior": "gaussian",
    "prior_std": 0.4,
    "init_std": 0.02,
    "rho_lr_scale": 2.0,
    "kl_warmup": 0.95,
    "kl_warmup_power": 4.0,
    "epochs": 40,
}
_TEMPERED: dict[str, Any] = {
    name: value for name, value in SCALE_MIXTURE.items() if name != "kl_warmup_power"
} | {"kl_warmup": 0.2}
#: Temperature 0.1, the paper's spike and many small steps.
TEMPERED: dict[str, Any] = {
    **_TEMPERED,
    "lr": 5e-4,
    "batch_size": 128,
    "epochs": 200,
    "pi": 0.75,
    "std2": math.exp(-8.0),
    "init_std": 0.04,
    "temperature": 0.1,
}
#: Temperature 0.03, with the spike of ``SCALE_MIXTURE``.
PRUNABLE: dict[str, Any] = {**_TEMPERED, "temperature": 0.03}
FRACTIONS = (0.5, 0.75, 0.95, 0.98, 0.99)
#: Weight samples behind each averaged error of a pruned network.
_PRUNED_SAMPLES = 10
#: Number of quantiles of the signal-to-noise ratios, evenly spaced in probability.
_QUANTILES = 2001
#: Range of the histogram of weights; almost no weight is outside.
_LIMIT = 0.3
_QUICK: dict[str, Any] = {"epochs": 2, "limit": 2000, "batch_size": 32}


def network_job(
    name: str, seed: int, settings: Mapping[str, Any], seconds: float, *, quick: bool, **more: Any
) -> Job:
    """Return a job that trains one network or an ensemble.

    Args:
        name: name of the job.
        seed: seed of all randomness.
        settings: settings of a run, see ``RunConfig``.
        seconds: estimated time on one core.
        quick: whether to train a small network on few images instead.
        more: further settings of the job. ``held_out``: number of training images that take the
            place of the test images; ``members``: size of the ensemble; ``average_last``: the last
            part of the epochs, from 0 to 1, over which the posterior's parameters are averaged;
            ``with_snr``: whether to keep the distribution of the signal-to-noise ratio.
    """
    chosen = dict(settings)
    if quick:
        chosen |= {**_QUICK, "hidden": [width // 20 for width in chosen["hidden"]]}
        if "baseline" not in chosen:
            chosen["test_samples"] = 5
        seconds = 3.0 * more.get("members", 1)
        more |= {"held_out": 500} if "held_out" in more else {}
    return Job(name, seed, {"settings": chosen, **more}, seconds, ("mnist",))


def run_network(job: Job, context: Context) -> dict[str, Any]:
    """Train the network of a job, and measure it after the last epoch."""
    data = mnist_of(job, context)
    if job.config.get("members", 1) > 1:
        return _ensemble(job, context, data)
    config = RunConfig.of("mnist", **settings_of(job.config["settings"]), seed=job.seed)
    if "average_last" in job.config:
        average = TrajectoryMean(config.epochs, job.config["average_last"])
        # Training starts anew after an interruption: a resumed run would lack the earlier epochs
        # in its mean.
        bnn, history = trained(config, data, replace(context, work=None), average.add)
        average.install(bnn)
    else:
        bnn, history = trained(config, data, context)
    measured, _ = evaluate(bnn, data, num_samples=config.test_samples, with_train=False)
    metrics: dict[str, Any] = {
        "test": measured["test"],
        "curves": _curves(history),
        "density": histogram(sampled_weights(bnn, job.seed), _LIMIT),
    }
    if isinstance(bnn.posterior, Delta):
        return metrics
    metrics |= {
        "kl_nats": measured["kl_nats"],
        "std_median": history[-1]["std_median"],
        "std_residual": history[-1]["std_residual"],
        "pruned": prune_table(bnn, data, FRACTIONS, num_samples=_PRUNED_SAMPLES),
    }
    if job.config.get("with_snr"):
        metrics["snr_decibels"] = _quantiles(snr_decibels(bnn))
    return metrics


def _ensemble(job: Job, context: Context, data: ImageData) -> dict[str, Any]:
    """Train networks independently, and measure their common prediction."""
    members, count = [], job.config["members"]
    settings = settings_of(job.config["settings"])
    for number in range(count):
        seed = derived_seed(job.seed, Stream.INITIALIZATION, number)
        config = RunConfig.of("mnist", **settings, seed=seed)
        bnn, _ = trained(config, data, context.part(f"member-{number}", number, count))
        members.append(bnn)
    together = DeepEnsemble(members).predict(data.test_inputs, config.test_samples)
    at_means = DeepEnsemble([_at_its_mean(bnn) for bnn in members]).predict(data.test_inputs, 1)
    test = classification_metrics(together, at_means.mean, data.test_targets)
    return {"test": test}


def _at_its_mean(bnn: BayesianModule) -> BayesianModule:
    net = bnn.to_module()
    return BayesianModule(net, likelihood=bnn.likelihood, posterior=Delta, seed=bnn.seed)


def _curves(history: History) -> dict[str, list[float]]:
    names = {"test_error": "validation_error", "test_nll": "validation_nll", "train_nll": "nll"}
    return {ours: curve(history, key) for ours, key in names.items()}


def _quantiles(decibels: Tensor) -> list[float]:
    """Return ordered quantiles; -inf, from a mean of exactly 0, is clamped as JSON has no inf."""
    ordered = decibels.double().clamp_min(-1e3).sort().values
    places = torch.linspace(0, len(ordered) - 1, _QUANTILES, dtype=torch.float64).round().long()
    return [round(value, 3) for value in ordered[places].tolist()]


def by_job(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Group results by job, in their order."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result["job"], []).append(result)
    return found


def pruned_errors(of: Sequence[Result], fraction: float) -> list[float]:
    """Return the errors in percent of the pruned networks with this share of weights removed."""
    parts = [part for result in of for part in result["metrics"].get("pruned", [])]
    return [part["error_mean_weights"] for part in parts if part["fraction"] == fraction]
