"""The gradients of Blundell et al. 2015, eqs 3 and 4, and finite differences, against autograd."""

from __future__ import annotations

import math

import pytest
import torch
from tests import faults
from tests.cases import PRIORS, Case, mlp, normals
from tests.loops import loop_over
from torch import Tensor, distributions, nn

from bayesify import (
    ELBO,
    BayesianModule,
    Gaussian,
    Laplace,
    MeanFieldGaussian,
    Prior,
    ScaleMixture,
    kl_divergence,
)
from bayesify.distributions import kl as divergence
from bayesify.distributions.kl import has_closed_form
from bayesify.distributions.softplus import inverse_softplus, log_softplus
from bayesify.noise.keys import NoiseKey, Stream


def log_prior(prior: Prior, weights: Tensor) -> Tensor:
    """log P(w), summed, by torch.distributions."""
    zero, one = weights.new_zeros(()), weights.new_ones(())
    if isinstance(prior, Gaussian):
        return distributions.Normal(zero, prior.std * one).log_prob(weights).sum()
    if isinstance(prior, Laplace):
        return distributions.Laplace(zero, prior.scale * one).log_prob(weights).sum()
    if not isinstance(prior, ScaleMixture):
        return prior.log_prob(weights).sum()
    mixture = distributions.MixtureSameFamily(
        distributions.Categorical(torch.tensor([prior.pi, 1.0 - prior.pi], dtype=weights.dtype)),
        distributions.Normal(
            torch.zeros(2, dtype=weights.dtype),
            torch.tensor([prior.std1, prior.std2], dtype=weights.dtype),
        ),
    )
    return mixture.log_prob(weights).sum()


def paper_gradients(
    bnn: BayesianModule, x: Tensor, y: Tensor, noise: Tensor, *, with_theta: bool = True
) -> tuple[Tensor, Tensor]:
    """Eqs 3 and 4 for one weight sample, term by term, from f(w, theta) with w a leaf."""
    mean = bnn.posterior.mean.detach().requires_grad_()
    rho = bnn.posterior.rho.detach().requires_grad_()
    weights = (mean + torch.log(1.0 + torch.exp(rho)) * noise).detach().requires_grad_()
    log_q = distributions.Normal(mean, torch.log(1.0 + torch.exp(rho))).log_prob(weights).sum()
    log_lik = -nn.functional.cross_entropy(bnn.run_with(weights, x), y, reduction="sum")
    f = log_q - log_prior(bnn.prior, weights) - log_lik
    df_dw, df_dmean, df_drho = torch.autograd.grad(f, (weights, mean, rho))
    if not with_theta:
        df_dmean, df_drho = torch.zeros_like(df_dmean), torch.zeros_like(df_drho)
    return df_dw + df_dmean, df_dw * noise / (1.0 + torch.exp(-rho.detach())) + df_drho


def check_paper_gradients(name: str, num_samples: int = 1, *, with_theta: bool = True) -> None:
    case = Case(name, "mean-field", "categorical")
    bnn = case.bnn()
    with torch.no_grad():
        bnn.posterior.rho.add_(normals(44, seed=7))
    x, y = case.data(9)
    elbo = ELBO(bnn, num_data=len(x), kl="monte-carlo", num_samples=num_samples, fused=False)
    elbo.step = 3
    (len(x) * elbo(x, y).loss).backward()
    noise = NoiseKey(bnn.seed, Stream.TRAINING, 3).normals(
        range(num_samples), 44, dtype=torch.float64
    )
    pairs = [paper_gradients(bnn, x, y, row, with_theta=with_theta) for row in noise]
    for number, parameter in enumerate((bnn.posterior.mean, bnn.posterior.rho)):
        expected = torch.stack([pair[number] for pair in pairs]).mean(0)
        assert expected.abs().min() > 1e-6, "every weight must have a gradient to compare"
        assert torch.allclose(parameter.grad, expected, rtol=1e-10, atol=1e-10), (
            f"gradient {number} off by {(parameter.grad - expected).abs().max():.3g}"
        )


@loop_over("num_samples", [1, 3])
@loop_over("name", PRIORS)
def test_gradients_are_the_papers(name: str, num_samples: int) -> None:
    check_paper_gradients(name, num_samples)


def test_the_second_half_of_the_papers_gradients_matters() -> None:
    with pytest.raises(AssertionError, match="off by"):
        check_paper_gradients("gaussian", with_theta=False)


@loop_over(
    "fault",
    [
        faults.kl_halved,
        faults.kl_not_divided,
        faults.wider_draws,
        faults.std_outside_the_graph,
        faults.density_without_its_parameters,
        faults.density_without_its_weights,
    ],
)
@loop_over("name", PRIORS)
def test_a_planted_fault_leaves_the_papers_gradients(
    name: str, fault: faults.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="off by"):
        check_paper_gradients(name)


class KL(nn.Module):
    """kl_divergence as a function of mean and rho, at fixed noise."""

    def __init__(self, prior: Prior, method: str) -> None:
        super().__init__()
        self.q = MeanFieldGaussian(torch.zeros(6, dtype=torch.float64), 1.0)
        self.prior, self.method, self.noise = prior, method, normals(2, 6, seed=8)

    def forward(self) -> Tensor:
        return kl_divergence(self.q, self.prior, self.q.draw(self.noise), method=self.method)


