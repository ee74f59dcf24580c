"""The step as a graph, as far as a CPU can show it: the recorded part runs by itself.

A stand-in for the recorder runs the recorded function again instead of replaying its launches, on
the same memory and with the same preparation, which is what surrounds a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.loops import loop_over
from torch import Tensor, nn

import bayesify as bf
from bayesify.training.backends import Backend, CompiledBackend, GraphBackend, StepOptions

SIZES = [16, 16, 16, 16, 16, 9, 16, 16, 9, 16, 16]


def same_again(function: Callable[[], None]) -> Callable[[], None]:
    return function


def refusing(function: Callable[[], None]) -> Callable[[], None]:
    raise RuntimeError("operation not permitted when stream is capturing\nat some place")


def train(
    prior: bf.Prior, make: Callable[..., Backend] = CompiledBackend
) -> tuple[list[tuple[float, float, float | None]], torch.Tensor, Backend]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 33), nn.LayerNorm(33), nn.ReLU(), nn.Linear(33, 5))
    elbo = bf.ELBO(bf.BayesianModule(net, prior=prior, init_std=0.05, seed=3), num_data=1000)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=1e-2)
    backend = make(elbo, optimizer, compiled=False)
    generator = torch.Generator().manual_seed(1)
    said = []
    for number, size in enumerate(SIZES):
        x = torch.randn(size, 6, generator=generator)
        y = torch.randint(5, (size,), generator=generator)
        terms = backend.step(
            x,
            y,
            StepOptions(
                number, min(1.0, (number + 1) / 5), with_kl=number == 6, with_residual=True
            ),
        )
        assert terms.has_kl == (number == 6)
        said.append((float(terms.nll), terms.kl_factor, terms.std_residual))
    assert elbo.step == len(SIZES)
    return said, torch.cat([p.detach().flatten() for p in elbo.parameters()]), backend


@pytest.mark.parametrize("prior", [bf.Laplace(0.3), bf.ScaleMixture(std2=0.05)], ids=str)
def test_a_recorded_step_is_the_step(prior: bf.Prior) -> None:
    recorded = []

    def record(function: Callable[[], None]) -> Callable[[], None]:
        recorded.append(function)
        return function

    said, parameters, _ = train(prior)
    again, others, graphed = train(prior, partial(GraphBackend, record=record))
    assert len(recorded) == 1
    assert graphed.description.endswith("as a graph")
    assert said == again
    assert torch.equal(parameters, others)


def test_a_network_that_cannot_be_recorded_goes_on_without() -> None:
    said, parameters, _ = train(bf.Gaussian(0.3))
    again, others, graphed = train(bf.Gaussian(0.3), partial(GraphBackend, record=refusing))
    assert graphed.description.endswith(
        "but not captured: operation not permitted when stream is capturing"
    )
    assert said == again
    assert torch.equal(parameters, others)


class Switched(nn.Linear):
    """Takes its inputs by name, and a factor that need be no tensor."""

    def forward(self, x: Tensor, other: Tensor | None = None, factor: object = None) -> Tensor:
        x = x if other is None else x - 2.0 * other
        return super().forward(x.float()) * (1.0 if factor is None else factor)


ONES, LARGE = torch.ones(4, 6), torch.full((4, 6), 2**24 + 1)


@loop_over(
    "before, after",
    [
        # Of the order of names, a structure within, dtypes that a copy would round.
        ({"x": ONES, "other": 2 * ONES}, {"other": ONES, "x": 2 * ONES}),
        ({"x": ONES, "other": ONES}, {"x": ONES, "factor": ONES[0, :5]}),
        ({"x": ONES}, {"x": LARGE.double()}),
        ({"x": ONES, "factor": 2.0}, {"x": ONES, "factor": 3.0}),
        ({"x": ONES, "factor": None}, {"x": ONES, "factor": None}),
        ({"x": ONES}, {"x": ONES, "factor": 3.0}),
    ],
)
def test_a_minibatch_of_another_structure_is_no_replay(before: Any, after: Any) -> None:
    nlls = []
    for make in (CompiledBackend, partial(GraphBackend, record=same_again)):
        torch.manual_seed(0)
        elbo = bf.ELBO(bf.BayesianModule(Switched(6, 5), init_std=0.1), num_data=100)
        backend = make(elbo, torch.optim.SGD(elbo.parameters(), lr=1e-3), compiled=False)
        targets = torch.arange(4)
        for inputs in (*[before] * 5, after, before):
            terms = backend.step(inputs, targets, StepOptions(batch_index=0))
            nlls.append(float(terms.nll))
    assert nlls[:7] == nlls[7:]


def test_the_minibatch_is_not_written() -> None:
    """It may be a view of the data."""
    data = torch.randn(8, 4, 6)
    before = data.clone()
    elbo = bf.ELBO(bf.BayesianModule(nn.Linear(6, 5)), num_data=100)
    optimizer = torch.optim.SGD(elbo.parameters(), lr=0.1)
    backend = GraphBackend(elbo, optimizer, same_again, compiled=False)
    for minibatch in data:
        targets = torch.zeros(4, dtype=torch.long)
        backend.step(minibatch, targets, StepOptions(batch_index=0))
    assert torch.equal(data, before)


def test_compiled_cpp_cannot_be_recorded() -> None:
    pytest.importorskip("ctypes")
    from bayesify.training.kernel.compiler import find_compiler

    if find_compiler() is None:
        pytest.skip("needs a C++ compiler")
    elbo = bf.ELBO(bf.BayesianModule(nn.Linear(6, 5)), num_data=100)
    optimizer = torch.optim.SGD(elbo.parameters(), lr=0.1)
    backend = GraphBackend(elbo, optimizer, same_again)
    minibatch = torch.zeros(4, 6), torch.zeros(4, dtype=torch.long)
    for _ in range(3):
        backend.step(*minibatch, StepOptions(batch_index=0))
    with pytest.raises(TypeError, match="PyTorch's operations"):
        backend.step(*minibatch, StepOptions(batch_index=0))


def test_a_layer_that_is_trained_later_is_recorded_anew() -> None:
    net = nn.Sequential(nn.Linear(6, 5).requires_grad_(False), nn.Tanh(), nn.Linear(5, 5))
    before = net[0].weight.clone()
    elbo = bf.ELBO(bf.BayesianModule(net), num_data=1000)
    optimizer = torch.optim.SGD(elbo.parameters(), lr=0.5)
    recorded = []

    def record(function: Callable[[], None]) -> Callable[[], None]:
        recorded.append(elbo.bnn.net[0].weight.requires_grad)
        return function

    backend = GraphBackend(elbo, optimizer, record, compiled=False)
    x, y = torch.randn(20, 6), torch.randint(5, (20,))
    for number in range(20):
        elbo.bnn.net[0].requires_grad_(number >= 10)
        backend.step(x, y, StepOptions(batch_index=number, with_kl=False))
        assert torch.equal(elbo.bnn.net[0].weight, before) == (number < 10)
    assert recorded == [False, True]
    assert torch.equal(net[0].weight, before)


@pytest.mark.parametrize("form", ["f-quad", "f-lambda"])
def test_a_factor_that_depends_on_its_own_step_is_not_recorded(form: Any) -> None:
    """A PAC-Bayes objective weighs the KL by the loss of the step itself."""
    factors = []
    for make in (CompiledBackend, partial(GraphBackend, record=same_again)):
        torch.manual_seed(0)
        bnn = bf.BayesianModule(
            nn.Linear(6, 5), prior=bf.Gaussian(0.1), prior_mean="initial", init_std=0.1, seed=3
        )
        objective = bf.PACBayesObjective(bnn, num_data=80, form=form)
        backend = make(objective, torch.optim.SGD(objective.parameters(), lr=1e-2), compiled=False)
        x, targets = torch.randn(16, 6), torch.arange(16) % 5
        factors += [
            backend.step(x, targets, StepOptions(batch_index=number % 5)).kl_factor
            for number in range(12)
        ]
    assert factors[:12] == factors[12:]
