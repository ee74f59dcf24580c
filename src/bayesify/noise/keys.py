"""Noise keys: random numbers as a pure function of (seed, stream, step, sample, place).

The same key gives the same numbers, whatever was drawn before, in whatever order, compiled or
not. A checkpoint therefore stores no generator state: the step counter is enough to resume a run
exactly.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, library

from bayesify.noise.arguments import whole_number

__all__ = [
    "NoiseKey",
    "NoiseKind",
    "NoiseSource",
    "Stream",
    "derived_seed",
    "generator_of",
    "increment_counter",
    "kept_generators",
    "make_counter",
    "process_count",
    "process_rank",
    "read_counter",
    "saved_generators",
    "seed_global_generators",
    "seeded_initialization",
]

_MT_WORDS = 624
_MT_HEADER_BYTES = 24  # seed (8), words left (4), seeded (4), next word (8)


NoiseKind = Literal["normal", "sign"]


class Stream(IntEnum):
    """Purposes of noise; two streams never share numbers.

    Example:
        >>> [stream.name for stream in Stream]
        ['INITIALIZATION', 'TRAINING', 'PREDICTION', 'CALL', 'SHUFFLE', 'DROPOUT', 'DIVERGENCE',
         'ACTING', 'ENVIRONMENT', 'CERTIFICATE']
    """

    INITIALIZATION = 0
    TRAINING = 1
    PREDICTION = 2
    CALL = 3
    SHUFFLE = 4
    DROPOUT = 5
    DIVERGENCE = 6
    ACTING = 7
    ENVIRONMENT = 8
    CERTIFICATE = 9


@dataclass(frozen=True)
class NoiseKey:
    """The key of all noise of one forward pass; a sample's index completes it.

    Args:
        seed: the seed of the run, a signed integer of at most 128 bits.
        stream: the purpose of the noise.
        step: the step within the stream, at least 0. In compiled code it is a tensor on the CPU,
            so that a new step does not trigger a new compilation.

    Example:
        >>> key = NoiseKey(seed=0, stream=Stream.TRAINING, step=7)
        >>> key.normals(range(2), 3).shape
        torch.Size([2, 3])
    """

    seed: int
    stream: Stream
    step: int | Tensor

    def normals(
        self,
        samples: range,
        size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Draw standard normals, shape (S, size), one row for each index in ``samples``."""
        if isinstance(self.step, Tensor):
            return torch.stack(
                [self.numbers("normal", sample, 0, size, dtype, device) for sample in samples]
            )
        rows = torch.empty(len(samples), size, dtype=dtype, device=device)
        for row, sample in zip(rows, samples, strict=True):
            self.fill_normals(row, sample)
        return rows

    def fill_normals(self, vector: Tensor, sample: int) -> None:
        """Write one sample's standard normals into a vector; not for compiled code."""
        _fill(vector, "normal", (self.seed, self.stream, int(self.step), sample, 0))

    def numbers(
        self,
        kind: NoiseKind,
        sample: int,
        place: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Tensor:
        """Draw one vector of shape (size,).

        Args:
            kind: ``"normal"`` for standard normals, ``"sign"`` for -1 or 1 with probability 1/2.
            sample: the index of the weight sample.
            place: the index of the vector within the sample; every vector has its own numbers.
            size: the length of the vector.
            dtype: a floating dtype. Of float64 the normals are the numbers of float32, but at
                place 0, the noise of whole weight vectors.
            device: the device to draw on.
        """
        if isinstance(self.step, Tensor):
            # The key is passed as text, because integers of a custom operator have 64 bits only.
            key = f"{self.seed} {int(self.stream)}"
            numbers: Tensor = _numbers(
                kind, key, self.step, sample, place, size, dtype, torch.device(device)
            )
            return numbers
        vector = torch.empty(size, dtype=dtype, device=device)
        return _fill(vector, kind, (self.seed, self.stream, self.step, sample, place))


class NoiseSource:
    """The noise of one weight sample in one forward pass: a sequence of independent vectors.

    Each call of :meth:`normals` or :meth:`signs` draws the next vector of the sequence.

    Args:
        key: seed, stream and step.
        sample: the index of the weight sample.
        antithetic: whether samples 2i and 2i + 1 have opposite normals and equal signs.

    Example:
        >>> source = NoiseSource(NoiseKey(0, Stream.TRAINING, 7), sample=0)
        >>> source.normals((2, 3), torch.float32, "cpu").shape
        torch.Size([2, 3])
        >>> sorted(set(source.signs((50,), torch.float32, "cpu").tolist()))
        [-1.0, 1.0]
    """

    def __init__(self, key: NoiseKey, sample: int, *, antithetic: bool = False) -> None:
        self._key = key
        self._sample = sample - sample % 2 if antithetic else sample
        self._opposite = antithetic and sample % 2 == 1
        self._place = 0

    def normals(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Draw standard normals of this shape; those of float64 are the numbers of float32."""
        numbers = self._next("normal", shape, dtype, device)
        return -numbers if self._opposite else numbers

    def signs(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Draw -1 or 1, each with probability 1/2, of this shape."""
        return self._next("sign", shape, dtype, device)

    def rewind(self) -> None:
        """Return to the first vector of the sequence."""
        self._place = 0

    def _next(
        self, kind: NoiseKind, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        # Place 0 is reserved for the noise of whole weight vectors.
        self._place += 1
        vector = self._key.numbers(kind, self._sample, self._place, prod(shape), dtype, device)
        return vector.view(tuple(shape))


def derived_seed(seed: int, stream: Stream, step: int, sample: int = 0) -> int:
    """Hash a key to a 63-bit seed, for generators that take a seed (shuffling).

    Example:
        >>> derived_seed(0, Stream.SHUFFLE, 1) == derived_seed(0, Stream.SHUFFLE, 2)
        False
    """
    return int.from_bytes(_digest(8, (seed, stream, step, sample, 0)), "little") >> 1


def generator_of(seed: int) -> torch.Generator:
    """Return a generator on the CPU of a seed of any size, of which PyTorch's own takes 64 bits.

    Raises:
        TypeError: the seed is no whole number.

    Example:
        >>> generator_of(2**70).initial_seed() == generator_of(0).initial_seed()
        False
    """
    number = whole_number("seed", seed, None)
    fits = -(2**63) <= number < 2**64
    return torch.Generator().manual_seed(number if fits else derived_seed(number, Stream.CALL, 0))


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the global generators of torch, Python and NumPy on exit.

    Example:
        >>> before = torch.get_rng_state(), random.getstate()
        >>> with kept_generators():
        ...     _ = torch.rand(1), random.random()
        >>> torch.equal(before[0], torch.get_rng_state()), before[1] == random.getstate()
        (True, True)
    """
    restore = saved_generators()
    try:
        yield
    finally:
        restore()


def saved_generators() -> Callable[[], None]:
    """Save the states of these generators; return a function that restores them.

    Example:
        >>> restore = saved_generators()
        >>> first = torch.rand(1), random.random()
        >>> restore()
        >>> first == (torch.rand(1), random.random())
        True
    """
    python, arrays = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
    own = torch.get_rng_state()
    device = _accelerator()
    others: list[Tensor] = []
    has_several = hasattr(device, "get_rng_state_all")
    if device is not None:
        others = device.get_rng_state_all() if has_several else [device.get_rng_state()]

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002
        torch.set_rng_state(own)
        if device is not None and has_several:
            device.set_rng_state_all(others)
        elif device is not None:
            device.set_rng_state(*others)

    return restore


@contextmanager
def seeded_initialization(seed: int) -> Iterator[None]:
    """Let modules that are made within draw their initial values as a function of a seed.

    Example:
        >>> values = []
        >>> for _ in range(2):
        ...     with seeded_initialization(3):
        ...         values.append(torch.nn.Linear(1, 1).weight.item())
        >>> values[0] == values[1]
        True
    """
    with kept_generators():
        torch.manual_seed(derived_seed(seed, Stream.INITIALIZATION, 0))
        yield


def seed_global_generators(seed: int, stream: Stream, step: int, sample: int = 0) -> None:
    """Seed the global generators of torch, Python and NumPy, torch's by all bits of a key.

    Dropout draws from torch's, random augmentation from any.

    Example:
        >>> from torch.nn.functional import dropout
        >>> with kept_generators():
        ...     masks = []
        ...     for step in (0, 1, 0):
        ...         seed_global_generators(0, Stream.DROPOUT, step)
        ...         masks.append(dropout(torch.ones(50)))
        >>> torch.equal(masks[0], masks[1]), torch.equal(masks[0], masks[2])
        (False, True)
    """
    number = derived_seed(seed, stream, step, sample)
    random.seed(number)
    # By 32 bits, as PyTorch seeds it in workers: by all of them would take ten times as long.
    np.random.seed(number % 2**32)  # noqa: NPY002
    # Not torch.manual_seed, which records its call stack for each type of device that is not there:
    # a sixth of the time of a step of a small network, and on a GPU more than the step.
    if (device := _accelerator()) is not None:
        seed_all = getattr(device, "manual_seed_all", device.manual_seed)
        seed_all(number)
    torch.default_generator.set_state(_state_of((seed, stream, step, sample, 0)))


def _accelerator() -> Any:
    """Return PyTorch's module of the accelerator that is there, or None."""
    # A build for one that is not there would queue each seed.
    if not torch.accelerator.is_available():
        return None
    return torch.get_device_module(torch.accelerator.current_accelerator())


def read_counter(counter: Tensor) -> int | Tensor:
    """Return the value of a counter for use in a key: an int, or a tensor in compiled code.

    Example:
        >>> read_counter(torch.tensor(3))
        3
    """
    if torch.compiler.is_compiling():
        return counter.clone()
    with torch._C._DisableFuncTorch():
        return int(counter)


def make_counter(value: int = 0) -> Tensor:
    """Create a counter on the CPU that compiled code can increment too.

    Example:
        >>> counter = make_counter()
        >>> increment_counter(counter)
        >>> read_counter(counter)
        1
    """
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.int64, device="cpu")


def increment_counter(counter: Tensor) -> None:
    """Add 1 to a counter; this also works within a transform of ``torch.func``."""
    if torch.compiler.is_compiling():
        counter += 1
    else:
        with torch._C._DisableFuncTorch():
            counter.add_(1)


def process_rank() -> int:
    """Return the rank of this process, by which ranks draw different noise; 0 if not distributed.

    Example:
        >>> process_rank()
        0
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return 0


def process_count() -> int:
    """Return the number of processes that train together; 1 if not distributed.

    Example:
        >>> process_count()
        1
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1


_Key = tuple[int, int, int, int, int]


# A custom operator is opaque to torch.compile: compiled code draws the same numbers as eager code.
@library.custom_op("bayesify::numbers", mutates_args=())
def _numbers(
    kind: str,
    key: str,
    step: Tensor,
    sample: int,
    place: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    seed, stream = map(int, key.split())
    vector = torch.empty(size, dtype=dtype, device=device)
    return _fill(vector, kind, (seed, stream, int(step), sample, place))


@_numbers.register_fake
def _(*args: Any) -> Tensor:
    *_, size, dtype, device = args
    return torch.empty(size, dtype=dtype, device=device)


def _fill(vector: Tensor, kind: str, key: _Key) -> Tensor:
    generator = _generator(vector.device, key)
    if kind == "normal":
        # The noise within a pass has the steps of float32: drawing it in float64 takes several
        # times as long, which a small network's step shows.
        if vector.dtype == torch.float64 and key[-1]:
            narrow = torch.empty_like(vector, dtype=torch.float32)
            return vector.copy_(narrow.normal_(generator=generator))
        return vector.normal_(generator=generator)
    return vector.random_(0, 2, generator=generator).mul_(2.0).sub_(1.0)


def _digest(num_bytes: int, key: _Key) -> bytes:
    seed, stream, step, sample, place = key
    if step < 0 or sample < 0:
        raise ValueError(f"step and sample must be at least 0, got {step} and {sample}")
    text = whole_number("seed", seed, None).to_bytes(16, "little", signed=True) + struct.pack(
        "<qqq", stream, step, sample
    )
    # Place 0 is not hashed: earlier versions had no places, and their runs must resume unchanged.
    return hashlib.shake_256(text + (struct.pack("<q", place) if place else b"")).digest(num_bytes)


def _generator(device: torch.device, key: _Key) -> torch.Generator:
    generator = torch.Generator(device)
    if device.type != "cpu":
        return generator.manual_seed(int.from_bytes(_digest(8, key), "little") >> 1)
    with torch._C._DisableFuncTorch():  # within a transform the tensor would have no storage
        generator.set_state(_state_of(key))
    return generator


def _state_of(key: _Key) -> Tensor:
    """Return the state of a generator on the CPU, a function of all bits of the key.

    ``manual_seed`` keeps only 32 bits on the CPU, so that some steps of a long run would share
    their noise. Filling the whole state of the Mersenne Twister avoids such collisions.
    """
    state = _seeded_state().copy()
    words = state[_MT_HEADER_BYTES : _MT_HEADER_BYTES + 8 * _MT_WORDS].view(np.int64)
    words[:] = np.frombuffer(_digest(4 * _MT_WORDS, key), dtype="<u4")
    return torch.from_numpy(state)


@cache
def _seeded_state() -> npt.NDArray[np.uint8]:
    """Return the state of a seeded generator, whose words ``_state_of`` replaces."""
    state: npt.NDArray[np.uint8] = torch.Generator().manual_seed(0).get_state().numpy()
    return state
