"""Predictive distributions in half precision, and of very small and very great numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from tests.cases import normals
from tests.loops import loop_over
from torch.distributions import Normal, StudentT

from bayesify.prediction import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    StudentTPredictive,
)


@loop_over("dtype", [torch.bfloat16, torch.float16])
def test_many_samples_in_half_precision(dtype: torch.dtype) -> None:
    logits = normals(1000, 5, 3).to(dtype)
    for kind in (CategoricalPredictive, BernoulliPredictive):
        got = kind.from_logits(list(logits))
        exact = kind.from_logits(list(logits.double()))
        for name in ("mean", "total", "aleatoric", "epistemic"):
            assert getattr(got, name).dtype == dtype
            torch.testing.assert_close(
                getattr(got, name).double(), getattr(exact, name), rtol=0.02, atol=0.01
            )
    p = GaussianPredictive(logits, torch.tensor(0.5))
    exact_p = GaussianPredictive(logits.double(), torch.tensor(0.5))
    for q in (0.001, 0.4, 0.9):
        assert p.quantile(q).dtype == dtype
        torch.testing.assert_close(
            p.quantile(q).double(), exact_p.quantile(q), rtol=0.01, atol=0.01
        )


@loop_over("dtype", [torch.bfloat16, torch.float16])
@loop_over("classes", [100, 1000])
@loop_over("samples", [1, 5])
def test_many_nearly_equal_classes_in_half_precision(
    dtype: torch.dtype, classes: int, samples: int
) -> None:
    """Rounded to half precision, the probabilities of all but one can sum to more than 1."""
    for scale in (0.02, 0.3):
        logits = (scale * normals(samples, 20, classes)).to(dtype)
        got = CategoricalPredictive.from_logits(list(logits), keep_samples=True)
        exact = CategoricalPredictive.from_logits(list(logits.double()))
        joined = CategoricalPredictive.joined([got, got])
        for p in (got, got.subset(range(samples)), joined):
            for name in ("total", "aleatoric", "epistemic"):
                torch.testing.assert_close(
                    getattr(p, name).double(), getattr(exact, name), rtol=0.02, atol=2e-4
                )


def test_more_classes_than_float16_can_count() -> None:
    for samples in (1, 2):
        p = CategoricalPredictive.from_logits(torch.zeros(samples, 1, 70_000, dtype=torch.float16))
        assert p.total.item() == pytest.approx(math.log(70_000), rel=0.01)
        assert p.epistemic.item() == 0.0


def test_an_entropy_is_greatest_where_classes_are_equal() -> None:
    """Its gradient is 0 there, also where the sum of all but one is above 1 - 1 / K by rounding."""
    for classes in range(2, 40):
        logits = torch.zeros(1, 1, classes, dtype=torch.float64, requires_grad=True)
        CategoricalPredictive.from_logits(logits).total.sum().backward()
        assert logits.grad is not None
        assert float(logits.grad.abs().max()) < 1e-12


@loop_over("dtype", [torch.float64, torch.bfloat16])
def test_classes_that_no_sample_allows_leave_gradients_that_are_numbers(dtype: torch.dtype) -> None:
    logits = normals(4, 5, 3).to(dtype).requires_grad_()
    masked = logits.masked_fill(torch.tensor([False, False, True]), -torch.inf)
    y = torch.tensor([0, 1, 1, 0, 1])
    one_by_one = CategoricalPredictive.from_logits(masked, keep_samples=True)
    bare = CategoricalPredictive.from_logits(masked.detach())
    for p in (one_by_one, one_by_one.subset(range(4))):  # also of all samples as a block
        torch.testing.assert_close(p.log_mean.detach(), bare.log_mean)
        assert bool((p.log_mean[:, 2] == -torch.inf).all())
        for part in (p.mean[:, 0], p.total, p.aleatoric, p.epistemic, p.log_prob(y)):
            (slope,) = torch.autograd.grad(part.sum(), logits, retain_graph=True)
            assert bool(slope.isfinite().all())
            assert bool(slope.any())
    joined = CategoricalPredictive.joined([one_by_one, one_by_one])
    (slope,) = torch.autograd.grad(joined.total.sum(), logits)
    assert bool(slope.isfinite().all())


@loop_over("scale", [1e-30, 1e-10, 1e10, 1e30])
def test_densities_and_quantiles_at_any_scale(scale: float) -> None:
    noise = 0.3 + normals(6, 5, 2, seed=3).square()
    p = GaussianPredictive(normals(6, 5, 2, seed=2), noise)
    q = GaussianPredictive(scale * p.means.float(), scale * p.noise_std.float())
    y = normals(5, 2, seed=8)
    exact = p.log_prob(y) - 2 * np.log(scale)
    torch.testing.assert_close(q.log_prob(scale * y).double(), exact, rtol=1e-5, atol=1e-5)
    for level in (1e-6, 0.3, 1 - 1e-6):
        got = q.quantile(level).double() / scale
        torch.testing.assert_close(got, p.quantile(level), rtol=1e-5, atol=1e-5)
    # Beyond what float32 can hold as a probability.
    one = GaussianPredictive(torch.zeros(1, 1), torch.tensor(scale))
    assert one.quantile(1e-60).item() / scale == pytest.approx(stats.norm.ppf(1e-60))


@loop_over("means", [[0.0, 1.0, 2.0], [-1.0, 0.0, 1.0, 2.0, 3.0], [1.0, 1.0, 5.0, 5.0]])
@loop_over("noise", ["none", "of some", "Student-t"])
def test_quantiles_without_noise_are_those_of_the_samples(means: list[float], noise: str) -> None:
    values = torch.tensor(means, dtype=torch.float64).unsqueeze(1)
    std = torch.zeros_like(values)
    if noise == "of some":  # one sample of many has noise
        values = torch.cat([values] * 3 + [values[:1]])
        std = torch.cat([std] * 3 + [torch.full((1, 1), 1e-3, dtype=torch.float64)])
    p: GaussianPredictive | StudentTPredictive = GaussianPredictive(values, std)
    if noise == "Student-t":
        p = StudentTPredictive(values, std, torch.tensor(4.0, dtype=torch.float64))
    for level in (0.025, 0.1, 0.3, 0.45, 0.55, 0.7, 0.9, 0.975):
        if abs(level * len(values) - round(level * len(values))) < 0.2:
            continue  # close to a step of the distribution function
        expected = values.flatten().sort().values[int(level * len(values))]
        assert p.quantile(level).item() == pytest.approx(expected.item(), abs=0.01), level


@pytest.mark.parametrize("name", ["total", "aleatoric", "epistemic"])
def test_gradients_of_uncertainties_where_a_probability_underflows(name: str) -> None:
    for kind, logits in (
        (CategoricalPredictive, [[[400.0, -400.0]], [[1.0, 0.0]]]),
        (BernoulliPredictive, [[0.5, -800.0], [1.0, 0.0]]),
    ):
        x = torch.tensor(logits, requires_grad=True)
        getattr(kind.from_logits(list(x)), name).sum().backward()
        assert x.grad is not None
        assert bool(x.grad.isfinite().all())


def test_the_distribution_function_of_numbers_without_noise() -> None:
    p = GaussianPredictive(torch.tensor([[0.0], [2.0]]), torch.tensor(0.0))
    for target, expected in ((-1.0, 0.0), (0.0, 0.5), (1.0, 0.5), (2.0, 1.0), (3.0, 1.0)):
        assert p.cdf(torch.tensor([target])).item() == expected


def test_a_density_without_noise_is_zero_but_at_the_mean() -> None:
    means, scale = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [1.0]])
    for p, half in (
        (GaussianPredictive(means, scale), Normal(1.0, 1.0)),
        (StudentTPredictive(means, scale, torch.tensor(4.0)), StudentT(4.0, 1.0, 1.0)),
    ):
        at, elsewhere = p.log_prob(torch.tensor([0.0])), p.log_prob(torch.tensor([3.0]))
        assert at.item() == math.inf
        expected = half.log_prob(torch.tensor(3.0)).item() - math.log(2.0)
        assert elsewhere.item() == pytest.approx(expected, rel=1e-6)
    alone = GaussianPredictive(means, torch.tensor(0.0))
    assert alone.log_prob(torch.tensor([3.0])).item() == -math.inf
    assert math.isnan(alone.log_prob(torch.tensor([math.nan])).item())
    wide = torch.tensor([[0.0], [0.5]], requires_grad=True)
    GaussianPredictive(means, wide).log_prob(torch.tensor([3.0])).sum().backward()
    assert wide.grad is not None
    assert wide.grad.isfinite().all()
