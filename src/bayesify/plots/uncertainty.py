"""Figures of uncertainty: selective prediction, and epistemic uncertainty."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from torch import Tensor

from bayesify.metrics import RiskCoverage
from bayesify.plots.intervals import column_of
from bayesify.plots.style import COLOURS, Floats, TickFormatter, compact, legend_label, styled, tick

__all__ = [
    "epistemic_histogram",
    "epistemic_histograms",
    "risk_coverage_curve",
]

_LOOKS = (("blue", "-"), ("vermillion", "-"), ("green", "-"), ("purple", "-"), ("orange", "-"))
#: Smallest value on the logarithmic axis, less counts as none: in nats, or relative to the largest
#: value where all are small, as variances in a large unit are.
_LEAST, _LEAST_SHARE = 1e-5, 1e-4


@styled
def risk_coverage_curve(
    curves: Mapping[str, RiskCoverage], *, risk_label: str = "error of answered examples (%)"
) -> Figure:
    """Draw the risk when only the more certain examples are answered.

    Args:
        curves: from :func:`bayesify.metrics.risk_coverage`, by name in the legend; all of the same
            losses, none of which is negative.
        risk_label: name of the risk, with its unit.

    Raises:
        ValueError: there is no curve.

    Example:
        >>> import torch
        >>> from bayesify.metrics import risk_coverage
        >>> curve = risk_coverage(torch.tensor([0.9, 0.1, 0.4]), torch.tensor([100.0, 0.0, 0.0]))
        >>> risk_coverage_curve({"by entropy": curve}).axes[0].get_ylabel()
        'error of answered examples (%)'
    """
    if not curves:
        raise ValueError("curves must hold at least one curve, got none")
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    ax = figure.subplots()
    highest = 0.0
    for number, (name, curve) in enumerate(curves.items()):
        colour, dashes = _LOOKS[number % len(_LOOKS)]
        coverage, risk = 100.0 * curve.coverage.numpy(), curve.risk.numpy()
        marker = "o" if len(risk) <= 15 else ""
        label = f"{name}, area {compact(curve.aurc)}"
        ax.plot(
            coverage,
            risk,
            dashes,
            marker=marker,
            ms=3.5,
            color=COLOURS[colour],
            label=legend_label(label),
        )
        highest = max(highest, float(risk.max()))
    whole = float(next(iter(curves.values())).risk[-1])
    ax.axhline(
        whole, ls="--", lw=1.2, color=COLOURS["grey"], label=f"all answered: {compact(whole)}"
    )
    ax.set(xlabel="coverage: examples answered, most certain first (%)", ylabel=risk_label)
    # A confident mistake starts a curve far above the rest. Leave room for the legend.
    top = min(1.15 * highest, 4.0 * whole) if whole > 0.0 else 1.15 * highest
    ax.set(xlim=(0, 101), ylim=(0.0, max(top, 1.5 * whole) or 1.0))
    ax.yaxis.set_major_formatter(TickFormatter(tick))
    ax.set_title("Selective prediction")
    ax.legend(loc="upper left")
    return figure


def epistemic_histogram(
    inside: Tensor,
    outside: Tensor,
    *,
    names: tuple[str, str] = ("in distribution", "out of distribution"),
    label: str = "epistemic uncertainty (nats)",
    title: str = "Epistemic uncertainty",
) -> Figure:
    """Draw histograms of epistemic uncertainty inside and outside the training distribution.

    Args:
        inside: uncertainty of in-distribution examples, shape (N,), at least 0.
        outside: uncertainty of out-of-distribution examples, shape (M,).
        names: names of the two in the legend.
        label: name of the uncertainty, with its unit.
        title: title of the figure.

    Raises:
        ValueError: a shape is not (N,), there is no example, or a value is nan, infinite or
            negative.

    Example:
        >>> import torch
        >>> figure = epistemic_histogram(torch.tensor([0.01, 0.02]), torch.tensor([0.3, 0.5]))
        >>> figure.axes[0].get_xscale()
        'log'
    """
    return epistemic_histograms({title: (inside, outside)}, names=names, label=label)


@styled
def epistemic_histograms(
    panels: Mapping[str, tuple[Tensor, Tensor]],
    *,
    names: tuple[str, str] = ("in distribution", "out of distribution"),
    label: str = "epistemic uncertainty (nats)",
) -> Figure:
    """Draw such histograms of several networks, one above the other on a common axis.

    The axis is logarithmic; the first bin also counts all values below its left end.

    Args:
        panels: uncertainties inside and outside, by title.
        names: names of the two in the legend.
        label: name of the uncertainty, with its unit.

    Raises:
        ValueError: there is no panel, or see :func:`epistemic_histogram`.

    Example:
        >>> import torch
        >>> pair = torch.tensor([0.01, 0.02]), torch.tensor([0.3, 0.5])
        >>> len(epistemic_histograms({"one": pair, "other": pair}).axes)
        2
    """
    if not panels:
        raise ValueError("panels must hold at least one pair, got none")
    pairs = {
        title: (_uncertainties("inside", inside), _uncertainties("outside", outside))
        for title, (inside, outside) in panels.items()
    }
    every = np.concatenate([part for pair in pairs.values() for part in pair])
    high = float(every.max()) or 10.0 * _LEAST
    # Half a percent may lie left of the axis, because a few tiny values would fill most of it.
    least = min(_LEAST, _LEAST_SHARE * high)
    low = max(least, min(float(np.quantile(every, 0.005)), high / 10.0))
    edges = np.geomspace(low, high * 1.0001, 41)
    tall = 1.9 * len(pairs) if len(pairs) > 1 else 3.4
    figure = Figure(figsize=(6.8, tall + 0.7), layout="constrained")
    axes = figure.subplots(len(pairs), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (title, parts) in zip(axes, pairs.items(), strict=True):
        for values, name, colour in zip(parts, names, ("blue", "vermillion"), strict=True):
            counts, _ = np.histogram(values.clip(low, high), edges)
            shares = 100.0 * counts / len(values)
            ax.stairs(shares, edges, fill=True, color=COLOURS[colour], alpha=0.3)
            ax.stairs(shares, edges, color=COLOURS[colour], lw=1.2, label=legend_label(name))
        ax.set_xscale("log")
        ax.set(title=title, xlim=(edges[0], edges[-1]), ylabel="share (%)")
        ax.yaxis.set_major_locator(MaxNLocator(nbins=4))
    axes[-1].set_xlabel(label)
    axes[-1].xaxis.set_major_locator(LogLocator(numticks=8))
    axes[-1].xaxis.set_minor_locator(NullLocator())
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def _uncertainties(name: str, values: Tensor) -> Floats:
    found = column_of(name, values)
    if (found < 0.0).any():
        raise ValueError(f"{name} must be uncertainties of at least 0, got {found.min():g}")
    return found
