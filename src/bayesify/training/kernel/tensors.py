"""The kernel in PyTorch's operations, which ``torch.compile`` fuses on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from bayesify.distributions.softplus import softplus
from bayesify.noise.threefry import normals, signs
from bayesify.training.convergence import SNR_BORDERS, StdResidual, grouped
from bayesify.training.kernel.formulas import (
    Gradients,
    LeafKind,
    OptimizerRule,
    PriorBlocks,
    PriorForm,
    Rates,
    centred_on,
    gradients,
    ivon_updated,
    of_sample,
    updated,
)
from bayesify.training.kernel.interface import Recipe, SampleNoise, Vectors

__all__ = ["TensorKernel"]


class TensorKernel:
    """See :class:`~bayesify.training.kernel.interface.Kernel`.

    What changes from step to step lies in tensors on the device, so that a captured graph of the
    step counts by itself.

    Args:
        recipe: what to compute.
        vectors: on what; held, and written in place.
        key: the noise's, see ``counter_key``.
        compiled: whether ``torch.compile`` makes one kernel of it; else the operations run one by
            one, which gives the same numbers slowly.
    """

    def __init__(
        self, recipe: Recipe, vectors: Vectors, key: tuple[int, int], *, compiled: bool
    ) -> None:
        device = vectors.mean.device
        self._vectors = vectors
        self._state = _State(
            mean=vectors.mean,
            rho=vectors.rho,
            leaf=vectors.leaf,
            of_mean=vectors.of_mean,
            of_rho=vectors.of_rho,
            prior_mean=vectors.prior_mean,
            mask=vectors.mask,
            sums=vectors.sums,
            prior=_numbers_of(recipe.prior, vectors.mean),
            key=torch.tensor(key, dtype=torch.int32, device=device),
            sign=vectors.mean.new_ones(()),
            step=torch.zeros((), dtype=torch.int32, device=device),
            numbers=torch.zeros(_NUMBERS, dtype=torch.float64, device=device),
            residual=torch.zeros(2, len(SNR_BORDERS) + 1, dtype=torch.float64, device=device),
        )
        self._noise, self._compiled = SampleNoise(key), compiled
        self._keys: dict[tuple[int, int], Tensor] = {}
        prior = recipe.prior
        self._refresh, self._accumulate, self._advance = _functions(
            _Rule(
                prior.kind,
                prior.exact,
                recipe.optimizer,
                recipe.leaf,
                recipe.num_samples,
                recipe.from_sums,
            ),
            compiled,
        )

    @torch.no_grad()
    def refresh(self, step: int) -> None:
        """See :meth:`~bayesify.training.kernel.interface.Kernel.refresh`."""
        self._set_step(step)
        self._set_noise(self._noise)
        self._refresh(self._state)

    @torch.no_grad()
    def accumulate(
        self,
        in_mean: Sequence[Tensor | None],
        *,
        step: int,
        kl_factor: float,
        first: bool,
        then: SampleNoise | None,
    ) -> None:
        """See :meth:`~bayesify.training.kernel.interface.Kernel.accumulate`."""
        self._set_step(step)
        self._set_numbers(kl_factor)
        self._set_noise(self._noise if then is None else then)
        if first:
            for each in self._state.sums:
                each.zero_()
        self._accumulate(self._state, self._joined(in_mean))

    def update(
        self,
        in_mean: Sequence[Tensor | None],
        in_spread: Sequence[Tensor | None],
        *,
        step: int,
        kl_factor: float,
        rates: tuple[Rates, Rates],
        with_residual: bool = False,
    ) -> StdResidual | None:
        """See :meth:`~bayesify.training.kernel.interface.Kernel.update`."""
        self.prepare(step, kl_factor, rates)
        self.advance(in_mean, in_spread)
        return self.residual if with_residual else None

    def normals(self, key: tuple[int, int], step: int, size: int) -> Tensor:
        """See :meth:`~bayesify.training.kernel.interface.Kernel.normals`.

        Compiled, they are those of the step that the device is at, so that a graph advances.
        """
        mean = self._state.mean
        if not self._compiled:
            return normals(*key, step, size, dtype=mean.dtype, device=mean.device)
        if key not in self._keys:  # in a first step: a graph could not capture the copy
            self._keys[key] = torch.tensor(key, dtype=torch.int32, device=mean.device)
        with _many_sizes():
            return _compiled_normals()(self._keys[key], self._state.step, size, mean.dtype)

    def signs(self, key: tuple[int, int], step: int, size: int) -> Tensor:
        """See :meth:`~bayesify.training.kernel.interface.Kernel.signs`.

        Compiled, they are those of normals, which a graph draws anyway.
        """
        mean = self._state.mean
        if not self._compiled:
            return signs(*key, step, size, dtype=mean.dtype, device=mean.device)
        drawn = self.normals(key, step, size)
        return torch.ones_like(drawn).copysign_(drawn)

    def prepare(self, step: int, kl_factor: float, rates: tuple[Rates, Rates]) -> None:
        """Set the step and the factors of the next :meth:`advance`."""
        self._set_step(step)
        self._set_noise(self._noise)
        self._set_numbers(kl_factor, *map(float, rates[0]), *map(float, rates[1]))

    @property
    def residual(self) -> StdResidual:
        """The residual of the last :meth:`advance`."""
        return StdResidual.of(self._state.residual)

    @torch.no_grad()
    def advance(self, in_mean: Sequence[Tensor | None], in_spread: Sequence[Tensor | None]) -> None:
        """Make one step, entirely on the device."""
        self._advance(
            self._state, self._joined(in_mean), self._joined(in_spread) if in_spread else None
        )

    def _joined(self, parts: Sequence[Tensor | None]) -> Tensor:
        sizes = [stop - start for start, stop in pairwise(self._vectors.starts)]
        return torch.cat(
            [
                self._vectors.mean.new_zeros(size) if part is None else part.reshape(-1)
                for size, part in zip(sizes, parts, strict=True)
            ]
        )

    def _set_step(self, step: int) -> None:
        # As a signed word.
        self._state.step.fill_((step + 2**31) % 2**32 - 2**31)

    def _set_noise(self, noise: SampleNoise) -> None:
        if self._state.sums:  # else it is always the same
            self._state.key.copy_(torch.tensor(noise.key, dtype=torch.int32))
            self._state.sign.fill_(-1.0 if noise.opposite else 1.0)

    def _set_numbers(self, kl_factor: float, *rates: float) -> None:
        numbers = torch.tensor([kl_factor, *rates], dtype=torch.float64)
        self._state.numbers[: len(numbers)].copy_(numbers)


class _Rule(NamedTuple):
    """The properties that compiled code is specialised for."""

    kind: str
    exact: bool
    optimizer: OptimizerRule
    leaf: LeafKind
    num_samples: int
    from_sums: bool


class _State(NamedTuple):
    mean: Tensor
    rho: Tensor
    leaf: Tensor
    of_mean: tuple[Tensor, ...]
    of_rho: tuple[Tensor, ...]
    prior_mean: Tensor | None
    mask: Tensor | None
    sums: tuple[Tensor, ...]
    prior: tuple[Tensor, Tensor, Tensor]
    key: Tensor
    sign: Tensor
    step: Tensor
    numbers: Tensor
    residual: Tensor

    def normals(self) -> Tensor:
        key0, key1 = self.key.unbind()
        mean = self.mean
        made = normals(key0, key1, self.step, mean.numel(), dtype=mean.dtype, device=mean.device)
        return made * self.sign if self.sums else made


def _numbers_of(prior: PriorBlocks, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The prior's numbers: scalars, or vectors where they differ between the weights."""
    numbers = torch.tensor([form.numbers for form in prior.forms], dtype=torch.float64).T
    sizes = torch.tensor([*prior.starts[1:], mean.numel()]) - torch.tensor(prior.starts)
    first, second, third = (
        each[0].to(mean.device)
        if bool((each == each[0]).all())
        else each.to(mean).repeat_interleave(sizes.to(mean.device))
        for each in numbers
    )
    return first, second, third


