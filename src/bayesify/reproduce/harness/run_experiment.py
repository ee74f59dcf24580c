"""Run what is missing of an experiment, then write its table, figures and other files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from bayesify.app.on_ray import address_of
from bayesify.datasets import find_dataset, get_file
from bayesify.io import StorageError, atomic_write
from bayesify.reproduce.harness.experiment import (
    Context,
    Experiment,
    Job,
    ProgressListener,
    Result,
    one_by_one,
)
from bayesify.reproduce.harness.job_runner import JobRunner

__all__ = ["Outcome", "named_jobs", "reproduce"]

QUICK_NOTE = "Quick run: shortened to see that it works. These numbers reproduce nothing."


class Outcome(NamedTuple):
    """The results of an experiment, and the files that were written from them."""

    results: list[Result]
    table: Path
    figures: list[Path]
    files: list[Path]


def reproduce(
    experiment: Experiment,
    out: Path,
    listener: ProgressListener,
    *,
    seeds: Sequence[int] = (),
    only: Sequence[str] = (),
    quick: bool = False,
    context: Context | None = None,
    on: str | None = None,
) -> Outcome:
    """Run what is missing of an experiment, then write its table, figures and other files.

    The result of each finished job is one file, written whole or not at all: a run that was killed
    at any moment resumes in the job that was interrupted, after the last epoch that it finished.
    Several processes can share a folder, each with jobs of its own; all end when all jobs are done.
    Each process uses one thread, so that results do not depend on the number of cores.

    Args:
        experiment: the experiment.
        out: the folder of its results, created if it is missing.
        listener: receives the events of the run.
        seeds: seeds of all randomness; by default those of the experiment.
        only: names of the jobs to run, with ``*`` for any characters; by default all. The table has
            whatever results of these seeds are in the folder.
        quick: whether to run a short version instead; all that it writes says so.
        context: where the data are; its ``on_progress`` and ``work`` are not used.
        on: ``"ray"`` to run the jobs as tasks of this machine's Ray cluster, or of a new one, and
            ``"ray=ADDRESS"`` of the one there; all its nodes must share the folder. None for this
            process.

    Raises:
        ValueError: a seed is given twice or is negative, there is no job of such a name, or ``on``
            is something else.
        ImportError: Ray is not installed, and there is something left to run on it.
        ConnectionError: no cluster answers at the address, or the workers of a job died again and
            again.
        StorageError: the folder holds a result that is damaged or has other settings.
        DataError: a data set that is needed cannot be found.
        OSError: the folder cannot be written.
    """
    seeds = tuple(seeds) or experiment.usual_seeds(quick=quick)
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ValueError(
            f"seeds must be different numbers of at least 0, got {', '.join(map(str, seeds))}"
        )
    address = None if on is None else address_of(on)
    every, context = experiment.jobs(seeds, quick), context or Context()
    jobs = named_jobs(every, only)
    runner = JobRunner(experiment, out, listener, context, quick=quick)
    # All files are checked before the first job is run, as a run can take hours.
    stored = {job.file_name for job in every if runner.stored(job) is not None}
    left = [job for job in jobs if job.file_name not in stored]
    for job in left:
        runner.check_beginning(job)
    _check_folder(out)
    listener.on_start(jobs, left)
    for name in dict.fromkeys(name for job in left for name in job.datasets):
        for file in find_dataset(name).files:
            get_file(file, context.data_dir, progress=context.on_download)
    out.mkdir(parents=True, exist_ok=True)
    schedule = one_by_one if only else experiment.schedule
    if on is None or not left:
        schedule(jobs, out, runner.run)
    else:
        from bayesify.reproduce.harness.ray_jobs import ray_jobs  # Ray may not be installed

        with ray_jobs(address, runner) as tasks:
            schedule(jobs, out, tasks.run)
    runner.clean_up(jobs)
    results = [result for job in every if (result := runner.stored(job)) is not None]
    return _summarise(experiment, out, results, quick=quick)


def named_jobs(jobs: Sequence[Job], only: Sequence[str]) -> list[Job]:
    """Return the jobs with one of these names, with ``*`` for any characters; all if none is given.

    Raises:
        ValueError: there is no job of such a name.

    Example:
        >>> jobs = [Job(name, 0, {}, 1.0) for name in ("wine-ours", "wine-forest", "yacht-ours")]
        >>> [job.name for job in named_jobs(jobs, ["wine-*"])]
        ['wine-ours', 'wine-forest']
    """
    if not only:
        return list(jobs)
    for pattern in only:
        if not any(fnmatchcase(job.name, pattern) for job in jobs):
            names = ", ".join(dict.fromkeys(job.name for job in jobs))
            raise ValueError(f"only must name jobs, got {pattern!r}; there are {names}")
    return [job for job in jobs if any(fnmatchcase(job.name, pattern) for pattern in only)]


def _check_folder(out: Path) -> None:
    for path in (out, *out.parents):
        if path.exists() and not path.is_dir():
            raise StorageError(
                f"results need a folder, but {path} is a file; choose another with --out"
            )


def _summarise(experiment: Experiment, out: Path, results: list[Result], *, quick: bool) -> Outcome:
    try:
        table = experiment.table(results)
        figures, files = experiment.figures(results), experiment.files(results)
    except (LookupError, TypeError, AttributeError) as error:
        raise StorageError(
            f"the results in {out} lack what the table needs ({type(error).__name__}: {error}); "
            "they were altered, or written by another version: remove them"
        ) from error
    text = f"**{QUICK_NOTE}**\n\n{table}" if quick else table
    written = [out / name for name in files]
    for name, content in {"table.md": text.rstrip("\n") + "\n", **files}.items():
        atomic_write(out / name, content)
    drawn = []
    for name, figure in figures.items():
        if quick:
            figure.suptitle(QUICK_NOTE, color="#D55E00", fontsize=9)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=150, metadata={"Software": None})
        drawn.append(out / f"{name}.png")
        atomic_write(drawn[-1], image.getvalue())  # whole, as other processes may write it too
    return Outcome(results, out / "table.md", drawn, written)
