"""The Python code of README and of the pages that no other test runs."""

from __future__ import annotations

import doctest
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bayesify as bf

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:.*standard deviations have not converged")


#: Shorter trainings: what a page writes, and what runs. No check needs the page's own number: those
#: of what was learned have to hold after few steps.
SHORTER: dict[str, dict[str, str]] = {
    "README.md": {
        "epochs=20": "epochs=8",
        "num_samples=100": "num_samples=20",
        "(random_state=0)": "(steps=200, random_state=0)",
    },
    "docs/conformal.md": {"(random_state=0)": "(steps=200, random_state=0)"},
    "docs/scikit-learn.md": {"(random_state=0)": "(steps=200, random_state=0)"},
}


def run_snippets(page: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a page's Python snippets one after the other; return their names."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for written, short in SHORTER.get(page, {}).items():
        assert written in text
        text = text.replace(written, short)
    found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert found
    for snippet in found:
        exec(compile(snippet, page, "exec"), names)
    return names


class Parts(nn.Module):
    """A network with the submodules of docs/any-network.md."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(self.embed(x))))


def classification(net: nn.Module) -> dict[str, Any]:
    """What a reader has before the first line of a page: a network, data, an objective."""
    x, y = torch.randn(16, 4), torch.arange(16) % 3
    dataset = torch.utils.data.TensorDataset(x, y)
    bnn = bf.BayesianModule(net)
    return {
        "bf": bf,
        "torch": torch,
        "net": net,
        "bnn": bnn,
        "x": x,
        "y": y,
        "dataset": dataset,
        "loader": torch.utils.data.DataLoader(dataset, 8),
    }


def mixtures() -> dict[str, Any]:
    names = classification(Parts())
    names["make_net"] = lambda: nn.Linear(4, 3)
    return names | {"targets": names["y"]}


def pruned_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))


def backends() -> dict[str, Any]:
    names = classification(nn.Linear(4, 3))
    names["make_net"] = lambda: nn.Linear(4, 3)
    names["elbo"] = bf.ELBO(names["bnn"], num_data=16)
    return names


def widths() -> dict[str, Any]:
    names = classification(nn.Linear(4, 3))
    return {**names, "train": names["dataset"], "held_out": names["loader"]}


PAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/active-learning.md": dict,
    "docs/any-network.md": lambda: classification(Parts()),
    "docs/compression.md": lambda: classification(nn.Linear(4, 3)),
    "docs/continual-learning.md": dict,
    "docs/estimators.md": lambda: classification(Parts()),
    "docs/gpu.md": lambda: classification(nn.Linear(4, 3)),
    "docs/likelihoods.md": dict,
    "docs/objective.md": lambda: classification(Parts()),
    "docs/referee.md": dict,
    "docs/several-processes.md": lambda: classification(nn.Linear(4, 3)),
    "docs/pruning.md": lambda: classification(pruned_net()),
    "docs/prediction.md": lambda: classification(Parts()),
    "docs/backends.md": backends,
    "docs/ivon.md": lambda: classification(nn.Linear(4, 3)),
    "docs/which-prior.md": widths,
    "docs/which-posterior.md": mixtures,
    "docs/table-comparison.md": dict,
    "docs/export.md": lambda: classification(nn.Linear(4, 3)),
}


#: Those that train for a minute.
LONG = ("docs/which-posterior.md", "docs/table-comparison.md")


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page in LONG)) for page in PAGES]
)
def test_the_code_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    run_snippets(page, PAGES[page]())


def test_the_layer_that_a_page_holds_stays_as_it_is() -> None:
    names = run_snippets("docs/any-network.md", classification(Parts()))
    bnn, posterior = names["bnn"], names["bnn"].posterior
    before = [each.detach().clone() for each in (posterior.mean, posterior.rho)]
    elbo = bf.ELBO(bnn, num_data=16)
    bf.fit(elbo, names["loader"], epochs=2, progress=False)
    for old, new in zip(before, (posterior.mean, posterior.rho), strict=True):
        held = bnn.layout.unflatten(old == new)
        assert all(bool(each.all()) == name.startswith("body.") for name, each in held.items())


def test_the_summary_is_the_one_that_is_shown() -> None:
    text = (ROOT / "docs" / "estimators.md").read_text(encoding="utf-8")
    test = doctest.DocTestParser().get_doctest(
        re.sub(r"^```$", "", text, flags=re.M),
        {"bf": bf, "nn": nn, "torch": torch},
        "docs/estimators.md",
        None,
        0,
    )
    assert test.examples
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


def test_the_code_for_certificates_runs(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names = run_snippets("docs/certificates.md", {})
    found = names["certificate"]
    assert (found.num_examples, found.num_candidates) == (2000, 1)
    assert found.error < found.error_bound < 30.0
    assert capsys.readouterr().out.startswith(str(found))


def test_the_code_for_training_runs(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names = run_snippets("docs/training.md", classification(nn.Linear(4, 3)))
    assert "good enough" in capsys.readouterr().out
    noise = names["noise"]
    assert 0.05 < noise[:80].mean() < 0.25
    assert 0.35 < noise[-80:].mean() < 0.75


@pytest.mark.slow
def test_readme_trains_on_mnist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_snippets("README.md", {})
    error = re.search(r"test error ([\d.]+) %, least certain: image \d+", capsys.readouterr().out)
    assert error
    assert float(error[1]) < 3.0
    assert (tmp_path / "small.safetensors").stat().st_size < 1_200_000
    assert names["std"].shape == names["low"].shape == names["new"].shape[:1]


@pytest.mark.slow
def test_the_code_for_scikit_learn_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_snippets("docs/scikit-learn.md", {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].startswith("the 95 % intervals hold")
    accuracy = next(line for line in printed if line.startswith(("0.", "1.")))
    assert float(accuracy) > 0.9  # in cross-validation
    assert "['number', 'category', 'date']" in printed
    assert any(line.startswith("blood: RMSE rises by") for line in printed)
    assert names["model"].score(names["X"], names["y"]) > 0.9  # after partial_fit


@pytest.mark.slow
def test_the_code_for_guaranteed_coverage_runs(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names = run_snippets("docs/conformal.md", {})
    held = re.search(r"holds (\d+) %", capsys.readouterr().out)
    assert held
    assert 80 <= int(held[1]) <= 100
    hits = [y in labels for y, labels in zip(names["y_new"], names["labels"], strict=True)]
    assert sum(hits) / len(hits) > 0.8
    y = names["y"][200:]
    inside = (names["low"] <= y) & (y <= names["high"])
    assert 0.75 < float(inside.double().mean()) < 1.0
