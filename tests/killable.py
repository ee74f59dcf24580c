"""An experiment whose process can be killed after any step, and what of it was trained."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from tests.test_experiments import Silent

from bayesify import ELBO, BayesianModule, fit
from bayesify.datasets import TensorLoader
from bayesify.experiments import Context, Experiment, Row, Unit
from bayesify.experiments.experiment import Progress

EPOCHS = 6


class Counting(Progress):
    """Writes a line for each epoch that was trained, and may end the process in the middle."""

    def __init__(self, context: Context, unit: Unit) -> None:
        super().__init__(context, EPOCHS)
        self._unit = unit

    def on_epoch(self, row: Any) -> None:
        super().on_epoch(row)
        with Path(os.environ["EPOCHS_DONE"]).open("a") as file:
            file.write(f"{self._unit.name} {self._unit.seed} {row['epoch']}\n")

    def on_step(self, *, epoch: int, batch: int) -> None:
        if os.environ.get("KILL_AT") == f"{self._unit.name} {self._unit.seed} {epoch} {batch}":
            os.kill(os.getpid(), signal.SIGKILL)


def trains() -> Experiment:
    def units(seeds: Sequence[int], quick: bool) -> list[Unit]:
        return [Unit(name, seed, {"size": 3}, 1.0) for seed in seeds for name in ("a", "b")]

    def run(unit: Unit, context: Context) -> dict[str, Any]:
        drawn = torch.randn(40, 4, generator=torch.Generator().manual_seed(unit.seed))
        inputs, targets = drawn[:, :3], (drawn[:, 3] > 0).long()
        bnn = BayesianModule(torch.nn.Linear(3, 2), seed=unit.seed)
        with torch.no_grad():
            bnn.posterior.mean.zero_()
        history = fit(
            ELBO(bnn, num_data=40),
            TensorLoader(inputs, targets, 10, seed=unit.seed),
            epochs=EPOCHS,
            checkpoint_dir=context.work,
            resume=True,
            callback=Counting(context, unit),
        )
        return {"value": float(bnn.posterior.mean[0].detach()), "nll": history[-1]["nll"]}

    def table(rows: Sequence[Row]) -> str:
        return "".join(f"| {row['unit']} | {row['metrics']['value']:.9f} |\n" for row in rows)

    def figures(rows: Sequence[Row]) -> dict[str, Figure]:
        return {}

    return Experiment("trains", "a test", "nothing", (0, 1), 100, units, run, table, figures)


RUN = """
    import sys, warnings
    warnings.simplefilter("ignore")
    from pathlib import Path
    from tests.test_experiments import Silent
    from tests.killable import trains
    from bayesify.experiments import reproduce
    reproduce(trains(), Path(sys.argv[1]), Silent())
"""


def start(out: Path, **more: str) -> subprocess.Popen[bytes]:
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(root), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RUN), str(out)],
        env={**os.environ, "PYTHONPATH": path, **more},
    )


@pytest.fixture
def epochs_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "epochs"
    path.touch()
    monkeypatch.setenv("EPOCHS_DONE", str(path))
    monkeypatch.delenv("KILL_AT", raising=False)
    return path


class Silent3(Silent):
    def on_done(self, unit: Unit, row: Row) -> None:
        self.said.append(f"end {unit.name} {unit.seed} {row['seed']}")
