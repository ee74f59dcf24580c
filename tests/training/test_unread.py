"""Random parameters that the network's outputs do not depend on are named after some epochs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import normals
from tests.loops import loop_over
from torch import Tensor, nn

import bayesify as bf
from bayesify.training import UnreadParameterWarning

X, Y = normals(12, 4, seed=1).float(), torch.arange(12) % 3

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")


def patched() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    plain = net.forward
    net.forward = lambda x: 2.0 * plain(x)  # type: ignore[method-assign]
    return net


class Nested(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.by_scale = [[self.weight]]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.by_scale[0][0], self.bias)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classes, self.number = nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"classes": self.classes(x), "number": self.number(x)}


class Experts(nn.Module):
    """Each example goes to one of two experts, so that a minibatch may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = (self.first if bool(x[0, 0] > 0.0) else self.second)(x)
        return outputs


def train(net: nn.Module, backend: Any, num_samples: int = 1, **options: Any) -> None:
    bnn = bf.BayesianModule(net, **options)
    loader = [(X[X[:, 0] > 0.0], Y[X[:, 0] > 0.0]), (X[X[:, 0] <= 0.0], Y[X[:, 0] <= 0.0])]
    elbo = bf.ELBO(bnn, num_data=12, num_samples=num_samples)
    bf.fit(elbo, loader, epochs=12, backend=backend, progress=False)


# That of ``patched`` is reported when the network is made, too.
@pytest.mark.filterwarnings("ignore:a function in 'forward' of the network holds")
@loop_over("backend", ["auto", "closed-form"])
@loop_over("estimator", [bf.WeightSampling(), bf.LocalReparameterization(), bf.Flipout()])
@loop_over(
    ("make", "options", "names"),
    [
        (patched, {}, r"0\.weight, 0\.bias, 1\.weight, 1\.bias"),
        (Nested, {}, "weight"),
        (TwoHeads, {"output": "classes"}, r"number\.weight, number\.bias"),
    ],
)
def test_what_no_output_depends_on_is_named(
    make: Callable[[], nn.Module],
    options: dict[str, Any],
    names: str,
    estimator: bf.Estimator,
    backend: str,
) -> None:
    with pytest.warns(UnreadParameterWarning, match=f"random parameters {names}, which") as said:
        train(make(), backend, estimator=estimator, **options)
    assert [each.category for each in said].count(UnreadParameterWarning) == 1


class DroppedLayers(nn.Module):
    """Residual layers that are left out at random, as by stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or float(torch.rand(())) > 0.4:
                x = x + layer(x).tanh()
        outputs: Tensor = self.out(x)
        return outputs


class Turns(nn.Module):
    """Two layers that take turns, pass by pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.passes = nn.Linear(4, 3), nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        layer = self.second if self.passes % 2 else self.first
        self.passes += torch.is_grad_enabled()
        outputs: Tensor = layer(x)
        return outputs


@loop_over("backend", ["auto", "closed-form"])
def test_what_one_weight_sample_of_a_step_reads_is_read(backend: str) -> None:
    with warnings.catch_warnings(action="error", category=UnreadParameterWarning):
        train(Turns(), backend, num_samples=2)


@loop_over("backend", ["auto", "closed-form"])
def test_what_some_passes_read_is_read(backend: str) -> None:
    with warnings.catch_warnings(action="error", category=UnreadParameterWarning):
        train(Experts(), backend)
        train(DroppedLayers(), backend)
        train(DroppedLayers(), backend, num_samples=3)
        train(TwoHeads(), backend, output="classes", exclude=("number.*",))


def test_a_few_steps_tell_nothing() -> None:
    with warnings.catch_warnings(action="error", category=UnreadParameterWarning):
        bf.fit(bf.ELBO(bf.BayesianModule(Nested()), num_data=12), [(X, Y)], progress=False)
