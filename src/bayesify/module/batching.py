"""Batching of predictions: the number of examples and of weight samples in one forward pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import ceil
from numbers import Integral
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bayesify.estimators.network_state import modules_of
from bayesify.estimators.out_of_memory import is_out_of_memory
from bayesify.module.inputs import WHOLE, Inputs, are_divisible, arguments_of, count_examples
from bayesify.module.pass_memory import PROBE_SIZE, MemoryTracker, PassMemory, Unmeasured
from bayesify.module.random_network import RandomNetwork
from bayesify.noise.arguments import whole_number
from bayesify.prediction import SizedIterable

__all__ = [
    "MIN_GROUP",
    "Batching",
    "PassMemoryCache",
    "Reduction",
    "kind_of_pass",
    "parse_bytes",
    "shared_group",
]

#: Reduces the outputs of all weight samples to a result, such as a predictive distribution.
Reduction = Callable[[SizedIterable], object]
#: Measured pass memory by the kind of inputs.
PassMemoryCache = dict[object, PassMemory | Unmeasured]

# docs/prediction.md documents the measurements behind these constants.
# Bytes of the tensors of one pass. A CPU is fastest between 8 and 32 MB, and above slower, by up
# to a factor of three.
_BEST_PASS = {"cpu": 16 * 10**6}
_LARGEST_PASS = 10**9
_MAX_BATCH_SIZE = 1024
# Weight samples share a pass only if each needs few bytes for tensors other than weights, and there
# are enough of them; otherwise a loop is as fast. Weights are only read.
_LARGEST_SHARE = {"cpu": 500_000}
_BEST_SHARED_PASS = {"cpu": 20 * 10**6}
_SHARED_WEIGHTS = 192 * 10**6
#: The least number of weight samples that share a pass.
MIN_GROUP = 8
_MAX_GROUP = 128
# Bytes of averaging a block of outputs in float64, to those of the outputs.
_AVERAGING = 8
# Factor for memory that the tracker does not count.
_SAFETY_FACTOR = 2
# The batch size is chosen for a pass of a third of the available bytes, since the memory of an
# allocator becomes fragmented.
_FRAGMENTATION_FACTOR = 3
# Masked means, standard deviations, noise that becomes weights, and weights in a kernel's layout.
_WEIGHT_VECTORS = 4
# Generator states, and scratch memory of kernels that does not grow with the number of examples.
_FIXED_OVERHEAD = 2 * 10**6

#: The kind of all inputs that are not divided, which may hold objects of any kind.
_UNDIVIDED = "undivided"
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(memory: int | str) -> int:
    """Parse a number of bytes; MB is 1000^2 bytes, MiB is 1024^2 bytes.

    Raises:
        ValueError: the text cannot be parsed, or the number is below 1.
        TypeError: ``memory`` is neither an integer nor text.

    Example:
        >>> parse_bytes(4096), parse_bytes("64 MB"), parse_bytes("1.5 GiB")
        (4096, 64000000, 1610612736)
    """
    expected = 'max_memory must be a number of bytes, or text such as "64 MB" or "1 GiB"'
    if isinstance(memory, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMG]I?B|B)", memory.strip().upper())
        if match is None:
            raise ValueError(f"{expected}, got {memory!r}")
        size = int(float(match[1]) * _UNITS[match[2]])
    elif isinstance(memory, Integral) and not isinstance(memory, bool):
        size = int(memory)
    else:
        raise TypeError(f"{expected}, got {memory!r}")
    if size < 1:
        raise ValueError(f"{expected}, of at least 1 byte, got {memory!r}")
    return size


class Batching(NamedTuple):
    """The division of a prediction into forward passes.

    Args:
        batch_size: the number of examples in one pass.
        group: the number of weight samples in one pass; 1 is a loop over the samples.
        may_edit_weights: whether the network may write to its weights, so that it needs copies.
        caches_weights: whether a pass leaves what is a function of its weights, so that each weight
            sample begins with the attributes of before.
    """

    batch_size: int
    group: int
    may_edit_weights: bool = True
    caches_weights: bool = False

    @classmethod
    def of(
        cls,
        network: RandomNetwork,
        inputs: Inputs,
        cache: PassMemoryCache,
        *,
        num_samples: int = 1,
        reduction: Reduction | None = None,
        batch_size: int | Literal["all"] | None = None,
        max_memory: int | str | None = None,
    ) -> Batching:
        """Choose a fast division that fits into memory.

        Args:
            network: the network, in evaluation mode.
            inputs: as for ``BayesianModule.predict``.
            cache: measurements of earlier calls; new ones are added.
            num_samples: S, the number of weight samples.
            reduction: the reduction of the outputs of all samples; None if there is a single
                output that is returned as it is.
            batch_size: the batch size that the user requested, ``"all"`` or None.
            max_memory: the memory that the prediction may use, or None.

        Raises:
            ValueError: ``batch_size`` is below 1, ``max_memory`` is too small or given where
                nothing may be divided, or the network keeps a state of earlier passes.

        Example:
            >>> from torch import nn
            >>> from bayesify import BayesianModule
            >>> bnn, x = BayesianModule(nn.Linear(1000, 2000)), torch.zeros(3000, 1000)
            >>> with torch.no_grad():
            ...     Batching.of(bnn, x, {})
            ...     Batching.of(bnn, x, {}, max_memory="90 MB")
            Batching(batch_size=1000, group=1, may_edit_weights=False, caches_weights=False)
            Batching(batch_size=158, group=1, may_edit_weights=False, caches_weights=False)
        """
        # Forward hooks must see the passes of the prediction only, so that no probe is run.
        has_hooks = any(m._forward_hooks or m._forward_pre_hooks for m in modules_of(network.net))
        if batch_size == "all" or (batch_size is None and not are_divisible(inputs)):
            if max_memory is not None:
                raise ValueError(
                    'max_memory divides the inputs, which cannot be with batch_size="all" or where '
                    "they are sparse, jagged or packed; leave one of the two out"
                )
            looks = num_samples > 1 and not has_hooks
            found = _undivided(network, inputs, cache) if looks else Unmeasured()
            return cls(WHOLE, 1, caches_weights=_caches_weights(found, cache, num_samples))
        wanted = None if batch_size is None else whole_number("batch_size", batch_size)
        num_examples, mean = count_examples(inputs), network.posterior.mean
        unmeasured = cls(wanted or min(_MAX_BATCH_SIZE, num_examples), 1)
        pass_memory: PassMemory | Unmeasured
        available = None
        if max_memory is not None:
            cap = parse_bytes(max_memory)
            pass_memory, available = _measure_within(
                cap, network, inputs, num_samples, reduction, wanted
            )
        elif has_hooks:
            return unmeasured
        else:
            pass_memory = _cached_pass_memory(network, inputs, cache, wanted or WHOLE)
        caches_weights = _caches_weights(pass_memory, cache, num_samples)
        if isinstance(pass_memory, Unmeasured):
            size = unmeasured.batch_size if wanted or pass_memory.takes_few else WHOLE
            return cls(size, 1, caches_weights=caches_weights)
        if wanted is None:
            best = _BEST_PASS.get(mean.device.type, _LARGEST_PASS)
            size = min(num_examples, _MAX_BATCH_SIZE, best // pass_memory.per_example)
            if available is not None:
                size = min(size, pass_memory.examples_within(available // _FRAGMENTATION_FACTOR))
            wanted = ceil(num_examples / ceil(num_examples / max(1, size)))
        # Forward hooks may edit the weights in the passes of the prediction only.
        may_edit = has_hooks or pass_memory.edits_weights
        alone = cls(wanted, 1, may_edit, caches_weights)
        if has_hooks or caches_weights or wanted < num_examples or not pass_memory.vectorises:
            return alone
        share = pass_memory.bytes_for(num_examples) + _AVERAGING * pass_memory.output * num_examples
        if share > _LARGEST_SHARE.get(mean.device.type, _LARGEST_PASS):
            return alone
        room = None
        if available is not None:
            room = available // (share + (1 + _WEIGHT_VECTORS) * mean.nbytes)
        group = shared_group(share, mean, num_samples, room=room)
        return cls(wanted, group, may_edit)


def _caches_weights(
    pass_memory: PassMemory | Unmeasured, cache: PassMemoryCache, num_samples: int
) -> bool:
    """Return whether a pass leaves what is a function of its weights; refuse a state of several."""
    # An earlier call, with inputs of another kind, may have left it.
    kept = [each.carried for each in (pass_memory, *cache.values()) if each.carried]
    state = next((each for each in kept if not each.is_cache), None)
    if state is not None and num_samples > 1:
        raise ValueError(
            "each weight sample needs a pass of its own, but the network keeps a state of earlier "
            f"passes in {', '.join(state.names[:3])}, on which the outputs of later ones depend; "
            "reset it at the start of each pass"
        )
    return any(each.is_cache for each in kept)


def _undivided(
    network: RandomNetwork, inputs: Inputs, cache: PassMemoryCache
) -> PassMemory | Unmeasured:
    """Return what a pass over inputs that are not divided leaves, found in the first such call."""
    if _UNDIVIDED not in cache:
        try:
            cache[_UNDIVIDED] = Unmeasured.of(network, inputs, WHOLE)
        except Exception as error:  # of the user's network, which shows in the prediction too
            if is_out_of_memory(error):
                raise
            return Unmeasured()
    return cache[_UNDIVIDED]


def shared_group(share: int, vector: Tensor, num_samples: int, *, room: int | None = None) -> int:
    """Return how many of the weight samples share a pass; 1 where a loop is as fast.

    Args:
        share: bytes of one sample's tensors in the pass, without its weights.
        vector: like one sample's weights.
        num_samples: the number of weight samples that are left.
        room: how many fit into memory, or None.

    Example:
        >>> vector = torch.zeros(1000)
        >>> shared_group(100_000, vector, 100), shared_group(10_000_000, vector, 100)
        (100, 1)
    """
    best = _BEST_SHARED_PASS.get(vector.device.type, _LARGEST_PASS)
    group = min(best // max(1, share), _SHARED_WEIGHTS // max(1, vector.nbytes))
    group = min(group, num_samples, _MAX_GROUP if room is None else min(_MAX_GROUP, room))
    return 1 if group < MIN_GROUP else ceil(num_samples / ceil(num_samples / group))


def _kind(value: object) -> object:
    """Return what of an argument decides over the memory of a pass, but for the examples."""
    return (value.shape[1:], value.dtype) if isinstance(value, Tensor) else value


def kind_of_pass(network: RandomNetwork, inputs: Inputs) -> object:
    """Return a key of what passes of a network differ in, besides the number of examples.

    Example:
        >>> from torch import nn
        >>> from bayesify import BayesianModule
        >>> bnn, few, many = BayesianModule(nn.Linear(3, 2)), torch.zeros(2, 3), torch.zeros(9, 3)
        >>> kind_of_pass(bnn, few) == kind_of_pass(bnn, many)
        True
    """
    args, kwargs = arguments_of(inputs)
    mean = network.posterior.mean
    return (
        (mean.dtype, mean.device, torch.is_autocast_enabled(mean.device.type)),
        tuple(map(_kind, args)),
        tuple((name, _kind(value)) for name, value in kwargs.items()),
    )


def _cached_pass_memory(
    network: RandomNetwork, inputs: Inputs, cache: PassMemoryCache, most: int
) -> PassMemory | Unmeasured:
    kind = kind_of_pass(network, inputs), min(PROBE_SIZE, count_examples(inputs))
    if kind not in cache:
        # The user's network may reject a few examples with any error, for instance where they
        # belong together as the nodes of a graph. Any other fault shows in the prediction.
        try:
            cache[kind], _ = PassMemory.of(network, inputs, _LARGEST_PASS)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            found = _unmeasured(network, inputs, most)
            if found is None:  # the fault may be of these values alone
                return Unmeasured(takes_few=False)
            cache[kind] = found
    return cache[kind]


def _unmeasured(network: RandomNetwork, inputs: Inputs, most: int) -> Unmeasured | None:
    """Run a pass over a few examples, or over ``most``; None if the network takes neither."""
    for count in (PROBE_SIZE, most):
        try:
            found = Unmeasured.of(network, inputs, count)
        except Exception as error:
            if is_out_of_memory(error):
                raise
        else:
            return found._replace(takes_few=count == PROBE_SIZE)
    return None


def _measure_within(
    cap: int,
    network: RandomNetwork,
    inputs: Inputs,
    num_samples: int,
    reduction: Reduction | None,
    batch_size: int | None,
) -> tuple[PassMemory, int]:
    """Measure the memory of a pass; return it and the bytes that a pass may use under the cap."""
    num_examples = count_examples(inputs)
    weights = _WEIGHT_VECTORS * network.posterior.mean.nbytes + _FIXED_OVERHEAD
    available, probe_size = max(0, cap - weights) // _SAFETY_FACTOR, PROBE_SIZE
    if batch_size is not None:
        available, probe_size = _LARGEST_PASS, batch_size
    try:
        pass_memory, outputs = PassMemory.of(network, inputs, available, probe_size)
    except Exception as error:
        error.add_note("max_memory measures a pass over one example and one over a few")
        raise
    # The outputs of two consecutive weight samples, and the result of the reduction.
    results = num_examples * (
        2 * pass_memory.output + _reduction_bytes(reduction, outputs, num_samples)
    )
    available = (cap - weights - results) // _SAFETY_FACTOR
    count = min(num_examples, 1 if batch_size is None else batch_size)
    needed = pass_memory.bytes_for(count)
    if needed > available:
        minimum = weights + results + _SAFETY_FACTOR * needed
        raise ValueError(
            f"max_memory must be at least {minimum} bytes for this prediction, got {cap}: "
            f"{weights} for weights, {results} for the results of {num_examples} examples, "
            f"{_SAFETY_FACTOR * needed} for a pass over {count} of them; predict fewer examples at "
            "a time" + ("" if count == 1 else ", or omit batch_size")
        )
    return pass_memory, available


def _reduction_bytes(reduction: Reduction | None, outputs: Tensor, num_samples: int) -> int:
    """Return the peak bytes of a reduction per example, without the outputs of one sample."""
    if reduction is None:
        return 0
    peaks: list[int] = []
    for count in (2, 3):
        with MemoryTracker() as tracker:
            reduction([outputs] * count)
        peaks.append(tracker.peak)
    return ceil((peaks[0] + (num_samples - 2) * (peaks[1] - peaks[0])) / len(outputs))
