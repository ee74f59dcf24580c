"""Agents that choose actions by the rewards that a network predicts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.bandits.environment import context_of
from bayesify.bandits.learning import Learning, RewardModel
from bayesify.distributions.posteriors import Delta
from bayesify.noise.arguments import whole_number
from bayesify.noise.keys import NoiseKey, Stream, derived_seed
from bayesify.training.checkpoint import check_same

__all__ = ["EpsilonGreedy", "RewardAgent", "ThompsonSampler"]

#: Maps 63 random bits to [0, 1).
_TO_UNIT_INTERVAL = 2.0**-63


class RewardAgent(ABC):
    """An agent that takes the action with the highest predicted reward; ties are broken at random.

    All randomness is a function of the network's seed (0 for a plain network) and of the numbers
    of actions and of training steps so far.

    Args:
        model: a network; see :class:`~bayesify.bandits.learning.RewardModel`.
        num_actions: the number of actions.
        learning: the settings of learning; None stands for ``Learning()``.
    """

    def __init__(
        self, model: nn.Module, num_actions: int, *, learning: Learning | None = None
    ) -> None:
        self.rewards = RewardModel(model, num_actions, Learning() if learning is None else learning)
        #: Number of actions so far.
        self.acts = 0

    @property
    def num_actions(self) -> int:
        """Number of possible actions."""
        return self.rewards.num_actions

    def act(self, context: Any) -> int:
        """Choose an action for a context of shape (d,).

        Raises:
            ValueError: the context is not a vector of finite numbers.
            NonFiniteLossError: the network predicts NaN or infinity.
        """
        action = self._choose(context_of(context))
        self.acts += 1
        return action

    def observe(self, context: Any, action: int, reward: float) -> None:
        """Store the reward of an action in the replay buffer.

        Raises:
            ValueError: context or reward is not finite, or the action is out of range.
        """
        self.rewards.observe(context_of(context), action, reward)

    def learn(self) -> None:
        """Train the network on minibatches of the replay buffer.

        Raises:
            ValueError: nothing was observed yet.
            NonFiniteLossError: the loss became NaN or infinite.
        """
        self.rewards.learn()

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the complete state of the agent, as tensors and JSON."""
        tensors, meta = self.rewards.parts()
        return tensors, {**meta, "agent": self._settings(), "acts": self.acts}

    def load_parts(self, path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Restore the state from the result of :meth:`parts`, read from ``path``.

        Raises:
            StorageError: the state is that of another agent; this agent is then unchanged.
        """
        check_same(path, "agent", self._settings(), meta["agent"])
        self.rewards.load_parts(path, tensors, meta)
        self.acts = meta["acts"]

    @abstractmethod
    def _choose(self, context: Tensor) -> int: ...

    @abstractmethod
    def _settings(self) -> dict[str, Any]: ...

    def _argmax(self, values: Tensor, sample: int) -> int:
        best: list[int] = (values == values.max()).nonzero().flatten().tolist()
        return best[0] if len(best) == 1 else best[self._random_bits(sample) % len(best)]

    def _random_bits(self, sample: int) -> int:
        """Return 63 random bits for the present action; ``sample`` distinguishes several draws."""
        return derived_seed(self.rewards.bnn.seed, Stream.ACTING, self.acts, sample)


class ThompsonSampler(RewardAgent):
    """Thompson sampling: draw weights and take the best action under them (Thompson 1933).

    Each action is thus taken with the probability that it is the best one under the posterior. All
    actions are compared under the same weights, for every estimator.

    Args:
        model: a Bayesian network whose posterior has a spread; see
            :class:`~bayesify.bandits.learning.RewardModel`. It is copied; ``agent.rewards.bnn`` is
            the copy that learns.
        num_actions: the number of actions.
        num_samples: the number of weight samples over which the predicted rewards are averaged. 1
            is Thompson sampling; Blundell et al. 2015 average over 2, which explores less.
        learning: the settings of learning; None stands for ``Learning()``.

    Raises:
        TypeError: ``model`` is not a network, or a number that must be whole is not.
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
        self.num_samples = whole_number("num_samples", num_samples)

    def _choose(self, context: Tensor) -> int:
        bnn = self.rewards.bnn
        posterior = bnn.posterior
        key = NoiseKey(bnn.seed, Stream.ACTING, self.acts)
        with torch.no_grad():
            weights = posterior.draw(posterior.noise(key, range(self.num_samples))).weights
        return self._argmax(self.rewards.expected(context, weights), self.num_samples)

    def _settings(self) -> dict[str, Any]:
        return {"type": "ThompsonSampler", "num_samples": self.num_samples}


class EpsilonGreedy(RewardAgent):
    """Take the best action under the mean weights, or with probability epsilon any action.

    Args:
        model: a Bayesian or a plain network; see
            :class:`~bayesify.bandits.learning.RewardModel`. It is copied; ``agent.rewards.bnn`` is
            the copy that learns.
        num_actions: the number of actions.
        epsilon: the probability of an action drawn uniformly from all, 0 to 1; 0 is greedy.
        learning: the settings of learning; None stands for ``Learning()``.

    Raises:
        TypeError: ``model`` is not a network.
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
        self.epsilon = float(epsilon)  # JSON knows no number of NumPy

    def _choose(self, context: Tensor) -> int:
        values = self.rewards.expected(context, self.rewards.mean_weights())
        if self._random_bits(0) * _TO_UNIT_INTERVAL < self.epsilon:
            return self._random_bits(1) % self.num_actions
        return self._argmax(values, 2)

    def _settings(self) -> dict[str, Any]:
        return {"type": "EpsilonGreedy", "epsilon": self.epsilon}
