"""Float32 at the ends of its range: finite values and gradients, and the right ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from tests.cases import PRIORS, Case, each_prior, mlp, normals
from tests.loops import loop_over
from torch import Tensor

from bayesify import (
    ELBO,
    Gaussian,
    Laplace,
    MeanFieldGaussian,
    Prior,
    ScaleMixture,
    kl_divergence,
    prune,
    snr,
)
from bayesify.distributions.kl import has_closed_form
from bayesify.distributions.softplus import inverse_softplus, log_softplus
from bayesify.module.pruning import snr_decibels

RHOS = (-1000.0, -120.0, -104.0, -103.0, -100.0, -90.0, -16.0, -15.9, 0.0, 20.0, 41.0, 100.0, 1e4)
LIMITS = (-100.0, 100.0)


def at_rho(rho: float, size: int = 44) -> MeanFieldGaussian:
    q = MeanFieldGaussian(normals(size, dtype=torch.float32), std=1.0)
    with torch.no_grad():
        q.rho.fill_(rho)
    return q


def softplus(rho: float) -> float:
    return max(rho, 0.0) + math.log1p(math.exp(-abs(rho)))


def check_finite(value: Tensor, *parameters: Tensor) -> None:
    """The value and its gradients are finite."""
    assert bool(value.isfinite().all()), f"value {value}"
    for parameter, gradient in zip(
        parameters, torch.autograd.grad(value.sum(), parameters, allow_unused=True), strict=True
    ):
        assert gradient is None or bool(gradient.isfinite().all()), f"gradient of {parameter}"


@loop_over("rho", RHOS)
def test_std_and_draws_are_finite_and_right(rho: float) -> None:
    q = at_rho(rho)
    exact = softplus(rho)
    assert q.std[0].item() == pytest.approx(exact, rel=1e-5, abs=3e-45)  # subnormal
    log_exact = rho if rho < -30.0 else math.log(exact)
    assert q.log_std[0].item() == pytest.approx(log_exact, rel=1e-5, abs=1e-6)
    check_finite(q.std, q.rho)
    check_finite(q.log_std, q.rho)
    noise = normals(3, 44, seed=1, dtype=torch.float32)
    draw = q.draw(noise)
    check_finite(draw.weights, q.mean, q.rho)
    check_finite(q.log_prob_of(draw), q.rho)
    expected = q.mean.double() + exact * noise.double()
    assert torch.allclose(draw.weights.double(), expected, rtol=1e-5, atol=1e-6 * (1.0 + exact))


@loop_over("rho", RHOS)
def test_slope_of_log_std_is_right(rho: float) -> None:
    q = at_rho(rho, size=1)
    (slope,) = torch.autograd.grad(q.log_std, q.rho)
    with localcontext(prec=80):
        power = Decimal(max(min(rho, 150.0), -120.0)).exp()
        exact = power / (1 + power) / (1 + power).ln()
    assert slope.item() == pytest.approx(1.0 / rho if rho > 150.0 else float(exact), rel=1e-5)


@loop_over("rho", RHOS)
@each_prior
def test_each_kl_is_finite(prior: Prior, rho: float) -> None:
    q = at_rho(rho)
    draw = q.draw(normals(2, 44, seed=2, dtype=torch.float32))
    check_finite(kl_divergence(q, prior, draw, method="monte-carlo"), q.mean, q.rho)
    if has_closed_form(q, prior):
        kl = kl_divergence(q, prior, method="closed")
        check_finite(kl, q.mean, q.rho)
        double = MeanFieldGaussian(q.mean.detach().double(), 1.0)
        with torch.no_grad():
            double.rho.fill_(rho)
        exact = kl_divergence(double, prior, method="closed")
        assert kl.item() == pytest.approx(exact.item(), rel=1e-5)
        kl_divergence(q, prior, method="closed").backward()
        exact.backward()
        for got, slope in ((q.mean.grad, double.mean.grad), (q.rho.grad, double.rho.grad)):
            assert torch.allclose(got.double(), slope, rtol=1e-5, atol=1e-6)


@loop_over("mean", [0.0, 1e-30, -1e-3])
@loop_over("prior", [Gaussian(), Laplace()])
def test_kl_of_a_vanishing_std_has_the_limits_gradient(prior: Prior, mean: float) -> None:
    q = MeanFieldGaussian(torch.tensor([mean]), std=1.0)
    with torch.no_grad():
        q.rho.fill_(-100.0)
    kl_divergence(q, prior, method="closed").backward()
    sign = math.copysign(1.0, mean) if mean else 0.0
    slope = mean if isinstance(prior, Gaussian) else sign
    assert q.mean.grad.item() == pytest.approx(slope, rel=1e-5)
    assert q.rho.grad.item() == pytest.approx(-1.0, rel=1e-5)  # of -log std


@loop_over("rho", LIMITS)
@loop_over("likelihood", ["categorical", "gaussian"])
@loop_over("prior", PRIORS)
def test_the_elbo_is_finite(prior: str, likelihood: str, rho: float) -> None:
    case = Case(prior, "mean-field", likelihood)
    bnn = case.bnn(mlp(torch.float32))
    with torch.no_grad():
        bnn.posterior.rho.fill_(rho)
    for kl in ("auto", "monte-carlo"):
        terms = ELBO(bnn, num_data=10, kl=kl, num_samples=2)(*case.data(10, torch.float32))
        check_finite(terms.loss, *bnn.parameters())
        assert terms.kl.item() > 0.0


@loop_over("rho", RHOS)
def test_snr_is_finite_and_keeps_its_order(rho: float) -> None:
    bnn = Case("gaussian", "mean-field", "categorical").bnn(mlp(torch.float32))
    with torch.no_grad():
        bnn.posterior.rho.fill_(rho)
        bnn.posterior.mean[3] = 0.0
    ratio = snr(bnn)
    assert bool(ratio.isfinite().all())
    assert ratio[3].item() == 0.0
    exact = bnn.posterior.mean.detach().abs().double().log() - (
        rho if rho < -30.0 else math.log(softplus(rho))
    )
    decibels = snr_decibels(bnn)
    assert decibels[3].item() == -math.inf
    others = torch.arange(44) != 3
    expected = exact[others] * 20.0 / math.log(10.0)
    assert torch.allclose(decibels[others].double(), expected, rtol=1e-5, atol=1e-4)
    # Also where the ratio itself is too large for float32, the smallest go first.
    kept = prune(bnn, 0.5).posterior.mask
    assert exact[kept].min() > exact[~kept].max()


@loop_over("rho", [-700.0, -36.1, -36.0, -20.0, 0.0, 15.5, 25.0, 39.0, 41.0, 700.0])
def test_std_is_right_to_the_last_digits_of_float64(rho: float) -> None:
    q = MeanFieldGaussian(torch.zeros(1, dtype=torch.float64), std=1.0)
    with torch.no_grad():
        q.rho.fill_(rho)
    assert q.std.item() == pytest.approx(softplus(rho), rel=1e-14)
    assert q.log_std.item() == pytest.approx(math.log(softplus(rho)), rel=1e-13)


def test_inverse_softplus_returns_every_std() -> None:
    for dtype, exponents in ((torch.float32, (-37, 37)), (torch.float64, (-300, 300))):
        std = torch.logspace(*exponents, 75, dtype=torch.float64)
        rho = inverse_softplus(std.to(dtype))
        assert bool(rho.isfinite().all())
        back = log_softplus(rho).double()
        tolerance = 40 * torch.finfo(dtype).eps * std.log().abs().clamp_min(1.0)
        assert bool(((back - std.log()).abs() < tolerance).all())


COMPONENTS: dict[str, tuple[ScaleMixture, list[tuple[float, float]]]] = {
    "paper": (ScaleMixture(0.75, 1.0, math.exp(-8.0)), []),
    "wide": (ScaleMixture(0.25, math.exp(0.0), math.exp(-6.0)), []),
    "near": (ScaleMixture(0.5, 1.0, 0.5), []),
}


def exact_mixture(prior: ScaleMixture, weight: float) -> tuple[float, float]:
    """log p(w) and its derivative in 60 digits."""
    with localcontext(prec=60):
        w, pi = Decimal(weight), Decimal("3.14159265358979323846264338327950288419716939937510582")
        parts = [
            (Decimal(share) / (Decimal(std) * (2 * pi).sqrt()), Decimal(std))
            for share, std in ((prior.pi, prior.std1), (1.0 - prior.pi, prior.std2))
        ]
        densities = [height * (-((w / std) ** 2) / 2).exp() for height, std in parts]
        slope = sum(-d * w / std**2 for d, (_, std) in zip(densities, parts, strict=True))
        return float(sum(densities).ln()), float(slope / sum(densities))


def exact_gaussian(prior: Gaussian, weight: float) -> tuple[float, float]:
    z = weight / prior.std
    return -0.5 * z * z - math.log(prior.std * math.sqrt(2.0 * math.pi)), -z / prior.std


def exact_laplace(prior: Laplace, weight: float) -> tuple[float, float]:
    slope = -float(np.sign(weight)) / prior.scale
    return -abs(weight) / prior.scale - math.log(2.0 * prior.scale), slope


Exact = Callable[..., tuple[float, float]]
TAILS: list[tuple[Prior, Exact, float]] = [
    *((prior, exact_mixture, prior.std1) for prior, _ in COMPONENTS.values()),
    *((prior, exact_mixture, prior.std2) for prior, _ in COMPONENTS.values()),
    *((Gaussian(std), exact_gaussian, std) for std in (1e-4, 1.0, 1e3)),
    *((Laplace(scale), exact_laplace, scale) for scale in (1e-4, 1.0, 1e3)),
]


def check_tails(prior: Prior, exact: Exact, sigma: float, dtype: torch.dtype) -> None:
    """log p and its gradient from 0 to 50 sigma on both sides."""
    tolerance = 20 * torch.finfo(dtype).eps
    for multiple in (0.0, 0.5, 1.0, 4.0, 12.0, 50.0, -50.0):
        weight = torch.tensor(multiple * sigma, dtype=dtype, requires_grad=True)
        value = prior.log_prob(weight)
        (slope,) = torch.autograd.grad(value, weight)
        assert value.isfinite()
        assert slope.isfinite()
        exact_value, exact_slope = exact(prior, weight.item())
        # The logarithm of a sum is as accurate as its largest terms.
        assert value.item() == pytest.approx(exact_value, rel=tolerance, abs=10 * tolerance)
        assert slope.item() == pytest.approx(exact_slope, rel=100 * tolerance, abs=1e-30), multiple


@loop_over("dtype", [torch.float32, torch.float64])
def test_prior_tails_are_right(dtype: torch.dtype) -> None:
    for prior, exact, sigma in TAILS:
        check_tails(prior, exact, sigma, dtype)


def test_a_mixture_outside_the_log_domain_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: ScaleMixture, weights: Tensor) -> Tensor:
        parts = ((self.pi, self.std1), (1.0 - self.pi, self.std2))
        return sum(share * Gaussian(std).log_prob(weights).exp() for share, std in parts).log()

    monkeypatch.setattr(ScaleMixture, "log_prob", wrong)
    with pytest.raises(AssertionError):
        check_tails(ScaleMixture(), exact_mixture, 1.0, torch.float32)


@loop_over("naive", [lambda q: q.std.log(), lambda q: torch.log(torch.log(1.0 + torch.exp(q.rho)))])
def test_a_naive_log_std_is_caught(naive: Callable[[MeanFieldGaussian], Tensor]) -> None:
    failed = []
    for rho in RHOS:
        q = at_rho(rho)
        try:
            check_finite(naive(q), q.rho)
        except AssertionError:
            failed.append(rho)
    assert min(failed) == -1000.0
    assert 0.0 not in failed
