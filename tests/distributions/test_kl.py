"""Closed-form KLs against quadrature, and what is counted in them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from tests.cases import PRIORS, mlp, normals
from tests.loops import loop_over
from torch import Tensor, nn

from bayesify import (
    BayesianModule,
    Delta,
    EmpiricalGaussian,
    Gaussian,
    Laplace,
    MeanFieldGaussian,
    Prior,
    ScaleMixture,
    kl_divergence,
    prune,
)
from bayesify.distributions import closed_forms
from bayesify.distributions import kl as divergence
from bayesify.distributions.kl import has_closed_form

MEANS = (0.0, 1e-7, 0.02, -0.8, 5.0, -300.0)
STDS = (1e-9, 1e-3, 0.25, 2.0, 400.0)
SCALES = (1e-3, 0.5, 1.0, 50.0)
GRID = list(itertools.product(MEANS, STDS, SCALES))
CLOSED: dict[str, Callable[[float], Prior]] = {"gaussian": Gaussian, "laplace": Laplace}

KL = Callable[[MeanFieldGaussian, Prior], Tensor]


def kl_by_quadrature(mean: float, std: float, log_prior: Callable[..., np.ndarray]) -> float:
    """E_q[log q - log p] of one weight, integrated over z = (w - mean) / std, split where w = 0."""

    def integrand(z: np.ndarray) -> np.ndarray:
        log_q = stats.norm.logpdf(z) - math.log(std)
        return stats.norm.pdf(z) * (log_q - log_prior(mean + std * z))

    kink = -mean / std
    edges = sorted({-14.0, -5.0, 0.0, 5.0, 14.0} | ({kink} if abs(kink) < 14.0 else set()))
    return math.fsum(
        integrate.fixed_quad(integrand, low, high, n=60)[0]
        for low, high in itertools.pairwise(edges)
    )


def log_density(name: str, scale: float) -> Callable[..., np.ndarray]:
    if name == "gaussian":
        return lambda w: stats.norm.logpdf(w, scale=scale)
    # scipy's own logpdf of a Laplace density underflows in the tails.
    return lambda w: -np.abs(w) / scale - math.log(2.0 * scale)


def one_weight(mean: float, std: float) -> MeanFieldGaussian:
    return MeanFieldGaussian(torch.tensor([mean], dtype=torch.float64), std)


def check_closed_form(name: str, kl: KL) -> None:
    for mean, std, scale in GRID:
        expected = kl_by_quadrature(mean, std, log_density(name, scale))
        got = kl(one_weight(mean, std), CLOSED[name](scale)).item()
        assert got == pytest.approx(expected, rel=1e-8, abs=1e-8), (mean, std, scale)


def closed(q: MeanFieldGaussian, p: Prior) -> Tensor:
    return kl_divergence(q, p, method="closed")


def test_the_quadrature_agrees_with_itself_at_a_higher_order() -> None:
    for mean, std, scale in [(0.02, 0.25, 0.5), (-0.8, 400.0, 1e-3), (5.0, 2.0, 50.0)]:
        adaptive, _ = integrate.quad(
            lambda z, m=mean, s=std, b=scale: (
                stats.norm.pdf(z)
                * (stats.norm.logpdf(z) - math.log(s) + abs(m + s * z) / b + math.log(2.0 * b))
            ),
            -14.0,
            14.0,
            points=[-mean / std],
            epsabs=1e-12,
            epsrel=1e-12,
            limit=200,
        )
        fixed = kl_by_quadrature(mean, std, log_density("laplace", scale))
        assert fixed == pytest.approx(adaptive, rel=1e-10)


@loop_over("name", CLOSED)
def test_closed_form_equals_quadrature(name: str) -> None:
    check_closed_form(name, closed)


LISTED = [name for name, p in PRIORS.items() if has_closed_form(one_weight(0.0, 1.0), p)]


@loop_over("name", LISTED)
def test_closed_form_of_every_listed_prior_is_that_of_its_density(name: str) -> None:
    prior = PRIORS[name]
    for mean, std in itertools.product(MEANS, STDS):
        expected = kl_by_quadrature(
            mean, std, lambda w: prior.log_prob(torch.from_numpy(w)).numpy()
        )
        assert closed(one_weight(mean, std), prior).item() == pytest.approx(expected, rel=1e-8)


def _no_log_scale(q: MeanFieldGaussian, p: Prior) -> Tensor:
    return closed(q, p) - math.log(getattr(p, "std", None) or p.scale)


FAULTY: dict[str, KL] = {
    "halved": lambda q, p: 0.5 * closed(q, p),
    "std times 1.05": lambda q, p: closed(MeanFieldGaussian(q.mean, 1.05 * q.std), p),
    "variance for std": lambda q, p: closed(MeanFieldGaussian(q.mean, q.std.square()), p),
    "constant term off": lambda q, p: closed(q, p) + 0.5,
    "without the log of the scale": _no_log_scale,
    "mean forgotten": lambda q, p: closed(MeanFieldGaussian(0.0 * q.mean, q.std), p),
    "off by 1e-7": lambda q, p: closed(q, p) * (1.0 + 1e-7),
}


@loop_over("name", CLOSED)
@loop_over("kl", FAULTY.values())
def test_a_planted_fault_leaves_the_quadrature(name: str, kl: KL) -> None:
    with pytest.raises(AssertionError):
        check_closed_form(name, kl)


@loop_over("std", [1e-6, 0.3, 1.0, 1e4])
def test_kl_of_the_prior_from_itself_is_zero(std: float) -> None:
    q = MeanFieldGaussian(torch.zeros(7, dtype=torch.float64), std)
    assert abs(kl_divergence(q, Gaussian(std)).item()) < 1e-12
    assert kl_divergence(q, Gaussian(1.001 * std)).item() > 1e-6


def test_kl_is_not_negative_and_grows_with_the_mean() -> None:
    means = torch.linspace(0.0, 3.0, 13, dtype=torch.float64)
    for prior in (Gaussian(0.5), Laplace(0.5)):
        values = [closed(one_weight(float(mean), 0.4), prior).item() for mean in means]
        assert values[0] >= 0.0
        assert all(low < high for low, high in itertools.pairwise(values))
        mirrored = closed(one_weight(-3.0, 0.4), prior).item()
        assert mirrored == pytest.approx(values[-1], rel=1e-14)


def test_auto_takes_the_closed_form_where_there_is_one() -> None:
    q = MeanFieldGaussian(normals(5), 0.4)
    draw = q.draw(normals(3, 5, seed=1))
    for prior in PRIORS.values():
        expected = "closed" if has_closed_form(q, prior) else "monte-carlo"
        got = kl_divergence(q, prior, draw)
        assert torch.equal(got, kl_divergence(q, prior, draw, method=expected))
        assert not torch.equal(got, kl_divergence(q, prior, draw, method="monte-carlo")) or (
            expected == "monte-carlo"
        )
    assert [has_closed_form(q, p) for p in PRIORS.values()] == [True, True, False, False]


class TiedTwice(nn.Module):
    """One weight matrix used by two layers, and a bias of its own in each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@loop_over("prior", PRIORS.values())
