"""Observations, actions and numbers that agents and environments may be given, and may not."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.bandits.test_bandits import few
from tests.bandits.test_playing import FromOutside, net, thompson
from tests.loops import loop_over
from torch import nn

import bayesify as bf
from bayesify.bandits import (
    Discrete,
    EpsilonGreedy,
    Learning,
    MushroomBandit,
    ReplayBuffer,
    ThompsonSampler,
    play,
)
from bayesify.training import NonFiniteLossError


class InPlace:
    """Writes each observation into the memory of the last, as some environments do."""

    def __init__(self, memory: Any) -> None:
        self.action_space = Discrete(2)
        self.memory, self.steps = memory, 0

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.memory[:] = self.steps
        return self.memory, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # noqa: ARG002
        self.steps += 1
        return self.reset()[0], 0.0, self.steps % 3 == 0, False, {}


@loop_over("memory", [np.zeros(3), torch.zeros(3, dtype=torch.float64)])
def test_an_observation_is_kept_as_it_was_when_the_agent_acted(memory: Any) -> None:
    agent = thompson()
    play(agent, InPlace(memory), 5)
    assert agent.rewards.buffer.interactions.contexts[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_any_array_of_numbers_is_an_observation() -> None:
    fixed = np.arange(3.0)
    fixed.setflags(write=False)
    agent = thompson()
    for context in (fixed, np.arange(3.0)[::-1], [0, 1, 2], np.array([True, False, True])):
        agent.observe(context, agent.act(context), 1.0)
    assert agent.rewards.buffer.interactions.contexts[1].tolist() == [2.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="vector of numbers, array or tensor, got dict; flatten"):
        agent.act({"place": 1.0})


def test_a_context_that_requires_a_gradient_does_not_join_the_training() -> None:
    agent = thompson()
    agent.observe(torch.ones(3, requires_grad=True), 1, 1.0)
    assert not agent.rewards.buffer.interactions.contexts.requires_grad
    buffer = ReplayBuffer(2)
    buffer.add(torch.ones(3, requires_grad=True), 1, 1.0)
    assert not buffer.interactions.contexts.requires_grad
    for _ in range(2):
        agent.learn()


@loop_over("action", [1, np.int64(1), np.array(1), torch.tensor(1), 1.0, True])
def test_a_number_of_any_kind_is_an_action(action: Any) -> None:
    agent, environment = thompson(), MushroomBandit(few(), seed=np.int64(3))  # type: ignore[arg-type]
    environment.reset(seed=np.int64(4))  # type: ignore[arg-type]
    assert environment.step(action)[1] in (5.0, -35.0)
    agent.observe(torch.ones(3), action, np.float32(2.0))
    assert agent.rewards.buffer.interactions.actions.tolist() == [1]


@loop_over("action", [0.5, math.nan, -1, 2, "1", None])
def test_another_action_is_named(action: Any) -> None:
    environment = MushroomBandit(few())
    environment.reset()
    with pytest.raises(ValueError, match=f"must be 0 .pass. or 1 .eat., got {action!r}"):
        environment.step(action)
    with pytest.raises(ValueError, match=f"action must be from 0 to 1, got {action!r}"):
        thompson().observe(torch.ones(3), action, 1.0)


def test_actions_that_are_no_numbers_are_named() -> None:
    environment = FromOutside()
    environment.action_space = object()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"action_space such as Discrete\(n\), got object"):
        play(thompson(), environment, 3)


def test_classes_are_no_rewards() -> None:
    bnn = bf.BayesianModule(net())
    with pytest.raises(ValueError, match=r"such as GaussianLikelihood\(\), got Categorical"):
        ThompsonSampler(bnn, 2)


@loop_over(
    "make",
    [
        partial(Learning, batch_size=2.5),  # type: ignore[arg-type]
        partial(Learning, buffer_size=lambda seen: seen),  # type: ignore[arg-type]
        partial(Learning, updates="many"),  # type: ignore[arg-type]
    ],
)
def test_numbers_that_are_not_whole_are_named(make: Callable[[], Learning]) -> None:
    with pytest.raises(TypeError, match=r"(size|updates) must be a whole number, got "):
        make()


def test_a_function_of_updates_returns_a_whole_number() -> None:
    for number, error in ((2.5, TypeError), (-1, ValueError)):
        agent = thompson(learning=Learning(updates=lambda _, number=number: number))
        agent.observe(torch.ones(3), 1, 5.0)
        with pytest.raises(error, match=f"the result of updates must be .*, got {number}"):
            agent.learn()


def test_contexts_of_another_length_are_named() -> None:
    agent = thompson()
    with pytest.raises(ValueError, match="failed on rows of 6 numbers, 4 of a context and"):
        agent.act(torch.ones(4))
    agent.observe(torch.ones(3), 0, 1.0)
    for call in (agent.act, lambda context: agent.observe(context, 0, 1.0)):
        with pytest.raises(
            ValueError, match=r"must have shape \(3,\) like those before, got \(4,\)"
        ):
            call(torch.ones(4))


@loop_over("value", [math.nan, math.inf])
def test_a_network_that_answers_with_no_number_is_named(value: float) -> None:
    linear = nn.Linear(3 + 2, 1)
    nn.init.constant_(linear.weight, value)
    with pytest.raises(NonFiniteLossError, match="predicts NaN or infinity"):
        EpsilonGreedy(linear, 2, epsilon=0.0).act(torch.ones(3))


def test_dropout_is_seeded_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of the generators begins alike each time: unseeded, all steps drop the same units."""
    seeds: list[int] = []
    agent = thompson()
    agent.observe(torch.ones(3), 1, 1.0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    device = SimpleNamespace(
        manual_seed_all=seeds.append,
        manual_seed=None,
        get_rng_state_all=lambda: [],
        set_rng_state_all=lambda _: None,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    for _ in range(2):
        agent.learn()
    assert len(set(seeds)) == 4
