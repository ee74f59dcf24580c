"""Draw all figures of a trained network for its report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import one_hot

from bayesify.distributions.layout import ParameterLayout
from bayesify.distributions.posteriors import Delta, GaussianPosterior
from bayesify.distributions.priors import Gaussian, Laplace, ScaleMixture, StudentT
from bayesify.metrics import (
    expected_calibration_error,
    ood_auroc,
    reliability,
    risk_coverage,
)
from bayesify.module.bayesian import BayesianModule
from bayesify.module.pruning import snr_decibels
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.plots import (
    Record,
    digit_gallery,
    epistemic_histogram,
    interval_coverage,
    learning_curves,
    predicted_against_true,
    pruning_curve,
    reliability_diagram,
    risk_coverage_curve,
    snr_density_and_cdf,
    votes_gallery,
    weight_densities,
    weight_posteriors,
)
from bayesify.plots.style import decibels
from bayesify.prediction import (
    CategoricalPredictive,
    CountPredictive,
    NumericPredictive,
    Predictive,
)
from bayesify.tabular.censoring import RecordedPredictive

__all__ = ["build_figures", "regression_figures"]

_GALLERY = 8
#: Number of weight samples that vote on the class of an image.
_VOTES = 100
#: Number of images, those of the highest epistemic uncertainty, whose votes are counted;
#: the figure's caption names it.
_DISPUTED = 200
#: Levels of the prediction intervals.
_LEVELS = (*(0.05 * step for step in range(1, 20)), 0.99)
#: Priors that have one density for all weights and so can be drawn.
_ONE_DENSITY = (Gaussian, Laplace, ScaleMixture, StudentT)


@torch.no_grad()
def build_figures(
    bnn: BayesianModule,
    *,
    images: Tensor,
    targets: Tensor,
    predictive: Predictive,
    history: Sequence[Record],
    pruning: Sequence[Record],
    class_names: Sequence[str],
    image_shape: Sequence[int] | None,
    pictures: Callable[[Tensor], Tensor] | None = None,
    baselines: Mapping[str, Sequence[Record]] | None = None,
    baseline_weights: Mapping[str, Tensor] | None = None,
    outside: tuple[str, Predictive] | None = None,
    truth: tuple[str, Tensor] | None = None,
    error: str | None = None,
) -> dict[str, Figure]:
    """Draw all figures that apply to a trained network.

    Left out are figures that need a standard deviation (of a point estimate), calibration (where
    the targets are not classes) and galleries (where the inputs are not images).

    Args:
        bnn: the network.
        images: its test inputs, shape (N, ...).
        targets: their targets, shape (N, ...).
        predictive: the prediction ``bnn.predict(images)``.
        history: one row per epoch, as for :func:`bayesify.plots.learning_curves`.
        pruning: rows as for :func:`bayesify.plots.pruning_curve`, that of the network as it is
            first; may be empty.
        class_names: K names.
        image_shape: (height, width) or (channels, height, width) of one input, or None.
        pictures: of inputs that are features of images: returns some of the images, shape (n,
            height, width, 3) from 0 to 1, for their places (n,).
        baselines: histories of other runs by name.
        baseline_weights: trained weights of other runs by name, flat, for the density of the
            weights.
        outside: name of another data set, and the prediction for its images.
        truth: for regression, name of the target, and the targets in the unit of ``predictive``.
        error: name of the errors in ``history`` and ``pruning``, with its unit; None for the
            likelihood's own.

    Returns:
        Figures by name, in the order of the report: ``learning_curves``; for classes
        ``reliability``, ``risk_coverage``, ``votes``, ``least_certain``, ``most_certain``,
        ``out_of_distribution``; for regression those of :func:`regression_figures`; ``pruning``,
        ``snr``, ``weight_densities``, ``weight_posteriors``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figures: dict[str, Figure] = {}
    error_name = bnn.likelihood.error_name if error is None else error
    if history:
        figures["learning_curves"] = learning_curves(history, baselines, error_label=error_name)
    if isinstance(predictive, CategoricalPredictive):
        figures |= _calibration(predictive, targets)
        if image_shape is not None:
            pictures = _pictures(images, image_shape).__getitem__
        if pictures is not None:
            figures |= _galleries(bnn, images, pictures, targets, predictive, class_names)
        if outside is not None and not isinstance(bnn.posterior, Delta):
            figures["out_of_distribution"] = _out_of_distribution(predictive, *outside)
    if isinstance(predictive, NumericPredictive) and truth is not None:
        figures |= regression_figures(predictive, truth[1], truth[0])
    if pruning:
        whole = pruning[0]["error_mean_weights"]
        figures["pruning"] = pruning_curve(pruning, whole, error_label=error_name)
    figures |= _weight_figures(bnn, baseline_weights or {})
    return figures


def _calibration(predictive: CategoricalPredictive, targets: Tensor) -> dict[str, Figure]:
    probs = predictive.mean
    return {
        "reliability": reliability_diagram(
            reliability(probs, targets), expected_calibration_error(probs, targets)
        ),
        "risk_coverage": _risk_coverage(
            predictive, 100.0 * (predictive.prediction != targets), "error of answered examples (%)"
        ),
    }


def _risk_coverage(predictive: Predictive, loss: Tensor, risk_label: str) -> Figure:
    orders = {
        "by total uncertainty": predictive.total,
        "by epistemic uncertainty": predictive.epistemic,
    }
    if not bool((predictive.epistemic > 0.0).any()):  # zero for a point estimate
        del orders["by epistemic uncertainty"]
    orders["best possible order"] = loss
    curves = {name: risk_coverage(order.flatten(), loss) for name, order in orders.items()}
    return risk_coverage_curve(curves, risk_label=risk_label)


def _galleries(
    bnn: BayesianModule,
    images: Tensor,
    pictures: Callable[[Tensor], Tensor],
    targets: Tensor,
    predictive: CategoricalPredictive,
    class_names: Sequence[str],
) -> dict[str, Figure]:
    figures = {}
    if not isinstance(bnn.posterior, Delta):
        # Counting the votes on all images would be slow.
        likely = predictive.epistemic.argsort(descending=True, stable=True)[:_DISPUTED]
        samples = bnn.predict(images[likely], _VOTES, keep_samples=True).samples
        assert samples is not None
        votes = one_hot(samples.argmax(-1), len(class_names)).sum(0)
        split = votes.amax(-1).argsort(stable=True)[:_GALLERY]
        chosen = likely[split]
        figures["votes"] = votes_gallery(
            pictures(chosen), targets[chosen], samples[:, split], class_names, "Lowest agreement"
        )
    order = predictive.total.argsort(stable=True)
    for name, title, chosen in (
        ("least_certain", "Highest total uncertainty", order.flip(0)[:_GALLERY]),
        ("most_certain", "Lowest total uncertainty", order[:_GALLERY]),
    ):
        figures[name] = digit_gallery(
            pictures(chosen),
            targets[chosen],
            predictive.mean[chosen],
            predictive.epistemic[chosen],
            predictive.total[chosen],
            class_names,
            title,
        )
    return figures


def _out_of_distribution(inside: Predictive, name: str, outside: Predictive) -> Figure:
    inside_scores, outside_scores = (
        inside.epistemic.clamp_min(0.0),
        outside.epistemic.clamp_min(0.0),
    )
    return epistemic_histogram(
        inside_scores,
        outside_scores,
        names=("test images", name),
        title=f"AUROC {ood_auroc(inside_scores, outside_scores):.3f} by epistemic uncertainty",
    )


