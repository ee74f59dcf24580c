"""Counts: Poisson and negative binomial densities, their mixtures, intervals and extremes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special, stats
from tests.cases import normals
from tests.loops import loop_over
from torch import Tensor, nn

import bayesify as bf
from bayesify import NegativeBinomialLikelihood, PoissonLikelihood
from bayesify.metrics import crps, regression_metrics
from bayesify.prediction import (
    CountPredictive,
    NegativeBinomialPredictive,
    PoissonPredictive,
)
from bayesify.prediction.counts import negative_binomial_log_prob, poisson_log_prob

FALSE_ALARM = 1e-3
#: From nearly Poisson, through both sides of the series of log Gamma, to very dispersed.
DISPERSIONS = (2e-6, 1e-3, 0.066, 0.067, 0.5, 20.0)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def negative_binomial(log_rates: Tensor, dispersion: float) -> Any:
    """scipy's, whose parameters are r and the probability of 0 in one trial."""
    odds = dispersion * np.exp(log_rates.numpy())
    return stats.nbinom(1.0 / dispersion, 1.0 / (1.0 + odds))


def predictives(samples: int = 6, *shape: int, shift: float = 1.0) -> list[CountPredictive]:
    log_rates = shift + 0.5 * normals(samples, *(shape or (5, 2)), seed=1)
    each = [NegativeBinomialPredictive(log_rates, number(alpha)) for alpha in DISPERSIONS]
    return [PoissonPredictive(log_rates), *each]


def exact_of(p: CountPredictive) -> Any:
    """The components in scipy."""
    if isinstance(p, NegativeBinomialPredictive):
        return negative_binomial(p.log_rates, p.dispersion.item())
    return stats.poisson(p.log_rates.exp().numpy())


def test_densities_are_those_of_scipy() -> None:
    outputs = 2.0 + 1.5 * normals(3, 40, 2)
    y = torch.from_numpy(stats.poisson.rvs(9.0, size=(40, 2), random_state=1)) ** 2
    for targets in (y, y.double(), y.float(), y.int()):
        got = PoissonLikelihood().log_prob(outputs, targets)
        exact = stats.poisson.logpmf(y.numpy(), np.exp(outputs.numpy())).sum(-1)
        np.testing.assert_allclose(got.numpy(), exact, rtol=1e-10)
        assert PoissonLikelihood().log_prob(outputs[..., 0], targets[:, 0]).shape == (3, 40)
    for alpha in DISPERSIONS:
        likelihood = NegativeBinomialLikelihood(alpha, learn_dispersion=False)
        exact = negative_binomial(outputs, alpha).logpmf(y.numpy()).sum(-1)
        # With r = 500,000 scipy's own terms of 6e6 leave 1e-9.
        tolerance = 1e-10 if alpha > 1e-4 else 1e-8
        got = likelihood.log_prob(outputs, y)
        np.testing.assert_allclose(got.numpy(), exact, rtol=tolerance, atol=tolerance)


def test_nearly_no_dispersion_is_poisson_in_single_precision_too() -> None:
    outputs, y = normals(3, 40), torch.arange(40) % 9
    likelihood = NegativeBinomialLikelihood(2e-6, learn_dispersion=False)
    exact = PoissonLikelihood().log_prob(outputs, y)
    assert torch.allclose(likelihood.log_prob(outputs, y), exact, atol=1e-3)
    single = likelihood.log_prob(outputs.float(), y)
    assert torch.allclose(single.double(), exact, rtol=1e-4, atol=1e-3)


def test_no_count_at_a_huge_rate_has_the_power_of_the_share() -> None:
    """-r log(1 + alpha mean), without a jump where softplus becomes its argument."""
    likelihood = NegativeBinomialLikelihood(1e-4, learn_dispersion=False)
    log_rates = torch.linspace(28.0, 29.9, 31, dtype=torch.float64).unsqueeze(-1)
    got = likelihood.log_prob(log_rates.unsqueeze(0), torch.zeros(31, 1))[0]
    exact = -1e4 * np.log1p(1e-4 * np.exp(log_rates[:, 0].numpy()))
    np.testing.assert_allclose(got.numpy(), exact, rtol=1e-12)


