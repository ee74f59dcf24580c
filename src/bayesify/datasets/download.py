"""Download a data file from its mirrors with pooch; an unchecked file is never stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

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

#: Called with the file's name, the bytes received so far and the total bytes (None: not known).
#: The count starts again with each mirror.
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
        file: the file to find.
        data_dir: search only this directory, and do not download.
        progress: called as the download proceeds.
        download_to: search only this directory, and download into it.

    Returns:
        The file, checked by SHA-256.

    Raises:
        DataError: a file is present but damaged; or there is none, and it cannot be downloaded or
            stored. A download needs pooch, from ``pip install 'bayesify[cli]'``.
        ValueError: both ``data_dir`` and ``download_to`` are given.

    Example:
        >>> from bayesify.datasets import MUSHROOM
        >>> len(get_file(MUSHROOM.files[0]).content)
        373704
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
    missing = f"is not in {places}"
    if data_dir is not None:
        raise DataError(
            f"{file.title} {missing}, and with --data-dir nothing else is searched; put it there "
            f"('bayesify data get {file.dataset} --data-dir {data_dir}' downloads it), or omit "
            f"--data-dir; uncompressed it has SHA-256 {file.sha256}"
        )
    directory = cache_directory() if download_to is None else expanded(download_to)
    failure = "there is no address to download it from"
    if file.addresses:
        try:
            return _download_from_mirrors(file, directory / file.folder_names[0], progress)
        except ModuleNotFoundError as error:
            if error.name != "pooch":
                raise
            failure = "a download needs pooch (pip install 'bayesify[cli]')"
        except ConnectionError as error:
            failure = str(error)
    packaged = "" if file.package is None else f", or install Debian's package {file.package}"
    raise DataError(
        f"{file.title} is needed: put it into a directory and name that with --data-dir or the "
        f"environment variable BAYESIFY_DATA{packaged}; it {missing}, and {failure}; uncompressed "
        f"it has SHA-256 {file.sha256}"
    )


def _download_from_mirrors(file: DataFile, folder: Path, progress: Progress | None) -> FoundFile:
    """Try each address in turn.

    Raises:
        ConnectionError: no address gave the file; the message has the reason for each.
        DataError: the file cannot be stored in ``folder``.
        ModuleNotFoundError: pooch is not installed.
    """
    import pooch
    from requests import RequestException

    pooch.get_logger().setLevel("WARNING")  # progress is reported by ``progress`` alone
    failures = []
    for address in file.addresses:
        name = f"{file.name}.gz" if address.endswith(".gz") else file.name

        def fetch(url: str, part: str, _: object, name: str = name) -> None:
            """Download to pooch's temporary file, and check it before pooch moves it."""
            # That file is readable only by its owner. Opened anew it gets the usual permissions.
            Path(part).unlink()
            bar = False if progress is None else _ProgressBar(name, progress)
            download = pooch.HTTPDownloader(
                progressbar=bar,
                chunk_size=_CHUNK_BYTES,
                timeout=_TIMEOUT_SECONDS,
                headers={"User-Agent": "bayesify"},
            )
            download(url, part, None)
            check_content(file, Path(part).read_bytes())

        try:
            # No known_hash: it would be that of the gzip file, whose header differs by mirror.
            pooch.retrieve(address, None, fname=name, path=folder, downloader=fetch)
        except (RequestException, DataError) as error:
            failures.append(f"{urlsplit(address).netloc} ({_cause(error)})")
            continue
        except OSError as error:
            raise DataError(
                f"{file.title} cannot be stored in {folder} ({error}); choose another directory "
                "with 'bayesify data get --data-dir' or the environment variable XDG_CACHE_HOME"
            ) from error
        path = folder / name
        return FoundFile(path, check_content(file, path.read_bytes()))
    raise ConnectionError("it could not be downloaded from " + " or ".join(failures))


def _cause(error: BaseException) -> str:
    """Return what went wrong in a few words: of nested errors of a connection the innermost."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"{response.status_code} {response.reason}"
    while not isinstance(error, DataError) and (inner := error.__cause__ or error.__context__):
        error = inner
    return " ".join(str(getattr(error, "strerror", None) or error).split())


class _ProgressBar:
    """The part of tqdm's interface that pooch uses."""

    def __init__(self, name: str, report: Progress) -> None:
        self.total = 0  # set by pooch; 0 means not known
        self._name, self._report, self._done = name, report, 0

    def update(self, count: int) -> None:
        # pooch adds whole chunks, and the total once more at the end.
        self._done = min(self._done + count, self.total) if self.total else self._done + count
        self._report(self._name, self._done, self.total or None)

    def reset(self) -> None:
        """Keep the count, which ``update`` bounds."""

    def close(self) -> None:
        """Leave the display to the caller."""
