"""Censored targets: densities, tail probabilities, intervals, survival times and extremes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from tests.cases import normals
from tests.loops import loop_over
from torch import Tensor, nn

import bayesify as bf
from bayesify import CensoredGaussianLikelihood, GaussianLikelihood
from bayesify.prediction import GaussianPredictive

INF = math.inf
STD = 0.7


def bounds(lower: Tensor, upper: Tensor) -> Tensor:
    return torch.stack([lower, upper], -1)


def test_an_exact_target_has_the_density_of_a_gaussian() -> None:
    outputs, y = normals(3, 6, 2), normals(6, 2, seed=1)
    for plain, censored in (
        (GaussianLikelihood(STD), CensoredGaussianLikelihood(STD)),
        (
            GaussianLikelihood(input_dependent=True),
            CensoredGaussianLikelihood(input_dependent=True),
        ),
    ):
        given = outputs if not plain.input_dependent else torch.stack([outputs, outputs.cos()], -1)
        exact = plain.log_prob(given, y)
        assert torch.allclose(censored.log_prob(given, bounds(y, y)), exact, rtol=1e-14)
        assert torch.allclose(censored.error(given[0], bounds(y, y)), plain.error(given[0], y))


def test_a_bound_has_the_tail_probability() -> None:
    outputs, y = 3.0 * normals(3, 50), 3.0 * normals(50, seed=1)
    z, far = ((y - outputs) / STD).numpy(), torch.full((50,), INF)
    likelihood = CensoredGaussianLikelihood(STD)
    right = likelihood.log_prob(outputs, bounds(y, far))
    np.testing.assert_allclose(right.numpy(), stats.norm.logsf(z), rtol=1e-10)
    left = likelihood.log_prob(outputs, bounds(-far, y))
    np.testing.assert_allclose(left.numpy(), stats.norm.logcdf(z), rtol=1e-10)
    assert torch.equal(likelihood.log_prob(outputs, bounds(-far, far)), torch.zeros(3, 50).double())


def log_interval(a: float, width: float) -> float:
    """log(Phi(a + width) - Phi(a)) by quadrature around the largest density."""
    top = min(max(0.0, a), a + width)
    value, _ = integrate.quad(
        lambda t: math.exp(-0.5 * (t - top) * (t + top)), a, a + width, epsabs=0.0, epsrel=1e-13
    )
    return math.log(value) - 0.5 * top**2 - 0.5 * math.log(2.0 * math.pi)


def test_two_bounds_have_the_probability_between_them() -> None:
    likelihood = CensoredGaussianLikelihood()
    for a in (-40.0, -12.0, -3.0, -1.0, -1e-3, 0.0, 0.4, 2.0, 9.0, 40.0):
        for width in (1e-9, 1e-4, 0.01, 0.049, 0.051, 0.3, 1.0, 4.0, 8.0):
            # The bounds as numbers have rounding errors, and so has their distance.
            ends = torch.tensor([[a, a + width]], dtype=torch.float64)
            exact = log_interval(a, float(ends[0, 1] - ends[0, 0]))
            got = likelihood.log_prob(torch.zeros(1, 1).double(), ends).item()
            assert got == pytest.approx(exact, rel=1e-10, abs=1e-10), (a, width)


def test_gradients_are_exact() -> None:
    likelihood = CensoredGaussianLikelihood(input_dependent=True)
    y = torch.tensor([0.3, -1.0, 2.0, 0.1, 8.0], dtype=torch.float64)
    upper = torch.tensor([0.3, INF, 2.3, 0.11, 9.0], dtype=torch.float64)
    outputs = normals(1, 5, 2).requires_grad_()
    torch.autograd.gradcheck(lambda o: likelihood.log_prob(o, bounds(y, upper)), outputs)


@loop_over("dtype", [torch.float32, torch.float64])
@loop_over("raw", [-1e3, -10.0, 0.0, 1e3])
@loop_over("location", [-1e3, -30.0, 0.0, 1e3])
def test_extreme_outputs_have_finite_densities(
    location: float, raw: float, dtype: torch.dtype
) -> None:
    likelihood = CensoredGaussianLikelihood(input_dependent=True)
    for pair in ([1.0, 1.0], [1.0, INF], [-INF, 1.0], [1.0, 1.001], [-3.0, 5.0], [-INF, INF]):
        outputs = torch.tensor([[[[location, raw]]]], dtype=dtype, requires_grad=True)
        found = likelihood.log_prob(outputs, torch.tensor([[pair]], dtype=dtype))
        assert found.isfinite().all(), pair
        found.sum().backward()
        assert outputs.grad is not None
        assert outputs.grad.isfinite().all(), pair


def test_a_far_bound_has_the_right_slope_in_single_precision() -> None:
    """The slope of log Phi(-z) tends to z."""
    for far in (30.0, 1e3, 1e6):
        output = torch.tensor([[0.0]], requires_grad=True)
        CensoredGaussianLikelihood().log_prob(output, torch.tensor([[far, INF]])).backward()
        assert output.grad is not None
        assert output.grad.item() == pytest.approx(far + 1.0 / far, rel=1e-5)


def test_the_error_is_the_distance_to_the_bounds() -> None:
    targets = torch.tensor([[1.0, 1.0], [1.0, INF], [-INF, 1.0], [1.0, 2.0]])
    likelihood = CensoredGaussianLikelihood()
    assert likelihood.error(torch.full((4,), 4.0), targets).item() == pytest.approx(
        (9.0 + 0.0 + 9.0 + 4.0) / 4.0
    )


def survival_times(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log times with slope 1 and std 0.5, seen until a random time: inputs, times and bounds."""
    x = normals(count, 1, seed=1)
    log_time = 0.3 + x + 0.5 * normals(count, 1, seed=2)
    end = 0.5 + normals(count, 1, seed=3)
    seen = log_time <= end
    lower = torch.where(seen, log_time, end)
    return x, log_time, bounds(lower, torch.where(seen, log_time, INF))