def test_a_tied_weight_is_counted_once(prior: Prior) -> None:
    net = TiedTwice().double()
    bnn = BayesianModule(net, prior=prior, init_std=0.2)
    assert bnn.layout.num_weights == 9 + 3 + 3
    parts = [net.first.weight, net.first.bias, net.second.bias]
    noise = normals(2, 15, seed=3)
    whole = kl_divergence(bnn.posterior, prior, bnn.posterior.draw(noise))
    total = torch.zeros((), dtype=torch.float64)
    for part, part_noise in zip(parts, noise.split([9, 3, 3], dim=1), strict=True):
        q = MeanFieldGaussian(part.detach().flatten(), 0.2)
        total = total + kl_divergence(q, prior, q.draw(part_noise))
    assert whole.item() == pytest.approx(total.item(), rel=1e-12)


def check_pruned_weights_leave(prior: Prior, method: str) -> None:
    bnn = BayesianModule(mlp(), prior=prior, init_std=0.2)
    small = prune(bnn, 0.4)
    kept = small.posterior.mask
    noise = normals(3, 44, seed=4)
    survivors = MeanFieldGaussian(bnn.posterior.mean[kept], 0.2)
    expected = kl_divergence(survivors, prior, survivors.draw(noise[:, kept]), method=method)
    got = kl_divergence(small.posterior, prior, small.posterior.draw(noise), method=method)
    assert int(kept.sum()) == 27
    assert got.item() == pytest.approx(expected.item(), rel=1e-12)
    got.backward()
    assert torch.equal(small.posterior.rho.grad != 0.0, kept)
    assert bool((small.posterior.mean.grad[~kept] == 0.0).all())


METHODS = [
    (name, method)
    for name, prior in PRIORS.items()
    for method in ("closed", "monte-carlo")
    if method == "monte-carlo" or has_closed_form(one_weight(0.0, 1.0), prior)
]


@loop_over(("name", "method"), METHODS)
def test_pruned_weights_leave_the_kl(name: str, method: str) -> None:
    check_pruned_weights_leave(PRIORS[name], method)


@loop_over(("name", "method"), METHODS)
def test_counting_pruned_weights_is_caught(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "_masked_sum", lambda _, per_weight: per_weight.sum())
    with pytest.raises(AssertionError):
        check_pruned_weights_leave(PRIORS[name], method)


