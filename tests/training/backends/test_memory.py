"""No step allocates megabytes, whatever the network's size, but for the one by autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.backend_cases import needs_compiler
from torch import Tensor
from torch.optim import Adam, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bayesify import (
    ELBO,
    BayesianModule,
    Gaussian,
    Laplace,
    LocalReparameterization,
    Prior,
    ScaleMixture,
)
from bayesify.training.backends import (
    AutogradBackend,
    Backend,
    ClosedFormBackend,
    CompiledBackend,
    StepOptions,
)

#: 1.5 MB of weights, 0.25 MB a layer.
WIDTH, LAYERS = 250, 6
MEGABYTE = 2**20


class Allocations(TorchDispatchMode):
    """The sizes in bytes of all new memory, and what asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        given = {address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and address(tensor) not in given:
                self.found.append((tensor.untyped_storage().nbytes(), str(func)))
        return outputs


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


Make = Callable[[ELBO, Optimizer], Backend]


def check_memory(make: Make, prior: Prior, estimator: Any = None, num_samples: int = 1) -> None:
    net = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    bnn = BayesianModule(net, prior=prior, estimator=estimator)
    elbo = ELBO(bnn, num_data=10, num_samples=num_samples)
    step = make(elbo, Adam(elbo.parameters(), fused=True))
    x, y = torch.randn(4, WIDTH), torch.zeros(4, dtype=torch.long)
    for _ in range(2):  # the first step makes the optimiser's state
        with Allocations() as allocations:
            step.step(x, y, StepOptions(batch_index=0, with_residual=True))
    # A layer's gradient, which is the network's own, and blocks of the plain step.
    largest, by = max(allocations.found)
    assert largest < MEGABYTE, f"{by} allocates {largest} bytes"


each_perturbation = pytest.mark.parametrize(
    "estimator", [None, LocalReparameterization()], ids=["sampling", "local"]
)
each_prior = pytest.mark.parametrize("prior", [Gaussian(), Laplace(), ScaleMixture()], ids=str)


@each_prior
@each_perturbation
def test_the_plain_step_allocates_blocks_only(prior: Prior, estimator: Any) -> None:
    check_memory(ClosedFormBackend, prior, estimator)


@needs_compiler
@each_prior
@each_perturbation
def test_so_does_the_fused_step(prior: Prior, estimator: Any) -> None:
    check_memory(CompiledBackend, prior, estimator)


@needs_compiler
@each_prior
@pytest.mark.parametrize("make", [ClosedFormBackend, CompiledBackend])
def test_so_does_a_backend_of_many_samples(make: Make, prior: Prior) -> None:
    check_memory(make, prior, num_samples=7)


@each_perturbation
def test_autograds_is_caught(estimator: Any) -> None:
    with pytest.raises(AssertionError, match="allocates"):
        check_memory(AutogradBackend, Gaussian(), estimator)
