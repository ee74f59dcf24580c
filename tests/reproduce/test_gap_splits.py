"""Gap splits: what is left out, what is measured, and how the table counts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from bayesify.datasets import gap_splits, load_regression
from bayesify.reproduce import Context, find_experiment
from bayesify.reproduce.papers.gap_splits import METHODS

EXPERIMENT = find_experiment("gap-splits")
pytestmark = pytest.mark.filterwarnings("ignore:.*standard deviations have not converged")


@cache
def quick(method: str) -> dict[str, Any]:
    """What a quick job of a hundred steps measures; no test changes it."""
    (job,) = (job for job in EXPERIMENT.jobs((0,), True) if job.config["method"] == method)
    changed = {"dataset": "yacht", "steps": 100}
    return EXPERIMENT.run(replace(job, config={**job.config, **changed}), Context())


def test_each_feature_that_varies_has_its_middle_left_out() -> None:
    inputs = load_regression("yacht").inputs
    splits = gap_splits(np.column_stack([inputs, np.ones(len(inputs))]))
    assert len(splits) == inputs.shape[1]
    for feature, (train, test) in zip(inputs.T, splits, strict=True):
        assert sorted([*train, *test]) == list(range(len(inputs)))
        assert len(test) == len(inputs) // 3
        below, above = np.split(feature[train], [(len(inputs) - len(test)) // 2])
        assert below.max() <= feature[test].min()
        assert feature[test].max() <= above.min()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (np.ones(5), r"shape \(N, d\) with at least 3 rows, got shape \(5,\)"),
        (np.eye(2), r"at least 3 rows, got shape \(2, 2\)"),
        (np.array([[1.0], [np.nan], [2.0]]), "must be finite"),
        (np.ones((5, 2)), "a feature that is not constant, got none"),
    ],
)
def test_a_table_without_a_gap_is_refused(inputs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gap_splits(inputs)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_measured_in_each_gap(method: str) -> None:
    metrics = quick(method)
    assert (metrics["num_train"], metrics["num_test"]) == (206, 102)
    for name in ("nll", "rmse", "coverage_95"):
        assert len(metrics[name]) == 2
    assert all(0.0 < rmse < 30.0 for rmse in metrics["rmse"])


def test_methods_differ_and_a_mixture_has_several_parts() -> None:
    found = {method: quick(method)["nll"] for method in METHODS}
    assert len({tuple(nlls) for nlls in found.values()}) == len(METHODS)


def test_the_table_compares_split_by_split() -> None:
    def made_up(
        method: str, nlls: list[float], seed: int = 0, dataset: str = "energy"
    ) -> dict[str, Any]:
        shares = [0.9 for _ in nlls]
        metrics = {"nll": nlls, "rmse": nlls, "coverage_95": shares}
        return {
            "seed": seed,
            "config": {"dataset": dataset, "method": method},
            "metrics": {**metrics, "num_train": 512, "num_test": 256},
        }

    results = [
        made_up("mean field", [1.0, 2.0, 9.0]),
        made_up("mean field", [1.0, 2.0, 9.0], 1),
        made_up("full covariance", [2.0, 1.0, 3.0]),
        made_up("full covariance", [2.0, 1.0, 3.0]),
    ]
    text = EXPERIMENT.table(results)
    assert "**energy**, 3 splits, 512 training and 256 test rows" in text
    assert "| mean field | 4.00 +- 2.52 | 2.00 |  | 4.00 +- 2.52 | 90.0 +- 0.0 |" in text
    assert "| full covariance | 2.00 +- 0.58 | 2.00 | 2 of 3 |" in text
    assert "naval" not in text.partition("**energy**")[2]
    results.append(made_up("by layer", [1.0], dataset="naval"))
    assert "**naval**, 1 split, 512" in EXPERIMENT.table(results)
    (figure,) = EXPERIMENT.figures(results).values()
    assert [axes.get_title("left") for axes in figure.axes] == ["energy", "naval"]
