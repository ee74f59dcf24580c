"""Rahmanto's grid: shared, killed and resumed; its table, figure and Optuna study."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from matplotlib.figure import Figure
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from tests.app.cli.test_cli import as_json
from tests.killable import Forked
from tests.reproduce.test_experiments import Silent

from bayesify.reproduce import (
    Job,
    Result,
    find_experiment,
    read_results,
    reproduce,
)
from bayesify.reproduce.harness import image_runs
from bayesify.reproduce.papers.rahmanto import prior_grid as grid

EXPERIMENT = find_experiment("rahmanto-grid")
EPOCHS = 4
STUDY = "rahmanto-grid-quick-seed-0"


class Quiet(Silent):
    """Whose rows have other metrics."""

    def on_done(self, job: Job, row: Result) -> None:
        self.said.append(f"end {job.name} {row['seconds']:.0f}")

    def begun(self) -> list[str]:
        return [said.split()[1] for said in self.said if said.startswith("begin")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a quick run by one process."""
    out = tmp_path_factory.mktemp("whole") / "out"
    before = optuna.logging.get_verbosity()
    outcome = reproduce(EXPERIMENT, out, Quiet(), quick=True)
    assert optuna.logging.get_verbosity() == before
    assert outcome.files == [out / "grid.csv"]
    assert not (out / ".work").exists()
    return out


def of(folder: Path) -> dict[str, Any]:
    """All that must be the same in two folders: table, CSV, and the rows but for times and load.

    And but for the commit, which a developer may have made meanwhile.
    """
    other = ("seconds", "load", "commit")
    rows = [{key: row[key] for key in row if key not in other} for row in read_results(folder)]
    return {"rows": rows} | {n: (folder / n).read_text() for n in ("table.md", "grid.csv")}


def trials(folder: Path, study: str = STUDY) -> list[optuna.trial.FrozenTrial]:
    storage = JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    return optuna.load_study(study_name=study, storage=storage).get_trials()


class Counting(image_runs.EpochProgress):
    """Writes a line for each epoch that was trained, and may end the process in the middle."""

    def on_epoch(self, row: Any) -> None:
        super().on_epoch(row)
        work = self._context.work
        assert work is not None
        with Path(os.environ["EPOCHS_DONE"]).open("a") as file:
            file.write(f"{work.name} {row['epoch']}\n")

    def on_step(self, *, epoch: int, batch: int) -> None:
        super().on_step(epoch=epoch, batch=batch)
        done = Path(os.environ["EPOCHS_DONE"]).read_text().count("\n")
        if done == int(os.environ.get("KILL_AFTER", -1)) and batch == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def start(out: Path, done: Path, **environment: str) -> Forked:
    def run() -> None:
        image_runs.EpochProgress = Counting  # type: ignore[misc]
        reproduce(EXPERIMENT, out, Quiet(), quick=True)

    done.touch()
    return Forked(run, EPOCHS_DONE=str(done), **environment)


def test_a_quick_run_is_a_study(whole: Path) -> None:
    found = trials(whole)
    assert [trial.state for trial in found] == [TrialState.COMPLETE] * 4
    rows = read_results(whole)
    assert sorted(trial.value or 0.0 for trial in found) == sorted(
        row["metrics"]["validation"]["accuracy"] for row in rows
    )
    assert all(row["quick"] and row["metrics"]["num_validation"] == 500 for row in rows)
    assert all(row["metrics"]["validation"]["accuracy"] > 70.0 for row in rows)
    assert not any("optuna" in note.lower() for row in rows for note in row["notes"])


@pytest.mark.slow
def test_two_processes_share_the_points(whole: Path, tmp_path: Path) -> None:
    out, done = tmp_path / "out", tmp_path / "epochs"
    both = [start(out, done) for _ in range(2)]
    assert [each.wait() for each in both] == [0, 0]
    lines = done.read_text().splitlines()
    assert len(lines) == len(set(lines)) == 4 * EPOCHS  # no epoch twice
    assert len(trials(out)) == 4  # no point twice
    assert of(out) == of(whole)  # in another order, by other processes: only times differ
    assert not (out / ".work").exists()


