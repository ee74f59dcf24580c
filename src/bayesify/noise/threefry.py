"""Counter-based standard normals: Threefry-2x32 and Box-Muller in plain tensor operations.

Each number is a function of (key, step, place) alone. A kernel can therefore compute it where it
is used, on any device, compiled or not, and compute it again instead of storing it. The key is a
function of seed, stream and sample. ``NoiseKey`` draws from PyTorch's generators instead: for the
same seed its numbers differ from these.
"""

from __future__ import annotations

import hashlib
import math
import struct

import torch
from torch import Tensor

from bayesify.noise.keys import NoiseKey

__all__ = ["BLOCK", "counter_key", "normals", "signs", "threefry"]

#: Length of a block of numbers: 128 cosines of the Box-Muller transform, then the 128 sines.
BLOCK = 256

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA


def threefry(
    key0: Tensor | int, key1: Tensor | int, counter0: Tensor, counter1: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply Threefry-2x32 with 20 rounds (Salmon et al. 2011, section 4.2).

    Args:
        key0: first word of the key. All words are int32 whose bits are read as unsigned.
        key1: second word of the key.
        counter0: first words of the counters.
        counter1: second words of the counters, broadcastable with ``counter0``.

    Returns:
        Two words for each counter.

    Example:
        >>> zero = torch.zeros(1, dtype=torch.int32)
        >>> [hex(int(word) % 2**32) for word in threefry(0, 0, zero, zero)]
        ['0x6b200159', '0x99ba4efe']
    """
    keys = (key0, key1, key0 ^ key1 ^ _PARITY)
    x0, x1 = counter0 + keys[0], counter1 + keys[1]
    for group in range(5):
        for bits in _ROTATIONS[4 * (group % 2) : 4 * (group % 2) + 4]:
            x0 = x0 + x1
            x1 = ((x1 << bits) | ((x1 >> (32 - bits)) & ((1 << bits) - 1))) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + (group + 1)
    return x0, x1


def counter_key(key: NoiseKey, sample: int = 0, place: int = 0) -> tuple[int, int]:
    """Hash seed, stream, sample and place to the two int32 words of a key; the step is ignored.

    Example:
        >>> from bayesify.noise.keys import Stream
        >>> first = counter_key(NoiseKey(0, Stream.TRAINING, 0))
        >>> first == counter_key(NoiseKey(0, Stream.TRAINING, 5))
        True
        >>> first == counter_key(NoiseKey(0, Stream.PREDICTION, 0))
        False
    """
    text = b"threefry" + key.seed.to_bytes(16, "little", signed=True)
    # Place 0 (weights) is not hashed: runs of earlier versions must resume with the same noise.
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
    """Compute standard normals (Box and Muller 1958), one for each place in a vector.

    In float32 no number exceeds 6.67 in magnitude; of 4e10 true normals one does on average.

    Args:
        key0: first word of the key, int32.
        key1: second word of the key, int32.
        step: the step, modulo 2^32; different steps give different numbers.
        size: the number of normals.
        dtype: float32 or float64.
        device: the device to compute on.

    Returns:
        Shape (size,).

    Example:
        >>> whole = normals(1, 2, 0, 600, dtype=torch.float32, device="cpu")
        >>> part = normals(1, 2, 0, 300, dtype=torch.float32, device="cpu")
        >>> bool((whole[:300] == part).all())
        True
    """
    word0, word1 = _words(key0, key1, step, size, device)
    # 31 bits give a uniform in (0, 1), whose logarithm is finite; 32 bits give a signed angle.
    uniform = ((word0 >> 1) & 0x7FFFFFFF).to(dtype) * 2.0**-31 + 2.0**-32
    radius = torch.sqrt(-2.0 * torch.log(uniform))
    angle = word1.to(dtype) * (2.0 * math.pi / 2.0**32)
    return _in_blocks(radius * torch.cos(angle), radius * torch.sin(angle), size)


def signs(
    key0: Tensor | int,
    key1: Tensor | int,
    step: Tensor | int,
    size: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """Compute random signs, one for each place in a vector: the first bits of its words.

    Args:
        key0: see :func:`normals`, as the other arguments.
        key1: see there.
        step: see there.
        size: the number of signs.
        dtype: a floating dtype.
        device: the device to compute on.

    Returns:
        -1 or 1, each with probability 1/2, shape (size,).

    Example:
        >>> sorted(set(signs(1, 2, 0, 50, dtype=torch.float32, device="cpu").tolist()))
        [-1.0, 1.0]
    """
    first, second = (1 - 2 * (w < 0).to(dtype) for w in _words(key0, key1, step, size, device))
    return _in_blocks(first, second, size)


def _words(
    key0: Tensor | int,
    key1: Tensor | int,
    step: Tensor | int,
    size: int,
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    """Return the two random words of each pair of places."""
    blocks = -(-size // BLOCK)
    place = torch.arange(blocks * (BLOCK // 2), dtype=torch.int32, device=device)
    if not isinstance(step, Tensor):
        # Wrapped to a signed 32-bit word. The compiled backend passes a tensor on the device.
        step = (step + 2**31) % 2**32 - 2**31
    return threefry(key0, key1, place, torch.zeros_like(place) + step)


def _in_blocks(first: Tensor, second: Tensor, size: int) -> Tensor:
    """Join the two halves of each block, and cut the last one."""
    halves = [each.view(-1, BLOCK // 2) for each in (first, second)]
    return torch.stack(halves, dim=1).view(-1)[:size]
