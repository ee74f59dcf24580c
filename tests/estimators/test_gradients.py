"""Gradients: unbiased, against quadrature, and with the variance that each estimator is for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests import faults
from tests.cases import normals
from tests.estimators.test_distribution import Deep
from tests.loops import loop_over
from tests.training.test_statistics import check_mean
from torch import Tensor, nn

from bayesify import (
    ELBO,
    BayesianModule,
    Flipout,
    LocalReparameterization,
    Posterior,
    WeightSampling,
)
from bayesify.estimators import Estimator
from bayesify.noise.keys import NoiseKey, Stream

ESTIMATORS: dict[str, Estimator] = {
    "local": LocalReparameterization(),
    "local, antithetic": LocalReparameterization(antithetic=True),
    "flipout": Flipout(),
    "flipout, antithetic": Flipout(antithetic=True),
    "sampling": WeightSampling(),
    "sampling, antithetic": WeightSampling(antithetic=True),
}
WIDTH = 1500
#: Of one unit: two weights and a bias below, a weight and a bias above.
MEAN, STD = (0.6, -0.3, 0.2, 0.9, -0.4), (0.5, 0.9, 0.4, 0.8, 0.6)
X = torch.tensor([[0.8, -0.5], [-1.1, 0.9]], dtype=torch.float64)
Y = torch.tensor([0.5, -1.0], dtype=torch.float64)
FAMILY = 2 * len(MEAN) * len(ESTIMATORS)


def nll(outputs: Tensor, targets: Tensor) -> Tensor:
    """A nonlinear one, whose gradient is bounded."""
    return nn.functional.softplus(3.0 * (outputs - targets))


def by_unit(flat: Tensor, bnn: BayesianModule) -> Tensor:
    """A flat vector of the wide network, shape (WIDTH, 5)."""
    parts = bnn.layout.unflatten(flat)
    return torch.cat([part.reshape(WIDTH, -1) for part in parts.values()], 1)


def sampled_gradients(estimator: Estimator) -> Tensor:
    """Gradients in the means and in the rhos of each unit of width, shape (WIDTH, 10)."""
    net = Deep(WIDTH).double()
    bnn = BayesianModule(net, init_std=0.5, estimator=estimator)
    with torch.no_grad():
        for target, values in ((bnn.posterior.mean, MEAN), (bnn.posterior.rho, STD)):
            rows = torch.tensor(values, dtype=torch.float64).expand(WIDTH, -1)
            rows = rows if target is bnn.posterior.mean else rows.expm1().log()
            parts = {"first.weight": rows[:, :2], "first.bias": rows[:, 2]}
            parts |= {"second.weight": rows[:, 3:4, None], "second.bias": rows[:, 4]}
            target.copy_(bnn.layout.flatten(parts))
    outputs, _ = bnn.sample_outputs(X, NoiseKey(1, Stream.CALL, 0), range(2))
    gradients = torch.autograd.grad(
        nll(outputs, Y[:, None]).mean((0, 1)).sum(),
        (bnn.posterior.mean, bnn.posterior.rho),
        materialize_grads=True,
    )
    return torch.cat([by_unit(gradient, bnn) for gradient in gradients], 1)


def exact_gradients() -> Tensor:
    """Those of the expected nll of one unit, by quadrature in the outputs of both layers."""
    mean = torch.tensor(MEAN, dtype=torch.float64).requires_grad_()
    rho = torch.tensor(STD, dtype=torch.float64).expm1().log().requires_grad_()
    variance = nn.functional.softplus(rho).square()
    points, shares = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(60))
    shares = shares / shares.sum()
    total = torch.zeros((), dtype=torch.float64)
    for x, y in zip(X, Y, strict=True):
        below = mean[:2] @ x + mean[2] + (variance[:2] @ x.square() + variance[2]).sqrt() * points
        hidden = below.tanh()
        spread = (variance[3] * hidden.square() + variance[4]).sqrt()
        above = (mean[3] * hidden + mean[4])[:, None] + spread[:, None] * points
        total = total + 0.5 * (shares[:, None] * shares * nll(above, y)).sum()
    return torch.cat(torch.autograd.grad(total, (mean, rho)))


def check_gradients(name: str) -> None:
    """The mean of each coordinate's gradient."""
    family = zip(sampled_gradients(ESTIMATORS[name]).T, exact_gradients(), strict=True)
    for coordinate, (column, expected) in enumerate(family):
        check_mean(column, expected.item(), FAMILY, (name, coordinate))


