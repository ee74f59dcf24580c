"""Training a run from its settings."""

from __future__ import annotations

import warnings
from functools import partial
from typing import NamedTuple

import torch

from bayesify.datasets import Passes, TensorLoader
from bayesify.elbo import ELBO
from bayesify.module import BayesianModule
from bayesify.runs.config import RunConfig
from bayesify.runs.data import RunData
from bayesify.runs.folder import Run
from bayesify.training import ConvergenceWarning, fit
from bayesify.training.callbacks import Callback
from bayesify.training.history import History
from bayesify.training.optimizers import OptimizerFactory
from bayesify.training.schedules import constant, cosine

__all__ = ["Trained", "make_elbo", "optimizer_factory", "precision_of", "train"]


class Trained(NamedTuple):
    """A trained network, its history, and what a reader of the results must know."""

    bnn: BayesianModule
    history: History
    notes: list[str]


def train(run: Run, data: RunData, callback: Callback) -> Trained:
    """Train a run, or what is left of it, from its last checkpoint.

    Raises:
        NonFiniteLossError, StorageError, OSError: as ``fit`` does.
    """
    config = run.config
    elbo = make_elbo(run.make_module(), config, data)
    with warnings.catch_warnings(record=True) as caught, precision_of(config):
        warnings.simplefilter("always", ConvergenceWarning)
        history = fit(
            elbo,
            Passes(
                TensorLoader(
                    data.train_inputs, data.train_targets, config.batch_size, seed=config.seed
                ),
                config.passes,
            ),
            TensorLoader(data.test_inputs, data.test_targets, 2048, shuffle=False),
            epochs=config.epochs,
            optimizer=optimizer_factory(config),
            scheduler=cosine if config.schedule == "cosine" else constant,
            rho_lr_scale=config.rho_lr_scale if config.baseline is None else 1.0,
            kl_warmup_epochs=0 if config.baseline else config.kl_warmup * config.epochs,
            kl_warmup_power=config.kl_warmup_power,
            step=config.step,  # type: ignore[arg-type]
            checkpoint_dir=run.folder,
            resume=True,
            callback=callback,
        )
    notes = [
        _on_the_command_line(str(w.message))
        for w in caught
        if issubclass(w.category, ConvergenceWarning)
    ]
    if config.baseline is None and config.temperature != 1.0:
        notes.insert(
            0,
            f"tempered objective: the KL is multiplied by {config.temperature:g}, so that this is "
            "not the ELBO",
        )
    return Trained(elbo.bnn, history, notes)


def _on_the_command_line(text: str) -> str:
    """A message of the library, with the options' names."""
    for name in ("rho_lr_scale", "init_std"):
        text = text.replace(name, f"--{name.replace('_', '-')}")
    return text


def make_elbo(bnn: BayesianModule, config: RunConfig, data: RunData) -> ELBO:
    """The objective that the settings name; a baseline's is the plain likelihood."""
    num_data = len(data.train_targets)
    return ELBO(
        bnn,
        num_data=num_data,
        kl=config.kl,  # type: ignore[arg-type]
        kl_weighting=config.kl_weighting,  # type: ignore[arg-type]
        temperature=0.0 if config.baseline else config.temperature,
        num_samples=config.train_samples,
        num_batches=config.passes * -(-num_data // config.batch_size),
    )


def precision_of(config: RunConfig) -> torch.autocast:
    """The context in which the steps of training run."""
    return torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bfloat16")


def optimizer_factory(config: RunConfig) -> OptimizerFactory:
    """The optimiser that the settings name."""
    if config.optimizer == "adam":
        return partial(torch.optim.Adam, lr=config.lr, fused=True)
    return partial(torch.optim.SGD, lr=config.lr, momentum=config.momentum, fused=True)
