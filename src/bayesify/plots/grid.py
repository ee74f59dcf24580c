"""Figure of a grid search: the result of each point along one of the axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from bayesify.plots.style import COLOURS, TickFormatter, plain, styled

__all__ = ["Mark", "grid_lines"]

#: x and y of each point of a line, in any order.
Points = Sequence[tuple[float, float]]
_LINES = (("blue", "o"), ("vermillion", "s"), ("green", "^"), ("purple", "D"), ("orange", "v"))


class Mark(NamedTuple):
    """A point of the grid with its reported result."""

    panel: str
    line: str
    x: float
    reported: float


@styled
def grid_lines(
    panels: Mapping[str, Mapping[str, Points]],
    marks: Sequence[Mark] = (),
    *,
    xlabel: str,
    ylabel: str,
) -> Figure:
    """Draw a panel per value of one parameter, and a line per value of another, over a third.

    Args:
        panels: points by title of the panel, then by label of the line; x positive, on a
            logarithmic axis. Lines of one label look alike in all panels.
        marks: reported results, each a cross in the colour of its line. Those without a panel are
            left out.
        xlabel: name of the third parameter.
        ylabel: name of the result, with its unit.

    Raises:
        ValueError: there is no point, there are more than five lines, or an x is not
            positive.

    Example:
        >>> lines = {"sigma1 = 1": [(0.01, 2.1), (0.1, 2.5)]}
        >>> figure = grid_lines({"pi = 0.5": lines}, xlabel="sigma2", ylabel="error (%)")
        >>> figure.axes[0].get_title(loc="left")
        'pi = 0.5'
    """
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    places = [x for lines in panels.values() for points in lines.values() for x, _ in points]
    if not places:
        raise ValueError("panels must hold at least one point, got none")
    if len(labels) > len(_LINES):
        raise ValueError(f"panels must have at most {len(_LINES)} lines, got {len(labels)}")
    if not all(x > 0.0 for x in places):
        raise ValueError(f"x must be positive for a logarithmic axis, got {min(places):g}")
    looks = dict(zip(labels, _LINES, strict=False))
    figure = Figure(figsize=(1.0 + 4.2 * len(panels), 4.4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, sharex=True, squeeze=False)[0]
    handles = {}
    for ax, (title, lines) in zip(axes, panels.items(), strict=True):
        for label, points in lines.items():
            if not points:
                continue
            colour, marker = looks[label]
            (handles[label],) = ax.plot(
                *zip(*sorted(points), strict=True), f"{marker}-", color=COLOURS[colour], ms=4.5
            )
        for mark in marks:
            if mark.panel == title and mark.line in looks:
                (handles["reported"],) = ax.plot(
                    [mark.x],
                    [mark.reported],
                    ls="none",
                    marker="X",
                    ms=9,
                    mfc=COLOURS[looks[mark.line][0]],
                    mec=COLOURS["ink"],
                    mew=1.0,
                    zorder=4,
                )
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(TickFormatter(plain))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.yaxis.set_major_formatter(TickFormatter(plain))
        ax.set(title=title, xlabel=xlabel)
    axes[0].set_ylabel(ylabel)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 4)
    )
    return figure
