"""Objective for rows that arrive in parts: the posterior after one part is the next prior."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.distributions.posteriors import MeanFieldGaussian, WeightDraw
from bayesify.distributions.softplus import log_softplus, softplus
from bayesify.module.bayesian import BayesianModule
from bayesify.training.elbo import ELBO

__all__ = ["StreamingELBO"]


class StreamingELBO(ELBO):
    """ELBO of new examples whose prior is the posterior at construction.

    The prior has the mean and the standard deviation that each weight has then; the prior of the
    network is not used (streaming variational Bayes, Broderick et al. 2013, eq. 2; variational
    continual learning, Nguyen et al. 2018, eq. 4). Each example belongs in one such objective only:
    in two it would count twice.

    Args:
        bnn: the network, with a ``MeanFieldGaussian`` posterior.
        num_data: number of new examples.

    Raises:
        TypeError: the posterior is not a ``MeanFieldGaussian``.

    Example:
        >>> from torch import nn
        >>> elbo = StreamingELBO(BayesianModule(nn.Linear(3, 2)), num_data=100)
        >>> elbo(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)).kl.item()
        0.0
    """

    mean_before: Tensor
    rho_before: Tensor

    def __init__(self, bnn: BayesianModule, *, num_data: int) -> None:
        super().__init__(bnn, num_data=num_data)
        posterior = bnn.posterior
        if not isinstance(posterior, MeanFieldGaussian):
            raise TypeError(
                f"StreamingELBO needs a MeanFieldGaussian posterior, got {type(posterior).__name__}"
            )
        self.register_buffer("mean_before", posterior.mean.detach().clone())
        self.register_buffer("rho_before", posterior.rho.detach().clone())

    def complexity(
        self,
        draw: WeightDraw | None,  # noqa: ARG002
        step: int | Tensor,  # noqa: ARG002
        samples: range,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Return the KL from the posterior at construction, in nats, summed; no penalty."""
        posterior = self.bnn.posterior
        assert isinstance(posterior, MeanFieldGaussian)
        before = softplus(self.rho_before)
        log_ratio = log_softplus(posterior.rho) - log_softplus(self.rho_before)
        shift = ((posterior.mean - self.mean_before) / before).square()
        per_weight = 0.5 * (shift + torch.expm1(2.0 * log_ratio)) - log_ratio
        if posterior.mask is not None:
            per_weight = torch.where(posterior.mask, per_weight, 0.0)
        return per_weight.sum(), per_weight.new_zeros(())