def test_the_posteriors_density_is_the_gaussian() -> None:
    q = MeanFieldGaussian(normals(6), torch.logspace(-3, 2, 6, dtype=torch.float64))
    weights = normals(3, 6, seed=9)
    exact = stats.norm.logpdf(weights.numpy(), q.mean.detach().numpy(), q.std.detach().numpy())
    assert np.allclose(q.log_prob(weights).detach().numpy(), exact, rtol=1e-12)
    draw = q.draw(normals(3, 6, seed=10))
    assert torch.allclose(q.log_prob(draw.weights), q.log_prob_of(draw), rtol=1e-11)


def check_normalised(prior: Prior) -> None:
    """The integral of the density is 1; a sum over scales from far below its width to far above."""
    widths = [getattr(prior, name, None) for name in ("std", "scale", "std1", "std2")]
    narrow, wide = (choose(w for w in widths if w is not None) for choose in (min, max))
    # Of a density with tails w^-(df + 1), 1e-13 lies beyond 1e13^(1 / df).
    reach = 60.0 * max(1.0, 1e13 ** (1.0 / getattr(prior, "df", math.inf)))
    edges = [0.0, *np.geomspace(narrow / 10.0, wide * reach, 60)]
    half = math.fsum(
        integrate.fixed_quad(
            lambda w: prior.log_prob(torch.from_numpy(w)).exp().numpy(), low, high, n=40
        )[0]
        for low, high in itertools.pairwise(edges)
    )
    assert 2.0 * half == pytest.approx(1.0, rel=1e-11), prior


def test_priors_are_normalised_densities() -> None:
    for prior in (*PRIORS.values(), ScaleMixture(), Gaussian(), Laplace()):
        check_normalised(prior)


def check_second_derivatives(prior: Prior) -> None:
    """Finite differences of the gradient, in float64."""

    def kl(mean: Tensor, rho: Tensor) -> Tensor:
        q = MeanFieldGaussian(torch.zeros(5, dtype=torch.float64), std=1.0)
        del q.mean, q.rho
        q.mean, q.rho = mean, rho
        return closed(q, prior)

    mean = torch.tensor([0.0, 1e-3, -0.3, 0.7, 4.0], dtype=torch.float64, requires_grad=True)
    rho = torch.tensor([-1.5, 0.2, -3.0, 2.0, 1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(kl, (mean, rho), raise_exception=False)


@loop_over("name", LISTED)
def test_second_derivatives_are_right(name: str) -> None:
    check_second_derivatives(PRIORS[name])


def test_slopes_cut_from_the_graph_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = closed_forms.mean_magnitude_gradients
    monkeypatch.setattr(
        closed_forms, "mean_magnitude_gradients", lambda *a: tuple(t.detach() for t in right(*a))
    )
    with pytest.raises(AssertionError):
        check_second_derivatives(PRIORS["laplace"])


@loop_over("std", [1e-30, 1e-20, 1e-3])
def test_slopes_of_the_laplace_kl_are_stable_in_float32(std: float) -> None:
    q = MeanFieldGaussian(torch.tensor([0.0, std, -1.0, 1e10, -1e-25]), std)
    exact = MeanFieldGaussian(q.mean.detach().double(), 1.0)
    with torch.no_grad():
        exact.rho.copy_(q.rho)
    for posterior in (q, exact):
        closed(posterior, Laplace(0.6)).backward()
    assert torch.allclose(q.mean.grad.double(), exact.mean.grad, rtol=1e-4, atol=1e-6)
    assert torch.allclose(q.rho.grad.double(), exact.rho.grad, rtol=1e-5)
    first = torch.autograd.grad(closed(q, Laplace(0.6)), [q.mean, q.rho], create_graph=True)
    second = torch.autograd.grad(torch.cat(first).sum(), [q.mean, q.rho])
    assert bool(torch.cat(second).isfinite().all())


def test_a_draw_must_hold_whole_weight_vectors() -> None:
    """Without the axis of samples the KL would be divided by the number of weights."""
    q, prior = MeanFieldGaussian(torch.zeros(1000), std=1.0), ScaleMixture()
    noise = torch.randn(2, 1000)
    assert bool(kl_divergence(q, prior, q.draw(noise)) > 0.0)
    for wrong in (noise[0], noise[:0], noise[None]):
        with pytest.raises(ValueError, match=r"S weight vectors, shape \(S, 1000\) with S of at"):
            kl_divergence(q, prior, q.draw(wrong))
    for wrong in (noise[:, :1], noise[:, :999]):
        with pytest.raises(ValueError, match=r"noise must have shape \(S, 1000\)"):
            q.draw(wrong)


@pytest.mark.parametrize("prior", [Gaussian(1.0), ScaleMixture(), EmpiricalGaussian(1)])
def test_a_point_has_no_kl(prior: Prior) -> None:
    with pytest.raises(TypeError, match=r"a Delta posterior has no density, .*; use ELBO"):
        kl_divergence(Delta(torch.ones(5)), prior)
