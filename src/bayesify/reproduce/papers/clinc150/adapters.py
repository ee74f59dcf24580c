"""Ways to fit the encoder to CLINC150, and what is measured of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Adam

from bayesify.datasets import TensorLoader, load_clinc150
from bayesify.distributions.posteriors import Delta
from bayesify.distributions.priors import Gaussian
from bayesify.estimators import LocalReparameterization
from bayesify.metrics import error_percent, expected_calibration_error, nll, ood_auroc
from bayesify.module.bayesian import BayesianModule
from bayesify.noise.keys import seeded_initialization
from bayesify.prediction import Predictive
from bayesify.reproduce.harness.experiment import Context, EpochProgress
from bayesify.reproduce.papers.clinc150.encoder import (
    Classifier,
    QueryLoader,
    Tokens,
    encoder_folder,
    predictions,
    tokens_of,
)
from bayesify.training.elbo import ELBO
from bayesify.training.fit import fit
from bayesify.training.schedules import cosine

__all__ = [
    "SAMPLES",
    "Data",
    "Predict",
    "Prediction",
    "adapter_of",
    "data_of",
    "last_layer_of",
    "measured",
    "timed",
]

#: Weight samples, or dropout masks, of a prediction.
SAMPLES = 10
#: Predicts the queries of these inputs.
Predict: TypeAlias = Callable[[dict[str, Tensor]], Predictive]

_CLASSES = 150
#: Of a maximum-likelihood fit: the density of the weights is level as far as they move.
_LEVEL = Gaussian(1e3)


@dataclass(frozen=True, eq=False)
class Data:
    """The folder of the encoder, and the tokens of CLINC150's parts."""

    folder: Path
    train: Tokens
    validation: Tokens
    test: Tokens
    outside_validation: Tokens
    outside_test: Tokens


def data_of(context: Context, per_class: int | None, *, quick: bool = False) -> Data:
    """Load the data, and split them into tokens.

    Args:
        context: where the data are.
        per_class: training queries of each intent; None takes all 100.
        quick: whether to take one query of each intent in every part.

    Raises:
        DataError: the data or the encoder are missing or damaged.
    """
    folder = encoder_folder()
    data = load_clinc150(context.data_dir, progress=context.on_download)
    train = tokens_of(data.train, folder, one_length=context.device != "cpu")
    inside = [train, *(tokens_of(each, folder) for each in (data.validation, data.test))]
    outside = [tokens_of(each, folder) for each in (data.outside_validation, data.outside_test)]
    if per_class is not None:
        inside[0] = inside[0].first(per_class)
    if quick:
        inside = [each.first(1) for each in inside]
        outside = [each.first(50) for each in outside]
    return Data(folder, *inside, *outside)


def adapter_of(
    settings: Mapping[str, Any], data: Data, seed: int, context: Context
) -> tuple[BayesianModule, float]:
    """Train a LoRA adapter and a new head, by maximum likelihood or by the ELBO.

    Returns:
        The network, and the seconds of training, those before an interruption included.
    """
    from peft import LoraConfig, get_peft_model

    from bayesify.adapters import bayesian_adapter

    # The initial values of peft and of the head are drawn from torch's generator.
    with seeded_initialization(seed):
        config = LoraConfig(
            r=settings["rank"],
            lora_alpha=2 * settings["rank"],
            lora_dropout=settings["dropout"],
            target_modules=list(settings["layers"]),
            modules_to_save=["head"],
        )
        plain = Classifier(
            data.folder, _CLASSES, settings["dropout"], settings.get("encoder_dropout")
        )
        net: Any = get_peft_model(plain, config).to(context.device)
    if settings["method"] == "variational":
        bnn = bayesian_adapter(
            net,
            settings["random"],
            prior=Gaussian(settings["prior_std"]),
            init_std=settings["init_std"],
            output=None,
            seed=seed,
        )
    else:
        chosen = [name for name, each in net.named_parameters() if each.requires_grad]
        bnn = BayesianModule(
            net, posterior=Delta, prior=_LEVEL, include=chosen, exclude=(), seed=seed
        )
    count = len(data.train.targets)
    history = fit(
        ELBO(bnn, num_data=count, temperature=settings.get("temperature", 1.0)),
        QueryLoader(data.train, settings["batch_size"], seed),
        epochs=settings["epochs"],
        optimizer=partial(Adam, lr=settings["lr"]),
        scheduler=cosine,
        checkpoint_dir=context.work,
        resume=True,
        callback=EpochProgress(context, settings["epochs"]),
    )
    return bnn, float(history[-1]["seconds"] or 0.0)


