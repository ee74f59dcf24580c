"""Each guard of a recorded pass by itself: what makes it unsound, and what ends a later one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesify as bf
from bayesify.module.recorded_pass import Recording
from bayesify.module.replayed_pass import Forgotten, Replay
from bayesify.module.trunk import Trunk

pytestmark = pytest.mark.usefixtures("trunks_of_small_networks")

X, FROZEN = torch.linspace(-1.0, 1.0, 6).view(2, 3), torch.eye(3) + 0.5
RANDOM = torch.ones(3, 1)


def plain(x: Tensor, frozen: Tensor, random: Tensor) -> Tensor:
    return (x @ frozen).relu() @ random


def with_gradients(x: Tensor, frozen: Tensor, random: Tensor) -> Tensor:
    with torch.enable_grad():
        hidden = x @ frozen
    return hidden @ random


def with_tangents(x: Tensor, frozen: Tensor, random: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        hidden = x @ frozen
    return hidden @ random


def with_inference(x: Tensor, frozen: Tensor, random: Tensor) -> Tensor:
    with torch.inference_mode():
        hidden = x @ frozen
    return hidden @ random


def with_restored_numbers(x: Tensor, frozen: Tensor, random: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        noise = torch.rand(3)
    return (x @ frozen + noise) @ random


def that_edits_its_input(x: Tensor, frozen: Tensor, random: Tensor) -> Tensor:
    x.mul_(2.0)
    return (x @ frozen) @ random


def that_edits_what_was_read(x: Tensor, frozen: Tensor, random: Tensor) -> Tensor:
    hidden = x @ frozen
    first = hidden @ random
    hidden.relu_()
    return first + hidden @ random


def unseen(x: Tensor, frozen: Tensor, random: Tensor) -> Tensor:
    hidden = x @ frozen
    with torch._C.DisableTorchFunction():
        hidden.mul_(2.0)
    return hidden.relu() @ random


KEPT: list[Tensor] = []


def that_keeps(x: Tensor, frozen: Tensor, random: Tensor) -> Tensor:
    hidden = x @ frozen
    KEPT.append(hidden)
    return hidden.relu() @ random


def that_reads(x: Tensor, frozen: Tensor, random: Tensor) -> Tensor:
    return (x @ frozen) @ random * float(random[0, 0])


def without_random(x: Tensor, frozen: Tensor, random: Tensor) -> Tensor:
    return x @ frozen


def recorded(run: Callable[..., Tensor]) -> tuple[Recording, Tensor]:
    x, frozen = X.clone(), FROZEN.clone()
    KEPT.clear()
    with torch.no_grad(), Recording([x], [frozen]) as recording:
        outputs = run(x, frozen, RANDOM.clone())
    return recording, outputs


def test_a_plain_pass_is_sound() -> None:
    recording, outputs = recorded(plain)
    assert recording.is_sound(outputs)
    assert 0.0 < recording.share < 1.0
    assert recording.saving < recording.share


@pytest.mark.parametrize(
    "run",
    [
        with_gradients,
        with_tangents,
        with_inference,
        with_restored_numbers,
        unseen,
        that_reads,
        that_edits_its_input,
        that_edits_what_was_read,
        that_keeps,
        without_random,
    ],
)
def test_a_pass_is_not_sound(run: Callable[..., Tensor]) -> None:
    recording, outputs = recorded(run)
    assert not recording.is_sound(outputs)


class Answers:
    """What a replay answers for."""

    is_used = True


def test_a_call_that_differs_ends_the_answers() -> None:
    x, other = X.clone(), X.clone()
    with torch.no_grad(), Recording([x], []) as recording:
        made = x.mul(0.0)
    calls: dict[str, Callable[[], Tensor]] = {
        "object": lambda: other.mul(0.0),
        "number": lambda: x.mul(1.0),
        "sign": lambda: x.mul(-0.0),
        "kind of number": lambda: x.mul(0),
        "function": lambda: x.add(0.0),
        "one more": lambda: x.mul(0.0).exp(),
    }
    for name, call in calls.items():
        answers = Answers()
        error = pytest.raises(RuntimeError, match="differs from the first")
        with torch.no_grad(), error, Replay(recording.calls, [x, made], answers):
            call()
        assert not answers.is_used, name
    answers = Answers()
    with torch.no_grad(), Replay(recording.calls, [x, made], answers):
        assert x.mul(0.0) is made
    assert answers.is_used


def test_a_stand_in_cannot_be_used() -> None:
    for use in (lambda t: t + 1.0, lambda t: t.shape, lambda t: torch._C._nn.gelu(t), torch.relu):
        answers = Answers()
        with pytest.raises(RuntimeError, match="did not keep this tensor"):
            use(Forgotten(answers))
        assert not answers.is_used


class Changing(nn.Module):
    """Does something else than before in a pass that calls the same functions."""

    change = ""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.change == "keeps":
            self.kept = hidden
        hidden = self.second(hidden)
        if self.change == "edits":
            with torch._C.DisableTorchFunction():
                hidden.mul_(2.0)
        result: Tensor = self.head(hidden)
        return result


@pytest.mark.parametrize("change", ["", "keeps", "edits"])
def test_a_later_pass_that_keeps_or_edits_is_run_again(change: str) -> None:
    bnn = bf.BayesianModule(Changing(), include=("head.*",))
    trunk, weights = Trunk(bnn), bnn.posterior.mean.detach()
    with torch.no_grad():
        trunk.first(weights, (X,), {})
        assert trunk.is_used
        bnn.net.change = change
        trunk.again(weights, (X,), {})
    assert trunk.is_used == (change == "")


class Counting(nn.Module):
    """Counts its passes in a buffer, and marks its input."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("passes", torch.zeros(()))
        self.counts = True

    def forward(self, x: Tensor) -> Tensor:
        x.seen = True
        if self.counts:
            self.passes.add_(1.0)
        result: Tensor = self.head(self.body(x))
        return result


def test_buffers_and_inputs_are_as_after_whole_passes() -> None:
    x = X.repeat(5, 1)
    for counts in (True, False):
        bnn = bf.BayesianModule(Counting(), include=("head.*",))
        bnn.net.counts = counts
        bnn.summary(x)
        assert float(bnn.net.passes) == 0.0
        bnn.predict(x, 6, batch_size=4)
        assert float(bnn.net.passes) == (18.0 if counts else 0.0)
        bnn.predict(x, 6, batch_size=10)
        assert not hasattr(x, "seen")
