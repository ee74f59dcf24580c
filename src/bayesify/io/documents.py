"""JSON documents with a digest of what they say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bayesify.io.files import StorageError, atomic_write, digest_of

__all__ = ["read_document", "write_document"]

#: Not "sha256", which is that of the data in some documents.
_DIGEST = "document_sha256"
#: Keys of places on a machine, which may be written by hand where a file has moved.
_PLACES = {"encoder"}


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document as JSON with its SHA-256, whole or not at all.

    Raises:
        OSError: the file cannot be written; an existing file is then unchanged.
    """
    signed = {**document, _DIGEST: _digest(document)}
    atomic_write(path, json.dumps(signed, indent=1, ensure_ascii=False) + "\n")


def read_document(path: Path) -> Any:
    """Read a document that :func:`write_document` wrote, or an earlier version without a digest.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read.
        StorageError: it was altered.
        ValueError: it is no JSON.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "run.json")
        ...     write_document(path, {"mean": 0.114})
        ...     found = read_document(path)
        ...     _ = path.write_text(path.read_text().replace("0.114", "0.914"))
        ...     try:
        ...         read_document(path)
        ...     except StorageError as error:
        ...         print(found, error)
        {'mean': 0.114} it was altered after it was written: its SHA-256 must be ...
    """
    # A path in it may hold bytes that the locale could not decode.
    document = json.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))
    if not isinstance(document, dict) or _DIGEST not in document:
        return document
    expected, found = document.pop(_DIGEST), _digest(document)
    if found != expected:
        raise StorageError(
            f"it was altered after it was written: its SHA-256 must be {expected}, got {found}; "
            "use a copy, or train again"
        )
    return document


def _digest(document: Mapping[str, Any]) -> str:
    # As it is read again: lists for tuples, texts for numbers as keys.
    return digest_of({}, _without_places(json.loads(json.dumps(document))))


def _without_places(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_places(each) for key, each in value.items() if key not in _PLACES}
    return [_without_places(each) for each in value] if isinstance(value, list) else value
