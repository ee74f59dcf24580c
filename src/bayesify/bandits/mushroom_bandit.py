"""The mushroom bandit of Blundell et al. 2015, section 5.3: eat a mushroom, or pass."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor

from bayesify.bandits.environment import Discrete
from bayesify.datasets import MushroomData
from bayesify.noise.keys import Stream, derived_seed

__all__ = ["MushroomBandit"]

_PASS, _EAT = 0, 1
_GOOD, _BAD = 5.0, -35.0


class MushroomBandit:
    """An environment that shows a mushroom per interaction, drawn uniformly with replacement.

    Action 0 passes, for a reward of 0. Action 1 eats the mushroom, for a reward of 5 if it is
    edible; if it is poisonous the reward is 5 or -35, each with probability 1/2. The best policy
    eats edible mushrooms (5) and passes the others (0). The environment never terminates. All
    randomness is a function of (seed, interaction).

    Args:
        data: the mushrooms, as ``load_mushroom`` returns them.
        seed: the seed of mushrooms and rewards, unless another is passed to ``reset``.

    Raises:
        ValueError: there are no mushrooms, or their shapes do not fit.

    Example:
        >>> from bayesify.datasets import load_mushroom
        >>> environment = MushroomBandit(load_mushroom(), seed=1)
        >>> context, info = environment.reset()
        >>> context, reward, terminated, truncated, info = environment.step(0)
        >>> context.shape, reward, info["best_reward"], info["poisonous"]
        (torch.Size([117]), 0.0, 5.0, False)
    """

    def __init__(self, data: MushroomData, *, seed: int = 0) -> None:
        if not len(data.contexts) or data.poisonous.shape != data.contexts.shape[:1]:
            raise ValueError(
                "the data must be contexts (N, d) and poisonous (N,) with N of at least 1, got "
                f"{tuple(data.contexts.shape)} and {tuple(data.poisonous.shape)}"
            )
        self.action_space = Discrete(2)
        self._contexts = data.contexts
        self._poisonous: list[bool] = data.poisonous.tolist()
        self._seed, self._interaction = operator.index(seed), -1

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, dict[str, Any]]:
        """Show the next mushroom; with a seed, the first mushroom of that seed."""
        if seed is not None:
            self._seed, self._interaction = operator.index(seed), -1
        self._interaction += 1
        return self._context(), {}

    def step(self, action: Any) -> tuple[Tensor, float, bool, bool, dict[str, Any]]:
        """Pass or eat the present mushroom, and show the next one.

        ``info`` holds ``best_reward`` and ``poisonous`` of the mushroom that was eaten or passed.

        Raises:
            ValueError: the action is neither 0 nor 1.
            RuntimeError: ``reset`` was not called.
        """
        if self._interaction < 0:
            raise RuntimeError("no mushroom was shown yet; call reset() before step()")
        if action not in (_PASS, _EAT):
            raise ValueError(f"an action must be 0 (pass) or 1 (eat), got {action!r}")
        poisonous = self._poisonous[self._mushroom()]
        reward = self._reward_of_eating(poisonous) if action == _EAT else 0.0
        info = {"best_reward": 0.0 if poisonous else _GOOD, "poisonous": poisonous}
        self._interaction += 1
        return self._context(), reward, False, False, info

    def state_dict(self) -> dict[str, int]:
        """Return the complete state, as JSON."""
        return {"seed": self._seed, "interaction": self._interaction}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        self._seed, self._interaction = int(state["seed"]), int(state["interaction"])

    def _context(self) -> Tensor:
        return self._contexts[self._mushroom()].clone()  # the data stay as they are

    def _mushroom(self) -> int:
        # N does not divide 2^63, so that probabilities differ by at most a factor 1 + N / 2^63.
        drawn = derived_seed(self._seed, Stream.ENVIRONMENT, self._interaction, 0)
        return drawn % len(self._poisonous)

    def _reward_of_eating(self, poisonous: bool) -> float:
        if not poisonous:
            return _GOOD
        tails = derived_seed(self._seed, Stream.ENVIRONMENT, self._interaction, 1) % 2
        return _BAD if tails else _GOOD
