"""Figures of what a network makes of a table's columns: importance and effect."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bayesify.plots.style import COLOURS, TickFormatter, legend_label, shortened, styled, tick

__all__ = ["EffectLine", "effect_along_axis", "effect_of_levels", "importance_bars"]

#: Widths in inches; a phone shows the effects at their full size.
_EFFECT_WIDTH, _IMPORTANCE_WIDTH = 3.1, 4.8
_MINUTES = 24 * 60  #: of a day
_LINES = ("blue", "vermillion", "green", "purple")


class EffectLine(NamedTuple):
    """Effect of a column on one number: values along the grid, and their interval.

    Args:
        name: name in the legend; empty for the only line.
        values: shape (G,).
        low: lower ends of the interval over weight samples.
        high: upper ends.
        spread: ends of the interval over rows, or None.

    Example:
        >>> EffectLine("", [1.0, 2.0], low=[0.5, 1.5], high=[1.5, 2.5]).spread is None
        True
    """

    name: str
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    spread: tuple[Sequence[float], Sequence[float]] | None = None


@styled
def importance_bars(
    rises: Sequence[tuple[str, float, float, float]], *, label: str, title: str
) -> Figure:
    """Draw the importance of columns with its intervals, in the order given, from the top.

    Args:
        rises: name, rise, and lower and upper end of its interval, of each column.
        label: name of the loss that rises, with its unit.
        title: title of the figure.

    Raises:
        ValueError: there is no column.

    Example:
        >>> figure = importance_bars([("age", 0.5, 0.4, 0.6)], label="nll (nats)", title="Age")
        >>> [text.get_text() for text in figure.axes[0].get_yticklabels()]
        ['age']
    """
    if not rises:
        raise ValueError("rises must hold at least one column, got none")
    names, values, low, high = (np.array(part) for part in zip(*rises, strict=True))
    places = np.arange(len(names))
    figure = Figure(figsize=(_IMPORTANCE_WIDTH, 1.1 + 0.27 * len(names)), layout="constrained")
    ax = figure.subplots()
    ax.axvline(0.0, color=COLOURS["grey"], lw=1.0)
    ax.barh(places, values, height=0.62, color=COLOURS["sky"], alpha=0.55)
    ax.hlines(places, low, high, color=COLOURS["ink"], lw=1.3)
    ax.plot(values, places, "o", ms=4, color=COLOURS["blue"])
    ax.set(ylim=(len(names) - 0.4, -0.6), xlabel=shortened(label, 40), title=title)
    ax.set_yticks(places, [shortened(name, end=12) for name in names.tolist()])
    ax.grid(visible=False, axis="y")
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5))
    ax.xaxis.set_major_formatter(TickFormatter(tick))
    _shorten_title(figure, ax)
    return figure


@styled
def effect_along_axis(
    axis: Sequence[float],
    lines: Sequence[EffectLine],
    *,
    title: str,
    label: str,
    limits: tuple[float, float] | None = None,
    marks: Sequence[float] = (),
    dates: bool = False,
) -> Figure:
    """Draw the effect of a column of numbers or dates.

    Args:
        axis: G values of the column, or days since 1970.
        lines: the effect on one number, or on several.
        title: title of the figure.
        label: name of what is predicted.
        limits: limits of the vertical axis; None fits them.
        marks: places of ticks at the bottom, such as deciles of the data.
        dates: whether the axis holds days since 1970.

    Raises:
        ValueError: there is no line.

    Example:
        >>> line = EffectLine("", [0.0, 1.0], [-0.1, 0.8], [0.1, 1.2])
        >>> effect_along_axis([5.0, 7.0], [line], title="age", label="y").axes[0].get_ylabel()
        'y'
    """
    figure, ax = _panel(lines, title, label, 2.9)
    few = "o" if len(axis) <= 12 else ""
    for line, colour in zip(lines, _LINES, strict=False):
        if line.spread is not None:
            ax.fill_between(axis, *line.spread, color=COLOURS["grey"], alpha=0.2, lw=0)
        ax.fill_between(axis, line.low, line.high, color=COLOURS[colour], alpha=0.3, lw=0)
        ax.plot(
            axis,
            line.values,
            f"{few}-",
            ms=3.5,
            color=COLOURS[colour],
            label=legend_label(line.name),
        )
    if limits is not None:
        ax.set_ylim(limits)
    if len(marks):
        # On the frame, whatever the values.
        ax.plot(
            marks,
            np.zeros(len(marks)),
            "|",
            ms=7,
            color=COLOURS["ink"],
            transform=ax.get_xaxis_transform(),
        )
    if dates:
        places, labels = _date_ticks(axis)
        ax.set_xticks(places, labels)
    else:
        ax.xaxis.set_major_locator(MaxNLocator(nbins=5))
        ax.xaxis.set_major_formatter(TickFormatter(tick))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=6))
    ax.yaxis.set_major_formatter(TickFormatter(tick))
    _legend(figure, lines)
    _shorten_title(figure, ax)
    return figure


@styled
def effect_of_levels(
    labels: Sequence[str],
    lines: Sequence[EffectLine],
    *,
    title: str,
    label: str,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Draw the effect of the levels of a column, from the top.

    Args:
        labels: G names of the levels.
        lines: as for :func:`effect_along_axis`.
        title: title of the figure.
        label: name of what is predicted.
        limits: limits of the horizontal axis; None fits them.

    Raises:
        ValueError: there is no line.

    Example:
        >>> line = EffectLine("", [0.0, 1.0], [-0.1, 0.8], [0.1, 1.2])
        >>> effect_of_levels(["no", "yes"], [line], title="sold", label="y").axes[0].get_xlabel()
        'y'
    """
    names = [shortened(text, 16) for text in labels]
    figure, ax = _panel(lines, title, "", max(1.1 + 0.24 * len(labels), 1.9))
    places = np.arange(len(labels))
    for number, (line, colour) in enumerate(zip(lines, _LINES, strict=False)):
        shifted = places + 0.18 * (number - 0.5 * (len(lines) - 1))
        if line.spread is not None:
            ax.hlines(shifted, *line.spread, color=COLOURS["grey"], alpha=0.25, lw=9)
        ax.hlines(shifted, line.low, line.high, color=COLOURS[colour], lw=2.5, alpha=0.5)
        ax.plot(
            line.values, shifted, "o", ms=4.5, color=COLOURS[colour], label=legend_label(line.name)
        )
    ax.set(ylim=(len(labels) - 0.4, -0.6), xlabel=shortened(label, 25))
    if limits is not None:
        ax.set_xlim(limits)
    ax.set_yticks(places, names)
    ax.grid(visible=False, axis="y")
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5))
    ax.xaxis.set_major_formatter(TickFormatter(tick))
    _legend(figure, lines)
    _shorten_title(figure, ax)
    return figure


