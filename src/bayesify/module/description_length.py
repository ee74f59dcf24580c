"""Description length of a network: the KL divergence of its posterior, in nats and in bytes."""

from __future__ import annotations

import math

import torch

from bayesify.distributions.kl import kl_divergence
from bayesify.module.bayesian import BayesianModule
from bayesify.noise.keys import NoiseKey, Stream

__all__ = ["kl_bytes", "kl_nats"]


@torch.no_grad()
def kl_nats(bnn: BayesianModule) -> float:
    """Return KL(q || p) of all random weights in nats; pruned weights count nothing.

    Where it has no closed form, it is estimated from one draw of all weights, always the same.

    Example:
        >>> from torch import nn
        >>> from bayesify.distributions.priors import Gaussian
        >>> bnn = BayesianModule(nn.Linear(1, 1), prior=Gaussian(1.0), init_std=1.0)
        >>> _ = bnn.posterior.mean.data.fill_(2.0)
        >>> round(kl_nats(bnn), 4)
        4.0
    """
    key = NoiseKey(bnn.seed, Stream.PREDICTION, 1)
    draw = bnn.posterior.draw(bnn.posterior.noise(key, range(1)))
    return float(kl_divergence(bnn.posterior, bnn.weight_prior, draw, prior_mean=bnn.prior_mean))


def kl_bytes(bnn: BayesianModule) -> float:
    """Return KL(q || p) in bytes, KL in nats / (8 ln 2).

    Bits-back coding would send a sample of the weights in about this many (Hinton and van Camp
    1993); it is no bound on the size of other codes.

    Example:
        >>> from torch import nn
        >>> bnn = BayesianModule(nn.Linear(3, 2))
        >>> round(kl_nats(bnn) / kl_bytes(bnn), 4)
        5.5452
    """
    return kl_nats(bnn) / (8.0 * math.log(2.0))
