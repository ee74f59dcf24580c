"""Figures of the weights: signal-to-noise ratio, density and single posteriors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor

from bayesify.distributions.priors import Prior
from bayesify.plots.style import (
    COLOURS,
    Floats,
    TickFormatter,
    decibels,
    legend_label,
    plain,
    shortened,
    styled,
)

__all__ = ["binned_densities", "snr_density_and_cdf", "weight_densities", "weight_posteriors"]

# At this ratio a weight is 1e-5 of its std.
_FLOOR_DB = -100.0


@styled
def snr_density_and_cdf(snr_db: Tensor, cut: float = 0.75) -> Figure:
    """Draw density and cumulative distribution of the signal-to-noise ratio of the weights.

    As Blundell et al. 2015, figure 4. Two kinds of weights are not drawn: those of ratio 0 (-inf
    dB), such as pruned ones, and those far below all others, such as the weights of pixels that
    are always 0. Their share is stated; the cumulative distribution starts at it.

    Args:
        snr_db: 20 log10(|mean| / std) of each weight, in decibels, shape (D,).
        cut: share of the weights below the marked cut.

    Raises:
        ValueError: no weight has a finite ratio.

    Example:
        >>> figure = snr_density_and_cdf(torch.linspace(-20.0, 20.0, 1000))
        >>> [ax.get_ylabel() for ax in figure.axes]
        ['density (per dB)', 'share of weights below']
    """
    every = _array(snr_db)
    finite = np.sort(every[np.isfinite(every)])
    if not finite.size:
        raise ValueError("snr_db must hold at least one finite ratio, but all are -inf dB or nan")
    floor = min(_FLOOR_DB, float(finite[-1]) - 60.0)
    excluded = float((every < floor).mean())
    finite = finite[finite >= floor]
    # The far left tail holds the few weights whose mean is close to zero by chance.
    low, high = finite[int(0.002 * finite.size)], finite[-1]
    low, high = (low, high) if high > low else (low - 1.0, high + 1.0)

    figure = Figure(figsize=(7.6, 5.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    bins = np.linspace(low, high, _num_bins(finite.size) + 1)
    density = np.histogram(finite, bins)[0] / finite.size / np.diff(bins)
    _outline(top, bins, density, "blue")
    top.set(title="Signal-to-noise ratio of the weights", ylabel="density (per dB)")
    top.set_ylim(bottom=0)

    below = excluded + (1.0 - excluded) * np.searchsorted(finite, bins, "right") / finite.size
    bottom.plot(bins, below, color=COLOURS["blue"])
    bottom.set(xlabel="signal-to-noise ratio (dB)", ylabel="share of weights below")
    bottom.set(xlim=(low, high), ylim=(0.0, 1.02))
    if excluded < cut:
        at = finite[min(int((cut - excluded) / (1.0 - excluded) * finite.size), finite.size - 1)]
        label = f"{100 * cut:.3g} % of the weights lie below {decibels(at)}"
        for ax in (top, bottom):
            ax.axvline(at, ls="--", lw=1.2, color=COLOURS["vermillion"], label=label)
        bottom.plot((low, at), (cut, cut), ":", lw=1.2, color=COLOURS["vermillion"])
        bottom.legend(loc="lower right" if at < (low + high) / 2 else "upper left")
    if excluded:
        top.set_title(
            f"{100 * excluded:.3g} % of the weights lie below {decibels(floor)}, not drawn",
            loc="right",
            fontsize=8.5,
            fontweight="normal",
        )
    return figure


@styled
def weight_densities(weights: Mapping[str, Tensor]) -> Figure:
    """Draw densities of the trained weights of several networks on one axis.

    As Blundell et al. 2015, figure 3. The density axis is logarithmic where the peaks differ by
    more than a factor of 8, or where one is a spike, more than 20 times as high as the average.

    Args:
        weights: all weights of a network, shape (D,), by a name such as "Bayes by Backprop (mean)".

    Raises:
        ValueError: there are no weights.

    Example:
        >>> figure = weight_densities({"SGD": torch.linspace(-0.1, 0.1, 100)})
        >>> figure.axes[0].get_xlabel()
        'weight'
    """
    arrays = {
        name: array[np.isfinite(array)] for name, w in weights.items() if (array := _array(w)).size
    }
    arrays = {name: array for name, array in arrays.items() if array.size}
    if not arrays:
        raise ValueError("weights must hold at least one vector of finite weights, got none")
    limit = max(float(np.quantile(np.abs(array), 0.998)) for array in arrays.values()) or 1.0
    fewest = min(array.size for array in arrays.values())
    bins = np.linspace(-limit, limit, _num_bins(fewest) + 1)

    return _densities(
        {
            name: np.histogram(array, bins)[0] / array.size / np.diff(bins)
            for name, array in arrays.items()
        },
        bins,
    )


@styled
def binned_densities(densities: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw densities of weights that are already binned on one grid.

    Args:
        densities: by name, each with ``limit``, the end of the symmetric grid, and ``density``,
            the density in each bin, per unit of weight.

    Raises:
        ValueError: there is none, or the grids differ.

    Example:
        >>> density = {"limit": 0.3, "density": [0.0, 2.0, 0.0]}
        >>> figure = binned_densities({"SGD": density, "dropout": density})
        >>> [float(end) for end in figure.axes[0].get_xlim()]
        [-0.3, 0.3]
    """
    grids = {(float(each["limit"]), len(each["density"])) for each in densities.values()}
    if len(grids) != 1:
        raise ValueError(f"densities must share one grid, got limits and bins {sorted(grids)}")
    [(limit, count)] = grids
    arrays = {name: np.array(each["density"], float) for name, each in densities.items()}
    return _densities(arrays, np.linspace(-limit, limit, count + 1))


