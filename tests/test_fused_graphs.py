"""The step as a graph, as far as a processor can show it: the recorded part runs by itself.

A stand-in for the recorder runs the recorded function again instead of replaying its launches, on
the same memory and with the same preparation, which is what surrounds a graph.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import bayesify as bf
from bayesify.fused import FusedStep, GraphedStep, TrainingStep

SIZES = [16, 16, 16, 16, 16, 9, 16, 16, 9, 16, 16]


def same_again(function: Callable[[], None]) -> Callable[[], None]:
    return function


def refusing(function: Callable[[], None]) -> Callable[[], None]:
    raise RuntimeError("operation not permitted when stream is capturing\nat some place")


def train(
    prior: bf.Prior, wrap: Callable[[FusedStep], TrainingStep]
) -> tuple[list[tuple[float, float, float | None]], torch.Tensor, TrainingStep]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 33), nn.LayerNorm(33), nn.ReLU(), nn.Linear(33, 5))
    elbo = bf.ELBO(bf.BayesianModule(net, prior=prior, init_std=0.05, seed=3), num_data=1000)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=1e-2)
    step = wrap(FusedStep(elbo, optimizer, compiled=False))
    generator = torch.Generator().manual_seed(1)
    said = []
    for number, size in enumerate(SIZES):
        x = torch.randn(size, 6, generator=generator)
        y = torch.randint(5, (size,), generator=generator)
        values = step.evaluate(
            x, y, batch_index=number, kl_scale=min(1.0, (number + 1) / 5), values=number == 6
        )
        assert (values.complexity is not None) == (number == 6)
        said.append((float(values.nll), values.factor, step.update(residual=True)))
    assert elbo.step == len(SIZES)
    return said, torch.cat([p.detach().flatten() for p in elbo.parameters()]), step


@pytest.mark.parametrize("prior", [bf.Laplace(0.3), bf.ScaleMixture(std2=0.05)], ids=str)
def test_a_recorded_step_is_the_step(prior: bf.Prior) -> None:
    recorded = []

    def record(function: Callable[[], None]) -> Callable[[], None]:
        recorded.append(function)
        return function

    said, parameters, _ = train(prior, lambda step: step)
    again, others, graphed = train(prior, lambda step: GraphedStep(step, record))
    assert len(recorded) == 1
    assert graphed.description.endswith("as a graph")
    assert said == again
    assert torch.equal(parameters, others)


def test_a_network_that_cannot_be_recorded_goes_on_without() -> None:
    said, parameters, _ = train(bf.Gaussian(0.3), lambda step: step)
    again, others, graphed = train(bf.Gaussian(0.3), lambda step: GraphedStep(step, refusing))
    assert graphed.description.endswith(
        "but not captured: operation not permitted when stream is capturing"
    )
    assert said == again
    assert torch.equal(parameters, others)


def test_the_minibatch_is_not_written() -> None:
    """It may be a view of the data."""
    data = torch.randn(8, 4, 6)
    before = data.clone()
    elbo = bf.ELBO(bf.BayesianModule(nn.Linear(6, 5)), num_data=100)
    optimizer = torch.optim.SGD(elbo.parameters(), lr=0.1)
    step = GraphedStep(FusedStep(elbo, optimizer, compiled=False), same_again)
    for minibatch in data:
        targets = torch.zeros(4, dtype=torch.long)
        step.evaluate(minibatch, targets, batch_index=0, kl_scale=1.0, values=False)
        step.update(residual=False)
    assert torch.equal(data, before)


def test_compiled_cpp_cannot_be_recorded() -> None:
    pytest.importorskip("ctypes")
    from bayesify.fused.compiler import find_compiler

    if find_compiler() is None:
        pytest.skip("needs a C++ compiler")
    elbo = bf.ELBO(bf.BayesianModule(nn.Linear(6, 5)), num_data=100)
    step = FusedStep(elbo, torch.optim.SGD(elbo.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="PyTorch's operations"):
        step.prepare(4, batch_index=0, kl_scale=1.0)
