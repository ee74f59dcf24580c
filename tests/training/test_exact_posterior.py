"""Models whose posterior is known in closed form: bayesify's objective must find it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from scipy import stats
from tests import faults
from tests.cases import normals
from tests.loops import loop_over
from torch import Tensor, nn

from bayesify import ELBO, BayesianModule, Gaussian, GaussianLikelihood
from bayesify.distributions.softplus import inverse_softplus
from bayesify.noise.keys import NoiseKey


class Regression(NamedTuple):
    """y = x w + noise_std * e, with the prior w_i ~ N(0, prior_std^2)."""

    x: Tensor
    y: Tensor
    noise_std: float
    prior_std: float

    @property
    def precision(self) -> Tensor:
        """The precision of the exact posterior, shape (D, D)."""
        eye = torch.eye(self.x.shape[1], dtype=self.x.dtype)
        return self.x.T @ self.x / self.noise_std**2 + eye / self.prior_std**2

    @property
    def mean(self) -> Tensor:
        """The mean of the exact posterior, shape (D,)."""
        return torch.linalg.solve(self.precision, self.x.T @ self.y[:, 0] / self.noise_std**2)

    @property
    def log_evidence(self) -> float:
        """log p(y), from the marginal Gaussian of y."""
        covariance = self.prior_std**2 * self.x @ self.x.T
        covariance += self.noise_std**2 * torch.eye(len(self.x), dtype=self.x.dtype)
        return float(stats.multivariate_normal.logpdf(self.y[:, 0].numpy(), cov=covariance.numpy()))

    def bnn(self, copies: int = 1) -> BayesianModule:
        """The same model, with several copies of its output side by side; its mean is 0."""
        net = nn.Linear(self.x.shape[1], copies, bias=False, dtype=self.x.dtype)
        nn.init.zeros_(net.weight)
        return BayesianModule(
            net,
            likelihood=GaussianLikelihood(self.noise_std),
            prior=Gaussian(self.prior_std),
            init_std=0.1,
        )


def correlated_regression() -> Regression:
    mixing = 0.5 + torch.eye(4, dtype=torch.float64)
    x = normals(24, 4, seed=3) @ mixing
    weights = torch.tensor([[1.0], [-0.5], [0.3], [0.0]], dtype=torch.float64)
    return Regression(x, x @ weights + 2.0 * normals(24, 1, seed=4), 2.0, 0.25)


def sigma_points(
    key: NoiseKey,
    samples: range,
    size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: object = "cpu",
) -> Tensor:
    """Noise of mean 0 and covariance 1 exactly: Monte Carlo without error for a quadratic nll."""
    assert len(samples) == 2 * size
    points = size**0.5 * torch.eye(size, dtype=dtype)
    return torch.cat([points, -points])


def minimise_exactly(model: Regression) -> tuple[Tensor, Tensor]:
    """Means and stds at the minimum of the ELBO under ``sigma_points``."""
    bnn = model.bnn()
    elbo = ELBO(bnn, num_data=len(model.x), num_samples=2 * model.x.shape[1], fused=False)
    optimizer = torch.optim.LBFGS(
        bnn.parameters(),
        max_iter=300,
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = elbo(model.x, model.y).loss
        loss.backward()
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoiseKey, "normals", sigma_points)
        optimizer.step(closure)
    return bnn.posterior.mean.detach(), bnn.posterior.std.detach()


def minimise_by_sampling(
    model: Regression, copies: int = 1000, *, fused: bool = True
) -> tuple[Tensor, Tensor]:
    """Means and stds after training with the library's own noise.

    They are averaged over the last two thirds of training, and over independent copies of the
    model that share nothing but the optimiser, which spares time.
    """
    bnn = model.bnn(copies)
    targets = model.y.expand(-1, copies)
    elbo = ELBO(bnn, num_data=len(model.x), num_samples=4, fused=fused)
    optimizer = torch.optim.Adam(bnn.parameters(), lr=0.03)
    steps = 400
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    means, stds = [], []
    for step in range(steps):
        optimizer.zero_grad()
        elbo(model.x, targets).loss.backward()
        optimizer.step()
        schedule.step()
        if step >= steps // 3:
            means.append(bnn.posterior.mean.detach().view(copies, -1).mean(0))
            stds.append(bnn.posterior.std.detach().view(copies, -1).mean(0))
    return torch.stack(means).mean(0), torch.stack(stds).mean(0)


def check_optimum(
    model: Regression, found: tuple[Tensor, Tensor], mean_tolerance: float, var_tolerance: float
) -> None:
    """The mean-field optimum has the posterior's mean, and 1 / its diagonal precision."""
    mean, std = found
    exact_std = torch.linalg.inv(model.precision).diagonal().sqrt()
    error_mean = ((mean - model.mean) / exact_std).abs().max()
    assert error_mean < mean_tolerance, f"mean off by {error_mean:.4f} posterior std"
    error_var = (std.square() * model.precision.diagonal() - 1.0).abs().max()
    assert error_var < var_tolerance, f"variance off by {100 * error_var:.3f} %"


