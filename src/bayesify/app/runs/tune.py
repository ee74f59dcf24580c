"""Search the settings of a table's run by the nll of held-out parts of its training rows."""

from __future__ import annotations

import math
import socket
import time
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from bayesify.app.runs.declarations import ConfigError
from bayesify.app.runs.folder import Run
from bayesify.app.runs.levers import chosen_config, default_values, levers
from bayesify.app.runs.measure import evaluate
from bayesify.app.runs.run_config import RunConfig
from bayesify.app.runs.run_files import TUNING_STUDY, TUNING_SUMMARY, RunError
from bayesify.app.runs.train import fit_network, make_elbo, seconds_per_epoch
from bayesify.noise.keys import Stream, derived_seed
from bayesify.tabular.table_data import TableData
from bayesify.training import ConvergenceWarning
from bayesify.training.backends import NonFiniteLossError
from bayesify.training.progress import NoProgress

try:
    import optuna
    from optuna.trial import FrozenTrial, Trial, TrialState

    from bayesify.app.runs.tuning_study import open_study
except ImportError as error:
    raise ImportError("--tune needs optuna; run pip install 'bayesify[tune]'") from error

__all__ = ["Plan", "TuningProgress", "quiet_optuna", "tune", "validation_parts"]

_FEWEST_ROWS = 20
#: Of few rows so many parts are held out in turn; of more rows one fifth is enough.
_PARTS, _MANY_ROWS = 3, 2000
#: Trials that are drawn at random before Optuna's sampler and pruner use what was found.
_RANDOM_TRIALS = 10
_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)


@dataclass(frozen=True)
class Plan:
    """The plan of a search, known when it begins or resumes.

    Args:
        num_parts: parts of the training rows that are held out in turn, in each trial.
        num_rows: training rows.
        seconds_trial: estimate for the training in one trial of the default settings.
        seconds_left: what is left of the budget.
        default: the searched settings, with the values that the first trial has.
        num_done: trials that an interrupted search, or other processes, finished.
    """

    num_parts: int
    num_rows: int
    seconds_trial: float
    seconds_left: float
    default: Mapping[str, Any]
    num_done: int


class TuningProgress(Protocol):
    """An object that :func:`tune` calls."""

    def on_start(self, plan: Plan) -> None:
        """The search begins or resumes."""

    def on_step(self, seconds: float) -> None:
        """A training step is finished, after so many seconds of the budget."""

    def on_trial(
        self, number: int, values: dict[str, Any], nll: float | None, best: float | None
    ) -> None:
        """A trial is finished; ``nll`` is None if it was stopped early or diverged."""


class _OutOfTimeError(Exception):
    """The budget ended within a trial."""


