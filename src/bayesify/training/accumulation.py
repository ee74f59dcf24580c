"""Several minibatches for one step of the optimiser."""

from __future__ import annotations

from typing import NamedTuple, Self

from bayesify.noise.arguments import whole_number

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
            TypeError: ``every`` is no whole number.
            ValueError: it is below 1.
        """
        return cls(whole_number("accumulate_batches", every), batches)

    def check_brought(self, count: int) -> None:
        """Check that the last step of an epoch was made.

        Args:
            count: the minibatches that the loader brought.

        Raises:
            ValueError: it brought fewer than an epoch has, and some gradients wait for the rest.

        Example:
            >>> Accumulation(every=2, batches=5).check_brought(3)
            Traceback (most recent call last):
            ValueError: with accumulate_batches=2 the loader must bring as many minibatches as ...
        """
        if count and not self.ends(count - 1):
            raise ValueError(
                f"with accumulate_batches={self.every} the loader must bring as many minibatches "
                f"as its length, or num_data, says, {self.batches}, got {count}, so that the last "
                "step of the epoch waits for more; correct the length, or leave accumulate_batches "
                "out"
            )

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
