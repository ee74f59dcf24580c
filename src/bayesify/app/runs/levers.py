"""Settings of a table's run that a search varies, their ranges, and the run that values describe.

Their ranges are around the defaults, which were chosen by measurement on many tables. The
temperature is not among them: only 1 is the evidence lower bound, and a search by the nll of few
held-out rows would leave it for a posterior that is too narrow or too wide elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from bayesify.app.runs.run_config import RunConfig

try:
    from optuna.distributions import (
        BaseDistribution,
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )
except ImportError as error:
    raise ImportError("--tune needs optuna; run pip install 'bayesify[tune]'") from error

__all__ = ["chosen_config", "default_values", "levers"]

_UNITS, _MOST_LAYERS = (16, 256), 3
#: Least and greatest value as multiples of the default.
_LR, _PRIOR_STD, _EPOCHS = (0.2, 3.0), (0.1, 4.0), (0.5, 2.0)


def levers(config: RunConfig, given: Collection[str]) -> dict[str, BaseDistribution]:
    """Return the ranges of the settings to search, by the name of each.

    Args:
        config: the run with its default settings.
        given: settings that were asked for, which stay as they are.

    Example:
        >>> config = RunConfig.of("a.csv", target="y", task="regression", num_rows=100)
        >>> list(levers(config, ("lr",)))
        ['units', 'layers', 'epochs', 'prior_std', 'noise', 'relevance']
    """
    fixed = {*given, *config.idle()}
    if (config.prune_from, config.prune_until) != (None, None):
        fixed.add("epochs")  # which these two count
    found: dict[str, BaseDistribution] = {}
    if "hidden" not in fixed and len(set(config.hidden)) == 1:
        found["units"] = IntDistribution(*_UNITS, log=True)
        found["layers"] = IntDistribution(1, _MOST_LAYERS)
    if "lr" not in fixed:
        found["lr"] = _around(config.lr, _LR)
    if "epochs" not in fixed:
        least, most = (max(1, round(config.epochs * by)) for by in _EPOCHS)
        found["epochs"] = IntDistribution(least, most, log=True)
    if "prior_std" not in fixed:
        found["prior_std"] = _around(config.prior_std, _PRIOR_STD)
    if "noise" not in fixed:
        found["noise"] = CategoricalDistribution(("learned", "input-dependent"))
    if "relevance" not in fixed:
        found["relevance"] = CategoricalDistribution(("equal", "learned"))
    return found


def default_values(config: RunConfig, names: Collection[str]) -> dict[str, Any]:
    """Return the values of the searched settings in a run.

    Example:
        >>> default_values(RunConfig.of("a.csv", target="y", hidden=(50, 50)), ("units", "layers"))
        {'units': 50, 'layers': 2}
    """
    values = {**vars(config), "units": config.hidden[0], "layers": len(config.hidden)}
    return {name: values[name] for name in names}


def chosen_config(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return a run with values of the searched settings in place of its own.

    Example:
        >>> config = RunConfig.of("a.csv", target="y")
        >>> chosen_config(config, {"units": 20, "layers": 3, "lr": 0.01}).hidden
        (20, 20, 20)
    """
    changed = dict(values)
    if "units" in changed:
        changed["hidden"] = (changed.pop("units"),) * changed.pop("layers")
    return dataclasses.replace(config, **changed)


def _around(default: float, factors: tuple[float, float]) -> FloatDistribution:
    return FloatDistribution(default * factors[0], default * factors[1], log=True)
