"""Uncertainty of networks trained on MNIST when they are given Fashion-MNIST.

Four ways to train a network of 2x400 units, each for the same number of epochs by the code of
``bayesify train``: Bayes by Backprop with two settings; five plain networks, measured one by one
and as a deep ensemble; dropout, measured with and without dropout at test time. Measured for each:
error, nll, Brier score and calibration error on MNIST's test images, and how well its uncertainty
separates the 10,000 test images of Fashion-MNIST from them. No setting was chosen by the latter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.app.runs import RunConfig
from bayesify.datasets import ImageData
from bayesify.metrics import brier, error_percent, expected_calibration_error, nll, ood_auroc
from bayesify.module.bayesian import BayesianModule
from bayesify.prediction import CategoricalPredictive
from bayesify.reproduce.harness.experiment import Context, Experiment, Job, Result
from bayesify.reproduce.harness.image_runs import images_of, trained
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error, standard_error
from bayesify.training.deep_ensemble import DeepEnsemble
from bayesify.training.mc_dropout import MCDropout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "METHODS", "measure", "thinned"]

INSIDE, OUTSIDE = "mnist", "fashion-mnist"

_COMMON: dict[str, Any] = {"hidden": [400, 400], "epochs": 20, "schedule": "cosine"}
_BAYES: dict[str, Any] = {
    "estimator": "sampling",
    "optimizer": "adam",
    "init_std": 0.02,
    "batch_size": 256,
    "test_samples": 100,
}
_MOMENTUM: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.9, "batch_size": 128}

#: By job: its name in the table, and settings of ``bayesify train``. The settings of all but
#: ``bayes-wide`` are the defaults, except for the number of epochs.
METHODS: dict[str, dict[str, Any]] = {
    "bayes": {
        "method": "Bayes by Backprop, defaults",
        "settings": {
            **_COMMON,
            **_BAYES,
            "prior": "scale-mixture",
            "pi": 0.1,
            "std1": 0.5,
            "std2": 0.01,
            "kl_warmup": 0.95,
            "kl_warmup_power": 2.0,
            "lr": 1.82e-3,
            "rho_lr_scale": 1.5,
        },
    },
    "bayes-wide": {
        "method": "Bayes by Backprop, wide prior",
        "settings": {
            **_COMMON,
            **_BAYES,
            "prior": "gaussian",
            "prior_std": 0.4,
            "kl_warmup": 0.5,
            "lr": 1e-3,
            "rho_lr_scale": 1.0,
        },
    },
    "plain": {
        "method": "ensemble of 5",
        "members": 5,
        "settings": {**_COMMON, **_MOMENTUM, "baseline": "sgd", "lr": 0.1},
    },
    "dropout": {
        "method": "MC dropout",
        "passes": 100,
        "settings": {
            **_COMMON,
            **_MOMENTUM,
            "baseline": "dropout",
            "lr": 0.02,
            "dropout_input": 0.2,
            "dropout_hidden": 0.5,
        },
    },
}
#: Seconds on one core.
_SECONDS = {"bayes": 120.0, "bayes-wide": 120.0, "plain": 420.0, "dropout": 250.0}
_QUICK = {"hidden": [50], "epochs": 2, "limit": 2000}
_QUICK_SAMPLES = 10
#: Number of ordered uncertainties that a result keeps for the histogram.
_KEPT = 500


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return four jobs for each seed, seed by seed, so that a part of the results is a table."""
    made = []
    for seed in seeds:
        for name, method in METHODS.items():
            config = {"inside": INSIDE, "outside": OUTSIDE, **method}
            seconds = _SECONDS[name]
            if quick:
                settings = {**method["settings"], **_QUICK}
                for holder, key in ((settings, "test_samples"), (config, "passes")):
                    if key in holder:
                        holder[key] = _QUICK_SAMPLES
                config["settings"] = settings
                seconds = 5.0
            made.append(Job(name, seed, config, seconds, (INSIDE, OUTSIDE)))
    return made


