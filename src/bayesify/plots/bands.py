"""Figure of predictive bands along one axis, one panel per method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.figure import Figure

from bayesify.plots.style import COLOURS, styled

__all__ = ["Band", "bands"]


class Band(NamedTuple):
    """Prediction of one method along an axis.

    ``quantiles`` maps a level, such as 0.25, 0.5 or 0.75, to values along the axis. A pair of
    levels q and 1 - q is drawn as a band, 0.5 as a line.

    Example:
        >>> band = Band("a", [0.0, 1.0], {0.25: [0.0, -1.0], 0.5: [0.0, 0.0], 0.75: [0.0, 1.0]})
        >>> band.quantiles[0.5]
        [0.0, 0.0]
    """

    name: str
    axis: Sequence[float]
    quantiles: Mapping[float, Sequence[float]]


@styled
def bands(
    panels: Sequence[Band],
    data: tuple[Sequence[float], Sequence[float]] | None = None,
    truth: Sequence[float] | None = None,
    *,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Draw the median and the bands of predictive distributions in one dimension.

    Args:
        panels: one prediction per panel; all panels share their axes.
        data: inputs and targets of the training data.
        truth: the noiseless curve along the first panel's axis.
        limits: limits of the vertical axis; None shows the data with a margin.

    Raises:
        ValueError: there is nothing to draw, or a method has no median.

    Example:
        >>> band = Band("a", [0.0, 1.0], {0.25: [0.0, -1.0], 0.5: [0.0, 0.0], 0.75: [0.0, 1.0]})
        >>> [ax.get_title(loc="left") for ax in bands([band, band._replace(name="b")]).axes]
        ['a', 'b']
    """
    if not panels:
        raise ValueError("panels must hold at least one method, got none")
    for panel in panels:
        if 0.5 not in panel.quantiles:
            raise ValueError(f"{panel.name} must have the median, 0.5, among its quantiles")
    # The legend needs the width of a panel and a half.
    figure = Figure(figsize=(max(6.8, 4.6 * len(panels)), 3.8), layout="constrained")
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for ax, (name, axis, quantiles) in zip(axes, panels, strict=True):
        for level in sorted(q for q in quantiles if q < 0.5):
            upper = next((q for q in quantiles if math.isclose(q, 1.0 - level)), None)
            if upper is None:
                raise ValueError(f"{name} has the quantile {level:g} but not {1.0 - level:g}")
            inner = level >= 0.25
            ax.fill_between(
                axis,
                quantiles[level],
                quantiles[upper],
                color=COLOURS["blue" if inner else "sky"],
                alpha=0.45 if inner else 0.25,
                linewidth=0,
                label="interquartile range" if level == 0.25 else f"{100 * (upper - level):g} %",
            )
        if data is not None:
            ax.plot(*data, "x", ms=2.5, mew=0.5, color=COLOURS["ink"], alpha=0.6, label="data")
        if truth is not None:
            ax.plot(
                panels[0].axis, truth, ":", lw=1.2, color=COLOURS["grey"], label="without noise"
            )
        ax.plot(axis, quantiles[0.5], color=COLOURS["vermillion"], label="median prediction")
        ax.set(title=name, xlabel="x", xlim=(min(axis), max(axis)))
    axes[0].set_ylabel("y")
    handles: dict[str, Artist] = {}
    for ax in axes:
        found, labels = ax.get_legend_handles_labels()
        handles = {**dict(zip(labels, found, strict=True)), **handles}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    if limits is None and data is not None:
        low, high = min(data[1]), max(data[1])
        limits = low - 0.7 * (high - low), high + 0.7 * (high - low)
    if limits is not None:
        axes[0].set_ylim(limits)
    return figure