@pytest.mark.slow
@loop_over("name", ESTIMATORS)
def test_gradients_are_unbiased(name: str) -> None:
    check_gradients(name)


TWINS: list[tuple[str, faults.Fault]] = [
    *[(name, faults.weaker_noise) for name in ESTIMATORS],
    *[
        (name, fault)
        for name in ("local", "local, antithetic")
        for fault in (
            faults.local_half_the_variance,
            faults.local_std_outside_the_graph,
            faults.local_inputs_outside_the_graph,
            faults.local_bias_without_variance,
        )
    ],
    ("flipout", faults.flipout_std_outside_the_graph),
    ("flipout, antithetic", faults.flipout_std_outside_the_graph),
    ("flipout", faults.flipout_of_absolute_noise),
    ("sampling", faults.std_outside_the_graph),
    ("sampling", faults.variance_for_std),
]


@pytest.mark.slow
@loop_over(("name", "fault"), TWINS)
def test_biased_gradients_are_caught(
    name: str, fault: faults.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=r"beyond|equal"):
        check_gradients(name)


def variances(
    estimator: Estimator,
    nonlinearity: type[nn.Module],
    *,
    std: float,
    num_samples: int = 1,
    fused: bool = True,
) -> Tensor:
    """Summed over the weights, of the nll's gradient in the means and in the rhos, shape (2,)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(10, 30), nonlinearity(), nn.Linear(30, 30), nonlinearity(),
                            nn.Linear(30, 4))  # fmt: skip
    inputs, targets = normals(64, 10, dtype=torch.float32), torch.arange(64) % 4
    bnn = BayesianModule(net, init_std=std, estimator=estimator)
    elbo = ELBO(bnn, num_data=64, num_samples=num_samples, fused=fused)
    parameters = (bnn.posterior.mean, bnn.posterior.rho)
    rows = [
        torch.stack(torch.autograd.grad(elbo(inputs, targets).nll, parameters)) for _ in range(80)
    ]
    return torch.stack(rows).var(0).sum(-1)


def check_order(factor: float = 1.6) -> None:
    """At a batch of 64 local noise varies least and weight sampling most, each by this factor."""
    local, flipout, sampling = (
        variances(estimator, nn.ReLU, std=0.3)
        for estimator in (LocalReparameterization(), Flipout(), WeightSampling())
    )
    assert bool((flipout > factor * local).all()), f"flipout / local: {flipout / local}"
    assert bool((sampling > factor * flipout).all()), f"sampling / flipout: {sampling / flipout}"


def test_local_noise_varies_less_than_flipout_and_flipout_less_than_sampling() -> None:
    check_order()


@pytest.mark.slow
@loop_over("fault", [faults.local_one_noise_for_all_data, faults.flipout_one_sign_for_all_data])
def test_noise_that_all_data_share_varies_more(
    fault: faults.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="/"):
        check_order()


def check_pairs_vary_less(name: str, factor: float, *, fused: bool = True) -> None:
    """Two antithetic samples against two independent ones, in the gradient of the means."""
    plain, pairs = (
        variances(ESTIMATORS[each], nn.Tanh, std=0.03, num_samples=2, fused=fused)[0]
        for each in (name, f"{name}, antithetic")
    )
    assert plain > factor * pairs, f"plain / pairs: {plain / pairs:.3g}"


@pytest.mark.slow
@loop_over("name", ["local", "flipout", "sampling"])
def test_antithetic_pairs_vary_less_where_the_gradient_is_odd_in_the_noise(name: str) -> None:
    check_pairs_vary_less(name, factor=5.0)


@pytest.mark.slow
@loop_over("name", ["local", "flipout", "sampling"])
def test_pairs_of_equal_noise_do_not_vary_less(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def same(_: object, posterior: Posterior, key: NoiseKey, samples: range) -> Tensor:
        evens = [sample - sample % 2 for sample in samples]
        return torch.cat([posterior.noise(key, range(even, even + 1)) for even in evens])

    faults.equal_normals_in_pairs(monkeypatch)
    monkeypatch.setattr(WeightSampling, "_noise", same)
    with pytest.raises(AssertionError, match="plain / pairs"):
        check_pairs_vary_less(name, factor=5.0, fused=False)
