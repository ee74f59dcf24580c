"""Figure of the distances to the referee: a panel for each problem, a row for each contestant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import NamedTuple

from matplotlib.figure import Figure

from bayesify.plots.style import COLOURS, styled

__all__ = ["Panel", "distance_figure"]


class Panel(NamedTuple):
    """The distances of a problem by contestant, one for each seed, and the referee's own error."""

    title: str
    label: str
    distances: Mapping[str, Sequence[float]]
    floor: float


@styled
def distance_figure(panels: Sequence[Panel]) -> Figure:
    """Draw each seed as a small point and their mean as a large one.

    The grey band ends at the distance between two halves of the referee's own draws.

    Raises:
        ValueError: there is nothing to draw.

    Example:
        >>> figure = distance_figure([Panel("toy", "distance", {"plain": [0.1, 0.2]}, 0.01)])
        >>> [text.get_text() for text in figure.axes[0].get_yticklabels()]
        ['plain']
    """
    if not panels:
        raise ValueError("panels must hold at least one panel, got none")
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    most = max(len(panel.distances) for panel in panels)
    size = (4.6 * columns, (1.1 + 0.28 * most) * rows)
    figure = Figure(figsize=size, layout="constrained")
    for place, panel in enumerate(panels, start=1):
        ax = figure.add_subplot(rows, columns, place)
        for row, values in enumerate(panel.distances.values()):
            ax.plot(values, [row] * len(values), "o", ms=3, color=COLOURS["sky"])
            ax.plot(mean(values), row, "o", ms=6, color=COLOURS["blue"])
        ax.axvspan(0.0, panel.floor, color=COLOURS["grey"], alpha=0.2, lw=0)
        ax.set_xlim(0.0, 1.05 * max(panel.floor, *map(max, panel.distances.values())))
        count = len(panel.distances)
        ax.set(title=panel.title, xlabel=panel.label, ylim=(count - 0.5, -0.5))
        ax.set_yticks(range(count), list(panel.distances))
    return figure
