"""Objective for examples that arrive in parts: the posterior after a part is the next prior."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

import torch
from torch import Tensor

from bayesify.distributions.layout import abbreviate
from bayesify.distributions.posteriors import MeanFieldGaussian, WeightDraw
from bayesify.distributions.priors import BlockPrior, Gaussian
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

    Parameters that no example has trained yet, such as the head of a new task of ``MultiHead``, are
    named by ``new``: their prior is the network's. A head that the examples do not use stays as it
    is, because its KL is 0 and has no gradient.

    Args:
        bnn: the network, with a ``MeanFieldGaussian`` posterior.
        num_data: N_t, the number of new examples.
        num_samples: S, weight samples per step.
        new: name patterns of the parameters that still have their initial values. For the first
            part these are all parameters that its examples use.

    Raises:
        TypeError: the posterior is not a ``MeanFieldGaussian``, the prior of a new parameter is not
            ``Gaussian``, or ``new`` is not a sequence of patterns.
        ValueError: ``num_data`` or ``num_samples`` is below 1, or a pattern matches no random
            parameter.

    Example:
        >>> from torch import nn
        >>> elbo = StreamingELBO(BayesianModule(nn.Linear(3, 2)), num_data=100)
        >>> elbo(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)).kl.item()
        0.0
    """

    mean_before: Tensor
    std_before: Tensor
    log_std_before: Tensor

    def __init__(
        self,
        bnn: BayesianModule,
        *,
        num_data: int,
        num_samples: int = 1,
        new: Sequence[str] = (),
    ) -> None:
        super().__init__(bnn, num_data=num_data, num_samples=num_samples)
        posterior = bnn.posterior
        if not isinstance(posterior, MeanFieldGaussian):
            raise TypeError(
                "StreamingELBO needs a MeanFieldGaussian posterior, got "
                f"{type(posterior).__name__}; create the network with posterior=MeanFieldGaussian, "
                'or the estimator of partial_fit with posterior="mean-field"'
            )
        mean, std = posterior.mean.detach().clone(), posterior.full_std.detach().clone()
        log_std = posterior.log_std.detach().clone()
        for place in _places_of(bnn, new):
            prior_std = _prior_std(bnn, place)
            mean[place] = 0.0 if bnn.prior_mean is None else bnn.prior_mean[place]
            std[place], log_std[place] = prior_std, math.log(prior_std)
        self.register_buffer("mean_before", mean)
        self.register_buffer("std_before", std)
        self.register_buffer("log_std_before", log_std)

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


def _places_of(bnn: BayesianModule, new: Sequence[str]) -> list[slice]:
    """Return the places in the flat vector of the parameters with these names."""
    if isinstance(new, str) or not all(isinstance(pattern, str) for pattern in new):
        raise TypeError(
            f'new must be a sequence of name patterns such as ("heads.1.*",), got {new!r}'
        )
    layout = bnn.layout
    found: set[str] = set()
    for pattern in new:
        matched = [names[0] for names in layout.ties if any(fnmatchcase(n, pattern) for n in names)]
        if not matched:
            raise ValueError(
                f"every pattern of new must match a random parameter, but {pattern!r} matches none "
                f"of {abbreviate(layout.names)}; correct or remove it"
            )
        found.update(matched)
    return [layout.slice_of(name) for name in layout.names if name in found]


def _prior_std(bnn: BayesianModule, place: slice) -> float:
    """Return the std of the prior of one parameter."""
    prior = bnn.weight_prior
    if type(prior) is BlockPrior:
        stops = accumulate(prior.sizes)
        owners = zip(prior.owners, stops, strict=True)
        prior = next(prior.priors[owner] for owner, stop in owners if place.start < stop)
    if type(prior) is not Gaussian:
        raise TypeError(
            f"new parameters need a Gaussian prior, got {type(prior).__name__}; create the network "
            "with prior=Gaussian(std)"
        )
    return prior.std
