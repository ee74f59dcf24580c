"""The specification of a training step: the ELBO, its gradients by autograd, any optimiser."""

from __future__ import annotations

import math

from torch import Tensor
from torch.optim import Optimizer

from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.module.inputs import Inputs
from bayesify.training.backends.backend import Noise, require_finite
from bayesify.training.convergence import std_residual
from bayesify.training.elbo import ELBO, ELBOTerms

__all__ = ["AutogradBackend"]


class AutogradBackend:
    """Call the objective, ``loss.backward()`` and ``optimizer.step()``.

    Args:
        elbo: any objective.
        optimizer: any optimiser of its parameters.
        reason: why no faster backend was chosen, for the description.
        fused: whether the objective may use its kernel, whose noise is the counter-based
            generator's.

    Example:
        >>> import torch
        >>> from bayesify.module.bayesian import BayesianModule
        >>> elbo = ELBO(BayesianModule(torch.nn.Linear(3, 2)), num_data=10)
        >>> backend = AutogradBackend(elbo, torch.optim.SGD(elbo.parameters(), lr=0.1))
        >>> terms = backend.step(torch.zeros(5, 3), torch.zeros(5, dtype=torch.long), batch_index=0)
        >>> terms.nll.requires_grad, elbo.step
        (False, 1)
    """

    noise: Noise

    def __init__(
        self, elbo: ELBO, optimizer: Optimizer, reason: str = "", *, fused: bool = False
    ) -> None:
        self._elbo, self._optimizer, self._fused = elbo, optimizer, fused
        self.noise = "counter" if fused else "generator"
        name = "fused objective" if fused else "autograd"
        self.description = f"{name} ({reason})" if reason else name

    def step(
        self,
        inputs: Inputs,
        targets: Tensor,
        *,
        batch_index: int | None,
        kl_scale: float = 1.0,
        with_kl: bool = False,  # noqa: ARG002
        with_residual: bool = False,
    ) -> ELBOTerms:
        """Make one step; see ``Backend.step``. The value of the KL is always computed."""
        elbo = self._elbo
        fused, elbo.fused = elbo.fused, self._fused
        try:
            terms: ELBOTerms = elbo(inputs, targets, batch_index=batch_index, kl_scale=kl_scale)
        finally:
            elbo.fused = fused
        require_finite(elbo, terms)
        self._optimizer.zero_grad(set_to_none=True)
        terms.loss.backward()
        posterior, residual = elbo.bnn.posterior, None
        if with_residual and isinstance(posterior, MeanFieldGaussian):
            residual = std_residual(posterior)  # before the optimiser changes rho
        self._optimizer.step()
        loss, nll, kl, penalty = (value.detach() for value in terms[:4])
        factor = terms.kl_factor
        if math.isnan(factor):  # a compiled objective
            batch_size = terms.outputs.shape[1]
            factor = elbo.kl_factor(batch_size, batch_index=batch_index, kl_scale=kl_scale)
        return ELBOTerms(loss, nll, kl, penalty, terms.outputs, factor, residual)
