"""Figure of the cumulative regret of bandit agents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from bayesify.plots.style import (
    COLOURS,
    Floats,
    TickFormatter,
    legend_label,
    log_locator,
    plain,
    styled,
)

__all__ = ["RegretCurves", "cumulative_regret"]

_COLOURS = ("blue", "vermillion", "orange", "green", "purple", "sky")
#: Share of the first interactions that may lie below the vertical axis.
_BEGINNING = 0.005


class RegretCurves(NamedTuple):
    """Cumulative regret of one agent in several runs, each as long as ``interactions``.

    Example:
        >>> RegretCurves("Thompson", [1, 2, 3], runs=[[5.0, 9.0, 9.0], [0.0, 5.0, 5.0]]).name
        'Thompson'
    """

    name: str
    interactions: Sequence[int]
    runs: Sequence[Sequence[float]]


@styled
def cumulative_regret(curves: Sequence[RegretCurves]) -> Figure:
    """Draw regret on a logarithmic axis over interactions: the median thick, each run thin.

    The median, because one run in which an agent never learns would be most of the mean.

    Values that are not positive are not drawn. The vertical axis starts at the regret after the
    first 0.5 % of the interactions.

    Args:
        curves: one per agent.

    Raises:
        ValueError: there is none, or a run does not have as many values as its axis.

    Example:
        >>> greedy = RegretCurves("greedy", [1, 10], [[5.0, 40.0], [1.0, 900.0], [2.0, 60.0]])
        >>> cumulative_regret([greedy]).axes[0].lines[-1].get_ydata().tolist()
        [2.0, 60.0]
    """
    if not curves:
        raise ValueError("curves must hold at least one agent, got none")
    figure = Figure(figsize=(6.8, 4.4), layout="constrained")
    ax = figure.subplots()
    lowest = math.inf
    for place, (name, interactions, runs) in enumerate(curves):
        if not len(runs) or any(len(run) != len(interactions) for run in runs):
            raise ValueError(
                f"{name} needs at least one run, each with {len(interactions)} values as its "
                f"axis, got runs of {[len(run) for run in runs]}"
            )
        colour = COLOURS[_COLOURS[place % len(_COLOURS)]]
        values = np.array(runs, dtype=np.float64)
        if len(runs) > 1:
            for run in values:
                ax.plot(interactions, _positive(run), color=colour, lw=0.7, alpha=0.45)
        middle = _positive(np.median(values, axis=0))
        ax.plot(interactions, middle, color=colour, lw=2.2, label=legend_label(name))
        shown = middle[np.array(interactions) >= _BEGINNING * interactions[-1]]
        lowest = min([lowest, *shown[np.isfinite(shown)]])
    ax.set_yscale("log")
    if math.isfinite(lowest):  # the first few would fill half of the axis
        ax.set_ylim(bottom=0.8 * lowest)
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(log_locator(high / low))
    ax.yaxis.set_minor_locator(NullLocator())
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(TickFormatter(plain))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    ax.set_xlim(left=0)
    ax.set(
        xlabel="interactions",
        ylabel="cumulative regret",
        title="Cumulative regret: runs, and their median",
    )
    ax.legend(loc="lower right")
    return figure


def _positive(values: Floats) -> Floats:
    return np.where(values > 0.0, values, np.nan)
