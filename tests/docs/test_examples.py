"""The scripts in examples/: each is short, runs, and prints what its docstring describes."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import bayesify.datasets
from bayesify.datasets import ImageData, load_images

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PRINTS = {
    "distributed.py": r"1 process: test error [\d.]+ %, nll [\d.]+ nats\nequal posteriors: True",
    "conv_mnist.py": r"averaged over 30 weight samples: error [\d.]+ %, nll [\d.]+ nats",
    "last_layer.py": r"last layer Bayesian: nll [\d.]+ nats; uncertainty [\d.]+ nats, of it [\d.]+",
    "skorch_search.py": r"(prior std [\d.]+: nll [\d.]+ nats .*\n){3}best, .*: test error [\d.]+",
    "lstm_rows.py": r"28 +[\d.]+ +[\d.]+ +[\d.]+",
    "transformer_patches.py": r"patches in another order: error [\d.]+ %, nll [\d.]+ nats",
}


def test_every_example_is_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PRINTS)


@pytest.mark.parametrize("name", PRINTS)
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 80


@pytest.mark.filterwarnings("ignore:.*standard deviations have not converged")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("lstm_rows.py", "conv_mnist.py")))
        for name in PRINTS
    ],
)
def test_an_example_runs(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def few(name: str, **options: int) -> ImageData:
        data = load_images(name, **options)
        return replace(
            data, test_inputs=data.test_inputs[:100], test_targets=data.test_targets[:100]
        )

    monkeypatch.setattr(bayesify.datasets, "load_images", few)
    monkeypatch.setattr(sys, "argv", [name, "--epochs", "1", "--limit", "200"])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(PRINTS[name], printed), printed


@pytest.mark.slow
def test_two_processes_hold_one_posterior() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = [str(EXAMPLES / "distributed.py"), "--epochs", "1", "--limit", "2000"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", *script],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"2 processes: test error .*\nequal posteriors: True", done.stdout)
