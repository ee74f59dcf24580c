"""Figure of mean ranks: a panel for each kind of sets, a row for each model."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bayesify.plots.style import COLOURS, styled

__all__ = ["rank_figure"]

_MARKS = (("blue", "o"), ("vermillion", "s"), ("green", "^"), ("orange", "D"))
#: Ranks by the title of the score, then of the model.
Ranks = Mapping[str, Mapping[str, float]]


@styled
def rank_figure(panels: Mapping[str, Ranks], first: str) -> Figure:
    """Draw mean ranks; the models of a panel are sorted by their first score.

    Args:
        panels: mean ranks by the title of the panel, of the score and of the model.
        first: the title of the model whose name is in bold.

    Raises:
        ValueError: there is nothing to draw.

    Example:
        >>> figure = rank_figure({"Numbers": {"nll": {"x": 2.0, "y": 1.0}}}, "x")
        >>> [text.get_text() for text in figure.axes[0].get_yticklabels()]
        ['y', 'x']
    """
    if not panels:
        raise ValueError("panels must hold at least one panel, got none")
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.4 * rows), layout="constrained")
    for place, (title, scores) in enumerate(panels.items(), start=1):
        ax = figure.add_subplot(rows, columns, place)
        by_first = next(iter(scores.values()))
        names = sorted(
            dict.fromkeys(name for ranks in scores.values() for name in ranks),
            key=lambda name: by_first.get(name, float("inf")),
        )
        for (score, ranks), (colour, marker) in zip(scores.items(), _MARKS, strict=False):
            shown = [name for name in names if name in ranks]
            ax.plot(
                [ranks[name] for name in shown],
                [names.index(name) for name in shown],
                marker,
                color=COLOURS[colour],
                ms=5.5,
                label=score,
            )
        ax.set(title=title, ylim=(len(names) - 0.5, -0.5), xlim=(0.5, len(names) + 0.5))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        ax.set_xlabel("mean rank; 1 is best")
        ax.set_yticks(range(len(names)), names)
        for label in ax.get_yticklabels():
            if label.get_text() == first:
                label.set_fontweight("bold")
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))  # no point is hidden
    return figure
