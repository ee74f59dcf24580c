"""Searching a grid by Optuna, shared by processes: the study is a journal beside the rows.

The rows are the results. The journal is made again from them where it is lost, and a trial whose
process was killed is told as failed and its point offered again, which Optuna's sampler would
not do by itself: to it a failed point is one that was visited.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bayesify.experiments.experiment import Row, Take, Unit
from bayesify.experiments.locks import ProcessLock
from bayesify.storage import StorageError

try:
    import optuna
    from optuna.samplers import GridSampler
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
    from optuna.trial import FrozenTrial, Trial, TrialState
except ImportError as error:
    raise ImportError("a search needs optuna; run pip install 'bayesify[search]'") from error

__all__ = ["JOURNAL", "Point", "grid_search"]

#: A unit, and its place in the grid by parameter.
Point = tuple[Unit, Mapping[str, float]]

JOURNAL = "journal.log"
_LOCKS = ".work"  # where units' locks are, too; removed when all is done
_LIVE = {TrialState.WAITING, TrialState.RUNNING, TrialState.COMPLETE}


def grid_search(
    studies: Mapping[str, Sequence[Point]],
    folder: Path,
    take: Take,
    value: Callable[[Row], float],
) -> None:
    """Have every point's unit done, as one trial of a study, and the study's values maximised.

    No point is run twice, and none is a complete trial twice, whichever processes share the folder
    and whenever they are killed.

    Args:
        studies: points by name of the study; of each they are a whole grid, without repetitions.
        folder: of the results; the journal of all studies is in it.
        take: has a unit done.
        value: of a unit's row, finite.

    Raises:
        ValueError: the points of a study are no grid.
        StorageError: the journal is damaged, or of another grid.
    """
    with _quiet():
        searches = [_Search(name, points, folder, take, value) for name, points in studies.items()]
        for search in searches:
            search.go_on()
        for search in searches:
            search.wait()
        for search in searches:
            search.go_on()  # what the others left, if they died: it is done by now


class _Search:
    """One study, and this process's part in it."""

    def __init__(
        self,
        name: str,
        points: Sequence[Point],
        folder: Path,
        take: Take,
        value: Callable[[Row], float],
    ) -> None:
        self._folder, self._take, self._value = folder, take, value
        self._units = {_key(place): unit for unit, place in points}
        names = sorted(points[0][1]) if points else []
        self._grid = {each: sorted({place[each] for _, place in points}) for each in names}
        if len(self._units) != math.prod(len(values) for values in self._grid.values()):
            raise ValueError(
                f"the points of {name} must be all combinations of their parameters' values, got "
                f"{len(points)} points of {self._grid}"
            )
        self._lock = _JournalLock(folder / _LOCKS / "search.lock")
        self._journal = folder / JOURNAL
        with self._journal_held():
            self._study = optuna.create_study(
                study_name=name,
                direction="maximize",
                storage=JournalStorage(JournalFileBackend(str(self._journal), lock_obj=self._lock)),
                # One seed for all processes: it shuffles what the numbers of the grid mean.
                sampler=_Sampler(self._grid, seed=0),
                load_if_exists=True,
            )

    @contextmanager
    def _journal_held(self) -> Iterator[None]:
        """The journal is whole and nobody else's meanwhile."""
        self._lock.acquire()
        try:
            _mend(self._journal)
            yield
        except StorageError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"{self._journal} is damaged ({error}); remove it, it is made again from the "
                "results beside it"
            ) from error
        finally:
            self._lock.release()

    def go_on(self) -> None:
        """Do points until each is done or another process's."""
        while (begun := self._begin()) is not None:
            trial, unit, claim = begun
            try:
                row = self._take(unit, wait=True)
                assert row is not None
                value = self._value(row)
                with self._journal_held():
                    self._study.tell(trial, value, skip_if_finished=True)
            finally:
                claim.release()

    def wait(self) -> None:
        """For what other processes are at; do it if they die."""
        for unit in self._units.values():
            self._take(unit, wait=True)

    def _begin(self) -> tuple[Trial, Unit, ProcessLock] | None:
        """A trial of a point at which no process is, and what shows that this process is at it."""
        with self._journal_held():
            states = self._settled()
            taken = [found for found in states.values() if found - {TrialState.WAITING}]
            if len(taken) == len(self._units):
                return None
            trial = self._study.ask()
            place = {
                name: trial.suggest_float(name, values[0], values[-1])
                for name, values in self._grid.items()
            }
            unit = self._units[_key(place)]
            claim = self._claim(unit)
            claim.acquire(wait=False)
            return trial, unit, claim

    def _settled(self) -> Mapping[int, set[TrialState]]:
        """The states of each point's trials that count, after those left by the dead are told."""
        states: dict[int, set[TrialState]] = defaultdict(set)
        for trial in self._study.get_trials(deepcopy=False):
            if trial.system_attrs.get("search_space", self._grid) != self._grid:
                raise StorageError(
                    f"{self._journal} holds a search of another grid; remove it, it is made again "
                    "from the results beside it"
                )
            state = trial.state
            if state == TrialState.RUNNING and self._is_left(trial):
                state = TrialState.FAIL
                self._study.tell(trial.number, state=state)
            if "grid_id" in trial.system_attrs:
                states[trial.system_attrs["grid_id"]] |= {state} & _LIVE
        for grid_id, found in states.items():
            if not found:
                # As Optuna's own callback for such trials does it.
                attributes: dict[str, Any] = {"grid_id": grid_id, "search_space": self._grid}
                self._study.add_trial(
                    optuna.trial.create_trial(state=TrialState.WAITING, system_attrs=attributes)
                )
        return states

    def _is_left(self, trial: FrozenTrial) -> bool:
        """Whether the process that ran it is dead."""
        unit = self._units.get(_key(trial.params))
        if unit is None:  # it died before it knew what to do
            return True
        claim = self._claim(unit)
        free = claim.acquire(wait=False)
        if free:
            claim.release()
        return free

    def _claim(self, unit: Unit) -> ProcessLock:
        return ProcessLock(
            self._folder / _LOCKS / f"{unit.file_name.removesuffix('.json')}.trial.lock"
        )


class _Sampler(GridSampler):
    """Optuna's, for asking and telling: at the end it would stop ``Study.optimize``, and fail."""

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """Do nothing."""


class _JournalLock(JournalFileOpenLock):
    """Ours for the journal: Optuna's own are files that stay when their process is killed."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._held = ProcessLock(path)

    def acquire(self) -> bool:
        """Whether it is held, which is when this returns."""
        return self._held.acquire()

    def release(self) -> None:
        """Let it go, once for each time that it was acquired."""
        self._held.release()


def _key(place: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(place.items()))


def _mend(journal: Path) -> None:
    """Cut off a line that its writer could not finish, for the next would be joined to it."""
    if not journal.exists() or not journal.stat().st_size:
        return
    with journal.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() == b"\n":
            return
    os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Optuna's line for each trial; the experiment has its own."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, optuna.logging.WARNING))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
