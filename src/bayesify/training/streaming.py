"""Objective for examples that arrive in parts: the posterior after a part is the next prior."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.distributions.posteriors import MeanFieldGaussian, WeightDraw
from bayesify.module.bayesian import BayesianModule
from bayesify.training.elbo import ELBO

__all__ = ["StreamingELBO"]


class StreamingELBO(ELBO):
    """ELBO of new examples whose prior is the posterior at construction.

    With q_t, the posterior after the parts 1 to t, and N_t new examples (streaming variational
    Bayes, Broderick et al. 2013, eq. 2; continual learning, Nguyen et al. 2018, eq. 4)::

        loss = mean over the batch of -log p(y | x, w) + KL(q || q_{t-1}) / N_t

    Train the first part by the :class:`ELBO`, and each later part by a new objective of this class.
    The prior of the network is not used again: it is within the first posterior. Each example
    belongs in one part only; in two it would count twice. A pruned weight stays pruned and leaves
    the KL. The mean field loses the correlations of the weights at each part, so that the result
    equals that of all examples at once only where the exact posterior has none.

    Args:
        bnn: the network, with a ``MeanFieldGaussian`` posterior.
        num_data: N_t, the number of new examples.
        num_samples: S, weight samples per step.

    Raises:
        TypeError: the posterior is not a ``MeanFieldGaussian``.
        ValueError: ``num_data`` or ``num_samples`` is below 1.

    Example:
        >>> from torch import nn
        >>> elbo = StreamingELBO(BayesianModule(nn.Linear(3, 2)), num_data=100)
        >>> elbo(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)).kl.item()
        0.0
    """

    mean_before: Tensor
    std_before: Tensor
    log_std_before: Tensor

    def __init__(self, bnn: BayesianModule, *, num_data: int, num_samples: int = 1) -> None:
        super().__init__(bnn, num_data=num_data, num_samples=num_samples)
        posterior = bnn.posterior
        if not isinstance(posterior, MeanFieldGaussian):
            raise TypeError(
                "StreamingELBO needs a MeanFieldGaussian posterior, got "
                f"{type(posterior).__name__}; create the network with posterior=MeanFieldGaussian, "
                'or the estimator of partial_fit with posterior="mean-field"'
            )
        self.register_buffer("mean_before", posterior.mean.detach().clone())
        self.register_buffer("std_before", posterior.full_std.detach().clone())
        self.register_buffer("log_std_before", posterior.log_std.detach().clone())

    def complexity(
        self,
        draw: WeightDraw | None,  # noqa: ARG002
        step: int | Tensor,  # noqa: ARG002
        samples: range,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Return the KL from the posterior at construction, in nats, summed; no penalty."""
        posterior = self.bnn.posterior
        assert isinstance(posterior, MeanFieldGaussian)
        log_ratio = posterior.log_std - self.log_std_before
        shift = ((posterior.mean - self.mean_before) / self.std_before).square()
        per_weight = 0.5 * (shift + torch.expm1(2.0 * log_ratio)) - log_ratio
        if posterior.mask is not None:
            per_weight = torch.where(posterior.mask, per_weight, 0.0)
        # A sum over all weights overflows half precision.
        kl = per_weight.sum(dtype=torch.promote_types(per_weight.dtype, torch.float32))
        return kl, kl.new_zeros(())
