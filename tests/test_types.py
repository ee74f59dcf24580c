"""What type checkers know of the public names, as a user's program has them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROGRAM = """
from typing import assert_type

import bayesify as bf
import pandas as pd
import torch
from bayesify import prediction
from bayesify.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from torch import nn

net, x = nn.Linear(3, 2), torch.zeros(5, 3)
bnn = bf.BayesianModule(net, likelihood=bf.GaussianLikelihood(std=0.1))
assert_type(bnn.predict(x), prediction.GaussianPredictive)
assert_type(bnn.predict_mean(x), prediction.GaussianPredictive)
assert_type(bf.prune(bnn, fraction=0.5).predict(x), prediction.GaussianPredictive)
assert_type(bf.DeepEnsemble([bnn]).predict(x), prediction.GaussianPredictive)
elbo = bf.ELBO(bnn, num_data=5)

dropout = bf.MCDropout(net, bf.OrdinalLikelihood(3))
assert_type(dropout.predict(x), prediction.OrdinalPredictive)
counts = bf.BayesianModule(net, likelihood=bf.PoissonLikelihood())
assert_type(counts.predict(x), prediction.PoissonPredictive)
classes: bf.BayesianModule = bf.BayesianModule(net)
assert_type(classes.predict(x), bf.Predictive)
assert_type(bf.load("model.safetensors", net).predict(x), bf.Predictive)

frame = pd.DataFrame({"a": [0.0, 1.0]})
assert_type(BayesianMLPRegressor().predictive(frame), prediction.NumericPredictive)
assert_type(BayesianMLPClassifier().predictive(frame), prediction.CategoricalPredictive)
"""


def check(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Check a program by mypy as strictly as it can."""
    path = folder / "program.py"
    path.write_text(program, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy")
def test_a_prediction_has_the_type_of_its_likelihood(tmp_path: Path) -> None:
    found = check(PROGRAM, tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    wrong = PROGRAM.replace("GaussianLikelihood(std=0.1)", "StudentTLikelihood(df=5.0)")
    found = check(wrong, tmp_path)
    assert found.returncode == 1
    assert "StudentTPredictive" in found.stdout
