"""Run an agent in an environment and record actions, rewards and regret."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bayesify.bandits.environment import Environment, context_of
from bayesify.io import StorageError, read_tensors, write_tensors
from bayesify.noise.arguments import whole_number
from bayesify.training.interrupt import deferred_interrupt

__all__ = ["Agent", "Record", "play"]


class Agent(Protocol):
    """The interface that :func:`play` needs; a checkpoint also needs ``parts``, ``load_parts``.

    Example:
        >>> class Same:
        ...     def act(self, context):
        ...         return 1
        ...     def observe(self, context, action, reward):
        ...         pass
        ...     def learn(self):
        ...         pass
        >>> from bayesify.bandits import MushroomBandit
        >>> from bayesify.datasets import load_mushroom
        >>> play(Same(), MushroomBandit(load_mushroom()), 3).actions
        tensor([1, 1, 1])
    """

    def act(self, context: Any) -> int:
        """Choose an action, counted from 0, for a context, a tensor of shape (d,)."""

    def observe(self, context: Any, action: int, reward: float) -> None:
        """Observe the reward of an action."""

    def learn(self) -> None:
        """Learn from the observations so far."""


@dataclass(frozen=True, eq=False)
class Record:
    """The record of a sequence of interactions.

    Args:
        actions: the actions, shape (steps,), int64.
        rewards: their rewards, shape (steps,), float64.
        best_rewards: the rewards of the best actions, shape (steps,), float64; NaN where the
            environment did not report them.

    Example:
        >>> rewards, best_rewards = torch.tensor([0.0, -35.0]), torch.tensor([5.0, 0.0])
        >>> Record(torch.tensor([0, 1]), rewards, best_rewards).regret
        tensor([ 5., 40.])
    """

    actions: Tensor
    rewards: Tensor
    best_rewards: Tensor

    @property
    def regret(self) -> Tensor:
        """Cumulative regret, the summed difference to the best rewards, shape (steps,).

        Raises:
            ValueError: the environment did not report the reward of the best action at every step.
        """
        missing = self.best_rewards.isnan()
        if bool(missing.any()):
            raise ValueError(
                'regret needs info["best_reward"] from every step of the environment, but '
                f"{int(missing.sum())} of {len(missing)} lacked it; use rewards"
            )
        return (self.best_rewards - self.rewards).cumsum(0)


def play(
    agent: Agent,
    environment: Environment,
    steps: int,
    *,
    seed: int | None = None,
    checkpoint: str | Path | None = None,
    every: int = 1000,
    on_progress: Callable[[int], None] | None = None,
) -> Record:
    """Let an agent act, observe and learn for a number of interactions.

    With a checkpoint, a run that was killed resumes there. Its result is the same as that of an
    uninterrupted run, bit for bit on one machine. Ctrl-C writes the checkpoint and raises
    KeyboardInterrupt.

    Args:
        agent: a ``ThompsonSampler``, an ``EpsilonGreedy``, or any other agent.
        environment: an environment with Gymnasium's interface. It is reset at the start and
            whenever an episode ends.
        steps: the number of interactions in total, including those before a resume.
        seed: the seed for the first reset; None uses the environment's own seed. A resumed run
            keeps its seed.
        checkpoint: a file for the complete state. If it exists, the run resumes from it.
        every: the number of interactions between two checkpoints.
        on_progress: called after each interaction with the number of interactions so far.

    Returns:
        The record of all interactions.

    Raises:
        TypeError: ``steps`` or ``every`` is no whole number.
        ValueError: a number is out of its range, agent and environment have different numbers of
            actions, an observation does not consist of numbers, or a state cannot be saved.
        StorageError: the checkpoint is damaged, or belongs to other settings.

    Example:
        >>> from bayesify.bandits import EpsilonGreedy, Learning, MushroomBandit
        >>> from bayesify.datasets import load_mushroom
        >>> agent = EpsilonGreedy(
        ...     torch.nn.Linear(117 + 2, 1), 2, epsilon=0.05, learning=Learning(updates=1)
        ... )
        >>> record = play(agent, MushroomBandit(load_mushroom()), 20)
        >>> record.rewards.shape
        torch.Size([20])
    """
    steps, every = whole_number("steps", steps), whole_number("every", every)
    first_action = _first_action(agent, environment)
    state = _PlayState(agent, environment, steps)
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None:
        _check_can_be_saved(agent, environment)
        path.parent.mkdir(parents=True, exist_ok=True)
    if path is not None and path.exists():
        state.read(path)
    else:
        state.context = context_of(environment.reset(seed=seed)[0])
    first = state.done
    with deferred_interrupt() as interrupt:
        for done in range(first, steps):
            action = agent.act(state.context)
            next_context, reward, terminated, truncated, info = environment.step(
                action + first_action
            )
            agent.observe(state.context, action, float(reward))
            agent.learn()
            state.add(action, float(reward), float(info.get("best_reward", "nan")))
            next_context = environment.reset()[0] if terminated or truncated else next_context
            state.context = context_of(next_context)
            if path is not None and done == first:
                _check_can_be_written(environment)
            if path is not None and (
                (done + 1) % every == 0 or done + 1 == steps or interrupt.requested
            ):
                state.write(path)
            if interrupt.requested:
                raise KeyboardInterrupt
            if on_progress is not None:
                on_progress(done + 1)
    return state.record


_AGENT = "agent."


class _PlayState:
    """The state of a run: agent, environment, next context and record."""

    context: Tensor

    def __init__(self, agent: Any, environment: Any, steps: int) -> None:
        self._agent, self._environment = agent, environment
        self.done = 0
        self.record = Record(
            torch.zeros(steps, dtype=torch.int64),
            torch.zeros(steps, dtype=torch.float64),
            torch.zeros(steps, dtype=torch.float64),
        )

    def add(self, action: int, reward: float, best: float) -> None:
        record, done = self.record, self.done
        record.actions[done], record.rewards[done] = action, reward
        record.best_rewards[done] = best
        self.done += 1

    def write(self, path: Path) -> None:
        tensors, agent = self._agent.parts()
        # The prefix keeps an agent's names apart from those of the record.
        tensors = {f"{_AGENT}{name}": part for name, part in tensors.items()}
        for name, part in vars(self.record).items():
            tensors[f"record.{name}"] = part[: self.done]
        tensors["context"] = self.context
        environment = self._environment.state_dict()
        write_tensors(path, tensors, {"kind": "bandit", "environment": environment, "agent": agent})

    def read(self, path: Path) -> None:
        tensors, meta = read_tensors(path)
        if meta.get("kind") != "bandit":
            raise StorageError(
                f"{path} must hold the state of a bandit's run, but it holds something else; pass "
                "another file"
            )
        done = len(tensors["record.actions"])
        if done > len(self.record.actions):
            raise StorageError(
                f"{path} holds {done} interactions, more than the requested steps="
                f"{len(self.record.actions)}; pass steps={done} or more, or another file"
            )
        parts = {n.removeprefix(_AGENT): t for n, t in tensors.items() if n.startswith(_AGENT)}
        self._agent.load_parts(path, parts, meta["agent"])
        self._environment.load_state_dict(meta["environment"])
        self.context, self.done = tensors["context"], done
        for name, part in vars(self.record).items():
            part[:done] = tensors[f"record.{name}"]


def _first_action(agent: Any, environment: Environment) -> int:
    space = environment.action_space
    if not hasattr(space, "n"):
        raise ValueError(
            "the environment must have a finite number n of actions, with an action_space such as "
            f"Discrete(n), got {type(space).__name__}"
        )
    num_actions = getattr(agent, "num_actions", None)
    if num_actions is not None and num_actions != space.n:
        raise ValueError(
            "agent and environment must have the same number of actions, got "
            f"{num_actions} and {space.n}"
        )
    return int(getattr(space, "start", 0))


def _check_can_be_saved(agent: Any, environment: Any) -> None:
    for owner, names in (
        (agent, ("parts", "load_parts")),
        (environment, ("state_dict", "load_state_dict")),
    ):
        if not all(callable(getattr(owner, name, None)) for name in names):
            raise ValueError(
                f"to play with a checkpoint, {type(owner).__name__} must have {names[0]}() and "
                f"{names[1]}(); define them, or play without a checkpoint"
            )


def _check_can_be_written(environment: Any) -> None:
    """Raise ValueError after the first interaction where no checkpoint could be written."""
    state = environment.state_dict()
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"to play with a checkpoint, state_dict() of {type(environment).__name__} must hold "
            f"what JSON can, but {error}; convert it, as by array.tolist() or number.item()"
        ) from error
