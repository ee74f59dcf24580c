"""Standard normal noise as a pure function of (seed, stream, step, sample).

Nothing else has to be saved for a run to resume exactly: asking again for the same key gives the
same numbers, whatever was drawn before and in whatever order.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

__all__ = ["NoiseKey", "Stream", "derived_seed"]

_MT_WORDS = 624
_MT_HEADER_BYTES = 24  # seed (8), words left (4), seeded (4), next word (8)


class Stream(IntEnum):
    """What noise is for; two streams never share numbers.

    Example:
        >>> [stream.name for stream in Stream]
        ['INITIALIZATION', 'TRAINING', 'PREDICTION', 'CALL', 'SHUFFLE', 'DROPOUT']
    """

    INITIALIZATION = 0
    TRAINING = 1
    PREDICTION = 2
    CALL = 3
    SHUFFLE = 4
    DROPOUT = 5


@dataclass(frozen=True)
class NoiseKey:
    """The key of all noise of one forward pass; a sample's index completes it.

    Args:
        seed: the run's seed, an integer of at most 128 bits with its sign.
        stream: what the noise is for.
        step: the step within the stream, at least 0.

    Example:
        >>> key = NoiseKey(seed=0, stream=Stream.TRAINING, step=7)
        >>> key.normals(range(2), 3).shape
        torch.Size([2, 3])
    """

    seed: int
    stream: Stream
    step: int

    def normals(
        self,
        samples: range,
        size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Standard normals, shape (S, size), a row for each sample index in ``samples``."""
        rows = torch.empty(len(samples), size, dtype=dtype, device=device)
        for row, sample in zip(rows, samples, strict=True):
            row.normal_(
                generator=_generator(rows.device, self.seed, self.stream, self.step, sample)
            )
        return rows


def derived_seed(seed: int, stream: Stream, step: int, sample: int = 0) -> int:
    """A 63-bit seed for a generator that takes one (shuffling, dropout, other devices).

    Example:
        >>> derived_seed(0, Stream.SHUFFLE, 1) == derived_seed(0, Stream.SHUFFLE, 2)
        False
    """
    return int.from_bytes(_digest(8, seed, stream, step, sample), "little") >> 1


def _digest(num_bytes: int, seed: int, stream: Stream, step: int, sample: int) -> bytes:
    if step < 0 or sample < 0:
        raise ValueError(f"step and sample must be at least 0, got {step} and {sample}")
    key = seed.to_bytes(16, "little", signed=True) + struct.pack("<qqq", stream, step, sample)
    return hashlib.shake_256(key).digest(num_bytes)


def _generator(
    device: torch.device, seed: int, stream: Stream, step: int, sample: int
) -> torch.Generator:
    generator = torch.Generator(device)
    if device.type != "cpu":
        return generator.manual_seed(derived_seed(seed, stream, step, sample))
    # A CPU generator's manual_seed keeps 32 bits only, so that among the steps of one long run
    # some would share their noise. The whole state of its Mersenne Twister is filled instead.
    state = generator.manual_seed(0).get_state()
    words = torch.frombuffer(
        bytearray(_digest(4 * _MT_WORDS, seed, stream, step, sample)), dtype=torch.int32
    )
    view = state[_MT_HEADER_BYTES : _MT_HEADER_BYTES + 8 * _MT_WORDS].view(torch.int64)
    view.copy_(words.to(torch.int64) & 0xFFFFFFFF)
    generator.set_state(state)
    return generator
