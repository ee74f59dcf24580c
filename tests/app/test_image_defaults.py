"""The defaults of runs on images: those of the best stored trial, and their dependence."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from bayesify.app.runs import RunConfig
from bayesify.distributions.priors import Gaussian, ScaleMixture
from bayesify.reproduce import find_experiment, read_results
from bayesify.reproduce.harness.image_runs import settings_of
from bayesify.reproduce.papers.train_defaults import TRIALS, best_trial

RESULTS = Path(__file__).resolve().parents[2] / "results"


def test_defaults_are_those_of_the_best_stored_trial() -> None:
    stored = read_results(RESULTS / "train-defaults")
    assert len(stored) == 1 + 2 * TRIALS
    assert not any("dirty" in result["commit"] for result in stored)
    jobs = {job.name: job.config for job in find_experiment("train-defaults").jobs((0,), False)}
    assert {result["job"]: result["config"] for result in stored} == jobs
    best = best_trial(stored)
    assert best is not None
    assert RunConfig.of("mnist") == RunConfig.of("mnist", **settings_of(best["config"]["settings"]))


def scored(nll: float, whole: float, pruned: float) -> dict[str, Any]:
    means = {"averaged": {"nll": nll}, "mean_weights": {"error": whole}}
    return {"metrics": {**means, "pruned": {"0.9": {"error": pruned}}}}


def test_a_trial_that_loses_its_error_when_pruned_is_not_chosen() -> None:
    lossy, kept, worse = scored(0.05, 1.5, 1.61), scored(0.06, 1.6, 1.7), scored(0.07, 1.5, 1.5)
    assert best_trial([worse, lossy, kept]) is kept
    assert best_trial([lossy]) is None


def test_one_std_has_its_own_defaults() -> None:
    assert RunConfig.of("mnist").make_prior() == ScaleMixture(0.1, 0.5, 0.01)
    before = RunConfig.of("mnist", prior="gaussian")
    assert before.make_prior() == Gaussian(0.3)
    assert (before.kl_warmup, before.kl_warmup_power, before.lr) == (0.75, 1.0, 1.5e-3)
    assert RunConfig.of("mnist", prior_std=0.3) == before
    assert RunConfig.of("mnist", net="lenet5").make_prior() == Gaussian(0.3)
    mixed = RunConfig.of("mnist", net="lenet5", prior="scale-mixture")
    assert mixed.make_prior() == ScaleMixture(0.75, 1.0, math.exp(-8.0))
    table = RunConfig.of("a.csv", target="y", task="classification", prior="scale-mixture")
    assert table.make_prior() == mixed.make_prior()
    assert (table.kl_warmup, table.kl_warmup_power) == (0.3, 1.0)
    assert RunConfig.of("mnist", kl_warmup=0.5).kl_warmup_power == 1.0
    assert RunConfig.of("mnist", baseline="sgd").epochs == RunConfig.of("mnist").epochs


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"prior_std": 0.2},
        {"prior": "laplace", "kl_warmup_power": 2.0},
        {"kl_warmup": 0.95, "kl_warmup_power": 2.0},
        {"kl_warmup": 0.2, "kl_warmup_power": 4.0, "lr": 1.5e-3},
        {"net": "lenet5", "prior": "scale-mixture", "estimator": "antithetic"},
        {"net": "lenet5", "train_samples": 2, "epochs": 30},
        {"optimizer": "sgd", "lr": 1.82e-3},
        {"baseline": "sgd", "epochs": 25, "lr": 1.5e-3},
        {"baseline": "dropout", "dropout_hidden": 0.0, "optimizer": "adam", "lr": 0.02},
    ],
)
def test_the_unusual_settings_give_all_others(given: dict[str, Any]) -> None:
    config = RunConfig.of("mnist", **given)
    unusual = config.unusual()
    assert RunConfig.of("mnist", **unusual) == config
    assert len(unusual) <= len(given) + 1, "the prior is named too"


def test_settings_that_do_nothing_are_not_named() -> None:
    """A baseline that was stored when the mixture of the settings was another one."""
    stored = dataclasses.replace(RunConfig.of("mnist", baseline="sgd"), pi=0.75, std1=1.0)
    assert stored.unusual() == {"baseline": "sgd"}
