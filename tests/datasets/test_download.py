"""Download from mirrors: each file is stored whole and checked, or not at all."""

import gzip
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.places import (
    COMPRESSED,
    CONTENT,
    OTHER,
    TINY,
    Places,
    Server,
    all_files,
    put,
    sha256,
    tiny_from,
)

from bayesify.datasets import DataError, download, find_file, get_file


def test_a_download_is_stored_in_the_cache_once_it_is_whole(
    places: Places, server: Server, tmp_path: Path
) -> None:
    server.routes["/tiny-idx.gz"] = COMPRESSED
    calls: list[tuple[str, int, int | None]] = []
    path = places.cache / "tiny" / "tiny-idx.gz"

    def progress(name: str, done: int, total: int | None) -> None:
        calls.append((name, done, total))
        (part,) = all_files(tmp_path)
        assert part.parent == path.parent  # the same file system, so that it can be renamed
        assert part != path

    file = tiny_from(server, "/tiny-idx.gz")
    assert get_file(file, progress=progress) == (path, CONTENT)
    assert path.read_bytes() == COMPRESSED
    assert all_files(tmp_path) == [path]
    assert path.stat().st_mode == put(tmp_path / "other", b"").stat().st_mode
    assert set(calls) == {("tiny-idx.gz", len(COMPRESSED), len(COMPRESSED))}
    # The next call finds the file and sends no request.
    assert get_file(file, progress=progress) == (path, CONTENT)
    assert server.asked == ["/tiny-idx.gz"]


def test_a_plain_file_is_stored_under_its_plain_name(places: Places, server: Server) -> None:
    server.routes["/tiny"] = CONTENT
    path = places.cache / "tiny" / "tiny-idx"
    assert get_file(tiny_from(server, "/tiny")) == (path, CONTENT)
    assert find_file(TINY) == (path, CONTENT)


def test_a_download_can_go_to_a_given_directory(
    places: Places, server: Server, tmp_path: Path
) -> None:
    put(places.cache / "tiny-idx", CONTENT)
    server.routes["/tiny-idx.gz"] = COMPRESSED
    file = tiny_from(server, "/tiny-idx.gz")
    path = tmp_path / "new" / "tiny" / "tiny-idx.gz"
    assert get_file(file, download_to=tmp_path / "new") == (path, CONTENT)
    with pytest.raises(ValueError, match="not both"):
        get_file(file, tmp_path, download_to=tmp_path)


def test_every_mirror_is_tried_and_a_failed_one_leaves_no_file(
    places: Places, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_TIMEOUT_SECONDS", 0.2)
    server.routes |= {
        "/wrong.gz": gzip.compress(OTHER),
        "/short.gz": COMPRESSED,
        "/stalled.gz": COMPRESSED,
        "/good.gz": COMPRESSED,
    }
    server.cut_short.add("/short.gz")
    server.stalled.add("/stalled.gz")
    bad = ["/none.gz", "/wrong.gz", "/short.gz", "/stalled.gz"]
    with pytest.raises(DataError) as caught:
        get_file(tiny_from(server, *bad))
    message = str(caught.value)
    half, host = len(COMPRESSED) // 2, server.base.removeprefix("http://")
    for part in (
        f"from {host} (404 Not Found) or ",
        f"{host} (its uncompressed bytes must have SHA-256 {TINY.sha256}, got {sha256(OTHER)}",
        f"{host} (IncompleteRead({half} bytes read, {len(COMPRESSED) - half} more expected)",
        f"{host} (timed out)",
    ):
        assert part in message
    assert all_files(tmp_path) == []
    found = get_file(tiny_from(server, *bad, "/good.gz"))
    assert found.content == CONTENT
    assert all_files(tmp_path) == [found.path]


def test_an_interrupted_download_leaves_no_file(
    places: Places, server: Server, tmp_path: Path
) -> None:
    server.routes["/tiny-idx.gz"] = COMPRESSED

    def interrupt(name: str, done: int, total: int | None) -> None:
        assert len(all_files(tmp_path)) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get_file(tiny_from(server, "/tiny-idx.gz"), progress=interrupt)
    assert all_files(tmp_path) == []


def test_offline_the_message_has_all_that_is_needed(places: Places, tmp_path: Path) -> None:
    places.env.mkdir()
    # Nothing listens on port 1 of this machine.
    addresses = ("http://127.0.0.1:1/a/tiny-idx.gz", "http://127.0.0.1:1/b/tiny-idx.gz")
    with pytest.raises(DataError) as caught:
        get_file(replace(places.file, addresses=addresses, package="dataset-tiny"))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("tiny-idx.gz of tiny is needed: put it into a directory and name")
    assert ", or install Debian's package dataset-tiny; it is not in " in message
    assert f"is not in {places.env}, {places.repository} (no such directory)" in message
    for part in (
        "tiny-idx.gz of tiny",
        f"SHA-256 {TINY.sha256}",
        *map(str, places.ordered),
        "from 127.0.0.1:1 (Connection refused) or 127.0.0.1:1 (Connection refused); ",
        "--data-dir",
        "BAYESIFY_DATA",
    ):
        assert part in message
    assert all_files(tmp_path) == []


def test_without_pooch_files_are_found_and_a_download_names_the_extra(
    places: Places, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    file = tiny_from(server, "/tiny-idx.gz")
    with pytest.raises(DataError, match=r"is not in .* needs pooch \(pip install 'bayesify\[cli\]"):
        get_file(file)
    path = put(places.env / "tiny" / "tiny-idx", CONTENT)
    assert get_file(file) == (path, CONTENT)
    assert server.asked == []


def test_a_directory_that_cannot_be_written_is_named(places: Places, server: Server) -> None:
    server.routes["/tiny-idx.gz"] = COMPRESSED
    put(places.cache / "tiny", b"a file where the folder should be")
    with pytest.raises(DataError, match=f"cannot be stored in {places.cache / 'tiny'} .*data-dir"):
        get_file(tiny_from(server, "/tiny-idx.gz"))
