"""The two experiments of regression: what they compute, and what is stored of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bayesify.datasets import Split
from bayesify.datasets.regression import RegressionData
from bayesify.prediction import GaussianPredictive
from bayesify.reproduce import Context, Job, find_experiment, read_results
from bayesify.reproduce.papers import uci
from bayesify.reproduce.papers.blundell import figure5_regression as regression_curve
from bayesify.reproduce.papers.uci import REPORTED, table_of_means

RESULTS = Path(__file__).resolve().parents[2] / "results"
pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")


def table_of(rows: int = 20) -> tuple[RegressionData, list[Split]]:
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(rows, 3)) * [1.0, 100.0, 0.0] + [0.0, 5.0, 288.15]
    targets = 1000.0 + 0.01 * inputs[:, 0] + 1e-3 * generator.normal(size=rows)
    order = np.arange(rows)
    cut = rows - 5
    return RegressionData("toy", inputs, targets), [
        Split(order[:cut], order[cut:]),
        Split(order[5:], order[:5]),
    ]


def test_each_split_is_standardised_by_its_own_training_part() -> None:
    data, splits = table_of()
    found = uci.standardised(data, splits)
    assert found.train_inputs.shape == (15, 2, 3)
    assert found.test_inputs.shape == (5, 2, 3)
    for k, (train, test) in enumerate(splits):
        centre, spread = data.inputs[train].mean(0), data.inputs[train].std(0)
        expected = (data.inputs[test][:, :2] - centre[:2]) / spread[:2]
        np.testing.assert_allclose(found.test_inputs[:, k, :2], expected, rtol=1e-5, atol=1e-5)
        assert float(found.scale[k]) == data.targets[train].std()
        assert found.test_targets[:, k].tolist() == data.targets[test].tolist()
    # In a training part: mean 0, std 1; and a constant column is 0, not noise blown up.
    torch.testing.assert_close(found.train_targets.mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    assert float(found.train_inputs[..., 2].abs().max()) < 1e-6


def test_the_metrics_are_those_of_each_split_in_its_own_units() -> None:
    data, splits = table_of()
    table = uci.standardised(data, splits)
    means = torch.randn(7, 5, 2, generator=torch.Generator().manual_seed(0))
    stds = 0.5 + means.square()

    class Known:
        def __init__(self, split: int) -> None:
            self.split = split

        def predict(self, inputs: torch.Tensor, num_samples: int) -> GaussianPredictive:
            assert torch.equal(inputs, table.test_inputs[:, self.split])
            assert num_samples == 7
            return GaussianPredictive(means[..., self.split], stds[..., self.split])

    found = uci.evaluate([Known(0), Known(1)], table, 7)  # type: ignore[list-item]
    for k in range(2):
        scale, shift = table.scale[k], table.shift[k]
        y = table.test_targets[:, k]
        mean, std = means[..., k].double() * scale + shift, stds[..., k].double() * scale
        density = (-0.5 * ((y - mean) / std) ** 2).exp() / std / math.sqrt(2 * math.pi)
        assert found["nll"][k] == pytest.approx(-float(density.mean(0).log().mean()), rel=1e-9)
        error = float((mean.mean(0) - y).square().mean().sqrt())
        assert found["rmse"][k] == pytest.approx(error, rel=1e-9)
        assert 0.0 <= found["coverage_95"][k] <= 1.0


@pytest.mark.slow
def test_a_small_run_learns() -> None:
    (job,) = [u for u in find_experiment("uci").jobs((0,), True) if u.name == "yacht"]
    parts: list[float] = []
    metrics = uci.run(job, Context(on_progress=parts.append))
    assert parts[-1] == 1.0
    assert len(metrics["test_nll"]) == job.config["splits"] == 2
    # The nll of knowing but the targets' own mean and spread is 4.1.
    assert max(metrics["test_nll"]) < 2.6
    assert metrics == uci.run(job, Context())


def test_full_and_quick_are_the_same_protocol() -> None:
    full = {job.name: job.config for job in find_experiment("uci").jobs((0,), False)}
    assert sorted(full) == sorted(REPORTED["nll"]["PBP"])
    for job in find_experiment("uci").jobs((0,), True):
        changed = {key for key in job.config if job.config[key] != full[job.name][key]}
        assert changed == {"splits", "steps", "test_samples"}
    # One protocol: only what the literature's own protocol varies differs between the tables.
    names = {key for one in full.values() for key in one if one[key] != full["yacht"][key]}
    assert names == {"dataset", "hidden", "splits"}


def made_up(name: str, residual: float) -> Any:
    metrics = {"test_nll": [1.0, 3.0, 5.0], "test_rmse": [2.0, 2.0, 2.0]}
    more = {"test_coverage_95": [0.9, 0.94, 0.92], "std_residual": residual}
    return {"config": {"dataset": name}, "metrics": {**metrics, **more}}


def test_the_table_tells_what_qualifies_its_numbers() -> None:
    text = uci.table([made_up("yacht", -0.2), made_up("boston", 0.7)])
    assert "| coverage | 92.0 +- 1.2 | 92.0 +- 1.2 |" in text
    assert "| derivative | +0.70 | -0.20 |" in text
    assert "have not converged on: boston (beyond 0.5)" in text
    assert "not converged" not in uci.table([made_up("yacht", -0.2)])


def test_the_standard_error_is_that_of_the_mean_over_splits() -> None:
    rows = [made_up("yacht", -0.2)]
    # The standard deviation over the splits is 2.
    assert f"| **bayesify** | 3.00 +- {2 / 3**0.5:.2f} |" in uci.table(rows)
    assert "| **bayesify** | 2.00 +- 0.00 |" in uci.table(rows)


def test_the_table_counts_what_it_says() -> None:
    nll = {"boston": (2.47, 0.02), "yacht": (0.60, 0.01), "energy": (2.1, 0.1)}
    text = table_of_means(nll, dict.fromkeys(nll, (1.0, 0.1)))
    assert "Lower than Graves VI and PBP: 2 of 3." in text
    assert "than our standard error: 2; lower: 1." in text
    assert "| **bayesify** | 2.47 +- 0.02 | 0.60 +- 0.01 | 2.10 +- 0.10 |" in text
    assert "| PBP | 2.57 | 1.63 | 2.04 |" in text


def test_the_curve_is_the_papers() -> None:
    x = torch.tensor([0.0, 0.25, 0.125])
    expected = [0.0, 0.25 + 0.3, 0.125 + 0.3 * math.sin(math.pi / 4) + 0.3]
    torch.testing.assert_close(regression_curve.curve(x), torch.tensor(expected))
    # The noise is within the sines too: near 0 they are steep, and it is magnified.
    slope = (regression_curve.curve(torch.zeros(1), 1e-3) / 1e-3).item()
    assert slope == pytest.approx(1.0 + 0.3 * 6.0 * math.pi, rel=1e-2)
    x, y = regression_curve.make_data(4000, 0.02, 0)
    assert float(x.min()) >= 0.0
    assert float(x.max()) <= 0.5
    nearby = (x < 0.01).squeeze()
    residuals = (y - regression_curve.curve(x))[nearby]
    assert float(residuals.std()) == pytest.approx(0.02 * slope, rel=0.3)


def curve_run(name: str) -> dict[str, Any]:
    (job,) = [u for u in regression_curve.jobs((0,), True) if u.name == name]
    config = {**job.config, "hidden": [40, 40], "prior_std": 2.0, "test_samples": 200}
    return regression_curve.run(Job(name, 0, config, 0.0), Context())


@pytest.mark.slow
def test_the_range_widens_beyond_the_data() -> None:
    bayes, plain = curve_run("bayes"), curve_run("plain")
    assert min(bayes["iqr_beyond"]) > 3.0 * bayes["iqr_on_data"]
    assert plain["line_iqr_on_data"] == 0.0
    assert plain["line_iqr_beyond"] == [0.0, 0.0]
    assert len(bayes["axis"]) == len(bayes["quantiles"]["0.5"])
    rows = [
        {"seed": 0, "config": dict(job.config), "metrics": metrics}
        for job, metrics in zip(regression_curve.jobs((0,), True), (bayes, plain), strict=True)
    ]
    text = regression_curve.table(rows)
    assert text.count("\n| ") == 4
    (figure,) = regression_curve.figures(rows).values()
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        "Bayes by Backprop",
        "plain network",
    ]


def stored(name: str) -> list[Any]:
    rows = read_results(RESULTS / name)
    assert rows, f"results/{name} is not there"
    return rows


def test_the_stored_curve_is_what_is_asked_of_it() -> None:
    rows = stored("regression-curve")
    for row in rows:
        metrics = row["metrics"]
        if row["job"] == "bayes":
            assert min(metrics["iqr_beyond"]) >= 3.0 * metrics["iqr_on_data"]
        else:
            assert metrics["line_iqr_beyond"] == [0.0, 0.0]
