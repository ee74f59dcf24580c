"""Experiments on folders that are not as they were left: one clear error, and nothing lost."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.app.cli.test_cli import bayesify
from tests.app.cli.test_errors import check_refused
from tests.killable import Silent3, start, trains
from tests.reproduce.test_experiments import Silent, toy

from bayesify.io import StorageError
from bayesify.reproduce import EXPERIMENTS, Context, Job, reproduce

pytestmark = [
    pytest.mark.filterwarnings("ignore:the posterior's standard deviations"),
    pytest.mark.filterwarnings("ignore:free energy:UserWarning"),
]


@pytest.mark.parametrize("out", ["file", "file/folder"])
def test_a_file_in_the_way_is_named_before_anything_else(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("mine")
    watcher = Silent()
    with pytest.raises(StorageError, match=r"results need a folder, but .*file is a file; .*--out"):
        reproduce(toy(), tmp_path / out, watcher)
    assert watcher.said == []
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '{"experiment": "toy"}'])
def test_a_damaged_result_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "b-seed-0.json").write_text(content)
    watcher = Silent()
    with pytest.raises(StorageError, match=r"b-seed-0\.json .*remove it"):
        reproduce(toy(), tmp_path, watcher)
    assert watcher.said == []  # before anything is run


def test_a_result_without_what_the_table_needs_is_no_traceback(tmp_path: Path) -> None:
    reproduce(toy(), tmp_path, Silent())
    path = tmp_path / "a-seed-1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "metrics": {}}))
    with pytest.raises(StorageError, match=r"lack what the table needs \(KeyError: 'value'\)"):
        reproduce(toy(), tmp_path, Silent())


def test_only_the_setting_that_differs_is_shown(tmp_path: Path) -> None:
    def deep(lr: float) -> Any:
        def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
            return [Job("a", 0, {"size": 1, "settings": {"lr": lr, "long": "x" * 500}}, 1.0)]

        return replace(toy(), jobs=jobs)

    reproduce(deep(0.001), tmp_path, Silent())
    with pytest.raises(
        StorageError, match=r"its config\.settings\.lr must be 0\.002, got 0\.001; choose"
    ) as caught:
        reproduce(deep(0.002), tmp_path, Silent())
    assert "xxx" not in str(caught.value)


def test_beginnings_are_looked_at_before_anything_is_run(tmp_path: Path, epochs_done: Path) -> None:
    assert start(tmp_path, KILL_AT="b 1 3 0").wait() != 0
    for path in tmp_path.glob("*.json"):
        path.unlink()

    def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
        return [Job(name, seed, {"size": 4}, 1.0) for seed in (0, 1) for name in ("a", "b")]

    watcher = Silent3()
    with pytest.raises(StorageError, match=r"b-seed-1/job\.json .* its config\.size must be 4"):
        reproduce(replace(trains(), jobs=jobs), tmp_path, watcher)
    assert watcher.said == []
    assert epochs_done.read_text().count("b 1") == 3


def test_a_damaged_checkpoint_says_what_to_remove(tmp_path: Path, epochs_done: Path) -> None:
    assert start(tmp_path, KILL_AT="a 0 3 0").wait() != 0
    work = tmp_path / ".work" / "a-seed-0"
    (work / "checkpoint.safetensors").write_bytes(b"cut off")
    with pytest.raises(StorageError, match=r"remove .*\.work/a-seed-0, and the same command begin"):
        reproduce(trains(), tmp_path, Silent3())
    assert epochs_done.read_text().count("\n") == 3


def test_the_seconds_are_those_of_all_parts(tmp_path: Path, epochs_done: Path) -> None:
    assert start(tmp_path, KILL_AT="a 0 3 0").wait() != 0
    path = tmp_path / ".work" / "a-seed-0" / "job.json"
    begun = json.loads(path.read_text())
    assert begun["seconds"] > 0.0
    path.write_text(json.dumps({**begun, "seconds": 1000.0}))
    watcher = Silent3()
    [row, *_] = reproduce(trains(), tmp_path, watcher).results
    assert 1000.0 < row["seconds"] < 1100.0
    assert watcher.said[:3] == ["4 of 4", "begin a 0", "0.5"]  # where it goes on
    assert epochs_done.read_text().count("a 0") == 6


def test_the_notes_are_the_same_for_the_first_unit_of_a_process(tmp_path: Path) -> None:
    """Python and PyTorch say some things once a process; a shared run would differ by them."""
    whole = toy()

    def run(job: Job, context: Context) -> dict[str, Any]:
        warnings.warn("worth knowing", UserWarning, stacklevel=1)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        float(torch.ones(1, requires_grad=True))  # once a process
        return whole.run(job, context)

    rows = reproduce(replace(whole, run=run), tmp_path, Silent()).results
    assert [row["notes"] for row in rows] == [["worth knowing"]] * 4


def test_the_list_shows_what_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(EXPERIMENTS, "toy", toy())
    reproduce(toy(), tmp_path / "results" / "toy", Silent())
    (tmp_path / "results" / "toy" / "a-seed-0.json").write_text("{")
    done = bayesify("reproduce", "--list", "--json")
    assert done.code == 0
    [row] = [row for row in json.loads(done.out)["experiments"] if row["name"] == "toy"]
    assert row["stored"] == "3 of 4 in results/toy, 1 damaged or of other settings"
    check_refused(bayesify("reproduce", "toy"), "a-seed-0.json", "remove it")
