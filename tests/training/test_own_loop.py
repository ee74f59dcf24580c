"""``make_step`` in a loop of one's own is ``fit``; so is the objective with any optimiser."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.backend_cases import needs_compiler
from tests.cases import normals
from tests.loops import loop_over
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import bayesify as bf
from bayesify.datasets import TensorLoader
from bayesify.training.backends import BackendName

N, BATCH, EPOCHS = 40, 8, 3
X, Y = normals(N, 5, seed=1).float(), torch.arange(N) * 7 % 3

OPTIMIZERS: list[Callable[[bf.ELBO], Optimizer]] = [
    lambda elbo: Adam(elbo.parameters(), lr=0.01),
    lambda elbo: SGD(elbo.parameters(), lr=0.1, momentum=0.9),
    lambda elbo: AdamW(bf.parameter_groups(elbo), lr=0.01),
]


def objective(**options: object) -> bf.ELBO:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))
    return bf.ELBO(bf.BayesianModule(net, seed=4), num_data=N, **options)  # type: ignore[arg-type]


def weights_of(elbo: bf.ELBO) -> list[Tensor]:
    return [parameter.detach() for parameter in elbo.parameters()]


def batches() -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.split(BATCH), Y.split(BATCH), strict=True))


def fitted(make: Callable[[bf.ELBO], Optimizer]) -> bf.ELBO:
    elbo = objective()
    loader = TensorLoader(X, Y, BATCH, shuffle=False)
    with pytest.warns(bf.training.ConvergenceWarning):
        bf.fit(elbo, loader, epochs=EPOCHS, optimizer=make(elbo))
    return elbo


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_loop_of_steps_is_fit_bit_for_bit(make: Callable[[bf.ELBO], Optimizer]) -> None:
    elbo = objective()
    step = bf.make_step(elbo, make(elbo))
    for _ in range(EPOCHS):
        for index, (x, y) in enumerate(batches()):
            terms = step(x, y, batch_index=index)
    assert not terms.nll.requires_grad
    assert elbo.step == EPOCHS * N // BATCH
    for one, two in zip(weights_of(elbo), weights_of(fitted(make)), strict=True):
        assert torch.equal(one, two)


@needs_compiler
@pytest.mark.parametrize("make", OPTIMIZERS[:2])
def test_a_loop_with_the_objective_is_fit(make: Callable[[bf.ELBO], Optimizer]) -> None:
    elbo = objective()
    optimizer = make(elbo)
    for _ in range(EPOCHS):
        for x, y in batches():
            optimizer.zero_grad()
            elbo(x, y).loss.backward()
            optimizer.step()
    for one, two in zip(weights_of(elbo), weights_of(fitted(make)), strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-6)


def test_the_value_of_the_kl_is_there_when_asked_for() -> None:
    elbo = objective()
    step = bf.make_step(elbo, SGD(elbo.parameters(), lr=0.0))
    x, y = batches()[0]
    assert torch.isnan(step(x, y).loss)
    terms = step(x, y, with_kl=True, kl_scale=0.5)
    assert float(terms.loss) == pytest.approx(float(terms.nll + 0.5 * terms.kl / N), rel=1e-6)


def test_a_scheduler_and_a_checkpoint_work_as_ever() -> None:
    def train(elbo: bf.ELBO, optimizer: Optimizer, rates: list[float]) -> None:
        step = bf.make_step(elbo, optimizer)
        for rate, (x, y) in zip(rates, batches(), strict=True):
            optimizer.param_groups[0]["lr"] = rate
            step(x, y)

    make = partial(Adam, lr=0.1)
    whole, rates = objective(), [0.1, 0.05, 0.02, 0.01, 0.005]
    optimizer = make(whole.parameters())
    train(whole, optimizer, rates)
    train(whole, optimizer, rates)
    first = objective()
    optimizer = make(first.parameters())
    train(first, optimizer, rates)
    second = objective()
    second.load_state_dict(first.state_dict())
    resumed = make(second.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    train(second, resumed, rates)
    for one, two in zip(weights_of(whole), weights_of(second), strict=True):
        assert torch.equal(one, two)


def test_a_backend_that_does_not_support_the_run_is_refused() -> None:
    elbo = objective()
    with pytest.raises(ValueError, match="the optimizer is AdamW"):
        bf.make_step(elbo, OPTIMIZERS[2](elbo), backend="compiled")


@pytest.mark.parametrize("backend", ["autograd", "auto"])
def test_geometric_weights_need_the_place_in_the_epoch(backend: BackendName) -> None:
    elbo = objective(kl_weighting="geometric", num_batches=5)
    step = bf.make_step(elbo, Adam(elbo.parameters()), backend=backend)
    with pytest.raises(ValueError, match="batch_index"):
        step(X[:BATCH], Y[:BATCH])
    factors = [step(X[:BATCH], Y[:BATCH], batch_index=n).kl_factor for n in range(5)]
    assert factors == sorted(factors, reverse=True)


@loop_over(
    "name, value, backend",
    [
        (name, value, backend)
        for backend in ("auto", "closed-form", "autograd")
        for name, values in (
            ("kl_scale", (float("nan"), -1, float("inf"), "1")),
            ("batch_index", (2.5, True, -1, "1")),
        )
        for value in values
    ],
)
def test_a_place_that_is_none_is_refused(name: str, value: Any, backend: BackendName) -> None:
    elbo = objective()
    before = [each.clone() for each in weights_of(elbo)]
    step = bf.make_step(elbo, Adam(elbo.parameters()), backend=backend)
    with pytest.raises(
        ValueError, match=f"{name} must be a .* number of at least 0, got {value!r}"
    ):
        step(X[:BATCH], Y[:BATCH], **{name: value})
    assert all(map(torch.equal, before, weights_of(elbo)))
    step(X[:BATCH], Y[:BATCH], kl_scale=np.float32(0.5), batch_index=np.int64(3))  # type: ignore[arg-type]


def test_it_refuses_what_fit_refuses() -> None:
    elbo, net = objective(), nn.Linear(5, 3)
    bnn = bf.BayesianModule(net)
    elbo = bf.ELBO(bnn, num_data=N)
    with pytest.raises(TypeError, match="make_step needs an ELBO, got BayesianModule"):
        bf.make_step(bnn, SGD(bnn.parameters(), lr=0.1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer, got <class"):
        bf.make_step(elbo, SGD)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it holds none of them: the network was copied"):
        bf.make_step(elbo, SGD(net.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"weight decay of rho must be 0, got 0\.5"):
        bf.make_step(elbo, AdamW(elbo.parameters(), weight_decay=0.5))
