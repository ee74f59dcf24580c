"""Figures of a run: learning curves, calibration, pruning, and the digits themselves.

Every function takes plain data and returns a :class:`matplotlib.figure.Figure`, made without
pyplot, so that nothing global is opened or left changed. Figures of the weights are in
``weight_plots``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from bayesify.metrics import Reliability

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
except ImportError as error:
    raise ImportError("figures need matplotlib; run pip install 'bayesify[cli]'") from error

__all__ = [
    "COLOURS",
    "STYLE",
    "Row",
    "digit_gallery",
    "learning_curves",
    "pruning_curve",
    "reliability_diagram",
]

#: One epoch of a history, or one line of a pruning table; what is missing or None is not drawn.
Row = Mapping[str, float | None]
Floats = npt.NDArray[np.float64]

#: Okabe and Ito's palette, told apart under every common kind of colour blindness.
COLOURS = {
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "green": "#009E73",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "purple": "#CC79A7",
    "ink": "#222222",
    "grey": "#8a8a8a",
}

#: The look that all figures share, applied with ``matplotlib.rc_context``.
STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": COLOURS["grey"],
    "axes.facecolor": "white",
    "axes.grid": True,
    "axes.labelcolor": COLOURS["ink"],
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.unicode_minus": True,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.hspace": 0.06,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.wspace": 0.05,
    "figure.facecolor": "white",
    "figure.titlesize": 11,
    "figure.titleweight": "bold",
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "grid.color": "#e8e8e8",
    "grid.linewidth": 0.8,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "text.color": COLOURS["ink"],
    "text.usetex": False,
    "xtick.color": COLOURS["grey"],
    "xtick.labelcolor": COLOURS["ink"],
    "xtick.labelsize": 8.5,
    "ytick.color": COLOURS["grey"],
    "ytick.labelcolor": COLOURS["ink"],
    "ytick.labelsize": 8.5,
}

_BASELINE_LOOKS = (("green", "--"), ("orange", "-."), ("purple", ":"), ("sky", "--"))


@mpl.rc_context(STYLE)
def learning_curves(
    history: Sequence[Row],
    baselines: Mapping[str, Sequence[Row]] | None = None,
    *,
    error_label: str = "error (%)",
) -> Figure:
    """The objective, the error, the KL and the posterior's width over epochs.

    A panel whose numbers are all missing (or, for a plain network's KL, zero) is left out.

    Args:
        history: a row an epoch with keys among ``epoch``, ``loss`` and ``nll`` (nats per example),
            ``kl`` (nats), ``train_error``, ``test_error`` (percent) and ``std_median``.
        baselines: histories of other runs by name, whose test errors are drawn beside.
        error_label: what the errors measure, with its unit.

    Raises:
        ValueError: there is nothing to draw.

    Example:
        >>> rows = [{"epoch": 1, "nll": 0.5, "loss": 2.0}, {"epoch": 2, "nll": 0.3, "loss": 1.5}]
        >>> [ax.get_title(loc="left") for ax in learning_curves(rows).axes]
        ['Objective']
    """
    panels: dict[str, tuple[str, list[tuple[str, str, str, Floats]]]] = {
        "Objective": (
            "nats per example",
            [
                ("loss: nll + KL / N", "vermillion", "-", _series(history, "loss")),
                ("nll of the training data", "blue", "-", _series(history, "nll")),
            ],
        ),
        "Error": (
            error_label,
            [
                ("train, sampled weights", "sky", "-", _series(history, "train_error")),
                ("test, mean weights", "blue", "-", _series(history, "test_error")),
            ],
        ),
        "Complexity": ("KL(q || p) (nats)", [("", "blue", "-", _series(history, "kl"))]),
        "Width of the posterior": (
            "median std of the weights",
            [("", "blue", "-", _series(history, "std_median"))],
        ),
    }
    for index, (name, rows) in enumerate((baselines or {}).items()):
        colour, dashes = _BASELINE_LOOKS[index % len(_BASELINE_LOOKS)]
        panels["Error"][1].append((f"test, {name}", colour, dashes, _series(rows, "test_error")))
    if not np.any(panels["Complexity"][1][0][3][:, 1:]):
        del panels["Complexity"]
    shown = {
        title: (unit, [line for line in lines if len(line[3])])
        for title, (unit, lines) in panels.items()
        if any(len(line[3]) for line in lines)
    }
    if not shown:
        raise ValueError("learning curves need at least one row with a number, got none")

    columns = min(2, len(shown))
    figure = Figure(figsize=(4.6 * columns, 2.9 * math.ceil(len(shown) / columns)), layout="constrained")
    for place, (title, (unit, lines)) in enumerate(shown.items(), start=1):
        ax = figure.add_subplot(math.ceil(len(shown) / columns), columns, place)
        for label, colour, dashes, points in lines:
            marker = "o" if len(points) <= 15 else ""
            ax.plot(*points.T, dashes, color=COLOURS[colour], label=label, marker=marker, ms=3.5)
        ax.set(title=title, xlabel="epoch", ylabel=unit)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        _scale_y(ax, np.concatenate([line[3][:, 1] for line in lines]))
        if any(line[0] for line in lines):
            ax.legend(loc="best")
    return figure


@mpl.rc_context(STYLE)
def reliability_diagram(reliability: Reliability, ece: float) -> Figure:
    """Accuracy against confidence, over the number of data in each bin.

    The vertical lines are 95 % Wilson intervals: where they are long a bin holds too few data to
    say much.

    Args:
        reliability: from :func:`bayesify.metrics.reliability`.
        ece: expected calibration error, a fraction from 0 to 1.

    Example:
        >>> import torch
        >>> from bayesify.metrics import reliability
        >>> r = reliability(torch.tensor([[0.7, 0.3], [0.9, 0.1]]), torch.tensor([1, 0]))
        >>> len(reliability_diagram(r, ece=0.2).axes)
        2
    """
    edges, counts = reliability.edges.numpy(), reliability.counts.numpy()
    full = counts > 0
    n, accuracy = counts[full], reliability.accuracy.numpy()[full]
    confidence = reliability.confidence.numpy()[full]
    left, width = edges[:-1][full], np.diff(edges)[full]

    figure = Figure(figsize=(6.4, 6.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    top.bar(left, accuracy, width, align="edge", color=COLOURS["sky"], alpha=0.45, edgecolor="white")
    top.plot((0, 1), (0, 1), "--", color=COLOURS["grey"], lw=1.2, label="perfectly calibrated")
    low, high = _wilson(accuracy, n)
    top.vlines(confidence, low, high, color=COLOURS["blue"], lw=1.2)
    top.plot(confidence, accuracy, "o", ms=4.5, color=COLOURS["blue"], label="accuracy, 95 % interval")
    top.set(ylabel="accuracy (fraction correct)", xlim=(0, 1), ylim=(0, 1.02))
    top.set_title(f"Expected calibration error {ece:.4f}")
    top.legend(loc="upper left")

    bottom.bar(left, n, width, align="edge", color=COLOURS["grey"], alpha=0.6, edgecolor="white")
    bottom.set_yscale("log")
    bottom.set_ylim(0.7, 3.0 * n.max())
    bottom.yaxis.set_major_locator(LogLocator(numticks=5))
    bottom.yaxis.set_minor_locator(NullLocator())
    bottom.yaxis.set_major_formatter(FuncFormatter(_plain))
    bottom.set(xlabel="confidence: probability of the predicted class", ylabel="examples")
    return figure


@mpl.rc_context(STYLE)
def pruning_curve(table: Sequence[Row], baseline_error: float | None) -> Figure:
    """The error as weights are removed, those of the lowest signal-to-noise ratio first.

    The share removed is on a logit axis, which gives both 10 % and 99 % their room. If the table
    has ``file_bytes``, a second panel shows the size on disk.

    Args:
        table: rows with ``fraction`` (removed, 0 to 1), ``weights_left``, ``error_mean_weights``,
            and perhaps ``error_predictive`` (percent) and ``file_bytes``.
        baseline_error: error of the whole network with its mean weights, in percent, or None.

    Raises:
        ValueError: the table is empty.

    Example:
        >>> row = {"fraction": 0.5, "weights_left": 500, "error_mean_weights": 2.0}
        >>> pruning_curve([row], baseline_error=1.9).axes[0].get_xticklabels()[0].get_text()
        '50 %\\n500 left'
    """
    if not table:
        raise ValueError("a pruning curve needs at least one row, got none")
    rows = sorted(table, key=lambda row: _number(row, "fraction"))
    places = _logit_places([_number(row, "fraction") for row in rows])
    sizes = _points(places, rows, "file_bytes")

    figure = Figure(figsize=(8.6, 6.0 if len(sizes) else 4.2), layout="constrained")
    axes = figure.subplots(
        2 if len(sizes) else 1, 1, sharex=True, squeeze=False, height_ratios=(2, 1)[: 1 + bool(len(sizes))]
    )[:, 0]
    top = axes[0]
    values = [] if baseline_error is None else [baseline_error]
    for key, label, colour, marker in (
        ("error_mean_weights", "mean weights", "blue", "o"),
        ("error_predictive", "averaged over weight samples", "vermillion", "s"),
    ):
        points = _points(places, rows, key)
        if len(points):
            top.plot(*points.T, f"{marker}-", color=COLOURS[colour], ms=4.5, label=label)
            values.extend(points[:, 1])
    if baseline_error is not None:
        label = f"nothing removed, mean weights: {baseline_error:.2f} %"
        top.axhline(baseline_error, ls="--", lw=1.2, color=COLOURS["grey"], label=label)
    top.set(title="Pruning by signal-to-noise ratio", ylabel="test error (%)")
    _scale_y(top, np.array(values))
    top.legend(loc="upper left")
    if len(sizes):
        axes[1].plot(*sizes.T, "o-", color=COLOURS["green"], ms=4.5)
        axes[1].set(ylabel="size on disk (bytes)")
        _scale_y(axes[1], sizes[:, 1], FuncFormatter(lambda value, _: _compact(value)))

    bottom = axes[-1]
    bottom.set_xlabel("weights removed, and how many are left")
    labels = _spaced_out(places, [_left_label(row) for row in rows])
    bottom.set_xticks(places, labels)
    return figure


@mpl.rc_context(STYLE)
def digit_gallery(
    images: Tensor,
    targets: Tensor,
    probs: Tensor,
    epistemic: Tensor,
    total: Tensor,
    class_names: Sequence[str],
    title: str,
) -> Figure:
    """Images, each with its predictive distribution as a bar chart.

    Args:
        images: shape (n, height, width), or (n, height, width, 3) from 0 to 1.
        targets: true classes, shape (n,).
        probs: predictive class probabilities, shape (n, K). Of more than 10 classes the 10 most
            probable are drawn.
        epistemic: mutual information of class and weights, in nats, shape (n,).
        total: entropy of the prediction, in nats, shape (n,).
        class_names: K names.
        title: the figure's title.

    Raises:
        ValueError: there is no image, or the lengths differ.

    Example:
        >>> import torch
        >>> one = torch.ones(1)
        >>> figure = digit_gallery(torch.zeros(1, 2, 2), torch.tensor([1]),
        ...                        torch.tensor([[0.2, 0.8]]), 0 * one, 0.5 * one, "ab", "Digits")
        >>> figure.axes[0].get_title(loc="left")
        'true b\\npredicted b'
    """
    lengths = {len(tensor) for tensor in (images, targets, probs, epistemic, total)}
    if len(lengths) != 1 or 0 in lengths or probs.shape[1] != len(class_names):
        raise ValueError(
            "a gallery needs the same number n > 0 of images, targets, probs, epistemic and total, "
            f"and a name for each of the K classes, got lengths {sorted(lengths)}, "
            f"K={probs.shape[1]} and {len(class_names)} names"
        )
    columns = min(4, len(images))
    rows = math.ceil(len(images) / columns)
    figure = Figure(figsize=(2.45 * columns, 0.5 + 2.0 * rows), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    grid = figure.subplots(rows, 2 * columns, squeeze=False, width_ratios=(1.0, 1.0) * columns)
    pictures = images.detach().cpu().double().numpy()
    low, high = float(pictures.min()), float(pictures.max())
    for index, (picture, ax) in enumerate(zip(pictures, grid.reshape(-1, 2), strict=False)):
        true, predicted = int(targets[index]), int(probs[index].argmax())
        right = true == predicted
        ax[0].imshow(picture, cmap="gray_r", vmin=low, vmax=high, interpolation="nearest")
        ax[0].set_axis_off()
        ax[0].set_title(
            f"true {class_names[true]}\npredicted {class_names[predicted]}",
            fontsize=8.5,
            fontweight="normal" if right else "bold",
            color=COLOURS["ink" if right else "vermillion"],
        )
        _class_bars(ax[1], probs[index], true, class_names)
        ax[0].text(
            0.0,
            -0.08,
            f"total {float(total[index]):.2g}\nepistemic {float(epistemic[index]):.2g}\nnats",
            transform=ax[0].transAxes,
            va="top",
            fontsize=7.5,
        )
    for ax in grid.reshape(-1)[2 * len(images) :]:
        ax.set_axis_off()
    return figure


def _class_bars(ax: Axes, probs: Tensor, true: int, class_names: Sequence[str]) -> None:
    shown = sorted(probs.topk(min(10, len(probs))).indices.tolist())
    predicted = int(probs.argmax())
    colours = {predicted: "vermillion", true: "green"}
    heights = [float(probs[k]) for k in shown]
    ax.barh(range(len(shown)), heights, 0.75, color=[COLOURS[colours.get(k, "sky")] for k in shown])
    ax.set_yticks(range(len(shown)), [class_names[k] for k in shown], fontsize=7)
    ax.tick_params(axis="y", length=0, pad=2)
    ax.set_xticks((0.0, 0.5, 1.0), ("0", "½", "1"), fontsize=7)
    ax.tick_params(axis="x", length=2, pad=2)
    ax.set_xlabel("probability", fontsize=7, labelpad=1)
    ax.set(xlim=(0.0, 1.0), ylim=(len(shown) - 0.4, -0.6))
    ax.grid(axis="y", visible=False)


def _series(rows: Sequence[Row], key: str) -> Floats:
    """(epoch, value) of the rows that have a finite value, shape (n, 2)."""
    points = [
        (row.get("epoch") or place, value)
        for place, row in enumerate(rows, start=1)
        if (value := row.get(key)) is not None and math.isfinite(value)
    ]
    return np.array(points, dtype=np.float64).reshape(-1, 2)


def _points(places: Sequence[float], rows: Sequence[Row], key: str) -> Floats:
    points = [(x, row[key]) for x, row in zip(places, rows, strict=True) if row.get(key) is not None]
    return np.array(points, dtype=np.float64).reshape(-1, 2)


def _number(row: Row, key: str) -> float:
    value = row.get(key)
    if value is None:
        raise ValueError(f"every row of a pruning table needs {key!r}, got {dict(row)}")
    return value


def _scale_y(ax: Axes, values: Floats, formatter: FuncFormatter | None = None) -> None:
    """A logarithmic axis with plain numbers where the values span much, else a linear one."""
    formatter = formatter or FuncFormatter(_plain)
    if values.size and values.min() > 0 and values.max() / values.min() > 5.0:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
        ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(formatter)


def _plain(value: float, _: object = None) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _compact(value: float) -> str:
    """Three digits and k, M or G: 47,841 is "47.8k"."""
    value = float(f"{value:.3g}")
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _left_label(row: Row) -> str:
    left = row.get("weights_left")
    share = f"{100.0 * _number(row, 'fraction'):.4g} %"
    return share if left is None else f"{share}\n{_compact(left)} left"


def _logit_places(fractions: Sequence[float]) -> list[float]:
    """log(f / (1 - f)), with 0 and 1, which would be infinitely far, one step outside."""
    inner = [math.log(f / (1.0 - f)) for f in fractions if 0.0 < f < 1.0] or [0.0]
    return [
        math.log(f / (1.0 - f)) if 0.0 < f < 1.0 else (max(inner) + 1 if f > 0 else min(inner) - 1)
        for f in fractions
    ]


def _spaced_out(places: Sequence[float], labels: Sequence[str]) -> list[str]:
    """The labels, blank where one would run into its neighbour."""
    room = 0.085 * (max(places) - min(places))
    kept: list[str] = []
    last = -math.inf
    for place, label in zip(places, labels, strict=True):
        fits = place - last >= room
        kept.append(label if fits else "")
        last = place if fits else last
    return kept


def _wilson(share: Floats, n: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    z = 1.959964
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * np.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2) / (1 + z**2 / n)
    return centre - half, centre + half
