"""Replay buffer: a ring buffer of the last interactions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayesify.noise.arguments import whole_number
from bayesify.noise.keys import Stream, derived_seed

__all__ = ["Interactions", "ReplayBuffer"]


class Interactions(NamedTuple):
    """B interactions: contexts (B, d), actions (B,) int64, rewards (B,)."""

    contexts: Tensor
    actions: Tensor
    rewards: Tensor


class ReplayBuffer:
    """The last interactions, from which minibatches are drawn uniformly with replacement.

    Args:
        capacity: the largest number of interactions in the buffer, at least 1.
        dtype: the dtype of contexts and rewards.

    Raises:
        TypeError: ``capacity`` is no whole number.
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
        self.capacity = whole_number("capacity", capacity)
        #: Number of interactions added so far; modulo the capacity it is the place of the next.
        self.added = 0
        self.dtype = dtype
        self._interactions: Interactions | None = None

    def __len__(self) -> int:
        """Return the number of interactions in the buffer."""
        return min(self.added, self.capacity)

    def add(self, context: Tensor, action: int, reward: float) -> None:
        """Add an interaction; it replaces the oldest one if the buffer is full.

        Raises:
            ValueError: the context is not a vector, or has another length than earlier ones.
        """
        if self._interactions is None:
            if context.dim() != 1:
                raise ValueError(f"a context must have shape (d,), got {tuple(context.shape)}")
            self._interactions = Interactions(
                torch.zeros(self.capacity, len(context), dtype=self.dtype),
                torch.zeros(self.capacity, dtype=torch.int64),
                torch.zeros(self.capacity, dtype=self.dtype),
            )
        self.check(context)
        contexts, actions, rewards = self._interactions
        place = self.added % self.capacity
        contexts[place], actions[place], rewards[place] = context.detach(), action, reward
        self.added += 1

    def check(self, context: Tensor) -> None:
        """Check that a context has the length of earlier ones.

        Raises:
            ValueError: it has another shape.
        """
        if (
            self._interactions is not None
            and context.shape != self._interactions.contexts.shape[1:]
        ):
            raise ValueError(
                f"a context must have shape {tuple(self._interactions.contexts.shape[1:])} like "
                f"those before, got {tuple(context.shape)}"
            )

    @property
    def interactions(self) -> Interactions:
        """All interactions in the buffer, in the order of their places in the ring.

        Raises:
            ValueError: the buffer is empty.
        """
        if self._interactions is None:
            raise ValueError("the replay buffer is empty; observe() an interaction first")
        return Interactions(*(part[: len(self)] for part in self._interactions))

    def minibatch(self, size: int, *, seed: int, draw: int) -> Interactions:
        """Draw ``size`` interactions with replacement, as a function of (seed, draw).

        Raises:
            TypeError: ``size`` is no whole number.
            ValueError: the buffer is empty, or ``size`` is below 1.
        """
        size = whole_number("size", size, None)
        if size < 1:
            raise ValueError(f"a minibatch must have at least 1 interaction, got {size}")
        stored = self.interactions
        generator = np.random.Generator(
            np.random.Philox(key=derived_seed(seed, Stream.SHUFFLE, draw))
        )
        places = torch.from_numpy(generator.integers(len(self), size=size))
        return Interactions(*(part.index_select(0, places) for part in stored))

    def tensors(self) -> dict[str, Tensor]:
        """Return the stored interactions by name; with ``added`` they are the complete state."""
        return {} if self._interactions is None else self.interactions._asdict()

    def load(self, tensors: dict[str, Tensor], added: int) -> None:
        """Restore the state from the result of :meth:`tensors` and the value of ``added``."""
        self._interactions, self.added = None, 0
        if added:
            parts = Interactions(**tensors)
            shapes: list[Any] = [(self.capacity, *part.shape[1:]) for part in parts]
            kinds = self.dtype, torch.int64, self.dtype
            whole = [torch.zeros(s, dtype=kind) for s, kind in zip(shapes, kinds, strict=True)]
            self._interactions = Interactions(*whole)
            for place, part in zip(self._interactions, parts, strict=True):
                place[: len(part)] = part
            self.added = added
