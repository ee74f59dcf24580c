"""Figures of regression: coverage of intervals, predictions against truth, residuals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from bayesify.plots.style import COLOURS, Floats, TickFormatter, shortened, styled, tick

__all__ = ["column_of", "interval_coverage", "predicted_against_true", "residuals"]

#: Half width of the central 95 % of a normal distribution, in standard deviations.
_Z = NormalDist().inv_cdf(0.975)
#: Largest number of examples drawn in a figure of predictions.
_MOST_POINTS = 400
#: Bins of a figure of residuals, and the fewest examples in one.
_MOST_BINS, _FEWEST_IN_BIN = 10, 20
_RESIDUAL_LEVELS = (0.1, 0.5, 0.9)


@styled
def interval_coverage(
    levels: Sequence[float], observed: Sequence[float], num_data: int, *, band: bool = True
) -> Figure:
    """Draw the observed coverage of intervals against their nominal level.

    At each level the band holds the observed share with probability 95 % if the intervals are
    calibrated and the examples independent: level +- 1.96 sqrt(level (1 - level) / num_data).

    Args:
        levels: nominal probabilities of the intervals, strictly between 0 and 1.
        observed: share of the targets in each interval, from 0 to 1; divide
            ``metrics.interval_coverage`` by 100.
        num_data: number of targets.
        band: whether to draw the band; False where the distribution has steps, such as that of
            counts, since calibrated intervals then hold more than their level.

    Raises:
        ValueError: there is no level, the lengths differ, or a number is out of its range.

    Example:
        >>> figure = interval_coverage([0.5, 0.8, 0.95], [0.47, 0.81, 0.96], num_data=200)
        >>> figure.axes[0].get_title(loc="left")
        'Coverage of the intervals, 200 examples'
    """
    if not len(levels) or len(levels) != len(observed):
        raise ValueError(
            "observed and levels must have the same length of at least one, got "
            f"{len(observed)} and {len(levels)}"
        )
    if num_data < 1:
        raise ValueError(f"num_data must be at least 1, got {num_data}")
    # Written so that nan fails.
    if not all(0.0 < level < 1.0 for level in levels):
        raise ValueError(f"levels must lie strictly between 0 and 1, got {list(levels)}")
    if not all(0.0 <= share <= 1.0 for share in observed):
        raise ValueError(
            f"observed must be shares from 0 to 1, got {list(observed)}; divide percent by 100"
        )
    order = sorted(range(len(levels)), key=lambda place: levels[place])
    x = 100.0 * np.array([levels[place] for place in order])
    y = 100.0 * np.array([observed[place] for place in order])
    nominal = np.linspace(0.0, 1.0, 201)
    half = _Z * np.sqrt(nominal * (1.0 - nominal) / num_data)

    figure = Figure(figsize=(5.4, 5.0), layout="constrained")
    ax = figure.subplots()
    if band:
        ax.fill_between(
            100.0 * nominal,
            100.0 * (nominal - half).clip(0.0, 1.0),
            100.0 * (nominal + half).clip(0.0, 1.0),
            color=COLOURS["grey"],
            alpha=0.25,
            linewidth=0,
            label="95 % of calibrated results",
        )
    ax.plot((0, 100), (0, 100), "--", color=COLOURS["grey"], lw=1.2)
    ax.plot(x, y, "o-", ms=4.5, color=COLOURS["blue"], label="observed")
    ax.set(xlabel="nominal level of the interval (%)", ylabel="targets inside the interval (%)")
    ax.set(xlim=(0, 100), ylim=(0, 102), title=f"Coverage of the intervals, {num_data:,} examples")
    ax.legend(loc="upper left")
    ax.text(
        97, 5, "below the diagonal: overconfident", ha="right", fontsize=8, color=COLOURS["grey"]
    )
    return figure


@styled
def predicted_against_true(
    mean: Tensor,
    low: Tensor,
    high: Tensor,
    targets: Tensor,
    *,
    level: float = 0.95,
    name: str = "target",
) -> Figure:
    """Draw predicted means with their intervals against the true values.

    Of more than 400 examples evenly spaced ones are drawn; the share in the title is of all.

    Args:
        mean: predicted means, shape (N,) or (N, 1), in the unit of the target.
        low: lower ends of the intervals, same shape and unit.
        high: upper ends.
        targets: true values.
        level: level of the intervals, for the title.
        name: name of the target, with its unit if it has one.

    Raises:
        ValueError: the shapes differ or are not of one target, there is no example, a value is not
            finite, or an interval's lower end lies above its upper one.

    Example:
        >>> import torch
        >>> y = torch.tensor([1.0, 2.0, 3.0])
        >>> figure = predicted_against_true(y, y - 0.5, y + 0.5, y + torch.tensor([0.0, 0.1, 0.9]))
        >>> figure.axes[0].get_title(loc="left")
        'The 95 % intervals hold 66.7 % of 3 targets'
    """
    parts = {"mean": mean, "low": low, "high": high, "targets": targets}
    middle, lower, upper, truth = (column_of(part, values) for part, values in parts.items())
    if len({len(values) for values in (middle, lower, upper, truth)}) != 1:
        shapes = ", ".join(f"{part} {tuple(values.shape)}" for part, values in parts.items())
        raise ValueError(f"mean, low, high and targets must have the same length, got {shapes}")
    if (lower > upper).any():
        raise ValueError("low must not lie above high; are the two exchanged?")
    held = (lower <= truth) & (truth <= upper)
    count = len(truth)
    chosen = np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).astype(int))

    figure = Figure(figsize=(6.0, 5.6), layout="constrained")
    ax = figure.subplots()
    ends = [float(f(np.concatenate((truth[chosen], middle[chosen])))) for f in (np.min, np.max)]
    room = 0.05 * (ends[1] - ends[0]) or 1.0
    ends = [ends[0] - room, ends[1] + room]
    ax.plot(ends, ends, "--", color=COLOURS["grey"], lw=1.2)
    for inside, colour, words in ((True, "blue", "inside"), (False, "vermillion", "outside")):
        of = chosen[held[chosen] == inside]
        if len(of):
            ax.vlines(truth[of], lower[of], upper[of], color=COLOURS[colour], lw=0.8, alpha=0.45)
            label = f"target {words} the interval"
            ax.plot(truth[of], middle[of], "o", ms=3, color=COLOURS[colour], label=label)
    share = 100.0 * float(held.mean())
    text = f"The {100.0 * level:.15g} % intervals hold {share:.1f} % of {count:,} targets"
    ax.set(title=text, xlabel=f"true {shortened(name, 36)}", xlim=ends)
    drawn = "" if len(chosen) == count else f", {len(chosen)} of them drawn"
    ax.set_ylabel(f"predicted {shortened(name, 36)}{drawn}")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=7))
        axis.set_major_formatter(TickFormatter(tick))
    ax.legend(loc="upper left")
    return figure


@styled
def residuals(mean: Tensor, targets: Tensor, *, name: str = "target") -> Figure:
    """Draw the residuals, true minus predicted, against the predictions.

    The lines are the quantiles 10, 50 and 90 % of the residuals in up to ten bins of equally many
    examples, at least 20 each; there is none for fewer than 40 examples.

    Args:
        mean: predicted means, shape (N,) or (N, 1), in the unit of the target.
        targets: true values, same length and unit.
        name: name of the target.

    Raises:
        ValueError: the lengths differ, or see :func:`predicted_against_true`.

    Example:
        >>> import torch
        >>> x = torch.linspace(0.0, 1.0, 60)
        >>> [line.get_label() for line in residuals(x, x + 0.1).axes[0].lines[1:]]
        ['10 %', '50 %', '90 %', 'residual']
    """
    middle, truth = column_of("mean", mean), column_of("targets", targets)
    if len(middle) != len(truth):
        raise ValueError(
            f"mean and targets must have the same length, got {len(middle)} and {len(truth)}"
        )
    rest, count = truth - middle, len(truth)
    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    ax = figure.subplots()
    ax.axhline(0.0, ls="--", lw=1.2, color=COLOURS["grey"])
    bins = min(_MOST_BINS, count // _FEWEST_IN_BIN)
    if bins > 1:
        parts = np.array_split(np.argsort(middle, kind="stable"), bins)
        at = [float(np.median(middle[part])) for part in parts]
        for level, dashes in zip(_RESIDUAL_LEVELS, ("--", "-", "--"), strict=True):
            line = [float(np.quantile(rest[part], level)) for part in parts]
            label = f"{100 * level:.0f} %"
            ax.plot(at, line, dashes, color=COLOURS["vermillion"], label=label, zorder=3)
    chosen = np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).astype(int))
    ax.plot(middle[chosen], rest[chosen], "o", ms=3, alpha=0.5, color=COLOURS["blue"])
    ax.lines[-1].set_label("residual")
    drawn = "" if len(chosen) == count else f", {len(chosen)} of {count:,} drawn"
    label = f"predicted {shortened(name, 36)}"
    ax.set(title="Residuals", xlabel=label, ylabel=f"true - predicted{drawn}")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=7))
        axis.set_major_formatter(TickFormatter(tick))
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def column_of(name: str, values: Tensor) -> Floats:
    """Return finite numbers of shape (N,) or (N, 1) as an array of shape (N,).

    Raises:
        ValueError: the shape is another, there are none, or one is not finite.

    Example:
        >>> import torch
        >>> column_of("mean", torch.tensor([[1.0], [2.0]]))
        array([1., 2.])
    """
    if values.dim() not in (1, 2) or values.numel() != len(values) or len(values) < 1:
        raise ValueError(
            f"{name} must have shape (N,) or (N, 1) with N of at least 1, got "
            f"{tuple(values.shape)}; draw targets of several parts one by one"
        )
    found: Floats = values.detach().double().cpu().flatten().numpy()
    if not math.isfinite(float(found.sum())):
        raise ValueError(f"{name} must be finite, got nan or infinite values")
    return found
