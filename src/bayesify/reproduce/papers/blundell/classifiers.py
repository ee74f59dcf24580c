"""The classifiers of the fair comparison: how each is trained, and what is measured of it.

Every classifier has the same data, epochs, minibatches and schedule. What differs is in its
settings, which ``tuning`` searches for each method with the same number of trials.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesify.app.runs import RunConfig
from bayesify.datasets import ImageData
from bayesify.distributions.posteriors import Delta
from bayesify.metrics import error_percent, nll
from bayesify.module.bayesian import BayesianModule
from bayesify.module.pruning import prune
from bayesify.prediction import CategoricalPredictive
from bayesify.reproduce.harness.experiment import Context
from bayesify.reproduce.harness.image_runs import settings_of, trained
from bayesify.training.history import History
from bayesify.training.mc_dropout import MCDropout

__all__ = [
    "EPOCHS",
    "FRACTIONS",
    "METHODS",
    "PRUNED_SAMPLES",
    "SAMPLES",
    "Method",
    "Network",
    "averaged",
    "is_bayesian",
    "outputs_of",
    "pruned",
    "scores",
    "train_network",
]

EPOCHS = 40
#: Weight samples, or passes with dropout, behind each averaged prediction.
SAMPLES = 50
#: The same for pruned networks, whose predictions hardly vary.
PRUNED_SAMPLES = 10
FRACTIONS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99)
#: Columns of the history's last row that a result keeps.
_KEPT = (
    "kl",
    "nll",
    "free_energy",
    "free_energy_untrained",
    "free_energy_untrained_error",
    "std_residual",
    "std_residual_worst",
)


class Method(NamedTuple):
    """A method of the comparison: its name in tables, its cost, and settings that are not searched.

    Args:
        title: name in tables.
        cost: time of an epoch relative to a plain network's.
        fixed: settings that all its trials share.
    """

    title: str
    cost: float
    fixed: Mapping[str, Any]


_ALL: dict[str, Any] = {
    "epochs": EPOCHS,
    "schedule": "cosine",
    "batch_size": 256,
    "precision": "bfloat16",
    "hidden": [400, 400],
}
_PLAIN = {**_ALL, "momentum": 0.9}
_BAYES = {**_ALL, "estimator": "sampling", "optimizer": "adam", "init_std": 0.02}
_MIXTURE = {**_BAYES, "prior": "scale-mixture"}
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "sgd": Method("SGD", 1.0, {**_PLAIN, "baseline": "sgd"}),
        # The baseline of this name adds dropout layers: without hidden dropout, pixels only.
        "sgd-dropped": Method(
            "SGD, pixels dropped", 1.1, {**_PLAIN, "baseline": "dropout", "dropout_hidden": 0.0}
        ),
        "dropout": Method("dropout", 1.6, {**_PLAIN, "baseline": "dropout"}),
        "gaussian": Method("Bayes, Gaussian prior", 1.7, {**_BAYES, "prior": "gaussian"}),
        "mixture": Method("Bayes, scale mixture", 1.7, _MIXTURE),
        "mixture-dropped": Method("Bayes, scale mixture, pixels dropped", 1.8, _MIXTURE),
    }
)


class Network(NamedTuple):
    """A trained network and the last row of its history."""

    bnn: BayesianModule
    last: Mapping[str, float | None]


def train_network(
    settings: Mapping[str, Any], seed: int, data: ImageData, context: Context
) -> Network:
    """Train a classifier as ``bayesify train`` does."""
    config = RunConfig.of("mnist", **settings_of(settings), seed=seed)
    history: History
    bnn, history = trained(config, data, context)
    return Network(bnn, {name: history[-1].get(name) for name in _KEPT if is_bayesian(bnn)})


def is_bayesian(bnn: BayesianModule) -> bool:
    """Whether the network has a distribution of its weights."""
    return not isinstance(bnn.posterior, Delta)


def outputs_of(bnn: BayesianModule, inputs: Tensor, logit_temperature: float = 1.0) -> Tensor:
    """Return the log probabilities at the mean weights, after temperature scaling, (N, K)."""
    return torch.log_softmax(bnn.mean_outputs(inputs) / logit_temperature, -1)


def averaged(
    bnn: BayesianModule, settings: Mapping[str, Any], inputs: Tensor, count: int = SAMPLES
) -> Tensor | None:
    """Return the log of the averaged probabilities, (N, K): over weight samples, or MC dropout.

    Returns:
        None for a network without either. Dropped pixels alone are taken as noise on the data, as
        of any augmentation, and are not averaged over.
    """
    if is_bayesian(bnn):
        predictive = bnn.predict(inputs, count)
    elif settings.get("dropout_hidden", 0.0) > 0.0:
        predictive = MCDropout(bnn, seed=bnn.seed).predict(inputs, count)
    else:
        return None
    assert isinstance(predictive, CategoricalPredictive)
    return predictive.log_mean


def scores(log_probs: Tensor, targets: Tensor) -> dict[str, float]:
    """Return error in percent and nll in nats per example, of log probabilities (N, K)."""
    return {"error": error_percent(log_probs.exp(), targets), "nll": nll(log_probs, targets)}


def pruned(bnn: BayesianModule, fraction: float) -> BayesianModule:
    """Remove weights: by signal-to-noise ratio, or by magnitude where there is no noise."""
    return prune(bnn, fraction, "snr" if is_bayesian(bnn) else "magnitude")