def fitted(likelihood: bf.Likelihood, x: Tensor, y: Tensor) -> bf.BayesianModule:
    torch.manual_seed(0)
    net = nn.Linear(1, 1).double()
    bnn = bf.BayesianModule(net, likelihood=likelihood.double(), posterior=bf.Delta)
    elbo = bf.ELBO(bnn, num_data=len(x), temperature=0.0)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        elbo(x, y).loss.backward()
        optimizer.step()
    return bnn


def test_censoring_does_not_bias_the_times() -> None:
    x, log_time, targets = survival_times(4000)
    bnn = fitted(CensoredGaussianLikelihood(learn_std=True), x, targets)
    exact = torch.tensor([1.0, 0.3], dtype=torch.float64)
    assert torch.allclose(bnn.posterior.mean, exact, atol=0.05)
    assert isinstance(bnn.likelihood, CensoredGaussianLikelihood)
    assert bnn.likelihood.std.item() == pytest.approx(0.5, rel=0.05)
    p = bnn.predict(x)
    assert isinstance(p, GaussianPredictive)
    for level in (0.5, 0.9):
        low, high = p.interval(level)
        held = int(((low < log_time) & (log_time < high)).sum())
        # The fit has errors of its own, which move the level by less than 3 %.
        assert abs(held / 4000 - level) < 0.03 + 4.5 * math.sqrt(level * (1 - level) / 4000)
    naive = fitted(GaussianLikelihood(learn_std=True), x, targets[..., 0])
    assert not torch.allclose(naive.posterior.mean, exact, atol=0.15), "what dropping them does"


def test_one_weight_has_the_nll_of_the_integral() -> None:
    targets = torch.tensor([[[1.0, INF]], [[0.2, 0.2]], [[-1.0, 0.5]]], dtype=torch.float64)
    x = torch.tensor([[1.5], [0.5], [-1.0]], dtype=torch.float64)
    nodes, shares = np.polynomial.hermite_e.hermegauss(60)
    net = nn.Linear(1, 1, bias=False).double()
    bnn = bf.BayesianModule(net, likelihood=CensoredGaussianLikelihood(STD), init_std=0.3, seed=1)
    weights = bnn.posterior.mean.item() + 0.3 * torch.from_numpy(nodes)
    outputs = (weights[:, None] * x[:, 0]).unsqueeze(-1)
    each = -bnn.likelihood.log_prob(outputs, targets).mean(1).numpy()
    exact = float((each * shares).sum() / shares.sum())
    spread = math.sqrt(float((((each - exact) ** 2) * shares).sum() / shares.sum()))
    with torch.no_grad():
        found = bf.ELBO(bnn, num_data=3, num_samples=2000)(x, targets).nll.item()
    assert abs(found - exact) < 4.5 * spread / math.sqrt(2000)


LIKELIHOOD = CensoredGaussianLikelihood()


@loop_over(
    ("call", "message"),
    [
        (
            lambda: LIKELIHOOD.log_prob(normals(2, 5, 1), normals(5, 2)),
            r"shape \(5, 1, 2\), got \(5, 2\); use torch.stack",
        ),
        (lambda: LIKELIHOOD.log_prob(normals(2, 5), normals(5)), r"\(5, 2\), got \(5,\)"),
        (lambda: LIKELIHOOD.error(normals(5), normals(5)), r"\(5, 2\), got \(5,\)"),
        *(
            (
                lambda pair=pair: LIKELIHOOD.log_prob(normals(2, 1), torch.tensor([pair])),
                rf"lower <= upper.*got \[{pair[0]}, {pair[1]}\]",
            )
            for pair in ([1.0, 0.5], [INF, INF], [-INF, -INF], [0.0, math.nan], [math.nan, 0.0])
        ),
        (lambda: CensoredGaussianLikelihood(0.0), "std must be positive"),
        (lambda: CensoredGaussianLikelihood(0.5, input_dependent=True), "remove one of the two"),
    ],
)
def test_a_wrong_argument_raises(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("far", [10.0, 1e4, 1e7, 1e8, 1e9, 1e30])
@pytest.mark.parametrize("std", [1e-3, 1.0])
def test_a_wide_interval_is_a_bound(far: float, std: float) -> None:
    likelihood = CensoredGaussianLikelihood(std)
    zero, limit = torch.zeros(1), torch.tensor([far])
    for mean, near in ((-3.0 * std, 1.0), (3.0 * std, -1.0)):
        outputs = torch.tensor([[mean]], requires_grad=True)
        wide = bounds(zero, limit) if near > 0.0 else bounds(-limit, zero)
        open_ = bounds(zero, limit * INF) if near > 0.0 else bounds(-limit * INF, zero)
        found, expected = (likelihood.log_prob(outputs, each).sum() for each in (wide, open_))
        slopes = [torch.autograd.grad(each, outputs)[0].item() for each in (found, expected)]
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
        assert slopes[0] == pytest.approx(slopes[1], rel=1e-4)