def tune(
    run: Run,
    data: TableData,
    *,
    given: Collection[str] = (),
    seconds: float,
    max_trials: int | None = None,
    progress: TuningProgress | None = None,
    storage: str | None = None,
) -> tuple[RunConfig, dict[str, Any]]:
    """Return the settings of the lowest nll on validation rows, and a summary of the search.

    Only training rows are used: each trial trains on a part of them and predicts the others. The
    first trial has the settings of ``run``, so that the chosen ones are never worse on the
    validation rows. The study is kept in the run's folder; a call with the same arguments resumes
    it, and proposes what an uninterrupted search would have proposed.

    Processes with the same ``storage``, table and settings, and folders of their own, share one
    study: each searches for its budget, and then chooses the best trial of all.

    Args:
        run: a run that was not created yet, with its default settings and its table.
        data: its table; the held-out rows are not used.
        given: settings that were asked for, which are not searched.
        seconds: budget of the search, over all interruptions. The first trial is always finished;
            a later one is given up when the budget ends.
        max_trials: number of finished trials after which the search ends as well.
        progress: is told what happens.
        storage: URL of a database for the study, as for ``optuna.storages.RDBStorage``; None for
            a file in the run's folder.

    Returns:
        The settings, and the content of ``tuning.json``: nll in nats per row.

    Raises:
        ConfigError: there are too few rows, nothing is left to search, or the storage cannot be
            used.
        RunError: the folder holds a search with other settings or another table, or the nll of
            the default settings is not finite.
        NonFiniteLossError: the trial of the default settings diverged.
    """
    data = replace(
        data,
        test_inputs=data.test_inputs[:0],
        test_targets=data.test_targets[:0],
        test_distances=data.test_distances[:0],
    )
    parts = validation_parts(len(data.train_targets), run.config.seed)
    if not ((run.folder / TUNING_STUDY).exists() or levers(run.config, given)):
        raise ConfigError("tune has nothing to search: every setting is given; leave it out")
    pruner = optuna.pruners.MedianPruner(n_startup_trials=_RANDOM_TRIALS // 2)
    with quiet_optuna(), open_study(run, given, storage, pruner) as study:
        is_shared = storage is not None
        search = _Search(run, data, parts, study, seconds, progress, is_shared=is_shared)
        search.start()
        while search.has_next(max_trials):
            search.try_one()
        summary = search.summary()
    run.folder.mkdir(parents=True, exist_ok=True)
    run.write_json(TUNING_SUMMARY, summary)
    return chosen_config(run.config, summary["settings_chosen"]), summary


def validation_parts(num_rows: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return the rows to train on and those to validate on, for each part that is held out.

    Up to 2,000 rows are held out by thirds in turn, of more rows one fifth.

    Raises:
        ConfigError: there are fewer than 20 rows.

    Example:
        >>> [(len(kept), len(held)) for kept, held in validation_parts(22, seed=0)]
        [(14, 8), (15, 7), (15, 7)]
        >>> [(len(kept), len(held)) for kept, held in validation_parts(10_000, seed=0)]
        [(8000, 2000)]
    """
    if num_rows < _FEWEST_ROWS:
        raise ConfigError(
            f"tune needs at least {_FEWEST_ROWS} training rows, to train on some and validate on "
            f"others, got {num_rows}; leave it out"
        )
    generator = torch.Generator()
    generator.manual_seed(derived_seed(seed, Stream.SHUFFLE, 0, 2))
    order = torch.randperm(num_rows, generator=generator)
    held_out = order.tensor_split(_PARTS) if num_rows <= _MANY_ROWS else order.tensor_split(5)[:1]
    kept = torch.ones(len(held_out), num_rows, dtype=torch.bool)
    for row, held in zip(kept, held_out, strict=True):
        row[held] = False
    return [
        (row.nonzero().flatten(), held.sort().values)
        for row, held in zip(kept, held_out, strict=True)
    ]


class _Search:
    """A study, its trials one after the other, and the time that they took."""

    def __init__(
        self,
        run: Run,
        data: TableData,
        parts: list[tuple[Tensor, Tensor]],
        study: optuna.Study,
        seconds: float,
        progress: TuningProgress | None,
        *,
        is_shared: bool,
    ) -> None:
        self._run, self._data, self._parts = run, data, parts
        self._study, self._budget, self._progress = study, seconds, progress
        self._ranges = levers(run.config, study.user_attrs["given"])
        self._default = default_values(run.config, self._ranges)
        self._is_shared = is_shared
        # The end of the last trial, up to which the trials' own seconds count.
        self._since = time.monotonic()
        self._folder = f"{socket.gethostname()}:{run.folder.absolute()}"
        for trial in self._own_trials(TrialState.RUNNING):  # the process was killed
            study.tell(trial.number, state=TrialState.FAIL)

    def start(self) -> None:
        """Tell what the search will cost."""
        if self._progress is None:
            return
        config, (kept, _) = self._run.config, self._parts[0]
        epoch = seconds_per_epoch(self._run.make_module(), config, self._only(kept))
        plan = Plan(
            num_parts=len(self._parts),
            num_rows=len(self._data.train_targets),
            seconds_trial=epoch * config.epochs * len(self._parts),
            seconds_left=max(0.0, self._budget - self._spent()),
            default=self._default,
            num_done=len(self._trials(*_FINISHED)),
        )
        self._progress.on_start(plan)

    def has_next(self, max_trials: int | None) -> bool:
        """Return whether another trial is due."""
        done = len(self._trials(*_FINISHED))
        if self._default_trial() is None:
            return True
        spent = self._spent() + time.monotonic() - self._since
        return spent < self._budget and (max_trials is None or done < max_trials)

    def try_one(self) -> None:
        """Train and measure the next settings."""
        done = len(self._trials(*_FINISHED))
        self._study.sampler = self._sampler(done)
        if self._default_trial() is None and not self._trials(TrialState.WAITING):
            self._study.enqueue_trial(self._default, user_attrs={"default": True})
        trial = self._study.ask(self._ranges)
        trial.set_user_attr("folder", self._folder)
        is_default = _is_default(trial)
        # With the time between trials, which may be as long as the training of tiny networks.
        begun, spent = self._since, self._spent()
        deadline = math.inf if is_default else begun + self._budget - spent
        state, nll = TrialState.FAIL, None

        def on_step() -> None:
            now = time.monotonic()
            if self._progress is not None:
                self._progress.on_step(spent + now - begun)
            if now > deadline:
                raise _OutOfTimeError

        try:
            nll = self._nll(trial, on_step)
            if nll is None and is_default:
                raise RunError(
                    "the default settings predict rows of the table with a nll that is not finite; "
                    "look for wild numbers in it, or leave --tune out"
                )
            state = TrialState.COMPLETE if nll is not None else TrialState.PRUNED
        except NonFiniteLossError as error:
            if is_default:
                raise
            trial.set_user_attr("error", str(error))
            state = TrialState.PRUNED
        except _OutOfTimeError:
            trial.set_user_attr("error", "the budget ended")
        finally:
            # Also of a search that Ctrl-C interrupts.
            self._since = time.monotonic()
            trial.set_user_attr("seconds", self._since - begun)
            self._study.tell(trial, nll, state=state)
        if self._progress is not None and state in _FINISHED:
            best = _best(self._trials())
            self._progress.on_trial(done, trial.params, nll, None if best is None else best.value)

    def summary(self) -> dict[str, Any]:
        """Return the content of ``tuning.json``."""
        default, trials = self._default_trial(), self._trials(*_FINISHED)
        best = _best(trials)
        assert default is not None  # it is always finished
        assert best is not None
        return {
            "trials": len(trials),
            "stopped_early": sum(trial.state == TrialState.PRUNED for trial in trials),
            "seconds": self._spent(),
            "seconds_budget": self._budget,
            "parts": len(self._parts),
            "validation_rows": sum(len(held) for _, held in self._parts),
            "nll_default": default.value,
            "nll_chosen": best.value,
            "chosen_trial": trials.index(best),
            "settings_default": default.params,
            "settings_chosen": best.params,
        }

    def _nll(self, trial: Trial, on_step: Callable[[], None]) -> float | None:
        """Return the mean nll of validation rows in nats, or None if it is clearly not the best."""
        run = replace(self._run, config=chosen_config(self._run.config, trial.params))
        total, rows = 0.0, 0
        for part, (kept, held) in enumerate(self._parts):
            data = self._only(kept)
            elbo = make_elbo(run.make_module(), run.config, data)
            with warnings.catch_warnings():
                # The network of the chosen settings is checked when it is trained on all rows.
                warnings.simplefilter("ignore", ConvergenceWarning)
                fit_network(elbo, run.config, data, callback=_Steps(on_step))
            data = replace(
                data,
                test_inputs=self._data.train_inputs[held],
                test_targets=self._data.train_targets[held],
                test_distances=self._data.train_distances[held],
            )
            measured, _ = evaluate(
                elbo.bnn, data, num_samples=run.config.test_samples, with_train=False
            )
            nll = measured["test"]["nll"]
            if not math.isfinite(nll):
                return None
            total, rows = total + nll * len(held), rows + len(held)
            trial.report(total / rows, part)
            if part + 1 < len(self._parts) and trial.should_prune():
                return None
        return total / rows

    def _only(self, rows: Tensor) -> TableData:
        return replace(
            self._data,
            train_inputs=self._data.train_inputs[rows],
            train_targets=self._data.train_targets[rows],
            train_distances=self._data.train_distances[rows],
        )

    def _sampler(self, done: int) -> optuna.samplers.BaseSampler:
        # One seed a trial, so that an interrupted search proposes the same again; in a shared one
        # each process has its own, as they would propose the same at the same time.
        seed, shared = self._run.config.seed, self._is_shared
        if shared:
            done = zlib.crc32(
                f"{self._folder} {len(self._trials())}".encode(errors="surrogateescape")
            )
        return optuna.samplers.TPESampler(
            seed=derived_seed(seed, Stream.SHUFFLE, done, 3) % 2**32,
            n_startup_trials=_RANDOM_TRIALS,
            constant_liar=shared,
        )

    def _default_trial(self) -> FrozenTrial | None:
        """Return the first finished trial of the default settings."""
        return next(filter(_is_default, self._trials(TrialState.COMPLETE)), None)

    def _spent(self) -> float:
        return math.fsum(trial.user_attrs.get("seconds", 0.0) for trial in self._own_trials())

    def _own_trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials of this run; those of older versions do not name their folder."""
        trials = self._trials(*states)
        if not self._is_shared:
            return trials
        return [trial for trial in trials if trial.user_attrs.get("folder") == self._folder]

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states or None)


def _best(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """Return the first of the trials with the lowest nll, or None if none is complete."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return min(complete, key=lambda trial: trial.value or 0.0, default=None)


def _is_default(trial: Trial | FrozenTrial) -> bool:
    # The first one of older versions has no mark.
    return trial.number == 0 or bool(trial.user_attrs.get("default"))


class _Steps(NoProgress):
    """Callback of training that reports steps alone."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step

    def on_step(self, *, epoch: int, batch: int) -> None:  # noqa: ARG002
        """Report a step."""
        self._on_step()


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Silence Optuna's messages on studies and trials, and restore its verbosity."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, optuna.logging.WARNING))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