def run(job: Job, context: Context) -> dict[str, Any]:
    """Train the networks of one method and seed, and measure them.

    Raises:
        DataError: a data set is missing; raised before anything is trained.
    """
    config = job.config
    settings = {**config["settings"], "hidden": tuple(config["settings"]["hidden"])}
    limit = settings.get("limit")
    inside = images_of(context, config["inside"], limit)
    outside = images_of(context, config["outside"], 1).test_inputs
    count = config.get("members", 1)
    found = []
    for member in range(count):
        # No two networks of the experiment have the same initial values.
        made = RunConfig.of(config["inside"], **settings, seed=count * job.seed + member)
        found.append(trained(made, inside, context.part(f"network-{member}", member, count)))
    bnns = [bnn for bnn, _ in found]
    if count > 1:
        metrics = measure(DeepEnsemble(bnns), inside, outside, 1)
    elif "passes" in config:
        metrics = measure(MCDropout(bnns[0], seed=job.seed), inside, outside, config["passes"])
    else:
        metrics = measure(bnns[0], inside, outside, settings["test_samples"])
    if "baseline" in settings:  # networks with point weights are measured one by one, too
        metrics["alone"] = [measure(bnn, inside, outside, 1, epistemic=False) for bnn in bnns]
    metrics["train_nll"] = [history[-1]["nll"] for _, history in found]
    if "baseline" not in settings:
        metrics["kl_nats"] = found[0][1][-1]["kl"]
    return metrics


def measure(
    network: BayesianModule | MCDropout | DeepEnsemble,
    inside: ImageData,
    outside: Tensor,
    num_samples: int,
    *,
    epistemic: bool = True,
) -> dict[str, Any]:
    """Measure a network on data like its training data and on data of another kind.

    Args:
        network: trained network.
        inside: data like the training data; the test part is used.
        outside: inputs of another kind, shape (M, D).
        num_samples: number of weight samples or dropout masks.
        epistemic: whether the network has epistemic uncertainty.

    Returns:
        ``test`` with ``error`` (percent), ``nll`` (nats), ``brier`` and ``ece``; ``auroc`` by
        ``entropy``, ``max_probability`` and ``mutual_information``; ``mutual_information`` with
        some of those ``inside`` and ``outside``, see :func:`thinned`.
    """
    near = network.predict(inside.test_inputs, num_samples)
    far = network.predict(outside, num_samples)
    assert isinstance(near, CategoricalPredictive)
    assert isinstance(far, CategoricalPredictive)
    probs, targets = near.mean, inside.test_targets
    metrics: dict[str, Any] = {
        "test": {
            "error": error_percent(probs, targets),
            "nll": nll(near.log_mean, targets),
            "brier": brier(probs, targets),
            "ece": expected_calibration_error(probs, targets),
        },
        "auroc": {
            "entropy": ood_auroc(near.total, far.total),
            "max_probability": ood_auroc(_doubt(near), _doubt(far)),
        },
    }
    if epistemic:
        metrics["auroc"]["mutual_information"] = ood_auroc(near.epistemic, far.epistemic)
        metrics["mutual_information"] = {
            "inside": thinned(near.epistemic),
            "outside": thinned(far.epistemic),
        }
    return metrics


def thinned(values: Tensor, kept: int = _KEPT) -> list[float]:
    """Return evenly spaced ones of the ordered values, whose shares are those of all values.

    The share of values below any limit differs from that of all values by 1 / ``kept`` at most.

    Args:
        values: shape (N,).
        kept: number of values to return; all of them if there are fewer.

    Example:
        >>> thinned(torch.tensor([3.0, 1.0, 2.0, 0.0]), kept=2)
        [1.0, 3.0]
    """
    ordered = values.double().sort().values
    count = min(kept, len(ordered))
    places = (torch.arange(count) + 0.5) * len(ordered) / count
    return [float(f"{value:.4g}") for value in ordered[places.long()].tolist()]


def _doubt(predictive: CategoricalPredictive) -> Tensor:
    """Return 1 - the probability of the most probable class, as the sum of the others.

    In float32 a probability near 1 rounds to 1; the differences, and so the ranking, would be lost.
    """
    probs = predictive.log_mean.double().exp()
    return probs.scatter(-1, probs.argmax(-1, keepdim=True), 0.0).sum(-1)


#: By place in a result's metrics: heading, decimals, whether more is better.
_COLUMNS: dict[tuple[str, str], tuple[str, int, bool]] = {
    ("test", "error"): ("error %", 2, False),
    ("test", "nll"): ("nll", 4, False),
    ("test", "brier"): ("Brier", 4, False),
    ("test", "ece"): ("ECE", 4, False),
    ("auroc", "entropy"): ("AUROC by entropy", 4, True),
    ("auroc", "mutual_information"): ("AUROC by mutual information", 4, True),
    ("auroc", "max_probability"): ("AUROC by largest probability", 4, True),
}
_OURS = "Bayes by Backprop"
#: By job: the name of its networks when they are measured one by one, with point weights.
_ALONE = {"plain": "SGD", "dropout": "dropout, off in the test"}
#: Units in the order in which they are shown.
_JOBS = ("bayes", "bayes-wide", "plain", "dropout")
_Found = Mapping[str, Mapping[tuple[str, str], list[float]]]


