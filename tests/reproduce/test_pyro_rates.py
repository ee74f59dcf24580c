"""The posterior of ``pyro-local``: its stds, bounds, KL, gradients and moments, each by its law."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.distributions import kl_divergence as torch_kl

from bayesify import BayesianModule, Gaussian, LocalReparameterization, kl_divergence
from bayesify.distributions.by_group import ByGroup, EmpiricalGaussian
from bayesify.distributions.kl import has_closed_form
from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.distributions.priors import Laplace, Prior
from bayesify.reproduce.papers.pyro_local.rated_gaussian import RatedGaussian, layer_sizes
from bayesify.training.convergence import std_residual

#: Family-wise, of all statistical statements in this file.
ERROR_RATE = 1e-3
SIZES, RATES = (6, 8, 3), (0.25, 0.6, None)
PRIOR_STDS = (0.25, 1.0, 1.0)


def posterior(seed: int = 0, dtype: torch.dtype = torch.float64) -> RatedGaussian:
    """Of 17 weights in three layers, with scales that differ."""
    generator = torch.Generator().manual_seed(seed)
    mean = 0.5 * torch.randn(sum(SIZES), generator=generator, dtype=dtype)
    q = RatedGaussian(mean, 0.1, SIZES, RATES)
    with torch.no_grad():
        q.rho.add_(torch.randn(sum(SIZES), generator=generator, dtype=dtype))
    return q


def prior_of(q: RatedGaussian) -> Prior:
    """That of the experiment, for a network whose layers have these sizes."""
    net = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(3, 2), nn.Linear(2, 1))
    made = BayesianModule(
        net, prior=ByGroup([(f"{i}.*", Gaussian(std)) for i, std in enumerate(PRIOR_STDS)])
    )
    assert layer_sizes(made.layout) == q.sizes
    return made.weight_prior


def test_a_std_is_rate_times_scale() -> None:
    q = posterior()
    scale = 0.01 + q.rho.detach().exp()
    factors = torch.cat([torch.full((n,), r or 1.0) for n, r in zip(SIZES, RATES, strict=True)])
    torch.testing.assert_close(q.std.detach(), factors.double() * scale)
    torch.testing.assert_close(q.log_std.detach(), (factors.double() * scale).log())
    start = RatedGaussian(torch.zeros(17), 0.1, SIZES, RATES)
    torch.testing.assert_close(start.std[:6].detach(), torch.full((6,), 0.025))
    assert start.rates.detach().tolist() == pytest.approx([0.25, 0.6, 1.0])


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_bounds_hold_after_any_steps(sign: float) -> None:
    q = posterior(dtype=torch.float32)
    optimizer = torch.optim.SGD(q.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    for _ in range(400):
        optimizer.zero_grad()
        (sign * q.log_std.sum()).backward()
        optimizer.step()
    rates = q.rates.detach()
    assert bool(((rates[:2] >= 0.1) & (rates[:2] <= 1.0)).all())
    assert float(rates[2]) == 1.0
    assert bool((q.full_std >= 0.1 * 0.01 * (1 - 1e-6)).all())


def test_log_std_and_its_slope_hold_far_out() -> None:
    q = posterior(dtype=torch.float32)
    with torch.no_grad():
        q.rho.copy_(torch.linspace(-100.0, 100.0, sum(SIZES)))
    (slope,) = torch.autograd.grad(q.log_std.sum(), q.rho)
    assert bool(q.log_std.isfinite().all())
    given = q.log_std_slope.detach()
    torch.testing.assert_close(given, slope)
    assert float(given[0]) < 1e-35
    assert float(given[-1]) == 1.0


def test_the_kl_is_that_of_torch() -> None:
    q = posterior()
    p = prior_of(q)
    assert has_closed_form(q, p)
    widths = torch.cat([torch.full((n,), s) for n, s in zip(SIZES, PRIOR_STDS, strict=True)])
    ours = kl_divergence(q, p, method="closed")
    theirs = torch_kl(Normal(q.mean, q.std), Normal(0.0, widths.double())).sum()
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad(kl, [*q.parameters()]) for kl in (ours, theirs)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    centre = torch.linspace(-1.0, 1.0, 17, dtype=torch.float64)
    moved = torch_kl(Normal(q.mean, q.std), Normal(centre, 0.7)).sum()
    about = kl_divergence(q, Gaussian(0.7), method="closed", prior_mean=centre)
    torch.testing.assert_close(about, moved, rtol=1e-10, atol=1e-10)
    q.mask = torch.arange(17) % 2 == 0
    each = torch_kl(Normal(q.mean, q.full_std), Normal(0.0, widths.double()))
    torch.testing.assert_close(kl_divergence(q, p), each[q.mask].sum(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("p", [Laplace(0.5), EmpiricalGaussian(2), EmpiricalGaussian(99)])
def test_other_priors_read_the_std_too(p: Prior) -> None:
    """As of the ordinary posterior with the same moments."""
    q = posterior()
    same = MeanFieldGaussian(q.mean.detach(), q.std.detach())
    p = p.for_parameter((17,)) if isinstance(p, EmpiricalGaussian) else p
    torch.testing.assert_close(kl_divergence(q, p, method="closed"), kl_divergence(same, p))
    small = EmpiricalGaussian(99, per_parameter=False)
    torch.testing.assert_close(kl_divergence(q, small), kl_divergence(same, small))


def test_a_subclass_that_says_nothing_has_no_closed_form() -> None:
    class Other(MeanFieldGaussian):
        @property
        def full_std(self) -> Tensor:
            return self.rho.exp()

    assert not has_closed_form(Other(torch.zeros(2), 0.1), Gaussian(1.0))


def test_gradients_are_those_of_finite_differences() -> None:
    q, p = posterior(), prior_of(posterior())
    values = [q.mean, q.rho, q.rate_logits]
    noise = torch.randn(2, 17, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def of(what: str, *given: Tensor) -> Tensor:
        made = posterior()
        for name, value in zip(("mean", "rho", "rate_logits"), given, strict=True):
            del made._parameters[name]
            setattr(made, name, value)
        if what == "kl":
            return kl_divergence(made, p, method="closed")
        if what == "std":
            return made.std
        return made.draw(noise).weights if what == "draw" else made.log_prob_of(made.draw(noise))

    inputs = [value.detach().clone().requires_grad_() for value in values]
    for what in ("std", "draw", "log_prob", "kl"):
        assert torch.autograd.gradcheck(lambda *given, w=what: of(w, *given), inputs)
    slope = torch.autograd.grad(q.log_std.sum(), q.rho)[0]
    torch.testing.assert_close(slope, q.log_std_slope)
    (-q.log_std.sum()).backward()
    residual = std_residual(q)
    assert residual is not None
    assert residual.mean == pytest.approx(-1.0)


def moments_hold(broken: bool = False) -> bool:
    """Whether the outputs of one layer have the mean and variance that the stds give them."""
    net = nn.Linear(4, 3)
    bnn = BayesianModule(net.double(), estimator=LocalReparameterization(), seed=3)
    q = RatedGaussian(bnn.posterior.mean.detach(), 0.5, layer_sizes(bnn.layout), (0.3,))
    bnn.posterior = q
    x = torch.tensor([[1.0, -2.0, 0.5, 3.0]], dtype=torch.float64)
    count = 40_000
    with torch.no_grad():
        outputs = bnn(x.expand(count, 4))
        rate = 1.0 if broken else 0.3
        variance = (rate * 0.5) ** 2 * (float(x.square().sum()) + 1.0)
        mean = q.mean[:12].view(3, 4) @ x[0] + q.mean[12:]
        z_mean = (outputs.mean(0) - mean) / math.sqrt(variance / count)
        z_square = ((outputs - mean).square().mean(0) / variance - 1.0) / math.sqrt(2.0 / count)
    # Six statements; the squares' mean is near enough to normal at this count.
    limit = NormalDist().inv_cdf(1.0 - ERROR_RATE / 6 / 2)
    return bool((torch.cat([z_mean, z_square]).abs() < limit).all())


def test_local_reparametrisation_has_the_right_moments() -> None:
    assert moments_hold()
    assert not moments_hold(broken=True)  # a rate that is left out is caught


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scale": 0.01}, "scale must be finite and above 0.01, got 0.01"),
        ({"scale": math.nan}, "scale must be finite"),
        ({"sizes": (6, 8)}, "sizes must be those of 3 layers"),
        ({"sizes": (6, 8, 4)}, "with 17 weights in all"),
        ({"rates": (0.25, 1.0, None)}, "rates must be between 0.1 and 1.0"),
    ],
)
def test_bad_settings_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RatedGaussian(torch.zeros(17), **{"scale": 0.1, "sizes": SIZES, "rates": RATES, **given})
