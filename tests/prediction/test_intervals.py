"""Intervals of a linear model whose posterior is known: their ends, and how often they hold.

With an orthogonal design and known noise the mean field is exact, so that everything that
``predict`` says can be compared with the closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from tests.cases import normals
from tests.loops import loop_over
from torch import Tensor, nn

from bayesify import BayesianModule, Gaussian, GaussianLikelihood
from bayesify.distributions.softplus import inverse_softplus
from bayesify.prediction import GaussianPredictive

LEVELS = (0.5, 0.8, 0.95)
NOISE, PRIOR, D, N = 0.5, 1.0, 4, 8
FALSE_ALARM = 1e-3


def orthogonal_design() -> Tensor:
    """Columns that are orthogonal and of different lengths, shape (N, D)."""
    columns = torch.linalg.qr(normals(N, D, seed=1)).Q
    return columns * torch.tensor([0.3, 0.6, 1.0, 1.5], dtype=torch.float64)


def correlated_design() -> Tensor:
    return normals(N, D, seed=1) @ (0.6 + torch.eye(D, dtype=torch.float64)) / 3


def precision_of(x: Tensor) -> Tensor:
    return x.T @ x / NOISE**2 + torch.eye(D, dtype=x.dtype) / PRIOR**2


def mean_field(x: Tensor, y: Tensor) -> BayesianModule:
    """The optimum of the ELBO in closed form, for one data set in each column of y (N, R)."""
    precision = precision_of(x)
    net = nn.Linear(D, y.shape[1], bias=False, dtype=x.dtype)
    bnn = BayesianModule(net, likelihood=GaussianLikelihood(NOISE), prior=Gaussian(PRIOR), seed=3)
    with torch.no_grad():
        mean = torch.linalg.solve(precision, x.T @ y / NOISE**2).T
        bnn.posterior.mean.copy_(mean.flatten())
        std = precision.diagonal().rsqrt().repeat(y.shape[1])
        bnn.posterior.rho.copy_(inverse_softplus(std))
    return bnn


def data(x: Tensor, sets: int) -> tuple[Tensor, Tensor]:
    """Weights of the prior (D, R), and targets of them (N, R)."""
    weights = PRIOR * normals(D, sets, seed=5)
    return weights, x @ weights + NOISE * normals(len(x), sets, seed=6)


def check_intervals(p: GaussianPredictive, mean: Tensor, std: Tensor) -> None:
    """Each end is within 1 % of the width of its interval."""
    for level in LEVELS:
        reach = stats.norm.ppf(0.5 + 0.5 * level) * std
        for got, exact in zip(p.interval(level), (mean - reach, mean + reach), strict=True):
            assert ((got - exact).abs() / (2 * reach)).max() < 0.01


@pytest.mark.slow
@loop_over("design", [orthogonal_design, correlated_design])
def test_intervals_are_the_analytic_ones(design: Callable[[], Tensor]) -> None:
    x = design()
    _, y = data(x, 1)
    bnn, new = mean_field(x, y), normals(2, D, seed=7)
    p = bnn.predict(new, num_samples=50_000)
    mean = new @ bnn.posterior.mean.detach()[:, None]
    variance = new.square() @ (1 / precision_of(x).diagonal())[:, None]
    check_intervals(p, mean, (variance + NOISE**2).sqrt())
    exact = (new @ torch.linalg.inv(precision_of(x)) * new).sum(-1, keepdim=True)
    if design is orthogonal_design:
        check_intervals(p, mean, (exact + NOISE**2).sqrt())
    else:
        # The mean field is another distribution, and no number of samples changes that.
        with pytest.raises(AssertionError):
            check_intervals(p, mean, (exact + NOISE**2).sqrt())
    for fault in (wider, without_epistemic):
        with pytest.raises(AssertionError):
            check_intervals(fault(p), mean, (variance + NOISE**2).sqrt())


def wider(p: GaussianPredictive) -> GaussianPredictive:
    return GaussianPredictive(p.mean + 1.05 * (p.means - p.mean), 1.05 * p.noise_std)


def without_epistemic(p: GaussianPredictive) -> GaussianPredictive:
    return GaussianPredictive(p.mean.expand_as(p.means), p.noise_std)


SETS = 16_000


@pytest.fixture(scope="module")
def many() -> tuple[GaussianPredictive, Tensor]:
    """What is said of one new input after each of many data sets, and its targets."""
    x = orthogonal_design()
    weights, y = data(x, SETS)
    new = normals(1, D, seed=8)
    targets = new @ weights + NOISE * normals(1, SETS, seed=9)
    return mean_field(x, y).predict(new, num_samples=400), targets


def check_coverage(p: GaussianPredictive, targets: Tensor) -> None:
    """The equal-tailed intervals hold their share; a binomial test for each level."""
    place = p.cdf(targets)
    for level in LEVELS:
        held = int(((place - 0.5).abs() < 0.5 * level).sum())
        found = stats.binomtest(held, targets.numel(), level).pvalue
        assert found > FALSE_ALARM / len(LEVELS), f"{level}: {held} of {targets.numel()}"


def test_coverage_over_draws_of_the_prior_is_nominal(
    many: tuple[GaussianPredictive, Tensor],
) -> None:
    p, targets = many
    share = float((p.epistemic / p.total).mean())
    assert 0.3 < share < 0.9, "both parts matter"
    check_coverage(p, targets)


@loop_over("fault", [wider, without_epistemic])
def test_a_wrong_spread_is_caught(
    fault: Callable[[GaussianPredictive], GaussianPredictive],
    many: tuple[GaussianPredictive, Tensor],
) -> None:
    p, targets = many
    with pytest.raises(AssertionError, match="of 16000"):
        check_coverage(fault(p), targets)


def test_a_target_is_in_the_interval_where_its_probability_says_so(
    many: tuple[GaussianPredictive, Tensor],
) -> None:
    p = GaussianPredictive(many[0].means[:, :, :300], many[0].noise_std)
    targets = many[1][:, :300]
    for level in LEVELS:
        low, high = p.interval(level)
        inside = (low < targets) & (targets < high)
        assert torch.equal(inside, (p.cdf(targets) - 0.5).abs() < 0.5 * level)
        assert torch.allclose(p.cdf(high) - p.cdf(low), torch.full_like(low, level), atol=1e-12)


def test_the_variance_is_the_posterior_predictive_one(
    many: tuple[GaussianPredictive, Tensor],
) -> None:
    """Averaged over 16,000 independent sets of 400 samples; stated to 4.5 standard errors."""
    p, x = many[0], orthogonal_design()
    new = normals(1, D, seed=8)
    exact = float((new.square() @ (1 / precision_of(x).diagonal())).sum())
    unbiased = p.epistemic * 400 / 399
    error = math.sqrt(2 / 399 / SETS) * exact
    assert abs(float(unbiased.mean()) - exact) < 4.5 * error
    assert torch.allclose(p.aleatoric, torch.full_like(p.aleatoric, NOISE**2), rtol=1e-14)