#: kl_factor, and the rates of mean and of rho.
_NUMBERS = 1 + 2 * len(Rates._fields)


@cache
def _functions(
    rule: _Rule, compiled: bool
) -> tuple[
    Callable[[_State], None],
    Callable[[_State, Tensor], None],
    Callable[[_State, Tensor, Tensor | None], None],
]:
    """The functions of a kernel, compiled at the first call for each number of weights."""
    functions = partial(_fill_leaf, rule), partial(_accumulate, rule), partial(_advance, rule)
    if not compiled:
        return functions
    first, second, third = (torch.compile(f, fullgraph=True, dynamic=False) for f in functions)

    def refresh(state: _State) -> None:
        with _many_sizes():
            first(state)

    def accumulate(state: _State, in_mean: Tensor) -> None:
        with _many_sizes():
            second(state, in_mean)

    def advance(state: _State, in_mean: Tensor, in_spread: Tensor | None) -> None:
        with _many_sizes():
            third(state, in_mean, in_spread)

    return refresh, accumulate, advance


def _normals(key: Tensor, step: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    key0, key1 = key.unbind()
    return normals(key0, key1, step, size, dtype=dtype, device=key.device)


@cache
def _compiled_normals() -> Callable[[Tensor, Tensor, int, torch.dtype], Tensor]:
    """One function for all sizes."""
    return torch.compile(_normals, fullgraph=True, dynamic=True)


def _many_sizes() -> AbstractContextManager[None]:
    """Allow recompilation for many sizes and priors within one process."""
    context: AbstractContextManager[None] = torch._dynamo.config.patch(recompile_limit=256)
    return context


def _fill_leaf(rule: _Rule, state: _State) -> None:
    std = softplus(state.rho)
    if rule.leaf == "weights":
        leaf = state.mean + std * state.normals()
    else:
        leaf = std * std if rule.leaf == "variances" else std
    state.leaf.copy_(leaf if state.mask is None else torch.where(state.mask, leaf, 0.0))


def _accumulate(rule: _Rule, state: _State, in_mean: Tensor) -> None:
    prior, kl_factor, _ = _numbers(rule, state)
    deviation = state.leaf - state.mean
    centred = state.leaf if state.prior_mean is None else state.leaf - state.prior_mean
    made = of_sample(prior, in_mean, centred, kl_factor / rule.num_samples)
    for total, each in zip(state.sums, (made, made * deviation), strict=True):
        total.add_(each if state.mask is None else torch.where(state.mask, each, 0.0))
    _fill_leaf(rule, state)


def _numbers(rule: _Rule, state: _State) -> tuple[PriorForm, Tensor, tuple[Tensor, ...]]:
    """Unpack the prior, the factor on the KL, and the rates."""
    kl_factor, *rates = state.numbers.unbind()
    prior = PriorForm(rule.kind, rule.exact, state.prior)  # type: ignore[arg-type]
    return prior, kl_factor, tuple(rates)


def _advance(rule: _Rule, state: _State, in_mean: Tensor, in_spread: Tensor | None) -> None:
    prior, kl_factor, both_rates = _numbers(rule, state)
    half = len(Rates._fields)
    std, deviation = softplus(state.rho), None
    in_log_std, place = None, state.mean
    if in_spread is None:
        deviation = state.leaf - state.mean
    else:
        in_log_std = in_spread * (2.0 * std * std if rule.leaf == "variances" else std)
        if not rule.exact:
            deviation = std * state.normals()
    if not rule.exact:
        assert deviation is not None
        place = place + deviation
    made = gradients(
        prior,
        in_mean=in_mean,
        in_log_std=in_log_std,
        centred=place if state.prior_mean is None else place - state.prior_mean,
        std=std,
        deviation=deviation,
        kl_factor=kl_factor,
        # The part of the KL's estimate that the last sample bears: none if it is in the sums.
        num_samples=math.inf if rule.from_sums else rule.num_samples,
        sums=state.sums,
    )
    if state.mask is not None:
        made = Gradients(*(torch.where(state.mask, each, 0.0) for each in made))
    state.residual.copy_(grouped(made.in_log_std, state.mean, std, state.mask))
    of_mean, of_rho = Rates(*both_rates[:half]), Rates(*both_rates[half:])
    new_values: tuple[Tensor, ...]
    if rule.optimizer == "ivon":
        mean, moments = state.mean, (*state.of_mean, *state.of_rho)
        new_values = ivon_updated(
            (mean, *moments),
            in_mean=made.in_mean,
            in_log_std=made.in_log_std,
            centred=centred_on(state.prior_mean, mean, state.mask),
            delta=prior.numbers[0] / of_mean.ess,
            rates=of_mean,
        )
        for old, new in zip((mean, state.rho, *moments), new_values, strict=True):
            old.copy_(new)
    else:
        for value, gradient, moments, rates in (
            (state.mean, made.in_mean, state.of_mean, of_mean),
            (state.rho, made.in_rho, state.of_rho, of_rho),
        ):
            new_values = updated(rule.optimizer, value, gradient, moments, rates)
            for old, new in zip((value, *moments), new_values, strict=True):
                old.copy_(new)
    state.step.add_(1)
    _fill_leaf(rule, state)
