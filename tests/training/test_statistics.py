"""Monte Carlo against exact values, at a stated error rate.

Seeds are fixed, so that these tests do not flicker: ``FALSE_ALARM`` is the chance that a right
library would have failed a family of comparisons for some seed, shared out by Bonferroni.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from tests import faults
from tests.cases import PRIORS
from tests.loops import loop_over
from torch import Tensor, nn

from bayesify import (
    ELBO,
    BayesianModule,
    CategoricalLikelihood,
    Gaussian,
    GaussianLikelihood,
    Laplace,
    Likelihood,
    MeanFieldGaussian,
    Prior,
    kl_divergence,
)
from bayesify.distributions.kl import has_closed_form
from bayesify.distributions.posteriors import WeightDraw
from bayesify.noise.keys import NoiseKey, Stream

FALSE_ALARM = 1e-3


def check_mean(samples: Tensor, expected: float, family: int, what: object = "") -> None:
    """A two-sided z-test that independent samples have this mean, one of ``family`` such tests."""
    error = samples.std().item() / math.sqrt(samples.numel())
    assert error > 0.0, "all samples are equal"
    z = (samples.mean().item() - expected) / error
    limit = stats.norm.isf(FALSE_ALARM / (2 * family))
    assert abs(z) < limit, f"{what}: z = {z:.2f}, beyond {limit:.2f}"


def test_the_z_test_keeps_its_error_rate() -> None:
    """Of 500 families of right comparisons, those that fail are as many as stated, with luck."""
    draws = np.random.default_rng(0).standard_normal((500, 5, 50))
    failed = 0
    for family in torch.from_numpy(draws):
        try:
            for row in family:
                check_mean(row, 0.0, family=len(family))
        except AssertionError:
            failed += 1
    # Student's t with 49 degrees of freedom has wider tails than the normal: 2.6e-3 a family.
    assert failed <= stats.binom.isf(1e-6, 500, 2.7e-3)
    with pytest.raises(AssertionError, match="beyond"):
        check_mean(torch.from_numpy(draws[0, 0]) + 1.0, 0.0, family=5)


WEIGHTS = [(0.5, 0.8), (0.0, 0.05), (-0.7, 0.6), (0.03, 1.5)]
COPIES = 100_000


def exact_kl(mean: float, std: float, prior: Prior) -> float:
    """KL of one weight: the closed form, or quadrature where there is none."""
    q = MeanFieldGaussian(torch.tensor([mean], dtype=torch.float64), std)
    if has_closed_form(q, prior):
        return kl_divergence(q, prior, method="closed").item()

    def integrand(w: np.ndarray) -> np.ndarray:
        log_q = stats.norm.logpdf(w, mean, std)
        return np.exp(log_q) * (log_q - prior.log_prob(torch.from_numpy(w)).numpy())

    edges = np.linspace(mean - 12.0 * std, mean + 12.0 * std, 801)
    return math.fsum(
        integrate.fixed_quad(integrand, low, high, n=8)[0]
        for low, high in itertools.pairwise(edges)
    )


def check_monte_carlo_kl(weights: list[tuple[float, float]] = WEIGHTS) -> None:
    """The Monte Carlo KL of many independent copies of one weight has the exact KL as its mean."""
    family = len(weights) * len(PRIORS)
    for number, (mean, std) in enumerate(weights):
        q = MeanFieldGaussian(torch.full((COPIES,), mean, dtype=torch.float64), std)
        noise = NoiseKey(5, Stream.TRAINING, number).normals(range(1), COPIES, dtype=torch.float64)
        draw = q.draw(noise)
        for name, prior in PRIORS.items():
            per_weight = (q.log_prob_of(draw) - prior.log_prob(draw.weights)).detach()
            total = kl_divergence(q, prior, draw, method="monte-carlo").item()
            assert total == pytest.approx(per_weight.sum().item(), rel=1e-12)
            check_mean(per_weight, exact_kl(mean, std, prior), family, (name, mean, std))


def test_monte_carlo_kl_is_unbiased() -> None:
    check_monte_carlo_kl()


@loop_over("weight", WEIGHTS)
@loop_over("fault", [faults.wider_draws, faults.density_off_by_a_constant])
def test_a_planted_fault_biases_the_kl_of_every_weight(
    weight: tuple[float, float], fault: faults.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="beyond"):
        check_monte_carlo_kl([weight])


@loop_over("name", PRIORS)
def test_half_a_kl_is_rejected(name: str) -> None:
    q = MeanFieldGaussian(torch.full((COPIES,), 0.5, dtype=torch.float64), 0.8)
    draw = q.draw(NoiseKey(5, Stream.TRAINING, 0).normals(range(1), COPIES, dtype=torch.float64))
    half = 0.5 * (q.log_prob_of(draw) - PRIORS[name].log_prob(draw.weights)).detach()
    with pytest.raises(AssertionError, match="beyond"):
        check_mean(half, exact_kl(0.5, 0.8, PRIORS[name]), 1)


def test_more_samples_average_more() -> None:
    """The variance of the Monte Carlo KL falls as 1 / S."""
    q = MeanFieldGaussian(torch.zeros(50, dtype=torch.float64), 0.5)
    variances = []
    for num_samples in (1, 16):
        values = [
            kl_divergence(
                q,
                Laplace(),
                q.draw(
                    NoiseKey(1, Stream.TRAINING, step).normals(
                        range(num_samples), 50, dtype=torch.float64
                    )
                ),
                method="monte-carlo",
            ).item()
            for step in range(200)
        ]
        variances.append(np.var(values, ddof=1))
    ratio = variances[0] / variances[1] / 16.0
    low, high = (stats.f.ppf(p, 199, 199) for p in (FALSE_ALARM / 2, 1.0 - FALSE_ALARM / 2))
    assert low < ratio < high


class Curve(nn.Module):
    """One weight w: outputs f(w x), which the likelihood reads."""

    def __init__(self, outputs: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.4], dtype=torch.float64))
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(self.w * x)


X = torch.tensor([[-1.0], [0.3], [2.0]], dtype=torch.float64)
TINY: dict[str, tuple[Callable[[Tensor], Tensor], Likelihood, Tensor]] = {
    "gaussian": (
        torch.tanh,
        GaussianLikelihood(std=0.4),
        torch.tensor([[-0.2], [0.5], [0.9]], dtype=torch.float64),
    ),
    "categorical": (
        lambda wx: torch.cat([wx, -wx.square(), torch.zeros_like(wx)], -1),
        CategoricalLikelihood(),
        torch.tensor([0, 1, 2]),
    ),
}


def check_expected_nll(name: str, *, fused: bool) -> None:
    """The mean of the ELBO's nll over steps, and of its gradient in mean and rho, by quadrature."""
    outputs, likelihood, targets = TINY[name]
    bnn = BayesianModule(
        Curve(outputs), likelihood=likelihood, prior=Gaussian(), init_std=0.7, seed=2
    )
    elbo = ELBO(bnn, num_data=3, num_samples=2, fused=fused)
    parameters = (bnn.posterior.mean, bnn.posterior.rho)
    rows = []
    for _ in range(1000):
        nll = elbo(X, targets).nll
        rows.append([nll.detach(), *torch.autograd.grad(nll, parameters)])
    sampled = torch.tensor(rows, dtype=torch.float64)

    nodes, node_weights = np.polynomial.hermite_e.hermegauss(80)
    node_weights = node_weights / node_weights.sum()
    mean = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    rho = bnn.posterior.rho.detach()[0].requires_grad_()
    exact = torch.zeros((), dtype=torch.float64)
    for node, share in zip(nodes, node_weights, strict=True):
        w = mean + torch.log1p(torch.exp(rho)) * node
        exact = exact - share * likelihood.log_prob(outputs(w * X)[None], targets).mean()
    expected = [exact, *torch.autograd.grad(exact, (mean, rho))]
    for column, value, what in zip(
        sampled.T, expected, ("nll", "slope in mean", "slope in rho"), strict=True
    ):
        check_mean(column, value.item(), family=6, what=(name, what))


@pytest.mark.slow
@loop_over("fused", [True, False])
@loop_over("name", TINY)
def test_expected_nll_and_its_gradient_are_unbiased(name: str, fused: bool) -> None:
    check_expected_nll(name, fused=fused)


def one_noise_for_all(
    self: NoiseKey, samples: range, size: int, *, dtype: torch.dtype, device: object = "cpu"
) -> Tensor:
    return torch.full((len(samples), size), 0.5, dtype=dtype)


def constant_noise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NoiseKey, "normals", one_noise_for_all)


def half_a_slope_in_rho(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: MeanFieldGaussian, noise: Tensor) -> WeightDraw:
        std = 0.5 * (self.full_std + self.full_std.detach())
        return WeightDraw(self.mean + std * noise, noise)

    patch.setattr(MeanFieldGaussian, "draw", wrong)


@pytest.mark.slow
@loop_over("name", TINY)
@loop_over("fault", [faults.variance_for_std, constant_noise, half_a_slope_in_rho])
def test_a_planted_fault_biases_the_expected_nll(
    name: str, fault: faults.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=r"beyond|equal"):
        check_expected_nll(name, fused=False)
