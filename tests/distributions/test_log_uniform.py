"""The log-uniform prior: its KL against quadrature, and what an improper prior may not do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from tests.cases import Case, mlp, normals
from tests.loops import loop_over
from torch import Tensor

import bayesify as bf
from bayesify.distributions import log_magnitude
from bayesify.distributions.log_magnitude import log_magnitude_excess
from bayesify.referee.density import PosteriorDensity

RATIOS = (0.0, 1e-7, 0.003, 0.05, 0.4, 1.0, 2.0, 3.7, 8.0, 25.0, 300.0)
STDS = (1e-9, 0.02, 1.0, 400.0)

KL = Callable[[float, float], float]


def one_weight(mean: float, std: float) -> bf.MeanFieldGaussian:
    return bf.MeanFieldGaussian(torch.tensor([mean], dtype=torch.float64), std)


def exact(mean: float, std: float) -> float:
    return bf.kl_divergence(one_weight(mean, std), bf.LogUniform()).item()


def mean_log_magnitude(mean: float, std: float) -> float:
    """E log |w|, integrated over |w| / std in panels that are narrow near 0."""
    z = mean / std
    near, far = np.geomspace(1e-22, 0.25, 80), np.arange(0.5, z + 14.0, 0.25)
    edges = [0.0, *near, *far[far > z - 14.0]] if z < 20.0 else far[far > z - 14.0]

    def integrand(size: np.ndarray) -> np.ndarray:
        return np.log(size) * (stats.norm.pdf(size - z) + stats.norm.pdf(size + z))

    panels = itertools.pairwise(edges)
    total = math.fsum(integrate.fixed_quad(integrand, *panel, n=20)[0] for panel in panels)
    return total + math.log(std)


def check_quadrature(kl: KL) -> None:
    """KL(q || p) - KL(q0 || p), where q0 has mean 0 and the same std and so the same entropy."""
    for std in STDS:
        centred = mean_log_magnitude(0.0, std)
        for ratio in RATIOS:
            expected = mean_log_magnitude(ratio * std, std) - centred
            assert kl(ratio * std, std) == pytest.approx(expected, rel=1e-10, abs=1e-12), ratio


def test_the_kl_equals_quadrature() -> None:
    check_quadrature(exact)


def molchanov(mean: float, std: float) -> float:
    """The approximation of Molchanov et al. 2017, eq. 14, shifted to 0 at mean 0."""
    if mean == 0.0:
        return 0.0
    log_alpha = 2.0 * math.log(std / abs(mean))
    soft = 1.0 / (1.0 + math.exp(-1.87320 - 1.48695 * log_alpha))
    return 0.63576 * (1.0 - soft) + 0.5 * math.log1p(math.exp(-log_alpha))


FAULTY: dict[str, KL] = {
    "the published approximation": molchanov,
    "mean field of half the width": lambda mean, std: exact(mean, 0.5 * std),
    "variance for std": lambda mean, std: exact(mean, std**2),
    "another constant": lambda mean, std: exact(mean, std) + 1e-9,
    "off by 1e-9": lambda mean, std: exact(mean, std) * (1.0 + 1e-9),
}


@loop_over("kl", FAULTY.values())
def test_a_planted_fault_leaves_the_quadrature(kl: KL) -> None:
    with pytest.raises(AssertionError):
        check_quadrature(kl)


def test_the_published_approximation_is_near() -> None:
    errors = [abs(molchanov(z, 1.0) - exact(z, 1.0)) for z in np.geomspace(1e-3, 1e3, 200)]
    assert max(errors) < 0.01


def check_slopes(slope: Callable[[Tensor], Tensor]) -> None:
    """d KL / d mean = sqrt(2) D(z / sqrt 2) / std with Dawson's D, from scipy."""
    ratios = torch.logspace(-8, 8, 400, dtype=torch.float64)
    ratios = torch.cat([-ratios, torch.zeros(1, dtype=torch.float64), ratios])
    expected = math.sqrt(2.0) * special.dawsn(ratios.numpy() / math.sqrt(2.0))
    assert np.allclose(slope(ratios).numpy(), expected, rtol=1e-11, atol=0.0)


def slope_in_mean(ratios: Tensor) -> Tensor:
    q = bf.MeanFieldGaussian(0.3 * ratios, 0.3)
    bf.kl_divergence(q, bf.LogUniform()).backward()
    assert torch.allclose(q.mean.grad * q.mean, -q.rho.grad / q.log_std_slope, rtol=1e-10)
    return 0.3 * q.mean.grad