def table(results: Sequence[Result]) -> str:
    """Return a line for each method, then in words where Bayes by Backprop is worse."""
    found = _by_method(results)
    best = {
        column: (max if more else min)(mean(of[column]) for of in found.values() if column in of)
        for column, (_, _, more) in _COLUMNS.items()
        if any(column in of for of in found.values())
    }
    heads = [heading for column, (heading, _, _) in _COLUMNS.items() if column in best]
    lines = table_head(f"| | networks | {' | '.join(heads)} |")
    for method, of in found.items():
        cells = []
        for column, value in best.items():
            text = mean_and_error(of.get(column, []), _COLUMNS[column][1])
            won = column in of and mean(of[column]) == value
            cells.append(f"**{text}**" if won else text)
        count = len(of["test", "error"])
        lines.append(f"| {method} | {count} | {' | '.join(cells)} |")
    said = [
        "Mean over networks trained from different seeds +- its standard error, the best mean of "
        "each column in bold. An ensemble counts as one network; its members are those of the row "
        f"{_ALONE['plain']}.",
        "\n".join(lines),
        *_losses(found),
    ]
    return "\n\n".join(said) + "\n"


def ordered(results: Sequence[Result]) -> list[Result]:
    """Sort results into the order in which they are shown.

    Example:
        >>> [result["job"] for result in ordered([{"job": "dropout"}, {"job": "plain"}])]
        ['plain', 'dropout']
    """
    return sorted(results, key=lambda result: _JOBS.index(result["job"]))


def _by_method(results: Sequence[Result]) -> _Found:
    found: dict[str, dict[tuple[str, str], list[float]]] = {}
    for result in ordered(results):
        metrics = result["metrics"]
        parts: list[tuple[str, Any]] = [(result["config"]["method"], metrics)]
        parts[:0] = [(_ALONE[result["job"]], one) for one in metrics.get("alone", ())]
        for method, measured in parts:
            of = found.setdefault(method, {})
            for part, key in _COLUMNS:
                if key in measured[part]:
                    of.setdefault((part, key), []).append(measured[part][key])
    return found


def _losses(found: _Found) -> list[str]:
    """Write a sentence for each of our methods: the columns in which another one is better."""
    said = []
    for ours in (method for method in found if method.startswith(_OURS)):
        parts = []
        for other in (method for method in found if not method.startswith(_OURS)):
            worse = [
                heading + (" (within two standard errors)" if _is_close(a, b) else "")
                for column, (heading, _, more) in _COLUMNS.items()
                if (a := found[ours].get(column))
                and (b := found[other].get(column))
                and (mean(a) < mean(b) if more else mean(a) > mean(b))
            ]
            parts.append(f"to {other} on {', '.join(worse) if worse else 'nothing'}")
        if parts:
            said.append(f"{ours} loses {'; '.join(parts)}.")
    return said


def _is_close(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether the means differ by at most two standard errors; False for one network."""
    if len(one) < 2 or len(other) < 2:
        return False
    error = math.hypot(standard_error(one), standard_error(other))
    return abs(mean(one) - mean(other)) <= 2.0 * error


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the mutual information on both data sets, a panel for each method, first seed."""
    from bayesify.plots.uncertainty import epistemic_histograms

    seed = min(result["seed"] for result in results)
    panels = {}
    for result in ordered(results):
        if result["seed"] == seed:
            kept = result["metrics"]["mutual_information"]
            auroc = result["metrics"]["auroc"]["mutual_information"]
            panels[f"{result['config']['method']}: AUROC {auroc:.3f}"] = (
                torch.tensor(kept["inside"]),
                torch.tensor(kept["outside"]),
            )
    return {
        "mnist-ood": epistemic_histograms(
            panels, names=("MNIST, test images", "Fashion-MNIST, never seen")
        )
    }


EXPERIMENT = Experiment(
    name="mnist-ood",
    source="no one paper: the usual test of inputs of another kind",
    reported="ours only: error, nll, Brier, ECE and AUROC, with SGD, dropout and an ensemble",
    seeds=(0, 1, 2),
    memory_mb=700,
    jobs=jobs,
    run=run,
    table=table,
    figures=figures,
    on_gpu=True,
)
