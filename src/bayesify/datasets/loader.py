"""Minibatches of tensors in memory, in an order that seed and epoch determine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bayesify.noise.arguments import whole_number
from bayesify.noise.keys import Stream, derived_seed

__all__ = ["EpochLoader", "Passes", "TensorLoader"]


class TensorLoader:
    """Iterator over minibatches (inputs, targets); the last one may be smaller.

    The order of an epoch is a function of (seed, epoch) only, so that a resumed run sees the same
    batches as an uninterrupted one. Call ``set_epoch`` before each epoch; without it every pass
    has the same order.

    Args:
        inputs: shape (N, ...), finite, on any device, where the minibatches stay; or a sequence of
            such tensors, for a network with several inputs.
        targets: shape (N, ...), finite, on the same device.
        batch_size: examples per minibatch, at least 1.
        shuffle: permute the examples; if False they keep their order.
        seed: seed of the order, an integer of at most 128 bits with its sign.
        has_bounds: whether targets are bounds, as for ``CensoredGaussianLikelihood``, and may be
            infinite.

    Raises:
        TypeError: inputs or targets are not tensors, or ``batch_size`` or ``seed`` no whole number.
        ValueError: lengths differ, there is no example, ``batch_size`` is below 1, or values are
            NaN, or infinite where they must not be.

    Example:
        >>> loader = TensorLoader(torch.arange(5.0), torch.arange(5), batch_size=2, shuffle=False)
        >>> [targets.tolist() for _, targets in loader]
        [[0, 1], [2, 3], [4]]
    """

    inputs: Tensor | tuple[Tensor, ...]

    def __init__(
        self,
        inputs: Tensor | Sequence[Tensor],
        targets: Tensor,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        has_bounds: bool = False,
    ) -> None:
        parts = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        if not parts:
            raise ValueError("inputs must have at least 1 tensor, got 0")
        for name, tensor in (*(("inputs", part) for part in parts), ("targets", targets)):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{name} must be tensors, got {type(tensor).__name__}; use torch.as_tensor(x)"
                )
            if tensor.dim() == 0:
                raise ValueError(f"{name} must have a first axis of N examples, got a scalar")
        for part in parts:
            if len(part) != len(targets):
                raise ValueError(
                    "inputs and targets must have the same length, got "
                    f"{len(part)} and {len(targets)}"
                )
        if len(targets) == 0:
            raise ValueError("there must be at least 1 example, got 0")
        batch_size = whole_number("batch_size", batch_size)
        seed = whole_number("seed", seed, None)
        for part in parts:
            _check_finite("inputs", part)
        _check_finite("targets", targets.nan_to_num(torch.nan, 0.0, 0.0) if has_bounds else targets)
        self.inputs = inputs if isinstance(inputs, Tensor) else parts
        self._parts = parts
        self.targets = targets
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    @property
    def num_data(self) -> int:
        """N, the number of examples in an epoch."""
        return len(self.targets)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass.

        Args:
            epoch: number of the epoch, from 0.

        Raises:
            ValueError: epoch is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch}")
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.num_data // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        tensors = (*self._parts, self.targets)
        minibatches: Iterable[Sequence[Tensor]]
        if not self.shuffle:
            parts = zip(*(each.split(self.batch_size) for each in tensors), strict=True)
            # Copies, as of a loader that shuffles: a network may edit its inputs in place.
            minibatches = ([part.clone() for part in those] for those in parts)
        else:
            generator = torch.Generator()
            generator.manual_seed(derived_seed(self.seed, Stream.SHUFFLE, self.epoch))
            # Drawn on the CPU, because the order must be the same on every device.
            order = torch.randperm(self.num_data, generator=generator).to(self.targets.device)
            minibatches = (
                [each.index_select(0, index) for each in tensors]
                for index in order.split(self.batch_size)
            )
        for *inputs, targets in minibatches:
            yield (inputs[0] if isinstance(self.inputs, Tensor) else tuple(inputs)), targets


class EpochLoader(Protocol):
    """Minibatches of all examples, in an order that depends on the epoch."""

    @property
    def num_data(self) -> int:
        """N, the number of examples."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""

    def __len__(self) -> int:
        """The number of minibatches."""

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        """One pass over the examples."""


class Passes:
    """Several passes over the examples as one epoch, for data sets of one or two minibatches.

    Args:
        loader: the minibatches of one pass; each pass has another order.
        passes: number of passes in an epoch, at least 1.

    Raises:
        ValueError: ``passes`` is below 1.

    Example:
        >>> loader = Passes(TensorLoader(torch.zeros(5, 2), torch.zeros(5), 4), passes=3)
        >>> len(loader), [len(y) for _, y in loader]
        (6, [4, 1, 4, 1, 4, 1])
    """

    def __init__(self, loader: EpochLoader, passes: int) -> None:
        if passes < 1:
            raise ValueError(f"passes must be at least 1, got {passes}")
        self._loader, self._passes, self._epoch = loader, passes, 0

    @property
    def num_data(self) -> int:
        """N, the number of examples in a pass."""
        return self._loader.num_data

    @property
    def passes(self) -> int:
        """The number of passes in an epoch."""
        return self._passes

    def set_epoch(self, epoch: int) -> None:
        """Choose the orders of the next passes."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._passes * len(self._loader)

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        for number in range(self._passes):
            self._loader.set_epoch(self._epoch * self._passes + number)
            yield from self._loader


def _check_finite(name: str, values: Tensor) -> None:
    if not (values.is_floating_point() or values.is_complex()):
        return
    bad = ~values.isfinite()
    if bad.any():
        positions = bad.nonzero()
        remedy = "mend or drop these examples"
        if name == "targets" and not bool(values.isnan().any()):
            remedy = (
                "pass has_bounds=True where these are bounds of censored targets, as for "
                f"CensoredGaussianLikelihood, since dropping them biases the rest; else {remedy}"
            )
        raise ValueError(
            f"{name} must be finite, got {len(positions)} NaN or infinite values, the first at "
            f"index {tuple(positions[0].tolist())}; {remedy}"
        )
