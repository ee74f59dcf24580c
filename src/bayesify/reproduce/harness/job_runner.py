"""Run each job of an experiment once, in one process or several, and store its result.

The folder ``.work`` next to the results holds, for each job that is not finished, the state of its
training and a lock file. The operating system releases the lock of a process that ends, however it
ends, so that another process can resume the job.
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from filelock import FileLock, Timeout

from bayesify.app.runs.environment import commit, hardware, load_average, versions
from bayesify.io import StorageError, atomic_write
from bayesify.module.threads import num_threads
from bayesify.reproduce.harness.experiment import (
    Context,
    Experiment,
    Job,
    ProgressListener,
    Result,
)
from bayesify.reproduce.harness.result_files import (
    RESULT_KEYS,
    check_same_settings,
    job_settings,
    read_object,
    stored_result,
)

__all__ = ["JobRunner"]

_WORK = ".work"
#: Settings of a job that has begun, and its ``_Beginning``; the second name is that of earlier
#: versions.
_BEGINNING, _OLD_BEGINNING = "job.json", "unit.json"
_POLL_SECONDS = 0.5


class JobRunner:
    """Runs the jobs of one experiment and stores their results in a folder.

    Args:
        experiment: the experiment.
        out: the folder of its results.
        listener: receives the events of the run.
        context: given to each job, with ``work`` and ``on_progress`` of its own.
        quick: whether the jobs are those of the short version.

    Attributes:
        experiment: as given.
        listener: as given.
    """

    def __init__(
        self,
        experiment: Experiment,
        out: Path,
        listener: ProgressListener,
        context: Context,
        *,
        quick: bool,
    ) -> None:
        self.experiment, self.listener = experiment, listener
        self._out, self._context, self._quick = out, context, quick
        self._results: dict[str, Result] = {}
        self._commit = commit()  # read once: the code in memory stays the same if HEAD moves

    def stored(self, job: Job) -> Result | None:
        """Return the result of a finished job, or None.

        Raises:
            StorageError: the file is damaged, or holds a result of other settings.
        """
        name = job.file_name
        if name not in self._results:
            result = stored_result(self.experiment, self._out, job, quick=self._quick)
            if result is None:
                return None
            self._results[name] = result
        return self._results[name]

    def keep(self, job: Job, result: Result) -> None:
        """Keep the result of a job that another process has run and stored."""
        self._results[job.file_name] = result

    def part_done(self, job: Job) -> float:
        """Return the part of a job that is done in some process, from 0 to 1."""
        begun = self._beginning(job)
        return 0.0 if begun is None else begun.part

    def work_folder(self) -> Path:
        """Return the folder for what jobs need until they are finished, after creating it."""
        folder = self._out / _WORK
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def for_other_process(self, listener: ProgressListener) -> JobRunner:
        """Return a runner for a process that works in another folder, or on another machine.

        Args:
            listener: receives the events there.
        """
        data_dir = self._context.data_dir
        there = Context(
            data_dir=None if data_dir is None else Path(data_dir).absolute(),
            device=self._context.device,
        )
        out = self._out.absolute()
        return JobRunner(self.experiment, out, listener, there, quick=self._quick)

    def check_beginning(self, job: Job) -> None:
        """Check that a job that was interrupted can be resumed.

        Raises:
            StorageError: it was begun with other settings.
        """
        self._beginning(job)

    def run(self, job: Job, *, wait: bool) -> Result | None:
        """Return a job's result, after running the job if need be; see ``experiment.RunJob``."""
        if job.file_name in self._results:
            return self._results[job.file_name]
        result = self.stored(job)  # another process may have finished it meanwhile
        if result is None:
            with self._locked(job, wait=wait) as locked:
                if not locked:
                    return None
                result = self.stored(job)
                if result is None:
                    self.listener.on_job(job)
                    result = self._run(job)
                    atomic_write(self._out / job.file_name, json.dumps(result, indent=2) + "\n")
                    self._results[job.file_name] = result
                shutil.rmtree(self._work(job), ignore_errors=True)
        self.listener.on_done(job, result)
        return result

    def clean_up(self, jobs: Sequence[Job]) -> None:
        """Remove the intermediate files of jobs that are finished."""
        for job in jobs:
            shutil.rmtree(self._work(job), ignore_errors=True)
            lock = FileLock(self._lock_path(job))
            # Either another process cleans up too, or it has removed the folder already.
            with suppress(Timeout, FileNotFoundError), lock.acquire(timeout=0):
                self._lock_path(job).unlink(missing_ok=True)
        with suppress(OSError):  # not empty: jobs of other seeds have begun; or not there
            (self._out / _WORK).rmdir()

    @contextmanager
    def _locked(self, job: Job, *, wait: bool) -> Iterator[bool]:
        """Hold the job's lock; False if another process holds it and ``wait`` is False."""
        lock = FileLock(self._lock_path(job))
        locked = self._acquire(lock, timeout=0.0)
        if not locked and wait:
            self.listener.on_wait(job)
            locked = self._acquire(lock, timeout=-1.0)
        try:
            yield locked
        finally:
            lock.release()

    def _acquire(self, lock: FileLock, timeout: float) -> bool:
        while True:
            self.work_folder()
            try:
                lock.acquire(timeout=timeout, poll_interval=_POLL_SECONDS)
            except Timeout:
                return False
            except FileNotFoundError:  # a process that is finished has just removed the folder
                continue
            return True

    def _run(self, job: Job) -> dict[str, Any]:
        begun = self._beginning(job) or _Beginning(self._commit)
        started = time.perf_counter() - begun.seconds
        if self._commit not in begun.commits:
            begun.commits.append(self._commit)
        begun.loads.append(load_average())
        try:
            with num_threads(1), _collected_warnings() as warned:

                def store() -> None:
                    begun.seconds = time.perf_counter() - started
                    begun.notes = sorted({*begun.notes, *warned()})
                    self._write_beginning(job, begun)

                def on_progress(part: float) -> None:
                    begun.loads.append(load_average())
                    begun.part = part
                    store()
                    self.listener.on_progress(part)

                context = replace(self._context, work=self._work(job), on_progress=on_progress)
                store()
                try:
                    metrics = self.experiment.run(job, context)
                finally:  # an interrupted part may have left its state
                    store()
                where = hardware(context.device)
        except StorageError as error:
            raise StorageError(
                f"{error}; remove {self._work(job)}, and the same command begins this run anew"
            ) from error
        notes = set(begun.notes)
        for each in begun.commits:
            if each != self._commit:
                notes.add(f"{'begun' if each == begun.commit else 'resumed'} at commit {each}")
        result = {
            **job_settings(self.experiment, job, quick=self._quick),
            "commit": self._commit,
            "hardware": where,
            "versions": versions(),
            "metrics": metrics,
            "notes": sorted(notes),
            "seconds": time.perf_counter() - started,
            "load": _mean(begun.loads),
        }
        return {key: result[key] for key in (*RESULT_KEYS, "load")}

    def _work(self, job: Job) -> Path:
        """Return the folder of the job's state of training."""
        return self._out / _WORK / job.file_name.removesuffix(".json")

    def _lock_path(self, job: Job) -> Path:
        return Path(f"{self._work(job)}.lock")

    def _beginning(self, job: Job) -> _Beginning | None:
        """Return where a job that is not finished stands; None if it has not begun."""
        for name in (_BEGINNING, _OLD_BEGINNING):
            path = self._work(job) / name
            try:
                begun = read_object(path)
            except StorageError as error:
                # Not begun; or it has just ended, in another process.
                if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                    continue
                raise
            settings = job_settings(self.experiment, job, quick=self._quick)
            check_same_settings(path, settings, begun, "the beginning of a result")
            return _Beginning.from_json(begun)
        return None

    def _write_beginning(self, job: Job, begun: _Beginning) -> None:
        path = self._work(job) / _BEGINNING
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {**job_settings(self.experiment, job, quick=self._quick), **asdict(begun)}
        atomic_write(path, json.dumps(document, indent=2) + "\n")