def _date_ticks(days: Sequence[float]) -> tuple[list[float], list[str]]:
    """Return the first, the middle and the last day, each with a text of the precision needed."""
    first, last = days[0], days[-1]
    if last - first < 2.0:
        places = [first, 0.5 * (first + last), last]
        times = np.round(np.array(places) * _MINUTES).astype("datetime64[m]")
        return places, [str(time).replace("T", " ") for time in times]
    places = [first, float(round(0.5 * (first + last))), last]
    unit = "Y" if last - first > 3000.0 else "M" if last - first > 150.0 else "D"
    known = np.floor(places).astype("datetime64[D]")
    return places, [str(text) for text in known.astype(f"datetime64[{unit}]")]


def _panel(
    lines: Sequence[EffectLine], title: str, label: str, height: float
) -> tuple[Figure, Axes]:
    if not 1 <= len(lines) <= len(_LINES):
        raise ValueError(f"lines must hold from one to {len(_LINES)} lines, got {len(lines)}")
    rows = math.ceil(len(lines) / _legend_columns(lines)) if lines[0].name else 0
    legend = 0.15 * rows if rows else 0.0
    figure = Figure(figsize=(_EFFECT_WIDTH, height + legend), layout="constrained")
    ax = figure.subplots()
    ax.set_title(title)
    ax.set_ylabel(shortened(label, 32))
    return figure, ax


def _shorten_title(figure: Figure, ax: Axes) -> None:
    """Shorten the title until it ends within the picture.

    It begins at the axis, and long labels of the axis leave less room.
    """
    title = ax.get_title(loc="left")
    shown, most = ax.set_title(title), len(title)
    with warnings.catch_warnings():  # of characters that the font lacks; saving warns too
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)
        figure.draw_without_rendering()
    while most > 1 and shown.get_window_extent().x1 > figure.bbox.x1:
        most -= 1
        shown.set_text(shortened(title, most))


def _legend_columns(lines: Sequence[EffectLine]) -> int:
    """Return the columns of the legend: long names have no room next to each other."""
    return 2 if max(len(line.name) for line in lines) <= 13 else 1


def _legend(figure: Figure, lines: Sequence[EffectLine]) -> None:
    if lines[0].name:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        names = [shortened(label, 34) for label in labels]
        columns = _legend_columns(lines)
        figure.legend(handles, names, loc="outside lower center", ncols=columns)
