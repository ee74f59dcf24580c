"""Heavy-tailed noise: density, predictive distribution, intervals, training and extremes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from tests.cases import normals
from tests.loops import loop_over
from torch import Tensor, nn

import bayesify as bf
from bayesify import StudentTLikelihood
from bayesify.metrics import crps, regression_metrics
from bayesify.prediction import GaussianPredictive, StudentTPredictive
from bayesify.prediction.student_t import student_t_log_density
from bayesify.tabular import WeightedLikelihood

DFS = (2.01, 3.0, 29.9, 30.1, 1000.0, 1e5)
FALSE_ALARM = 1e-3


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def predictive(samples: int = 6, *shape: int, df: float = 3.5) -> StudentTPredictive:
    shape = shape or (5, 2)
    means, scale = normals(samples, *shape, seed=1), 0.3 + normals(samples, *shape, seed=2).square()
    return StudentTPredictive(means, scale, number(df))


@loop_over("df", DFS)
def test_the_density_is_student_t(df: float) -> None:
    outputs, y = 3.0 * normals(3, 6, 2), 40.0 * normals(6, 2, seed=1)
    likelihood = StudentTLikelihood(0.7, df=df, learn_scale=False)
    exact = stats.t.logpdf(y.numpy(), df, outputs.numpy(), 0.7).sum(-1)
    np.testing.assert_allclose(likelihood.log_prob(outputs, y).numpy(), exact, rtol=1e-10)
    flat = likelihood.log_prob(outputs[..., 0], y[:, 0])
    assert flat.shape == (3, 6)
    noisy = StudentTLikelihood(df=df, input_dependent=True, min_scale=0.1)
    scale = np.log1p(np.exp(outputs[:, :, 1:].numpy())) + 0.1
    got = noisy.log_prob(outputs[:, :, None], y[:, :1])
    exact = stats.t.logpdf(y[:, :1].numpy(), df, outputs[:, :, :1].numpy(), scale).sum(-1)
    np.testing.assert_allclose(got.numpy(), exact, rtol=1e-10)
    p = noisy.predictive(list(outputs[:, :, None]), keep_samples=False)
    assert isinstance(p, StudentTPredictive)
    np.testing.assert_allclose(p.scale.numpy(), scale, rtol=1e-12)
    assert p.df.item() == df


def test_the_gradient_in_df_is_exact_on_both_sides_of_its_series() -> None:
    df = torch.tensor([2.5, 29.0, 31.0, 1e3], dtype=torch.float64, requires_grad=True)
    z = number(1.7).requires_grad_()
    torch.autograd.gradcheck(student_t_log_density, (z, df))


@loop_over("df", DFS)
def test_distribution_function_and_quantiles_are_those_of_the_mixture(df: float) -> None:
    p, y = predictive(df=df), normals(5, 2, seed=8)
    each = stats.t.cdf(y.numpy(), df, p.means.numpy(), p.scale.numpy())
    np.testing.assert_allclose(p.cdf(y).numpy(), each.mean(0), rtol=1e-10)
    parts = stats.t.logpdf(y.numpy(), df, p.means.numpy(), p.scale.numpy()).sum(-1)
    np.testing.assert_allclose(
        p.log_prob(y).numpy(), np.log(np.exp(parts).mean(0)), rtol=1e-10, atol=1e-12
    )
    for q in (1e-9, 0.025, 0.3, 0.5, 0.975, 1.0 - 1e-7):
        assert torch.allclose(p.cdf(p.quantile(q)), number(q).expand(5, 2), rtol=1e-9, atol=0.0)
    one = StudentTPredictive(p.means[:1], p.scale[:1], p.df)
    for q in (1e-30, 1e-9, 0.1, 0.975):
        exact = stats.t.ppf(q, df, p.means[0].numpy(), p.scale[0].numpy())
        np.testing.assert_allclose(one.quantile(q).numpy(), exact, rtol=1e-9, atol=1e-9)


def test_the_distribution_function_is_the_integral_of_the_density() -> None:
    """A check that shares no code with scipy's distribution function."""
    p = StudentTPredictive(torch.zeros(1, 1).double(), number(1.0), number(2.5))
    for y in (-30.0, -1.0, 2.0):
        exact, _ = integrate.quad(
            lambda t: student_t_log_density(number(t), number(2.5)).exp().item(), -np.inf, y
        )
        assert p.cdf(number(y).reshape(1)).item() == pytest.approx(exact, rel=1e-7)


def test_the_variance_is_that_of_the_draws_and_splits() -> None:
    p = predictive(df=9.0)
    assert torch.allclose(p.total, p.aleatoric + p.epistemic, rtol=1e-12)
    noise = p.scale.square().mean(0) * 9.0 / 7.0
    assert torch.allclose(p.aleatoric, noise, rtol=1e-12)
    draws = p.simulate(200_000, seed=1)
    error = (p.total / 200_000).sqrt()
    assert ((draws.mean(0) - p.mean).abs() < 4.5 * error).all()
    assert torch.allclose(draws.var(0), p.total, rtol=0.05)
    assert torch.equal(p.simulate(3, seed=2), p.simulate(3, seed=2))
    assert not torch.equal(p.simulate(3, seed=2), p.simulate(3, seed=3))


