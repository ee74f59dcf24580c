"""docs/calibration.md: its table is of the stored results, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from bayesify.reproduce import Result, find_experiment, read_results
from bayesify.reproduce.papers import mnist_ood as ood

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "mnist-ood"
PAGE = (ROOT / "docs" / "calibration.md").read_text(encoding="utf-8")
EXPERIMENT = find_experiment("mnist-ood")


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_the_code_runs_and_does_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(snippet, "docs/calibration.md", "exec"), names)
    capsys.readouterr()
    assert float(names["unknown"].double().mean()) > 0.8  # of the inputs far away
    alarms = names["p"].epistemic > names["usual"]
    assert float(alarms.double().mean()) == pytest.approx(0.05, abs=0.005)


@pytest.fixture(scope="module")
def stored() -> list[Result]:
    rows = read_results(RESULTS)
    assert rows, "results/mnist-ood is not there"
    return rows


def test_what_is_stored_is_this_experiment(stored: list[Result]) -> None:
    jobs = {job.file_name: job for job in EXPERIMENT.jobs(EXPERIMENT.seeds, False)}
    for one in stored:
        job = jobs[f"{one['job']}-seed-{one['seed']}.json"]
        assert one["config"] == dict(job.config)
        assert one["quick"] is False
        assert one["experiment"] == "mnist-ood"


def test_the_page_shows_what_is_stored(stored: list[Result]) -> None:
    _, begin, rest = PAGE.partition("<!-- mnist-ood: begin -->")
    shown, end, _ = rest.partition("<!-- mnist-ood: end -->")
    assert begin
    assert end
    assert shown.strip() == ood.table(stored).strip()


def test_what_the_page_says_in_words_holds(stored: list[Result]) -> None:
    by_job: dict[str, list[Any]] = {}
    for one in stored:
        by_job.setdefault(one["job"], []).append(one["metrics"])
    default, wide = by_job.pop("bayes"), by_job.pop("bayes-wide")
    # For every single network with a wide prior mutual information is the better, for the
    # baselines entropy.
    for metrics in wide:
        assert metrics["auroc"]["mutual_information"] == max(metrics["auroc"].values())
    for metrics in (each for group in by_job.values() for each in group):
        assert metrics["auroc"]["entropy"] > metrics["auroc"]["mutual_information"]
    # In the mean, a wide prior tells clothes best, and the defaults worst by entropy. Both have
    # the better likelihood, not the lower error; the defaults are calibrated best.
    plain = [one for each in by_job["plain"] for one in each["alone"]]

    def mean_of(group: list[Any], part: str, score: str) -> float:
        return fmean(each[part][score] for each in group)

    for others in by_job.values():
        for score in others[0]["auroc"]:
            best = mean_of(wide, "auroc", "mutual_information")
            assert best > mean_of(others, "auroc", score)
        worst = mean_of(default, "auroc", "entropy")
        assert worst < mean_of(others, "auroc", "entropy")
        assert mean_of(default, "test", "ece") < mean_of(others, "test", "ece")
    assert mean_of(default, "test", "ece") < mean_of(wide, "test", "ece")
    for group in (default, wide):
        assert mean_of(group, "test", "nll") < fmean(each["test"]["nll"] for each in plain)
        assert mean_of(group, "test", "error") > fmean(each["test"]["error"] for each in plain)


def test_the_figure_has_a_panel_for_each_method(stored: list[Result]) -> None:
    (figure,) = ood.figures(stored).values()
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    first = min(one["seed"] for one in stored)
    assert len(titles) == sum(one["seed"] == first for one in stored)
    assert all(": AUROC 0." in title for title in titles)
