"""Networks that edit their weights in place are found, and trained by the fused objective."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backend_cases import has_compiler, needs_compiler
from tests.loops import loop_over
from torch import Tensor, nn
from torch.optim import SGD

import bayesify as bf
from bayesify.datasets import TensorLoader
from bayesify.training import NonFiniteLossError
from bayesify.training.backends import AutogradBackend, Backend, make_backend

X, Y = torch.randn(40, 4), torch.randint(3, (40,))
EXPLICIT = ["compiled", "closed-form"] if has_compiler else ["closed-form"]
Run = Callable[[nn.Linear, Tensor], Tensor]


class Net(nn.Module):
    """A linear layer with a pass of the test's own."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.linear, self.run = nn.Linear(4, 3), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.linear, x)


def halved(linear: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, 0.5 * linear.weight, linear.bias)


def without_grad(linear: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        linear.weight.mul_(0.5)
    return linear(x)


def with_grad(linear: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, linear.weight.mul_(0.5), linear.bias)


def detached(linear: nn.Linear, x: Tensor) -> Tensor:
    linear.weight.detach().mul_(0.5)
    return linear(x)


def of_data(linear: nn.Linear, x: Tensor) -> Tensor:
    linear.weight.data.mul_(0.5)
    return linear(x)


def new_data(linear: nn.Linear, x: Tensor) -> Tensor:
    linear.weight.data = 0.5 * linear.weight.data
    return linear(x)


EDITS = [without_grad, with_grad, detached, of_data, new_data]


def elbo(run: Run, **options: Any) -> bf.ELBO:
    torch.manual_seed(0)
    return bf.ELBO(bf.BayesianModule(Net(run), init_std=0.1, **options), num_data=40)


def trained(each: bf.ELBO, make: Callable[..., Backend]) -> Tensor:
    backend = make(each, SGD(each.parameters(), lr=0.1))
    for _ in range(4):
        backend.step(X, Y, batch_index=0)
    return torch.cat([p.detach() for p in each.parameters()])


@loop_over("run, backend", [(run, backend) for run in EDITS for backend in EXPLICIT])
def test_an_edit_of_any_kind_is_found(run: Run, backend: Any) -> None:
    with pytest.raises(RuntimeError, match='under this backend; use backend="auto", or compute'):
        trained(elbo(run), lambda *args: make_backend(*args, backend))


@loop_over("backend", EXPLICIT)
def test_data_that_are_replaced_later_are_found(backend: Any) -> None:
    seen = []

    def run(linear: nn.Linear, x: Tensor) -> Tensor:
        seen.append(x)
        return (new_data if len(seen) > 2 else nn.Linear.forward)(linear, x)

    with pytest.raises(RuntimeError, match="must not edit its weights"):
        trained(elbo(run), lambda *args: make_backend(*args, backend))
    assert len(seen) == 3


@loop_over("backend", EXPLICIT)
def test_weights_that_are_nan_are_not_edited(backend: Any) -> None:
    each = elbo(nn.Linear.forward)
    with torch.no_grad():
        each.bnn.posterior.mean[0] = torch.nan
    with pytest.raises(NonFiniteLossError):
        trained(each, lambda *args: make_backend(*args, backend))
