"""Compressed files: quantised mean weights in a few bits each, read back as a plain network.

A file has, in this order (integers without a stated size are varints, 7 bits a byte, low first):

* 4 bytes ``bfz`` and the version, 1; 8 bytes of the SHA-256 of all that follows
* the number of the network's parameters, and a bit for each by the order of their names: whether
  it was random
* 4 bytes of the SHA-256 of the random parameters' names and shapes; the number of their weights
* for each random parameter the unit of its weights, a big-endian bfloat16, and the order in which
  it is coded, 2 width + by_rows
* the length of a safetensors document and the document: all other parameters and buffers as they
  are; length 0 if there are none
* up to the end the quantised weights, in the code of ``entropy_coding``
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bayesify.estimators.network_state import kept_tensors, with_own_elements
from bayesify.io.entropy_coding import CodingError, Scan, decode_tensors, encode_tensors
from bayesify.io.files import (
    StorageError,
    atomic_write,
    check_restored,
    encoded_safetensors,
)
from bayesify.io.quantization import Quantized, quantize_means
from bayesify.module.bayesian import BayesianModule
from bayesify.module.description_length import kl_bytes

__all__ = ["Compressed", "compress", "compressed", "decompress", "decompressed"]

_MAGIC, _VERSION = b"bfz", 1
_DIGEST, _FINGERPRINT = 8, 4
_USE_A_COPY = "use a copy, or compress again"


@dataclass(frozen=True)
class Compressed:
    """The size of a compressed file.

    Args:
        num_weights: random weights of the network, pruned ones included.
        num_nonzero: those that are not zero in the file.
        num_bytes: size of the file.
        num_other_bytes: of these, the bytes of what is stored as it is: parameters that are not
            random, and buffers.
        kl_bytes: the KL divergence of the posterior in bytes, KL in nats / (8 ln 2): about what
            bits-back coding of a weight sample would need. It is no bound on ``num_bytes``. None
            where the prior is improper, as ``LogUniform``.

    Example:
        >>> size = Compressed(num_weights=1000, num_nonzero=10, num_bytes=50, kl_bytes=40.0)
        >>> size.bits_per_weight
        0.4
    """

    num_weights: int
    num_nonzero: int
    num_bytes: int
    kl_bytes: float | None
    num_other_bytes: int = 0

    @property
    def bits_per_weight(self) -> float:
        """Bits of the file for each random weight, without what is stored as it is."""
        return 8.0 * (self.num_bytes - self.num_other_bytes) / self.num_weights


def compress(
    bnn: BayesianModule, path: str | os.PathLike[str], *, step_size: float = 1.0
) -> Compressed:
    """Write the mean weights of a Bayesian network, quantised and entropy-coded, to a file.

    Each random parameter gets one step, a multiple of the typical std of its weights: where the
    posterior is wide, training has shown that digits do not matter. A quantised weight differs from
    its mean by half a step at most. If every std were the typical one, rounding would raise the
    training set's negative log-likelihood by about ``step_size**2 / 24`` nats a weight. Prune the
    network first (:func:`prune`): zeros take almost no space. Where all of a row that weight norm
    or spectral norm divides by its norm would become zero, its largest weight becomes one step.

    Parameters that are not random, such as those of normalisation layers or frozen ones, and
    buffers are stored as they are. The stds and the likelihood are not stored: the file gives a
    plain network, without epistemic uncertainty.

    Args:
        bnn: the network.
        path: the file; an existing file is replaced. It is written atomically.
        step_size: the steps as a multiple of the typical std of each parameter, the root of a
            harmonic mean of the variances with weights mean^2.

    Raises:
        ImportError: ``constriction`` is not installed; it is in the extra ``compress``.
        OSError: the file cannot be written; an existing file is then unchanged.
        TypeError: the network is no BayesianModule, or its posterior has no std, as a point
            estimate.
        ValueError: step_size is not positive and finite, or too small for the weights; weights are
            not finite; or the file cannot hold a module's own state (``get_extra_state``) or a
            tensor's dtype.

    Example:
        >>> import tempfile
        >>> from bayesify.module.pruning import prune
        >>> bnn = prune(BayesianModule(nn.Linear(100, 100)), fraction=0.99)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     size = compress(bnn, f"{folder}/net.bfz")
        ...     net = decompress(f"{folder}/net.bfz", nn.Linear(100, 100))
        >>> size.num_nonzero, size.num_bytes < 300
        (101, True)
        >>> int((net.weight != 0).sum() + (net.bias != 0).sum())
        101
    """
    content, size = compressed(bnn, step_size=step_size)
    atomic_write(Path(path), content)
    return size


def decompress(path: str | os.PathLike[str], net: nn.Module) -> nn.Module:
    """Read the network of a file of :func:`compress`.

    Args:
        path: the file.
        net: a network of the same architecture. It is not changed, and its values are ignored.

    Returns:
        A copy of ``net``, in its mode and with its dtype and device, with the decoded weights. They
        are the same on every machine.

    Raises:
        ImportError: ``constriction`` is not installed; it is in the extra ``compress``.
        StorageError: the file is missing, truncated, altered, not written by :func:`compress`, or
            of another architecture.
        TypeError: ``net`` is no network.
        ValueError: the network is lazy or on the meta device.

    Example:
        >>> import tempfile
        >>> bnn = BayesianModule(nn.Linear(3, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = compress(bnn, f"{folder}/net.bfz", step_size=0.01)
        ...     net = decompress(f"{folder}/net.bfz", nn.Linear(3, 2))
        >>> torch.allclose(net.weight, bnn.to_module().weight, atol=1e-3)
        True
    """
    path = Path(path)
    if not path.is_file():
        raise StorageError(f"there is no file {path}")
    return decompressed(path.read_bytes(), net, source=str(path))


def compressed(bnn: BayesianModule, *, step_size: float = 1.0) -> tuple[bytes, Compressed]:
    """Return the content of the file that :func:`compress` writes, and its size.

    Raises:
        ValueError: as of :func:`compress`.
    """
    quantized = quantize_means(bnn, step_size)
    layout, net = bnn.layout, bnn.to_module()
    parameters = _by_name(net)
    tensors = [quantized[name].integers for name in layout.names]
    payload, scans = encode_tensors(tensors)

    tied = {alias for aliases in layout.ties for alias in aliases}
    state = net.state_dict()
    if own := [name for name in state if name.rpartition(".")[2] == "_extra_state"]:
        raise ValueError(
            f"a compressed file holds parameters and buffers, got a network with {own[0]}; keep "
            "what get_extra_state returns in a buffer"
        )
    rest = {
        name: tensor.detach().cpu().clone().contiguous()
        for name, tensor in state.items()
        if name not in tied
    }
    document = encoded_safetensors(rest) if rest else b""
    body = b"".join(
        [
            _varint(len(parameters)),
            np.packbits([name in quantized for name in sorted(parameters)]).tobytes(),
            _fingerprint(layout.names, parameters),
            _varint(layout.num_weights),
            *(
                _bfloat16(quantized[name].unit) + _varint(2 * scan.width + scan.by_rows)
                for name, scan in zip(layout.names, scans, strict=True)
            ),
            _varint(len(document)),
            document,
            payload,
        ]
    )
    content = _MAGIC + bytes([_VERSION]) + _digest(body)[:_DIGEST] + body
    num_nonzero = sum(int(np.count_nonzero(each)) for each in tensors)
    length = kl_bytes(bnn) if bnn.weight_prior.is_proper else None
    size = Compressed(layout.num_weights, num_nonzero, len(content), length, len(document))
    return content, size


def decompressed(content: bytes, net: nn.Module, *, source: str = "the content") -> nn.Module:
    """Return the network of a file's content, as :func:`decompress` does.

    Args:
        content: bytes of :func:`compressed`.
        net: as for :func:`decompress`.
        source: name of the content in errors.

    Raises:
        StorageError: the content is damaged, or of another architecture.
        TypeError: ``net`` is no network.
        ValueError: the network is lazy or on the meta device.
    """
    if not isinstance(net, nn.Module):
        raise TypeError(
            "decompress needs a network of the same architecture, got "
            f"{net.__name__ if isinstance(net, type) else type(net).__name__}"
        )
    for name, tensor in chain(net.named_parameters(), net.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            raise ValueError(
                f"{name} of the given network has no values to replace, because it is lazy or on "
                "the meta device; run a batch through the network, or make it on a real device"
            )
    found = with_own_elements(copy.deepcopy(net, kept_tensors(net)))
    parameters = _by_name(found)
    body = _checked(content, source)
    try:
        parts = _parsed(body, parameters, source)
        shapes = [tuple(parameters[name].shape) for name in parts.names]
        tensors = decode_tensors(parts.payload, shapes, parts.scans)
    except (CodingError, IndexError, struct.error, SafetensorError) as error:
        raise StorageError(f"{source} cannot be decoded: {error}; {_USE_A_COPY}") from error
    others = {
        name: tensor
        for name, tensor in found.state_dict().items()
        if isinstance(tensor, Tensor) and name in parts.rest
    }
    for name, tensor in parts.rest.items():
        if name not in others or others[name].shape != tensor.shape:
            got = f"shape {tuple(others[name].shape)}" if name in others else "no such tensor"
            raise StorageError(
                f"{source} is of another architecture: its {name!r} has shape "
                f"{tuple(tensor.shape)}, the given network has {got}"
            )
    coded = {id(parameters[name]) for name in parts.names}
    for name, value in found.state_dict(keep_vars=True).items():
        if id(value) not in coded and name not in parts.rest:
            raise StorageError(
                f"{source} is of another architecture: the given network has {name!r}, which the "
                "file lacks"
            )
    with torch.no_grad():
        for name, unit, integers in zip(parts.names, parts.units, tensors, strict=True):
            parameters[name].copy_(Quantized(integers, unit).weights)
        for name, tensor in parts.rest.items():
            others[name].copy_(tensor)
    check_restored(parts.rest, others, source)
    return found


class _Parts(NamedTuple):
    """The parts of a file; names, units and orders of coding are of its random parameters."""

    names: list[str]
    units: list[float]
    scans: list[Scan]
    rest: dict[str, Tensor]
    payload: bytes


def _checked(content: bytes, source: str) -> bytes:
    """Return what follows the digest.

    Raises:
        StorageError: bayesify did not write it, or it was truncated or altered.
    """
    start = len(_MAGIC) + 1
    if not content.startswith(_MAGIC):
        raise StorageError(f"{source} is not a compressed network: bayesify compress writes them")
    if content[len(_MAGIC) : start] != bytes([_VERSION]):
        raise StorageError(
            f"{source} has format {content[len(_MAGIC) : start].hex()}, this version of bayesify "
            f"reads {_VERSION:02x}"
        )
    body = content[start + _DIGEST :]
    if content[start : start + _DIGEST] != _digest(body)[:_DIGEST]:
        raise StorageError(f"{source} was cut off or altered after it was written; {_USE_A_COPY}")
    return body


def _parsed(body: bytes, parameters: Mapping[str, Tensor], source: str) -> _Parts:
    reader = _Bytes(body)
    count = reader.varint()
    flags = np.unpackbits(np.frombuffer(reader.take(-(-count // 8)), np.uint8), count=count)
    fingerprint, num_weights = reader.take(_FINGERPRINT), reader.varint()
    coded = {name for name, flag in zip(sorted(parameters), flags, strict=False) if flag}
    names = [name for name in parameters if name in coded]
    if count != len(parameters) or fingerprint != _fingerprint(names, parameters):
        own = sum(parameter.numel() for parameter in set(parameters.values()))
        raise StorageError(
            f"{source} is of another architecture: names and shapes of the parameters must be "
            f"those of the compressed network, which has {count} parameters and in {flags.sum()} "
            f"of them {num_weights:,} weights; the given network has {len(parameters)} parameters "
            f"with {own:,} weights"
        )
    units, scans = [], []
    for _ in names:
        units.append(struct.unpack(">f", reader.take(2) + b"\0\0")[0])
        width, by_rows = divmod(reader.varint(), 2)
        if not math.isfinite(units[-1]) or 0 < width < 3:  # which no writer writes
            raise StorageError(f"{source} holds what no network has; {_USE_A_COPY}")
        scans.append(Scan(bool(by_rows), width))
    document = reader.take(reader.varint())
    rest = from_safetensors(document) if document else {}
    return _Parts(names, units, scans, rest, reader.rest())


class _Bytes:
    """Read bytes from the front."""

    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._content):
            raise IndexError("its description is longer than the file")
        self._at += count
        return self._content[self._at - count : self._at]

    def varint(self) -> int:
        value, shift = 0, 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise IndexError("it has a number of more than 63 bits")

    def rest(self) -> bytes:
        return self._content[self._at :]


def _by_name(net: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters, tied ones under each of their names."""
    return dict(net.named_parameters(remove_duplicate=False))


def _fingerprint(names: Sequence[str], parameters: Mapping[str, Tensor]) -> bytes:
    """Return a digest of names, shapes and ties of some parameters."""
    lines = []
    for name in names:
        own = parameters[name]
        ties = [other for other, parameter in parameters.items() if parameter is own]
        lines.append(f"{' '.join(sorted(ties))} {tuple(own.shape)}")
    return _digest("\n".join(lines).encode())[:_FINGERPRINT]


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _bfloat16(value: float) -> bytes:
    """Return the upper half of a float32 whose lower half is zero."""
    return struct.pack(">f", value)[:2]
