"""Downloading one data file from its mirrors; nothing enters a data directory unchecked."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path

from bayesify.datasets.files import (
    DataError,
    DataFile,
    FoundFile,
    cache_directory,
    check_content,
    expanded,
    find_file,
    search_directories,
)

__all__ = ["Progress", "get_file"]

#: Called with the file's name, the bytes received so far and the bytes in all (None: not known).
#: The count starts again from 0 with each mirror.
Progress = Callable[[str, int, int | None], None]

_TIMEOUT_SECONDS = 30.0
_CHUNK_BYTES = 1 << 18


def get_file(
    file: DataFile,
    data_dir: str | Path | None = None,
    *,
    progress: Progress | None = None,
    download_to: str | Path | None = None,
) -> FoundFile:
    """Find a file (see ``find_file`` for the order), or download it into the user's cache.

    Args:
        file: what is wanted.
        data_dir: look in this directory and in no other, and do not download.
        progress: told how a download gets on.
        download_to: look in this directory and in no other, and download into it.

    Returns:
        The file, checked.

    Raises:
        DataError: a damaged file is in the way, or there is none and no mirror gave it.
        ValueError: both ``data_dir`` and ``download_to`` are given.
    """
    if data_dir is not None and download_to is not None:
        raise ValueError("give data_dir (never downloads) or download_to, not both")
    only_there = data_dir if data_dir is not None else download_to
    found = find_file(file, only_there)
    if found is not None:
        return found
    places = ", ".join(
        f"{directory}" + ("" if directory.is_dir() else " (no such directory)")
        for directory in search_directories(file, only_there)
    )
    missing = f"{file.title} (SHA-256 {file.sha256} uncompressed) is not in {places}"
    if data_dir is not None:
        raise DataError(
            f"{missing}, and with --data-dir nothing else is searched; put it there ('bayesify "
            f"data get {file.dataset} --data-dir {data_dir}' downloads it), or leave --data-dir out"
        )
    directory = cache_directory() if download_to is None else expanded(download_to)
    failures = []
    for address in file.addresses:
        try:
            return _download(file, address, directory / file.folder_names[0], progress)
        except (OSError, http.client.HTTPException, DataError) as error:
            failures.append(f"{address} ({_reason(error)})")
    tried = "could not be downloaded from " + " or ".join(failures)
    packaged = "" if file.package is None else f"install Debian's package {file.package}, or "
    raise DataError(
        f"{missing} and {tried if failures else 'has no address to download it from'}; {packaged}"
        "put the file into a directory and name that with --data-dir or the environment variable "
        "BAYESIFY_DATA"
    )


def _download(file: DataFile, address: str, folder: Path, progress: Progress | None) -> FoundFile:
    name = f"{file.name}.gz" if address.endswith(".gz") else file.name
    request = urllib.request.Request(address, headers={"User-Agent": "bayesify"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
        folder.mkdir(parents=True, exist_ok=True)
        # The name is this download's own: two processes (ranks of a distributed run) that fetch
        # the same file at once must not write into each other's.
        part = folder / f"{name}.{uuid.uuid4().hex[:8]}.part"
        try:
            _stream(response, part, name, progress)
            content = check_content(file, part.read_bytes())
            part.replace(folder / name)
        finally:
            part.unlink(missing_ok=True)
    return FoundFile(folder / name, content)


def _stream(
    response: http.client.HTTPResponse, part: Path, name: str, progress: Progress | None
) -> None:
    length = response.headers.get("Content-Length")
    total = int(length) if length is not None and length.isdecimal() else None
    done = 0
    with part.open("wb") as target:
        while True:
            if progress is not None:
                progress(name, done, total)
            chunk = response.read(_CHUNK_BYTES)
            if not chunk:
                break
            target.write(chunk)
            done += len(chunk)
    if total is not None and done != total:
        raise DataError(f"the connection ended after {done} of {total} bytes")


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        error.close()
    elif isinstance(error, urllib.error.URLError):
        error = error.reason if isinstance(error.reason, Exception) else error
    return " ".join(str(error).split()) or type(error).__name__
