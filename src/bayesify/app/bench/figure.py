"""Draw the time of each contestant as a multiple of the plain network's."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bayesify.app.bench.contestants import OURS, OWN_LOOP, PLAIN_NET
from bayesify.app.bench.measuring import BenchRow
from bayesify.app.bench.tables import by_group, label_of
from bayesify.plots.style import COLOURS, styled

__all__ = ["step_times"]

_COLOURS = {"compiled": "blue", "closed-form": "sky", OWN_LOOP: "green", OURS: "sky"}
#: Height of a bar with the gap below it, and the margins of a panel in such heights.
_BAR_INCHES, _AROUND = 0.23, 3
_COLUMNS = 2


@styled
def step_times(rows: Sequence[BenchRow]) -> Figure:
    """Draw one bar per contestant, as long as its ratio to the plain network; one panel per case.

    Raises:
        ValueError: there is no row other than the plain network's.

    Example:
        >>> row = {"case": "mlp-400", "batch": 128, "estimator": "none", "path": "plain-net",
        ...        "optimizer": "adam", "ms_median": 2.0, "ms_iqr": 0.1, "ratio": 1.0}
        >>> ours = {**row, "path": "compiled", "estimator": "sampling", "ratio": 1.4}
        >>> [ax.get_title(loc="left") for ax in step_times([row, ours]).axes]
        ['mlp-400, batch 128']
    """
    panels: dict[str, list[tuple[str, BenchRow]]] = {}
    for name, members in by_group(rows).items():
        for row in members:
            asked = row["case"].startswith("predict")
            label = name if asked else label_of(row)
            if row["path"] != PLAIN_NET:
                panels.setdefault("predictions" if asked else name, []).append((label, row))
    if not panels:
        raise ValueError("a figure needs at least one row other than the plain network's, got none")
    columns = min(_COLUMNS, len(panels))
    titles = list(panels)
    lines = [titles[start : start + columns] for start in range(0, len(titles), columns)]
    bars = [max(len(panels[title]) for title in line) for line in lines]
    height = _BAR_INCHES * sum(count + _AROUND for count in bars) + 0.5
    figure = Figure(figsize=(5.2 * columns, height), layout="constrained")
    grid = figure.add_gridspec(len(lines), columns, height_ratios=[n + _AROUND for n in bars])
    for index, (title, labelled) in enumerate(panels.items()):
        line, column = divmod(index, columns)
        ax = figure.add_subplot(grid[line, column])
        ax.set_title(title)
        _draw(ax, labelled, places=bars[line])
        if index + columns >= len(titles):
            ax.set_xlabel("time, as a multiple of the plain network's")
    handles = _legend(rows)
    figure.legend(handles=handles, loc="outside lower center", ncols=3 if columns == 1 else 5)
    return figure


def _legend(rows: Sequence[BenchRow]) -> list[Artist]:
    paths = {row["path"] for members in by_group(rows).values() for row in members}
    names: dict[str, list[str]] = {}
    for path, colour in _COLOURS.items():
        if path in paths:
            names.setdefault(colour, []).append("predictions" if path == OURS else path)
    handles: list[Artist] = [
        Patch(color=COLOURS[colour], label=", ".join(each)) for colour, each in names.items()
    ]
    if paths - {PLAIN_NET, *_COLOURS}:
        handles.append(Patch(color=COLOURS["grey"], label="another library"))
    handles.append(Line2D([], [], color=COLOURS["ink"], ls="--", lw=1.0, label="plain network"))
    if any("ratio_floor" in row for row in rows):
        tick = Line2D([], [], color=COLOURS["orange"], ls="", marker="|", ms=9, mew=2.2)
        tick.set_label("measured floor")
        handles.append(tick)
    return handles


def _draw(ax: Axes, labelled: Sequence[tuple[str, BenchRow]], places: int) -> None:
    longest = max(row["ratio"] for _, row in labelled)
    for place, (_, row) in enumerate(labelled):
        ax.barh(place, row["ratio"], 0.72, color=COLOURS[_colour(row)])
        ax.text(row["ratio"] + 0.015 * longest, place, f"{row['ratio']:.2f}", va="center", size=8)
        if "ratio_floor" in row:
            floor = row["ratio_floor"]
            ax.vlines(floor, place - 0.36, place + 0.36, color=COLOURS["orange"], lw=2.2)
    ax.axvline(1.0, color=COLOURS["ink"], lw=1.0, ls="--")
    ax.set_yticks(range(len(labelled)), [label for label, _ in labelled])
    # All panels of a line have bars of the same height.
    ax.set_ylim(places - 0.4, -0.6)
    ax.set_xlim(0.0, 1.12 * max(longest, 1.0))
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)


def _colour(row: BenchRow) -> str:
    return _COLOURS.get(row["path"], "grey")
