"""Playing: what is recorded, with any environment and agent, and going on after an interruption."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.bandits.test_bandits import few
from tests.loops import loop_over
from torch import nn

import bayesify as bf
from bayesify.bandits import (
    Discrete,
    EpsilonGreedy,
    Learning,
    MushroomBandit,
    Record,
    ThompsonSampler,
    play,
)
from bayesify.io import StorageError, write_tensors

STEPS = 23
LEARNING = Learning(
    buffer_size=8, batch_size=4, updates=2, optimizer=partial(torch.optim.Adam, lr=0.01)
)


def adam(**options: Any) -> Learning:
    return replace(LEARNING, optimizer=partial(torch.optim.Adam, lr=0.01, **options))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3 + 2, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))


def thompson(learning: Learning = LEARNING, **options: Any) -> ThompsonSampler:
    bnn = bf.BayesianModule(net(), likelihood=bf.GaussianLikelihood(learn_std=True), **options)
    return ThompsonSampler(bnn, 2, num_samples=2, learning=learning)


def epsilon(learning: Learning = LEARNING, epsilon: float = 0.3) -> EpsilonGreedy:
    return EpsilonGreedy(net(), 2, epsilon=epsilon, learning=learning)


def test_numbers_of_numpy_are_stored(tmp_path: Path) -> None:
    """As Gymnasium's spaces and configurations have them."""
    numbers = {"reward_scale": np.float32(2.0), "temperature": np.float32(0.5)}
    learning = Learning(updates=1, **numbers)
    bnn = bf.BayesianModule(net(), likelihood=bf.GaussianLikelihood())
    sampler = ThompsonSampler(bnn, np.int64(2), num_samples=np.int64(2), learning=learning)
    greedy = EpsilonGreedy(net(), np.int64(2), epsilon=np.float32(0.3), learning=learning)
    rate = replace(LEARNING, optimizer=partial(torch.optim.Adam, lr=np.float32(0.01)))
    for number, agent in enumerate((sampler, greedy, thompson(rate))):
        play(agent, MushroomBandit(few()), 3, checkpoint=tmp_path / str(number))
        assert (tmp_path / str(number)).exists()


class Fixed:
    """Takes the actions that it is told, and remembers what it was told of them."""

    def __init__(self, actions: list[int]) -> None:
        self.actions, self.observed, self.learnt = actions, list[Any](), 0

    def act(self, context: Any) -> int:  # noqa: ARG002
        return self.actions[len(self.observed)]

    def observe(self, context: Any, action: int, reward: float) -> None:
        self.observed.append((int(torch.as_tensor(context).argmax()), action, reward))

    def learn(self) -> None:
        self.learnt += 1


class Space:
    """Like Gymnasium's, whose numbers are numpy's and whose first action may be another than 0."""

    def __init__(self, n: int, start: int) -> None:
        self.n, self.start = np.int64(n), np.int64(start)


