"""The environment and the memory of bandits."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy import stats
from tests.loops import loop_over
from torch import Tensor

from bayesify.bandits import Discrete, MushroomBandit, ReplayBuffer
from bayesify.datasets import MushroomData, load_mushroom

#: Six p-values, each of which may be as low as this: a false alarm has at most 1e-3 in all.
LEAST = 1e-3 / 6


def few(poisonous: Sequence[bool] = (False, True, True)) -> MushroomData:
    """Mushrooms whose contexts are the rows of a unit matrix."""
    count = len(poisonous)
    return MushroomData(
        torch.eye(count), torch.tensor(poisonous), tuple(f"f={k}" for k in range(count))
    )


def played(environment: MushroomBandit, action: int, steps: int) -> tuple[list[int], list[float]]:
    """Which mushrooms were shown, and what the one action got for each."""
    context, info = environment.reset()
    assert info == {}
    shown, rewards = [], []
    for _ in range(steps):
        shown.append(int(context.argmax()))
        context, reward, terminated, truncated, info = environment.step(action)
        assert not terminated
        assert not truncated
        poisonous = bool(shown[-1])
        assert info == {"best_reward": 0.0 if poisonous else 5.0, "poisonous": poisonous}
        rewards.append(reward)
    return shown, rewards


def chances(environment: MushroomBandit, steps: int = 6000) -> tuple[float, float]:
    """p-values: that each mushroom is as likely, and that half of the poisonous cost 35."""
    shown, rewards = played(environment, 1, steps)
    counts = [shown.count(place) for place in range(3)]
    costs = [reward for place, reward in zip(shown, rewards, strict=True) if place]
    assert {r for place, r in zip(shown, rewards, strict=True) if not place} == {5.0}
    assert set(costs) == {5.0, -35.0}
    halves = [costs.count(5.0), costs.count(-35.0)]
    return float(stats.chisquare(counts).pvalue), float(stats.chisquare(halves).pvalue)


@loop_over("seed", [0, 1, 2])
def test_mushrooms_and_rewards_are_as_likely_as_they_should_be(seed: int) -> None:
    assert min(chances(MushroomBandit(few(), seed=seed))) > LEAST


def test_a_wrong_chance_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    step, lucky = MushroomBandit.step, itertools.cycle([True] + 9 * [False])

    def kinder(self: MushroomBandit, action: int) -> tuple[Any, ...]:
        context, reward, *rest = step(self, action)
        return context, 5.0 if next(lucky) else reward, *rest

    monkeypatch.setattr(MushroomBandit, "step", kinder)
    assert chances(MushroomBandit(few()))[1] < LEAST


def test_passing_costs_what_eating_would_have_got() -> None:
    shown, rewards = played(MushroomBandit(few()), 0, 50)
    assert set(rewards) == {0.0}
    assert {0, 1, 2} == set(shown)


def test_all_is_a_function_of_seed_and_interaction() -> None:
    data = load_mushroom()
    one, other = MushroomBandit(data, seed=3), MushroomBandit(data, seed=4)
    context, _ = one.reset()
    seen = [context, *(one.step(1)[0] for _ in range(20))]
    other.reset()
    other.load_state_dict({**one.state_dict(), "interaction": 10})
    for step in range(11, 21):
        assert torch.equal(other.step(0)[0], seen[step])  # whatever was done
    assert other.state_dict() == one.state_dict()
    anew, _ = other.reset(seed=3)
    assert torch.equal(anew, seen[0])
    assert torch.equal(one.reset(seed=4)[0], MushroomBandit(data, seed=4).reset()[0])
    # Without a seed there is another mushroom, and no way back.
    assert one.reset()[1] == {}
    assert one.state_dict() == {"seed": 4, "interaction": 1}
    assert not torch.equal(one.reset(seed=4)[0], one.reset(seed=5)[0])


def test_an_agent_may_edit_the_context_that_it_sees() -> None:
    data = load_mushroom()
    environment, before = MushroomBandit(data), data.contexts.clone()
    environment.reset()[0].zero_()
    environment.step(0)[0].sub_(0.5)
    assert torch.equal(data.contexts, before)


def test_what_cannot_be_done_is_named() -> None:
    environment = MushroomBandit(few())
    with pytest.raises(RuntimeError, match=r"call reset\(\) before step"):
        environment.step(0)
    environment.reset()
    for action in (2, -1, 0.5):
        with pytest.raises(ValueError, match=f"0 .pass. or 1 .eat., got {action}"):
            environment.step(action)
    with pytest.raises(ValueError, match="at least 1 action, got n=0"):
        Discrete(0)
    assert Discrete(1).n == 1
    empty = MushroomData(torch.zeros(0, 3), torch.zeros(0, dtype=torch.bool), ())
    with pytest.raises(ValueError, match=r"N of at least 1, got \(0, 3\)"):
        MushroomBandit(empty)


# --------------------------------------------------------------------------------------- the memory


def filled(count: int, capacity: int = 4) -> ReplayBuffer:
    buffer = ReplayBuffer(capacity)
    for number in range(count):
        buffer.add(torch.full((2,), float(number)), number % 3, -float(number))
    return buffer


@loop_over(("count", "kept"), [(1, [0]), (4, [0, 1, 2, 3]), (6, [4, 5, 2, 3])])
def test_the_ring_keeps_the_last(count: int, kept: list[int]) -> None:
    buffer = filled(count)
    contexts, actions, rewards = buffer.interactions
    assert len(buffer) == len(kept)
    assert contexts[:, 0].tolist() == contexts[:, 1].tolist() == kept
    assert actions.tolist() == [number % 3 for number in kept]
    assert rewards.tolist() == [-number for number in kept]
    again = ReplayBuffer(4)
    again.load(buffer.tensors(), buffer.added)
    for one in (buffer, again):
        one.add(torch.zeros(2), 0, 9.0)
    assert again.added == buffer.added
    assert torch.equal(again.interactions.rewards, buffer.interactions.rewards)


def draws(buffer: ReplayBuffer, seed: int, draws: range) -> Tensor:
    return torch.cat([buffer.minibatch(50, seed=seed, draw=draw).rewards for draw in draws])


def test_a_minibatch_is_a_function_of_seed_and_draw() -> None:
    buffer = filled(3)
    one = draws(buffer, 5, range(20))
    assert torch.equal(draws(buffer, 5, range(20)), one)
    assert not torch.equal(draws(buffer, 6, range(20)), one)
    assert not torch.equal(one[:50], one[50:100])
    contexts, actions, rewards = buffer.minibatch(7, seed=0, draw=0)
    assert torch.equal(contexts[:, 0], -rewards)
    assert torch.equal(actions, contexts[:, 0].long())


def test_all_that_are_kept_are_as_likely() -> None:
    for count, capacity in ((3, 4), (9, 4)):  # before the ring is full, and after
        rewards = draws(filled(count, capacity), 1, range(100))
        found = rewards.unique(return_counts=True)[1].tolist()
        assert len(found) == min(count, capacity)
        assert stats.chisquare(found).pvalue > LEAST


@loop_over(
    ("act", "message"),
    [
        (lambda: ReplayBuffer(0), "capacity must be at least 1, got 0"),
        (lambda: ReplayBuffer(2).interactions, "buffer is empty"),
        (lambda: ReplayBuffer(2).minibatch(3, seed=0, draw=0), "buffer is empty"),
        (lambda: filled(2).minibatch(0, seed=0, draw=0), "at least 1 interaction, got 0"),
        (
            lambda: filled(2).add(torch.zeros(3), 0, 0.0),
            r"shape \(2,\) like those before, got \(3,",
        ),
        (lambda: ReplayBuffer(2).add(torch.zeros(1, 3), 0, 0.0), r"shape \(d,\), got \(1, 3\)"),
    ],
)
def test_a_wrong_use_of_the_memory_is_named(act: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()  # type: ignore[operator]


def test_a_part_of_an_interaction_is_not_kept() -> None:
    with pytest.raises(TypeError, match=r"capacity must be a whole number, got 2\.5"):
        ReplayBuffer(2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"size must be a whole number, got 2\.5"):
        filled(2).minibatch(2.5, seed=0, draw=0)  # type: ignore[arg-type]


def test_the_library_does_without_bandits_and_bandits_without_what_is_heavy() -> None:
    code = (
        "import sys, bayesify; assert 'bayesify.bandits' not in sys.modules; "
        "import bayesify.bandits; "
        "print(sorted({'gymnasium', 'matplotlib', 'pandas', 'sklearn'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
