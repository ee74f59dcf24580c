"""An epoch's minibatches, with everything random in it a function of seed, epoch and step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from bayesify.inputs import Inputs
from bayesify.noise import Stream, derived_seed

__all__ = ["Loader", "generators_seed", "kept_generators", "minibatches", "num_data_of"]


class Loader(Protocol):
    """Minibatches of inputs and targets, as often as it is asked, such as torch's DataLoader."""

    def __len__(self) -> int:
        """The number of minibatches."""

    def __iter__(self) -> Iterator[Any]:
        """One epoch of pairs (inputs, targets)."""


def minibatches(
    loader: Loader, *, seed: int, epoch: int, skip: int
) -> Generator[tuple[int, tuple[Inputs, Tensor]], None, None]:
    """An epoch's minibatches with their indices, but for the first ``skip``.

    The order of the data is a function of seed and epoch. Before each minibatch is fetched torch's
    global generators are seeded by seed and step, so that random augmentation and dropout are
    functions of these, whether or not the run was interrupted before. They are left as they were
    when the iteration ends or is closed; generators of the loader's own are not.
    """
    epoch_seed = derived_seed(seed, Stream.SHUFFLE, epoch)
    _seed_loader(loader, epoch, epoch_seed)
    length = len(loader)
    set_seed = generators_seed()
    with kept_generators():
        set_seed(epoch_seed)
        iterator = iter(loader)
        for batch in range(length):
            set_seed(derived_seed(seed, Stream.DROPOUT, epoch * length + batch))
            try:
                pair = next(iterator)
            except StopIteration:
                return
            if batch >= skip:
                yield batch, pair


def num_data_of(loader: Loader) -> set[int]:
    """The numbers of data that the loader may be said to bring; empty if it does not say."""
    if hasattr(loader, "num_data"):
        return {loader.num_data}
    # A sampler may take a part of the data set, as a split does, or repeat some of it.
    owners: tuple[Any, ...] = tuple(getattr(loader, n, None) for n in ("dataset", "sampler"))
    return {len(owner) for owner in owners if hasattr(owner, "__len__")}


def _seed_loader(loader: Loader, epoch: int, epoch_seed: int) -> None:
    batch_sampler: Any = getattr(loader, "batch_sampler", None)
    samplers: list[Any] = [getattr(owner, "sampler", None) for owner in (loader, batch_sampler)]
    for owner in (loader, batch_sampler, *samplers):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(epoch_seed)
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)


def generators_seed() -> Callable[[int], object]:
    """What seeds torch's global generators, those of all devices that there are."""
    # Without an accelerator torch.manual_seed remembers its caller for each kind that there could
    # be, at every call: for a small network a sixth of a step's time.
    processor_only = not torch.accelerator.is_available()
    return torch.default_generator.manual_seed if processor_only else torch.manual_seed


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put torch's global generators back as they were."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield
