"""The contestants: ways to get a predictive distribution from the model and the data of a problem.

To add one, write a function like those here and list it in ``CONTESTANTS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from bayesify import (
    ELBO,
    IVON,
    BayesianModule,
    DeepEnsemble,
    Delta,
    Estimator,
    FullGaussian,
    LocalReparameterization,
    LowRankGaussian,
    MatrixGaussian,
    MCDropout,
    MeanFieldGaussian,
    PosteriorFamily,
    Predictive,
    WeightSampling,
    fit,
)
from bayesify.datasets import Passes, TensorLoader
from bayesify.noise.keys import Stream, derived_seed
from bayesify.reproduce.harness.experiment import Context, EpochProgress
from bayesify.reproduce.papers.referee.problems import Problem, make_network, random_network
from bayesify.training.schedules import cosine

__all__ = ["CONTESTANTS", "PROTOCOL", "SETTINGS", "Contestant"]

#: The training of every contestant: all examples at each step.
PROTOCOL: dict[str, Any] = {
    "steps": 6000,
    "lr": 0.005,
    "optimizer": "Adam, cosine to zero",
    "kl_warmup": 0.5,
    "init_std": 0.03,
    "dropout": 0.1,
    "members": 5,
    "test_samples": 500,
}
_STEPS_AN_EPOCH = 100


class Contestant(Protocol):
    """Trains on a problem, and predicts its test inputs."""

    def __call__(
        self, problem: Problem, config: Mapping[str, Any], seed: int, context: Context
    ) -> Predictive:
        """Return the predictive distribution of the test inputs, in the network's units."""


def _train(
    bnn: BayesianModule,
    problem: Problem,
    config: Mapping[str, Any],
    context: Context,
    kl_warmup: float = 0.0,
    *,
    ivon: bool = False,
) -> BayesianModule:
    inputs, targets = problem.train_inputs, problem.train_targets
    loader = TensorLoader(inputs, targets, len(inputs), shuffle=False)
    epochs = max(1, config["steps"] // _STEPS_AN_EPOCH)
    elbo = ELBO(bnn, num_data=len(inputs), num_samples=config.get("num_samples", 1))
    fit(
        elbo,
        Passes(loader, min(_STEPS_AN_EPOCH, config["steps"])),
        epochs=epochs,
        # h0=None: it begins with the same standard deviations as the others.
        optimizer=IVON(elbo, h0=None) if ivon else partial(torch.optim.Adam, lr=config["lr"]),
        scheduler=cosine,
        kl_warmup_epochs=kl_warmup * epochs,
        checkpoint_dir=context.work,
        resume=True,
        callback=EpochProgress(context, epochs),
    )
    return bnn


def _posterior(
    problem: Problem,
    config: Mapping[str, Any],
    seed: int,
    context: Context,
    *,
    estimator: Callable[[], Estimator] = WeightSampling,
    posterior: type[MeanFieldGaussian] | PosteriorFamily = MeanFieldGaussian,
    ivon: bool = False,
) -> BayesianModule:
    """Return a network with a trained posterior."""
    bnn = random_network(
        make_network(problem, config, seed),
        config,
        posterior=posterior,
        init_std=config["init_std"],
        estimator=estimator(),
        seed=seed,
    )
    return _train(bnn, problem, config, context, config["kl_warmup"], ivon=ivon)


def _variational(
    problem: Problem, config: Mapping[str, Any], seed: int, context: Context, **options: Any
) -> Predictive:
    bnn = _posterior(problem, config, seed, context, **options)
    return bnn.predict(problem.test_inputs, config["test_samples"])


def _mixture(
    problem: Problem, config: Mapping[str, Any], seed: int, context: Context, **options: Any
) -> Predictive:
    """Return the mixture of posteriors that began with different initial values."""
    count, members = config["members"], []
    for member in range(count):
        own = derived_seed(seed, Stream.INITIALIZATION, member)
        part = context.part(f"member-{member}", member, count)
        members.append(_posterior(problem, config, own, part, **options))
    ensemble = DeepEnsemble(members)
    return ensemble.predict(problem.test_inputs, config["test_samples"] // count)


def _point(
    problem: Problem, config: Mapping[str, Any], seed: int, context: Context, net: nn.Module
) -> BayesianModule:
    """Train a network with point weights under the same prior: maximum a posteriori."""
    return _train(random_network(net, config, posterior=Delta, seed=seed), problem, config, context)


def _plain(problem: Problem, config: Mapping[str, Any], seed: int, context: Context) -> Predictive:
    net = make_network(problem, config, seed)
    return _point(problem, config, seed, context, net).predict_mean(problem.test_inputs)


def _mc_dropout(
    problem: Problem, config: Mapping[str, Any], seed: int, context: Context
) -> Predictive:
    net = make_network(problem, config, seed, dropout=config["dropout"])
    trained = _point(problem, config, seed, context, net)
    return MCDropout(trained, seed=seed).predict(problem.test_inputs, config["test_samples"])


def _ensemble(
    problem: Problem, config: Mapping[str, Any], seed: int, context: Context
) -> Predictive:
    count, members = config["members"], []
    for member in range(count):
        own = derived_seed(seed, Stream.INITIALIZATION, member)
        part = context.part(f"member-{member}", member, count)
        net = make_network(problem, config, own)
        members.append(_point(problem, config, own, part, net))
    return DeepEnsemble(members).predict(problem.test_inputs)


#: All contestants by the name in files and tables.
CONTESTANTS: Mapping[str, Contestant] = {
    "mean-field-sampling": _variational,
    "mean-field-local": partial(_variational, estimator=LocalReparameterization),
    "mean-field-ivon": partial(_variational, estimator=LocalReparameterization, ivon=True),
    "low-rank": partial(
        _variational, posterior=LowRankGaussian(10), estimator=LocalReparameterization
    ),
    "matrix": partial(_variational, posterior=MatrixGaussian()),
    "full": partial(_variational, posterior=FullGaussian()),
    "matrix-4-samples": partial(_variational, posterior=MatrixGaussian()),
    "full-4-samples": partial(_variational, posterior=FullGaussian()),
    "mean-field-mixture": partial(_mixture, estimator=LocalReparameterization),
    "matrix-mixture": partial(_mixture, posterior=MatrixGaussian()),
    "plain": _plain,
    "mc-dropout": _mc_dropout,
    "ensemble": _ensemble,
}
#: What a contestant has in addition to the protocol: weight samples in each step. With one the
#: gradient is noisy for correlations.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "matrix-4-samples": {"num_samples": 4},
    "full-4-samples": {"num_samples": 4},
}
