"""Figures of regression: what is predicted along one axis, and results beside those of others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bayesify.plots.style import COLOURS, styled

__all__ = ["Band", "bands", "comparison"]


class Band(NamedTuple):
    """What one method predicts along an axis.

    ``quantiles`` holds values along the axis by level, such as 0.25, 0.5 and 0.75; a pair of
    levels q and 1 - q is drawn as a band, 0.5 as a line.
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
    """The median and bands of a predictive distribution in one dimension, a panel a method.

    Args:
        panels: what is predicted; all share their axes.
        data: inputs and targets of the training data.
        truth: the noiseless curve along the first panel's axis.
        limits: of the vertical axis; None shows the data and their surroundings.

    Raises:
        ValueError: there is nothing to draw, or a method has no median.

    Example:
        >>> band = Band("a", [0.0, 1.0], {0.25: [0.0, -1.0], 0.5: [0.0, 0.0], 0.75: [0.0, 1.0]})
        >>> [ax.get_title(loc="left") for ax in bands([band, band._replace(name="b")]).axes]
        ['a', 'b']
    """
    if not panels:
        raise ValueError("a figure of bands needs at least one method, got none")
    for panel in panels:
        if 0.5 not in panel.quantiles:
            raise ValueError(f"{panel.name} must have its median, 0.5, among the quantiles")
    figure = Figure(figsize=(4.6 * len(panels), 3.8), layout="constrained")
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


@styled
def comparison(
    reported: Mapping[str, Mapping[str, float]],
    ours: Mapping[str, tuple[float, float]],
    *,
    label: str = "test nll (nats); further left is better",
) -> Figure:
    """Our results beside reported ones: a panel a data set, a row a method.

    Args:
        reported: by method, by data set.
        ours: by data set the mean and its standard error, drawn as a bar of two on either side.
        label: what the numbers are.

    Raises:
        ValueError: there is nothing to draw.

    Example:
        >>> drawn = comparison({"PBP": {"yacht": 1.63}}, {"yacht": (0.5, 0.1)})
        >>> [text.get_text() for text in drawn.axes[0].get_yticklabels()]
        ['PBP', 'bayesify']
    """
    if not ours:
        raise ValueError("a comparison needs at least one data set, got none")
    columns = min(3, len(ours))
    rows = math.ceil(len(ours) / columns)
    methods = [*reported, "bayesify"]
    height = 0.75 + 0.19 * len(methods)
    figure = Figure(figsize=(3.1 * columns, height * rows + 0.4), layout="constrained")
    for place, (name, (value, error)) in enumerate(ours.items(), start=1):
        ax = figure.add_subplot(rows, columns, place)
        for row, method in enumerate(reported):
            ax.plot(reported[method][name], row, "o", ms=4, color=COLOURS["grey"])
        ax.axvline(value, color=COLOURS["blue"], lw=0.8, alpha=0.4)
        ax.errorbar(
            value, len(reported), xerr=2.0 * error, fmt="o", ms=5, color=COLOURS["blue"], capsize=2
        )
        ax.set(title=name, ylim=(len(methods) - 0.4, -0.6))
        ax.set_yticks(range(len(methods)), methods if place % columns == 1 or columns == 1 else [])
        ax.xaxis.set_major_locator(MaxNLocator(nbins=5))
    figure.supxlabel(f"{label}; bars: two standard errors", fontsize=9)
    return figure
