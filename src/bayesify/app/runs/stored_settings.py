"""The format of stored settings, and the names of today for those of earlier formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bayesify.app.runs.defaults import closed_forms_hold

__all__ = ["FORMAT", "renamed_settings"]

#: Of ``config.json``. 2: dropout also without the dropout baseline. 3: ``backend``, not ``step``.
FORMAT = 3


def renamed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored settings, some or all of a run's, under their names of today.

    Example:
        >>> renamed_settings({"epochs": 3, "step": "fused"})
        {'epochs': 3, 'backend': 'compiled'}
    """
    renamed = dict(settings)
    if "step" in renamed:
        plain = "closed-form" if closed_forms_hold(settings) else "autograd"
        backends = {"auto": "auto", "fused": "compiled", "plain": plain}
        step = renamed.pop("step")
        renamed["backend"] = backends.get(step, step)
    return renamed
