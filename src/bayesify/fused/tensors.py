"""The kernel in PyTorch's own operations: for a GPU, where ``torch.compile`` makes it one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from bayesify.fused.formulas import Gradients, Rates, gradients, moved
from bayesify.fused.kernels import Recipe, Vectors
from bayesify.fused.threefry import normals
from bayesify.softplus import softplus

__all__ = ["TensorKernel"]


class TensorKernel:
    """See :class:`~bayesify.fused.kernels.Kernel`.

    What changes from step to step lies in tensors on the device, so that a captured graph of the
    step goes on counting by itself.

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
        self._recipe, self._vectors, self._key = recipe, vectors, key
        device = vectors.mean.device
        self._step = torch.zeros((), dtype=torch.int32, device=device)
        numbers = 1 + 2 * len(Rates._fields)
        self._numbers = torch.zeros(numbers, dtype=torch.float64, device=device)
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        self._refresh: Callable[[], None] = self._fill_leaf
        self._update: Callable[[Tensor, Tensor | None], None] = self._advance
        if compiled:
            self._refresh = torch.compile(self._fill_leaf, fullgraph=True, dynamic=False)
            self._update = torch.compile(self._advance, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def refresh(self, step: int) -> None:
        """See :meth:`~bayesify.fused.kernels.Kernel.refresh`."""
        self._set_step(step)
        self._refresh()

    @torch.no_grad()
    def update(
        self,
        in_mean: Sequence[Tensor | None],
        in_std: Sequence[Tensor | None],
        *,
        step: int,
        kl_factor: float,
        rates: tuple[Rates, Rates],
    ) -> float:
        """See :meth:`~bayesify.fused.kernels.Kernel.update`."""
        self._set_step(step)
        self.set_numbers(kl_factor, rates)
        self.advance(in_mean, in_std)
        return float(self._total)

    def set_numbers(self, kl_factor: float, rates: tuple[Rates, Rates]) -> None:
        """Say what the next :meth:`advance` multiplies by."""
        numbers = [kl_factor, *map(float, rates[0]), *map(float, rates[1])]
        self._numbers.copy_(torch.tensor(numbers, dtype=torch.float64))

    @torch.no_grad()
    def advance(self, in_mean: Sequence[Tensor | None], in_std: Sequence[Tensor | None]) -> None:
        """One step on, entirely on the device."""
        self._update(self._joined(in_mean), self._joined(in_std) if in_std else None)

    def _advance(self, in_mean: Tensor, in_std: Tensor | None) -> None:
        recipe, vectors = self._recipe, self._vectors
        kl_factor, *rest = self._numbers.unbind()
        half = len(rest) // 2
        std, deviation = softplus(vectors.rho), None
        if in_std is None:
            deviation = vectors.leaf - vectors.mean
            in_log_std = in_mean * deviation
        else:
            in_log_std = in_std * std
            if not recipe.prior.exact:
                deviation = std * self._normals()
        prior_mean, kept = vectors.prior_mean, vectors.kept
        made = gradients(
            recipe.prior,
            in_mean=in_mean,
            in_log_std=in_log_std,
            centred=vectors.mean if prior_mean is None else vectors.mean - prior_mean,
            std=std,
            deviation=deviation,
            kl_factor=kl_factor,
        )
        if kept is not None:
            made = Gradients(*(torch.where(kept, each, 0.0) for each in made))
        self._total.copy_(made.in_log_std.sum(dtype=torch.float64))
        self._move(vectors.mean, made.in_mean, vectors.of_mean, Rates(*rest[:half]))
        self._move(vectors.rho, made.in_rho, vectors.of_rho, Rates(*rest[half:]))
        self._step += 1
        self._fill_leaf()

    def _move(
        self, value: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], rates: Rates
    ) -> None:
        new_values = moved(self._recipe.optimizer, value, gradient, moments, rates)
        for old, new in zip((value, *moments), new_values, strict=True):
            old.copy_(new)

    def _fill_leaf(self) -> None:
        vectors = self._vectors
        std = softplus(vectors.rho)
        leaf = std if self._recipe.moments else vectors.mean + std * self._normals()
        vectors.leaf.copy_(leaf if vectors.kept is None else torch.where(vectors.kept, leaf, 0.0))

    def _normals(self) -> Tensor:
        mean = self._vectors.mean
        return normals(*self._key, self._step, mean.numel(), dtype=mean.dtype, device=mean.device)

    def _joined(self, parts: Sequence[Tensor | None]) -> Tensor:
        starts, mean = self._vectors.starts, self._vectors.mean
        sizes = [stop - start for start, stop in pairwise(starts)]
        return torch.cat(
            [
                mean.new_zeros(size) if part is None else part.reshape(-1)
                for size, part in zip(sizes, parts, strict=True)
            ]
        )

    def _set_step(self, step: int) -> None:
        self._step.fill_((step + 2**31) % 2**32 - 2**31)
