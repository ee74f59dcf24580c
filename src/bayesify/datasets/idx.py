"""Reader of the IDX format of MNIST: a header of big-endian sizes, then the bytes."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from bayesify.datasets.files import DataError

__all__ = ["parse_idx"]

_UNSIGNED_BYTE = 0x08


def parse_idx(content: bytes, *, num_dims: int, source: str = "IDX data") -> Tensor:
    """Parse an IDX file of unsigned bytes.

    Args:
        content: the whole uncompressed file: two zero bytes, the type 0x08, the number of
            dimensions, each dimension in four big-endian bytes, then the values.
        num_dims: the number of dimensions it must have (images 3, labels 1).
        source: name of the file in messages.

    Returns:
        A uint8 tensor of the shape in the header.

    Raises:
        DataError: type, number of dimensions, a dimension or the length is wrong.

    Example:
        >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 5, 0, 4]), num_dims=1)
        tensor([5, 0, 4], dtype=torch.uint8)
    """
    expected = bytes([0, 0, _UNSIGNED_BYTE, num_dims])
    if content[:4] != expected:
        raise DataError(
            f"{source} must begin with {expected.hex()} (IDX of unsigned bytes, {num_dims} "
            f"dimensions), got {content[:4].hex() or 'nothing'}"
        )
    header_bytes = 4 + 4 * num_dims
    if len(content) < header_bytes:
        raise DataError(
            f"{source} must have a header of {header_bytes} bytes, got {len(content)} bytes in all"
        )
    shape = struct.unpack_from(f">{num_dims}I", content, 4)
    if 0 in shape:
        raise DataError(f"{source} must not be empty, got shape {shape} in its header")
    payload_bytes = len(content) - header_bytes
    if payload_bytes != math.prod(shape):
        raise DataError(
            f"{source} must hold {math.prod(shape)} values (shape {shape} in its header), got "
            f"{payload_bytes}"
        )
    # A copy, because a tensor must not share memory with immutable bytes.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header_bytes).view(shape)