def test_the_gradient_in_the_dispersion_is_exact() -> None:
    alpha = torch.tensor([1e-3, 0.066, 0.067, 0.5, 20.0], dtype=torch.float64, requires_grad=True)
    f = normals(5).requires_grad_()
    torch.autograd.gradcheck(
        lambda f, a: negative_binomial_log_prob(f, torch.arange(5), a), (f, alpha)
    )
    # Where the count is 1 / alpha the function has two forms.
    counts = torch.tensor([16, 20, 50, 32, 17])
    alpha = torch.tensor([16.0, 20.0, 50.0, 33.0, 17.0], dtype=torch.float64).reciprocal()
    alpha.requires_grad_()
    torch.autograd.gradcheck(
        lambda f, a: negative_binomial_log_prob(3.5 + f, counts, a), (f, alpha), eps=1e-8, atol=1e-4
    )


def test_mixtures_are_those_of_scipy() -> None:
    y = torch.tensor([[0, 1], [2, 3], [5, 8], [13, 21], [34, 55]])
    for p in predictives():
        exact = exact_of(p)
        np.testing.assert_allclose(p.cdf(y).numpy(), exact.cdf(y.numpy()).mean(0), rtol=1e-8)
        joint = np.log(np.exp(exact.logpmf(y.numpy()).sum(-1)).mean(0))
        np.testing.assert_allclose(p.log_prob(y).numpy(), joint, rtol=1e-8)
        np.testing.assert_allclose(p.mean.numpy(), exact.mean().mean(0), rtol=1e-10)
        np.testing.assert_allclose(p.aleatoric.numpy(), exact.var().mean(0), rtol=1e-8)
        np.testing.assert_allclose(p.epistemic.numpy(), exact.mean().var(0), rtol=1e-8)
        assert torch.allclose(p.total, p.aleatoric + p.epistemic, rtol=1e-10)
        assert torch.equal(p.prediction, p.mean)
        assert p.samples is not None
        assert torch.equal(p.samples.mean(0), p.mean)


@loop_over("q", [1e-12, 0.025, 0.3, 0.5, 0.975, 1.0 - 1e-12])
@loop_over("shift", [-8.0, 1.0, 9.0])
def test_quantiles_are_the_least_counts_that_reach_the_level(q: float, shift: float) -> None:
    for p in predictives(shift=shift):
        exact, found = exact_of(p), p.quantile(q)
        assert found.dtype == torch.int64
        assert int(found.min()) >= 0
        beyond, before = (exact.sf(found.numpy() - less).mean(0) for less in (0, 1))
        slack = 1e-9 * (1.0 - q)
        assert (beyond <= 1.0 - q + slack).all()
        assert (before >= 1.0 - q - slack).all()


@loop_over("q", [0.5, 0.9, 0.99, 1.0 - 1e-9])
def test_upper_quantiles_of_great_means_and_dispersions(q: float) -> None:
    for mean, alpha in ((1e12, 100.0), (4e12, 1e4), (1e6, 1e10), (1e6, 2.0), (5e3, 1e-2)):
        p = NegativeBinomialPredictive(number(math.log(mean)).reshape(1, 1), number(alpha))
        exact, found = exact_of(p), p.quantile(q).numpy()
        assert exact.sf(found) <= (1.0 - q) * (1.0 + 1e-9)
        assert found == 0 or exact.sf(0.999 * found - 1.0) > 1.0 - q


def test_the_slow_tail_is_computed_of_great_rates_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, sizes = special.betaincc, []

    def counted(*arguments: Any) -> Any:
        sizes.append(np.broadcast(*arguments).size)
        return slow(*arguments)

    monkeypatch.setattr(special, "betaincc", counted)
    log_rates = torch.linspace(0.0, 3.0, 40, dtype=torch.float64).reshape(2, 20)
    log_rates[1, 7] = math.log(2e6)
    p = NegativeBinomialPredictive(log_rates, number(1.5))
    one = NegativeBinomialPredictive(log_rates[:, 7:8], number(1.5))
    for q in (0.5, 0.975):
        found = p.quantile(q)
        assert float(found[7]) == float(one.quantile(q))
        assert torch.equal(
            found[:7], NegativeBinomialPredictive(log_rates[:, :7], number(1.5)).quantile(q)
        )
    assert set(sizes) == {1}


def test_intervals_hold_their_level_or_more() -> None:
    for p in predictives():
        for level in (0.1, 0.5, 0.9):
            low, high = p.interval(level)
            assert (p.cdf(high) - p.cdf(low - 1) >= level - 1e-12).all()


def check_shares(p: CountPredictive, targets: Tensor) -> None:
    """Whether intervals hold what the distribution function gives them.

    Their exact probability differs between examples, so that the number held has a
    Poisson-binomial distribution, and is nearly Gaussian. False alarms in 1 of 1000 runs of new
    seeds, for three levels.
    """
    for level in (0.5, 0.8, 0.95):
        low, high = p.interval(level)
        share = p.cdf(high) - p.cdf(low - 1)
        held = ((low <= targets) & (targets <= high)).double().sum()
        score = (held - share.sum()) / (share * (1.0 - share)).sum().sqrt()
        assert abs(score.item()) < stats.norm.isf(FALSE_ALARM / 6), f"{level}: {score.item():.1f}"


def test_targets_of_the_model_lie_in_intervals_as_often_as_stated() -> None:
    log_rates = 1.0 + 0.3 * normals(5, 5000, seed=1)
    alpha = 0.6
    rng = np.random.default_rng(3)
    chosen = log_rates.gather(0, torch.from_numpy(rng.integers(5, size=(1, 5000))))[0]
    right: dict[str, tuple[CountPredictive, Any]] = {
        "poisson": (PoissonPredictive(log_rates), stats.poisson(chosen.exp().numpy())),
        "negative-binomial": (
            NegativeBinomialPredictive(log_rates, number(alpha)),
            negative_binomial(chosen, alpha),
        ),
    }
    for p, drawn in right.values():
        check_shares(p, torch.from_numpy(drawn.rvs(random_state=rng)))
        check_shares(p, p.simulate(1, seed=4)[0])
    dispersed = torch.from_numpy(right["negative-binomial"][1].rvs(random_state=rng))
    for wrong in (
        PoissonPredictive(log_rates),
        NegativeBinomialPredictive(log_rates, number(0.4)),
        NegativeBinomialPredictive(log_rates + 0.2, number(alpha)),
    ):
        with pytest.raises(AssertionError, match=r"0\.\d+: "):
            check_shares(wrong, dispersed)


def test_draws_have_the_stated_moments() -> None:
    for p in predictives():
        draws = p.simulate(40_000, seed=1)
        assert draws.dtype == torch.int64
        error = (p.total / 40_000).sqrt()
        assert ((draws.double().mean(0) - p.mean).abs() < 4.5 * error).all()
        assert torch.equal(p.simulate(3, seed=2), p.simulate(3, seed=2))
    assert torch.allclose(
        predictives()[0].simulate(40_000).double().var(0), predictives()[0].total, rtol=0.05
    )


def test_metrics_of_counts() -> None:
    y = torch.tensor([0, 1, 3, 7])
    for p in (predictives(4, 4)[0], predictives(4, 4)[4]):
        found = regression_metrics(p, y)
        assert found["nll"] == pytest.approx(-p.log_prob(y).mean().item())
        assert 0.0 <= found["coverage_50"] <= found["coverage_95"] <= 100.0
        # The integral over z is a sum over counts.
        counts = torch.arange(400)
        below = exact_of(p).cdf(counts.numpy()[:, None, None]).mean(1)
        exact = ((below - (counts[:, None] >= y).numpy()) ** 2).sum(0).mean()
        many = copy.copy(p)
        object.__setattr__(many, "log_rates", p.log_rates.repeat(1, 500))
        assert crps(many, y.repeat(500)) == pytest.approx(exact, rel=0.01)


@loop_over("dtype", [torch.bfloat16, torch.float16])
def test_outputs_in_half_precision_have_means_in_single(dtype: torch.dtype) -> None:
    outputs = torch.tensor([[[1.0], [12.5]]], dtype=dtype)
    for likelihood in (PoissonLikelihood(), NegativeBinomialLikelihood()):
        p = likelihood.predictive(list(outputs), keep_samples=False)
        assert torch.allclose(p.mean, outputs[0].float().exp(), rtol=1e-6)
        assert torch.isfinite(p.total).all()


def test_subsets_and_joins() -> None:
    y = torch.tensor([[0, 1], [2, 3], [5, 8], [13, 21], [34, 55]])
    one, two = predictives()[4:6]
    joined = NegativeBinomialPredictive.joined([one, two])  # type: ignore[list-item]
    assert torch.allclose(joined.cdf(y), 0.5 * (one.cdf(y) + two.cdf(y)), rtol=1e-12)
    assert torch.allclose(joined.subset(range(6)).cdf(y), one.cdf(y), rtol=1e-12)
    assert joined.simulate(7).shape == (7, 5, 2)
    (poisson, *_), (other, *_) = predictives(), predictives(6, 5, 2, shift=2.0)
    both = PoissonPredictive.joined([poisson, other])  # type: ignore[list-item]
    assert torch.allclose(both.mean, 0.5 * (poisson.mean + other.mean))


@loop_over("dtype", [torch.float32, torch.float64])
@loop_over("output", [-1e4, -1e3, -100.0, 0.0, 29.0, 31.0, 88.0, 1e3, 1e4])
@loop_over("count", [0, 1000, 10**9])
def test_extreme_outputs_have_finite_densities(
    output: float, count: int, dtype: torch.dtype
) -> None:
    for likelihood in (PoissonLikelihood(), NegativeBinomialLikelihood()):
        for rho in (-1e3, 0.0, 1e3):
            for parameter in likelihood.parameters():
                with torch.no_grad():
                    parameter.fill_(rho)
            outputs = torch.tensor([[[output]]], dtype=dtype, requires_grad=True)
            found = likelihood.log_prob(outputs, torch.tensor([[count]]))
            assert found.isfinite().all()
            found.sum().backward()
            assert outputs.grad is not None
            assert outputs.grad.isfinite().all()
            if output == 1e4:
                assert outputs.grad.item() < 0.0, "training can leave the limit"
            assert all(p.grad is not None and p.grad.isfinite() for p in likelihood.parameters())
            p = likelihood.predictive([outputs[0].detach()], keep_samples=False)
            assert p.total.isfinite().all()
            assert all(bool((end >= 0).all()) for end in p.interval(0.9))


def test_one_weight_has_the_nll_of_the_integral() -> None:
    """E[-log p(y | w)] over a Gaussian weight, by quadrature and by the objective."""
    x, y = number(1.5).reshape(1, 1), torch.tensor([[4]])
    nodes, shares = np.polynomial.hermite_e.hermegauss(60)
    for likelihood in (PoissonLikelihood(), NegativeBinomialLikelihood(0.4).double()):
        net = nn.Linear(1, 1, bias=False).double()
        bnn = bf.BayesianModule(net, likelihood=likelihood, init_std=0.3, seed=1)
        weights = bnn.posterior.mean.item() + 0.3 * torch.from_numpy(nodes)
        each = -bnn.likelihood.log_prob((weights * 1.5).reshape(-1, 1, 1), y).detach().flatten()
        exact = float((each.numpy() * shares).sum() / shares.sum())
        spread = math.sqrt((((each.numpy() - exact) ** 2) * shares).sum() / shares.sum())
        elbo = bf.ELBO(bnn, num_data=1, num_samples=2000)
        with torch.no_grad():
            found = elbo(x, y).nll.item()
        error = spread / math.sqrt(2000)
        assert abs(found - exact) < 4.5 * error


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def test_the_dispersion_of_the_data_is_found() -> None:
    x = normals(4000, 1, seed=1)
    drawn = negative_binomial(1.0 + 0.5 * x, 0.7).rvs(random_state=0)
    torch.manual_seed(0)
    net = nn.Linear(1, 1).double()
    bnn = bf.BayesianModule(
        net, likelihood=NegativeBinomialLikelihood().double(), posterior=bf.Delta
    )
    elbo = bf.ELBO(bnn, num_data=4000, temperature=0.0)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        elbo(x, torch.from_numpy(drawn)).loss.backward()
        optimizer.step()
    assert isinstance(bnn.likelihood, NegativeBinomialLikelihood)
    assert bnn.likelihood.dispersion.item() == pytest.approx(0.7, rel=0.1)
    assert torch.allclose(bnn.posterior.mean, torch.tensor([0.5, 1.0]).double(), atol=0.06)


POISSON = PoissonLikelihood()


