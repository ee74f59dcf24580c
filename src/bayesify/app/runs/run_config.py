"""Configuration of a run: its settings, checked; their JSON, and the objects that they name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, get_origin

from bayesify.app.runs.combinations import check_combination
from bayesify.app.runs.declarations import ConfigError, option
from bayesify.app.runs.defaults import defaults_for, kind_of_data
from bayesify.app.runs.rules import PRUNED
from bayesify.app.runs.settings import RunSettings, declarations
from bayesify.app.runs.stored_settings import FORMAT, renamed_settings
from bayesify.distributions.priors import Gaussian, Laplace, Prior, ScaleMixture
from bayesify.distributions.sparsity import GroupedGaussian, LogUniform, SpikeAndSlab, Unit
from bayesify.estimators import Estimator, Flipout, LocalReparameterization, WeightSampling
from bayesify.tabular.censoring import Limits
from bayesify.training.pruning_schedule import PruningSchedule

__all__ = ["ESTIMATORS", "RunConfig"]

ESTIMATORS: dict[str, Estimator] = {
    "sampling": WeightSampling(),
    "antithetic": WeightSampling(antithetic=True),
    "local": LocalReparameterization(),
    "local-per-position": LocalReparameterization(per_position=True),
    "flipout": Flipout(),
}

#: Parts of the epochs after which pruning in training begins and ends.
_PRUNE_FROM, _PRUNE_UNTIL = 0.1, 0.5


@dataclass(frozen=True)
class RunConfig(RunSettings):
    """Everything that determines a run, apart from the bytes of its data and the versions.

    Raises:
        ConfigError: a setting is of a wrong type or out of range, or contradicts another.

    Example:
        >>> RunConfig.of("mnist", hidden=(100,)).hidden
        (100,)
        >>> RunConfig.of("mnist", epochs=-1)
        Traceback (most recent call last):
        bayesify.app.runs.declarations.ConfigError: epochs must be at least 1 and at most
        2,147,483,647, got -1
    """

    def __post_init__(self) -> None:
        for name, declared in declarations().items():
            declared.check(name, getattr(self, name))
        check_combination(self)

    @classmethod
    def of(cls, dataset: str, *, num_rows: int | None = None, **given: Any) -> RunConfig:
        """Build a configuration from given settings and defaults that suit data and baseline.

        Args:
            dataset: as the field.
            num_rows: rows of a table for training, on which its defaults depend.
            given: any of the fields.

        Raises:
            ConfigError: a setting is out of range, or is given where it would do nothing.
        """
        is_table = kind_of_data({"dataset": dataset, **given}) == "table"
        if is_table and given.get("task") is None:
            # These settings tell what the target is.
            if "likelihood" in given:
                given["task"] = "regression"
            elif given.get("ordered"):
                given["task"] = "classification"
        defaults = defaults_for({"dataset": dataset, **given}, num_rows)
        config = cls(dataset=dataset, **{**defaults, **given})
        for name in config.idle():
            if name in given:
                applies = declarations()[name].setting.applies
                assert applies is not None
                raise ConfigError(
                    f"{option(name)} would do nothing here: it applies only to {applies.words}; "
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
    def from_json(cls, stored: Mapping[str, Any], version: int = FORMAT) -> RunConfig:
        """Read the settings in a run's ``config.json``, of this or an earlier format.

        Raises:
            ConfigError: a setting is missing, unknown, of a wrong type or out of range.
        """
        try:
            settings = renamed_settings(stored)
            if version < 2 and settings["baseline"] != "dropout":
                # Only that baseline dropped units then: in other runs the numbers did nothing.
                settings |= {"dropout_input": 0.0, "dropout_hidden": 0.0}
            lists = {name: tuple(settings[name]) for name in _tuples() if name in settings}
            return cls(**{**settings, **lists, "hidden": tuple(settings["hidden"])})
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"config.json does not hold the settings of a run: {error}"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON."""
        settings = dataclasses.asdict(self)
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in settings.items()
        }

    def unusual(self) -> dict[str, Any]:
        """Return the settings from which ``of`` makes this configuration, as JSON.

        Example:
            >>> RunConfig.of("mnist", kl_warmup=0.5, kl_warmup_power=2.0).unusual()
            {'kl_warmup': 0.5, 'kl_warmup_power': 2.0}
        """
        settings = self.to_json()
        kind = ("dataset", "baseline", "target", "task", "image", "encoder", "adapter")
        given = {name: settings[name] for name in kind if settings[name] not in (None, False)}
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        idle = set(self.idle())
        while True:
            usual = {**fields, **defaults_for(given)}
            differing = (
                name
                for name in settings
                if name not in given and name not in idle and getattr(self, name) != usual[name]
            )
            name = next(differing, None)
            if name is None:
                del given["dataset"]
                return {name: value for name, value in settings.items() if name in given}
            # One at a time, since it can change the defaults of others.
            given[name] = settings[name]
            if name == "optimizer":  # which must be given with its rate
                given["lr"] = settings["lr"]

    def idle(self) -> list[str]:
        """Return the settings that do nothing in this combination."""
        return [
            name
            for name, declared in declarations().items()
            if declared.setting.applies is not None and not declared.setting.applies.holds(self)
        ]

    def make_prior(self, width: float = 1.0) -> Prior:
        """Return the prior that the settings name, ``width`` times as wide."""
        if self.prior == "gaussian":
            return Gaussian(width * self.prior_std)
        if self.prior == "laplace":
            return Laplace(width * self.prior_std / math.sqrt(2.0))
        if self.prior == "grouped-gaussian":
            return GroupedGaussian(self.group_by)
        if self.prior == "log-uniform":
            return LogUniform()
        stds = width * self.std1, width * self.std2
        if self.prior == "spike-and-slab":
            return SpikeAndSlab(self.pi, *stds, by=cast("Unit", self.group_by))
        return ScaleMixture(self.pi, *stds)

    @property
    def pruning_epochs(self) -> tuple[float, float]:
        """The epochs after which pruning in training begins and ends."""
        first, last = self.prune_from, self.prune_until
        return (
            _PRUNE_FROM * self.epochs if first is None else first,
            _PRUNE_UNTIL * self.epochs if last is None else last,
        )

    def make_pruning(self) -> PruningSchedule | None:
        """Return the schedule of pruning in training, or None without one."""
        if not PRUNED.holds(self):
            return None
        return PruningSchedule(self.prune_fraction, *self.pruning_epochs)

    def limits(self) -> Limits:
        """Return the limits of a censored target; open ones for others."""
        return Limits.between(self.censored_below, self.censored_above)

    def make_estimator(self) -> Estimator:
        """Return the estimator that the settings name."""
        return ESTIMATORS[self.estimator]


def _tuples() -> list[str]:
    return [name for name, found in declarations().items() if get_origin(found.kind) is tuple]
