"""Several minibatches for one step of the optimiser."""

from __future__ import annotations

import operator
from typing import NamedTuple, Self

__all__ = ["Accumulation"]


class Accumulation(NamedTuple):
    """How many minibatches give their gradients to one step of the optimiser.

    Args:
        every: minibatches of a step, at least 1.
        batches: minibatches of an epoch, whose last step has those that are left.

    Example:
        >>> pairs = Accumulation(every=2, batches=5)
        >>> pairs.steps, [pairs.ends(batch) for batch in range(5)], pairs.size(4)
        (3, [False, True, False, True, True], 1)
    """

    every: int = 1
    batches: int = 1

    @classmethod
    def checked(cls, every: int, batches: int) -> Self:
        """Return the accumulation of an epoch.

        Raises:
            ValueError: ``every`` is no whole number of at least 1.
        """
        try:
            count = operator.index(every)
        except TypeError:
            count = 0
        if count < 1 or isinstance(every, bool):
            raise ValueError(
                f"accumulate_batches must be a whole number of at least 1, got {every!r}"
            )
        return cls(count, batches)

    @property
    def steps(self) -> int:
        """Steps of the optimiser in an epoch."""
        return -(-self.batches // self.every)

    def begins(self, batch: int) -> bool:
        """Return whether a minibatch is the first of its step."""
        return batch % self.every == 0

    def ends(self, batch: int) -> bool:
        """Return whether the optimiser makes its step after a minibatch."""
        return (batch + 1) % self.every == 0 or batch + 1 == self.batches

    def size(self, batch: int) -> int:
        """Return the number of minibatches that share the step of this one."""
        return min(self.every, max(1, self.batches - (batch - batch % self.every)))
