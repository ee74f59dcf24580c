"""The lock on a run's folder: one process at a time trains it."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock
from tests.app.cli.test_cli import TINY, as_json, bayesify, contents, read_json
from tests.app.cli.test_errors import check_refused
from tests.training.test_resume import timeless

from bayesify.app.cli.epoch_table import EpochTable
from bayesify.app.runs import RunError

pytestmark = pytest.mark.usefixtures("quick")

#: Takes the lock of the folder that is named, and keeps it.
HOLD = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1] + "/.lock", timeout=0):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def other_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of a folder."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_run_that_is_trained_elsewhere_is_not_resumed(run: Path) -> None:
    with other_process(run) as process:
        before = contents(run)
        said = bayesify("train", "mnist", "--out", run, "--resume", *TINY)
        check_refused(
            said,
            f"another process is training the run in {run}; wait for it, stop it, or choose "
            "another --out",
        )
        assert contents(run) == before
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert (run / ".lock").exists()
    assert bayesify("train", "mnist", "--out", run, "--resume", *TINY).code == 0, "it was killed"
    assert not (run / ".lock").exists()


def test_a_folder_with_the_lock_alone_is_free(tmp_path: Path, finished: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    (place / ".lock").touch()  # of a process that was killed before it wrote the settings
    metrics = as_json("train", "mnist", "--out", place, *TINY)
    assert timeless(metrics) == timeless(read_json(finished / "metrics.json"))
    with other_process(place):
        check_refused(bayesify("train", "mnist", "--out", place, *TINY), "holds another run")


def test_two_new_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with other_process(tmp_path / "run"):
        said = bayesify("train", "mnist", "--out", tmp_path / "run", *TINY)
        check_refused(said, "another process is training the run in")
        assert set(contents(tmp_path / "run")) == {".lock"}


def test_two_runs_without_a_name_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = []

    def reading(*_: object, **__: object) -> None:  # the first has not written anything yet
        found.append(sorted(path.name for path in Path("runs").iterdir()))
        if len(found) == 1:
            bayesify("train", "mnist", *TINY)
        raise RunError("that is all")

    monkeypatch.setattr("bayesify.app.cli.train_command.prepare", reading)
    check_refused(bayesify("train", "mnist", *TINY), "that is all")
    assert found == [["mnist"], ["mnist", "mnist-2"]]
    assert list(tmp_path.iterdir()) == []


def test_the_lock_is_held_from_training_to_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, place = [], tmp_path / "run"

    def is_held() -> bool:
        lock = FileLock(place / ".lock")
        try:
            lock.acquire(timeout=0)
        except TimeoutError:
            return True
        lock.release()
        return False

    right = EpochTable.on_step
    monkeypatch.setattr(
        EpochTable, "on_step", lambda self, **at: (seen.append(is_held()), right(self, **at))[1]
    )
    finishing = importlib.import_module("bayesify.app.runs.finish")
    monkeypatch.setattr(finishing, "build_figures", lambda *_, **__: seen.append(is_held()) or {})
    assert bayesify("train", "mnist", "--out", place, *TINY).code == 0
    assert seen == [True] * 9, "eight steps, and the figures"
    assert not (place / ".lock").exists()
