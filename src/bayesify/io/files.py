"""Safetensors files with a JSON description and a digest, and atomic writing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor, nn

__all__ = [
    "StorageError",
    "atomic_path",
    "atomic_write",
    "check_restored",
    "digest_of",
    "encoded_safetensors",
    "encoded_size",
    "named_file",
    "one_line",
    "read_tensors",
    "remove_leftovers",
    "write_tensors",
]

_META_KEY = "bayesify"
#: Format 1 had ``kept`` for ``mask`` and ``perturbation`` for ``estimator``.
_FORMAT = 2
#: Names of the temporary files of atomic_path: the file's, the process's and a random number, since
#: processes of several machines may have one number.
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)-[0-9a-f]+\.tmp")
#: Bytes of a file's name in these; file systems allow 255 in all.
_MOST_OF_NAME = 200
_OLD_NAMES = {"kept": "mask", "perturbation": "estimator"}


class StorageError(ValueError):
    """A file is missing, truncated or altered, or belongs to another network.

    Example:
        >>> import tempfile, bayesify as bf
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "model.safetensors")
        ...     bf.save(bf.BayesianModule(torch.nn.Linear(3, 2)), path)
        ...     bf.load(path, torch.nn.Linear(3, 5))
        Traceback (most recent call last):
        bayesify.io.files.StorageError: ...
    """


def one_line(error: BaseException) -> str:
    r"""Return the message of another library's error in one line.

    Example:
        >>> one_line(OSError("no footer:\n  too short"))
        'no footer: too short'
    """
    return " ".join(str(error).split())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write tensors, a JSON description and a digest of both, atomically.

    Raises:
        OSError: the file cannot be written; an existing file is then unchanged.
        ValueError: a tensor has a dtype that the format lacks.
    """
    atomic_write(path, _encoded(tensors, meta))


