"""Run the jobs of an experiment as tasks of a Ray cluster.

A task is one more process that shares the folder of results (see ``job_runner``): it holds the
job's lock, resumes from the job's checkpoint and writes the result. Ray runs the task again on
another node when its worker or node dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Before Ray itself, as this tells how to install it.
from bayesify.app.on_ray.cluster import SharedFolder, connected, shared  # isort: split

import ray
from ray.exceptions import RayError, RayTaskError

from bayesify.reproduce.harness.experiment import Job, Result
from bayesify.reproduce.harness.job_runner import JobRunner

__all__ = ["RayJobs", "ray_jobs"]

#: Times that a job is run again after its worker died, each from the job's checkpoint.
_RETRIES = 5
_POLL_SECONDS = 0.5


@contextmanager
def ray_jobs(address: str | None, runner: JobRunner) -> Iterator[RayJobs]:
    """Connect to a cluster that runs jobs, for a ``with`` block.

    Args:
        address: as for ``connected``.
        runner: knows the jobs' folder, which all nodes must share, and keeps their results.

    Raises:
        ConnectionError: no cluster answers at the address.
    """
    with connected(address) as cluster, shared(runner.work_folder()) as folder:
        runner.listener.on_cluster(str(cluster))
        # The memory that a job needs, unless no node has it: the job would wait forever.
        memory = min(1e6 * runner.experiment.memory_mb, cluster.memory)
        task = ray.remote(num_cpus=1, memory=int(memory), max_retries=_RETRIES)(_run_job)
        for_tasks = runner.for_other_process(_NoListener())
        yield RayJobs(runner, lambda job: task.remote(folder, for_tasks, job))


class RayJobs:
    """Runs jobs as tasks of a cluster; see :func:`ray_jobs`.

    Args:
        runner: keeps the results.
        submit: begins a task and returns the reference to its result.
    """

    def __init__(self, runner: JobRunner, submit: Callable[[Job], Any]) -> None:
        self._runner, self._submit = runner, submit
        self._jobs: dict[Any, Job] = {}

    def run(self, job: Job, *, wait: bool) -> Result | None:
        """Return a job's result, after running it as a task; see ``experiment.RunJob``.

        Raises:
            StorageError: a node does not share the folder of results, or runs other code.
            ConnectionError: the job's workers died again and again.
        """
        if self._runner.stored(job) is None and job not in self._jobs.values():
            self._jobs[self._submit(job)] = job
        if not wait:
            return None if job in self._jobs.values() else self._runner.stored(job)
        listener = self._runner.listener
        while job in self._jobs.values():  # also where its file is there already
            listener.on_job(job)
            while not (ended := ray.wait([*self._jobs], timeout=_POLL_SECONDS)[0]):
                listener.on_progress(self._runner.part_done(job))
            self._take_result(ended[0])
        return self._runner.stored(job)

    def _take_result(self, task: Any) -> None:
        job = self._jobs.pop(task)
        try:
            result = ray.get(task)
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if not isinstance(cause, RayError):  # as a job in this process would raise it
                raise cause from error
            raise ConnectionError(
                f"{job.name}, seed {job.seed}, failed on the cluster, where it is run up to "
                f"{_RETRIES + 1} times as its workers die: {type(cause).__name__}; Ray's logs tell "
                "why. The same command resumes"
            ) from error
        self._runner.keep(job, result)
        self._runner.listener.on_done(job, result)


def _run_job(folder: SharedFolder, runner: JobRunner, job: Job) -> Result:
    """Run a job in a worker of the cluster."""
    folder.check()
    result = runner.run(job, wait=True)
    assert result is not None  # because it waits
    return result


class _NoListener:
    """A listener that does nothing."""

    def on_start(self, jobs: Sequence[Job], left: Sequence[Job]) -> None: ...
    def on_cluster(self, size: str) -> None: ...
    def on_job(self, job: Job) -> None: ...
    def on_progress(self, part: float) -> None: ...
    def on_wait(self, job: Job) -> None: ...
    def on_done(self, job: Job, result: Result) -> None: ...
