"""How many data, and how many weight samples, go through a network at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from bayesify.footprint import FEW, Footprint, MemoryTracker
from bayesify.inputs import Inputs, arguments_of, count_data
from bayesify.predictive import SizedIterable
from bayesify.random_network import RandomNetwork

__all__ = ["Known", "Pieces", "Summary", "bytes_of"]

#: What is made of the outputs under each weight sample.
Summary = Callable[[SizedIterable], object]
#: What was measured before, by the kind of inputs; None where a few data alone would not do.
Known = dict[object, Footprint | None]

# docs/prediction.md has what was measured. Bytes of the tensors of one pass: with more of them a
# processor gets slower, by up to three.
_BEST_PASS = {"cpu": 8 * 10**6}
_LARGEST_PASS = 10**9
_MOST_DATA = 1024
# Weight samples that share a pass: where each takes more, or they are fewer, a loop is as fast.
_LARGEST_SHARE = 250_000
_BEST_SHARED_PASS = 4 * 10**6
_FEWEST, _MOST = 8, 64
# Of what is not counted a pass takes as much again at most. And an allocator keeps pieces that
# nothing fits into, so that a pass rather takes a third of what it may.
_WITH_ROOM = 2
_SPARING = 3
# A mean without the pruned, stds, the noise that becomes weights, and weights in a kernel's order.
_WEIGHT_VECTORS = 4
# States of generators, and the scratch of kernels that does not grow with the data.
_SUNDRIES = 2 * 10**6

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bytes_of(memory: int | str) -> int:
    """A number of bytes, from itself or from text; MB is 1000^2 bytes, MiB 1024^2.

    Raises:
        ValueError, TypeError: it is none, or below 1.

    Example:
        >>> bytes_of(4096), bytes_of("64 MB"), bytes_of("1.5 GiB")
        (4096, 64000000, 1610612736)
    """
    wanted = 'max_memory must be a number of bytes, or text such as "64 MB" or "1 GiB"'
    if isinstance(memory, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMG]I?B|B)", memory.strip().upper())
        if found is None:
            raise ValueError(f"{wanted}, got {memory!r}")
        size = int(float(found[1]) * _UNITS[found[2]])
    elif isinstance(memory, int) and not isinstance(memory, bool):
        size = memory
    else:
        raise TypeError(f"{wanted}, got {memory!r}")
    if size < 1:
        raise ValueError(f"{wanted}, of at least 1 byte, got {memory!r}")
    return size


class Pieces(NamedTuple):
    """How a prediction is cut.

    Args:
        batch_size: how many data go through the network at once.
        group: how many weight samples share a pass; 1 is a loop over them.
    """

    batch_size: int
    group: int

    @classmethod
    def of(
        cls,
        network: RandomNetwork,
        inputs: Inputs,
        known: Known,
        *,
        num_samples: int = 1,
        summary: Summary | None = None,
        batch_size: int | None = None,
        max_memory: int | str | None = None,
    ) -> Pieces:
        """Choose what is fast, and what fits.

        Args:
            network: in evaluation mode.
            inputs: as for ``BayesianModule.predict``.
            known: filled here.
            num_samples: S.
            summary: what is made of the outputs, if not a single tensor.
            batch_size: as the user wants it, or None.
            max_memory: the bytes that the prediction may take, or None.

        Raises:
            ValueError: ``batch_size`` is below 1, or ``max_memory`` too little.

        Example:
            >>> from torch import nn
            >>> from bayesify import BayesianModule
            >>> bnn, x = BayesianModule(nn.Linear(1000, 2000)), torch.zeros(3000, 1000)
            >>> with torch.no_grad():
            ...     Pieces.of(bnn, x, {})
            ...     Pieces.of(bnn, x, {}, max_memory="90 MB")
            Pieces(batch_size=1000, group=1)
            Pieces(batch_size=158, group=1)
        """
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        num_data, mean = count_data(inputs), network.posterior.mean
        # A hook is to see every pass, and none that is not the prediction's.
        watched = any(m._forward_hooks or m._forward_pre_hooks for m in network.net.modules())
        footprint, room = None, None
        if max_memory is not None:
            cap = bytes_of(max_memory)
            footprint, room = _within(cap, network, inputs, num_samples, summary, batch_size)
        elif not watched:
            footprint = _known(network, inputs, known)
        if footprint is None:
            return cls(batch_size or min(_MOST_DATA, num_data), 1)
        if batch_size is None:
            best = _BEST_PASS.get(mean.device.type, _LARGEST_PASS)
            size = min(num_data, _MOST_DATA, best // footprint.per_datum)
            if room is not None:
                size = min(size, footprint.fitting(room // _SPARING))
            batch_size = ceil(num_data / ceil(num_data / max(1, size)))
        if watched or batch_size < num_data or not footprint.vectorises:
            return cls(batch_size, 1)
        share = footprint.taken(num_data) + mean.nbytes
        group = min(num_samples, _MOST, _BEST_SHARED_PASS // share)
        if room is not None:
            group = min(group, room // (share + _WEIGHT_VECTORS * mean.nbytes))
        if share > _LARGEST_SHARE or group < _FEWEST:
            return cls(batch_size, 1)
        return cls(batch_size, ceil(num_samples / ceil(num_samples / group)))


def _known(network: RandomNetwork, inputs: Inputs, known: Known) -> Footprint | None:
    args, kwargs = arguments_of(inputs)
    mean, few = network.posterior.mean, min(FEW, count_data(inputs))
    kind = (
        (mean.dtype, mean.device, torch.is_autocast_enabled(mean.device.type), few),
        tuple((value.shape[1:], value.dtype) for value in args),
        tuple((name, value.shape[1:], value.dtype) for name, value in kwargs.items()),
    )
    if kind not in known:
        try:
            known[kind], _ = Footprint.of(network, inputs, _LARGEST_PASS)
        except Exception:
            # Its data may belong together, as a graph's nodes. What else is wrong, all data show.
            known[kind] = None
    return known[kind]


def _within(
    cap: int,
    network: RandomNetwork,
    inputs: Inputs,
    num_samples: int,
    summary: Summary | None,
    batch_size: int | None,
) -> tuple[Footprint, int]:
    """What a pass takes, and what it may take."""
    num_data = count_data(inputs)
    weights = _WEIGHT_VECTORS * network.posterior.mean.nbytes + _SUNDRIES
    room, most = max(0, cap - weights) // _WITH_ROOM, FEW
    if batch_size is not None:
        room, most = _LARGEST_PASS, batch_size
    try:
        footprint, outputs = Footprint.of(network, inputs, room, most)
    except Exception as error:
        error.add_note("max_memory measures a pass over one datum and one over a few")
        raise
    # The outputs of a weight sample, of the one before, and what is made of them.
    answers = num_data * (2 * footprint.output + _summary_bytes(summary, outputs, num_samples))
    room = (cap - weights - answers) // _WITH_ROOM
    count = min(num_data, 1 if batch_size is None else batch_size)
    a_pass = footprint.taken(count)
    if a_pass > room:
        least = weights + answers + _WITH_ROOM * a_pass
        raise ValueError(
            f"max_memory must be at least {least} bytes for this prediction, got {cap}: {weights} "
            f"for weights, {answers} for the answers to {num_data} data, {_WITH_ROOM * a_pass} for "
            f"a pass over {count} of them; predict fewer data at a time"
            + ("" if count == 1 else ", or leave batch_size to be chosen")
        )
    return footprint, room


def _summary_bytes(summary: Summary | None, outputs: Tensor, num_samples: int) -> int:
    """The most that is held of a datum beside the outputs of one weight sample."""
    if summary is None:
        return 0
    peaks: list[int] = []
    for count in (2, 3):
        with MemoryTracker() as tracker:
            summary([outputs] * count)
        peaks.append(tracker.peak)
    return ceil((peaks[0] + (num_samples - 2) * (peaks[1] - peaks[0])) / len(outputs))
