"""The database of a search: shared by processes, of another version, or failing."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from tests.app.test_tune import Watching, a_run, searched, with_encoder
from tests.killable import Forked

from bayesify.app.runs import ConfigError, RunError
from bayesify.app.runs.levers import chosen_config


def shared(folder: Path) -> str:
    return f"sqlite:///{folder / 'search.db'}"


def test_runs_with_one_storage_share_a_search(tmp_path: Path) -> None:
    one, data = a_run(tmp_path)
    two = replace(one, folder=tmp_path / "two")
    options = {"storage": shared(tmp_path)}
    _, first = searched(one, data, 3, **options)
    watching = Watching()
    config, found = searched(two, data, 6, progress=watching, **options)
    assert watching.plan is not None
    assert watching.plan.num_done == 3
    assert len(watching.trials) == 3
    assert watching.plan.default not in [values for values, _ in watching.trials]
    assert found["trials"] == 6
    assert found["nll_default"] == first["nll_default"]
    assert found["settings_default"] == first["settings_default"]
    assert found["nll_chosen"] <= first["nll_chosen"]
    assert config == chosen_config(two.config, found["settings_chosen"])
    assert two.tuning() == found
    assert not (two.folder / "tuning.db").exists()
    # Each counts its own time.
    studies = optuna.get_all_study_names(shared(tmp_path))
    (study,) = (optuna.load_study(study_name=name, storage=shared(tmp_path)) for name in studies)
    seconds = [trial.user_attrs["seconds"] for trial in study.trials]
    assert first["seconds"] == pytest.approx(sum(seconds[:3]))
    assert found["seconds"] == pytest.approx(sum(seconds[3:]))


def test_a_storage_has_a_study_for_each_table_and_settings(tmp_path: Path) -> None:
    one, data = a_run(tmp_path)
    searched(one, data, 1, storage=shared(tmp_path))
    # The same table elsewhere joins the study, another setting does not.
    (tmp_path / "elsewhere").mkdir()
    same, _ = a_run(tmp_path / "elsewhere")
    searched(same, data, 1, storage=shared(tmp_path))
    assert len(optuna.get_all_study_names(shared(tmp_path))) == 1
    other = replace(one, config=replace(one.config, seed=1), folder=tmp_path / "other")
    _, found = searched(other, data, 1, storage=shared(tmp_path))
    assert found["trials"] == 1
    assert len(optuna.get_all_study_names(shared(tmp_path))) == 2


def test_a_storage_has_a_study_for_each_encoder_and_images(tmp_path: Path) -> None:
    plain, data = a_run(tmp_path)
    kinds = [{}, {"images": "other"}, {"sha256": "b"}]
    for number, kind in enumerate(kinds):
        run = with_encoder(plain, **{"sha256": "a", **kind})
        run = replace(run, folder=tmp_path / str(number))
        _, found = searched(run, data, 1, storage=shared(tmp_path))
        assert found["trials"] == 1
    assert len(optuna.get_all_study_names(shared(tmp_path))) == len(kinds)


def test_only_the_own_trial_of_a_killed_process_is_given_up(tmp_path: Path) -> None:
    one, data = a_run(tmp_path)
    searched(one, data, 1, storage=shared(tmp_path))
    (name,) = optuna.get_all_study_names(shared(tmp_path))
    study = optuna.load_study(study_name=name, storage=shared(tmp_path))
    for folder in (study.trials[0].user_attrs["folder"], "another:/run"):
        study.ask().set_user_attr("folder", folder)
    searched(one, data, 1, storage=shared(tmp_path))
    states = [trial.state for trial in study.trials]
    assert states == [TrialState.COMPLETE, TrialState.FAIL, TrialState.RUNNING]


@pytest.mark.slow
def test_processes_search_at_the_same_time(tmp_path: Path) -> None:
    def search(name: str) -> None:
        (tmp_path / name).mkdir()
        run, data = a_run(tmp_path / name)
        searched(run, data, 24, storage=shared(tmp_path))

    processes = [Forked(partial(search, name)) for name in ("one", "two")]
    assert [each.wait() for each in processes] == [0, 0]
    (name,) = optuna.get_all_study_names(shared(tmp_path))
    trials = optuna.load_study(study_name=name, storage=shared(tmp_path)).trials
    finished = [each for each in trials if each.state.is_finished()]
    assert 24 <= len(finished) <= 25  # one may have begun when the other ended the last
    assert len({each.user_attrs["folder"] for each in finished}) == 2
    sampled = [str(each.params) for each in finished if not each.user_attrs.get("default")]
    assert len(sampled) == len(set(sampled)) >= 22
    found = [
        json.loads((tmp_path / name / "run" / "tuning.json").read_text()) for name in ("one", "two")
    ]
    best = min(each.value for each in finished if each.value is not None)
    assert best in [each["nll_chosen"] for each in found]


@pytest.mark.parametrize(
    "raised",
    [
        OperationalError("CREATE TABLE studies", {}, Exception("table studies already exists")),
        IntegrityError("INSERT", {}, Exception("UNIQUE constraint failed: alembic_version")),
    ],
    ids=["tables", "version"],
)
def test_a_storage_that_another_process_creates_at_the_same_time(
    tmp_path: Path, raised: SQLAlchemyError, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [raised] * 2

    class Racing(optuna.storages.RDBStorage):
        def __init__(self, *args: Any, **options: Any) -> None:
            if errors:
                raise errors.pop()
            super().__init__(*args, **options)

    monkeypatch.setattr(optuna.storages, "RDBStorage", Racing)
    run, data = a_run(tmp_path)
    searched(run, data, 1, storage=shared(tmp_path))
    assert not errors


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nonsense", "Could not parse"),
        ("sqlite:////nowhere/search.db", "unable to open database file"),
        ("mysql+nodriver://user:secret@host/name", "mysql"),
    ],
)
def test_a_storage_that_cannot_be_opened(tmp_path: Path, url: str, told: str) -> None:
    run, data = a_run(tmp_path)
    with pytest.raises(ConfigError, match="tune-storage must be the URL of a database") as error:
        searched(run, data, 1, storage=url)
    assert told in str(error.value)
    assert "secret" not in str(error.value)
    assert not run.folder.exists()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_database_of_another_version(tmp_path: Path, *, is_shared: bool) -> None:
    run, data = a_run(tmp_path)
    options = {"storage": shared(tmp_path)} if is_shared else {}
    searched(run, data, 1, **options)
    file = tmp_path / "search.db" if is_shared else run.folder / "tuning.db"
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("update alembic_version set version_num = 'v2.6.0.a'")
    where = "tune-storage must be the URL" if is_shared else "tuning.db, the search, must be a file"
    with pytest.raises((ConfigError, RunError), match=f"{where}.*storage upgrade"):
        searched(run, data, 2, **options)


def test_a_database_that_fails_within_a_search(tmp_path: Path) -> None:
    run, data = a_run(tmp_path)
    searched(run, data, 1, storage=shared(tmp_path))
    read_only = f"sqlite:///file:{tmp_path / 'search.db'}?mode=ro&uri=true"
    told = "the database of the search failed: .*readonly database.*; the trials that it holds are"
    with pytest.raises(RunError, match=told):
        searched(run, data, 2, storage=read_only)