def last_layer_of(
    settings: Mapping[str, Any], data: Data, seed: int, context: Context
) -> tuple[Predict, float]:
    """Train a Bayesian last layer on the encoder's features, which are computed once.

    Returns:
        A function that predicts queries, and the seconds of training with those of the features.
    """
    begun = time.perf_counter()
    with seeded_initialization(seed):
        plain = Classifier(data.folder, _CLASSES).eval().to(context.device)

    @torch.no_grad()
    def features_of(rows: Mapping[str, Tensor]) -> Tensor:
        return plain.features(**{name: each.to(context.device) for name, each in rows.items()})

    index = torch.arange(len(data.train.targets))
    features = torch.cat([features_of(data.train.rows(part)) for part in index.split(256)])
    bnn = BayesianModule(
        plain.head,
        prior=Gaussian(settings["prior_std"]),
        init_std=settings["init_std"],
        estimator=LocalReparameterization(),
        seed=seed,
    )
    targets = data.train.targets.to(context.device)
    loader = TensorLoader(features, targets, settings["batch_size"], seed=seed)
    fit(
        ELBO(bnn, num_data=len(index)),
        loader,
        epochs=settings["epochs"],
        optimizer=partial(Adam, lr=settings["lr"]),
        scheduler=cosine,
        callback=EpochProgress(context, settings["epochs"]),
    )
    seconds = time.perf_counter() - begun

    def predict(rows: Mapping[str, Tensor]) -> Predictive:
        return bnn.predict(features_of(rows), SAMPLES)

    return predict, seconds


class Prediction(NamedTuple):
    """Predictions of some queries.

    Args:
        log_probs: shape (N, K).
        information: the mutual information in nats, shape (N,).
        seconds: how long they took.
    """

    log_probs: Tensor
    information: Tensor
    seconds: float


def timed(predict: Predict, tokens: Tokens) -> Prediction:
    """Predict all queries."""
    begun = time.perf_counter()
    logs, information = predictions(predict, tokens)
    return Prediction(logs, information, time.perf_counter() - begun)


def measured(inside: Prediction, outside: Prediction, targets: Tensor) -> dict[str, Any]:
    """Measure predictions of queries of known intent, and of queries outside of all intents.

    Returns:
        ``accuracy`` in percent, ``nll`` in nats, ``ece`` with 15 bins, ``auroc`` of the outside by
        ``mutual_information``, ``entropy`` and ``max_probability``, and ``seconds`` of both.
    """
    logs, information, seconds = inside
    far_logs, far_information, far_seconds = outside
    probs = logs.exp()

    def entropy(log_probs: Tensor) -> Tensor:
        return -(log_probs.exp() * log_probs).nan_to_num().sum(-1)

    scores = {
        "mutual_information": (information, far_information),
        "entropy": (entropy(logs), entropy(far_logs)),
        "max_probability": (-logs.amax(-1), -far_logs.amax(-1)),
    }
    return {
        "accuracy": 100.0 - error_percent(probs, targets),
        "nll": nll(logs, targets),
        "ece": expected_calibration_error(probs, targets),
        "auroc": {name: ood_auroc(near, far) for name, (near, far) in scores.items()},
        "seconds": seconds + far_seconds,
    }