@loop_over(
    ("call", "message"),
    [
        (lambda: POISSON.log_prob(normals(2, 5), torch.full((5,), -1)), "from 0, got -1; for real"),
        (lambda: POISSON.log_prob(normals(2, 5), torch.full((5,), 0.5)), "from 0, got 0.5; for re"),
        (lambda: POISSON.log_prob(normals(2, 5), torch.full((5,), math.nan)), "got nan"),
        (lambda: POISSON.log_prob(normals(2, 5), torch.full((5,), math.inf)), "got inf"),
        (lambda: POISSON.log_prob(normals(2, 5), torch.ones(5) > 0), "bool; for labels use Bern"),
        (lambda: POISSON.log_prob(normals(2, 5, 1), torch.ones(5)), r"\(5, 1\), got \(5,\); noth"),
        (lambda: POISSON.log_prob(normals(5), torch.ones(())), r"\(N,\) or \(N, K\)"),
        (lambda: POISSON.error(normals(5), torch.full((5,), -1)), "from 0, got -1"),
        (lambda: POISSON.predictive([], keep_samples=False), "at least one weight sample"),
        (lambda: NegativeBinomialLikelihood(0.0), "above 1e-06 and finite, got 0.0; without"),
        (lambda: NegativeBinomialLikelihood(math.inf), "finite, got inf"),
        (lambda: NegativeBinomialPredictive(normals(2, 3), number(0.0)), "positive, got 0.0; with"),
        (lambda: PoissonPredictive(normals(3)), r"log_rates must have shape \(S, N, ...\)"),
        (lambda: predictives()[0].log_prob(torch.zeros(5)), r"\(5, 2\), got \(5,\)"),
        (lambda: predictives()[0].log_prob(torch.full((5, 2), 0.5)), "must be counts.*got 0.5"),
        (lambda: predictives()[0].quantile(0.0), "q must lie strictly between 0 and 1, got 0.0"),
    ],
)
def test_a_wrong_argument_raises(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("count", [14.0, 15.0, 16.0, 1e3, 1e5, 1e6, 1e7])
@pytest.mark.parametrize("ratio", [1e-3, 0.5, 0.999, 1.0, 1.001, 2.0, 1e3])
def test_great_counts_in_float32(count: float, ratio: float) -> None:
    y, log_rate = torch.tensor(count), torch.tensor(count * ratio).log()
    mean = math.exp(float(log_rate))
    # A rounding of the log rate changes the result by so much.
    rounding = 2e-6 * abs(mean - count)

    def check(found: Tensor, expected: float) -> None:
        assert float(found) == pytest.approx(expected, rel=3e-5, abs=3e-5 + rounding)

    check(poisson_log_prob(log_rate, y), stats.poisson.logpmf(count, mean))
    for dispersion in (1e-6, 0.01, 0.05, 0.5, 4.0, 100.0):
        alpha = torch.tensor(dispersion)
        in_double = negative_binomial_log_prob(log_rate.double(), y.double(), alpha.double())
        check(negative_binomial_log_prob(log_rate, y, alpha), float(in_double))
        r = 1.0 / float(alpha)
        by_scipy = stats.nbinom.logpmf(count, r, r / (r + mean))
        # scipy's own terms cancel, in double precision
        assert float(in_double) == pytest.approx(by_scipy, rel=1e-6, abs=1e-5)


@pytest.mark.parametrize("count", [3.0, 1e3])
def test_rates_that_overflow_have_no_gradients_of_nan(count: float) -> None:
    log_rates = torch.tensor([-100.0, 100.0], requires_grad=True)
    found = poisson_log_prob(log_rates, torch.full((2,), count))
    (gradient,) = torch.autograd.grad(found.sum(), log_rates)
    assert found[1].item() == -math.inf
    assert gradient.tolist() == [count, -math.inf]


@pytest.mark.parametrize("count", [0.0, 3.0, 20.0, 1e6])
@pytest.mark.parametrize("dispersion", [1e-30, 1e-3, 1.0, 1e3, 1e30])
def test_far_rates_have_finite_gradients(count: float, dispersion: float) -> None:
    log_rates = torch.tensor([-90.0, -50.0, 0.0, 50.0, 80.0], requires_grad=True)
    found = negative_binomial_log_prob(log_rates, torch.full((5,), count), torch.tensor(dispersion))
    (gradient,) = torch.autograd.grad(found.sum(), log_rates)
    assert bool(found.isfinite().all())
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize(
    ("p", "got"),
    [
        (PoissonPredictive(torch.tensor([[1.0, 2.0, 60.0]])), "1.14201e.26 for example 2"),
        (PoissonPredictive(torch.full((1, 3), 1000.0)), "inf for example 0"),
        (PoissonPredictive(torch.tensor([[9.0, 9.0], [1.0, math.nan]])), "nan for example 1"),
        (NegativeBinomialPredictive(torch.full((2, 50), 43.0), number(50.0)), "4.72784e.18 for"),
        (NegativeBinomialPredictive(torch.full((1, 9, 2), math.nan), number(1.0)), "nan for ex"),
    ],
)
def test_counts_that_do_not_fit_into_64_bits_raise(p: CountPredictive, got: str) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: p.simulate(20),
        lambda: p.quantile(0.9999),
        lambda: p.interval(0.9999),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=rf"mean must be a number below 2\^62, got {got}"):
            call()


