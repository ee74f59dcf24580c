"""Experiments that are killed, stopped or shared: only an epoch is lost, nothing is done twice.

The jobs train a tiny network by ``fit``, as the true experiments do.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from tests.killable import EPOCHS, Silent3, start, trains, without_times
from tests.reproduce.test_experiments import Silent, toy

from bayesify.io import StorageError
from bayesify.reproduce import Context, Job, read_results, reproduce
from bayesify.reproduce.harness.job_runner import JobRunner

pytestmark = [
    pytest.mark.filterwarnings("ignore:the posterior's standard deviations"),
    pytest.mark.filterwarnings("ignore:free energy:UserWarning"),
]


def test_a_killed_run_loses_one_epoch(tmp_path: Path, epochs_done: Path) -> None:
    killed = start(tmp_path / "out", KILL_AT="b 0 4 2")
    assert killed.wait() == -signal.SIGKILL
    assert [row["job"] for row in read_results(tmp_path / "out")] == ["a"]
    kept = tmp_path / "out" / ".work" / "b-seed-0"
    assert {path.name for path in kept.iterdir()} == {"job.json", "checkpoint.safetensors"}
    before = epochs_done.read_text().splitlines()
    assert before[-1] == "b 0 4"  # of the fifth nothing is kept
    epochs_done.write_text("")
    outcome = reproduce(trains(), tmp_path / "out", Silent3())
    again = epochs_done.read_text().splitlines()
    assert again[:2] == ["b 0 5", "b 0 6"]
    assert again[2] == "a 1 1"
    assert not (tmp_path / "out" / ".work").exists()
    whole = reproduce(trains(), tmp_path / "whole", Silent3())
    assert [*map(without_times, outcome.results)] == [*map(without_times, whole.results)]
    assert outcome.table.read_bytes() == whole.table.read_bytes()


def test_processes_share_the_work(tmp_path: Path, epochs_done: Path) -> None:
    both = [start(tmp_path / "out") for _ in range(2)]
    assert [each.wait() for each in both] == [0, 0]
    done = epochs_done.read_text().splitlines()
    assert len(done) == len(set(done)) == 4 * EPOCHS  # none of them twice
    assert not (tmp_path / "out" / ".work").exists()
    whole = reproduce(trains(), tmp_path / "whole", Silent3())
    assert (tmp_path / "out" / "table.md").read_bytes() == whole.table.read_bytes()


def test_another_process_is_waited_for_and_its_death_noticed(
    tmp_path: Path, epochs_done: Path
) -> None:
    out = tmp_path / "out"
    (out / ".work").mkdir(parents=True)
    held = FileLock(out / ".work" / "a-seed-0.lock")
    held.acquire()
    watcher = Silent3()
    worker = threading.Thread(target=reproduce, args=(trains(), out, watcher))
    worker.start()
    for _ in range(600):
        if "wait a 0" in watcher.said:
            break
        time.sleep(0.1)
    assert len(read_results(out)) == 3  # all but that
    assert not (out / "table.md").exists()
    held.release()  # as the system does for a process that ends
    worker.join(timeout=60)
    assert len(read_results(out)) == 4
    assert "a 0 6" in epochs_done.read_text()
    assert (out / "table.md").exists()


def test_a_beginning_of_other_settings_is_not_gone_on_with(
    tmp_path: Path, epochs_done: Path
) -> None:
    assert start(tmp_path, KILL_AT="a 0 3 0").wait() == -signal.SIGKILL
    other = replace(trains(), jobs=lambda seeds, quick: [Job("a", 0, {"size": 4}, 1.0)])  # noqa: ARG005
    with pytest.raises(StorageError, match=r"job\.json holds the beginning .* config\.size must"):
        reproduce(other, tmp_path, Silent3())
    assert epochs_done.read_text().count("\n") == 3


def test_a_beginning_that_goes_away_while_it_is_read_is_none(
    tmp_path: Path, epochs_done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has just ended the job, and removed its folder."""
    assert start(tmp_path, KILL_AT="a 0 3 0").wait() == -signal.SIGKILL
    job = trains().jobs((0,), False)[0]
    runner = JobRunner(trains(), tmp_path, Silent3(), Context(), quick=False)
    assert runner.part_done(job) > 0.0
    path = tmp_path / ".work" / "a-seed-0" / "job.json"
    path.unlink()
    monkeypatch.setattr(Path, "exists", lambda _: True)  # it was there a moment ago
    assert runner.part_done(job) == 0.0
    monkeypatch.undo()
    path.write_text("{")
    with pytest.raises(StorageError, match=r"job\.json cannot be read"):
        runner.part_done(job)


def test_an_earlier_commit_is_noted(
    tmp_path: Path, epochs_done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start(tmp_path, KILL_AT="a 0 3 0").wait() == -signal.SIGKILL
    path = tmp_path / ".work" / "a-seed-0" / "job.json"
    begun = json.loads(path.read_text())["commit"]
    monkeypatch.setattr("bayesify.reproduce.harness.job_runner.commit", lambda: "another")
    first = reproduce(trains(), tmp_path, Silent3()).results[0]
    assert first["commit"] == "another"
    assert f"begun at commit {begun}" in first["notes"]
    assert "a 0 6" in epochs_done.read_text()


def test_notes_and_commits_of_all_parts_are_those_of_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of three parts, each run by another commit, of which the first two are killed."""

    def run(job: Job, context: Context) -> dict[str, Any]:
        assert context.work is not None
        assert context.on_progress is not None
        context.work.mkdir(parents=True, exist_ok=True)
        for part in range(3):
            done = context.work / str(part)
            if done.exists():
                continue
            warnings.warn(f"warning of part {part}", stacklevel=1)
            done.touch()
            context.on_progress((part + 1) / 3)
            if part < 2:
                raise KeyboardInterrupt
        return {"value": 1.0}

    experiment = replace(toy(), run=run, jobs=lambda *_: [Job("a", 0, {}, 1.0)])
    for commit in ("one", "two-dirty", "one"):
        monkeypatch.setattr(
            "bayesify.reproduce.harness.job_runner.commit", lambda found=commit: found
        )
        with contextlib.suppress(KeyboardInterrupt):
            found = reproduce(experiment, tmp_path, Silent()).results
    assert found[0]["commit"] == "one"
    assert found[0]["notes"] == [
        "resumed at commit two-dirty",
        *(f"warning of part {part}" for part in range(3)),
    ]


def test_what_a_finished_unit_left_is_tidied_up(tmp_path: Path, epochs_done: Path) -> None:
    assert start(tmp_path, KILL_AT="a 0 3 0").wait() == -signal.SIGKILL
    kept = tmp_path / ".work" / "a-seed-0"
    moved = kept.rename(tmp_path / "moved")
    reproduce(trains(), tmp_path, Silent3())
    (tmp_path / ".work").mkdir()
    moved.rename(kept)  # as if killed between writing the row and this
    (tmp_path / "b-seed-1.json").unlink()
    reproduce(trains(), tmp_path, Silent3())
    assert not (tmp_path / ".work").exists()
    assert epochs_done.read_text().count("a 0 1") == 2


def test_units_of_other_seeds_are_left_alone(tmp_path: Path, epochs_done: Path) -> None:
    assert start(tmp_path, KILL_AT="a 1 3 0").wait() == -signal.SIGKILL
    reproduce(trains(), tmp_path, Silent3(), seeds=(5,))
    assert (tmp_path / ".work" / "a-seed-1" / "checkpoint.safetensors").exists()
    assert "a 5 6" in epochs_done.read_text()
