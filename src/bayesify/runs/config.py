"""The settings of a run: checked, complete, and enough to repeat it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from bayesify.perturbations import (
    Flipout,
    LocalReparameterization,
    Perturbation,
    WeightSampling,
)
from bayesify.priors import Gaussian, Laplace, Prior, ScaleMixture

__all__ = ["BASELINES", "ConfigError", "RunConfig"]

BASELINES = ("sgd", "dropout")
_ESTIMATORS: dict[str, Perturbation] = {
    "sampling": WeightSampling(),
    "antithetic": WeightSampling(antithetic=True),
    "local": LocalReparameterization(),
    "local-per-position": LocalReparameterization(per_position=True),
    "flipout": Flipout(),
}
_CHOICES = {
    "baseline": (None, *BASELINES),
    "prior": ("gaussian", "scale-mixture", "laplace"),
    "net": ("mlp", "lenet5"),
    "estimator": tuple(_ESTIMATORS),
    "kl": ("auto", "closed", "monte-carlo"),
    "kl_weighting": ("uniform", "geometric"),
    "optimizer": ("sgd", "adam"),
    "schedule": ("cosine", "constant"),
    "precision": ("float32", "bfloat16"),
    "step": ("auto", "plain", "fused"),
}
_COUNTS = ("train_samples", "test_samples", "epochs", "batch_size", "limit", "threads")
# Of units, epochs, samples or images: far beyond use, and still an integer to torch.
_MOST = 2**31 - 1
_MOST_THREADS = 1024
# The paper's optimiser, each with the better of the rates 0.1 and 0.02.
_BASELINE_DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "batch_size": 128},
    "dropout": {"optimizer": "sgd", "lr": 0.02, "momentum": 0.9, "batch_size": 128},
}


class ConfigError(ValueError):
    """A setting is out of its range or contradicts another."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run, beside the data's bytes and the versions.

    The defaults were chosen by measurement; see docs/adr.

    Args:
        dataset: name of the data set.
        baseline: None for Bayes by Backprop, ``"sgd"`` for the plain network, ``"dropout"``.
        net: ``"mlp"`` or ``"lenet5"``.
        hidden: units of each hidden layer of the MLP.
        prior: ``"gaussian"``, ``"scale-mixture"`` or ``"laplace"``.
        prior_std: standard deviation of the Gaussian or Laplace prior.
        pi: weight of the mixture's component with ``std1``.
        std1: its standard deviation.
        std2: the other component's.
        init_std: the posterior's standard deviation at the start.
        mean_init_std: draw initial means from N(0, x^2); None keeps torch's initial values.
        dropout_input: probability of dropping a pixel, for the dropout baseline.
        dropout_hidden: probability of dropping a hidden unit.
        estimator: how noise enters: ``"sampling"``, ``"antithetic"`` (sampling in pairs),
            ``"local"``, ``"local-per-position"`` or ``"flipout"``.
        kl: how the KL is computed.
        kl_weighting: how it is spread over minibatches.
        kl_warmup: part of the epochs over which the KL's weight rises from 0 to 1.
        temperature: factor on the KL; 1 is the ELBO.
        train_samples: weight samples a step.
        test_samples: weight samples of the averaged predictions.
        optimizer: ``"adam"`` or ``"sgd"``.
        lr: learning rate on the mean loss of a minibatch.
        momentum: of ``"sgd"``.
        rho_lr_scale: learning rate of rho as a multiple of ``lr``.
        schedule: ``"cosine"`` to zero, or ``"constant"``.
        epochs: passes over the training data.
        batch_size: data a minibatch.
        limit: use only the first so many training data.
        precision: ``"float32"``, or ``"bfloat16"`` for autocast in training; means, rho, KL and
            the optimiser's state are float32 in both.
        step: how a step of training is computed: ``"fused"``, ``"plain"`` or ``"auto"``.
        seed: what all randomness is a function of.
        threads: processor threads.

    Raises:
        ConfigError: a setting is out of range, or is given where it would do nothing.

    Example:
        >>> RunConfig.of("mnist", hidden=(100,)).hidden
        (100,)
        >>> RunConfig.of("mnist", epochs=-1)
        Traceback (most recent call last):
        bayesify.runs.config.ConfigError: epochs must be at least 1, got -1
    """

    dataset: str
    baseline: str | None = None
    net: str = "mlp"
    hidden: tuple[int, ...] = (400, 400)
    prior: str = "gaussian"
    prior_std: float = 0.3
    pi: float = 0.75
    std1: float = 1.0
    std2: float = math.exp(-8.0)
    init_std: float = 0.02
    mean_init_std: float | None = None
    dropout_input: float = 0.2
    dropout_hidden: float = 0.5
    estimator: str = "sampling"
    kl: str = "auto"
    kl_weighting: str = "uniform"
    kl_warmup: float = 0.75
    temperature: float = 1.0
    train_samples: int = 1
    test_samples: int = 100
    optimizer: str = "adam"
    lr: float = 1.5e-3
    momentum: float = 0.0
    rho_lr_scale: float = 1.5
    schedule: str = "cosine"
    epochs: int = 25
    batch_size: int = 256
    limit: int | None = None
    precision: str = "float32"
    step: str = "auto"
    seed: int = 0
    threads: int = 1

    @classmethod
    def of(cls, dataset: str, **given: Any) -> RunConfig:
        """A configuration with defaults that suit the baseline, and the given settings.

        Raises:
            ConfigError: a setting is out of range, or is given where it would do nothing.
        """
        baseline = given.get("baseline")
        # An unknown baseline is refused with the other choices.
        defaults = _BASELINE_DEFAULTS.get(baseline or "", {})
        if given.get("estimator") == "antithetic":
            defaults = {**defaults, "train_samples": 2}
        config = cls(dataset=dataset, **{**defaults, **given})
        idle = [name for name in config.idle() if name in given]
        if idle:
            raise ConfigError(
                f"{_option(idle[0])} would do nothing here (net {config.net}, baseline "
                f"{baseline or 'none'}, prior {config.prior}, optimizer {config.optimizer}); "
                "leave it out"
            )
        usual = defaults.get("optimizer", cls.optimizer)
        if config.optimizer != usual and "lr" not in given:
            raise ConfigError(
                f"optimizer {config.optimizer} needs lr: the default {config.lr:g} was chosen for "
                f"{usual}"
            )
        return config

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> RunConfig:
        """The configuration of a run's ``config.json``.

        Raises:
            ConfigError: a setting is missing, unknown or out of range.
        """
        try:
            config = cls(**{**stored, "hidden": tuple(stored["hidden"])})
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"config.json does not hold the settings of a run: {error}"
            ) from error
        for name, kind in get_type_hints(cls).items():
            values = config.hidden if name == "hidden" else (getattr(config, name),)
            allowed = int if name == "hidden" else kind | int if "float" in str(kind) else kind
            for value in values:
                if isinstance(value, bool) or not isinstance(value, allowed):
                    raise ConfigError(f"{name} in config.json is of a wrong type: {value!r}")
        return config

    def to_json(self) -> dict[str, Any]:
        """The settings, as JSON."""
        return {**dataclasses.asdict(self), "hidden": list(self.hidden)}

    def make_prior(self) -> Prior:
        """The prior that the settings name."""
        if self.prior == "gaussian":
            return Gaussian(self.prior_std)
        if self.prior == "laplace":
            return Laplace(self.prior_std / math.sqrt(2.0))
        return ScaleMixture(self.pi, self.std1, self.std2)

    def make_perturbation(self) -> Perturbation:
        """The estimator that the settings name."""
        return _ESTIMATORS[self.estimator]

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                known = ", ".join(str(choice) for choice in choices if choice)
                raise ConfigError(
                    f"{_option(name)} must be one of {known}, got {getattr(self, name)}"
                )
        if not self.hidden or min(self.hidden) < 1 or max(self.hidden) > _MOST:
            raise ConfigError(
                f"hidden must be positive numbers of units such as 400,400, got "
                f"{','.join(map(str, self.hidden)) or 'none'}"
            )
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{_option(name)} must be at least 1, got {value}")
            most = _MOST_THREADS if name == "threads" else _MOST
            if name != "limit" and value is not None and value > most:
                raise ConfigError(f"{_option(name)} must be at most {most:,}, got {value}")
        if not -(2**127) <= self.seed < 2**127:
            raise ConfigError(f"seed must have at most 128 bits, got {self.seed}")
        for name in (
            "prior_std",
            "std1",
            "std2",
            "init_std",
            "mean_init_std",
            "lr",
            "rho_lr_scale",
        ):
            value = getattr(self, name)
            if value is not None and not (value > 0.0 and math.isfinite(value)):
                raise ConfigError(f"{_option(name)} must be positive and finite, got {value}")
        for name in ("momentum", "dropout_input", "dropout_hidden", "kl_warmup"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ConfigError(f"{_option(name)} must be at least 0 and below 1, got {value}")
        if not (self.temperature >= 0.0 and math.isfinite(self.temperature)):
            raise ConfigError(f"temperature must be at least 0 and finite, got {self.temperature}")
        try:
            self.make_prior()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.make_perturbation().antithetic and self.train_samples % 2:
            raise ConfigError(
                f"estimator {self.estimator} takes weight samples in pairs, so train-samples must "
                f"be even, got {self.train_samples}; use --train-samples 2"
            )
        if self.kl == "closed" and self.prior == "scale-mixture":
            raise ConfigError("the scale mixture has no closed-form KL; use --kl auto")

    def idle(self) -> list[str]:
        """The settings that do nothing in this combination."""
        idle = []
        if self.net != "mlp":
            idle += ["hidden"]
        elif self.estimator == "local-per-position":
            idle += ["estimator"]
        if self.baseline is not None:
            idle += ["prior", "init_std", "estimator", "kl", "kl_weighting", "kl_warmup"]
            idle += ["temperature", "train_samples", "test_samples", "rho_lr_scale", "step"]
        if self.baseline != "dropout":
            idle += ["dropout_input", "dropout_hidden"]
        if self.baseline is not None or self.prior != "scale-mixture":
            idle += ["pi", "std1", "std2"]
        if self.baseline is not None or self.prior == "scale-mixture":
            idle += ["prior_std"]
        if self.optimizer != "sgd":
            idle += ["momentum"]
        return idle


def _option(name: str) -> str:
    return name.replace("_", "-")
