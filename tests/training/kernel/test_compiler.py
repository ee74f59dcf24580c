"""The compiled kernel: made once, kept, and done without where it cannot be made."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.backend_cases import needs_compiler
from tests.loops import noted
from tests.training.backends.test_support import Case, parameter, train

from bayesify.training.backends import CompilerError, make_backend
from bayesify.training.kernel import compiler

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
ARGUMENTS = ("gaussian", True, "sgd", "weights", torch.float64)
CASE = Case("")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of kernels, with nothing in it."""

    def forget() -> None:
        compiler.compiled_library.cache_clear()
        compiler._scratch_folder.cache_clear()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    forget()
    yield tmp_path / "cache" / "bayesify" / "kernels"
    forget()


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the compiler compiled; it is asked for its version besides."""
    log, real = tmp_path / "log", compiler.find_compiler()
    log.touch()
    text = f'case "$*" in *step.cpp*) echo >> "{log}";; esac\nexec "{real}" "$@"'
    monkeypatch.setenv("CXX", str(script(tmp_path / "logging-compiler", text)))
    return lambda: len(log.read_text().splitlines())


def trained_mean(backend: str) -> torch.Tensor:
    return train(CASE, backend)[0]["posterior.mean"]


def check_done_without(why: str) -> None:
    """ "auto" falls back to the closed forms and says why, once; "compiled" raises."""
    found, notes = train(CASE, "auto")
    assert torch.equal(found["posterior.mean"], trained_mean("closed-form"))
    said, _ = notes.said
    assert said.startswith("backend: closed-form (gaussian prior); not compiled: ")
    assert why in said
    with pytest.raises(CompilerError) as error:
        train(CASE, "compiled")
    assert why in str(error.value)


# ---------------------------------------------------------------------------- without a compiler


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "find_compiler", lambda: None)
    check_done_without("the compiled backend needs a C++ compiler, and none was found")


def test_the_compiler_may_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = script(tmp_path / "my-compiler", "")
    monkeypatch.setenv("CXX", str(named))
    assert compiler.find_compiler() == str(named)
    for missing in ("no-such-compiler", "g++ '"):
        compiler.compiled_library.cache_clear()
        monkeypatch.setenv("CXX", missing)
        check_done_without(f"none was found under CXX={missing}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo out of order >&2; exit 1", "failed on step.cpp: out of order"),
        ("exit 0", "failed"),
        (r"printf '\377' >&2; exit 1", "failed on step.cpp"),
    ],
    ids=["fails", "makes nothing", "is not understood"],
)
def test_a_compiler_that_is_broken(
    text: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "broken", text)))
    check_done_without(why)
    assert not list(cache.iterdir())


def test_a_compiler_that_cannot_be_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("this is no program")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    check_done_without("could not be run")


def test_a_plain_step_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "find_compiler", lambda: 1 / 0)
    trained_mean("closed-form")


@pytest.mark.slow
@needs_compiler
def test_a_compiler_that_knows_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected, real = trained_mean("compiled"), compiler.find_compiler()
    for unknown in ("-march=native", "-fopenmp"):
        compiler.compiled_library.cache_clear()
        text = f'case "$*" in *{unknown}*) exit 1;; esac\nexec "{real}" "$@"'
        monkeypatch.setenv("CXX", str(script(tmp_path / f"without{unknown}", text)))
        with noted(unknown=unknown):
            assert torch.allclose(trained_mean("compiled"), expected, rtol=1e-12, atol=1e-14)


# ------------------------------------------------------------------------------------- the cache


@needs_compiler
def test_a_kernel_is_compiled_once(calls: Callable[[], int], cache: Path) -> None:
    compiler.compiled_library(*ARGUMENTS)
    assert calls() == 1
    (path,) = cache.iterdir()
    compiler.compiled_library(*ARGUMENTS)
    compiler.compiled_library.cache_clear()
    before = path.stat().st_mtime_ns
    compiler.compiled_library(*ARGUMENTS)
    assert calls() == 1
    assert path.stat().st_mtime_ns == before
    compiler.compiled_library(*ARGUMENTS[:-1], torch.float32)
    assert calls() == 2
    assert len(list(cache.iterdir())) == 2


@pytest.mark.slow
@needs_compiler
def test_another_compiler_or_source_is_another_kernel(
    calls: Callable[[], int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compiled_library(*ARGUMENTS)
    for name, value in (("_version", lambda _: "another"), ("_cpu_properties", lambda: "another")):
        compiler.compiled_library.cache_clear()
        monkeypatch.setattr(compiler, name, value)
        compiler.compiled_library(*ARGUMENTS)
    assert calls() == len(list(cache.iterdir())) == 3


@pytest.mark.slow
@needs_compiler
def test_several_at_once(calls: Callable[[], int], cache: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        each = [pool.submit(compiler.compiled_library.__wrapped__, *ARGUMENTS) for _ in range(2)]
        assert len({library.result()._name for library in each}) == 1
    assert 1 <= calls() <= 2
    assert len(list(cache.iterdir())) == 1, "no scratch is left"


def homeless(_: Path) -> Path:
    raise RuntimeError("there is no home")


def test_a_cache_that_cannot_be_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache.mkdir(parents=True)
    assert compiler._cache_folder() == cache
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        assert compiler._cache_folder() is None
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compiler._cache_folder() is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert compiler._cache_folder() is None


@pytest.mark.slow
@needs_compiler
def test_without_a_cache_nothing_is_left(
    calls: Callable[[], int], cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "scratch").mkdir()
    code = (
        "import torch; from bayesify.training.kernel import compiler\n"
        f"compiler.compiled_library({', '.join(map(repr, ARGUMENTS))})\n"
        "from pathlib import Path; import tempfile\n"
        "print(len(list(Path(tempfile.gettempdir()).glob('bayesify-*/*.so'))))"
    )
    places = {"XDG_CACHE_HOME": tmp_path / "file", "TMPDIR": tmp_path / "scratch"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {name: str(path) for name, path in places.items()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert calls() == 1
    assert list((tmp_path / "scratch").iterdir()) == []


@needs_compiler
def test_a_full_disk_is_no_end_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler.tempfile, "TemporaryDirectory", full)
    check_done_without("No space left")


def cut_off(path: Path, size: int) -> None:
    whole = path.read_bytes()
    # Another file: that which this process has open must stay as it is.
    path.unlink()
    path.write_bytes(whole[:size])
    compiler.compiled_library.cache_clear()


@needs_compiler
def test_an_empty_kernel_is_made_anew(calls: Callable[[], int], cache: Path) -> None:
    compiler.compiled_library(*ARGUMENTS)
    cut_off(next(cache.iterdir()), 0)
    compiler.compiled_library(*ARGUMENTS)
    assert calls() == 2


@pytest.mark.slow
@needs_compiler
def test_a_kernel_that_was_cut_off_is_made_anew(calls: Callable[[], int], cache: Path) -> None:
    compiler.compiled_library(*ARGUMENTS)
    cut_off(next(cache.iterdir()), 8000)
    # In another process, as to load a part of a library ends it at once.
    program = (
        "import torch; from bayesify.training.kernel.compiler import compiled_library; "
        f"compiled_library(*{ARGUMENTS!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    assert calls() == 2


@needs_compiler
def test_a_named_step_is_what_was_asked_for() -> None:
    elbo, optimizer = CASE.make()
    assert (
        "compiled (C++; sgd, gaussian prior)" in make_backend(elbo, optimizer, "auto").description
    )
    assert parameter(elbo, "mean").grad is None


def test_a_cache_of_another_user_is_left_alone(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(mode=0o700, parents=True)
    assert compiler._cache_folder() == cache
    monkeypatch.setattr(os, "getuid", lambda: cache.stat().st_uid + 1)
    assert compiler._cache_folder() is None
