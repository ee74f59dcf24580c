"""Faults to plant: each breaks the library through pytest's monkeypatch, which mends it again.

A check that passes on the library and on one of these proves nothing.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.loops import loop_over
from torch import Tensor

from bayesify.distributions import closed_forms
from bayesify.distributions import kl as divergence
from bayesify.distributions.posteriors import MeanFieldGaussian, WeightDraw
from bayesify.distributions.priors import Gaussian
from bayesify.estimators import Flipout, LocalReparameterization, Treatment
from bayesify.estimators import local_reparameterization as local
from bayesify.estimators.operations import LinearOperation
from bayesify.estimators.per_example import ParameterMoments, PassState
from bayesify.noise.keys import NoiseKey, NoiseSource
from bayesify.training.elbo import ELBO, ELBOTerms

Fault = Callable[[pytest.MonkeyPatch], None]


def kl_halved(patch: pytest.MonkeyPatch) -> None:
    """KL / 2 in the objective."""
    whole = divergence.kl_divergence
    patch.setattr("bayesify.training.elbo.kl_divergence", lambda *a, **k: 0.5 * whole(*a, **k))


def kl_not_divided(patch: pytest.MonkeyPatch) -> None:
    """1 / N dropped: the whole KL in the loss of one example."""
    patch.setattr("bayesify.training.elbo.minibatch_weight", lambda *_, **k: float(k["num_data"]))


def kl_per_batch(patch: pytest.MonkeyPatch) -> None:
    """KL / B in the place of KL / N."""

    def wrong(*_: object, **k: int) -> float:
        return k["num_data"] / k["batch_size"]

    patch.setattr("bayesify.training.elbo.minibatch_weight", wrong)


def geometric_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """pi_(i - 1) in the place of pi_i."""
    right = divergence.minibatch_weight

    def wrong(weighting: str, **k: int) -> float:
        return right(weighting, **k) * (2.0 if weighting == "geometric" else 1.0)

    patch.setattr("bayesify.training.elbo.minibatch_weight", wrong)


def geometric_reversed(patch: pytest.MonkeyPatch) -> None:
    """The largest weight on the last minibatch: the epoch's sum does not notice."""
    right = divergence.minibatch_weight

    def wrong(weighting: str, **k: int) -> float:
        if weighting == "geometric":
            k["batch_index"] = k["num_batches"] - 1 - k["batch_index"]
        return right(weighting, **k)

    patch.setattr("bayesify.training.elbo.minibatch_weight", wrong)


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


each_objective_fault = loop_over(
    "fault", [kl_halved, kl_not_divided, wider_draws, variance_for_std, closed_form_without_mean]
)