class FromOutside:
    """An environment with Gymnasium's interface and episodes of one step, which knows no regret."""

    def __init__(self) -> None:
        self.action_space = Space(2, start=1)
        self.seeds: list[int | None] = []
        self.acted: list[int] = []

    def reset(self, *, seed: int | None = None, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.seeds.append(seed)
        return np.eye(3)[len(self.acted) % 3], {}

    def step(self, action: int) -> tuple[np.ndarray, np.float32, bool, bool, dict[str, Any]]:
        assert action in (1, 2)
        self.acted.append(action)
        ended = len(self.acted) % 2 == 0
        return np.zeros(3), np.float32(action), ended, not ended, {}


# ------------------------------------------------------------------------------------ what is kept


def test_regret_is_what_the_best_actions_would_have_got_more() -> None:
    agent, environment = Fixed([0, 1] * 50), MushroomBandit(few(), seed=2)
    told: list[int] = []
    record = play(agent, environment, 100, on_progress=told.append)
    assert told == list(range(1, 101))
    assert agent.learnt == 100
    assert record.actions.tolist() == agent.actions
    total = 0.0
    for step, (shown, action, reward) in enumerate(agent.observed):
        best = 5.0 if shown == 0 else 0.0
        assert reward in (((0.0,), (5.0,)), ((0.0,), (5.0, -35.0)))[shown > 0][action]
        assert float(record.rewards[step]) == reward
        assert float(record.best_rewards[step]) == best
        total += best - reward
        assert float(record.regret[step]) == total


def test_acting_for_the_best_has_no_regret() -> None:
    environment = MushroomBandit(few(), seed=2)
    first, _ = environment.reset(seed=5)
    shown = [first, *(environment.step(0)[0] for _ in range(29))]
    best = Fixed([int(context[0] == 1.0) for context in shown])
    assert play(best, MushroomBandit(few()), 30, seed=5).regret.tolist() == [0.0] * 30


@loop_over("make", [thompson, epsilon])
def test_an_environment_from_outside(make: Callable[[], Any]) -> None:
    environment = FromOutside()
    record = play(make(), environment, 12, seed=9)
    assert environment.seeds == [9] + [None] * 12
    assert [action + 1 for action in record.actions.tolist()] == environment.acted
    assert record.rewards.tolist() == environment.acted
    with pytest.raises(ValueError, match=r'info."best_reward".*12 of 12 lacked it; use rewards'):
        _ = record.regret


# ---------------------------------------------------------------------------------------- going on


class StoppedError(Exception):
    pass


def stop_at(step: int) -> Callable[[int], None]:
    def on_progress(done: int) -> None:
        if done == step:
            raise StoppedError

    return on_progress


def state_of(agent: Any) -> dict[str, torch.Tensor]:
    tensors, meta = agent.parts()
    kept = {name: value.clone() for name, value in tensors.items()}  # loading writes in place
    return {**kept, "acts": torch.tensor(meta["acts"])}


def check_equal(one: tuple[Any, Record], other: tuple[Any, Record]) -> None:
    for name, part in vars(one[1]).items():
        assert torch.equal(part, getattr(other[1], name)), name
    states = [state_of(each) for each, _ in (one, other)]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def play_in_parts(make: Callable[[], Any], path: Path, stops: list[int]) -> tuple[Any, Record]:
    for stop in stops:
        with pytest.raises(StoppedError):
            play(
                make(),
                MushroomBandit(few(), seed=1),
                STEPS,
                checkpoint=path,
                every=5,
                on_progress=stop_at(stop),
            )
        torch.randn(stop)  # the global generator is of no account
    agent = make()
    record = play(agent, MushroomBandit(few(), seed=77), STEPS, checkpoint=path, every=5)
    return agent, record


@loop_over("make", [thompson, epsilon])
@loop_over("stops", [[3], [7, 12], [5, 20]])
def test_an_interrupted_run_is_the_uninterrupted_one(
    make: Callable[[], Any], stops: list[int], tmp_path: Path
) -> None:
    whole = make()
    record = play(whole, MushroomBandit(few(), seed=1 if stops[0] >= 5 else 77), STEPS)
    found = play_in_parts(make, tmp_path / "in" / "play.safetensors", stops)
    check_equal(found, (whole, record))
    # It is over: nothing is played again, and more can be.
    path = tmp_path / "in" / "play.safetensors"
    agent = make()
    check_equal((agent, play(agent, MushroomBandit(few()), STEPS, checkpoint=path)), found)
    longer = play(make(), MushroomBandit(few()), STEPS + 4, checkpoint=path)
    assert torch.equal(longer.rewards[:STEPS], record.rewards)


@loop_over("lost", ["acts", "buffer", "step"])
def test_a_state_that_is_not_restored_is_caught(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = thompson()
    record = play(whole, MushroomBandit(few(), seed=1), STEPS)
    load = ThompsonSampler.load_parts

    def forgetful(self: Any, *args: Any) -> None:
        load(self, *args)
        if lost == "acts":
            self.acts = 0
        elif lost == "step":
            self.rewards.elbo.step = 0
        else:
            self.rewards.buffer.added -= 1

    monkeypatch.setattr(ThompsonSampler, "load_parts", forgetful)
    with pytest.raises(AssertionError):
        check_equal(play_in_parts(thompson, tmp_path / "play", [7]), (whole, record))


def test_ctrl_c_keeps_what_was_done(tmp_path: Path) -> None:
    def press(done: int) -> None:
        if done == 8:
            os.kill(os.getpid(), signal.SIGINT)

    path = tmp_path / "play"
    environment = MushroomBandit(few(), seed=1)
    with pytest.raises(KeyboardInterrupt):
        play(thompson(), environment, STEPS, checkpoint=path, on_progress=press)
    told: list[int] = []
    agent = thompson()
    record = play(agent, environment, STEPS, checkpoint=path, on_progress=told.append)
    assert told[0] == 10  # the ninth was done when the key was seen
    whole = thompson()
    check_equal((agent, record), (whole, play(whole, MushroomBandit(few(), seed=1), STEPS)))


# ------------------------------------------------------------------------------------------- errors


@loop_over(
    ("other", "message"),
    [
        (lambda: epsilon(), "another agent"),
        (lambda: thompson(prior=bf.Gaussian(0.7)), "another network"),
        (lambda: thompson(Learning(buffer_size=9, batch_size=4, updates=2)), "way of learning"),
        (lambda: thompson(Learning(8, 4, 2, optimizer=torch.optim.SGD)), "another optimizer"),
        (lambda: thompson(Learning(8, 4, 2)), r"another optimizer.*lr is \[0.001, .* and \[0.01, "),
        (
            lambda: thompson(adam(betas=(0.5, 0.9))),
            r"another optimizer.*betas is \[\[0.5, .* and \[\[0.9, ",
        ),
        (lambda: thompson(adam(weight_decay=0.1)), "another optimizer.*weight_decay is "),
    ],
)
def test_a_checkpoint_of_another_agent_is_refused(
    other: Callable[[], Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "play"
    play(thompson(), MushroomBandit(few()), 5, checkpoint=path)
    agent = other()
    before = state_of(agent)
    with pytest.raises(StorageError, match=message):
        play(agent, MushroomBandit(few()), 9, checkpoint=path)
    after = state_of(agent)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


class CountingAdam(torch.optim.Adam):
    """Keeps a number next to the settings, as schedule-free optimisers do, and one per tensor."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        for state in self.state.values():
            state["steps.made"] = state.get("steps.made", torch.zeros(())) + 1
        return loss


def test_what_an_optimiser_counts_is_no_setting(tmp_path: Path) -> None:
    learning = replace(LEARNING, optimizer=partial(CountingAdam, lr=0.01))
    play(thompson(learning), MushroomBandit(few()), 5, checkpoint=tmp_path / "play")
    agent = thompson(learning)
    play(agent, MushroomBandit(few()), 9, checkpoint=tmp_path / "play")
    optimizer = agent.rewards.optimizer
    assert optimizer.param_groups[0]["k"] == 18
    assert {float(state["steps.made"]) for state in optimizer.state.values()} == {18.0}


class Counting(Fixed):
    """Whose state has the names that a run's own parts have."""

    def parts(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        learnt = torch.tensor(self.learnt)
        return {"context": learnt, "record.actions": learnt}, {"kind": "of mine", "environment": 3}

    def load_parts(self, path: Path, tensors: Any, meta: Any) -> None:  # noqa: ARG002
        assert meta == {"kind": "of mine", "environment": 3}
        assert tensors["record.actions"] == tensors["context"]
        self.learnt = int(tensors["context"])
        self.observed = [None] * self.learnt


def test_an_agents_state_may_have_any_names(tmp_path: Path) -> None:
    actions = [0, 1] * 5
    whole = play(Counting(actions), MushroomBandit(few(), seed=1), 10)
    play(Counting(actions), MushroomBandit(few(), seed=1), 4, checkpoint=tmp_path / "play")
    agent = Counting(actions)
    record = play(agent, MushroomBandit(few(), seed=1), 10, checkpoint=tmp_path / "play")
    assert agent.learnt == 10
    assert torch.equal(record.rewards, whole.rewards)


class Unloadable(Fixed):
    """Has one of the two methods that a checkpoint needs."""

    def parts(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return {}, {}


class WithArray(MushroomBandit):
    """An environment whose state is no JSON."""

    def state_dict(self) -> dict[str, Any]:
        return {"array": np.zeros(2)}


def test_wrong_uses_are_named(tmp_path: Path) -> None:
    path = tmp_path / "play"
    environment = MushroomBandit(few())
    for options in ({"steps": 0}, {"steps": 5, "every": 0}):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            play(thompson(), environment, **options)  # type: ignore[arg-type]
    for options in ({"steps": 2.5}, {"steps": 5, "every": 2.5}):
        with pytest.raises(TypeError, match=r"(steps|every) must be a whole number, got 2\.5"):
            play(thompson(), environment, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"FromOutside must have state_dict\(\) and load_state"):
        play(thompson(), FromOutside(), 5, checkpoint=path)
    with pytest.raises(ValueError, match="of WithArray must hold what JSON can, but Object"):
        play(thompson(), WithArray(few()), 5, checkpoint=path, on_progress=pytest.fail)
    with pytest.raises(ValueError, match=r"Fixed must have parts\(\) and load_parts"):
        play(Fixed([0] * 5), environment, 5, checkpoint=path)
    with pytest.raises(ValueError, match=r"Unloadable must have parts\(\) and load_parts"):
        play(Unloadable([0] * 5), environment, 5, checkpoint=path)
    assert not path.exists()
    environment.action_space = Discrete(3)
    with pytest.raises(ValueError, match="same number of actions, got 2 and 3"):
        play(thompson(), environment, 5)
    play(thompson(), MushroomBandit(few()), 5, checkpoint=path)
    with pytest.raises(StorageError, match="holds 5 interactions, more than the requested steps=4"):
        play(thompson(), MushroomBandit(few()), 4, checkpoint=path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(StorageError, match="cut off or altered"):
        play(thompson(), MushroomBandit(few()), 9, checkpoint=path)
    write_tensors(path, {}, {"kind": "checkpoint"})
    with pytest.raises(StorageError, match="must hold the state of a bandit's run"):
        play(thompson(), MushroomBandit(few()), 9, checkpoint=path)


@pytest.mark.parametrize("make", [thompson, epsilon])
def test_a_copy_goes_on_as_its_original(make: Callable[[], Any]) -> None:
    agent = make()
    play(agent, MushroomBandit(few(), seed=1), 10)
    copies = [copy.deepcopy(agent), pickle.loads(pickle.dumps(agent))]
    expected = play(agent, MushroomBandit(few(), seed=2), 20).actions
    weights = agent.rewards.bnn.posterior.mean
    for other in copies:
        assert torch.equal(play(other, MushroomBandit(few(), seed=2), 20).actions, expected)
        assert torch.equal(other.rewards.bnn.posterior.mean, weights)
