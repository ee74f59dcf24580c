"""The search of a table's settings: training rows only, not worse than the defaults, resumable."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import torch
from tests.killable import Forked

from bayesify.app.runs import ConfigError, Run, RunConfig, RunError
from bayesify.app.runs.levers import chosen_config, levers
from bayesify.app.runs.tune import Plan, tune, validation_parts
from bayesify.tabular.columns import ImageColumn
from bayesify.tabular.table_data import TableData
from bayesify.tabular.training_table import fit_table

tune_module = sys.modules["bayesify.app.runs.tune"]

#: Settings of a run of milliseconds, which a search keeps.
TINY: dict[str, Any] = {"epochs": 2, "passes": 2, "test_samples": 3}
ALWAYS = 1e6
LEVERS = {"hidden", "lr", "epochs", "prior_std", "noise", "relevance"}


def a_run(folder: Path, task: str = "regression", **given: Any) -> tuple[Run, TableData]:
    """A run on a small table that was not created yet, and its data."""
    drawn = torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = [
        f"{a:.4f},{b:.4f},{a + 0.1 * b:.4f}" if task == "regression" else f"{a:.4f},{b:.4f},{a > 0}"
        for a, b in drawn.tolist()
    ]
    path = folder / "table.csv"
    path.write_text("\n".join(["a,b,y", *rows]) + "\n")
    data, schema = fit_table(path, "y")
    config = RunConfig.of(
        str(path), num_rows=len(data.train_targets), target="y", task=task, **{**TINY, **given}
    )
    return Run(folder / "run", config, None, schema), data


class Watching:
    """Remembers what a search reports, and may stop it at a step of a trial."""

    def __init__(self, stop: Callable[[int], None] | None = None, at: tuple[int, int] = (-1, -1)):
        self.plan: Plan | None = None
        self.trials: list[tuple[dict[str, Any], float | None]] = []
        self._stop, self._at, self._step = stop, at, 0

    def on_start(self, plan: Plan) -> None:
        self.plan = plan

    def on_step(self, seconds: float) -> None:
        assert seconds >= 0.0
        if self._stop is not None and (len(self.trials), self._step) == self._at:
            self._stop(len(self.trials))
        self._step += 1

    def on_trial(
        self, number: int, values: dict[str, Any], nll: float | None, best: float | None
    ) -> None:
        assert self.plan is not None
        assert number == self.plan.num_done + len(self.trials)
        assert best is not None
        self.trials.append((values, nll))
        self._step = 0


def searched(run: Run, data: TableData, trials: int, **options: Any) -> tuple[RunConfig, Any]:
    return tune(run, data, given=tuple(TINY), seconds=ALWAYS, max_trials=trials, **options)


def timeless(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in summary.items() if name != "seconds"}


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_the_chosen_settings_are_the_best_trial_s(tmp_path: Path, task: str) -> None:
    run, data = a_run(tmp_path, task)
    watching = Watching()
    config, found = searched(run, data, 4, progress=watching)
    nlls = [nll for _, nll in watching.trials if nll is not None]
    values, default = watching.trials[0]
    assert values == found["settings_default"]
    assert chosen_config(run.config, values) == run.config
    assert found["trials"] == len(watching.trials) == 4
    assert found["nll_default"] == default
    assert found["nll_chosen"] == min(nlls) <= found["nll_default"]
    assert watching.trials[found["chosen_trial"]] == (
        found["settings_chosen"],
        found["nll_chosen"],
    )
    assert config == chosen_config(run.config, found["settings_chosen"])
    changed = {name for name, value in vars(config).items() if value != vars(run.config)[name]}
    assert changed <= LEVERS - set(TINY)
    assert config.temperature == 1.0
    assert found["validation_rows"] == len(data.train_targets)
    assert run.tuning() == found


def test_the_nll_of_trial_0_is_that_of_its_parts_by_hand(tmp_path: Path) -> None:
    # Each part's rows are predicted by a network of the other rows, in the target's own unit.
    from bayesify.app.runs.measure import evaluate
    from bayesify.app.runs.train import fit_network, make_elbo

    run, data = a_run(tmp_path)
    _, found = searched(run, data, 1)
    total = 0.0
    for kept, held in validation_parts(len(data.train_targets), run.config.seed):
        assert not set(kept.tolist()) & set(held.tolist())
        part = replace(
            data,
            train_inputs=data.train_inputs[kept],
            train_targets=data.train_targets[kept],
            test_inputs=data.train_inputs[held],
            test_targets=data.train_targets[held],
        )
        elbo = make_elbo(run.make_module(), run.config, part)
        with pytest.warns():  # of so few steps
            fit_network(elbo, run.config, part, callback=tune_module._Steps(lambda: None))
        measured, _ = evaluate(elbo.bnn, part, num_samples=3, with_train=False)
        total += measured["test"]["nll"] * len(held)
    assert found["nll_default"] == pytest.approx(total / len(data.train_targets), rel=1e-6)


@pytest.mark.parametrize("rise", [0.0, 1.0])
def test_the_default_stays_if_nothing_beats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rise: float
) -> None:
    run, data = a_run(tmp_path)
    calls = iter(range(1000))

    def worse(*_: Any, **__: Any) -> Any:
        return {"test": {"nll": rise * (next(calls) // 3)}}, None

    monkeypatch.setattr(tune_module, "evaluate", worse)
    config, found = searched(run, data, 3)
    assert config == run.config
    assert found["chosen_trial"] == 0
    assert found["settings_chosen"] == found["settings_default"]


def check_test_rows_unused(search: Callable[[Run, TableData], Any], place: Path) -> None:
    results = []
    for factor in (1.0, -2.0):
        folder = place / f"{factor}"
        folder.mkdir()
        run, data = a_run(folder)
        other = replace(data, test_targets=factor * data.test_targets)
        results.append(timeless(search(run, other)[1]))
    assert results[0] == results[1]


def test_test_rows_are_not_used(tmp_path: Path) -> None:
    check_test_rows_unused(lambda run, data: searched(run, data, 2), tmp_path)


def test_the_use_of_test_rows_is_noticed(tmp_path: Path) -> None:
    def leaking(run: Run, data: TableData) -> Any:
        inputs = torch.cat([data.train_inputs, data.test_inputs])
        targets = torch.cat([data.train_targets, data.test_targets])
        distances = torch.cat([data.train_distances, data.test_distances])
        leaked = replace(
            data, train_inputs=inputs, train_targets=targets, train_distances=distances
        )
        return searched(run, leaked, 1)

    with pytest.raises(AssertionError):
        check_test_rows_unused(leaking, tmp_path)


def test_rows_outside_are_those_of_the_part(tmp_path: Path) -> None:
    # How far a row lies outside goes with the row, in each part of the training rows.
    _, data = a_run(tmp_path)
    far = torch.full_like(data.test_distances, torch.inf)
    found = []
    for name, distances in (("near", data.test_distances), ("far", far)):
        (tmp_path / name).mkdir()
        run, _ = a_run(tmp_path / name)
        _, summary = searched(run, replace(data, test_distances=distances), 1)
        found.append(summary["nll_default"])
    assert found[0] == found[1]
    (tmp_path / "train").mkdir()
    run, _ = a_run(tmp_path / "train")
    distances = torch.zeros_like(data.train_distances)
    distances[-1] = torch.inf
    _, summary = searched(run, replace(data, train_distances=distances), 1)
    assert summary["nll_default"] != found[0]


def interrupt(_: int) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Watching, dict[str, Any]]:
    """A search of three trials: what it reports, and its summary."""
    run, data = a_run(tmp_path_factory.mktemp("undisturbed"))
    watching = Watching()
    _, summary = searched(run, data, 3, progress=watching)
    return watching, summary


@pytest.mark.parametrize("at", [(0, 3), (1, 5)])
def test_an_interrupted_search_resumes_as_if_it_had_not_been(
    undisturbed: tuple[Watching, dict[str, Any]], tmp_path: Path, at: tuple[int, int]
) -> None:
    watching, expected = undisturbed
    run, data = a_run(tmp_path)
    before = Watching(interrupt, at)
    with pytest.raises(KeyboardInterrupt):
        searched(run, data, 3, progress=before)
    after = Watching()
    _, found = searched(run, data, 3, progress=after)
    assert after.plan is not None
    assert after.plan.num_done == len(before.trials) == at[0]
    assert before.trials + after.trials == watching.trials
    assert timeless(found) == timeless(expected)


@pytest.mark.slow
def test_a_killed_search_resumes(
    undisturbed: tuple[Watching, dict[str, Any]], tmp_path: Path
) -> None:
    _, expected = undisturbed
    run, data = a_run(tmp_path)

    def kill(_: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    killed = Forked(lambda: searched(run, data, 3, progress=Watching(kill, (1, 4))))
    assert killed.wait() == -signal.SIGKILL
    watching = Watching()
    _, found = searched(run, data, 3, progress=watching)
    assert len(watching.trials) == 2
    assert timeless(found) == timeless(expected)


def test_the_budget_ends_a_search_and_the_first_trial_is_finished(tmp_path: Path) -> None:
    run, data = a_run(tmp_path)
    config, found = tune(run, data, given=tuple(TINY), seconds=1e-6)
    assert found["trials"] == 1
    assert config == run.config


def test_a_later_trial_is_given_up_when_the_budget_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, data = a_run(tmp_path)
    # A clock that advances by one second at each look: one a step, one as a trial ends, and one
    # before the next.
    clock = iter(float(second) for second in range(10**6))
    monkeypatch.setattr(tune_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    steps = 3 * TINY["epochs"] * TINY["passes"]
    _, found = tune(run, data, given=tuple(TINY), seconds=steps + 5.0)
    assert found["trials"] == 1
    assert found["seconds"] > steps + 5.0
    storage = optuna.storages.RDBStorage(f"sqlite:///{run.folder / 'tuning.db'}")
    study = optuna.load_study(study_name="tune", storage=storage)
    assert study.trials[-1].state.name == "FAIL"
    assert study.trials[-1].user_attrs["error"] == "the budget ended"
    storage.remove_session()
    storage.engine.dispose()


def test_the_time_between_two_trials_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, data = a_run(tmp_path)
    now = [0.0]
    monkeypatch.setattr(tune_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(Watching):
        def on_trial(self, *told: Any) -> None:
            super().on_trial(*told)
            now[0] += 100.0

    _, found = tune(run, data, given=tuple(TINY), seconds=150.0, max_trials=5, progress=Slow())
    assert (found["trials"], found["seconds"]) == (2, 100.0)


def test_a_search_of_another_table_or_other_settings_is_not_resumed(tmp_path: Path) -> None:
    run, data = a_run(tmp_path)
    searched(run, data, 1)
    other = replace(run, config=replace(run.config, batch_size=16))
    with pytest.raises(RunError, match=r"a search with other settings; resume it with the same"):
        searched(other, data, 2)
    path = tmp_path / "table.csv"
    path.write_text(path.read_text() + "0.1,0.2,0.3\n")
    changed, schema = fit_table(path, "y")
    with pytest.raises(RunError, match=r"a search with other table"):
        searched(replace(run, table=schema), changed, 2)


def with_encoder(run: Run, sha256: str, reader_sha256: str = "r", images: str = "i") -> Run:
    """The run with a column that an encoder reads, though without inputs."""
    assert run.table is not None
    digests = {"sha256": sha256, "reader_sha256": reader_sha256}
    column = ImageColumn(name="path", encoder="encoder", size=0, **digests)
    columns = (*run.table.columns, column)
    source = {**run.table.source, "images": images}
    return replace(run, table=replace(run.table, columns=columns, source=source))


def test_a_search_with_another_encoder_is_not_resumed(tmp_path: Path) -> None:
    run, data = a_run(tmp_path)
    searched(with_encoder(run, "a"), data, 1)
    for other in (with_encoder(run, "b"), with_encoder(run, "a", "another tokenizer")):
        with pytest.raises(RunError, match=r"a search with other encoder; resume it with the same"):
            searched(other, data, 2)
    with pytest.raises(RunError, match=r"a search with other table; resume it with the same"):
        searched(with_encoder(run, "a", images="other"), data, 2)
    (tmp_path / "old").mkdir()
    old, data = a_run(tmp_path / "old")
    searched(with_encoder(old, "a"), data, 1)
    with sqlite3.connect(old.folder / "tuning.db") as database:  # as earlier versions wrote it
        database.execute("DELETE FROM study_user_attributes WHERE key = 'encoder'")
    _, found = searched(with_encoder(old, "a"), data, 2)
    assert found["trials"] == 2


def test_a_setting_that_is_searched_is_not_given_later(tmp_path: Path) -> None:
    run, data = a_run(tmp_path)
    searched(run, data, 1)
    with pytest.raises(RunError, match=r"a search with other settings; resume it with the same"):
        tune(run, data, given=(*TINY, "lr"), seconds=ALWAYS, max_trials=2)
    given = (*TINY, "seed", "batch_size")  # which no search varies
    _, found = tune(run, data, given=given, seconds=ALWAYS, max_trials=2)
    assert found["trials"] == 2


def test_given_settings_are_not_searched(tmp_path: Path) -> None:
    run, _ = a_run(tmp_path)
    assert set(levers(run.config, ())) == {
        "units", "layers", "lr", "epochs", "prior_std", "noise", "relevance"
    }  # fmt: skip
    assert set(levers(run.config, ("hidden", "lr"))) == {
        "epochs", "prior_std", "noise", "relevance"
    }  # fmt: skip
    classes, _ = a_run(tmp_path, "classification")
    assert "noise" not in levers(classes.config, ())
    mixture, _ = a_run(tmp_path, prior="scale-mixture")
    assert "prior_std" not in levers(mixture.config, ())
    pruned = replace(run.config, prune_fraction=0.5, backend="auto")
    counted = replace(pruned, prune_until=1.5)
    assert "epochs" not in levers(counted, ("prune_fraction", "prune_until"))
    assert "epochs" in levers(pruned, ("prune_fraction",))


def test_nothing_to_search(tmp_path: Path) -> None:
    run, data = a_run(tmp_path)
    with pytest.raises(ConfigError, match="nothing to search"):
        tune(run, data, given=(*TINY, *LEVERS), seconds=1.0)
    assert not run.folder.exists()


def test_too_few_rows() -> None:
    with pytest.raises(ConfigError, match=r"at least 20 training rows.*got 19"):
        validation_parts(19, seed=0)