@torch.no_grad()
def regression_figures(
    predictive: NumericPredictive, targets: Tensor, name: str = "target"
) -> dict[str, Figure]:
    """Draw the figures of a regression: intervals, selective prediction and predictions.

    Args:
        predictive: predictive distribution of N examples, in the unit of the targets.
        targets: true values, shape (N,) or (N, 1) as the mean of ``predictive``.
        name: name of the target.

    Returns:
        Figures by name: ``interval_coverage``, ``risk_coverage``, ``predicted_against_true``.

    Raises:
        ValueError: the shapes do not match, or the target has several parts.

    Example:
        >>> from bayesify.prediction import GaussianPredictive
        >>> p = GaussianPredictive(torch.zeros(1, 4), torch.tensor(1.0))
        >>> list(regression_figures(p, torch.tensor([-2.0, -0.5, 0.5, 1.0])))
        ['interval_coverage', 'risk_coverage', 'predicted_against_true']
    """
    # A target y lies in the equal-tailed interval of a level if neither P(Y > y) nor P(Y < y) is
    # above (1 + level) / 2. Quantiles of all levels would take long where there are many rows.
    exact = targets.double()
    below = torch.nextafter(exact, torch.full_like(exact, -math.inf))
    at_most, less = predictive.cdf(exact).double(), predictive.cdf(below).double()
    needed_level = torch.maximum(1.0 - 2.0 * at_most, 2.0 * less - 1.0)
    observed = [float((needed_level <= level).double().mean()) for level in _LEVELS]
    has_steps = isinstance(predictive, CountPredictive | RecordedPredictive)
    mean, (low, high) = predictive.mean, predictive.interval(0.95)
    return {
        "interval_coverage": interval_coverage(_LEVELS, observed, len(targets), band=not has_steps),
        "risk_coverage": _risk_coverage(
            predictive, (mean - targets).square().flatten(), "mean squared error of answered rows"
        ),
        "predicted_against_true": predicted_against_true(mean, low, high, targets, name=name),
    }


def _weight_figures(
    bnn: BayesianModule, baseline_weights: Mapping[str, Tensor]
) -> dict[str, Figure]:
    posterior = bnn.posterior
    mask = slice(None) if posterior.mask is None else posterior.mask
    mean = posterior.mean[mask]
    if not isinstance(posterior, GaussianPosterior):
        return {"weight_densities": weight_densities({"this network": mean} | {**baseline_weights})}

    figures = {}
    ratio, std = snr_decibels(bnn), posterior.std
    usable = (ratio.isfinite() & (std > 0)).nonzero().squeeze(-1)
    if len(usable):
        figures["snr"] = snr_density_and_cdf(ratio)
    noise = posterior.noise(NoiseKey(bnn.seed, Stream.PREDICTION, 0), range(1))
    if len(mean):
        figures["weight_densities"] = weight_densities(
            {
                "Bayes by Backprop (mean)": mean,
                "Bayes by Backprop (one sample)": posterior.draw(noise).weights[0][mask],
                **baseline_weights,
            }
        )
    if len(usable):
        order = usable[ratio[usable].argsort(stable=True)]
        chosen = [int(order[place]) for place in (0, len(order) // 2, -1)]
        figures["weight_posteriors"] = weight_posteriors(
            [float(posterior.mean[index]) for index in chosen],
            [float(std[index]) for index in chosen],
            [
                f"{rank} ratio, {decibels(float(ratio[index]))}\n{_name(bnn.layout, index)}"
                for rank, index in zip(("lowest", "median", "highest"), chosen, strict=True)
            ],
            bnn.prior if isinstance(bnn.prior, _ONE_DENSITY) and bnn.prior_mean is None else None,
        )
    return figures


def _name(layout: ParameterLayout, index: int) -> str:
    """Return the name of a weight of the flat vector, such as ``2.weight[3, 17]``."""
    for name, shape, size in zip(layout.names, layout.shapes, layout.sizes, strict=True):
        if index < size:
            # Not torch.unravel_index, which imports sympy and so takes seconds.
            place = np.unravel_index(index, shape)
            return f"{name}[{', '.join(str(i) for i in place)}]"
        index -= size
    raise IndexError(f"index must be below {sum(layout.sizes)}, the number of weights")


def _pictures(images: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape inputs to (N, height, width), or to (N, height, width, 3) from 0 to 1."""
    pictures = images.reshape(len(images), *shape)
    if len(shape) == 2:
        return pictures
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise ValueError(
            "image_shape must be (height, width) or (channels, height, width) with 1 or 3 "
            f"channels, got {tuple(shape)}"
        )
    low, high = (edge(pictures, dim=(0, 2, 3), keepdim=True) for edge in (torch.amin, torch.amax))
    scaled = (pictures - low) / (high - low).clamp_min(1e-12)
    return scaled.expand(-1, 3, -1, -1).movedim(1, -1)