def encoded_size(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> int:
    """Return the number of bytes that :func:`write_tensors` would write."""
    return len(_encoded(tensors, meta))


def _encoded(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> bytes:
    # Cloned, since safetensors does not accept tensors that share memory (tied parameters).
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    # As it will be read: JSON makes texts of the keys that are numbers.
    document = json.loads(json.dumps({"format": _FORMAT, **meta}))
    document["sha256"] = digest_of(copies, document)
    return encoded_safetensors(copies, {_META_KEY: json.dumps(document, allow_nan=True)})


def encoded_safetensors(
    tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> bytes:
    """Return a safetensors document.

    Raises:
        ValueError: a tensor has a dtype that the format lacks.

    Example:
        >>> encoded_safetensors({"phase": torch.zeros(2, dtype=torch.complex128)})
        Traceback (most recent call last):
        ValueError: tensors of a file must have a dtype of safetensors, got torch.complex128 for ...
    """
    try:
        document: bytes = save(tensors, metadata)
    except KeyError as error:  # its table of dtypes
        names = [name for name, each in tensors.items() if each.dtype in error.args]
        if not names:
            raise
        raise ValueError(
            f"tensors of a file must have a dtype of safetensors, got {error} for {names[0]}; "
            "convert it, such as to torch.complex64, or make it a buffer with persistent=False"
        ) from error
    return document


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors (on the CPU) and the description that :func:`write_tensors` wrote.

    Raises:
        StorageError: the file is missing, truncated, altered or not written by bayesify.
    """
    if path.is_dir():
        raise StorageError(f"{path} is a folder; name a file of it")
    if not path.is_file():
        raise StorageError(f"there is no file {path}")
    try:
        tensors, metadata = _read_safetensors(path)
        description = metadata.get(_META_KEY)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise StorageError(
            f"{path} is not a whole safetensors file, it was cut off or altered ({error}); use a "
            "copy, or train again"
        ) from error
    if description is None:
        raise StorageError(f"{path} is a safetensors file, but bayesify did not write it")
    try:
        meta: dict[str, Any] = json.loads(description)
        expected = meta.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise StorageError(f"the description in {path} was altered; use a copy") from error
    if digest_of(tensors, meta) != expected:
        raise StorageError(
            f"{path} was altered after it was written: its SHA-256 must be {expected}, got "
            f"{digest_of(tensors, meta)}; use a copy, or train again"
        )
    if meta.get("format") not in (1, _FORMAT):
        raise StorageError(
            f"{path} has format {meta.get('format')}, this version of bayesify reads 1 to "
            f"{_FORMAT}; use the version that wrote it"
        )
    if meta["format"] == 1:
        return _with_current_names(tensors), _with_current_names(meta)
    return tensors, meta


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file and its metadata.

    Raises:
        SafetensorError, OSError, ValueError: the file cannot be read, or is not whole.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:  # safetensors opens no path whose bytes are not UTF-8
        content = path.read_bytes()
        header = content[8 : 8 + int.from_bytes(content[:8], "little")]
        return load(content), json.loads(header).get("__metadata__", {})
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, file.metadata() or {}


def _with_current_names(entries: dict[str, Any]) -> dict[str, Any]:
    """Rename the entries of the tensors or the description of a file of format 1."""
    renamed = {}
    for name, value in entries.items():
        owner, dot, last = name.rpartition(".")
        new = f"{owner}{dot}{_OLD_NAMES.get(last, last)}"
        renamed[new] = _with_current_names(value) if isinstance(value, dict) else value
    return renamed


def atomic_write(path: Path, payload: bytes | str) -> None:
    """Write a file atomically: under a temporary name that then replaces the file.

    Where the path is a symbolic link, the file that it points to is replaced.

    Raises:
        IsADirectoryError: the path has no name, as ``/``.
        OSError: the disk is full or the folder is not writable; the temporary file is removed.
        StorageError: the path is that of a device or a pipe.
    """
    if isinstance(payload, str):
        # A path in the text may hold bytes that the locale could not decode.
        payload = payload.encode(errors="surrogateescape")
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with atomic_path(path) as temporary:
        temporary.write_bytes(payload)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name for a file, which replaces the file if nothing fails.

    Where the path is a symbolic link, the file that it points to is replaced.

    Raises:
        OSError: the file was not written or cannot be renamed; the temporary one is removed, and
            the error names the file.
        StorageError: the path is that of a device or a pipe.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.csv")
        ...     with atomic_path(path) as temporary:
        ...         _, is_there = temporary.write_text("1"), path.exists()
        ...     is_there, path.read_text()
        (False, '1')
    """
    path = named_file(path)
    token = secrets.token_hex(8)
    temporary = path.with_name(f".{_short(path.name)}.{os.getpid()}-{token}.tmp")
    try:
        if path.is_file() and not path.stat().st_mode & 0o077:
            temporary.touch(0o600)  # what only its owner may read is so from the first byte on
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        if path.is_file():
            with suppress(OSError):  # some file systems have no modes
                shutil.copymode(path, temporary)
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):  # of a name that is too long
            temporary.unlink()
        # What is written to an open file fails without its name.
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def remove_leftovers(folder: Path, name: str | None = None, *, min_age: float = 0.0) -> None:
    """Remove the temporary files of processes that were killed while they wrote.

    Args:
        folder: a folder in which no other machine writes the file.
        name: of the file; None for all files.
        min_age: seconds since they were written last.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, ".a.csv.99999999-1.tmp").write_text("1")
        ...     remove_leftovers(Path(folder), "a.csv")
        ...     list(Path(folder).iterdir())
        []
    """
    for each in folder.iterdir():
        left = _TEMPORARY.fullmatch(each.name)
        if left is None or (name is not None and left["name"] != _short(name)):
            continue
        if not _is_running(int(left["process"])):
            with suppress(OSError):
                if time.time() - each.stat().st_mtime >= min_age:
                    each.unlink()


def _short(name: str) -> str:
    """Return the name of a file, or a digest of it where it is too long for more to be added."""
    name_bytes = os.fsencode(name)
    return name if len(name_bytes) <= _MOST_OF_NAME else hashlib.sha256(name_bytes).hexdigest()


def _is_running(process: int) -> bool:
    """Return whether a process of this machine runs; False where the system does not tell."""
    if os.name != "posix":
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's, or no number of a process
        pass
    return True


def named_file(path: Path) -> Path:
    """Return the file that a path names, whether it exists or not, after all symbolic links.

    Raises:
        StorageError: it is a device, a pipe or a socket, which a rename would replace, or a
            symbolic link that leads back to itself.

    Example:
        >>> named_file(Path("/dev/null"))
        Traceback (most recent call last):
        bayesify.io.files.StorageError: /dev/null must be a file, got a device or pipe; name a file
    """
    # Of the path itself: that of /dev/stdout resolves to a name that does not exist.
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise StorageError(f"{path} must be a file, got a device or pipe; name a file")
    try:
        found = path.resolve()
        is_circle = found.is_symlink()  # which Python 3.13 leaves as it is
    except RuntimeError:  # of earlier versions
        is_circle = True
    if is_circle:
        raise StorageError(
            f"{path} must be a file, got a symbolic link that leads back to itself; name a file"
        )
    return found


def check_restored(
    stored: Mapping[str, Tensor], held: Mapping[str, Any], source: str | Path
) -> None:
    """Check that tensors of a network that share memory hold what a file stores for each.

    Args:
        stored: the file's tensors.
        held: those of the network, to which they were copied; other entries are not looked at.
        source: the file.

    Raises:
        StorageError: one holds something else, since the file has another value for the other.

    Example:
        >>> tied = torch.zeros(2)
        >>> check_restored({"a": torch.ones(2), "b": tied}, {"a": tied, "b": tied}, "m")
        Traceback (most recent call last):
        bayesify.io.files.StorageError: m is of another architecture: the given network shares 'a'
        with another parameter or buffer, and the file holds another value for that
    """
    plain = {name: each for name, each in held.items() if type(each) in (Tensor, nn.Parameter)}
    memory = {name: each.untyped_storage().data_ptr() for name, each in plain.items()}
    uses = Counter(memory.values())
    for name, tensor in stored.items():
        if name in plain and memory[name] and uses[memory[name]] > 1:
            value = tensor.to(plain[name].device, plain[name].dtype)
            if not torch.allclose(plain[name], value, 0.0, 0.0, equal_nan=True):
                raise StorageError(
                    f"{source} is of another architecture: the given network shares {name!r} with "
                    "another parameter or buffer, and the file holds another value for that"
                )


def digest_of(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> str:
    """Return the SHA-256 of tensors with their names, dtypes and shapes, and of a description."""
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.contiguous().reshape(-1)
        if flat.numel() == 1:  # contiguous whatever its stride, which a view as bytes needs to be 1
            flat = flat.new_empty(1).copy_(flat)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
