"""Files are read whole or not at all, and a write that fails leaves what was there."""

from __future__ import annotations

import ast
import errno
import hashlib
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.cases import mlp
from tests.loops import loop_over
from tests.saved_networks import CASE, check_refused, trained
from torch import nn

import bayesify
from bayesify import BayesianModule, load, save
from bayesify.io import StorageError, atomic_path, atomic_write, read_tensors, write_tensors
from bayesify.io.files import remove_leftovers


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    save(CASE.bnn(), tmp_path / "whole")
    return (tmp_path / "whole").read_bytes()


def test_a_file_cut_off_anywhere_is_refused(whole: bytes, tmp_path: Path) -> None:
    header = 8 + int.from_bytes(whole[:8], "little")
    assert header < len(whole) - 400
    for length in (*range(0, len(whole), 61), 1, 7, 8, 9, header - 1, header, len(whole) - 1):
        message = check_refused(tmp_path / "cut", whole[:length])
        assert "cut off or altered" in message
    check_refused(tmp_path / "longer", whole + b"\0")


def test_one_altered_byte_anywhere_is_noticed(whole: bytes, tmp_path: Path) -> None:
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in (*range(header), *range(header, len(whole), 11), len(whole) - 1):
        altered = bytearray(whole)
        altered[place] ^= 1 << place % 8
        message = check_refused(tmp_path / "altered", bytes(altered))
        assert "altered" in message or "did not write it" in message, (place, message)


def test_what_is_no_file_of_ours_is_refused(whole: bytes, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"there is no file .*missing"):
        load(tmp_path / "missing", mlp())
    with pytest.raises(StorageError, match="is a folder; name a file of it"):
        load(tmp_path, mlp())
    check_refused(tmp_path / "text", b"hello, this is a text and no network\n")
    torch.save(mlp().state_dict(), tmp_path / "pickle")
    check_refused(tmp_path / "pickle", (tmp_path / "pickle").read_bytes())
    tensors = {"posterior.mean": torch.zeros(44)}
    described = ["[]", "3", "{}", "null", "", "{", "[" * 100_000, '{"sha256": "0"}']
    for text in (None, *described):
        save_file(tensors, tmp_path / "foreign", None if text is None else {"bayesify": text})
        check_refused(tmp_path / "foreign", (tmp_path / "foreign").read_bytes())
    for meta in ({}, {"model": 3}, {"model": {"names": ["0.weight"], "shapes": []}}):
        write_tensors(tmp_path / "other", tensors, meta)
        check_refused(tmp_path / "other", (tmp_path / "other").read_bytes())
    stored, meta = read_tensors(tmp_path / "whole")
    for name, value in (("posterior", "Prior"), ("prior", {"type": "Delta"}), ("dtype", "int64")):
        write_tensors(tmp_path / "odd", stored, meta | {"model": meta["model"] | {name: value}})
        check_refused(tmp_path / "odd", (tmp_path / "odd").read_bytes())
    write_tensors(tmp_path / "next", stored, meta | {"format": 3})
    assert "has format 3" in check_refused(tmp_path / "next", (tmp_path / "next").read_bytes())


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The kernel ends longer writes in the middle, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_breaks_off_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(CASE.bnn(), path)
    old = path.read_bytes()
    with files_of_at_most(1000), pytest.raises(OSError, match=f"File too large: '{path}'"):
        save(trained(CASE.bnn()), path)
    # As a table of predictions is written, row by row to an open file.
    with (
        files_of_at_most(1000),
        pytest.raises(OSError, match=f"File too large: '{path}'"),
        atomic_path(path) as temporary,
        temporary.open("w") as file,
    ):
        file.write("1\n" * 1000)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


@loop_over("call", ["os.fsync", "pathlib.Path.replace"])
def test_a_full_disk_at_the_last_moment_leaves_the_old_file(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "model"
    atomic_write(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(call, full)
        with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
            atomic_write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


UNSAFE = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE |= {"torch.load", "torch.save", "numpy.load", "np.load"}


def unsafe_names(text: str) -> set[str]:
    """The names in a program that read or write pickles."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return names & UNSAFE


def test_there_is_no_pickle_in_the_library() -> None:
    for text in ("torch.load('a')", "from torch import save", "import pickle", "np.load('a')"):
        assert unsafe_names(text)
    files = sorted(Path(bayesify.__file__).parent.rglob("*.py"))
    assert len(files) > 30
    assert not {path: names for path in files if (names := unsafe_names(path.read_text()))}


def test_text_may_hold_bytes_that_the_locale_could_not_decode(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    atomic_write(path, "caf" + "é".encode().decode("ascii", "surrogateescape"))
    assert path.read_bytes() == "café".encode()


@pytest.mark.skipif(sys.platform != "linux", reason="needs names of any bytes")
def test_a_path_that_is_not_utf_8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"r\xe9sultats")
    folder.mkdir()
    bnn = BayesianModule(nn.Linear(3, 2))
    save(bnn, folder / "m")
    assert torch.equal(load(folder / "m", nn.Linear(3, 2)).posterior.mean, bnn.posterior.mean)
    (folder / "m").write_bytes((folder / "m").read_bytes()[:-5])
    with pytest.raises(StorageError, match="is not a whole safetensors file"):
        load(folder / "m", nn.Linear(3, 2))


@pytest.mark.skipif(os.name != "posix", reason="needs the modes of POSIX")
def test_a_private_file_stays_private(tmp_path: Path) -> None:
    bnn = BayesianModule(nn.Linear(3, 2))
    save(bnn, tmp_path / "m")
    (tmp_path / "m").chmod(0o600)
    save(bnn, tmp_path / "m")
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.name != "posix", reason="needs the modes of POSIX")
def test_what_replaces_a_private_file_is_private_from_its_first_byte(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.touch(0o600)
    with atomic_path(path) as temporary:
        temporary.write_text("new")
        assert temporary.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == "new"


def test_a_description_is_read_as_it_was_written(tmp_path: Path) -> None:
    """JSON makes texts of the keys that are numbers, which sort otherwise."""
    meta = {"counts": {number: 0.5 * number for number in (2, 10, 1)}, "mixed": {1: 0, "a": 2}}
    write_tensors(tmp_path / "m", {"a": torch.ones(2)}, meta)
    _, found = read_tensors(tmp_path / "m")
    assert found["counts"] == {"1": 0.5, "2": 1.0, "10": 5.0}
    assert found["mixed"] == {"1": 0, "a": 2}


def test_a_name_of_any_length_that_the_system_takes(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 127)
    atomic_write(path, "1")
    killed = tmp_path / f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()}.99999999-1.tmp"
    killed.touch()
    remove_leftovers(tmp_path, "other")
    assert killed.exists()
    remove_leftovers(tmp_path, path.name)
    assert list(tmp_path.iterdir()) == [path]


def test_processes_of_one_number_do_not_share_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of two containers with one folder, in which both have the number 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    path = tmp_path / "m"
    with atomic_path(path) as first:
        first.write_text("first")
        with atomic_path(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]
