"""Values of named contestants: a panel for each problem, a row for each contestant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import NamedTuple

from matplotlib.figure import Figure

from bayesify.plots.style import COLOURS, styled

__all__ = ["Panel", "rows_figure"]


#: Characters of the longest name of a row with which two panels fit next to each other.
_LONG = 30


class Panel(NamedTuple):
    """The values of a panel by row, one for each seed.

    Args:
        title: the panel's title.
        label: what its axis shows.
        values: by the name of the row.
        floor: where given, the axis begins at 0 and is grey up to here: what is not above it is
            not distinguished from 0.
    """

    title: str
    label: str
    values: Mapping[str, Sequence[float]]
    floor: float | None = None


@styled
def rows_figure(panels: Sequence[Panel]) -> Figure:
    """Draw each seed as a small point and their mean as a large one.

    Raises:
        ValueError: there is nothing to draw.

    Example:
        >>> figure = rows_figure([Panel("toy", "distance", {"plain": [0.1, 0.2]}, 0.01)])
        >>> [text.get_text() for text in figure.axes[0].get_yticklabels()]
        ['plain']
    """
    if not panels:
        raise ValueError("panels must hold at least one panel, got none")
    is_wide = max(len(name) for panel in panels for name in panel.values) > _LONG
    columns = 1 if is_wide else min(2, len(panels))
    counts = [len(panel.values) for panel in panels]
    heights = [
        1.1 + 0.28 * max(counts[first : first + columns])
        for first in range(0, len(panels), columns)
    ]
    size = (7.5 if is_wide else 4.6 * columns, sum(heights))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    for place, panel in enumerate(panels):
        ax = figure.add_subplot(grid[place])
        for row, values in enumerate(panel.values.values()):
            ax.plot(values, [row] * len(values), "o", ms=3, color=COLOURS["sky"])
            ax.plot(mean(values), row, "o", ms=6, color=COLOURS["blue"])
        if panel.floor is not None:
            ax.axvspan(0.0, panel.floor, color=COLOURS["grey"], alpha=0.2, lw=0)
            ax.set_xlim(0.0, 1.05 * max(panel.floor, *map(max, panel.values.values())))
        count = len(panel.values)
        ax.set(title=panel.title, xlabel=panel.label, ylim=(count - 0.5, -0.5))
        ax.set_yticks(range(count), list(panel.values))
    return figure