def test_drawn_rates_and_quantiles_end_at_the_limit_of_64_bits() -> None:
    p = NegativeBinomialPredictive(torch.full((1, 50), 42.0), torch.tensor(50.0))
    draws = p.simulate(200)
    assert 2**61 < int(draws.max()) < 2**63 - 1
    assert int(draws.min()) >= 0
    assert p.quantile(0.9999).unique().tolist() == [2**62]


def test_rates_below_the_limit_are_drawn() -> None:
    draws = PoissonPredictive(torch.full((1, 50), 42.9)).simulate(20)
    assert 2**61 < int(draws.min()) < int(draws.max()) < 2**62


def test_a_rate_in_a_small_share_of_the_samples_does_not_spoil_low_quantiles() -> None:
    p = PoissonPredictive(torch.tensor([0.0, 0.0, 0.0, 60.0]).unsqueeze(1).double())
    assert p.quantile(0.5).tolist() == [1]


@pytest.mark.parametrize("place", [0.0, 0.5, 0.999])
def test_the_distribution_function_is_constant_between_counts(place: float) -> None:
    for p in predictives():
        for count in (-2.0, -1.0, 0.0, 1.0, 7.0):
            y = torch.full((5, 2), count, dtype=torch.float64)
            expected = exact_of(p).cdf(count + place).mean(0)
            np.testing.assert_allclose(p.cdf(y + place), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [0.0, 3.0, 20.0])
def test_a_rate_of_0_has_the_count_0_and_no_gradients_of_nan(
    count: float, dtype: torch.dtype
) -> None:
    expected = 0.0 if count == 0.0 else -math.inf
    for dispersion in (None, *DISPERSIONS):
        outputs = torch.tensor([[[-math.inf]], [[-math.inf]]], dtype=dtype, requires_grad=True)
        y, parameters = torch.full((1, 1), count), [outputs]
        likelihood: bf.Likelihood = PoissonLikelihood()
        if dispersion is not None:
            likelihood = NegativeBinomialLikelihood(dispersion).to(dtype)
            parameters += likelihood.parameters()
        found = likelihood.log_prob(outputs, y)
        assert found.tolist() == [[expected], [expected]]
        for gradient in torch.autograd.grad(found.sum(), parameters):
            assert not bool(gradient.isnan().any())
            assert bool((gradient == 0.0).all()) or count
        p = likelihood.predictive([outputs.detach()[0]], keep_samples=True)
        assert isinstance(p, CountPredictive)
        assert p.log_prob(y).tolist() == [expected]
        assert p.cdf(y - 0.5).item() == (0.0 if count == 0.0 else 1.0)
        assert p.cdf(y).item() == 1.0
        assert p.quantile(0.999).item() == p.simulate(3).max().item() == 0


def test_quantiles_of_great_rates_in_float32() -> None:
    log_rates = torch.tensor([[38.0]])
    p = PoissonPredictive(log_rates)
    mean = float(log_rates.double().exp())
    for q, expected in ((0.5, 0.0), (0.025, -1.95996)):
        found = (float(p.quantile(q)) - mean) / mean**0.5
        assert found == pytest.approx(expected, abs=0.01)