def _mean(loads: Sequence[float | None]) -> float | None:
    known = [load for load in loads if load is not None]
    return round(mean(known), 2) if known else None


@dataclass
class _Beginning:
    """Where a job that is not finished stands, with all attempts at it.

    Args:
        commit: the commit at which it began.
        seconds: the time that it has taken.
        part: the part that is done, from 0 to 1.
        commits: all commits at which it ran, in their order.
        notes: the warnings so far.
        loads: the load averages at its beginning and after each part.
    """

    commit: str | None
    seconds: float = 0.0
    part: float = 0.0
    commits: list[str | None] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    loads: list[float | None] = field(default_factory=list)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> _Beginning:
        """Return what :func:`dataclasses.asdict` gave; earlier versions stored less."""
        begun = stored.get("commit")
        return cls(
            begun,
            float(stored.get("seconds", 0.0)),
            float(stored.get("part", 0.0)),
            list(stored.get("commits", [begun])),
            list(stored.get("notes", [])),
            list(stored.get("loads", [])),
        )


@contextmanager
def _collected_warnings() -> Iterator[Callable[[], set[str]]]:
    """Yield a function that returns the warnings so far.

    Those that Python and PyTorch give only once per process are left out.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        for category in (UserWarning, RuntimeWarning):
            warnings.simplefilter("always", category)

        def warned() -> set[str]:
            messages = (str(warning.message) for warning in caught)
            return {text for text in messages if "(Triggered internally at" not in text}

        yield warned
