"""Agents: what to do, given what a network believes of rewards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.bandits.environment import context_of
from bayesify.bandits.learning import Learning, RewardModel
from bayesify.noise import NoiseKey, Stream, derived_seed
from bayesify.posteriors import Delta
from bayesify.training.checkpoint import check_same

__all__ = ["EpsilonGreedy", "RewardAgent", "ThompsonSampler"]

_UNIT = 2.0**-63


class RewardAgent(ABC):
    """Takes the action whose reward it thinks the highest, of equal ones any.

    Everything random is a function of the network's seed, 0 for a plain one, and of how often the
    agent acted and learnt.

    Args:
        model: see :class:`~bayesify.bandits.learning.RewardModel`.
        num_actions: how many there are.
        learning: how it learns; None is ``Learning()``.
    """

    def __init__(
        self, model: nn.Module, num_actions: int, *, learning: Learning | None = None
    ) -> None:
        self.rewards = RewardModel(model, num_actions, Learning() if learning is None else learning)
        #: How often it acted.
        self.acts = 0

    @property
    def num_actions(self) -> int:
        """How many actions there are."""
        return self.rewards.num_actions

    def act(self, context: Any) -> int:
        """The action for a context of shape (d,).

        Raises:
            ValueError: the context is no vector of finite numbers.
            NonFiniteLossError: the network answers with NaN or infinity.
        """
        action = self._chosen(context_of(context))
        self.acts += 1
        return action

    def observe(self, context: Any, action: int, reward: float) -> None:
        """Remember what an action got.

        Raises:
            ValueError: context or reward is not finite, or there is no such action.
        """
        self.rewards.observe(context_of(context), action, reward)

    def learn(self) -> None:
        """Train on minibatches of what is remembered.

        Raises:
            ValueError: nothing was observed yet.
            NonFiniteLossError: the loss became NaN or infinite.
        """
        self.rewards.learn()

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The agent's whole state, as tensors and JSON."""
        tensors, meta = self.rewards.parts()
        return tensors, {**meta, "agent": self._settings(), "acts": self.acts}

    def load_parts(self, path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Go back to what :meth:`parts` gave, read from ``path``.

        Raises:
            StorageError: it is of another agent; nothing has then been changed.
        """
        check_same(path, "agent", self._settings(), meta["agent"])
        self.rewards.load_parts(path, tensors, meta)
        self.acts = meta["acts"]

    @abstractmethod
    def _chosen(self, context: Tensor) -> int: ...

    @abstractmethod
    def _settings(self) -> dict[str, Any]: ...

    def _best(self, values: Tensor, sample: int) -> int:
        best: list[int] = (values == values.max()).nonzero().flatten().tolist()
        return best[0] if len(best) == 1 else best[self._random(sample) % len(best)]

    def _random(self, sample: int) -> int:
        """63 random bits of this act; ``sample`` tells those of one act apart."""
        return derived_seed(self.rewards.bnn.seed, Stream.ACTING, self.acts, sample)


class ThompsonSampler(RewardAgent):
    """Draws weights, and acts as if they were true (Thompson 1933).

    So that each action is taken as often as it is likely to be the best one. All actions are
    compared under the same weights, whatever the network's estimator in training.

    Args:
        model: a Bayesian network whose posterior has a spread; see
            :class:`~bayesify.bandits.learning.RewardModel`. It is copied; ``agent.rewards.bnn`` is
            the one that learns.
        num_actions: how many there are.
        num_samples: draws of weights over which the expected reward is averaged: 1 is Thompson
            sampling; Blundell et al. 2015 average 2, which explores less.
        learning: how it learns; None is ``Learning()``.

    Raises:
        TypeError: ``model`` is no network.
        ValueError: the posterior is a point, or a number is out of its range.

    Example:
        >>> import bayesify as bf
        >>> bnn = bf.BayesianModule(nn.Linear(3 + 2, 1), likelihood=bf.GaussianLikelihood())
        >>> agent = ThompsonSampler(bnn, num_actions=2, learning=Learning(updates=1))
        >>> context = torch.zeros(3)
        >>> action = agent.act(context)
        >>> agent.observe(context, action, reward=5.0)
        >>> agent.learn()
    """

    def __init__(
        self,
        model: nn.Module,
        num_actions: int,
        *,
        num_samples: int = 1,
        learning: Learning | None = None,
    ) -> None:
        super().__init__(model, num_actions, learning=learning)
        if isinstance(self.rewards.bnn.posterior, Delta):
            raise ValueError(
                "Thompson sampling needs a posterior with a spread, such as that of "
                "BayesianModule(net, likelihood=GaussianLikelihood()), got a plain network or a "
                "Delta; use EpsilonGreedy for these"
            )
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        self.num_samples = num_samples

    def _chosen(self, context: Tensor) -> int:
        bnn = self.rewards.bnn
        posterior = bnn.posterior
        key = NoiseKey(bnn.seed, Stream.ACTING, self.acts)
        with torch.no_grad():
            weights = posterior.draw(posterior.noise(key, range(self.num_samples))).weights
        return self._best(self.rewards.expected(context, weights), self.num_samples)

    def _settings(self) -> dict[str, Any]:
        return {"type": "ThompsonSampler", "num_samples": self.num_samples}


class EpsilonGreedy(RewardAgent):
    """Takes the action that the mean weights prefer, and now and then any.

    Args:
        model: a Bayesian or a plain network; see
            :class:`~bayesify.bandits.learning.RewardModel`. It is copied; ``agent.rewards.bnn`` is
            the one that learns.
        num_actions: how many there are.
        epsilon: the probability of an action drawn uniformly from all, 0 to 1; 0 is greedy.
        learning: how it learns; None is ``Learning()``.

    Raises:
        TypeError: ``model`` is no network.
        ValueError: a number is out of its range.

    Example:
        >>> agent = EpsilonGreedy(nn.Linear(3 + 2, 1), num_actions=2, epsilon=0.05)
        >>> agent.act(torch.zeros(3)) in (0, 1)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        num_actions: int,
        *,
        epsilon: float,
        learning: Learning | None = None,
    ) -> None:
        super().__init__(model, num_actions, learning=learning)
        if not 0.0 <= epsilon <= 1.0:
            raise ValueError(f"epsilon must be from 0 to 1, got {epsilon}")
        self.epsilon = epsilon

    def _chosen(self, context: Tensor) -> int:
        values = self.rewards.expected(context, self.rewards.mean_weights())
        if self._random(0) * _UNIT < self.epsilon:
            return self._random(1) % self.num_actions
        return self._best(values, 2)

    def _settings(self) -> dict[str, Any]:
        return {"type": "EpsilonGreedy", "epsilon": self.epsilon}
