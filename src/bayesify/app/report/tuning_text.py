"""Text on a search of a run's settings, for its report and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["tuning_note", "values_text"]


def tuning_note(tuning: Mapping[str, Any]) -> str:
    """Return the sentence of a report on the search of a run's settings.

    Args:
        tuning: content of ``tuning.json``.

    Example:
        >>> found = {"trials": 9, "parts": 5, "validation_rows": 80, "chosen_trial": 4}
        >>> found |= {"nll_default": 0.5, "nll_chosen": 0.25, "settings_chosen": {"lr": 0.0123456}}
        >>> tuning_note(found)
        'settings chosen among 9 trials by the nll of 80 training rows, held out in 5 parts: 0.5000
        nats with the defaults, 0.2500 with the chosen (lr 0.0123)'
    """
    count = tuning["parts"]
    held_out = f"held out in {count} parts" if count > 1 else "held out"
    found = f"{tuning['nll_default']:.4f} nats with the defaults"
    if tuning["chosen_trial"]:
        found += f", {tuning['nll_chosen']:.4f} with the chosen"
        found += f" ({values_text(tuning['settings_chosen'])})"
    else:
        found += ", which no other trial beat"
    trials = f"{tuning['trials']:,} trial{'s' * (tuning['trials'] > 1)}"
    return (
        f"settings chosen among {trials} by the nll of "
        f"{tuning['validation_rows']:,} training rows, {held_out}: {found}"
    )


def values_text(values: Mapping[str, Any]) -> str:
    """Return the values of searched settings as text.

    Example:
        >>> values_text({"units": 20, "lr": 0.0123456, "noise": "learned"})
        'units 20, lr 0.0123, noise learned'
    """
    return ", ".join(
        f"{name.replace('_', '-')} {f'{value:.3g}' if isinstance(value, float) else value}"
        for name, value in values.items()
    )
