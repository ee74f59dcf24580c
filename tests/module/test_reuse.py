"""Predictions run the part of a network before its first random weight once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.loops import loop_over
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify import BayesianModule, last_layer

S = 6
X = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))


class Body(nn.Module):
    """Deterministic layers; notes the number of examples of each call."""

    calls: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Any:
        type(self).calls.append(len(x))
        return torch.tanh(self.norm(self.layer(x)))


class Listing(Body):
    def forward(self, x: Tensor) -> Any:
        return [{"hidden": super().forward(x), "name": "a"}]


class Drawing(Body):
    def forward(self, x: Tensor) -> Any:
        return F.dropout(super().forward(x), 0.5, training=True)


class EditingInputs(Body):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.mul_(1.0))


class EditingItself(Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.count += 1.0
        return super().forward(x) * self.count


class Net(nn.Module):
    """A body, and a head with random weights."""

    def __init__(
        self, body: nn.Module, edit: Callable[[Any], Tensor] = lambda hidden: hidden
    ) -> None:
        super().__init__()
        self.body, self.head, self.edit = body, nn.Linear(4, 2), edit

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.edit(self.body(x)))


def made(net: nn.Module) -> BayesianModule:
    torch.manual_seed(0)
    return BayesianModule(net, include=("head.*",))


def calls_of(bnn: BayesianModule, **options: Any) -> tuple[int, Tensor]:
    """The number of calls of the body in a prediction whose batches are known, and its result."""
    options = {"batch_size": len(X), **options}
    bnn.predict(X, 1, **options)
    Body.calls = []
    torch.manual_seed(1)
    mean = bnn.predict(X, S, **options).mean
    return len(Body.calls), mean


@pytest.fixture(autouse=True)
def _no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight samples follow each other; those that share a pass run everything once anyway."""
    Body.calls = []
    monkeypatch.setattr("bayesify.module.batching._MIN_GROUP", 10**9)


def reference(bnn: BayesianModule) -> Tensor:
    """Each pass in full."""
    torch.manual_seed(1)
    return bnn.predict(X, S, batch_size=len(X), max_memory="1 GB").mean


def test_the_body_is_run_once() -> None:
    bnn = made(Net(Body()))
    count, mean = calls_of(bnn)
    assert count == 1
    assert torch.equal(mean, reference(bnn))
    assert len(Body.calls) > S, "under a cap on the memory nothing is kept"
    assert torch.equal(bnn.predict(X, S).mean, mean)
    Body.calls = []
    bnn.predict(X, S, batch_size=3)
    assert Body.calls == [3, 3, 1], "each batch once"
    assert not any("forward" in vars(module) for module in bnn.modules())


def test_the_last_layer_of_a_sequence() -> None:
    net = nn.Sequential(Body(), nn.ReLU(), nn.Linear(4, 2))
    bnn = BayesianModule(net, include=last_layer(net))
    assert calls_of(bnn)[0] == 1


def changed(hidden: Tensor) -> Tensor:
    return hidden.mul_(2.0)


def popped(hidden: Any) -> Tensor:
    return hidden.pop()["hidden"]


@loop_over(
    ("body", "edit", "count"),
    [
        (Listing, popped, 1),
        (Drawing, nn.Identity(), S),
        (EditingInputs, nn.Identity(), S),
        (EditingItself, nn.Identity(), S),
        (Body, changed, S),  # the network edits what the body returned
    ],
)
def test_only_what_stays_the_same_is_kept(
    body: type[Body], edit: Callable[[Any], Tensor], count: int
) -> None:
    bnn = made(Net(body(), edit))
    other = copy.deepcopy(bnn)
    found, mean = calls_of(bnn)
    assert found == count
    if body is not EditingItself:
        assert torch.equal(mean, reference(other))


def test_what_comes_after_a_random_weight_is_run_each_time() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(3, 3), Body()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.head(x))

    bnn = made(Late())
    count, mean = calls_of(bnn)
    assert count == S
    assert torch.equal(mean, reference(bnn))


def test_a_body_that_depends_on_the_weights_without_their_layer() -> None:
    """A weight is used outside its module, so that nothing tells when: inputs are compared."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body, self.twice = nn.Linear(3, 3), Body(), Body()

        def forward(self, x: Tensor) -> Tensor:
            first = self.twice(x)
            return self.body(F.linear(x, self.head.weight)) + first

    bnn = made(Hidden())
    count, mean = calls_of(bnn)
    assert count == S + 1
    assert torch.equal(mean, reference(bnn))


def test_hooks_see_every_pass() -> None:
    bnn = made(Net(Body()))
    seen: list[int] = []
    handle = bnn.net.body.layer.register_forward_hook(lambda *_: seen.append(1))
    calls_of(bnn)
    assert len(seen) == 1 + S
    handle.remove()
    assert calls_of(bnn)[0] == 1


def test_inference_mode_and_forwards_of_ones_own() -> None:
    bnn = made(Net(Body()))
    mean = calls_of(bnn)[1]
    with torch.inference_mode():
        assert torch.equal(calls_of(bnn)[1], mean)
    bnn.net.body.forward = bnn.net.body.forward  # as libraries do that move weights
    count, found = calls_of(bnn)
    assert (count, torch.equal(found, mean)) == (S, True)
    assert "forward" in vars(bnn.net.body)


def test_little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    bnn = made(Net(Body()))
    monkeypatch.setattr("bayesify.module.reuse._LARGEST", 0)
    assert calls_of(bnn)[0] == S


def test_errors_restore_the_network() -> None:
    class Failing(Body):
        def forward(self, x: Tensor) -> Any:
            if len(type(self).calls) > 3:
                raise OSError("the fourth")
            return torch.rand(()) * super().forward(x)

    bnn = made(Net(Failing()))
    Failing.calls = []
    with pytest.raises(OSError, match="the fourth"):
        bnn.predict(X, 20, batch_size=7)
    assert not any("forward" in vars(module) for module in bnn.modules())