def _densities(densities: Mapping[str, Floats], bins: Floats) -> Figure:
    figure = Figure(figsize=(7.6, 4.2), layout="constrained")
    ax = figure.subplots()
    for (name, density), colour in zip(densities.items(), _cycle(len(densities)), strict=True):
        _outline(ax, bins, density, colour, shortened(name, 44, end=22))
    peaks = [float(density.max()) for density in densities.values()]
    spikes = [density.max() > 20.0 * density.mean() for density in densities.values()]
    if max(peaks) > 8.0 * min(peaks) > 0.0 or any(spikes):
        ax.set_yscale("log")
        ax.set_ylim(bottom=1e-4 * max(peaks))
        ax.yaxis.set_major_formatter(TickFormatter(plain))
        ax.yaxis.set_minor_locator(NullLocator())
    else:
        ax.set_ylim(bottom=0)
    ax.axvline(0.0, lw=0.8, color=COLOURS["grey"])
    ax.set(
        title="Trained weights",
        xlabel="weight",
        ylabel="density (per unit of weight)",
        xlim=(bins[0], bins[-1]),
    )
    if len(densities) > 1:
        ax.legend(loc="upper right")
    return figure


@styled
def weight_posteriors(
    means: Sequence[float],
    stds: Sequence[float],
    names: Sequence[str],
    prior: Prior | Sequence[Prior] | None = None,
) -> Figure:
    """Draw the Gaussian posterior of several single weights, with zero marked.

    Each panel has its own scale, which includes the posterior and zero. The distance of zero from
    the mean, in standard deviations, is the signal-to-noise ratio.

    Args:
        means: posterior mean of each weight.
        stds: posterior standard deviation of each, positive.
        names: title of each panel.
        prior: drawn next to the posterior, cut off where it is much higher; one for all, or one
            per weight.

    Raises:
        ValueError: the lengths differ, there are none, or a standard deviation is not positive.

    Example:
        >>> figure = weight_posteriors([0.0, 0.5], [0.1, 0.05], ["lowest", "highest"])
        >>> [ax.get_title(loc="left") for ax in figure.axes]
        ['lowest', 'highest']
    """
    if not len(means) == len(stds) == len(names) > 0 or not all(std > 0 for std in stds):
        raise ValueError(
            "means, positive stds and names must have the same length of at least one, got "
            f"{len(means)} means, {len(names)} names and stds {list(stds)}"
        )
    priors = prior if isinstance(prior, Sequence) else [prior] * len(means)
    if len(priors) != len(means):
        raise ValueError(f"prior must be one or a sequence of {len(means)}, got {len(priors)}")
    columns = min(3, len(means))
    rows = math.ceil(len(means) / columns)
    width = max(5.0, 3.1 * columns)  # the title of a single panel needs this width
    figure = Figure(figsize=(width, 2.9 * rows), layout="constrained")
    panels = zip(means, stds, names, priors, strict=True)
    for place, (mean, std, name, own) in enumerate(panels, start=1):
        ax = figure.add_subplot(rows, columns, place)
        _posterior_panel(ax, float(mean), float(std), own)
        most = 33 if columns > 1 else 46
        title = "\n".join(shortened(line, most, end=26) for line in name.splitlines())
        ax.set_title(title, fontsize=9)
        ax.set_xlabel("weight")
        if place % columns == 1 or columns == 1:
            ax.set_ylabel("density")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _posterior_panel(ax: Axes, mean: float, std: float, prior: Prior | None) -> None:
    low, high = min(mean - 4.5 * std, 0.0), max(mean + 4.5 * std, 0.0)
    margin = 0.06 * (high - low)
    # Finer grids around the mean and around zero, where a density may be narrow.
    grid = np.union1d(
        np.linspace(low - margin, high + margin, 801),
        np.linspace(mean - 5 * std, mean + 5 * std, 401),
    )
    grid = np.union1d(grid, np.geomspace(1e-6, 1.0, 200) * (high - low))
    grid = np.union1d(grid, -grid)
    grid = grid[(grid >= low - margin) & (grid <= high + margin)]
    density = np.exp(-0.5 * ((grid - mean) / std) ** 2) / (std * math.sqrt(2.0 * math.pi))
    ax.fill_between(grid, density, color=COLOURS["blue"], alpha=0.15, lw=0)
    ax.plot(grid, density, color=COLOURS["blue"], label="posterior")
    if prior is not None:
        log_prior = prior.log_prob(torch.from_numpy(grid))
        ax.plot(grid, log_prior.exp().numpy(), color=COLOURS["orange"], lw=1.4, label="prior")
    ax.axvline(0.0, ls="--", lw=1.1, color=COLOURS["ink"], label="zero")
    ax.set(xlim=(low - margin, high + margin), ylim=(0.0, 1.12 * density.max()))
    ax.locator_params(axis="x", nbins=5)
    ax.locator_params(axis="y", nbins=5)


def _outline(ax: Axes, bins: Floats, density: Floats, colour: str, label: str = "") -> None:
    ax.stairs(density, bins, fill=True, color=COLOURS[colour], alpha=0.12)
    ax.stairs(density, bins, color=COLOURS[colour], lw=1.5, label=legend_label(label))


def _num_bins(n: int) -> int:
    """Return a number of bins that shows the shape and leaves several of n values per bin."""
    # Odd, so that one bin is centred on zero, where the peak is.
    return int(min(160, max(20, n**0.4))) | 1


def _cycle(n: int) -> list[str]:
    names = ("blue", "vermillion", "green", "orange", "purple", "sky")
    return [names[i % len(names)] for i in range(n)]


def _array(values: Tensor) -> Floats:
    return values.detach().cpu().double().reshape(-1).numpy()
