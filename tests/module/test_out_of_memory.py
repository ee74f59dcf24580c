"""Predictions do not hide that memory is exhausted, and fall back where another error says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from bayesify import BayesianModule
from bayesify.estimators.out_of_memory import is_out_of_memory
from bayesify.module.batching import Batching

X = torch.linspace(-1.0, 1.0, 48).view(12, 4)


class FailsOnFew(nn.Linear):
    """Raises an error for the few examples on which the memory of a pass is measured."""

    def __init__(self, error: Exception) -> None:
        super().__init__(4, 3)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < len(X):
            raise self.error
        return super().forward(x)


class FailsUnderVmap(nn.Linear):
    """Raises an error where several weight samples share a pass."""

    def __init__(self, error: Exception) -> None:
        super().__init__(4, 3)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if is_batchedtensor(self.weight):
            raise self.error
        return super().forward(x)


EXHAUSTED = (
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"),
)


@pytest.mark.parametrize("network", [FailsOnFew, FailsUnderVmap])
def test_exhausted_memory_is_raised_and_other_errors_fall_back(network: type) -> None:
    torch.manual_seed(0)
    for error in EXHAUSTED:
        with pytest.raises(type(error)) as caught:
            BayesianModule(network(error)).predict(X, 64)
        assert str(caught.value) == str(error)  # the network holds a copy
    for other in (RuntimeError("no batching rule"), KeyError("node 8")):
        bnn = BayesianModule(network(other))
        plain = BayesianModule(nn.Linear(4, 3))
        plain.load_state_dict(bnn.state_dict())
        assert torch.allclose(bnn.predict(X, 64).mean, plain.predict(X, 64).mean)


def test_weight_samples_share_a_pass_of_such_a_network() -> None:
    bnn = BayesianModule(FailsUnderVmap(RuntimeError()))
    with torch.no_grad():
        assert Batching.of(bnn, X, {}, num_samples=64).group > 1


def test_errors_of_the_allocator_are_recognised() -> None:
    assert all(is_out_of_memory(error) for error in EXHAUSTED)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(ValueError("can't allocate memory"))
