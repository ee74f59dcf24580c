"""Data that come in pieces: the posterior after one is the prior of the next."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.elbo import ELBO
from bayesify.module import BayesianModule
from bayesify.posteriors import MeanFieldGaussian, WeightDraw
from bayesify.softplus import log_softplus, softplus

__all__ = ["StreamingELBO"]


class StreamingELBO(ELBO):
    """The objective of new data under all that the network has learned so far.

    The prior is the posterior at construction, about each weight's own mean and with its own
    standard deviation, whatever the network's prior (streaming variational Bayes, Broderick et
    al. 2013, eq. 2; variational continual learning, Nguyen et al. 2018, eq. 4). Every datum is to
    be shown in one such objective only: in two it would count twice.

    Args:
        bnn: the network, with a ``MeanFieldGaussian`` posterior.
        num_data: number of the new data.

    Raises:
        TypeError: the posterior is another.

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
        """KL from the posterior as it was, in nats, summed over the weights; no penalty."""
        posterior = self.bnn.posterior
        assert isinstance(posterior, MeanFieldGaussian)
        before = softplus(self.rho_before)
        log_ratio = log_softplus(posterior.rho) - log_softplus(self.rho_before)
        moved = ((posterior.mean - self.mean_before) / before).square()
        per_weight = 0.5 * (moved + torch.expm1(2.0 * log_ratio)) - log_ratio
        if posterior.kept is not None:
            per_weight = torch.where(posterior.kept, per_weight, 0.0)
        return per_weight.sum(), per_weight.new_zeros(())
