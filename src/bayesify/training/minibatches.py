"""Minibatches of an epoch, whose randomness is a function of seed, epoch and step."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from bayesify.module.inputs import Inputs
from bayesify.noise.keys import Stream, derived_seed, kept_generators, seed_global_generators

__all__ = ["Loader", "epoch_size_of", "minibatches", "num_batches_of", "num_data_of", "pair_of"]


class Loader(Protocol):
    """An iterable of minibatches that can be iterated again, such as torch's DataLoader.

    A minibatch is a pair (inputs, targets), or a mapping with the targets under "labels", as
    Hugging Face's collators make it.
    """

    def __len__(self) -> int:
        """The number of minibatches; a loader of a stream may have none, see num_batches_of."""

    def __iter__(self) -> Iterator[Any]:
        """One epoch of minibatches."""


def num_batches_of(loader: Loader, num_data: int) -> int:
    """Return the number of minibatches in an epoch.

    A loader of a stream, such as an ``IterableDataset``, has no length. Its epoch then has
    ``num_data`` examples by minibatches of its ``batch_size``, and ends there. Each worker beyond
    the first may bring one more, since each ends with a minibatch that is not full. With
    ``drop_last`` the epoch is without that minibatch, whether or not the stream goes on.

    Raises:
        TypeError: the loader has neither a length nor a batch size.

    Example:
        >>> class Stream(torch.utils.data.IterableDataset):
        ...     def __iter__(self):
        ...         return iter(range(10))
        >>> num_batches_of(torch.utils.data.DataLoader(Stream(), batch_size=4), num_data=10)
        3
    """
    try:
        return len(loader)
    except TypeError:
        size = getattr(loader, "batch_size", None)
        if not size:
            raise TypeError(
                "a loader must tell the number of minibatches by its length, or by a batch_size, "
                f"got a {type(loader).__name__} without both; use a DataLoader, also over an "
                "IterableDataset, or give your class a __len__"
            ) from None
        if getattr(loader, "drop_last", False):
            return max(1, num_data // int(size))
        others = max(0, getattr(loader, "num_workers", 0) - 1)
        return -(-num_data // int(size)) + others


def minibatches(
    loader: Loader,
    *,
    seed: int,
    epoch: int,
    skip: int,
    length: int | None = None,
    rank: int = 0,
    fetch_rank: int = 0,
) -> Generator[tuple[int, Any], None, None]:
    """Yield an epoch's minibatches with their indices, without the first ``skip``.

    There are ``length`` of them; None is the loader's own.

    The order of the data is a function of seed and epoch. With the workers of a DataLoader it is
    that without, if it is drawn with the first minibatch, as torch's samplers do. Before each
    minibatch is fetched the global generators of torch, Python and NumPy are seeded by seed and
    step, so that random augmentation and dropout are functions of these, whether or not the run was
    interrupted before. They are left as they were when the iteration ends or is closed; generators
    of the loader's own are not. A stream that several workers divide warns if it would bring more.

    Of several processes each has dropout of its own, by its ``rank``. What is drawn while a
    minibatch is fetched is the same for equal values of ``fetch_rank``.
    """
    epoch_seed = derived_seed(seed, Stream.SHUFFLE, epoch)
    length = len(loader) if length is None else length

    with kept_generators(), _seeded(loader, epoch, epoch_seed):
        ahead = _fetching_ahead(loader) is not None
        if ahead:
            seed_global_generators(seed, Stream.DROPOUT, epoch * length, 0)
        else:
            seed_global_generators(seed, Stream.SHUFFLE, epoch)
            torch.manual_seed(epoch_seed)  # the order of the data is that of earlier versions
        iterator = iter(loader)
        for batch in range(length):
            # A sampler draws the order with the first minibatch, the same in all processes.
            fetching, is_fetched = fetch_rank if batch else 0, ahead and not batch
            if not is_fetched:
                seed_global_generators(seed, Stream.DROPOUT, epoch * length + batch, fetching)
            try:
                pair = next(iterator)
            except StopIteration:
                return
            if is_fetched or rank != fetching:
                seed_global_generators(seed, Stream.DROPOUT, epoch * length + batch, rank)
            if batch >= skip:
                yield batch, pair
        if _has_divided_stream(loader) and next(iterator, None) is not None:
            warnings.warn(
                f"the loader brings more minibatches than its length of {length}, at which an "
                "epoch ends: each of its workers ends with a minibatch that is not full; use "
                "drop_last=True, another batch_size or one worker, or leave __len__ out of the "
                "IterableDataset",
                stacklevel=2,
            )


def _has_divided_stream(loader: Loader) -> bool:
    """Return whether a loader has a stream with a length that several workers may divide."""
    stream = getattr(loader, "dataset", None)
    has_length = isinstance(stream, IterableDataset) and hasattr(stream, "__len__")
    return has_length and getattr(loader, "num_workers", 0) > 1


def pair_of(minibatch: Any, device: torch.device | None = None) -> tuple[Inputs, Tensor]:
    """Return the inputs and the targets of what a loader yields.

    Args:
        minibatch: a pair, or a mapping with the targets under "labels".
        device: where tensors on the CPU are moved; None leaves them there.

    Raises:
        TypeError: the inputs are an array of NumPy, or the targets are no tensor.
        ValueError: a mapping has no "labels", anything else is no pair, or there are no examples.

    Example:
        >>> inputs, targets = pair_of({"input_ids": torch.ones(2, 3), "labels": torch.zeros(2)})
        >>> list(inputs), targets.shape
        (['input_ids'], torch.Size([2]))
    """
    if not isinstance(minibatch, Mapping):
        parts = tuple(minibatch) if isinstance(minibatch, Sequence) else (minibatch,)
        if len(parts) != 2:
            kinds = ", ".join(type(part).__name__ for part in parts)
            raise ValueError(
                f"a minibatch must be a pair (inputs, targets), got {len(parts)} ({kinds}); let "
                "the loader's collate_fn drop the others, or make several inputs one tuple: "
                "((x, z), y)"
            )
        return _checked(parts, device)
    inputs = dict(minibatch)
    if "labels" not in inputs:
        raise ValueError(
            'a minibatch that is a mapping must have the targets under "labels", got the names '
            f"{', '.join(map(str, inputs))}; rename one in the loader's collate_fn, or let it "
            "return pairs (inputs, targets)"
        )
    return _checked((inputs, inputs.pop("labels")), device)


def _checked(pair: tuple[Inputs, Tensor], device: torch.device | None) -> tuple[Inputs, Tensor]:
    """Return a pair on a device, once it is known to hold tensors of examples."""
    for part, name in zip(pair, ("inputs", "targets"), strict=True):
        if isinstance(part, np.ndarray):
            raise TypeError(
                f"a minibatch must hold tensors, got an ndarray as {name}; use torch.as_tensor, or "
                "a DataLoader, whose default collate_fn does"
            )
        if name == "targets" and not isinstance(part, Tensor):
            raise TypeError(
                f"a minibatch must hold the targets as a tensor, got a {type(part).__name__}; use "
                "torch.as_tensor, or a DataLoader, whose default collate_fn does"
            )
        if isinstance(part, Tensor) and part.dim() and not len(part):
            raise ValueError(
                f"a minibatch must hold at least one example, got {name} of shape "
                f"{tuple(part.shape)}; let the loader leave it out"
            )
    if device is None or device.type == "cpu":
        return pair
    moved: tuple[Inputs, Tensor] = tree_map_only(
        Tensor,
        lambda each: each.to(device, non_blocking=True) if each.device.type == "cpu" else each,
        pair,
    )
    return moved


def num_data_of(loader: Loader) -> set[int]:
    """The possible numbers of examples in an epoch; empty if the loader does not tell."""
    if hasattr(loader, "num_data"):
        return {loader.num_data}
    brings_batches = getattr(loader, "batch_sampler", "") is None  # of the data set's own
    if brings_batches or _has_own_batches(loader):
        return set()
    # A sampler may draw a part of the data set, as a split does, or repeat some of it; one of
    # several processes draws a part of what all draw.
    sampler = _sampler_of(loader)
    if isinstance(sampler, DistributedSampler):
        whole: Any = sampler.dataset
        return {len(whole)}
    owners = (getattr(loader, "dataset", None), sampler)
    return {len(owner) for owner in owners if isinstance(owner, Sized)}


def epoch_size_of(loader: Loader) -> int | None:
    """Return the number of examples that a loader brings in an epoch; None if it does not tell.

    Example:
        >>> from bayesify.datasets import Passes, TensorLoader
        >>> epoch_size_of(Passes(TensorLoader(torch.zeros(5, 2), torch.zeros(5), 4), passes=3))
        15
    """
    if hasattr(loader, "num_data"):
        return int(loader.num_data) * getattr(loader, "passes", 1)
    sampler = _sampler_of(loader)
    if getattr(loader, "batch_sampler", None) is None or isinstance(sampler, DistributedSampler):
        return None
    return len(sampler) if isinstance(sampler, Sized) and not _has_own_batches(loader) else None


def _sampler_of(loader: Loader) -> object:
    """Return what draws the examples; a DataLoader with a ``batch_sampler`` names another."""
    batches = getattr(loader, "batch_sampler", None)
    return batches.sampler if _is_plain(batches) else getattr(loader, "sampler", None)


def _has_own_batches(loader: Loader) -> bool:
    """Return whether a ``batch_sampler`` was given that does not show what it draws."""
    batches = getattr(loader, "batch_sampler", None)
    given = batches is not None and getattr(loader, "batch_size", None) is None
    return given and not _is_plain(batches)


def _is_plain(batches: object) -> TypeGuard[BatchSampler]:
    """Whether minibatches are the examples that a sampler draws, in their order."""
    return isinstance(batches, BatchSampler) and type(batches).__iter__ is BatchSampler.__iter__


def _fetching_ahead(loader: Loader) -> DataLoader[Any] | None:
    """Return the loader if its workers fetch minibatches when the iteration begins.

    None stands for others, and for one that another library wraps, whose generator is out of reach.
    """
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return None
    return loader if loader.num_workers > 0 else None


@contextmanager
def _seeded(loader: Loader, epoch: int, epoch_seed: int) -> Iterator[None]:
    """Seed a loader's own generators for an epoch, and those that its samplers lack."""
    batch_sampler: Any = getattr(loader, "batch_sampler", None)
    samplers: list[Any] = [getattr(owner, "sampler", None) for owner in (loader, batch_sampler)]
    ahead = _fetching_ahead(loader)
    # Workers that persist draw a seed in the first epoch of a process only, so that the global
    # generator would give a resumed run another order.
    persist = getattr(loader, "persistent_workers", False) and ahead is None
    lacking = [each for each in samplers if persist and getattr(each, "generator", ...) is None]
    for owner in (loader, batch_sampler, *samplers):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(epoch_seed)
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)
    for sampler in lacking:
        sampler.generator = torch.Generator().manual_seed(epoch_seed)
    own = None if ahead is None else ahead.generator
    if ahead is not None:
        # The workers' seed is drawn from a generator of its own, so that the samplers' are as they
        # are without workers, where the loader's, which a sampler may share, first gives a number.
        ahead.generator = torch.Generator().manual_seed(epoch_seed)
        if own is not None:
            torch.empty((), dtype=torch.int64).random_(generator=own)
    try:
        yield
    finally:
        if ahead is not None:
            ahead.generator = own
        for sampler in lacking:
            sampler.generator = None
