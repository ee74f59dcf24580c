"""Searching a grid by Optuna's study, without training: the dead, damage, and the figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from tests.test_experiment_grid import states, trials

from bayesify.experiments import Row, Unit
from bayesify.experiments.searching import Point, grid_search
from bayesify.plots.grid import Mark, grid_lines
from bayesify.storage import StorageError


class Desk:
    """Has points done in no time, and counts."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def __call__(self, unit: Unit, *, wait: bool) -> Row | None:
        assert wait
        if unit.name not in self.done:
            self.done.append(unit.name)
        return {"value": float(unit.config["a"])}


def points(*values: float) -> list[Point]:
    return [
        (Unit(f"{a:g}-{b:g}", 0, {"a": a}, 1.0), {"a": a, "b": b})
        for a in values
        for b in (0.1, 0.7)
    ]


def go(folder: Path, given: Sequence[Point]) -> Desk:
    desk = Desk()
    grid_search({"s": given}, folder, desk, lambda row: float(row["value"]))
    return desk


def test_a_process_that_died_before_it_had_its_point(tmp_path: Path) -> None:
    go(tmp_path, points(1.0))  # so that the study is there
    (tmp_path / "journal.log").unlink()
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "journal.log")))
    grid = {"a": [1.0, 3.0], "b": [0.1, 0.7]}
    sampler = optuna.samplers.GridSampler(grid, seed=0)
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name="s", storage=storage, sampler=sampler, direction="maximize"
    )
    optuna.logging.set_verbosity(before)
    study.ask()  # and died
    study.ask().suggest_float("a", 1.0, 3.0)  # and died
    assert len(go(tmp_path, points(1.0, 3.0)).done) == 4
    assert states(tmp_path, "s") == {"FAIL": 2, "COMPLETE": 4}
    done = [t.params for t in trials(tmp_path, "s") if t.state == TrialState.COMPLETE]
    assert sorted((p["a"], p["b"]) for p in done) == [
        (1.0, 0.1),
        (1.0, 0.7),
        (3.0, 0.1),
        (3.0, 0.7),
    ]


def test_a_line_that_was_not_finished_is_cut_off(tmp_path: Path) -> None:
    go(tmp_path, points(1.0, 2.0))
    journal = tmp_path / "journal.log"
    held = journal.read_bytes()
    for cut in (1, len(held) // 2, len(held) - 1):
        journal.write_bytes(held[:cut])
        go(tmp_path, points(1.0, 2.0))
        assert states(tmp_path, "s")["COMPLETE"] == 4, cut


def test_a_process_that_dies_writing_takes_no_other_with_it(tmp_path: Path) -> None:
    class Dying(Desk):
        """Meanwhile another process is killed within a line of the journal."""

        def __call__(self, unit: Unit, *, wait: bool) -> Row | None:
            with (tmp_path / "journal.log").open("ab") as journal:
                journal.write(b'{"op_code":4,"wor')
            return super().__call__(unit, wait=wait)

    desk = Dying()
    grid_search({"s": points(1.0, 2.0)}, tmp_path, desk, lambda row: float(row["value"]))
    assert states(tmp_path, "s") == {"COMPLETE": 4}
    assert sorted(go(tmp_path, points(1.0, 2.0)).done) == sorted(desk.done)


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    go(tmp_path, points(1.0, 2.0))
    journal = tmp_path / "journal.log"
    journal.write_bytes(b"{}\n" + journal.read_bytes())
    with pytest.raises(StorageError, match=r"journal\.log is damaged .*remove it, it is made"):
        go(tmp_path, points(1.0, 2.0))
    journal.unlink()
    go(tmp_path, points(1.0))
    with pytest.raises(StorageError, match="a search of another grid; remove it"):
        go(tmp_path, points(1.0, 2.0))


def test_points_must_be_a_grid(tmp_path: Path) -> None:
    for given in (points(1.0, 2.0)[:3], []):
        with pytest.raises(ValueError, match="must be all combinations of their parameters"):
            go(tmp_path, given)


def test_a_figure_says_what_is_missing() -> None:
    line = [(0.1, 2.0)]
    for panels, message in (
        ({}, "at least one point"),
        ({"p": {"l": []}}, "at least one point"),
        ({"p": {"l": [(0.0, 2.0)]}}, "x must be positive"),
        ({"p": {str(k): line for k in range(6)}}, "at most 5 lines, got 6"),
    ):
        with pytest.raises(ValueError, match=message):
            grid_lines(panels, xlabel="x", ylabel="y")
    drawn = grid_lines({"p": {"l": line}}, [Mark("q", "l", 0.1, 2.0)], xlabel="x", ylabel="y")
    assert len(drawn.axes[0].lines) == 1
