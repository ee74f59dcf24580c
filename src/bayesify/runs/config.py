"""The settings of a run: checked, complete, and enough to repeat it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from bayesify.perturbations import Perturbation
from bayesify.priors import Gaussian, Laplace, Prior, ScaleMixture
from bayesify.runs.rules import BASELINES, ESTIMATORS, ConfigError, check, idle, option
from bayesify.tabular import TableRecipe

__all__ = ["BASELINES", "FORMAT", "ConfigError", "RunConfig"]

#: Of ``config.json``. 2: not the dropout baseline alone has probabilities of dropout.
FORMAT = 2
# The paper's optimiser, each with the better of the rates 0.1 and 0.02.
_BASELINE_DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "batch_size": 128},
    "dropout": {
        **{"optimizer": "sgd", "lr": 0.02, "momentum": 0.9, "batch_size": 128},
        **{"dropout_input": 0.2, "dropout_hidden": 0.5},
    },
}
#: Steps of training to a row of the history, where a pass over a small table is fewer.
_STEPS_PER_EPOCH = 50


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run, beside the data's bytes and the versions.

    The defaults were chosen by measurement; see docs/adr.

    Args:
        dataset: name of the data set, or the path of a table.
        target: the column of a table that is to be predicted; None for images.
        task: ``"classification"`` or ``"regression"`` of a table; None until it is read.
        noise: of a table's regression: ``"learned"``, one std for all rows, or
            ``"input-dependent"``.
        test_fraction: part of a table's rows that is held out.
        drop: columns of a table not to use.
        keep: columns of a table to use though they look like identifiers.
        baseline: None for Bayes by Backprop, ``"sgd"`` for the plain network, ``"dropout"``.
        net: ``"mlp"`` or ``"lenet5"``; ``"table"`` for a table, see ``bayesify.tabular``.
        hidden: units of each hidden layer of the MLP.
        prior: ``"gaussian"``, ``"scale-mixture"`` or ``"laplace"``.
        prior_std: standard deviation of the Gaussian or Laplace prior; of a table's numbers that
            of weights, as of the mixture, is divided by the root of their layer's inputs.
        pi: weight of the mixture's component with ``std1``.
        std1: its standard deviation.
        std2: the other component's.
        init_std: the posterior's standard deviation at the start.
        mean_init_std: draw initial means from N(0, x^2); None keeps torch's initial values.
        dropout_input: probability of dropping a pixel in training, of the dropout baseline (.2)
            or of Bayes by Backprop (0).
        dropout_hidden: probability of dropping a hidden unit (.5 and 0).
        estimator: how noise enters: ``"sampling"``, ``"antithetic"`` (sampling in pairs),
            ``"local"``, ``"local-per-position"`` or ``"flipout"``.
        kl: how the KL is computed.
        kl_weighting: how it is spread over minibatches.
        kl_warmup: part of the epochs over which the KL's weight rises from 0 to 1,
        kl_warmup_power: as this power of a straight line.
        temperature: factor on the KL; 1 is the ELBO.
        train_samples: weight samples a step.
        test_samples: weight samples of the averaged predictions.
        optimizer: ``"adam"`` or ``"sgd"``.
        lr: learning rate on the mean loss of a minibatch.
        momentum: of ``"sgd"``.
        rho_lr_scale: learning rate of rho as a multiple of ``lr``.
        schedule: ``"cosine"`` to zero, or ``"constant"``.
        epochs: rows of the history: passes over the training data, or ``passes`` times as many.
        passes: over the training data an epoch.
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
        bayesify.runs.rules.ConfigError: epochs must be at least 1, got -1
    """

    dataset: str
    target: str | None = None
    task: str | None = None
    noise: str = "learned"
    test_fraction: float = 0.2
    drop: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
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
    dropout_input: float = 0.0
    dropout_hidden: float = 0.0
    estimator: str = "sampling"
    kl: str = "auto"
    kl_weighting: str = "uniform"
    kl_warmup: float = 0.75
    kl_warmup_power: float = 1.0
    temperature: float = 1.0
    train_samples: int = 1
    test_samples: int = 100
    optimizer: str = "adam"
    lr: float = 1.5e-3
    momentum: float = 0.0
    rho_lr_scale: float = 1.5
    schedule: str = "cosine"
    epochs: int = 25
    passes: int = 1
    batch_size: int = 256
    limit: int | None = None
    precision: str = "float32"
    step: str = "auto"
    seed: int = 0
    threads: int = 1

    @classmethod
    def of(cls, dataset: str, *, num_rows: int | None = None, **given: Any) -> RunConfig:
        """A configuration with defaults that suit the data and the baseline, and given settings.

        Args:
            dataset: as the field.
            num_rows: how many rows a table has for training, on which its defaults depend.
            given: any of the fields.

        Raises:
            ConfigError: a setting is out of range, or is given where it would do nothing.
        """
        baseline = given.get("baseline")
        # An unknown baseline is refused with the other choices.
        defaults = _BASELINE_DEFAULTS.get(baseline or "", {})
        if given.get("target") is not None:
            defaults = _table_defaults(baseline, num_rows, given)
        if given.get("estimator") == "antithetic":
            defaults = {**defaults, "train_samples": 2}
        config = cls(dataset=dataset, **{**defaults, **given})
        idle = [name for name in config.idle() if name in given]
        if idle:
            raise ConfigError(
                f"{option(idle[0])} would do nothing here (net {config.net}, baseline "
                f"{baseline or 'none'}, prior {config.prior}, optimizer {config.optimizer}"
                f"{f', task {config.task}' if config.task else ''}); leave it out"
            )
        usual = defaults.get("optimizer", cls.optimizer)
        if config.optimizer != usual and "lr" not in given:
            raise ConfigError(
                f"optimizer {config.optimizer} needs lr: the default {config.lr:g} was chosen for "
                f"{usual}"
            )
        return config

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], version: int = FORMAT) -> RunConfig:
        """The configuration of a run's ``config.json``, of this or an earlier format.

        Raises:
            ConfigError: a setting is missing, unknown or out of range.
        """
        lists = ("hidden", "drop", "keep")
        try:
            if version < 2 and stored["baseline"] != "dropout":
                # Only that baseline dropped units then: of other runs the numbers did nothing.
                stored = {**stored, "dropout_input": 0.0, "dropout_hidden": 0.0}
            given = {name: tuple(stored[name]) for name in lists if name in stored}
            config = cls(**{**stored, **given, "hidden": tuple(stored["hidden"])})
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"config.json does not hold the settings of a run: {error}"
            ) from error
        for name, kind in get_type_hints(cls).items():
            values = getattr(config, name) if name in lists else (getattr(config, name),)
            allowed = kind | int if "float" in str(kind) else kind
            if name in lists:
                allowed = int if name == "hidden" else str
            for value in values:
                if isinstance(value, bool) or not isinstance(value, allowed):
                    raise ConfigError(f"{name} in config.json is of a wrong type: {value!r}")
        return config

    def to_json(self) -> dict[str, Any]:
        """The settings, as JSON."""
        settings = dataclasses.asdict(self)
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in settings.items()
        }

    def make_prior(self, width: float = 1.0) -> Prior:
        """The prior that the settings name, so many times as wide."""
        if self.prior == "gaussian":
            return Gaussian(width * self.prior_std)
        if self.prior == "laplace":
            return Laplace(width * self.prior_std / math.sqrt(2.0))
        return ScaleMixture(self.pi, width * self.std1, width * self.std2)

    def make_perturbation(self) -> Perturbation:
        """The estimator that the settings name."""
        return ESTIMATORS[self.estimator]

    def __post_init__(self) -> None:
        check(self)

    def idle(self) -> list[str]:
        """The settings that do nothing in this combination."""
        return idle(self)


def _table_defaults(
    baseline: str | None, num_rows: int | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Those of ``bayesify.tabular``, in a run's terms."""
    size = given.get("batch_size") or TableRecipe.batch_size
    rows = num_rows or size
    recipe = TableRecipe.for_rows(rows, batch_size=max(1, size))
    batches = -(-rows // recipe.batch_size)
    passes = given.get("passes") or max(1, _STEPS_PER_EPOCH // batches)
    common = {
        "net": "table",
        "hidden": recipe.hidden,
        "batch_size": recipe.batch_size,
        "passes": passes,
        "epochs": math.ceil(recipe.steps / (batches * max(1, passes))),
    }
    if baseline is not None:
        return {**common, "optimizer": "adam", "lr": 1e-3}
    return {
        **common,
        "prior_std": recipe.prior_std,
        "estimator": "local",
        "lr": recipe.lr,
        "rho_lr_scale": recipe.rho_lr_scale,
        "init_std": recipe.init_std,
        "kl_warmup": recipe.kl_warmup,
        "step": "plain",
    }
