"""All figures of a trained network, ready for its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import one_hot

from bayesify.layout import ParameterLayout
from bayesify.metrics import (
    expected_calibration_error,
    ood_auroc,
    reliability,
    risk_coverage,
)
from bayesify.module import BayesianModule
from bayesify.noise import NoiseKey, Stream
from bayesify.plots import (
    Row,
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
from bayesify.posteriors import Delta, MeanFieldGaussian
from bayesify.predictive import CategoricalPredictive, GaussianPredictive, Predictive
from bayesify.priors import Gaussian, Laplace, ScaleMixture, StudentT
from bayesify.pruning import snr_decibels

__all__ = ["build_figures", "regression_figures"]

_GALLERY = 8
#: Weight samples that vote on the class of an image.
_VOTES = 100
#: So many images of the highest epistemic uncertainty are put to the vote.
_DISPUTED = 200
#: Of intervals of numbers.
_LEVELS = (*(0.05 * step for step in range(1, 20)), 0.99)
#: Priors with one density for all weights, which a figure can show.
_ONE_DENSITY = (Gaussian, Laplace, ScaleMixture, StudentT)


@torch.no_grad()
def build_figures(
    bnn: BayesianModule,
    *,
    images: Tensor,
    targets: Tensor,
    predictive: Predictive,
    history: Sequence[Row],
    pruning: Sequence[Row],
    class_names: Sequence[str],
    image_shape: Sequence[int] | None,
    baselines: Mapping[str, Sequence[Row]] | None = None,
    baseline_weights: Mapping[str, Tensor] | None = None,
    outside: tuple[str, Predictive] | None = None,
    truth: tuple[str, Tensor] | None = None,
) -> dict[str, Figure]:
    """Draw whatever can be drawn of a trained network.

    What does not apply is left out: figures that need a standard deviation for a point estimate,
    calibration where the targets are not classes, galleries where the inputs are not images.

    Args:
        bnn: the network.
        images: its test inputs, shape (N, ...).
        targets: their targets, shape (N, ...).
        predictive: its answer to ``images``, ``bnn.predict(images)``.
        history: a row an epoch, as :func:`bayesify.plots.learning_curves` takes them.
        pruning: rows as :func:`bayesify.plots.pruning_curve` takes them, or none.
        class_names: K names.
        image_shape: (height, width) or (channels, height, width) of one input, or None.
        baselines: histories of other runs by name.
        baseline_weights: their trained weights by name, flat, for the density of the weights.
        outside: what images of another kind are called, and the network's answer to them.
        truth: of one number what it is called, and the targets in the unit of ``predictive``.

    Returns:
        Figures by name, in the order of a report: ``learning_curves``; of classes
        ``reliability``, ``risk_coverage``, ``votes``, ``least_certain``, ``most_certain``,
        ``out_of_distribution``; of a number those of :func:`regression_figures`; ``pruning``,
        ``snr``, ``weight_densities``, ``weight_posteriors``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figures: dict[str, Figure] = {}
    error_name = bnn.likelihood.error_name
    if history:
        figures["learning_curves"] = learning_curves(history, baselines, error_label=error_name)
    if isinstance(predictive, CategoricalPredictive):
        figures |= _calibration(predictive, targets)
        if image_shape is not None:
            pictures = _pictures(images, image_shape)
            figures |= _galleries(bnn, images, pictures, targets, predictive, class_names)
        if outside is not None and not isinstance(bnn.posterior, Delta):
            figures["out_of_distribution"] = _outside(predictive, *outside)
    if isinstance(predictive, GaussianPredictive) and truth is not None:
        figures |= regression_figures(predictive, truth[1], truth[0])
    if pruning:
        whole = float(bnn.likelihood.error(bnn.mean_outputs(images), targets))
        figures["pruning"] = pruning_curve(pruning, whole, error_label=error_name)
    figures |= _weight_figures(bnn, baseline_weights or {})
    return figures


def _calibration(predictive: CategoricalPredictive, targets: Tensor) -> dict[str, Figure]:
    probs = predictive.mean
    return {
        "reliability": reliability_diagram(
            reliability(probs, targets), expected_calibration_error(probs, targets)
        ),
        "risk_coverage": _abstaining(
            predictive, 100.0 * (predictive.prediction != targets), "error of those answered (%)"
        ),
    }


def _abstaining(predictive: Predictive, loss: Tensor, risk_label: str) -> Figure:
    orders = {"by total uncertainty": predictive.total, "by epistemic": predictive.epistemic}
    if not bool((predictive.epistemic > 0.0).any()):  # a point estimate has none
        del orders["by epistemic"]
    orders["best possible order"] = loss
    curves = {name: risk_coverage(order.flatten(), loss) for name, order in orders.items()}
    return risk_coverage_curve(curves, risk_label=risk_label)