def check_kl_gradient(prior: Prior, method: str) -> None:
    """Finite differences of the value equal its gradient."""
    kl = KL(prior, method)
    mean = torch.tensor([0.0, 1e-3, -0.3, 0.7, -2.0, 4.0], dtype=torch.float64)
    stds = torch.tensor([0.2, 0.5, 1e-2, 1.0, 0.3, 3.0], dtype=torch.float64)

    def value(mean: Tensor, rho: Tensor) -> Tensor:
        return torch.func.functional_call(kl, {"q.mean": mean, "q.rho": rho}, ())

    point = (mean.requires_grad_(), inverse_softplus(stds).requires_grad_())
    assert torch.autograd.gradcheck(value, point, eps=1e-6, atol=1e-6, raise_exception=False)


METHODS = [
    (name, method)
    for name, prior in PRIORS.items()
    for method in ("closed", "monte-carlo")
    if method == "monte-carlo" or has_closed_form(KL(prior, method).q, prior)
]


@loop_over(("name", "method"), METHODS)
def test_kl_gradient_equals_finite_differences(name: str, method: str) -> None:
    check_kl_gradient(PRIORS[name], method)


@loop_over("part", ["mean", "log_std", "full_std"])
def test_a_kl_cut_from_part_of_the_graph_is_caught(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = divergence._CLOSED_FORMS[MeanFieldGaussian, Laplace]

    class Cut:
        def __init__(self, q: MeanFieldGaussian) -> None:
            for name in ("mean", "log_std", "full_std"):
                tensor = getattr(q, name)
                setattr(self, name, tensor.detach() if name == part else tensor)

    monkeypatch.setitem(
        divergence._CLOSED_FORMS, (MeanFieldGaussian, Laplace), lambda q, p: closed(Cut(q), p)
    )
    with pytest.raises(AssertionError):
        check_kl_gradient(PRIORS["laplace"], "closed")


RHOS = torch.tensor([-60.0, -37.0, -36.0, -35.0, -20.0, -3.0, 0.0, 1.0, 30.0, 39.0, 41.0, 90.0])


def check_log_softplus(function: object) -> None:
    rho = RHOS.double().requires_grad_()
    assert torch.autograd.gradcheck(function, rho, eps=1e-6, atol=1e-8, raise_exception=False)
    (slope,) = torch.autograd.grad(function(rho).sum(), rho)
    ratio = rho.sigmoid() / torch.log1p(rho.exp())
    assert torch.allclose(slope, ratio, rtol=1e-12, atol=0.0)


def test_log_softplus_has_the_stated_derivative() -> None:
    check_log_softplus(log_softplus)


@loop_over(
    "faulty",
    [
        lambda rho: torch.where(rho < -36.0, rho.detach(), log_softplus(rho)),
        lambda rho: log_softplus(rho.clamp_max(40.0)),
        lambda rho: nn.functional.softplus(rho),
        lambda rho: log_softplus(rho) + 1e-3 * rho.detach(),
    ],
)
def test_a_wrong_log_softplus_is_caught(faulty: object) -> None:
    with pytest.raises(AssertionError):
        check_log_softplus(faulty)


def test_gradients_reach_every_parameter_of_a_bayesian_mlp() -> None:
    bnn = BayesianModule(mlp(), init_std=0.1)
    x, y = Case("gaussian", "mean-field", "categorical").data(8)
    nll = ELBO(bnn, num_data=8)(x, y).nll
    nll.backward()
    assert bool((bnn.posterior.mean.grad != 0.0).all())
    assert bool((bnn.posterior.rho.grad != 0.0).all())


def test_second_derivatives_of_the_gaussian_kl() -> None:
    mean = torch.tensor([-0.7, 0.0, 1.3], dtype=torch.float64, requires_grad=True)
    rho = torch.tensor([-3.0, 0.2, 2.0], dtype=torch.float64, requires_grad=True)

    def kl(mean: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
        q = MeanFieldGaussian(torch.zeros(3, dtype=torch.float64), std=1.0)
        del q.mean, q.rho
        q.mean, q.rho = mean, rho
        return kl_divergence(q, Gaussian(0.6))

    assert torch.autograd.gradgradcheck(kl, (mean, rho))


def test_second_derivatives_of_a_mixture_are_finite() -> None:
    w = torch.tensor([0.0, 1e-4, 0.02, 3.0], dtype=torch.float64, requires_grad=True)
    [first] = torch.autograd.grad(ScaleMixture().log_prob(w).sum(), w, create_graph=True)
    [second] = torch.autograd.grad(first.sum(), w)
    assert bool(second.isfinite().all())
    assert second[-1].item() == pytest.approx(-1.0)  # that of the component with std 1


def test_the_density_of_a_mixture_at_a_weight_whose_square_overflows() -> None:
    for weight in (1e20, math.inf):
        w = torch.tensor([weight], requires_grad=True)
        assert ScaleMixture().log_prob(w).item() == -math.inf
