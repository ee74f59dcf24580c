"""The public names of ``bayesify``: the tour in its docstring, and subpackages on first use."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify

LAZY = ("bandits", "datasets", "metrics", "plots", "sklearn")


def test_the_docstring_names_what_there_is() -> None:
    named = set(re.findall(r"``(\w+)``", str(bayesify.__doc__)))
    assert named <= set(dir(bayesify))
    assert set(LAZY) < named
    helpers = {
        "ELBOTerms",
        "Estimator",
        "Likelihood",
        "ParameterLayout",
        "Posterior",
        "PosteriorFamily",
        "Prior",
    }
    assert set(bayesify.__all__) - named == helpers | {
        "kl_divergence",
        "MissingKLWarning",
        "SharedNoiseWarning",
    }


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_the_example_of_the_docstring_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    x, y = torch.randn(20, 4), torch.randint(3, (20,))
    example = re.findall(r"^    .*\n?", str(bayesify.__doc__).partition("Where to look")[0], re.M)
    code = textwrap.dedent("".join(example)).replace("num_data=60_000", "num_data=20")
    names = {
        "net": nn.Linear(4, 3),
        "train_loader": DataLoader(TensorDataset(x, y), batch_size=5),
        "x": x,
    }
    exec(code, names)
    assert names["p"].mean.shape == (20, 3)
    pruned = bayesify.load("model.safetensors", nn.Linear(4, 3))
    assert int((pruned.posterior.mean == 0).sum()) == 14


def test_subpackages_are_imported_on_first_use() -> None:
    probe = f"""
import sys, bayesify
loaded = lambda: [name for name in {LAZY} if f"bayesify.{{name}}" in sys.modules]
assert "torch" not in sys.modules
from bayesify import *
assert set(bayesify.__all__) <= set(globals())
assert fit is bayesify.fit and callable(fit)
assert loaded() == [], loaded()
assert set({LAZY}) < set(dir(bayesify))
assert bayesify.metrics is sys.modules["bayesify.metrics"]
assert "metrics" in loaded()
"""
    subprocess.run([sys.executable, "-c", probe], check=True)
    for name in (*LAZY, "training", "estimators"):
        assert getattr(bayesify, name) is importlib.import_module(f"bayesify.{name}")
    with pytest.raises(AttributeError, match="module 'bayesify' has no attribute 'magic'"):
        bayesify.magic  # noqa: B018


#: A module that is hidden, what needs it, and the extra that brings it.
OPTIONAL = [
    ("sklearn", "bayesify.sklearn", "sklearn"),
    ("pandas", "bayesify.sklearn", "sklearn"),
    ("lightning", "bayesify.integrations.lightning", "lightning"),
    ("transformers", "bayesify.integrations.transformers", "transformers"),
    ("peft", "bayesify.adapters", "adapters"),
    ("matplotlib", "bayesify.plots", "cli"),
]


def test_a_missing_package_is_told_with_the_extra_that_brings_it() -> None:
    program = f"""
        import importlib, sys
        for hidden, needs, extra in {OPTIONAL}:
            sys.modules[hidden] = None
            try:
                importlib.import_module(needs)
            except ImportError as error:
                print("ok" if f"bayesify[{{extra}}]" in str(error) else error)
            else:
                print(needs, "was imported without", hidden)
            del sys.modules[hidden]
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert found.stdout.split("\n")[:-1] == ["ok"] * len(OPTIONAL), found
