"""Faults to plant: each breaks the library through pytest's monkeypatch, which mends it again.

A check that passes on the library and on one of these proves nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bayesify import closed_forms, divergence, noise
from bayesify.elbo import ELBO, ELBOTerms
from bayesify.noise import NoiseSource
from bayesify.perturbations import Flipout, LocalReparameterization, Treatment, flipout, local
from bayesify.perturbations.operations import LinearCall
from bayesify.perturbations.perexample import Part, Pass
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
        right = closed_forms.gaussian_gaussian(q, p)
        return right - q.mean.square() / (2.0 * p.std**2)

    patch.setitem(divergence._CLOSED_FORMS, (MeanFieldGaussian, Gaussian), wrong)


each_objective_fault = pytest.mark.parametrize(
    "fault",
    [kl_halved, kl_not_divided, wider_draws, variance_for_std, closed_form_without_mean],
    ids=lambda fault: fault.__name__,
)


def _with_moments(patch: pytest.MonkeyPatch, wrong: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Local reparametrisation with ``wrong(right, call, weight, bias)`` as its moments."""
    right = local.output_moments
    patch.setattr(local, "output_moments", lambda *args: wrong(right, *args))


def _with_std(part: Part | None, change: Callable[[Tensor], Tensor | None]) -> Part | None:
    if part is None or part.spread is None:
        return part
    return dataclasses.replace(part, spread=change(part.spread))


def local_std_for_variance(patch: pytest.MonkeyPatch) -> None:
    """Outputs of variance sum of x^2 std in the place of x^2 std^2."""
    _with_moments(
        patch,
        lambda right, call, weight, bias: right(
            call, _with_std(weight, torch.sqrt), _with_std(bias, torch.sqrt)
        ),
    )


def local_bias_without_variance(patch: pytest.MonkeyPatch) -> None:
    """The bias's variance is forgotten."""
    _with_moments(
        patch,
        lambda right, call, weight, bias: right(call, weight, _with_std(bias, lambda _: None)),
    )


def local_variance_of_raw_inputs(patch: pytest.MonkeyPatch) -> None:
    """|x| std^2 in the place of x^2 std^2."""

    def wrong(
        right: Callable[..., Any], call: LinearCall, *parts: Part | None
    ) -> tuple[Tensor, Tensor]:
        roots = dataclasses.replace(call, inputs=call.inputs.abs().sqrt())
        return right(call, *parts)[0], right(roots, *parts)[1]

    _with_moments(patch, wrong)


def local_half_the_variance(patch: pytest.MonkeyPatch) -> None:
    """The variance halved."""

    def wrong(right: Callable[..., Any], *args: object) -> tuple[Tensor, Tensor]:
        mean, variance = right(*args)
        return mean, 0.5 * variance

    _with_moments(patch, wrong)


def local_std_outside_the_graph(patch: pytest.MonkeyPatch) -> None:
    """The gradient of the outputs' noise does not reach rho."""
    _with_moments(
        patch,
        lambda right, call, weight, bias: right(
            call, _with_std(weight, torch.Tensor.detach), _with_std(bias, torch.Tensor.detach)
        ),
    )


def local_inputs_outside_the_graph(patch: pytest.MonkeyPatch) -> None:
    """The gradient of the outputs' variance does not reach the layers below."""

    def wrong(
        right: Callable[..., Any], call: LinearCall, *parts: Part | None
    ) -> tuple[Tensor, Tensor]:
        cut = dataclasses.replace(call, inputs=call.inputs.detach())
        return right(call, *parts)[0], right(cut, *parts)[1]

    _with_moments(patch, wrong)


def local_one_noise_for_all_data(patch: pytest.MonkeyPatch) -> None:
    """All rows of an output get the noise of the first."""
    right = NoiseSource.normals

    def wrong(self: NoiseSource, shape: Sequence[int], *args: Any) -> Tensor:
        return right(self, shape, *args)[:1].expand(tuple(shape))

    patch.setattr(NoiseSource, "normals", wrong)


def local_at_every_use(patch: pytest.MonkeyPatch) -> None:
    """Fresh noise at each use of a weight that is used several times."""
    patch.setattr(
        LocalReparameterization, "treatment", lambda *_: Treatment("exact", "as if used once")
    )


def flipout_fresh_signs(patch: pytest.MonkeyPatch) -> None:
    """Fresh signs at each use of a weight."""
    right = flipout._signs

    def wrong(part: Part, axis: int, shape: tuple[int, int], this: Pass) -> Tensor:
        this.drawn.pop(f"{part.name} axis {axis}", None)
        return right(part, axis, shape, this)

    patch.setattr(flipout, "_signs", wrong)


def flipout_signs_at_each_position(patch: pytest.MonkeyPatch) -> None:
    """Fresh signs at each position that a datum meets the weight in."""
    right = Flipout.perturbed

    def wrong(
        self: Flipout, call: LinearCall, weight: Part, bias: Part | None, this: Pass
    ) -> Tensor:
        right(self, call, weight, bias, this)
        mean = call.apply(call.inputs, weight.mean, None if bias is None else bias.mean)
        noise = this.drawn[f"{weight.name} noise"]
        signs = [
            this.noise.signs(x.shape, noise.dtype, noise.device) for x in (call.inputs, mean, mean)
        ]
        outputs = mean + signs[1] * call.apply(signs[0] * call.inputs, noise, None)
        if bias is not None:
            outputs = outputs + signs[2] * call.channel_view(this.drawn[f"{bias.name} noise"])
        return outputs

    patch.setattr(Flipout, "perturbed", wrong)


def flipout_one_sign_for_all_data(patch: pytest.MonkeyPatch) -> None:
    """All data share the signs of the first."""
    right = flipout._signs
    patch.setattr(flipout, "_signs", lambda *args: right(*args)[:1].expand(args[2]))


def flipout_without_input_signs(patch: pytest.MonkeyPatch) -> None:
    """Signs of the weight's first axis only."""
    right = flipout._signs

    def wrong(part: Part, axis: int, shape: tuple[int, int], this: Pass) -> Tensor:
        signs = right(part, axis, shape, this)
        return signs.abs() if axis == 1 else signs

    patch.setattr(flipout, "_signs", wrong)


def flipout_std_outside_the_graph(patch: pytest.MonkeyPatch) -> None:
    """The gradient of the perturbation does not reach rho."""
    right = flipout._perturbation
    patch.setattr(flipout, "_perturbation", lambda *args: right(*args).detach())


def weaker_noise(patch: pytest.MonkeyPatch) -> None:
    """All normals x 0.8."""
    right = noise._fill

    def wrong(vector: Tensor, kind: str, key: tuple[int, ...]) -> Tensor:
        return right(vector, kind, key).mul_(0.8 if kind == "normal" else 1.0)

    patch.setattr(noise, "_fill", wrong)


def flipout_of_absolute_noise(patch: pytest.MonkeyPatch) -> None:
    """|noise| in the place of noise, and no signs: a shift upwards."""
    right = flipout._perturbation
    patch.setattr(flipout, "_perturbation", lambda *args: right(*args).abs())
    patch.setattr(flipout, "_signs", lambda *args: args[0].mean.new_ones(args[2]))
