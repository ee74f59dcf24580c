"""Find a data file on this machine and check it by SHA-256."""

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
#: Bytes beyond which nothing is uncompressed; the largest file of a data set has 47 MB.
_MOST_BYTES = 256 * 2**20


class DataError(ValueError):
    """A data file or data set is missing, damaged or unusable; the message is one line.

    Example:
        >>> try:
        ...     check_content(DataFile("tiny", "abc", "0" * 64), b"abc")
        ... except DataError as error:
        ...     print(str(error)[:42])
        its uncompressed bytes must have SHA-256 0
    """


@dataclass(frozen=True)
class DataFile:
    """One file of a data set: its name, its checksum and its addresses.

    Args:
        dataset: name of the data set, and of its folder within a data directory.
        name: the file's name without ``.gz``; compressed and plain copies are both accepted.
        sha256: checksum of the uncompressed bytes, in lower-case hexadecimal. Compressed copies of
            the same bytes differ in their headers.
        addresses: URLs of the mirrors, tried in turn; gzip if they end in ``.gz``.
        system_directories: directories into which packages of an operating system install it.
        package: the Debian package that installs it, if there is one.
        folders: names of its folder within a data directory, the one for downloads first; None
            is the name of its data set.

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
        """Names of its folder within a data directory."""
        return self.folders or (self.dataset,)

    @property
    def title(self) -> str:
        """Name of the file in messages."""
        return f"{self.name}.gz of {self.dataset}"


class FoundFile(NamedTuple):
    """A file that was found and checked.

    Example:
        >>> FoundFile(Path("tiny/abc"), b"abc").content
        b'abc'
    """

    #: Path of the file.
    path: Path
    #: Its uncompressed bytes, as they were checked.
    content: bytes


def find_file(file: DataFile, data_dir: str | Path | None = None) -> FoundFile | None:
    """Search this machine's directories for a file and check it; nothing is downloaded.

    The order is ``$BAYESIFY_DATA``, the repository's ``datasets/`` (where the package runs from a
    checkout), the user's cache (``$XDG_CACHE_HOME`` or ``~/.cache``, then ``bayesify``) and the
    file's system directories. In each, ``DIR/FOLDER/FILE`` comes before ``DIR/FILE``, and
    ``FILE.gz`` before ``FILE``.

    Args:
        file: the file to find.
        data_dir: search only this directory.

    Returns:
        The first file that is present, or None.

    Raises:
        DataError: the first file that is present is damaged or cannot be read. It is never
            skipped, because a silent fallback would hide which data are used.

    Example:
        >>> import tempfile
        >>> file = DataFile("tiny", "abc", hashlib.sha256(b"abc").hexdigest())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     before = find_file(file, folder)
        ...     _ = Path(folder, "abc").write_bytes(b"abc")
        ...     after = find_file(file, folder)
        >>> before, after.content
        (None, b'abc')
    """
    for directory in search_directories(file, data_dir):
        for folder in (*(directory / name for name in file.folder_names), directory):
            for path in (folder / f"{file.name}.gz", folder / file.name):
                raw = _read_if_present(path)
                if raw is not None:
                    return FoundFile(path, _content_of(file, path, raw, directory))
    return None


def search_directories(file: DataFile, data_dir: str | Path | None = None) -> Iterator[Path]:
    """Yield the data directories in the order of ``find_file``; they need not exist."""
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
    """Return the directory of downloads: ``$XDG_CACHE_HOME/bayesify`` or ``~/.cache/bayesify``."""
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "bayesify"


def expanded(path: str | Path) -> Path:
    """Replace a leading ~ by the user's home directory.

    Raises:
        DataError: that directory is not known.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"{path} needs a home directory: {error} Set HOME, or XDG_CACHE_HOME for the cache"
        ) from error


def check_content(file: DataFile, raw: bytes) -> bytes:
    """Uncompress a file's bytes if they are gzip, and check them by SHA-256.

    Args:
        file: the file whose bytes they should be.
        raw: bytes as read from disk or network, gzip or plain.

    Returns:
        The uncompressed bytes.

    Raises:
        DataError: the gzip is damaged or larger than any data set's file, or the checksum differs;
            both checksums are named.

    Example:
        >>> file = DataFile("tiny", "abc", hashlib.sha256(b"abc").hexdigest())
        >>> check_content(file, gzip.compress(b"abc"))
        b'abc'
    """
    content = raw
    try:
        if raw.startswith(_GZIP_MAGIC):
            content = gzip.GzipFile(fileobj=io.BytesIO(raw)).read(_MOST_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"damaged gzip ({error}), its uncompressed bytes must have SHA-256 {file.sha256}"
        ) from error
    if len(content) > _MOST_BYTES:
        raise DataError(
            f"it has more than {_MOST_BYTES:,} bytes, its uncompressed bytes must have "
            f"SHA-256 {file.sha256}"
        )
    got = hashlib.sha256(content).hexdigest()
    if got != file.sha256:
        raise DataError(
            f"its uncompressed bytes must have SHA-256 {file.sha256}, got {got} "
            f"({len(content)} bytes)"
        )
    return content


def _read_if_present(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if not path.is_symlink():
            return None
        raise DataError(f"{path} is a broken link; mend or delete it") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); mend or delete it") from error


def _content_of(file: DataFile, path: Path, raw: bytes, directory: Path) -> bytes:
    try:
        return check_content(file, raw)
    except DataError as error:
        mend = f"delete it or put a good copy of {file.title} in its place"
        if path.parent == directory:
            # MNIST and Fashion-MNIST share their file names: a flat folder may hold the other one.
            mend += (
                f", or put that into {directory / file.folder_names[0]}, which is searched first"
            )
        raise DataError(f"{path} is not the right file: {error}; {mend}") from error


def _repository() -> Path | None:
    """Return the checkout that this file belongs to, or None for an installed wheel."""
    source = Path(__file__).resolve().parents[2]
    is_checkout = source.name == "src" and (source.parent / "pyproject.toml").is_file()
    return source.parent if is_checkout else None