def test_the_gradient_is_dawsons_integral() -> None:
    check_slopes(slope_in_mean)


def test_a_coarse_table_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_magnitude, "_STEPS", 128)
    log_magnitude._nodes.cache_clear()
    with pytest.raises(AssertionError):
        check_slopes(slope_in_mean)
    monkeypatch.undo()
    log_magnitude._nodes.cache_clear()
    check_slopes(slope_in_mean)


def test_both_derivatives_agree_with_differences() -> None:
    mean = torch.tensor([0.0, 1e-3, -0.3, 0.7, 4.0], dtype=torch.float64, requires_grad=True)
    log_std = torch.tensor([-1.5, 0.2, -2.0, 1.0, 0.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(log_magnitude_excess, (mean, log_std))
    assert torch.autograd.gradgradcheck(log_magnitude_excess, (mean, log_std))


@loop_over("dtype", [torch.float32, torch.float64])
def test_extremes_are_finite(dtype: torch.dtype) -> None:
    means = torch.tensor([0.0, 1e-30, -1e-10, 1.0, 1e10, 1e30], dtype=dtype).repeat(5)
    rho = torch.tensor([-100.0, -30.0, 0.0, 20.0, 100.0], dtype=dtype).repeat_interleave(6)
    q = bf.MeanFieldGaussian(means, 1.0)
    with torch.no_grad():
        q.rho.copy_(rho)
    each = log_magnitude_excess(q.mean, q.log_std)
    assert bool((each >= 0.0).all())
    each.sum().backward()
    for tensor in (each, q.mean.grad, q.rho.grad):
        assert bool(tensor.isfinite().all())
    for chunk in each.detach().view(5, 6):  # it grows with the mean
        assert bool((chunk.diff() >= 0.0).all())


def test_the_kl_depends_on_the_ratio_only() -> None:
    q, p = bf.MeanFieldGaussian(normals(9), 0.4), bf.LogUniform()
    wide = bf.MeanFieldGaussian(-50.0 * q.mean.detach(), 20.0)
    assert bf.kl_divergence(wide, p).item() == pytest.approx(bf.kl_divergence(q, p).item(), 1e-12)


def test_structured_posteriors_have_the_kl_of_their_marginals() -> None:
    bnn = bf.BayesianModule(mlp(), posterior=bf.FullGaussian(), prior=bf.LogUniform(), init_std=0.2)
    q = bnn.posterior
    alone = bf.MeanFieldGaussian(q.mean.detach(), q.std.detach())
    expected = bf.kl_divergence(alone, bf.LogUniform()) + q.total_correlation()
    assert bf.kl_divergence(q, bnn.weight_prior).item() == pytest.approx(expected.item(), rel=1e-9)


def test_there_is_no_density() -> None:
    x, y = Case("gaussian", "delta", "categorical").data(6)
    with pytest.raises(TypeError, match="LogUniform prior is improper"):
        bf.ELBO(bf.BayesianModule(mlp(), prior=bf.LogUniform(), posterior=bf.Delta), num_data=6)(
            x, y
        )
    bnn = bf.BayesianModule(mlp(), prior=bf.LogUniform())
    density = PosteriorDensity(bnn, x, y, temperature=1.0)  # of Hamiltonian Monte Carlo
    with pytest.raises(TypeError, match="LogUniform prior is improper"):
        density(density.centre)
    with pytest.raises(TypeError, match="no Monte Carlo KL"):
        bf.ELBO(bnn, num_data=6, kl="monte-carlo")(x, y)


def test_there_is_no_certificate() -> None:
    net = mlp(torch.float32)
    for prior in (bf.LogUniform(), bf.ByGroup({"0.*": bf.Gaussian(), "*": bf.LogUniform()})):
        with pytest.raises(ValueError, match="a proper prior"):
            bf.PACBayesObjective(bf.BayesianModule(net, prior=prior), num_data=100)


@pytest.mark.filterwarnings("ignore::bayesify.training.convergence.ConvergenceWarning")
def test_training_reports_no_free_energy() -> None:
    x, y = Case("gaussian", "mean-field", "categorical").data(8, torch.float32)
    for prior, reported in ((bf.LogUniform(), False), (bf.Gaussian(), True)):
        bnn = bf.BayesianModule(mlp(torch.float32), prior=prior)
        rows = bf.fit(bf.ELBO(bnn, num_data=8), [(x, y)], epochs=2)
        assert (rows[-1]["free_energy"] is not None) is reported
        assert reported or rows[-1]["free_energy_untrained"] is None
        assert math.isfinite(rows[-1]["loss"])
