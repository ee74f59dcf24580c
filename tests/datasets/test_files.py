"""Search for data files on this machine, and their check by SHA-256."""

import gzip
from dataclasses import replace
from pathlib import Path

import pytest
from tests.places import COMPRESSED, CONTENT, OTHER, TINY, Places, put, sha256

from bayesify.datasets import (
    DataError,
    find_file,
    get_file,
)


def test_the_search_goes_through_the_directories_in_order(places: Places) -> None:
    paths = [
        put(directory / "tiny" / "tiny-idx.gz", gzip.compress(CONTENT))
        for directory in places.ordered
    ]
    for path in paths:
        found = find_file(places.file)
        assert found == (path, CONTENT)
        path.unlink()
    assert find_file(places.file) is None


def test_within_a_directory_the_data_sets_folder_comes_first(tmp_path: Path) -> None:
    names = ("tiny/tiny-idx.gz", "tiny/tiny-idx", "tiny-idx.gz", "tiny-idx")
    paths = [
        put(tmp_path / name, gzip.compress(CONTENT) if name.endswith("gz") else CONTENT)
        for name in names
    ]
    for path in paths:
        found = find_file(TINY, tmp_path)
        assert found == (path, CONTENT)
        path.unlink()
    assert find_file(TINY, tmp_path) is None


def test_an_explicit_directory_is_the_only_one(places: Places, tmp_path: Path) -> None:
    for directory in places.ordered:
        put(directory / "tiny-idx", CONTENT)
    elsewhere = tmp_path / "elsewhere"
    assert find_file(places.file, elsewhere) is None
    with pytest.raises(DataError, match=r"elsewhere \(no such directory\), and with --data-dir"):
        get_file(replace(places.file, addresses=("http://127.0.0.1:1/tiny-idx",)), elsewhere)


def test_without_settings_the_cache_is_in_the_home(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAYESIFY_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    # An empty variable counts as unset, not as the working directory.
    monkeypatch.chdir(put(tmp_path / "here" / "tiny-idx", OTHER).parent)
    path = put(tmp_path / "home" / ".cache" / "bayesify" / "tiny" / "tiny-idx", CONTENT)
    assert find_file(TINY) == (path, CONTENT)
    (tmp_path / "home" / "mine").mkdir()
    path = put(tmp_path / "home" / "mine" / "tiny-idx", CONTENT)
    assert find_file(TINY, "~/mine") == (path, CONTENT)


def test_an_unknown_home_is_named(places: Places) -> None:
    with pytest.raises(DataError, match="~nobody-of-this-name/data needs a home directory"):
        find_file(TINY, "~nobody-of-this-name/data")


WRONG = {
    "another file": (gzip.compress(OTHER), sha256(OTHER)),
    "an altered byte, uncompressed": (OTHER, sha256(OTHER)),
    "a truncated gzip": (COMPRESSED[: len(COMPRESSED) // 2], "damaged gzip"),
    "a gzip without its last byte": (COMPRESSED[:-1], "damaged gzip"),
    "an altered byte in the gzip's checksum": (
        COMPRESSED[:-8] + bytes([COMPRESSED[-8] ^ 1]) + COMPRESSED[-7:],
        "damaged gzip",
    ),
    "rubbish after the gzip": (COMPRESSED + b"rubbish", "damaged gzip"),
    "an altered byte in the compressed stream": (
        COMPRESSED[:12] + bytes([COMPRESSED[12] ^ 255]) + COMPRESSED[13:],
        "damaged gzip",
    ),
    "a few bytes that become 300 MiB": (300 * gzip.compress(bytes(2**20)), "more than 268,435,456"),
    "nothing": (b"", sha256(b"")),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_an_error_though_a_good_one_lies_further_down(
    places: Places, case: str
) -> None:
    raw, part_of_message = WRONG[case]
    wrong = put(places.repository / "tiny" / "tiny-idx.gz", raw)
    put(places.repository / "tiny" / "tiny-idx", CONTENT)
    put(places.repository / "tiny-idx.gz", COMPRESSED)
    put(places.cache / "tiny" / "tiny-idx.gz", COMPRESSED)
    with pytest.raises(DataError) as caught:
        find_file(places.file)
    message = str(caught.value)
    assert "\n" not in message
    for part in (str(wrong), f"SHA-256 {TINY.sha256}", part_of_message, "delete it or put"):
        assert part in message
    with pytest.raises(DataError, match="is not the right file"):
        get_file(places.file)


def test_the_message_on_a_wrong_flat_file_names_the_folder(tmp_path: Path) -> None:
    put(tmp_path / "tiny-idx.gz", gzip.compress(OTHER))
    with pytest.raises(DataError) as caught:
        find_file(TINY, tmp_path)
    assert f"or put that into {tmp_path / 'tiny'}, which is searched first" in str(caught.value)


def test_a_broken_link_and_a_folder_are_present_but_wrong(places: Places) -> None:
    put(places.cache / "tiny-idx", CONTENT)
    link = places.env / "tiny-idx"
    link.parent.mkdir()
    link.symlink_to("nowhere")
    with pytest.raises(DataError, match="tiny-idx is a broken link"):
        find_file(TINY)
    link.unlink()
    link.mkdir()
    with pytest.raises(DataError, match="tiny-idx cannot be read"):
        find_file(TINY)
