"""An experiment whose process can be killed after any step, and what of it was trained."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from tests.reproduce.test_experiments import Silent

from bayesify import ELBO, BayesianModule, fit
from bayesify.datasets import TensorLoader
from bayesify.reproduce import Context, Experiment, Job, Result, reproduce
from bayesify.reproduce.harness.experiment import EpochProgress

EPOCHS = 6


class Counting(EpochProgress):
    """Writes a line for each epoch that was trained, and may end the process in the middle."""

    def __init__(self, context: Context, job: Job) -> None:
        super().__init__(context, EPOCHS)
        self._unit = job

    def on_epoch(self, row: Any) -> None:
        super().on_epoch(row)
        with Path(os.environ["EPOCHS_DONE"]).open("a") as file:
            file.write(f"{self._unit.name} {self._unit.seed} {row['epoch']}\n")

    def on_step(self, *, epoch: int, batch: int) -> None:
        if os.environ.get("KILL_AT") == f"{self._unit.name} {self._unit.seed} {epoch} {batch}":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))


def trains() -> Experiment:
    def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
        return [Job(name, seed, {"size": 3}, 1.0) for seed in seeds for name in ("a", "b")]

    def run(job: Job, context: Context) -> dict[str, Any]:
        drawn = torch.randn(40, 4, generator=torch.Generator().manual_seed(job.seed))
        inputs, targets = drawn[:, :3], (drawn[:, 3] > 0).long()
        bnn = BayesianModule(torch.nn.Linear(3, 2), seed=job.seed)
        with torch.no_grad():
            bnn.posterior.mean.zero_()
        history = fit(
            ELBO(bnn, num_data=40),
            TensorLoader(inputs, targets, 10, seed=job.seed),
            epochs=EPOCHS,
            checkpoint_dir=context.work,
            resume=True,
            callback=Counting(context, job),
        )
        return {"value": float(bnn.posterior.mean[0].detach()), "nll": history[-1]["nll"]}

    def table(rows: Sequence[Result]) -> str:
        return "".join(f"| {row['job']} | {row['metrics']['value']:.9f} |\n" for row in rows)

    def figures(rows: Sequence[Result]) -> dict[str, Figure]:
        return {}

    return Experiment("trains", "a test", "nothing", (0, 1), 100, jobs, run, table, figures)


class Forked:
    """A copy of this process that runs a function and ends; far faster than a new interpreter."""

    def __init__(self, run: Callable[[], object], **environment: str) -> None:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            # Other tests may have loaded JAX, which warns of its threads; the copy does not use it.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                os.environ.update(environment)
                run()
                code = 0
            finally:
                os._exit(code)  # pytest's own clean-up is the parent's

    def wait(self) -> int:
        """Return the exit status, or the negative number of the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def start(out: Path, **environment: str) -> Forked:
    """Run the experiment in another process."""
    return Forked(lambda: reproduce(trains(), out, Silent()), **environment)


def without_times(result: Result) -> dict[str, Any]:
    """Leave out what may differ: time, load, and the commit, as HEAD may move during a test."""
    notes = [note for note in result["notes"] if not note.startswith("begun at commit")]
    may_differ = ("seconds", "load", "commit")
    kept = {key: value for key, value in result.items() if key not in may_differ}
    return {**kept, "notes": notes}


@pytest.fixture
def epochs_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "epochs"
    path.touch()
    monkeypatch.setenv("EPOCHS_DONE", str(path))
    monkeypatch.delenv("KILL_AT", raising=False)
    return path


class Quiet(Silent):
    """A listener for jobs whose results have other metrics."""

    def on_done(self, job: Job, row: Result) -> None:
        self.said.append(f"end {job.name} {row['seed']}")


class Silent3(Silent):
    def on_done(self, job: Job, row: Result) -> None:
        self.said.append(f"end {job.name} {job.seed} {row['seed']}")
