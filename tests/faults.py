"""Faults to plant: each breaks the library through pytest's monkeypatch, which mends it again.

A check that passes on the library and on one of these proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bayesify import divergence
from bayesify.elbo import ELBO, ELBOTerms
from bayesify.posteriors import MeanFieldGaussian, WeightDraw
from bayesify.priors import Gaussian

Fault = Callable[[pytest.MonkeyPatch], None]


def kl_halved(patch: pytest.MonkeyPatch) -> None:
    """KL / 2 in the objective."""
    whole = divergence.kl_divergence
    patch.setattr("bayesify.elbo.kl_divergence", lambda *a, **k: 0.5 * whole(*a, **k))


def kl_not_divided(patch: pytest.MonkeyPatch) -> None:
    """1 / N dropped: the whole KL in the loss of one datum."""
    patch.setattr("bayesify.elbo.minibatch_weight", lambda *_, **k: float(k["num_data"]))


def kl_per_batch(patch: pytest.MonkeyPatch) -> None:
    """KL / B in the place of KL / N."""

    def wrong(*_: object, **k: int) -> float:
        return k["num_data"] / k["batch_size"]

    patch.setattr("bayesify.elbo.minibatch_weight", wrong)


def geometric_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """pi_(i - 1) in the place of pi_i."""
    right = divergence.minibatch_weight

    def wrong(weighting: str, **k: int) -> float:
        return right(weighting, **k) * (2.0 if weighting == "geometric" else 1.0)

    patch.setattr("bayesify.elbo.minibatch_weight", wrong)


def geometric_reversed(patch: pytest.MonkeyPatch) -> None:
    """The largest weight on the last minibatch: the epoch's sum does not notice."""
    right = divergence.minibatch_weight

    def wrong(weighting: str, **k: int) -> float:
        if weighting == "geometric":
            k["batch_index"] = k["num_batches"] - 1 - k["batch_index"]
        return right(weighting, **k)

    patch.setattr("bayesify.elbo.minibatch_weight", wrong)


def temperature_on_nll(patch: pytest.MonkeyPatch) -> None:
    """The temperature multiplies the whole loss."""
    right = ELBO.forward

    def wrong(self: ELBO, *args: Tensor, **k: int) -> ELBOTerms:
        terms = right(self, *args, **k)
        return terms._replace(loss=terms.loss + (self.temperature - 1.0) * terms.nll)

    patch.setattr(ELBO, "forward", wrong)


def wider_draws(patch: pytest.MonkeyPatch) -> None:
    """Weights drawn with std x 1.05, while log q takes them for draws of std."""

    def wrong(self: MeanFieldGaussian, noise: Tensor) -> WeightDraw:
        return WeightDraw(self.mean + 1.05 * self.full_std * noise, noise)

    patch.setattr(MeanFieldGaussian, "draw", wrong)


def variance_for_std(patch: pytest.MonkeyPatch) -> None:
    """Weights drawn with std^2 in the place of std."""

    def wrong(self: MeanFieldGaussian, noise: Tensor) -> WeightDraw:
        return WeightDraw(self.mean + self.full_std.square() * noise, noise)

    patch.setattr(MeanFieldGaussian, "draw", wrong)


def std_outside_the_graph(patch: pytest.MonkeyPatch) -> None:
    """The gradient of the weights does not reach rho."""

    def wrong(self: MeanFieldGaussian, noise: Tensor) -> WeightDraw:
        return WeightDraw(self.mean + self.full_std.detach() * noise, noise)

    patch.setattr(MeanFieldGaussian, "draw", wrong)


def density_without_its_parameters(patch: pytest.MonkeyPatch) -> None:
    """log q(w | theta) with theta cut off: df/dmu and df/drho, the second halves, are missing."""

    def wrong(self: MeanFieldGaussian, draw: WeightDraw) -> Tensor:
        std = self.full_std.detach()
        return torch.distributions.Normal(self.mean.detach(), std).log_prob(draw.weights)

    patch.setattr(MeanFieldGaussian, "log_prob_of", wrong)


def density_without_its_weights(patch: pytest.MonkeyPatch) -> None:
    """log q(w | theta) with w cut off: d log q / dw is missing."""

    def wrong(self: MeanFieldGaussian, draw: WeightDraw) -> Tensor:
        return torch.distributions.Normal(self.mean, self.full_std).log_prob(draw.weights.detach())

    patch.setattr(MeanFieldGaussian, "log_prob_of", wrong)


def density_off_by_a_constant(patch: pytest.MonkeyPatch) -> None:
    """log q without -log(2 pi) / 2: no gradient changes."""
    right = MeanFieldGaussian.log_prob_of

    def wrong(self: MeanFieldGaussian, draw: WeightDraw) -> Tensor:
        return right(self, draw) + 0.5 * math.log(2.0 * math.pi)

    patch.setattr(MeanFieldGaussian, "log_prob_of", wrong)


def closed_form_without_mean(patch: pytest.MonkeyPatch) -> None:
    """The Gaussian KL without mean^2 / (2 std^2)."""

    def wrong(q: MeanFieldGaussian, p: Gaussian) -> Tensor:
        right = divergence._gaussian_gaussian(q, p)
        return right - q.mean.square() / (2.0 * p.std**2)

    patch.setitem(divergence._CLOSED_FORMS, (MeanFieldGaussian, Gaussian), wrong)


each_objective_fault = pytest.mark.parametrize(
    "fault",
    [kl_halved, kl_not_divided, wider_draws, variance_for_std, closed_form_without_mean],
    ids=lambda fault: fault.__name__,
)