def check_interval_coverage(p: StudentTPredictive, targets: Tensor) -> None:
    """A binomial test for each of three levels; false alarms in 1 of 1000 runs of new seeds."""
    for level in (0.5, 0.8, 0.95):
        low, high = p.interval(level)
        held = int(((low <= targets) & (targets <= high)).sum())
        found = stats.binomtest(held, targets.numel(), level).pvalue
        assert found > FALSE_ALARM / 3, f"{level}: {held} of {targets.numel()}"


def test_intervals_hold_their_share_and_those_of_a_gaussian_do_not() -> None:
    means, scale = normals(5, 20_000, seed=1), 0.2 + normals(5, 20_000, seed=2).abs()
    p = StudentTPredictive(means, scale, number(3.0))
    targets = p.simulate(1, seed=4)[0]
    check_interval_coverage(p, targets)
    same_variance = GaussianPredictive(means, scale * math.sqrt(3.0))
    for wrong in (same_variance, StudentTPredictive(means, 1.15 * scale, number(3.0))):
        with pytest.raises(AssertionError, match="of 20000"):
            check_interval_coverage(wrong, targets)  # type: ignore[arg-type]


def test_the_crps_is_the_integral_of_the_squared_distance() -> None:
    p = predictive(3, 4, df=6.0)
    y = normals(4, seed=9)

    def integrand(z: float, i: int) -> float:
        each = stats.t.cdf(z, 6.0, p.means[:, i].numpy(), p.scale[:, i].numpy())
        return (each.mean() - (z >= y[i].item())) ** 2

    exact = np.mean(
        [
            integrate.quad(integrand, -np.inf, y[i].item(), (i,))[0]
            + integrate.quad(integrand, y[i].item(), np.inf, (i,))[0]
            for i in range(4)
        ]
    )
    many = StudentTPredictive(p.means.repeat(1, 500), p.scale.repeat(1, 500), p.df)
    assert crps(many, y.repeat(500)) == pytest.approx(exact, rel=0.01)
    found = regression_metrics(p, y)
    assert found["nll"] == pytest.approx(-p.log_prob(y).mean().item())
    gaussian = GaussianPredictive(many.means, many.scale)
    nearly = StudentTPredictive(many.means, many.scale, number(1e9))
    assert crps(nearly, y.repeat(500)) == pytest.approx(crps(gaussian, y.repeat(500)), rel=0.01)


def test_parts_of_ensembles_keep_their_own_df() -> None:
    one, two = predictive(df=3.0), predictive(df=30.0)
    joined = StudentTPredictive.joined([one, two])
    y = normals(5, 2, seed=8)
    assert joined.df.shape == (12, 1, 1)
    assert torch.allclose(joined.cdf(y), 0.5 * (one.cdf(y) + two.cdf(y)), rtol=1e-12)
    assert torch.allclose(joined.total, joined.aleatoric + joined.epistemic, rtol=1e-12)
    back = joined.subset(range(6))
    assert torch.allclose(back.cdf(y), one.cdf(y), rtol=1e-12)
    assert torch.allclose(joined.cdf(joined.quantile(0.9)), number(0.9), rtol=1e-10)
    assert joined.simulate(10).shape == (10, 5, 2)
    moved = one.rescaled(7.0, 2.0)
    assert torch.allclose(moved.quantile(0.9), 7.0 + 2.0 * one.quantile(0.9), rtol=1e-9)


@loop_over("dtype", [torch.float32, torch.float64])
@loop_over("raw", [-1e4, -1e3, -20.0, 0.0, 1e3, 1e4])
@loop_over("location", [-1e3, 0.3, 1e3])
def test_extreme_outputs_have_finite_densities(
    raw: float, location: float, dtype: torch.dtype
) -> None:
    likelihood = StudentTLikelihood(input_dependent=True).to(dtype)
    assert likelihood.df_rho is not None
    outputs = torch.tensor([[[[location, raw]]]], dtype=dtype, requires_grad=True)
    found = likelihood.log_prob(outputs, torch.tensor([[7.0]], dtype=dtype))
    assert found.isfinite().all()
    found.sum().backward()
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()
    assert likelihood.df_rho.grad is not None
    assert likelihood.df_rho.grad.isfinite()
    for rho in (-1e3, 1e3):
        with torch.no_grad():
            likelihood.df_rho.fill_(rho)
        found = likelihood.log_prob(outputs, torch.tensor([[7.0]], dtype=dtype))
        assert found.isfinite().all()
        p = likelihood.predictive([outputs[0].detach()], keep_samples=False)
        assert p.total.isfinite().all()
        assert all(end.isfinite().all() for end in p.interval(0.9))


