"""Figures of the metrics of a run: learning curves, calibration and pruning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from bayesify.metrics import Reliability
from bayesify.plots.style import (
    COLOURS,
    Floats,
    Record,
    TickFormatter,
    compact,
    plain,
    scale_y,
    shortened,
    styled,
)

__all__ = ["learning_curves", "logit_places", "pruning_curve", "reliability_diagram", "spaced_out"]


class _Line(NamedTuple):
    label: str
    colour: str
    dashes: str
    points: Floats


_BASELINE_LOOKS = (("green", "--"), ("orange", "-."), ("purple", ":"), ("sky", "--"))
#: Fractions in Blundell et al. 2015 and other reports; their labels have priority.
_USUAL_FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.95, 0.98, 0.99)


@styled
def learning_curves(
    history: Sequence[Record],
    baselines: Mapping[str, Sequence[Record]] | None = None,
    *,
    error_label: str = "error (%)",
) -> Figure:
    """Draw the objective, the error, the KL and the posterior's width over epochs.

    A panel whose numbers are all missing (or, for a plain network's KL, zero) is left out.

    Args:
        history: one row per epoch with keys among ``epoch``, ``loss`` and ``nll`` (nats per
            example), ``kl`` (nats), ``train_error``, ``test_error`` (percent) and ``std_median``.
        baselines: histories of other runs by name, whose test errors are drawn too.
        error_label: name of the error, with its unit.

    Raises:
        ValueError: there is nothing to draw.

    Example:
        >>> rows = [{"epoch": 1, "nll": 0.5, "loss": 2.0}, {"epoch": 2, "nll": 0.3, "loss": 1.5}]
        >>> [ax.get_title(loc="left") for ax in learning_curves(rows).axes]
        ['Objective']
    """
    # A plain network samples no weights, so that its labels are shorter.
    kl = _series(history, "kl")
    train, test = ("train", "test")
    if np.any(kl[:, 1]):
        train, test = "train, sampled weights", "test, mean weights"
    loss, nll = _series(history, "loss"), _series(history, "nll")
    errors = [
        _Line(train, "vermillion", "-", _series(history, "train_error")),
        _Line(test, "blue", "-", _series(history, "test_error")),
    ]
    for index, (name, rows) in enumerate((baselines or {}).items()):
        colour, dashes = _BASELINE_LOOKS[index % len(_BASELINE_LOOKS)]
        label = shortened(f"test, {name}", 36, end=18)
        errors.append(_Line(label, colour, dashes, _series(rows, "test_error")))
    objective = [_Line("nll, training data", "blue", "-", nll)]
    if not np.array_equal(loss, nll):
        objective.insert(0, _Line("loss", "vermillion", "-", loss))
    panels = {
        ("Objective", "nats per example"): objective,
        ("Error", error_label): errors,
        ("Complexity", "KL(q || p) (nats)"): [_Line("", "blue", "-", kl)],
        ("Width of the posterior", "median std of the weights"): [
            _Line("", "blue", "-", _series(history, "std_median"))
        ],
    }
    shown = {
        names: drawn
        for names, lines in panels.items()
        if (drawn := [line for line in lines if len(line.points)])
        and (names[0] in ("Objective", "Error") or np.any(drawn[0].points[:, 1]))
    }
    if not shown:
        raise ValueError("history must hold at least one row with a number, got none")

    columns = min(2, len(shown))
    height = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(4.6 * columns, 2.9 * height), layout="constrained")
    for place, ((title, unit), lines) in enumerate(shown.items(), start=1):
        ax = figure.add_subplot(height, columns, place)
        for label, colour, dashes, points in lines:
            marker = "o" if len(points) <= 15 else ""
            ax.plot(*points.T, dashes, color=COLOURS[colour], label=label, marker=marker, ms=3.5)
        ax.set(title=title, xlabel="epoch", ylabel=shortened(unit, 28))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
        scale_y(ax, np.concatenate([line.points[:, 1] for line in lines]))
        if lines[0].label:
            ax.legend(loc="best")
    return figure


@styled
def reliability_diagram(reliability: Reliability, ece: float) -> Figure:
    """Draw accuracy against confidence, and the number of examples in each bin.

    The vertical lines are 95 % Wilson intervals: a long one means that the bin holds few examples.

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
    top.bar(
        left, accuracy, width, align="edge", color=COLOURS["sky"], alpha=0.45, edgecolor="white"
    )
    top.plot((0, 1), (0, 1), "--", color=COLOURS["grey"], lw=1.2, label="perfectly calibrated")
    low, high = _wilson(accuracy, n)
    top.vlines(confidence, low, high, color=COLOURS["blue"], lw=1.2)
    top.plot(
        confidence, accuracy, "o", ms=4.5, color=COLOURS["blue"], label="accuracy, 95 % interval"
    )
    top.set(ylabel="accuracy (fraction correct)", xlim=(0, 1), ylim=(0, 1.02))
    top.set_title(f"Expected calibration error {ece:.4f}")
    top.legend(loc="upper left")

    bottom.bar(left, n, width, align="edge", color=COLOURS["grey"], alpha=0.6, edgecolor="white")
    bottom.set_yscale("log")
    bottom.set_ylim(0.7, 3.0 * n.max())
    bottom.yaxis.set_major_locator(LogLocator(numticks=5))
    bottom.yaxis.set_minor_locator(NullLocator())
    bottom.yaxis.set_major_formatter(TickFormatter(plain))
    bottom.set(xlabel="confidence: probability of the predicted class", ylabel="examples")
    return figure


@styled
def pruning_curve(
    table: Sequence[Record], baseline_error: float | None, *, error_label: str = "error (%)"
) -> Figure:
    r"""Draw the error as weights of the lowest signal-to-noise ratio are removed.

    The removed share is on a logit axis, which shows both 10 % and 99 % clearly. If the table has
    ``file_bytes``, a second panel shows the size on disk.

    Args:
        table: rows with ``fraction`` (removed, 0 to 1), ``weights_left``, ``error_mean_weights``,
            and optionally ``error_predictive`` and ``file_bytes``.
        baseline_error: error of the whole network with its mean weights, or None.
        error_label: name of the error, with its unit.

    Raises:
        ValueError: the table is empty.

    Example:
        >>> row = {"fraction": 0.5, "weights_left": 500, "error_mean_weights": 2.0}
        >>> pruning_curve([row], baseline_error=1.9).axes[0].get_xticklabels()[0].get_text()
        '50 %\n500'
    """
    if not table:
        raise ValueError("table must hold at least one row, got none")
    rows = sorted(table, key=lambda row: _number(row, "fraction"))
    places = logit_places([_number(row, "fraction") for row in rows])
    sizes = _points(places, rows, "file_bytes")

    figure = Figure(figsize=(8.6, 6.0 if len(sizes) else 4.2), layout="constrained")
    axes = figure.subplots(
        2 if len(sizes) else 1,
        1,
        sharex=True,
        squeeze=False,
        height_ratios=(2, 1)[: 1 + bool(len(sizes))],
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
        label = f"nothing removed, mean weights: {baseline_error:.3g}"
        top.axhline(baseline_error, ls="--", lw=1.2, color=COLOURS["grey"], label=label)
    unit = shortened(f"test {error_label}", 32 if len(sizes) else 44)
    top.set(title="Pruning by signal-to-noise ratio", ylabel=unit)
    scale_y(top, np.array(values))
    top.legend(loc="best")
    if len(sizes):
        axes[1].plot(*sizes.T, "o-", color=COLOURS["green"], ms=4.5)
        axes[1].set(ylabel="size on disk (bytes)")
        scale_y(axes[1], sizes[:, 1], TickFormatter(lambda value, _: compact(value)))

    bottom = axes[-1]
    bottom.set_xlabel("share of the weights removed, and how many are left")
    shown = spaced_out(places, [_number(row, "fraction") for row in rows])
    bottom.set_xticks(
        places, [_left_label(row) if fits else "" for row, fits in zip(rows, shown, strict=True)]
    )
    return figure


def _series(rows: Sequence[Record], key: str) -> Floats:
    """Return (epoch, value) of the rows that have a finite value, shape (n, 2)."""
    points = [
        (place if row.get("epoch") is None else row["epoch"], value)
        for place, row in enumerate(rows, start=1)
        if (value := row.get(key)) is not None and math.isfinite(value)
    ]
    return np.array(points, dtype=np.float64).reshape(-1, 2)


def _points(places: Sequence[float], rows: Sequence[Record], key: str) -> Floats:
    points = [
        (x, row[key]) for x, row in zip(places, rows, strict=True) if row.get(key) is not None
    ]
    return np.array(points, dtype=np.float64).reshape(-1, 2)


def _number(row: Record, key: str) -> float:
    value = row.get(key)
    if value is None:
        raise ValueError(f"every row of a pruning table needs {key!r}, got {dict(row)}")
    return value


def _left_label(row: Record) -> str:
    left = row.get("weights_left")
    share = f"{100.0 * _number(row, 'fraction'):.4g} %"
    return share if left is None else f"{share}\n{compact(left)}"


def logit_places(fractions: Sequence[float]) -> list[float]:
    """Return log(f / (1 - f)), with 0 and 1, whose logits are infinite, one step outside."""
    inner = [math.log(f / (1.0 - f)) for f in fractions if 0.0 < f < 1.0] or [0.0]
    return [
        math.log(f / (1.0 - f)) if 0.0 < f < 1.0 else (max(inner) + 1 if f > 0 else min(inner) - 1)
        for f in fractions
    ]


def spaced_out(
    places: Sequence[float], fractions: Sequence[float], *, room: float = 0.058
) -> list[bool]:
    """Select labels that do not overlap, those of usual fractions first.

    Args:
        places: of the labels.
        fractions: the removed share of each.
        room: the width of a label, as a part of the axis.

    Example:
        >>> spaced_out([0.0, 0.01, 1.0], [0.74, 0.75, 0.8])
        [False, True, True]
    """
    room *= max(places) - min(places)
    taken: list[float] = []
    important = [fraction in _USUAL_FRACTIONS for fraction in fractions]
    for place, _ in sorted(zip(places, important, strict=True), key=lambda one: not one[1]):
        if all(abs(place - other) >= room for other in taken):
            taken.append(place)
    return [place in taken for place in places]


def _wilson(share: Floats, n: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return the 95 % confidence interval of a proportion (Wilson 1927)."""
    z = NormalDist().inv_cdf(0.975)
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * np.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2) / (1 + z**2 / n)
    return centre - half, centre + half
