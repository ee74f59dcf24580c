"""Figures that compare repeated runs with each other and with reported results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bayesify.plots.curves import logit_places, spaced_out
from bayesify.plots.style import COLOURS, Floats, legend_label, scale_y, styled

__all__ = ["Curve", "comparison", "curves_compared", "pruning_compared"]

_OURS = (
    ("blue", "o"),
    ("vermillion", "s"),
    ("green", "^"),
    ("orange", "D"),
    ("purple", "v"),
    ("sky", "P"),
    ("ink", "*"),
    ("grey", "X"),
)
_REPORTED = (("ink", "--", "x"), ("grey", ":", "+"), ("sky", "-.", "1"))
_MOST_MARKERS = 15
_Placed = Callable[[Sequence[float]], Sequence[float]]


class Curve(NamedTuple):
    """One quantity measured along an axis in several runs.

    ``values`` has one sequence per run, as long as ``x``. Curves of one name look the same in every
    panel; ``reported`` ones, from the literature, are dashed; ``points`` have markers and no line.

    Example:
        >>> ours = Curve("ours", [1, 2], [[90.0, 95.0], [91.0, 96.0]])  # two runs
        >>> len(ours.values), ours.reported
        (2, False)
    """

    name: str
    x: Sequence[float]
    values: Sequence[Sequence[float]]
    reported: bool = False
    points: bool = False

    @classmethod
    def by_epoch(cls, name: str, runs: Sequence[Sequence[float]]) -> Curve:
        """Return a curve of runs with one number per epoch, from the first.

        Example:
            >>> Curve.by_epoch("ours", [[3.0, 2.0]]).x
            range(1, 3)
        """
        return cls(name, range(1, len(runs[0]) + 1), runs)

    @classmethod
    def level(cls, name: str, epochs: int, value: float) -> Curve:
        """Return one reported number as a horizontal line across ``epochs``."""
        return cls(name, [1, epochs], [[value, value]], reported=True)


@styled
def curves_compared(
    panels: Mapping[str, Sequence[Curve]],
    *,
    xlabel: str = "epoch",
    ylabel: str,
    top: float | None = None,
) -> Figure:
    """Draw the means of runs, and reported curves, in one panel per title.

    A band is the mean +- one standard error over the runs; a single run has none. The vertical
    axis is logarithmic where the values span more than a factor of 5.

    Args:
        panels: the curves of each panel by its title.
        xlabel: name of the horizontal axis.
        ylabel: name of the values, with their unit.
        top: upper end of a linear vertical axis, used if some of the means lie below it; None
            shows all values.

    Raises:
        ValueError: there is nothing to draw, or a run does not have as many values as its axis.

    Example:
        >>> ours = Curve("ours", [1, 2], [[90.0, 95.0], [91.0, 96.0]])
        >>> paper = Curve("paper", [1, 2], [[89.0, 94.0]], reported=True)
        >>> drawn = curves_compared({"Test": [paper, ours]}, ylabel="accuracy (%)")
        >>> [line.get_ydata().tolist() for line in drawn.axes[0].lines]
        [[89.0, 94.0], [90.5, 95.5]]
    """
    figure, axes = _drawn(panels, lambda x: x)
    whole = all(float(x).is_integer() for curves in panels.values() for c in curves for x in c.x)
    for ax in axes:
        ax.xaxis.set_major_locator(MaxNLocator(integer=whole, nbins=8, min_n_ticks=1))
        ax.set_xlabel(xlabel)
    axes[0].set_ylabel(ylabel)
    lowest = min(float(_values(c).mean(0).min()) for curves in panels.values() for c in curves)
    if top is not None and lowest < top:
        axes[0].set_yscale("linear")
        axes[0].set_ylim(lowest - 0.05 * (top - lowest), top)
        axes[0].yaxis.set_major_locator(MaxNLocator(nbins=8))
    return figure


@styled
def pruning_compared(
    panels: Mapping[str, Sequence[Curve]], *, ylabel: str = "test error (%)"
) -> Figure:
    """Draw the error over the share of removed weights, of several runs and as reported.

    The share is on a logit axis, as in ``plots.pruning_curve``; bands are those of
    :func:`curves_compared`.

    Args:
        panels: the curves of each panel by its title; their ``x`` is the removed share, from 0
            to 1.
        ylabel: name of the values, with their unit.

    Raises:
        ValueError: as for :func:`curves_compared`.

    Example:
        >>> curve = Curve("ours", [0.5, 0.95], [[2.0, 3.0]])
        >>> drawn = pruning_compared({"2x400": [curve]})
        >>> [label.get_text() for label in drawn.axes[0].get_xticklabels()]
        ['50 %', '95 %']
    """
    shares = sorted({float(x) for curves in panels.values() for curve in curves for x in curve.x})
    place_of = dict(zip(shares, logit_places(shares), strict=True))
    figure, axes = _drawn(panels, lambda shares: [place_of[share] for share in shares])
    places = [*place_of.values()]
    shown = spaced_out(places, shares, room=0.115 if len(axes) > 1 else 0.075)
    labels = [
        f"{100.0 * share:.4g} %" if fits else "" for share, fits in zip(shares, shown, strict=True)
    ]
    for ax in axes:
        ax.set_xticks(places, labels)
        ax.set_xlabel("share of the weights removed")
    axes[0].set_ylabel(ylabel)
    return figure


@styled
def comparison(
    reported: Mapping[str, Mapping[str, float]],
    ours: Mapping[str, tuple[float, float]],
) -> Figure:
    """Draw our results and reported ones: one panel per data set, one row per method.

    Args:
        reported: reported test nll, in nats, by method and data set.
        ours: mean and standard error by data set; the bar is two standard errors on either side.

    Raises:
        ValueError: there is nothing to draw.

    Example:
        >>> drawn = comparison({"PBP": {"yacht": 1.63}}, {"yacht": (0.5, 0.1)})
        >>> [text.get_text() for text in drawn.axes[0].get_yticklabels()]
        ['PBP', 'bayesify']
    """
    if not ours:
        raise ValueError("ours must hold at least one data set, got none")
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
    label = "test nll (nats); further left is better; bars: two standard errors"
    figure.supxlabel(label, fontsize=9)
    return figure


def _drawn(panels: Mapping[str, Sequence[Curve]], placed: _Placed) -> tuple[Figure, list[Axes]]:
    names = dict.fromkeys((c.reported, c.name) for curves in panels.values() for c in curves)
    if not names:
        raise ValueError("curves must hold at least one curve, got none")
    ours = [name for reported, name in names if not reported]
    theirs = [name for reported, name in names if reported]
    width = 4.6 if len(panels) > 1 else 6.8
    figure = Figure(figsize=(width * len(panels), 4.2), layout="constrained")
    axes = list(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0])
    shown, handles = [], dict[str, Artist]()
    for ax, (title, curves) in zip(axes, panels.items(), strict=True):
        for curve in curves:
            values = _values(curve)
            x, mean = placed(curve.x), values.mean(0)
            few = len(x) <= _MOST_MARKERS
            if curve.reported:
                colour, dashes, cross = _REPORTED[theirs.index(curve.name) % len(_REPORTED)]
                marker = cross if curve.points else "x"
            else:
                colour, marker = _OURS[ours.index(curve.name) % len(_OURS)]
                dashes = "-"
            dashes = "none" if curve.points else dashes
            colour = COLOURS["ink" if curve.points and curve.reported else colour]
            (handles[curve.name],) = ax.plot(
                x,
                mean,
                linestyle=dashes,
                color=colour,
                marker=marker if few or curve.points else "",
                ms=6 if curve.points and curve.reported else 4,
                label=legend_label(curve.name),
            )
            shown.append(mean)
            if len(values) > 1:
                error = values.std(0, ddof=1) / len(values) ** 0.5
                ax.fill_between(x, mean - error, mean + error, color=colour, alpha=0.2, lw=0)
        ax.set_title(title)
    flat = np.concatenate(shown)
    scale_y(axes[0], flat[np.isfinite(flat)])
    # Three columns fit a single panel's width where labels are short.
    columns = 3 if len(axes) > 1 or max(map(len, handles), default=0) <= 24 else 2
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)
    return figure, axes


def _values(curve: Curve) -> Floats:
    if not len(curve.values) or any(len(run) != len(curve.x) for run in curve.values):
        raise ValueError(
            f"{curve.name} needs at least one run, each with {len(curve.x)} values as its axis, "
            f"got runs of {[len(run) for run in curve.values]}"
        )
    return np.array(curve.values, dtype=np.float64)
