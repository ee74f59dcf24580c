"""The KL of a network in nats and in bytes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import bayesify as bf
from bayesify.module.description_length import kl_bytes, kl_nats


def network() -> bf.BayesianModule:
    bnn = bf.BayesianModule(nn.Linear(20, 10), prior=bf.Gaussian(0.5), init_std=0.1)
    with torch.no_grad():
        bnn.posterior.mean.normal_(generator=torch.Generator().manual_seed(0))
    return bnn


def gaussian_kl(mean: torch.Tensor) -> float:
    """KL of N(mean, 0.1^2) and N(0, 0.5^2), summed."""
    each = math.log(5.0) + (0.01 + mean.double().square()) / 0.5 - 0.5
    return float(each.sum())


def check_kl(bnn: bf.BayesianModule, mean: torch.Tensor) -> None:
    assert kl_nats(bnn) == pytest.approx(gaussian_kl(mean), rel=1e-5)
    assert kl_bytes(bnn) == pytest.approx(gaussian_kl(mean) / math.log(2) / 8, rel=1e-5)


def test_the_kl_is_that_of_the_weights_that_are_left() -> None:
    bnn = network()
    check_kl(bnn, bnn.posterior.mean.detach())
    small = bf.prune(bnn, 0.7)
    check_kl(small, small.posterior.mean.detach()[small.posterior.mask])
    with pytest.raises(AssertionError):
        check_kl(small, small.posterior.mean.detach())


def test_an_estimate_by_monte_carlo_is_always_the_same() -> None:
    bnn = bf.BayesianModule(nn.Linear(20, 10), prior=bf.ScaleMixture(pi=0.5, std1=1.0, std2=0.1))
    assert kl_nats(bnn) == kl_nats(bnn)
    assert kl_nats(bnn) > 0
