"""The updates of several networks that are trained at once, by a kernel or by autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from bayesify.distributions.posteriors import MeanFieldGaussian, WeightDraw
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.training.backends.leaves import ParameterGradients
from bayesify.training.backends.requirements import signature, why_not_compiled
from bayesify.training.convergence import StdResidual, std_residual
from bayesify.training.elbo import ELBO, fused_as
from bayesify.training.kernel.formulas import leaf_kind
from bayesify.training.kernel.interface import Kernel
from bayesify.training.kernel.posterior_update import PosteriorUpdate

__all__ = ["AutogradUpdates", "KernelUpdates", "ReplicaUpdates"]


class ReplicaUpdates(Protocol):
    """The part of a step that follows from the gradients in the leaves, for all networks."""

    description: str

    def begin(self) -> None:
        """Fill the leaves for the step that the objectives are at."""

    def draw(self, k: int) -> WeightDraw | None:
        """The weights of network ``k``, or None where its leaves are moments."""

    def kernel(self, k: int) -> Kernel | None:
        """The kernel that draws noise for network ``k``, or None."""

    def forget_gradients(self) -> None:
        """Clear gradients before the backward pass."""

    def update(
        self,
        in_means: ParameterGradients,
        in_spreads: ParameterGradients,
        factors: Sequence[float],
        *,
        with_residual: bool,
    ) -> list[StdResidual | None]:
        """Update all parameters by gradients with a leading axis of size K.

        Returns ``ELBOTerms.std_residual`` of each network, where it is known.
        """


class KernelUpdates:
    """The updates by one kernel for each network."""

    def __init__(
        self, elbos: Sequence[ELBO], optimizers: Sequence[Optimizer], leaf: Tensor
    ) -> None:
        self._parts = list(zip(elbos, optimizers, leaf, strict=True))
        self._estimator = elbos[0].bnn.estimator
        self._each = [PosteriorUpdate(*parts, [(0, False)]) for parts in self._parts]
        self._prepared_for = [signature(*parts[:2]) for parts in self._parts]
        self.description = self._each[0].description

    def begin(self) -> None:
        """See ``ReplicaUpdates``; an update is prepared again where its network changed.

        Raises:
            ValueError: there is no kernel for a network any more.
        """
        for k, (elbo, optimizer, leaf) in enumerate(self._parts):
            if self._prepared_for[k] != signature(elbo, optimizer):
                reason = why_not_compiled(elbo, optimizer)
                if elbo.num_samples > 1:
                    reason = f"its step takes {elbo.num_samples} weight samples, not one"
                elif elbo.bnn.estimator != self._estimator:
                    reason = "its estimator is another one"
                if reason is not None:
                    raise ValueError(
                        f"network {k} was changed and cannot be trained by the compiled backend "
                        f'any more: {reason}; undo the change, or use backend="autograd"'
                    )
                self._each[k] = PosteriorUpdate(elbo, optimizer, leaf, [(0, False)])
                self._prepared_for[k] = signature(elbo, optimizer)
            self._each[k].begin()

    def draw(self, k: int) -> WeightDraw | None:
        """See ``ReplicaUpdates``."""
        return self._each[k].draw(0)

    def kernel(self, k: int) -> Kernel | None:
        """See ``ReplicaUpdates``."""
        return self._each[k].kernel_on_cpu

    def forget_gradients(self) -> None:
        """See ``ReplicaUpdates``."""
        for update in self._each:
            update.forget_gradients()

    def update(
        self,
        in_means: ParameterGradients,
        in_spreads: ParameterGradients,
        factors: Sequence[float],
        *,
        with_residual: bool,
    ) -> list[StdResidual | None]:
        """See ``ReplicaUpdates``."""
        return [
            update.update(
                [None if g is None else g[k] for g in in_means],
                [None if g is None else g[k] for g in in_spreads],
                factors[k],
                with_residual=with_residual,
            )
            for k, update in enumerate(self._each)
        ]


class AutogradUpdates:
    """The updates by autograd: any prior, any optimiser.

    The gradients of the nll end at the leaves; from there one backward pass carries them to the
    means and rhos of all networks, together with those of the KLs.
    """

    def __init__(
        self, elbos: Sequence[ELBO], optimizers: Sequence[Optimizer], leaf: Tensor
    ) -> None:
        self._elbos, self._optimizers, self._leaf = elbos, optimizers, leaf
        self._kind = leaf_kind(elbos[0].bnn.estimator)
        self._posteriors = [elbo.bnn.posterior for elbo in elbos]
        self.description = ""

    def begin(self) -> None:
        """See ``ReplicaUpdates``."""
        self._steps = [elbo.step for elbo in self._elbos]
        self._draws: list[WeightDraw | None] = [None] * len(self._elbos)
        if self._kind == "weights":
            keys = [
                NoiseKey(elbo.bnn.seed, Stream.TRAINING, step)
                for elbo, step in zip(self._elbos, self._steps, strict=True)
            ]
            pairs = zip(self._posteriors, keys, strict=True)
            drawn = [q.draw(q.noise(key, range(1))) for q, key in pairs]
            self._draws = [*drawn]
            self._sources = [torch.cat([draw.weights for draw in drawn])]
        else:
            stds = torch.stack([q.std for q in self._posteriors])
            means = torch.stack([q.masked_mean for q in self._posteriors])
            self._sources = [means, stds.square() if self._kind == "variances" else stds]
        self._leaf.copy_(self._sources[-1].detach())

    def draw(self, k: int) -> WeightDraw | None:
        """See ``ReplicaUpdates``."""
        return self._draws[k]

    def kernel(self, k: int) -> Kernel | None:  # noqa: ARG002
        """See ``ReplicaUpdates``."""
        return None

    def forget_gradients(self) -> None:
        """See ``ReplicaUpdates``."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def update(
        self,
        in_means: ParameterGradients,
        in_spreads: ParameterGradients,
        factors: Sequence[float],
        *,
        with_residual: bool,
    ) -> list[StdResidual | None]:
        """See ``ReplicaUpdates``."""
        roots = list(self._sources)
        gradients: list[Tensor | None] = [
            self._joined(parts) for parts in (in_means, in_spreads)[: len(roots)]
        ]
        for k, (elbo, factor) in enumerate(zip(self._elbos, factors, strict=True)):
            if factor > 0.0:
                kl, penalty = elbo.complexity(self._draws[k], self._steps[k], range(1))
                roots.append(factor * (kl + penalty))
                gradients.append(None)
        pairs = zip(roots, gradients, strict=True)
        trained = [(root, gradient) for root, gradient in pairs if root.requires_grad]
        if trained:
            torch.autograd.backward([root for root, _ in trained], [each for _, each in trained])
        found: list[StdResidual | None] = [None] * len(self._elbos)
        if with_residual:
            found = [
                std_residual(q) if isinstance(q, MeanFieldGaussian) else None
                for q in self._posteriors
            ]
        for elbo, optimizer in zip(self._elbos, self._optimizers, strict=True):
            with fused_as(elbo, False):
                optimizer.step()
        return found

    def _joined(self, parts: ParameterGradients) -> Tensor:
        """The gradients of all parameters, shape (K, D)."""
        count, sizes = len(self._elbos), self._elbos[0].bnn.layout.sizes
        return torch.cat(
            [
                self._leaf.new_zeros(count, size) if part is None else part.reshape(count, -1)
                for size, part in zip(sizes, parts, strict=True)
            ],
            dim=1,
        )
