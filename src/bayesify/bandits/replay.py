"""What an agent remembers: the last interactions, in a ring."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayesify.noise import Stream, derived_seed

__all__ = ["Interactions", "ReplayBuffer"]


class Interactions(NamedTuple):
    """B interactions: contexts (B, d), actions (B,) int64, rewards (B,)."""

    contexts: Tensor
    actions: Tensor
    rewards: Tensor


class ReplayBuffer:
    """The last interactions, of which minibatches are drawn uniformly with replacement.

    Args:
        capacity: how many are kept, at least 1.
        dtype: of contexts and rewards.

    Raises:
        ValueError: ``capacity`` is below 1.

    Example:
        >>> buffer = ReplayBuffer(2)
        >>> for reward in (1.0, 2.0, 3.0):
        ...     buffer.add(torch.zeros(4), 0, reward)
        >>> len(buffer), buffer.interactions.rewards
        (2, tensor([3., 2.]))
        >>> buffer.minibatch(5, seed=0, draw=0).contexts.shape
        torch.Size([5, 4])
    """

    def __init__(self, capacity: int, *, dtype: torch.dtype = torch.float32) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        #: How many were ever added; the next goes to this number's place in the ring.
        self.added = 0
        self._dtype = dtype
        self._kept: Interactions | None = None

    def __len__(self) -> int:
        """How many are kept."""
        return min(self.added, self.capacity)

    def add(self, context: Tensor, action: int, reward: float) -> None:
        """Remember one more, in the place of the oldest where the ring is full.

        Raises:
            ValueError: the context is no vector, or not as long as those before.
        """
        if self._kept is None:
            if context.dim() != 1:
                raise ValueError(f"a context must have shape (d,), got {tuple(context.shape)}")
            self._kept = Interactions(
                torch.zeros(self.capacity, len(context), dtype=self._dtype),
                torch.zeros(self.capacity, dtype=torch.int64),
                torch.zeros(self.capacity, dtype=self._dtype),
            )
        self.check(context)
        contexts, actions, rewards = self._kept
        place = self.added % self.capacity
        contexts[place], actions[place], rewards[place] = context.detach(), action, reward
        self.added += 1

    def check(self, context: Tensor) -> None:
        """See that a context is as long as those before.

        Raises:
            ValueError: it is not.
        """
        if self._kept is not None and context.shape != self._kept.contexts.shape[1:]:
            raise ValueError(
                f"a context must have shape {tuple(self._kept.contexts.shape[1:])} as those "
                f"before, got {tuple(context.shape)}"
            )

    @property
    def interactions(self) -> Interactions:
        """All that are kept, in the order of their places in the ring.

        Raises:
            ValueError: there is none.
        """
        if self._kept is None:
            raise ValueError("the replay buffer is empty: observe() an interaction first")
        return Interactions(*(part[: len(self)] for part in self._kept))

    def minibatch(self, size: int, *, seed: int, draw: int) -> Interactions:
        """``size`` of them, each any of those kept: a function of (seed, draw) and of these.

        Raises:
            ValueError: there is none, or ``size`` is below 1.
        """
        if size < 1:
            raise ValueError(f"a minibatch must have at least 1 interaction, got {size}")
        kept = self.interactions
        generator = np.random.Generator(
            np.random.Philox(key=derived_seed(seed, Stream.SHUFFLE, draw))
        )
        places = torch.from_numpy(generator.integers(len(self), size=size))
        return Interactions(*(part.index_select(0, places) for part in kept))

    def tensors(self) -> dict[str, Tensor]:
        """What is kept, by name; with ``added`` it is the whole state."""
        return {} if self._kept is None else self.interactions._asdict()

    def load(self, tensors: dict[str, Tensor], added: int) -> None:
        """Go back to what :meth:`tensors` gave, when so many had been added."""
        self._kept, self.added = None, 0
        if added:
            parts = Interactions(**tensors)
            shapes: list[Any] = [(self.capacity, *part.shape[1:]) for part in parts]
            whole = (part.new_zeros(shape) for part, shape in zip(parts, shapes, strict=True))
            self._kept = Interactions(*whole)
            for place, part in zip(self._kept, parts, strict=True):
                place[: len(part)] = part
            self.added = added