@pytest.mark.slow
def test_a_killed_process_loses_one_epoch(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, done = tmp_path / "out", tmp_path / "epochs"
    assert start(out, done, KILL_AFTER=str(EPOCHS + 2)).wait() == -signal.SIGKILL
    assert len(read_results(out)) == 1
    assert not (out / "journal.log").exists()
    monkeypatch.setenv("EPOCHS_DONE", str(done))
    monkeypatch.setattr(image_runs, "EpochProgress", Counting)
    reproduce(EXPERIMENT, out, Quiet(), quick=True)
    lines = done.read_text().splitlines()
    assert len(lines) == len(set(lines)) == 4 * EPOCHS  # nothing of the third epoch was kept
    assert lines[EPOCHS + 2].endswith(" 3")
    assert lines[EPOCHS + 2].split()[0] == lines[EPOCHS].split()[0]  # the same point, at once
    assert of(out) == of(whole)
    assert [trial.state for trial in trials(out)] == [TrialState.COMPLETE] * 4


@pytest.mark.slow
def test_the_journal_is_made_from_the_results(whole: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    before = (out / "journal.log").read_bytes()
    reproduce(EXPERIMENT, out, Quiet(), quick=True)
    assert (out / "journal.log").read_bytes() == before  # nothing was missing
    (out / "journal.log").write_bytes(before.replace(b"-seed-0", b"-seed-7"))
    reproduce(EXPERIMENT, out, Quiet(), quick=True)  # a seed of it was missing
    assert len(trials(out)) == 4
    (out / "journal.log").write_text("damaged")
    gone = sorted(out.glob("*-seed-0.json"))[1]
    gone.unlink()
    watcher = Quiet()
    reproduce(EXPERIMENT, out, watcher, quick=True)
    assert watcher.begun() == [gone.name.removesuffix("-seed-0.json")]
    assert len(trials(out)) == 4
    assert of(out) == of(whole)
    (out / "journal.log").unlink()
    reproduce(EXPERIMENT, out, Quiet(), quick=True)
    assert len(trials(out)) == 4


@pytest.mark.slow
def test_a_point_that_was_found_apart_enters_the_journal(whole: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    lines = (out / "journal.log").read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if line.startswith('{"op_code":4,'))
    (out / "journal.log").write_text("".join(lines[:last]))
    assert len(trials(out)) == 3
    reproduce(EXPERIMENT, out, Quiet(), quick=True)
    assert len(trials(out)) == 4


def test_without_optuna(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "bayesify.reproduce.harness.optuna_study")
    with pytest.raises(ImportError, match=r"run pip install 'bayesify\[tune\]'"):
        reproduce(EXPERIMENT, tmp_path / "new", Quiet(), quick=True)
    assert not read_results(tmp_path / "new")
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    (out / "table.md").unlink()
    reproduce(EXPERIMENT, out, Quiet(), quick=True)  # nothing is missing
    assert of(out) == of(whole)


@pytest.mark.slow
def test_experiments_do_not_load_optuna() -> None:
    code = "import sys, bayesify.reproduce, bayesify.app.cli; sys.exit('optuna' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_command_names_its_files(whole: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    found = as_json("reproduce", "rahmanto-grid", "--quick", "--out", out)
    assert found["files"] == [str(out / "grid.csv")]
    assert {line["quick"] for line in csv_of((out / "grid.csv").read_text())} == {"true"}


def test_the_grid_is_the_documents() -> None:
    made = EXPERIMENT.jobs((0,), False)
    assert len({job.file_name for job in made}) == 24
    places = {grid._place(job.config) for job in made}
    assert set(grid.REPORTED) < places
    assert {place.sigma2 for place in places} >= {0.1, 1e-4}
    assert EXPERIMENT.seconds() <= 35 * 60


def rows_of(*accuracies: float) -> list[Result]:
    """Made-up rows of the first points: of each its accuracy."""
    made = []
    for job, accuracy in zip(EXPERIMENT.jobs((0,), False), accuracies, strict=False):
        validation = {"accuracy": accuracy, "accuracy_mean_weights": accuracy - 1.0, "nll": 0.5}
        metrics = {"validation": validation, "num_validation": 10_000}
        config = json.loads(json.dumps(job.config))
        made.append({"quick": False, "seed": 0, "config": config, "metrics": metrics})
    return made


def csv_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_table_sets_ours_beside_the_reported() -> None:
    text = grid.table(rows_of(*(90.0 + place / 4 for place in range(24))))
    # The fifth point is pi 0.25, sigma1 1, sigma2 e^-8.
    assert "| 0.25 | 1 | 0.000335 | 97.95 | 91.00 | 90.00 | 0.5000 | 20 |" in text
    assert "of 24 that are done" in text
    best = text.split("Our four best.")[1].split("On 10,000")[0].strip().splitlines()[2:]
    assert [line.split(" | ")[3] for line in best] == ["95.75", "95.50", "95.25", "95.00"]
    assert f"standard error of {math.sqrt(95.75 * 4.25 / 10_000):.2f} by itself" in text
    assert len(text.split("The whole grid.")[1].strip().splitlines()) == 2 + 24


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_part_of_the_rows_is_a_table(count: int) -> None:
    rows = rows_of(*[97.0] * count)
    text = grid.table(rows)
    assert f"of {count} that are done" in text
    assert ("| 0.25 | 0.368 | 0.00248 | 97.88 | - | - | - | - |") in text
    assert len(csv_of(grid.files(rows)["grid.csv"])) == count
    for figure in grid.figures(rows).values():
        figure.savefig(io.BytesIO(), format="png")
    assert len(grid.figures(rows)) == (count > 0)


def test_the_csv_has_a_line_a_point() -> None:
    lines = csv_of(grid.files(rows_of(97.0, 98.0))["grid.csv"])
    small, large = lines  # of sigma2
    assert [float(line["sigma2"]) for line in lines] == pytest.approx([math.exp(-4.0), 0.1], 1e-5)
    assert (large["validation_accuracy_averaged"], small["validation_accuracy_averaged"]) == (
        "97",
        "98",
    )
    assert small["validation_accuracy_mean_weights"] == "97"
    assert (small["pi"], small["sigma1"], small["quick"]) == ("0.25", "1", "false")


def test_the_figure_marks_what_was_reported() -> None:
    figure: Figure = grid.figures(rows_of(*[97.0] * 24))["rahmanto-grid"]
    left, right = figure.axes
    assert [ax.get_title(loc="left") for ax in (left, right)] == ["pi = 0.25", "pi = 0.5"]
    assert (len(left.lines), len(right.lines)) == (2 + 4, 2)
    assert left.lines[2].get_ydata() == pytest.approx([2.05])
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["sigma1 = 1", "sigma1 = 0.368", "reported"]
