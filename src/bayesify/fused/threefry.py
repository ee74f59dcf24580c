"""Noise made where it is used: a counter-based generator in plain integer operations.

A number is a function of (key, step, place) alone, so that a kernel makes it on the spot, on any
device, compiled or not, and may make it again instead of storing it. The key is a function of
seed, stream and sample; what is drawn elsewhere by ``NoiseKey`` are other numbers.
"""

from __future__ import annotations

import hashlib
import math
import struct

import torch
from torch import Tensor

from bayesify.noise import NoiseKey

__all__ = ["BLOCK", "counter_key", "normals", "threefry"]

#: Numbers of one block: the cosines of Box and Muller, then the sines.
BLOCK = 256

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA


def threefry(
    key0: Tensor | int, key1: Tensor | int, counter0: Tensor, counter1: Tensor
) -> tuple[Tensor, Tensor]:
    """Threefry-2x32 of 20 rounds (Salmon et al. 2011, section 4.2).

    Args:
        key0: first word of the key; all words are int32, whose bits are meant as unsigned.
        key1: second word.
        counter0: first words of the counters.
        counter1: second words, of a shape that goes with ``counter0``.

    Returns:
        Two words for each counter.

    Example:
        >>> zero = torch.zeros(1, dtype=torch.int32)
        >>> [hex(int(word) % 2**32) for word in threefry(0, 0, zero, zero)]
        ['0x6b200159', '0x99ba4efe']
    """
    keys = (key0, key1, key0 ^ key1 ^ _PARITY)
    x0, x1 = counter0 + keys[0], counter1 + keys[1]
    for turn in range(5):
        for by in _ROTATIONS[4 * (turn % 2) : 4 * (turn % 2) + 4]:
            x0 = x0 + x1
            x1 = ((x1 << by) | ((x1 >> (32 - by)) & ((1 << by) - 1))) ^ x0
        x0 = x0 + keys[(turn + 1) % 3]
        x1 = x1 + keys[(turn + 2) % 3] + (turn + 1)
    return x0, x1


def counter_key(key: NoiseKey, sample: int = 0, place: int = 0) -> tuple[int, int]:
    """The two words of a generator's key, as int32; the step of ``key`` is no part of them.

    Example:
        >>> from bayesify.noise import Stream
        >>> first = counter_key(NoiseKey(0, Stream.TRAINING, 0))
        >>> first == counter_key(NoiseKey(0, Stream.TRAINING, 5))
        True
        >>> first == counter_key(NoiseKey(0, Stream.PREDICTION, 0))
        False
    """
    text = b"threefry" + key.seed.to_bytes(16, "little", signed=True)
    # Place 0, that of the weights, is left out: old runs go on with their noise.
    which = (key.stream, sample, place) if place else (key.stream, sample)
    digest = hashlib.shake_256(text + struct.pack(f"<{len(which)}q", *which)).digest(8)
    word0, word1 = struct.unpack("<ii", digest)
    return word0, word1


def normals(
    key0: Tensor | int,
    key1: Tensor | int,
    step: Tensor | int,
    size: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """Standard normals (Box and Muller 1958), one for each place in a vector.

    In float32 no number lies beyond 6.67, which a draw of 4e10 normals does once on average.

    Args:
        key0: first word of the key, int32.
        key1: second word.
        step: taken modulo 2^32; another step has other numbers.
        size: how many.
        dtype: float32 or float64.
        device: where to make them.

    Returns:
        Shape (size,).

    Example:
        >>> whole = normals(1, 2, 0, 600, dtype=torch.float32, device="cpu")
        >>> part = normals(1, 2, 0, 300, dtype=torch.float32, device="cpu")
        >>> bool((whole[:300] == part).all())
        True
    """
    half = BLOCK // 2
    blocks = -(-size // BLOCK)
    place = torch.arange(blocks * half, dtype=torch.int32, device=device)
    if not isinstance(step, Tensor):
        # As a signed word; a tensor on the device counts in the compiled step.
        step = (step + 2**31) % 2**32 - 2**31
    word0, word1 = threefry(key0, key1, place, torch.zeros_like(place) + step)
    # 31 bits in (0, 1), so that no logarithm is infinite; and a signed part of a turn.
    uniform = ((word0 >> 1) & 0x7FFFFFFF).to(dtype) * 2.0**-31 + 2.0**-32
    radius = torch.sqrt(-2.0 * torch.log(uniform))
    angle = word1.to(dtype) * (2.0 * math.pi / 2.0**32)
    pairs = (radius * torch.cos(angle), radius * torch.sin(angle))
    numbers = torch.stack([each.view(blocks, half) for each in pairs], dim=1)
    return numbers.view(-1)[:size]
