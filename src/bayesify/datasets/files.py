"""Finding one data file on this machine, and checking that it is the right one."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "DataError",
    "DataFile",
    "FoundFile",
    "cache_directory",
    "check_content",
    "expanded",
    "find_file",
    "search_directories",
]

_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 20


class DataError(ValueError):
    """A data file or data set is missing, damaged or unusable; the message is one line."""


@dataclass(frozen=True)
class DataFile:
    """One file of a data set: what it is called, how it is recognised, where it comes from.

    Args:
        dataset: name of the data set, also that of its folder within a data directory.
        name: the file's name without ``.gz``; compressed and plain copies are both accepted.
        sha256: of the uncompressed bytes, in lower-case hexadecimal: compressors write different
            headers around the same data.
        addresses: where it can be downloaded, tried in turn; gzip if they end in ``.gz``.
        system_directories: where packages of an operating system install it.
        package: the name of Debian's that does, if there is one.
        folders: names of its folder within a data directory, that of downloads first; None is
            that of its data set.

    Example:
        >>> DataFile("mnist", "train-images-idx3-ubyte", "ba89...").title
        'train-images-idx3-ubyte.gz of mnist'
    """

    dataset: str
    name: str
    sha256: str
    addresses: tuple[str, ...] = ()
    system_directories: tuple[Path, ...] = ()
    folders: tuple[str, ...] | None = None
    package: str | None = None

    @property
    def folder_names(self) -> tuple[str, ...]:
        """The names of its folder within a data directory."""
        return self.folders or (self.dataset,)

    @property
    def title(self) -> str:
        """How messages call the file."""
        return f"{self.name}.gz of {self.dataset}"


class FoundFile(NamedTuple):
    """A file that is there and right."""

    #: Where it lies.
    path: Path
    #: Its uncompressed bytes, the very ones that were checked.
    content: bytes


def find_file(file: DataFile, data_dir: str | Path | None = None) -> FoundFile | None:
    """Look for a file in this machine's directories, and check it; nothing is downloaded.

    The order is ``$BAYESIFY_DATA``, the repository's ``datasets/`` (where the package runs from a
    checkout), the user's cache (``$XDG_CACHE_HOME`` or ``~/.cache``, then ``bayesify``) and the
    file's system directories. In each, ``DIR/FOLDER/FILE`` comes before ``DIR/FILE``, and
    ``FILE.gz`` before ``FILE``.

    Args:
        file: what to look for.
        data_dir: look in this directory and in no other.

    Returns:
        The first that is present, or None.

    Raises:
        DataError: the first that is present is damaged or cannot be read. It is never skipped:
            a silent fallback would hide that the data one points at are not the data one uses.
    """
    for directory in search_directories(file, data_dir):
        for folder in (*(directory / name for name in file.folder_names), directory):
            for path in (folder / f"{file.name}.gz", folder / file.name):
                raw = _read_if_present(path)
                if raw is not None:
                    return FoundFile(path, _content_of(file, path, raw, directory))
    return None


def search_directories(file: DataFile, data_dir: str | Path | None = None) -> Iterator[Path]:
    """The data directories, in the order of ``find_file``; they need not exist."""
    if data_dir is not None:
        yield expanded(data_dir)
        return
    if os.environ.get("BAYESIFY_DATA"):
        yield expanded(os.environ["BAYESIFY_DATA"])
    repository = _repository()
    if repository is not None:
        yield repository / "datasets"
    yield cache_directory()
    yield from file.system_directories


def cache_directory() -> Path:
    """Where downloads are kept: ``$XDG_CACHE_HOME/bayesify``, else ``~/.cache/bayesify``."""
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "bayesify"


def expanded(path: str | Path) -> Path:
    """``path`` with a leading ~ replaced by the user's home.

    Raises:
        DataError: that home is not known.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"{path} needs a home directory: {error} Set HOME, or XDG_CACHE_HOME for the cache"
        ) from error


def check_content(file: DataFile, raw: bytes) -> bytes:
    """Uncompress a file's bytes where they are compressed, and check them.

    Args:
        file: what they should be.
        raw: as read from disk or network, gzip or plain.

    Returns:
        The uncompressed bytes.

    Raises:
        DataError: they are not the file's, or the gzip is damaged; both checksums are named.

    Example:
        >>> file = DataFile("tiny", "abc", hashlib.sha256(b"abc").hexdigest())
        >>> check_content(file, gzip.compress(b"abc"))
        b'abc'
    """
    content, damage = _uncompress(raw) if raw.startswith(_GZIP_MAGIC) else (raw, "")
    got = hashlib.sha256(content).hexdigest()
    if damage or got != file.sha256:
        raise DataError(
            f"{damage}its uncompressed bytes must have SHA-256 {file.sha256}, got {got} "
            f"({len(content)} bytes)"
        )
    return content


def _uncompress(raw: bytes) -> tuple[bytes, str]:
    """The bytes that can be uncompressed, and what is wrong with the rest."""
    chunks = []
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                chunks.append(chunk)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        return b"".join(chunks), f"damaged gzip ({error}); "
    return b"".join(chunks), ""


def _read_if_present(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if not path.is_symlink():
            return None
        raise DataError(f"{path} is a link to nothing; mend or delete it") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); mend or delete it") from error


def _content_of(file: DataFile, path: Path, raw: bytes, directory: Path) -> bytes:
    try:
        return check_content(file, raw)
    except DataError as error:
        mend = f"delete it or put a good copy of {file.title} in its place"
        if path.parent == directory:
            # The two MNISTs share their file names: a flat folder may well hold the other one.
            mend += f", or put that into {directory / file.dataset}, which is looked at first"
        raise DataError(f"{path} is not the right file: {error}; {mend}") from error


def _repository() -> Path | None:
    """The checkout that this file belongs to; an installed wheel has none."""
    source = Path(__file__).resolve().parents[2]
    is_checkout = source.name == "src" and (source.parent / "pyproject.toml").is_file()
    return source.parent if is_checkout else None