def test_the_regression_is_a_hard_enough_case() -> None:
    model = correlated_regression()
    precision = model.precision
    share = 1.0 / model.prior_std**2 / precision.diagonal()
    assert share.min() > 0.3, "the prior must matter"
    assert share.max() < 0.8, "the data must matter"
    scale = precision.diagonal().sqrt()
    correlation = precision / torch.outer(scale, scale) - torch.eye(4)
    assert correlation.abs().max() > 0.3, "the posterior must be correlated"
    assert (model.mean * scale).abs().max() > 2.0, "the mean must differ from the prior's"


def test_the_optimum_is_exact_without_monte_carlo_error() -> None:
    model = correlated_regression()
    check_optimum(model, minimise_exactly(model), 1e-6, 1e-6)


@faults.each_objective_fault
def test_a_planted_fault_moves_the_optimum(
    fault: faults.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    model = correlated_regression()
    with pytest.raises(AssertionError, match="off by"):
        check_optimum(model, minimise_exactly(model), 0.02, 0.01)


def test_training_with_sampled_noise_finds_the_optimum() -> None:
    model = correlated_regression()
    check_optimum(model, minimise_by_sampling(model), 0.02, 0.01)


@pytest.mark.slow
def test_training_with_draws_too_wide_misses_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.wider_draws(monkeypatch)
    model = correlated_regression()
    with pytest.raises(AssertionError, match="variance off by"):
        check_optimum(model, minimise_by_sampling(model, fused=False), 0.02, 0.01)


def one_weight_at_its_posterior() -> tuple[Regression, BayesianModule]:
    x = normals(7, 1, seed=5)
    model = Regression(x, 0.8 * x + 0.5 * normals(7, 1, seed=6), 0.5, 1.3)
    bnn = model.bnn()
    with torch.no_grad():
        bnn.posterior.mean.copy_(model.mean)
        bnn.posterior.rho.copy_(inverse_softplus(model.precision.diagonal().rsqrt()))
    return model, bnn


def check_every_sample_is_the_evidence(
    model: Regression, bnn: BayesianModule, *, fused: bool
) -> None:
    """log p(y|w) + log p(w) - log q(w) = log p(y) for every w, where q is the posterior."""
    num_data = len(model.x)
    for num_samples in (1, 2, 7):
        elbo = ELBO(bnn, num_data=num_data, kl="monte-carlo", num_samples=num_samples, fused=fused)
        for step in range(20):
            free_energy = num_data * elbo(model.x, model.y).loss.item()
            error = abs(free_energy + model.log_evidence)
            assert error < 1e-10, f"S={num_samples}, step {step}: off by {error:.3g} nats"


@loop_over("fused", [True, False])
def test_every_sample_of_the_elbo_is_the_log_evidence(fused: bool) -> None:
    check_every_sample_is_the_evidence(*one_weight_at_its_posterior(), fused=fused)


@loop_over(
    "fault",
    [
        faults.kl_halved,
        faults.kl_not_divided,
        faults.wider_draws,
        faults.variance_for_std,
        faults.density_off_by_a_constant,
    ],
)
def test_a_planted_fault_leaves_the_log_evidence(
    fault: faults.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="nats"):
        check_every_sample_is_the_evidence(*one_weight_at_its_posterior(), fused=False)


@loop_over("fused", [True, False])
@loop_over("field", ["mean", "rho"])
def test_a_posterior_slightly_off_leaves_the_log_evidence(field: str, fused: bool) -> None:
    model, bnn = one_weight_at_its_posterior()
    with torch.no_grad():
        getattr(bnn.posterior, field).add_(1e-6)
    with pytest.raises(AssertionError, match="nats"):
        check_every_sample_is_the_evidence(model, bnn, fused=fused)
