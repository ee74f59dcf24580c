"""What else runs on the machine: rounds are taken again, rows are marked, files are refused."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.app.bench.conftest import Disturbances
from tests.app.bench.test_bench import ASKED, TINY
from tests.app.cli.test_cli import bayesify

from bayesify.app.bench import Group, cases, measure, measuring, timing
from bayesify.app.bench.contestants import Contestant, contestants_of
from bayesify.app.bench.disturbance import Watch, is_unsteady
from bayesify.app.cli import bench_command


def counted(monkeypatch: pytest.MonkeyPatch, disturbed: int) -> tuple[timing.Entrant, int]:
    """Five rounds with some blocks disturbed: the entrant, and the number of its steps."""
    monkeypatch.setattr(timing, "Watch", Disturbances(disturbed))
    steps: list[None] = []
    step = lambda: steps.append(None)  # noqa: E731
    entrant = timing.Entrant(Contestant("a", "none", "none", lambda: step), step)
    timing.take_turns([entrant], rounds=5, turn=timing.Turn(0, 1))
    return entrant, len(steps)


@pytest.mark.parametrize(
    ("disturbed", "steps", "marked"), [(0, 5, 0), (3, 8, 0), (5, 10, 0), (7, 10, 2), (99, 10, 5)]
)
def test_disturbed_rounds_are_taken_again(
    disturbed: int, steps: int, marked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    entrant, count = counted(monkeypatch, disturbed)
    assert len(entrant.times) == 5
    assert (count, entrant.disturbed) == (steps, marked)


def test_the_rounds_that_are_kept_are_those_of_a_quiet_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "Watch", Disturbances(2))
    numbers = iter(range(100))
    monkeypatch.setattr(timing.Turn, "take", lambda *_: float(next(numbers)))
    entrant = timing.Entrant(Contestant("a", "none", "none", lambda: lambda: None), lambda: None)
    timing.take_turns([entrant], rounds=3, turn=timing.Turn(0, 1))
    assert entrant.times == [2.0, 3.0, 4.0]


def test_rows_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(TINY, 16, contestants_of(TINY, 16)[:1], with_floor=False)
    [row] = measure([group], rounds=2).rows
    assert (row["rounds_disturbed"], row["disturbed"]) == (0, False)
    monkeypatch.setattr(timing, "Watch", Disturbances(99))
    [row] = measure([group], rounds=2).rows
    assert (row["rounds_disturbed"], row["disturbed"]) == (2, True)
    monkeypatch.setattr(timing, "Watch", Disturbances())
    monkeypatch.setattr(measuring, "is_unsteady", lambda *_: True)
    [row] = measure([group], rounds=2).rows
    assert (row["rounds_disturbed"], row["disturbed"]) == (0, True)


def test_a_plain_network_varies_by_less_than_a_quarter() -> None:
    assert not is_unsteady(1.0, 0.24)
    assert is_unsteady(1.0, 0.26)


def test_a_busy_process_is_noticed() -> None:
    with subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"],
                          stdout=subprocess.PIPE) as busy:  # fmt: skip
        assert busy.stdout is not None
        busy.stdout.readline()
        watch = Watch()
        while watch.seconds < 0.5:
            time.sleep(0.01)
        others, seconds, disturbed = watch.others, watch.seconds, watch.is_disturbed
        busy.kill()
    assert disturbed
    assert others > 0.3 * seconds


def test_ones_own_work_is_no_disturbance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which this process alone is at work: 2 s by a clock that the test sets."""
    machine = psutil.cpu_times()
    process = psutil.Process().cpu_times()
    work = [0.0, 0.0]  # of this process, of others

    def of_machine() -> object:
        return machine._replace(user=machine.user + sum(work), idle=machine.idle + 9.0)

    monkeypatch.setattr(psutil, "cpu_times", of_machine)
    monkeypatch.setattr(
        psutil.Process, "cpu_times", lambda _: process._replace(user=process.user + work[0])
    )
    watch = Watch()
    work[0] = 2.0
    assert watch.others == pytest.approx(0.0, abs=1e-6)
    assert not watch.is_disturbed
    work[1] = 0.5
    assert watch.others == pytest.approx(0.5)
    assert watch.is_disturbed


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 99])
def test_a_busy_machine_is_named_at_the_start(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CASES", {ASKED.name: ASKED})
    monkeypatch.setattr(bench_command, "Watch", Disturbances(count))
    said = bayesify("bench", "--threads", "1", "--steps", "1")
    assert said.code == 0
    assert ("other programs use the CPU" in said.err) == (count > 0)


@pytest.mark.slow
def test_disturbed_rows_are_not_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cases, "CASES", {ASKED.name: ASKED})
    monkeypatch.setattr(timing, "Watch", Disturbances(10_000))
    out = tmp_path / "cpu.json"
    asked = ("bench", "--threads", "1", "--steps", "1", "--uncommitted", "--out", out)
    said = bayesify(*asked)
    assert said.code == 2
    assert "rows were disturbed: others used the CPU" in said.out
    assert "nothing was stored: rows were disturbed; end other programs" in said.err
    assert not out.exists()
    assert bayesify(*asked, "--store-disturbed").code == 0
    document = json.loads(out.read_text())
    assert all(row["disturbed"] for row in document["metrics"]["rows"])
    assert "others used the CPU" in document["notes"][-1]
    assert bayesify(*asked[:-3]).code == 0, "only a file is refused"
