"""The environment interface of bandits: that of Gymnasium, without depending on Gymnasium."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, SupportsFloat

import numpy as np
import torch
from torch import Tensor

__all__ = ["Discrete", "Environment", "context_of"]


@dataclass(frozen=True)
class Discrete:
    """The action space 0, ..., n - 1.

    Args:
        n: the number of actions, at least 1.

    Raises:
        ValueError: ``n`` is below 1.

    Example:
        >>> Discrete(2).n
        2
    """

    n: int

    def __post_init__(self) -> None:
        """Check the number of actions."""
        if self.n < 1:
            raise ValueError(f"there must be at least 1 action, got n={self.n}")


class Environment(Protocol):
    """The part of Gymnasium's ``Env`` that :func:`bayesify.bandits.play` uses.

    An observation is the context of the next action: a vector of shape (d,), array or tensor. The
    ``info`` of a step may hold ``"best_reward"``: the reward, in the same step, of the action with
    the highest expected reward for that context. Regret is measured against it.

    To play with a checkpoint, an environment also needs ``state_dict()``, which returns its state
    as JSON, and ``load_state_dict(state)``.

    Example:
        >>> class Coins:
        ...     action_space = Discrete(2)  # the second action is always paid
        ...     def reset(self, *, seed=None, options=None):
        ...         return np.zeros(1), {}
        ...     def step(self, action):
        ...         return np.zeros(1), float(action), False, False, {"best_reward": 1.0}
        >>> from bayesify.bandits import EpsilonGreedy, Learning, play
        >>> net = torch.nn.Linear(1 + 2, 1)
        >>> agent = EpsilonGreedy(net, 2, epsilon=0.5, learning=Learning(updates=1))
        >>> play(agent, Coins(), 5, seed=0).rewards.shape
        torch.Size([5])
    """

    @property
    def action_space(self) -> Any:
        """A space with attribute ``n``; actions count from 0, or from ``start`` if it has one."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode, with a new seed if given; return the first observation and ``info``."""

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take an action; return next observation, reward, terminated, truncated and ``info``."""


def context_of(observation: Any) -> Tensor:
    """Copy an observation to a tensor, since an environment may write the next one in its place.

    Raises:
        ValueError: it does not consist of numbers.

    Example:
        >>> context_of(np.arange(3.0)[::-1])
        tensor([2., 1., 0.], dtype=torch.float64)
    """
    if isinstance(observation, Tensor):
        return observation.detach().clone()
    try:
        return torch.from_numpy(np.array(observation, order="C"))
    except (TypeError, ValueError):
        raise ValueError(
            "an observation must be a vector of numbers, array or tensor, got "
            f"{type(observation).__name__}; flatten it, e.g. in a wrapper of the environment"
        ) from None
