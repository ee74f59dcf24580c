"""Files: tensors with their meaning, written whole or not at all, and checked when read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

__all__ = [
    "StorageError",
    "atomic_write",
    "encoded_size",
    "read_tensors",
    "write_tensors",
]

_META_KEY = "bayesify"
_FORMAT = 1


class StorageError(ValueError):
    """A file is missing, cut off, altered, or belongs to another network."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write tensors and JSON with a digest of both, atomically.

    Raises:
        OSError: the file cannot be written; an existing one is then left as it was.
    """
    atomic_write(path, _encoded(tensors, meta))


def encoded_size(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> int:
    """How many bytes :func:`write_tensors` would write."""
    return len(_encoded(tensors, meta))


def _encoded(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> bytes:
    # Cloned, since the format refuses tensors that share memory (tied parameters).
    whole = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    document = {"format": _FORMAT, **meta}
    document["sha256"] = _digest(whole, document)
    return to_safetensors(whole, {_META_KEY: json.dumps(document, allow_nan=True)})


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`write_tensors` wrote, onto the CPU.

    Raises:
        StorageError: the file is missing, cut off, altered or not bayesify's.
    """
    if not path.is_file():
        raise StorageError(f"there is no file {path}")
    try:
        with safe_open(path, "pt") as file:
            described = (file.metadata() or {}).get(_META_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        raise StorageError(
            f"{path} is not a whole safetensors file, it was cut off or altered ({error}); use a "
            "copy, or train again"
        ) from error
    if described is None:
        raise StorageError(f"{path} is a safetensors file, but bayesify did not write it")
    try:
        meta: dict[str, Any] = json.loads(described)
        expected = meta.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise StorageError(f"the description in {path} was altered; use a copy") from error
    if _digest(tensors, meta) != expected:
        raise StorageError(
            f"{path} was altered after it was written: its SHA-256 must be {expected}, got "
            f"{_digest(tensors, meta)}; use a copy, or train again"
        )
    if meta.get("format") != _FORMAT:
        raise StorageError(
            f"{path} has format {meta.get('format')}, this version of bayesify reads {_FORMAT}"
        )
    return tensors, meta


def atomic_write(path: Path, payload: bytes | str) -> None:
    """Write a file under a temporary name, then rename it: whole or not at all.

    Raises:
        OSError: the disk is full or the place is not writable; no trace is left.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(payload.encode() if isinstance(payload, str) else payload)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _digest(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
