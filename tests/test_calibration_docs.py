"""docs/calibration.md: its table is of the stored results, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bayesify.experiments import Row, find_experiment, ood, read_rows
from bayesify.experiments.ood_table import ood_table

ROOT = Path(__file__).resolve().parents[1]
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
def stored() -> list[Row]:
    rows = read_rows(RESULTS)
    if not rows:
        pytest.skip("results/mnist-ood is not there")
    return rows


def test_what_is_stored_is_this_experiment(stored: list[Row]) -> None:
    units = {unit.file_name: unit for unit in EXPERIMENT.units(EXPERIMENT.seeds, False)}
    for one in stored:
        unit = units[f"{one['unit']}-seed-{one['seed']}.json"]
        assert one["config"] == dict(unit.config)
        assert one["quick"] is False
        assert one["experiment"] == "mnist-ood"


def test_the_page_shows_what_is_stored(stored: list[Row]) -> None:
    _, begin, rest = PAGE.partition("<!-- mnist-ood: begin -->")
    shown, end, _ = rest.partition("<!-- mnist-ood: end -->")
    assert begin
    assert end
    assert shown.strip() == ood_table(stored).strip()


def test_what_the_page_says_in_words_holds_for_every_seed(stored: list[Row]) -> None:
    for seed in {one["seed"] for one in stored}:
        of = {one["unit"]: one["metrics"] for one in stored if one["seed"] == seed}
        ours = [metrics for unit, metrics in of.items() if unit.startswith("bayes")]
        others = [metrics for unit, metrics in of.items() if not unit.startswith("bayes")]
        for mine in ours:
            assert mine["auroc"]["mutual_information"] == max(mine["auroc"].values())
            for other in others:
                assert mine["auroc"]["mutual_information"] > max(other["auroc"].values())
                assert other["auroc"]["entropy"] > other["auroc"]["mutual_information"]
            if "plain" in of:
                assert mine["test"]["error"] > of["plain"]["test"]["error"]
                assert all(mine["test"]["nll"] < one["test"]["nll"] for one in of["plain"]["alone"])


def test_the_figure_has_a_panel_for_each_method(stored: list[Row]) -> None:
    (figure,) = ood.figures(stored).values()
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    first = min(one["seed"] for one in stored)
    assert len(titles) == sum(one["seed"] == first for one in stored)
    assert all(": AUROC 0." in title for title in titles)