def heavy_data(count: int, df: float) -> tuple[Tensor, Tensor]:
    x = normals(count, 1, seed=1)
    y = 2.0 * x + 0.5 * torch.from_numpy(stats.t.rvs(df, size=(count, 1), random_state=0))
    return x, y


def test_training_finds_slope_scale_and_df(tmp_path: Path) -> None:
    x, y = heavy_data(4000, 3.0)
    torch.manual_seed(0)
    net = nn.Linear(1, 1).double()
    bnn = bf.BayesianModule(net, likelihood=StudentTLikelihood().double(), posterior=bf.Delta)
    elbo = bf.ELBO(bnn, num_data=4000, temperature=0.0)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        elbo(x, y).loss.backward()
        optimizer.step()
    likelihood = bnn.likelihood
    assert isinstance(likelihood, StudentTLikelihood)
    assert likelihood.scale.item() == pytest.approx(0.5, rel=0.06)
    assert likelihood.df.item() == pytest.approx(3.0, rel=0.15)
    df, where, scale = stats.t.fit((y - bnn.mean_outputs(x)).numpy().ravel())
    assert likelihood.df.item() == pytest.approx(df, rel=0.02)
    assert likelihood.scale.item() == pytest.approx(scale, rel=0.02)
    assert abs(where) < 0.01
    bf.save(bnn, tmp_path / "model.safetensors")
    again = bf.load(tmp_path / "model.safetensors", net)
    assert torch.equal(again.predict(x).quantile(0.9), bnn.predict(x).quantile(0.9))


def test_an_outlier_moves_the_fit_less_than_with_gaussian_noise() -> None:
    slopes = {}
    x = torch.linspace(-1.0, 1.0, 21).double().unsqueeze(-1)
    y = x.clone()
    y[-1] = 50.0
    for likelihood in (bf.GaussianLikelihood(0.1), StudentTLikelihood(0.1, df=3.0)):
        net = nn.Linear(1, 1, bias=False).double()
        bnn = bf.BayesianModule(net, likelihood=likelihood.double(), posterior=bf.Delta)
        elbo = bf.ELBO(bnn, num_data=21, temperature=0.0)
        optimizer = torch.optim.Adam([bnn.posterior.mean], lr=0.05)
        for _ in range(400):
            optimizer.zero_grad()
            elbo(x, y).loss.backward()
            optimizer.step()
        slopes[type(likelihood).__name__] = bnn.posterior.mean.item()
    assert abs(slopes["StudentTLikelihood"] - 1.0) < 0.05
    assert slopes["GaussianLikelihood"] > 3.0


def test_weighted_rows_of_a_table_may_have_heavy_tails() -> None:
    outputs, y = normals(2, 6, 2), normals(6, 2, seed=1)
    weights = torch.arange(1.0, 7.0)
    likelihood = StudentTLikelihood(df=4.0, learn_scale=False)
    weighted = WeightedLikelihood(likelihood)
    got = weighted.log_prob(outputs, WeightedLikelihood.packed(y, weights))
    assert torch.allclose(got, weights * likelihood.log_prob(outputs, y), rtol=1e-12)


@loop_over(
    ("call", "message"),
    [
        (lambda: StudentTLikelihood(df=2.0), "above 2, .*got 2.0; for nearly"),
        (lambda: StudentTLikelihood(df=math.nan), "above 2, .*got nan"),
        (lambda: StudentTLikelihood(df=math.inf), "got inf; for nearly Gaussian"),
        (lambda: StudentTLikelihood(0.0), "scale must be positive and finite, got 0.0"),
        (lambda: StudentTLikelihood(0.5, input_dependent=True), "got scale=0.5 too; remove one"),
        (
            lambda: StudentTLikelihood(input_dependent=True, learn_scale=False),
            "got learn_scale=False too; remove one",
        ),
        (lambda: StudentTLikelihood(min_scale=0.1), "add input_dependent=True, or give scale"),
        (lambda: StudentTLikelihood(input_dependent=True).scale, r"use .*predict\(x\).scale"),
        (
            lambda: StudentTLikelihood().log_prob(normals(2, 5, 1), normals(5)),
            r"output, \(5, 1\), got \(5,\); nothing is broadcast",
        ),
        (
            lambda: StudentTPredictive(torch.zeros(2, 3), torch.ones(()), number(2.0)),
            "df must be above 2, .*got 2.0",
        ),
        (
            lambda: StudentTPredictive(torch.zeros(2, 3), torch.ones(()), torch.ones(2)),
            "df must be broadcastable to means",
        ),
        (lambda: predictive().simulate(0), "num_draws must be at least 1, got 0"),
    ],
)
def test_a_wrong_argument_raises(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
