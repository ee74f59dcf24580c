"""What the settings of a run must obey, alone and together."""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import Any

from bayesify.perturbations import (
    Flipout,
    LocalReparameterization,
    Perturbation,
    WeightSampling,
)

__all__ = ["BASELINES", "ESTIMATORS", "ConfigError", "check", "idle", "is_table_file", "option"]

BASELINES = ("sgd", "dropout")
ESTIMATORS: dict[str, Perturbation] = {
    "sampling": WeightSampling(),
    "antithetic": WeightSampling(antithetic=True),
    "local": LocalReparameterization(),
    "local-per-position": LocalReparameterization(per_position=True),
    "flipout": Flipout(),
}
_CHOICES = {
    "baseline": (None, *BASELINES),
    "prior": ("gaussian", "scale-mixture", "laplace"),
    "task": (None, "classification", "regression"),
    "noise": ("learned", "input-dependent"),
    "estimator": tuple(ESTIMATORS),
    "kl": ("auto", "closed", "monte-carlo"),
    "kl_weighting": ("uniform", "geometric"),
    "optimizer": ("sgd", "adam"),
    "schedule": ("cosine", "constant"),
    "precision": ("float32", "bfloat16"),
    "step": ("auto", "plain", "fused"),
}
_COUNTS = ("train_samples", "test_samples", "epochs", "passes", "batch_size", "limit", "threads")
_POSITIVE = (
    *("prior_std", "std1", "std2", "init_std", "mean_init_std"),
    *("lr", "rho_lr_scale", "kl_warmup_power"),
)
# Of units, epochs, samples or data: far beyond use, and still an integer to torch.
_MOST = 2**31 - 1
_MOST_THREADS = 1024
_TABLE_SUFFIXES = (".csv", ".tsv", ".txt", ".gz")


class ConfigError(ValueError):
    """A setting is out of its range or contradicts another."""


def option(name: str) -> str:
    """A setting's name on the command line."""
    return name.replace("_", "-")


def is_table_file(dataset: str) -> bool:
    """Whether the name of a data set is that of a file with a table.

    Example:
        >>> is_table_file("sales.csv"), is_table_file("mnist")
        (True, False)
    """
    return PurePath(dataset).suffix.lower() in _TABLE_SUFFIXES


def check(config: Any) -> None:
    """Raise ConfigError where a setting of a RunConfig is out of range or contradicts another."""
    if config.target is None and is_table_file(config.dataset):
        raise ConfigError(f"a table needs --target NAME, the column of {config.dataset} to predict")
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            known = ", ".join(str(choice) for choice in choices if choice)
            raise ConfigError(f"{option(name)} must be one of {known}, got {getattr(config, name)}")
    nets = ("mlp", "lenet5") if config.target is None else ("table",)
    if config.net not in nets:
        raise ConfigError(f"net must be one of {', '.join(nets)}, got {config.net}")
    if config.target is not None and config.baseline == "dropout":
        raise ConfigError("a table has no dropout baseline; use --baseline sgd")
    if not config.hidden or min(config.hidden) < 1 or max(config.hidden) > _MOST:
        raise ConfigError(
            f"hidden must be positive numbers of units such as 400,400, got "
            f"{','.join(map(str, config.hidden)) or 'none'}"
        )
    for name in _COUNTS:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{option(name)} must be at least 1, got {value}")
        most = _MOST_THREADS if name == "threads" else _MOST
        if name != "limit" and value is not None and value > most:
            raise ConfigError(f"{option(name)} must be at most {most:,}, got {value}")
    if not -(2**127) <= config.seed < 2**127:
        raise ConfigError(f"seed must have at most 128 bits, got {config.seed}")
    for name in _POSITIVE:
        value = getattr(config, name)
        if value is not None and not (value > 0.0 and math.isfinite(value)):
            raise ConfigError(f"{option(name)} must be positive and finite, got {value}")
    for name in ("momentum", "dropout_input", "dropout_hidden", "kl_warmup"):
        value = getattr(config, name)
        if not 0.0 <= value < 1.0:
            raise ConfigError(f"{option(name)} must be at least 0 and below 1, got {value}")
    if not 0.0 < config.test_fraction < 1.0:
        raise ConfigError(
            f"test-fraction must lie strictly between 0 and 1, got {config.test_fraction}"
        )
    if not (config.temperature >= 0.0 and math.isfinite(config.temperature)):
        raise ConfigError(f"temperature must be at least 0 and finite, got {config.temperature}")
    try:
        config.make_prior()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.make_perturbation().antithetic and config.train_samples % 2:
        raise ConfigError(
            f"estimator {config.estimator} takes weight samples in pairs, so train-samples must "
            f"be even, got {config.train_samples}; use --train-samples 2"
        )
    if config.kl == "closed" and config.prior == "scale-mixture":
        raise ConfigError("the scale mixture has no closed-form KL; use --kl auto")
    if config.kl_weighting == "geometric" and config.passes > 1:
        raise ConfigError(
            f"geometric weights share the KL out over one pass, got passes {config.passes}; add "
            "--passes 1"
        )


def idle(config: Any) -> list[str]:
    """The settings of a RunConfig that do nothing in this combination."""
    names = []
    if config.target is None:
        names += ["task", "noise", "test_fraction", "drop", "keep"]
    elif config.task == "classification":
        names += ["noise"]
    if config.net == "lenet5":
        names += ["hidden"]
    elif config.estimator == "local-per-position":
        names += ["estimator"]
    if config.net == "table":
        names += ["mean_init_std"]
    if config.baseline is not None:
        names += ["prior", "init_std", "estimator", "kl", "kl_weighting", "kl_warmup"]
        names += ["kl_warmup_power"]
        names += ["temperature", "train_samples", "test_samples", "rho_lr_scale", "step"]
    if config.baseline == "sgd" or config.net == "table":
        names += ["dropout_input", "dropout_hidden"]
    if config.baseline is not None or config.prior != "scale-mixture":
        names += ["pi", "std1", "std2"]
    if config.baseline is not None or config.prior == "scale-mixture":
        names += ["prior_std"]
    if config.kl_warmup == 0.0:
        names += ["kl_warmup_power"]
    if config.optimizer != "sgd":
        names += ["momentum"]
    return names