def _with_moments(patch: pytest.MonkeyPatch, wrong: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Local reparametrisation with ``wrong(right, call, weight, bias)`` as its moments."""
    right = local.output_moments
    patch.setattr(local, "output_moments", lambda *args: wrong(right, *args))


def _with_std(
    part: ParameterMoments | None, change: Callable[[Tensor], Tensor | None]
) -> ParameterMoments | None:
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
        right: Callable[..., Any], call: LinearOperation, *parts: ParameterMoments | None
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
        right: Callable[..., Any], call: LinearOperation, *parts: ParameterMoments | None
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


def _with_drawn(patch: pytest.MonkeyPatch, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Flipout with its noise and signs changed after they are drawn, before they are used."""
    right = Flipout.noisy_output

    def wrong(self: Flipout, *args: Any) -> Tensor:
        right(self, *args)
        drawn = args[-1].drawn
        before = dict(drawn)
        change(drawn)
        outputs = right(self, *args)
        drawn.update(before)
        return outputs

    patch.setattr(Flipout, "noisy_output", wrong)


def flipout_fresh_signs(patch: pytest.MonkeyPatch) -> None:
    """Fresh signs at each use of a weight."""

    def forget(drawn: dict[str, Tensor]) -> None:
        for name in [name for name in drawn if " axis " in name]:
            del drawn[name]

    _with_drawn(patch, forget)


def flipout_signs_at_each_position(patch: pytest.MonkeyPatch) -> None:
    """Fresh signs at each position that an example meets the weight in."""
    right = Flipout.noisy_output

    def wrong(
        self: Flipout,
        call: LinearOperation,
        weight: ParameterMoments,
        bias: ParameterMoments | None,
        this: PassState,
    ) -> Tensor:
        right(self, call, weight, bias, this)
        mean = call.apply(call.inputs, weight.mean, None if bias is None else bias.mean)
        noise = this.drawn[f"{weight.name} noise"]
        signs = [
            this.noise.signs(x.shape, noise.dtype, noise.device) for x in (call.inputs, mean, mean)
        ]
        outputs = mean + signs[1] * call.apply(signs[0] * call.inputs, noise, None)
        if bias is not None and bias.spread is not None:
            outputs = outputs + signs[2] * call.channel_view(this.drawn[f"{bias.name} noise"])
        return outputs

    patch.setattr(Flipout, "noisy_output", wrong)


def flipout_one_sign_for_all_data(patch: pytest.MonkeyPatch) -> None:
    """All examples share the signs of the first."""
    right = NoiseSource.signs

    def wrong(self: NoiseSource, shape: Sequence[int], *args: Any) -> Tensor:
        return right(self, shape, *args)[:1].expand(tuple(shape))

    patch.setattr(NoiseSource, "signs", wrong)


def flipout_without_input_signs(patch: pytest.MonkeyPatch) -> None:
    """Signs of the weight's first axis only."""

    def drop(drawn: dict[str, Tensor]) -> None:
        for name in drawn:
            if name.endswith(" axis 1"):
                drawn[name] = drawn[name].abs()

    _with_drawn(patch, drop)


def flipout_std_outside_the_graph(patch: pytest.MonkeyPatch) -> None:
    """The gradient of the noise does not reach rho."""

    def cut(drawn: dict[str, Tensor]) -> None:
        for name in drawn:
            drawn[name] = drawn[name].detach()

    _with_drawn(patch, cut)


def flipout_of_absolute_noise(patch: pytest.MonkeyPatch) -> None:
    """|noise| in the place of noise, and no signs: a shift upwards."""

    def lift(drawn: dict[str, Tensor]) -> None:
        for name in drawn:
            drawn[name] = drawn[name].abs()

    _with_drawn(patch, lift)


def equal_normals_in_pairs(patch: pytest.MonkeyPatch) -> None:
    """The two samples of an antithetic pair have equal normals."""
    begin, right = NoiseSource.__init__, NoiseSource.normals
    opposite: weakref.WeakSet[NoiseSource] = weakref.WeakSet()

    def wrong_begin(self: NoiseSource, key: NoiseKey, sample: int, **options: bool) -> None:
        begin(self, key, sample, **options)
        if options.get("antithetic") and sample % 2 == 1:
            opposite.add(self)

    def wrong(self: NoiseSource, *args: Any) -> Tensor:
        return -right(self, *args) if self in opposite else right(self, *args)

    patch.setattr(NoiseSource, "__init__", wrong_begin)
    patch.setattr(NoiseSource, "normals", wrong)


def weaker_noise(patch: pytest.MonkeyPatch) -> None:
    """All normals x 0.8."""
    fill, numbers = NoiseKey.fill_normals, NoiseKey.numbers

    def weaker_fill(self: NoiseKey, vector: Tensor, sample: int) -> None:
        fill(self, vector, sample)
        vector.mul_(0.8)

    def weaker_numbers(self: NoiseKey, kind: Any, *args: Any) -> Tensor:
        return numbers(self, kind, *args) * (0.8 if kind == "normal" else 1.0)

    patch.setattr(NoiseKey, "fill_normals", weaker_fill)
    patch.setattr(NoiseKey, "numbers", weaker_numbers)


def noise_without(patch: pytest.MonkeyPatch, change: Callable[..., tuple[Any, ...]]) -> None:
    """Noise of another key: ``change`` maps (seed, stream, step, sample, place) to it."""
    fill, numbers = NoiseKey.fill_normals, NoiseKey.numbers

    def wrong_fill(self: NoiseKey, vector: Tensor, sample: int) -> None:
        *key, sample, _ = change(self.seed, self.stream, self.step, sample, 0)
        fill(NoiseKey(*key), vector, sample)

    def wrong_numbers(self: NoiseKey, kind: Any, sample: int, place: int, *args: Any) -> Tensor:
        *key, sample, place = change(self.seed, self.stream, self.step, sample, place)
        return numbers(NoiseKey(*key), kind, sample, place, *args)

    patch.setattr(NoiseKey, "fill_normals", wrong_fill)
    patch.setattr(NoiseKey, "numbers", wrong_numbers)
