"""An agent in an environment: what it did, what it got, and what it missed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bayesify.bandits.environment import Environment, context_of
from bayesify.storage import StorageError, read_tensors, write_tensors
from bayesify.training.interrupt import deferred_interrupt

__all__ = ["Agent", "Record", "play"]


class Agent(Protocol):
    """What :func:`play` needs; to play with a checkpoint, ``parts`` and ``load_parts`` too."""

    def act(self, context: Any) -> int:
        """The action, from 0, for a context, a tensor of shape (d,)."""

    def observe(self, context: Any, action: int, reward: float) -> None:
        """Be told what that action got."""

    def learn(self) -> None:
        """Learn from what was observed so far."""


@dataclass(frozen=True, eq=False)
class Record:
    """What happened in so many interactions.

    Args:
        actions: taken, shape (steps,), int64.
        rewards: got, shape (steps,), float64.
        best_rewards: those of the best actions, likewise; NaN where the environment did not say.

    Example:
        >>> got, best = torch.tensor([0.0, -35.0]), torch.tensor([5.0, 0.0])
        >>> Record(torch.tensor([0, 1]), got, best).regret
        tensor([ 5., 40.])
    """

    actions: Tensor
    rewards: Tensor
    best_rewards: Tensor

    @property
    def regret(self) -> Tensor:
        """What the best actions would have got more, summed from the first, shape (steps,).

        Raises:
            ValueError: the environment did not say what the best actions would have got.
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
    """Have an agent act, observe and learn, so many times.

    With a checkpoint a run that was killed goes on from there, and is in the end the same as one
    that was not, bit for bit on one machine. Ctrl-C writes it and raises KeyboardInterrupt.

    Args:
        agent: a ``ThompsonSampler``, an ``EpsilonGreedy``, or any other.
        environment: with Gymnasium's interface; it is reset first, and whenever it terminates.
        steps: interactions in all, those before a resume included.
        seed: given to the first reset; None leaves the environment's own. A run that goes on keeps
            that with which it was begun.
        checkpoint: a file to which all state is written, and from which it goes on if it is there.
        every: so many interactions.
        on_progress: told how many interactions are done, after each.

    Returns:
        The record of all interactions.

    Raises:
        ValueError: a number is out of its range, agent and environment have other numbers of
            actions, an observation is not of numbers, or a state cannot be saved.
        StorageError: the checkpoint is damaged, or of other settings.

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
    for name, value in (("steps", steps), ("every", every)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    offset = _first_action(agent, environment)
    state = _Playing(agent, environment, steps)
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None:
        _check_can_be_saved(agent, environment)
        path.parent.mkdir(parents=True, exist_ok=True)
    if path is not None and path.exists():
        state.read(path)
    else:
        state.context = context_of(environment.reset(seed=seed)[0])
    with deferred_interrupt() as interrupt:
        for done in range(state.done, steps):
            action = agent.act(state.context)
            following, reward, terminated, truncated, info = environment.step(action + offset)
            agent.observe(state.context, action, float(reward))
            agent.learn()
            state.add(action, float(reward), float(info.get("best_reward", "nan")))
            following = environment.reset()[0] if terminated or truncated else following
            state.context = context_of(following)
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


class _Playing:
    """Where a run stands."""

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
        # Under a name of their own an agent's parts can be called anything.
        tensors = {f"{_AGENT}{name}": part for name, part in tensors.items()}
        for name, part in vars(self.record).items():
            tensors[f"record.{name}"] = part[: self.done]
        tensors["context"] = self.context
        environment = self._environment.state_dict()
        write_tensors(path, tensors, {"kind": "bandit", "environment": environment, "agent": agent})

    def read(self, path: Path) -> None:
        tensors, meta = read_tensors(path)
        if meta.get("kind") != "bandit":
            raise StorageError(f"{path} does not hold the state of a bandit's run; use another")
        done = len(tensors["record.actions"])
        if done > len(self.record.actions):
            raise StorageError(
                f"{path} holds {done} interactions, more than the {len(self.record.actions)} asked "
                "for; ask for as many, or use another file"
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
            "the environment's actions must be the numbers 0 to n - 1, an action_space such as "
            f"Discrete(n), got {type(space).__name__}"
        )
    wanted = getattr(agent, "num_actions", None)
    if wanted is not None and wanted != space.n:
        raise ValueError(
            f"agent and environment must have as many actions, got {wanted} and {space.n}"
        )
    return int(getattr(space, "start", 0))


def _check_can_be_saved(agent: Any, environment: Any) -> None:
    for thing, names in (
        (agent, ("parts", "load_parts")),
        (environment, ("state_dict", "load_state_dict")),
    ):
        if not all(callable(getattr(thing, name, None)) for name in names):
            raise ValueError(
                f"to play with a checkpoint {type(thing).__name__} must have {names[0]}() and "
                f"{names[1]}(); give it these, or play without"
            )
