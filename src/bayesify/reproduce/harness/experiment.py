"""Experiments: their jobs, how one job is run, and the table and figures of the results."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bayesify.training.backends import NOT_COMPILED
from bayesify.training.history import EpochRow, History
from bayesify.training.progress import Callback

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Context",
    "EpochProgress",
    "Experiment",
    "Job",
    "ProgressListener",
    "Result",
    "RunJob",
    "Schedule",
    "by_title",
    "is_trial",
    "no_files",
    "of_job",
    "one_by_one",
]

#: The result of a finished job, as its file holds it; see ``result_files.read_result``.
Result = Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """One part of an experiment that is run on its own and stored in a file of its own.

    Args:
        name: unique within the experiment for each seed; part of the file's name.
        seed: determines all randomness of the job.
        config: every other setting that determines the result, as JSON.
        seconds: estimated time on one core, in seconds.
        datasets: names of the data sets that it needs, as in ``bayesify data list``.
    """

    name: str
    seed: int
    config: Mapping[str, Any]
    seconds: float
    datasets: tuple[str, ...] = ()

    @property
    def file_name(self) -> str:
        """The name of the result's file.

        Example:
            >>> Job("yacht", 0, {}, 60.0).file_name
            'yacht-seed-0.json'
        """
        return f"{self.name}-seed-{self.seed}.json"


class ProgressListener(Protocol):
    """Receives the events of a running experiment, for instance to print them."""

    def on_start(self, jobs: Sequence[Job], left: Sequence[Job]) -> None:
        """The experiment has these jobs, of which the ones in ``left`` have no result yet."""

    def on_cluster(self, size: str) -> None:
        """The jobs run on a cluster, of this size in words."""

    def on_job(self, job: Job) -> None:
        """A job begins in this process, or this process waits for the job on a cluster."""

    def on_progress(self, part: float) -> None:
        """This part of the running job is done, from 0 to 1."""

    def on_wait(self, job: Job) -> None:
        """Another process runs this job; this process waits, as no other job is left."""

    def on_done(self, job: Job, result: Result) -> None:
        """The job is finished, and its result is stored."""


@dataclass(frozen=True)
class Context:
    """The surroundings of a job: everything it is given that does not determine its result.

    Args:
        data_dir: look for data in this directory and in no other.
        on_progress: called with the part of the job that is done, from 0 to 1.
        on_download: called as a download advances, see ``bayesify.datasets.Progress``.
        work: the job's own folder for the state of its training, from which an interrupted job
            resumes; removed when the job is done. None keeps no state.
        device: where networks are trained, ``"cpu"`` or ``"cuda"``; of an experiment without
            ``on_gpu`` always the CPU.
    """

    data_dir: str | Path | None = None
    on_progress: Callable[[float], None] | None = None
    on_download: Callable[[str, int, int | None], None] | None = None
    work: Path | None = None
    device: str = "cpu"

    def part(self, name: str, place: int, count: int) -> Context:
        """Return the context of the ``place``-th of ``count`` equal parts of the job.

        Example:
            >>> parts = []
            >>> Context(on_progress=parts.append).part("second", 1, 4).on_progress(0.5)
            >>> parts
            [0.375]
        """
        report = self.on_progress
        return replace(
            self,
            on_progress=None if report is None else lambda part: report((place + part) / count),
            work=None if self.work is None else self.work / name,
        )


class EpochProgress(Callback):
    """A callback of ``fit`` that reports finished epochs as a part of the job.

    Args:
        context: its ``on_progress`` is called.
        epochs: number of epochs of the training.
        after_epoch: called after each epoch.
    """

    def __init__(
        self, context: Context, epochs: int, after_epoch: Callable[[], None] | None = None
    ) -> None:
        self._context, self._epochs, self._after_epoch = context, epochs, after_epoch

    def on_start(self, *, epochs: int, batches: int, history: History) -> None:  # noqa: ARG002
        """Report the epochs that were trained before an interruption."""
        self._report(len(history))

    def on_note(self, text: str) -> None:
        """Warn if the compiled backend was not used: its noise differs, so the result notes it."""
        if NOT_COMPILED in text:
            warnings.warn(text, UserWarning, stacklevel=2)

    def on_epoch(self, row: EpochRow) -> None:
        """Report a finished epoch."""
        self._report(int(row["epoch"] or 0))
        if self._after_epoch is not None:
            self._after_epoch()

    def _report(self, done: int) -> None:
        if self._context.on_progress is not None:
            self._context.on_progress(done / self._epochs)


class RunJob(Protocol):
    """Runs a job once for all processes that share a folder of results."""

    def __call__(self, job: Job, *, wait: bool) -> Result | None:
        """Return the job's result, from its file if it is there, else after running it.

        Args:
            job: any job of the experiment.
            wait: whether to wait for another process that runs it; if not, None is returned.
        """


#: Runs all jobs, by ``RunJob``, in an order of its own; the path is the folder of results.
Schedule = Callable[[Sequence[Job], Path, RunJob], None]


def one_by_one(jobs: Sequence[Job], folder: Path, run_job: RunJob) -> None:  # noqa: ARG001
    """Run jobs in their order; those that other processes run come last."""
    for job in [job for job in jobs if run_job(job, wait=False) is None]:
        run_job(job, wait=True)


def of_job(results: Sequence[Result], name: str) -> list[Result]:
    """Return the results of the jobs of this name, one for each seed.

    Example:
        >>> of_job([{"job": "a", "seed": 0}, {"job": "b", "seed": 0}], "b")
        [{'job': 'b', 'seed': 0}]
    """
    return [result for result in results if result["job"] == name]


def is_trial(result: Result) -> bool:
    """Return whether a result is of a trial, measured on held-out training data.

    Example:
        >>> is_trial({"config": {"held_out": 10_000}}), is_trial({"config": {}})
        (True, False)
    """
    return bool(result["config"].get("held_out"))


def by_title(results: Sequence[Result], titles: Iterable[str]) -> dict[str, list[Result]]:
    """Return the results of each title, in the order of the titles; those without any are left out.

    Example:
        >>> results = [{"config": {"title": "b"}}, {"config": {"title": "a"}}]
        >>> list(by_title(results, ["a", "b", "c"]))
        ['a', 'b']
    """
    found = {title: [r for r in results if r["config"]["title"] == title] for title in titles}
    return {title: of for title, of in found.items() if of}


def no_files(results: Sequence[Result]) -> dict[str, str]:  # noqa: ARG001
    """Return no files besides table and figures."""
    return {}


def _names_bfloat16(config: Any) -> bool:
    if isinstance(config, Mapping):
        return any(_names_bfloat16(value) for value in config.values())
    return bool(config == "bfloat16")


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of the literature, as this library reproduces it.

    Args:
        name: as on the command line.
        source: the paper or document, with the number of its table or figure.
        reported: what it reports, in one line.
        seeds: seeds of the full run, unless others are asked for.
        memory_mb: approximate peak memory of a full run, in megabytes.
        jobs: the jobs for these seeds, in full or quick.
        run: runs one job and returns its metrics, as JSON.
        table: Markdown from the results, with the reported numbers next to ours; any part of the
            results will do.
        figures: figures by name, from any part of the results.
        schedule: runs the jobs in some order.
        files: further results as text, by file name, from any part of the results. Tables among
            them have a column that tells quick results from full ones.
        half_precision: whether jobs train as ``harness.half_precision`` has it: in bfloat16, and
            in float32 on a CPU without instructions for it.
        on_gpu: whether jobs train on ``Context.device``; others use the CPU.
    """

    name: str
    source: str
    reported: str
    seeds: tuple[int, ...]
    memory_mb: int
    jobs: Callable[[Sequence[int], bool], list[Job]]
    run: Callable[[Job, Context], dict[str, Any]]
    table: Callable[[Sequence[Result]], str]
    figures: Callable[[Sequence[Result]], dict[str, Figure]]
    schedule: Schedule = one_by_one
    files: Callable[[Sequence[Result]], dict[str, str]] = no_files
    half_precision: bool = False
    on_gpu: bool = False

    def names_bfloat16(self, jobs: Sequence[Job]) -> bool:
        """Return whether the settings of any of the jobs name bfloat16."""
        return any(_names_bfloat16(job.config) for job in jobs)

    def seconds(self, *, quick: bool = False) -> float:
        """Return the estimated time of all jobs on one core, in seconds."""
        return sum(job.seconds for job in self.jobs(self.usual_seeds(quick=quick), quick))

    def usual_seeds(self, *, quick: bool = False) -> tuple[int, ...]:
        """Return the seeds of a run for which none are given; a quick run has the first only."""
        return self.seeds[:1] if quick else self.seeds
