"""Digits against clothes: what networks trained on MNIST say of Fashion-MNIST.

Four ways to train a network of 2x400 units, each for the same number of epochs by the very code
of ``bayesify train``: Bayes by Backprop with two settings, five plain networks, which are rows of
their own and together a deep ensemble, and dropout, on or off in the test. Of each: error, nll,
Brier score and calibration error on MNIST's test images, and how well its uncertainty tells the
10,000 test images of Fashion-MNIST from them, by which no setting was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.baselines import DeepEnsemble, MCDropout
from bayesify.datasets import ImageData, load_images
from bayesify.experiments.experiment import Context, Experiment, Row, Unit
from bayesify.experiments.networks import trained
from bayesify.experiments.ood_table import ood_table, ordered
from bayesify.metrics import brier, error_percent, expected_calibration_error, nll, ood_auroc
from bayesify.module import BayesianModule
from bayesify.predictive import CategoricalPredictive
from bayesify.runs import RunConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "METHODS", "measure", "thinned"]

INSIDE, OUTSIDE = "mnist", "fashion-mnist"

_COMMON: dict[str, Any] = {"hidden": [400, 400], "epochs": 20, "schedule": "cosine"}
_BAYES: dict[str, Any] = {
    "prior": "gaussian",
    "estimator": "sampling",
    "optimizer": "adam",
    "init_std": 0.02,
    "batch_size": 256,
    "test_samples": 100,
}
_MOMENTUM: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.9, "batch_size": 128}

#: By unit: what the table calls it, and settings of ``bayesify train``. The first are its defaults
#: but for the number of epochs, as are those of the dropout and the plain networks.
METHODS: dict[str, dict[str, Any]] = {
    "bayes": {
        "method": "Bayes by Backprop, defaults",
        "settings": {
            **_COMMON,
            **_BAYES,
            **{"prior_std": 0.3, "kl_warmup": 0.75, "lr": 1.5e-3, "rho_lr_scale": 1.5},
        },
    },
    "bayes-wide": {
        "method": "Bayes by Backprop, wide prior",
        "settings": {
            **_COMMON,
            **_BAYES,
            **{"prior_std": 0.4, "kl_warmup": 0.5, "lr": 1e-3, "rho_lr_scale": 1.0},
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
            **{"baseline": "dropout", "lr": 0.02, "dropout_input": 0.2, "dropout_hidden": 0.5},
        },
    },
}
#: Seconds on one core.
_SECONDS = {"bayes": 120.0, "bayes-wide": 120.0, "plain": 420.0, "dropout": 250.0}
_QUICK = {"hidden": [50], "epochs": 2, "limit": 2000}
_QUICK_SAMPLES = 10
#: How many of the ordered uncertainties a row keeps, for the histogram.
_KEPT = 500


def units(seeds: Sequence[int], quick: bool) -> list[Unit]:
    """Four for each seed; one seed after the other, so that a part of them is a table, too."""
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
            made.append(Unit(name, seed, config, seconds, (INSIDE, OUTSIDE)))
    return made


def run(unit: Unit, context: Context) -> dict[str, Any]:
    """Train the networks of one method and seed, and measure them.

    Raises:
        DataError: a data set is missing; said before anything is trained.
    """
    config = unit.config
    settings = {**config["settings"], "hidden": tuple(config["settings"]["hidden"])}
    limit = settings.get("limit")
    inside = load_images(
        config["inside"], context.data_dir, limit=limit, progress=context.on_download
    )
    outside = load_images(
        config["outside"], context.data_dir, limit=1, progress=context.on_download
    ).test_inputs
    count = config.get("members", 1)
    found = []
    for member in range(count):
        # No two networks of the experiment have the same initial values.
        made = RunConfig.of(config["inside"], **settings, seed=count * unit.seed + member)
        found.append(trained(made, inside, context.part(f"network-{member}", member, count)))
    bnns = [bnn for bnn, _ in found]
    if count > 1:
        metrics = measure(DeepEnsemble(bnns), inside, outside, 1)
    elif "passes" in config:
        metrics = measure(MCDropout(bnns[0], seed=unit.seed), inside, outside, config["passes"])
    else:
        metrics = measure(bnns[0], inside, outside, settings["test_samples"])
    if "baseline" in settings:  # networks of point weights, which can be asked one by one
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
    """A network's numbers on data like its training data and on others.

    Args:
        network: trained.
        inside: of which the test part is used.
        outside: inputs of another kind, shape (M, D).
        num_samples: of weights or masks.
        epistemic: whether it has any epistemic uncertainty.

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
    """Evenly spaced ones of the ordered values: shares of them are shares of all, within 1 / kept.

    Args:
        values: shape (N,).
        kept: how many; all where there are fewer.

    Example:
        >>> thinned(torch.tensor([3.0, 1.0, 2.0, 0.0]), kept=2)
        [1.0, 3.0]
    """
    ordered = values.double().sort().values
    count = min(kept, len(ordered))
    places = (torch.arange(count) + 0.5) * len(ordered) / count
    return [float(f"{value:.4g}") for value in ordered[places.long()].tolist()]


def _doubt(predictive: CategoricalPredictive) -> Tensor:
    """1 - the probability of the most probable class, as the sum of the others, which is exact.

    In float32 the probability of a sure network rounds to 1, and what it is sure of would be tied.
    """
    probs = predictive.log_mean.double().exp()
    return probs.scatter(-1, probs.argmax(-1, keepdim=True), 0.0).sum(-1)


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Mutual information inside and outside, a panel a method, of the first seed."""
    from bayesify.plots.uncertainty import epistemic_histograms

    seed = min(row["seed"] for row in rows)
    panels = {}
    for row in ordered(rows):
        if row["seed"] == seed:
            kept = row["metrics"]["mutual_information"]
            auroc = row["metrics"]["auroc"]["mutual_information"]
            panels[f"{row['config']['method']}: AUROC {auroc:.3f}"] = (
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
    reported="ours only: error, nll, Brier, ECE and AUROC, beside SGD, dropout and an ensemble",
    seeds=(0, 1, 2),
    memory_mb=700,
    units=units,
    run=run,
    table=ood_table,
    figures=figures,
)