def _galleries(
    bnn: BayesianModule,
    images: Tensor,
    pictures: Tensor,
    targets: Tensor,
    predictive: CategoricalPredictive,
    class_names: Sequence[str],
) -> dict[str, Figure]:
    figures = {}
    if not isinstance(bnn.posterior, Delta):
        # The votes of all images would take a sample of each; those that split are among these.
        likely = predictive.epistemic.argsort(descending=True, stable=True)[:_DISPUTED]
        voters = bnn.predict(images[likely], _VOTES, keep_samples=True).samples
        assert voters is not None
        votes = one_hot(voters.argmax(-1), len(class_names)).sum(0)
        split = votes.amax(-1).argsort(stable=True)[:_GALLERY]
        chosen = likely[split]
        figures["votes"] = votes_gallery(
            pictures[chosen], targets[chosen], voters[:, split], class_names, "The most disputed"
        )
    order = predictive.total.argsort(stable=True)
    for name, title, chosen in (
        ("least_certain", "The least certain", order.flip(0)[:_GALLERY]),
        ("most_certain", "The most certain", order[:_GALLERY]),
    ):
        figures[name] = digit_gallery(
            pictures[chosen],
            targets[chosen],
            predictive.mean[chosen],
            predictive.epistemic[chosen],
            predictive.total[chosen],
            class_names,
            title,
        )
    return figures


def _outside(inside: Predictive, name: str, outside: Predictive) -> Figure:
    near, far = inside.epistemic.clamp_min(0.0), outside.epistemic.clamp_min(0.0)
    return epistemic_histogram(
        near,
        far,
        names=("test images", name),
        title=f"AUROC {ood_auroc(near, far):.3f} by epistemic uncertainty",
    )


@torch.no_grad()
def regression_figures(
    predictive: GaussianPredictive, targets: Tensor, name: str = "target"
) -> dict[str, Figure]:
    """Whether predictions of one number hold: intervals, abstaining, the predictions themselves.

    Args:
        predictive: of N data, in the unit of the targets.
        targets: what came true, the shape of its mean, (N,) or (N, 1).
        name: the target's.

    Returns:
        Figures by name: ``interval_coverage``, ``risk_coverage``, ``predicted_against_true``.

    Raises:
        ValueError: the shapes do not fit, or the target has several parts.

    Example:
        >>> p = GaussianPredictive(torch.zeros(1, 4), torch.tensor(1.0))
        >>> list(regression_figures(p, torch.tensor([-2.0, -0.5, 0.5, 1.0])))
        ['interval_coverage', 'risk_coverage', 'predicted_against_true']
    """
    # A target lies within the equal-tailed interval of a level where its cdf is as near to 1/2.
    needed = (2.0 * predictive.cdf(targets).double() - 1.0).abs()
    observed = [float((needed <= level).double().mean()) for level in _LEVELS]
    mean, (low, high) = predictive.mean, predictive.interval(0.95)
    return {
        "interval_coverage": interval_coverage(_LEVELS, observed, len(targets)),
        "risk_coverage": _abstaining(
            predictive, (mean - targets).square().flatten(), "mean squared error of those answered"
        ),
        "predicted_against_true": predicted_against_true(mean, low, high, targets, name=name),
    }


def _weight_figures(
    bnn: BayesianModule, baseline_weights: Mapping[str, Tensor]
) -> dict[str, Figure]:
    posterior = bnn.posterior
    kept = slice(None) if posterior.kept is None else posterior.kept
    mean = posterior.mean[kept]
    if not isinstance(posterior, MeanFieldGaussian):
        return {"weight_densities": weight_densities({"this network": mean} | {**baseline_weights})}

    figures = {}
    ratio, std = snr_decibels(bnn), posterior.std
    usable = (ratio.isfinite() & (std > 0)).nonzero().squeeze(-1)
    if len(usable):
        figures["snr"] = snr_density_and_cdf(ratio)
    noise = NoiseKey(bnn.seed, Stream.PREDICTION, 0).normals(
        range(1), bnn.layout.num_weights, dtype=mean.dtype, device=mean.device
    )
    if len(mean):
        figures["weight_densities"] = weight_densities(
            {
                "Bayes by Backprop (mean)": mean,
                "Bayes by Backprop (one sample)": posterior.draw(noise).weights[0][kept],
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
    """The weight at a place of the flat vector, such as ``2.weight[3, 17]``."""
    for name, shape, size in zip(layout.names, layout.shapes, layout.sizes, strict=True):
        if index < size:
            place = torch.unravel_index(torch.tensor(index), shape)
            return f"{name}[{', '.join(str(int(i)) for i in place)}]"
        index -= size
    raise IndexError("the index lies beyond the last weight")


def _pictures(images: Tensor, shape: Sequence[int]) -> Tensor:
    """Inputs as pictures, shape (N, height, width), or (N, height, width, 3) from 0 to 1."""
    pictures = images.reshape(len(images), *shape)
    if len(shape) == 2:
        return pictures
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise ValueError(
            "image_shape must be (height, width) or (channels, height, width) with 1 or 3 "
            f"channels, got {tuple(shape)}"
        )
    if shape[0] == 1:
        return pictures.squeeze(1)
    low, high = pictures.amin(), pictures.amax()
    return ((pictures - low) / (high - low).clamp_min(1e-12)).movedim(1, -1)
