"""``bayesify train --tune``: from the search to the report, its interruption and its errors."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from sqlalchemy.exc import IntegrityError
from tests.app.cli.test_cli import as_json, bayesify
from tests.app.cli.test_errors import check_refused
from tests.tabular.test_training_table import messy

from bayesify.app.cli.formatting import seconds_of
from bayesify.app.cli.tuning_progress import TuningBar

pytestmark = pytest.mark.usefixtures("quick")

TINY = ["--epochs", "2", "--passes", "2", "--test-samples", "3"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    path.write_text(messy(40))
    return path


def train(table: Path, *more: object) -> list[object]:
    return ["train", table, "--target", "price", "--out", table.parent / "run", *TINY, *more]


def test_a_storage_is_for_a_search(table: Path) -> None:
    check_refused(
        bayesify(*train(table, "--tune-storage", "sqlite://")),
        "tune-storage would do nothing without --tune",
    )
    refused = bayesify(*train(table, "--tune", "1s", "--tune-storage", "nonsense"))
    assert refused.code == 2
    assert "tune-storage must be the URL of a database" in refused.err.splitlines()[-1]
    url = f"sqlite:///{table.parent / 'search.db'}"
    metrics = as_json(*train(table, "--tune", "1s", "--tune-storage", url))
    assert metrics["tuning"]["trials"] >= 1
    run = table.parent / "run"
    assert "search.db" not in (run / "config.json").read_text()
    assert not (run / "tuning.db").exists()
    again = bayesify(*train(table, "--tune", "1s", "--tune-storage", url, "--resume"))
    assert again.code == 0, again.err


def test_processes_may_create_the_tables_of_a_storage_at_the_same_time(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [2]

    class Racing(optuna.storages.RDBStorage):
        def __init__(self, *words: Any, **options: Any) -> None:
            left[0] -= 1
            if left[0] >= 0:  # as PostgreSQL tells the second one of two
                raise IntegrityError("CREATE TYPE studydirection", {}, Exception("already exists"))
            super().__init__(*words, **options)

    monkeypatch.setattr(optuna.storages, "RDBStorage", Racing)
    monkeypatch.setattr("time.sleep", lambda _: None)
    url = f"sqlite:///{table.parent / 'search.db'}"
    metrics = as_json(*train(table, "--tune", "1s", "--tune-storage", url))
    assert metrics["tuning"]["trials"] >= 1
    assert left[0] < 0


def test_a_search_ends_in_a_run_of_the_chosen_settings(table: Path) -> None:
    metrics = as_json(*train(table, "--tune", "1s"))
    run = table.parent / "run"
    found = metrics["tuning"]
    assert found == json.loads((run / "tuning.json").read_text())
    assert found == json.loads((run / "metrics.json").read_text())["tuning"]
    assert found["nll_chosen"] <= found["nll_default"]
    document = json.loads((run / "config.json").read_text())
    settings, chosen = document["settings"], found["settings_chosen"]
    assert settings["hidden"] == [chosen["units"]] * chosen["layers"]
    assert {name: settings[name] for name in ("lr", "prior_std", "noise", "relevance")} == {
        name: chosen[name] for name in ("lr", "prior_std", "noise", "relevance")
    }
    assert settings["epochs"] == 2
    assert settings["temperature"] == 1.0
    assert "settings chosen among" in (run / "report.html").read_text()
    # The stored command trains the chosen settings without a search.
    assert "--tune" not in document["command"]
    # Nothing is searched again in a finished run.
    again = bayesify(*train(table, "--tune", "1s", "--resume"))
    assert again.code == 0, again.err
    assert "tuning for" not in again.err


def test_ctrl_c_names_the_command_that_resumes(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        steps = iter(range(10**6))

        def stop(_: Any, seconds: float) -> None:
            if next(steps) == 15:
                raise KeyboardInterrupt

        patch.setattr(TuningBar, "on_step", stop)
        stopped = bayesify(*train(table, "--tune", "2h"))
    assert stopped.code == 130
    assert "a trial trains for about" in stopped.err
    line = next(each for each in stopped.err.splitlines() if each.startswith("stopped; "))
    command = shlex.split(line.partition("resume with: ")[2])
    assert command[-3:] == ["--tune", "2h", "--resume"]
    fresh = bayesify(*train(table, "--tune", "2h"))
    check_refused(fresh, "an unfinished search of settings", "the same command and --resume")
    resumed = bayesify(*command[1:], "--tune", "0.01s")
    assert resumed.code == 0, resumed.err
    assert "resuming the search after 1 trial" in resumed.err
    assert "nothing to resume" not in resumed.err


@pytest.mark.parametrize(
    ("rows", "settings"),
    [(40, ["--passes", "1"]), (700, ["--kl-warmup", "0.0"])],
)
def test_the_command_that_resumes_has_what_was_given_alone(
    rows: int, settings: list[str], table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs and passes are of the number of rows, and epochs are searched."""

    def stop(_: Any, seconds: float) -> None:
        raise KeyboardInterrupt

    table.write_text(messy(rows))
    monkeypatch.setattr(TuningBar, "on_step", stop)
    given = ["--target", "price", "--out", str(table.parent / "run"), *settings]
    stopped = bayesify("train", table, *given, "--tune", "2h")
    assert stopped.code == 130
    command = shlex.split(stopped.err.rpartition("resume with: ")[2].splitlines()[0])
    assert sorted(command) == sorted(
        ["bayesify", "train", str(table), *given, "--tune", "2h", "--resume"]
    )
    assert bayesify(*command[1:]).code == 130


@pytest.mark.parametrize("text", ["30", "m", "-3m", "0s", "3 days", "1e3s", "nan"])
def test_a_time_of_another_form(table: Path, text: str) -> None:
    said = bayesify(*train(table, f"--tune={text}"))
    check_refused(said, "tune must be a time such as 90s, 30m or 2h", text)
    assert not (table.parent / "run").exists()


def test_times() -> None:
    assert [seconds_of(text) for text in ("90s", "30m", "2h", "0.5m")] == [90, 1800, 7200, 30]


def test_runs_without_a_search(table: Path, tmp_path: Path) -> None:
    images = bayesify("train", "mnist", "--out", tmp_path / "images", "--tune", "1s")
    check_refused(images, "tune is for tables")
    check_refused(bayesify(*train(table, "--tune", "1s", "--baseline", "sgd")), "leave --baseline")


def test_without_optuna(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bayesify.app.runs.tune", "bayesify.app.runs.levers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(sys.modules, "bayesify.app.cli.tuning_progress", raising=False)
    for name in ("optuna", "optuna.distributions"):
        monkeypatch.setitem(sys.modules, name, None)
    said = bayesify(*train(table, "--tune", "1s"))
    assert said.code == 2
    assert "pip install 'bayesify[tune]'" in said.err
    assert not (table.parent / "run").exists()
