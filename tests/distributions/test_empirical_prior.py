"""Empirical Bayes: the prior's width at which the evidence lower bound is largest."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import optimize
from tests.cases import Case, mlp, normals
from tests.loops import loop_over
from tests.training.test_statistics import check_mean
from torch import Tensor

from bayesify import (
    ELBO,
    BayesianModule,
    ByGroup,
    Delta,
    EmpiricalGaussian,
    Gaussian,
    MeanFieldGaussian,
    kl_divergence,
)
from bayesify.distributions import by_group as groups
from bayesify.distributions import closed_forms
from bayesify.distributions.softplus import inverse_softplus

GROUP = EmpiricalGaussian(min_size=2, per_parameter=False)
KEPT = torch.tensor([True, True, False, True, False, True])


def posterior(kept: Tensor | None = None, dtype: torch.dtype = torch.float64) -> MeanFieldGaussian:
    stds = torch.tensor([0.2, 1.5, 0.4, 0.03, 2.0, 0.7], dtype=dtype)
    q = MeanFieldGaussian(1.3 * normals(6, seed=4).to(dtype), stds)
    q.mask = kept
    return q


def std_by_numpy(q: MeanFieldGaussian) -> float:
    left = np.ones(q.num_weights, bool) if q.mask is None else q.mask.numpy()
    mean, std = (t.detach().double().numpy()[left] for t in (q.mean, q.full_std))
    return float(np.sqrt(np.mean(mean**2 + std**2)))


@loop_over("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@loop_over("kept", [None, KEPT])
def test_the_std_is_the_root_of_the_mean_square(dtype: torch.dtype, kept: Tensor | None) -> None:
    q = posterior(kept, dtype)
    got = GROUP.std_of(q.mean, q.full_std, kept)
    assert got.shape == ()
    assert got.dtype is torch.promote_types(dtype, torch.float32)
    assert got.item() == pytest.approx(std_by_numpy(q), rel=1e-12 if dtype.itemsize == 8 else 1e-6)


@loop_over("dtype", [torch.float16, torch.bfloat16])
def test_squares_do_not_leave_half_precision(dtype: torch.dtype) -> None:
    for size in (3e-5, 3e4):
        mean = torch.full((200,), size, dtype=dtype)
        expected = size * math.sqrt(2.0)
        assert GROUP.std_of(mean, mean).item() == pytest.approx(expected, rel=1e-2)


def test_a_small_group_has_the_std_that_was_given() -> None:
    prior = EmpiricalGaussian(min_size=7, small_std=0.4, per_parameter=False)
    q = posterior()
    assert prior.std_of(q.mean, q.std).item() == pytest.approx(0.4)
    for method in ("closed", "monte-carlo"):
        draw = q.draw(normals(2, 6))
        got = kl_divergence(q, prior, draw, method=method).item()
        expected = kl_divergence(q, Gaussian(0.4), draw, method=method).item()
        assert got == pytest.approx(expected, rel=1e-13)


def test_by_default_a_group_below_100_weights_is_small() -> None:
    default = EmpiricalGaussian()
    assert default.for_parameter((99,)) == Gaussian(1.0)
    assert default.for_parameter((10, 10)) == EmpiricalGaussian(per_parameter=False)


def profiled(q: MeanFieldGaussian, prior_mean: Tensor | None = None) -> tuple[float, float]:
    """The least KL over the std of a Gaussian prior, and that std, by numerical minimisation."""

    def kl(log_std: float) -> float:
        return kl_divergence(q, Gaussian(math.exp(log_std)), prior_mean=prior_mean).item()

    found = optimize.minimize_scalar(kl, bounds=(-6.0, 4.0), options={"xatol": 1e-12})
    return found.fun, math.exp(found.x)


def check_profile(kept: Tensor | None, prior_mean: Tensor | None) -> None:
    q = posterior(kept)
    least, std = profiled(q, prior_mean)
    got = kl_divergence(q, GROUP, prior_mean=prior_mean).item()
    assert got == pytest.approx(least, rel=1e-12)
    mean = q.mean if prior_mean is None else q.mean - prior_mean
    assert GROUP.std_of(mean, q.full_std, kept).item() == pytest.approx(std, rel=1e-5)
    # The gradient, by central differences of numerical minima.
    kl_divergence(q, GROUP, prior_mean=prior_mean).backward()
    for parameter in (q.mean, q.rho):
        for i in range(6):
            moved = []
            for step in (1e-4, -1e-4):
                with torch.no_grad():
                    parameter[i] += step
                    moved.append(profiled(q, prior_mean)[0])
                    parameter[i] -= step
            slope = (moved[0] - moved[1]) / 2e-4
            assert parameter.grad[i].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)


@loop_over("kept", [None, KEPT])
@loop_over("prior_mean", [None, normals(6, seed=9)])
def test_the_kl_is_the_least_over_the_priors_width(
    kept: Tensor | None, prior_mean: Tensor | None
) -> None:
    check_profile(kept, prior_mean)


Variances = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def mean_only(right: Variances) -> Variances:
    return lambda mean, std, kept: right(mean, 0.0 * std, kept)


def sum_for_mean(right: Variances) -> Variances:
    return lambda mean, std, kept: tuple(6.0 * t for t in right(mean, std, kept))


def average_cut(right: Variances) -> Variances:
    def wrong(mean: Tensor, std: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        average, variance = right(mean, std, kept)
        return average.detach(), variance

    return wrong


def pruned_count(right: Variances) -> Variances:
    return lambda mean, std, _: right(mean, std, None)


@loop_over("fault", [mean_only, sum_for_mean, average_cut, pruned_count])
def test_a_planted_fault_leaves_the_least_kl(
    fault: Callable[[Variances], Variances], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = fault(groups.empirical_variance)
    for module in (groups, closed_forms):
        monkeypatch.setattr(module, "empirical_variance", wrong)
    with pytest.raises(AssertionError):
        check_profile(KEPT, None)


def test_first_and_second_derivatives_are_those_of_the_least_kl() -> None:
    def value(mean: Tensor, rho: Tensor) -> Tensor:
        q = posterior(KEPT)
        del q.mean, q.rho
        q.mean, q.rho = mean, rho
        return kl_divergence(q, GROUP)

    q = posterior()
    point = (q.mean.detach().requires_grad_(), q.rho.detach().requires_grad_())
    assert torch.autograd.gradcheck(value, point)
    assert torch.autograd.gradgradcheck(value, point)


def check_draws_see_a_number(num_samples: int = 3) -> None:
    """By Monte Carlo, value and gradient are those of a Gaussian whose std is a mere number."""
    q, noise = posterior(KEPT), normals(num_samples, 6, seed=1)
    slopes = []
    for prior in (GROUP, Gaussian(std_by_numpy(q))):
        kl = kl_divergence(q, prior, q.draw(noise), method="monte-carlo")
        slopes.append([kl.detach()[None], *torch.autograd.grad(kl, [q.mean, q.rho])])
    for got, expected in zip(*slopes, strict=True):
        assert torch.allclose(got, expected, rtol=1e-10, atol=0.0)


def test_by_monte_carlo_the_std_is_a_number() -> None:
    check_draws_see_a_number()


class Attached(Tensor):
    """A tensor that cannot be cut from the graph."""

    def detach(self) -> Tensor:
        return self.as_subclass(Tensor)


@loop_over(
    "wrong",
    [
        lambda std: std.as_subclass(Attached),
        lambda std: 1.05 * std,
    ],
)
def test_a_planted_fault_in_the_draws_std_is_caught(
    wrong: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = EmpiricalGaussian.std_of
    monkeypatch.setattr(EmpiricalGaussian, "std_of", lambda *args: wrong(right(*args)))
    with pytest.raises(AssertionError):
        check_draws_see_a_number()


STEPS = 1500


def check_unbiased() -> None:
    """Over many draws the Monte Carlo KL and its gradient have the closed ones as their means."""
    q = posterior(KEPT)
    rows = []
    for noise in normals(STEPS, 6, seed=12):
        kl = kl_divergence(q, GROUP, q.draw(noise[None]), method="monte-carlo")
        slopes = torch.autograd.grad(kl, [q.mean, q.rho])
        rows.append(torch.cat([kl.detach()[None], *(slope[KEPT] for slope in slopes)]))
    exact = kl_divergence(q, GROUP, method="closed")
    slopes = torch.autograd.grad(exact, [q.mean, q.rho])
    expected = torch.cat([exact.detach()[None], *(slope[KEPT] for slope in slopes)])
    for place, (column, right) in enumerate(zip(torch.stack(rows).T, expected, strict=True)):
        check_mean(column, right.item(), family=9, what=place)


def test_the_monte_carlo_kl_and_its_gradient_are_unbiased() -> None:
    check_unbiased()


@pytest.mark.slow
@loop_over("factor", [0.9, 1.1])
def test_a_prior_of_another_width_biases_them(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = EmpiricalGaussian.std_of
    monkeypatch.setattr(EmpiricalGaussian, "std_of", lambda *args: factor * right(*args))
    with pytest.raises(AssertionError, match="beyond"):
        check_unbiased()


@loop_over("size", [0.0, 1e-25, 1e-16, 1e-15, 1e-3, 1e14, 1e16, 1e25])
def test_the_width_stays_within_the_limits_of_a_prior(size: float) -> None:
    """At the limit the KL is that of the prior at the limit, and gradients are finite."""
    spread = max(size, 1e-25)
    limited = min(max(math.hypot(size, spread), 1e-15), 1e15)
    q = MeanFieldGaussian(torch.full((5,), size), 1.0)
    double = MeanFieldGaussian(q.mean.detach().double(), 1.0)
    with torch.no_grad():
        q.rho.copy_(inverse_softplus(torch.full((5,), spread)))
        double.rho.copy_(q.rho)
    assert GROUP.std_of(q.mean, q.std).item() == pytest.approx(limited, rel=1e-5)
    if size < 1e18:  # beyond, the squares are no numbers in float32
        got = kl_divergence(q, GROUP)
        assert got.item() == pytest.approx(
            kl_divergence(double, Gaussian(limited)).item(), rel=1e-5
        )
        got.backward()
        assert bool(torch.cat([q.mean.grad, q.rho.grad]).isfinite().all())


def test_nothing_left_has_no_kl() -> None:
    q = posterior(torch.zeros(6, dtype=torch.bool))
    for method in ("closed", "monte-carlo"):
        kl = kl_divergence(q, GROUP, q.draw(normals(2, 6)), method=method)
        kl.backward()
        assert kl.item() == 0.0
        assert not q.mean.grad.any()
        assert not q.rho.grad.any()


def test_training_finds_the_width_of_the_weights() -> None:
    """Without data the posterior falls on the prior; with few groups, each keeps its own width."""
    bnn = BayesianModule(mlp(), prior=EmpiricalGaussian(min_size=6, small_std=0.8), init_std=0.3)
    before = kl_divergence(bnn.posterior, bnn.weight_prior).item()
    optimizer = torch.optim.Adam(bnn.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        kl_divergence(bnn.posterior, bnn.weight_prior).backward()
        optimizer.step()
    assert kl_divergence(bnn.posterior, bnn.weight_prior).item() < 0.01 * before
    stds = bnn.layout.unflatten(bnn.posterior.std.detach())
    for name in ("0.bias", "2.bias"):
        assert stds[name].mean().item() == pytest.approx(0.8, rel=0.05)


@loop_over("prior", [EmpiricalGaussian(6), ByGroup({"*": GROUP})])
def test_a_point_estimate_is_refused(prior: EmpiricalGaussian | ByGroup) -> None:
    x, y = Case("gaussian", "delta", "categorical").data(6)
    with pytest.raises(TypeError, match="takes its std from the spread of the posterior"):
        ELBO(BayesianModule(mlp(), prior=prior, posterior=Delta), num_data=6)(x, y)
    q = Delta(torch.zeros(3))
    with pytest.raises(TypeError, match="no density"):
        kl_divergence(q, GROUP, q.draw(torch.zeros(1, 3)))


def test_its_errors_are_clear() -> None:
    with pytest.raises(ValueError, match="min_size must be at least 1, got 0"):
        EmpiricalGaussian(min_size=0)
    with pytest.raises(TypeError):
        EmpiricalGaussian(min_size=2.5)
    with pytest.raises(ValueError, match=r"small_std must be positive and finite, got 0\.0"):
        EmpiricalGaussian(small_std=0.0)
    with pytest.raises(TypeError, match="no density without one, as for a point estimate"):
        EmpiricalGaussian().log_prob(torch.zeros(1))
    with pytest.raises(TypeError, match=r"EmpiricalGaussian prior must know.*for_layout"):
        kl_divergence(posterior(), EmpiricalGaussian())
