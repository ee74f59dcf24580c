"""The division of each minibatch among the processes that train together."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from bayesify.module.inputs import Inputs
from bayesify.training.minibatches import Loader
from bayesify.training.processes import Processes, digest

__all__ = ["Division", "Share", "part_of"]


class Share(NamedTuple):
    """The part of a minibatch that one of several processes computes.

    Args:
        weight: its examples as a fraction of the minibatch's; over the processes the sum is 1.
        batch_size: B_i, the number of examples of the whole minibatch.
    """

    weight: float
    batch_size: int


class Division:
    """A loader whose minibatches are divided: each process takes its rows of each of them.

    All processes go over the same minibatches as one process alone would, so that an epoch has each
    example once, and the size of a minibatch does not depend on the number of processes. Of a
    DataLoader over a data set with indices each process loads its own part only; of any other
    loader each process loads everything and keeps its part.

    Args:
        loader: the minibatches that one process would train on.
        processes: those that train together.
        length: the number of minibatches of an epoch; None is all that the loader brings.

    Raises:
        ValueError: the loader is divided already, by a ``DistributedSampler``.

    Example:
        >>> loader = DataLoader(torch.arange(4), batch_size=2)
        >>> Division(loader, Processes()).loader is loader
        True
    """

    def __init__(self, loader: Loader, processes: Processes, length: int | None = None) -> None:
        self.loader = loader
        self._processes = processes
        self._sampler: _PartOfEach | None = None
        if processes.is_alone:
            return
        batch_sampler: Any = getattr(loader, "batch_sampler", None)
        for owner in (loader, batch_sampler):
            if isinstance(getattr(owner, "sampler", None), DistributedSampler):
                raise ValueError(
                    "fit divides each minibatch among the processes, but the loader's "
                    "DistributedSampler has divided the data already; give fit the loader of one "
                    "process, whose batch_size is that of all processes together"
                )
        if type(loader) is DataLoader and batch_sampler is not None:
            if isinstance(loader.dataset, IterableDataset):
                return
            self._sampler = _PartOfEach(batch_sampler, processes.rank, processes.count, length)
            self.loader = _with_batches(loader, self._sampler, processes.rank)

    @property
    def is_loaded_in_parts(self) -> bool:
        """Whether this process loads its own part of the data only."""
        return self._sampler is not None

    def share(self, index: int, inputs: Inputs, targets: Tensor) -> tuple[Inputs, Tensor, Share]:
        """Return this process's part of the minibatch that the loader brought as ``index``-th."""
        rank, count = self._processes.rank, self._processes.count
        if self._sampler is not None:
            own, whole = self._sampler.sizes[index]
            return inputs, targets, Share(own / whole, whole)
        return part_of(inputs, targets, rank, count)

    def check_order(self, inputs: Inputs, targets: Tensor) -> None:
        """Raise ValueError where the processes do not have the same minibatches.

        Args:
            inputs: those of an epoch's first minibatch, as the loader brought them.
            targets: its targets.
        """
        if self._sampler is not None:
            seen = self._sampler.order
        else:
            seen = digest(tree_leaves((inputs, targets)))
        self._processes.check_equal(
            {"order of the data": seen},
            "the loader must bring the same minibatches in each process: give fit the loader of "
            "one process, not a part of the data",
        )


def part_of(inputs: Inputs, targets: Tensor, rank: int, count: int) -> tuple[Inputs, Tensor, Share]:
    """Return the rows of one process, of nearly equal numbers, and their share.

    A process for which no row is left takes the first one, with weight 0.

    Raises:
        ValueError: a tensor of the inputs has another number of rows than the targets.

    Example:
        >>> _, targets, share = part_of(torch.zeros(5, 2), torch.arange(5), rank=1, count=2)
        >>> targets.tolist(), share
        ([2, 3, 4], Share(weight=0.6, batch_size=5))
    """
    whole = len(targets)
    rows = _rows(whole, rank, count)
    own = len(rows)
    bounds = slice(rows.start, rows.stop) if own else slice(0, 1)
    for leaf in tree_leaves(inputs):
        if leaf is None or (isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == whole):
            continue
        found = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
        raise ValueError(
            "to divide a minibatch among processes, its inputs must be tensors with a row for each "
            f"of the {whole} examples, got {found}; make the loader bring such tensors, or train "
            "in one process"
        )
    mine: Inputs = tree_map_only(Tensor, lambda each: each[bounds], inputs)
    return mine, targets[bounds], Share(own / whole, whole)


def _rows(whole: int, rank: int, count: int) -> range:
    return range(rank * whole // count, (rank + 1) * whole // count)


class _PartOfEach(Sampler[list[int]]):
    """The indices of one process's part of each minibatch."""

    def __init__(self, whole: Any, rank: int, count: int, length: int | None) -> None:
        self._whole, self._rank, self._count, self._length = whole, rank, count, length
        #: Examples of this process and of all, by minibatch of the epoch.
        self.sizes: list[tuple[int, int]] = []
        #: A digest of the indices of all processes.
        self.order = ""

    @property
    def sampler(self) -> Any:
        """The sampler of the whole minibatches, whose generator and epoch ``fit`` sets."""
        return getattr(self._whole, "sampler", None)

    @property
    def generator(self) -> Any:
        """The generator of the whole minibatches."""
        return getattr(self._whole, "generator", None)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on."""
        if hasattr(self._whole, "set_epoch"):
            self._whole.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._whole)

    def __iter__(self) -> Iterator[list[int]]:
        # All at once: torch's generator is the same in all processes only now.
        batches: list[Sequence[int]] = [list(each) for each in islice(self._whole, self._length)]
        self.order = digest(batches)
        rows = [_rows(len(each), self._rank, self._count) for each in batches]
        self.sizes = [(len(own), len(each)) for own, each in zip(rows, batches, strict=True)]
        for own, batch in zip(rows, batches, strict=True):
            yield [batch[row] for row in own] or [batch[0]]


def _with_batches(loader: DataLoader[Any], batches: _PartOfEach, rank: int) -> DataLoader[Any]:
    """Return a loader of the same data set with other minibatches."""
    names = [
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "generator",
        "multiprocessing_context",
        "prefetch_factor",
        "persistent_workers",
    ]
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        worker_init_fn=_SeedWorker(rank, loader.worker_init_fn),
        **{name: getattr(loader, name) for name in names},
    )


class _SeedWorker:
    """Seed a worker of a loader, so that random augmentation differs between processes."""

    def __init__(self, rank: int, then: Callable[[int], None] | None) -> None:
        self._rank, self._then = rank, then

    def __call__(self, worker: int) -> None:
        seed = torch.initial_seed() + self._rank * 1_000_003
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  # a data set may use these
        if self._then is not None:
            self._then(worker)
