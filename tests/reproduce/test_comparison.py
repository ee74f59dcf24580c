"""The fair comparison on MNIST: equal effort, stored settings, statistics, quick runs."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import ttest_ind, ttest_rel
from tests.killable import Silent3

from bayesify.app.runs import RunConfig
from bayesify.distributions.priors import Gaussian
from bayesify.reproduce import Job, Result, find_experiment, read_results, reproduce
from bayesify.reproduce.harness.seed_statistics import (
    holm_adjusted,
    paired_p_value,
    welch_p_value,
)
from bayesify.reproduce.papers.blundell.bound import LOWEST, SEVERAL, WARM_UPS, make_network
from bayesify.reproduce.papers.blundell.classifiers import FRACTIONS, METHODS
from bayesify.reproduce.papers.blundell.comparison import CHOSEN
from bayesify.reproduce.papers.blundell.ensemble import pooled
from bayesify.reproduce.papers.blundell.tuning import TRIALS, best_trials

pytestmark = [
    pytest.mark.filterwarnings("ignore:the posterior's standard deviations:UserWarning"),
    pytest.mark.filterwarnings("ignore:the posterior's standard deviations::bayesify"),
    pytest.mark.filterwarnings("ignore:free energy:UserWarning"),
]
RESULTS = Path(__file__).resolve().parents[2] / "results"
NAMES = (
    "blundell-tuning",
    "blundell-comparison",
    "blundell-bound",
    "train-defaults",
    "blundell-ensemble",
)
TUNING, COMPARISON, BOUND, DEFAULTS, ENSEMBLE = map(find_experiment, NAMES)


def config_of(job: Job) -> RunConfig:
    settings = job.config["settings"]
    return RunConfig.of("mnist", **{**settings, "hidden": tuple(settings["hidden"])})


def test_every_method_has_the_same_effort() -> None:
    tried = TUNING.jobs((0,), False)
    assert set(Counter(job.config["method"] for job in tried).values()) == {TRIALS}
    assert len({json.dumps(job.config, sort_keys=True) for job in tried}) == len(tried)
    assert {job.config["held_out"] for job in tried} == {10_000}
    shown = COMPARISON.jobs((0, 1, 2, 3, 4), False)
    assert set(Counter(job.name for job in shown).values()) == {5}
    for jobs in (tried, shown):
        configs = [config_of(job) for job in jobs]
        same = {(c.epochs, c.batch_size, c.schedule, c.precision, c.limit) for c in configs}
        assert same == {(40, 256, "cosine", "bfloat16", None)}
        assert {c.temperature for c in configs} == {1.0}
    assert all("held_out" not in job.config for job in shown)
    widths = {job.config["width"] for job in shown}
    assert {job.name for job in shown} == {f"{name}-{w}" for name in METHODS for w in widths}


def test_the_settings_are_those_of_the_best_stored_trials() -> None:
    stored = read_results(RESULTS / "blundell-tuning")
    assert len(stored) == TRIALS * len(METHODS)
    assert not any("dirty" in result["commit"] for result in stored)
    for name, best in best_trials(stored).items():
        assert best["job"] == f"{name}-{CHOSEN[name].trial:02d}"
        temperature = best["metrics"]["logit_temperature"]
        assert CHOSEN[name].logit_temperature == pytest.approx(temperature, abs=0.005)
    for job in COMPARISON.jobs((0,), False):
        [trial] = [
            r for r in stored if r["job"] == best_trials(stored)[job.config["method"]]["job"]
        ]
        ours = {**job.config["settings"], "hidden": [400, 400]}
        assert ours == trial["config"]["settings"]


def test_welch_and_holm() -> None:
    one, other = [1.0, 2.0, 4.0, 4.5], [2.0, 3.5, 5.0]
    assert welch_p_value(one, other) == ttest_ind(one, other, equal_var=False).pvalue
    assert welch_p_value(one, other) != ttest_ind(one, other).pvalue
    assert welch_p_value([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert paired_p_value(one, [*other, 6.0]) == ttest_rel(one, [*other, 6.0]).pvalue
    assert paired_p_value(one, one) == 1.0
    # The second is not below the first, although 2 * 0.011 is.
    assert holm_adjusted([0.01, 0.011, 0.9]) == pytest.approx([0.03, 0.03, 0.9])
    assert holm_adjusted([0.6, 0.7]) == [1.0, 1.0]


def scored(error: float, nll: float) -> dict[str, float]:
    return {"error": error, "nll": nll}


def made_up(name: str, seed: int, error: float) -> Result:
    """A result whose every kind of prediction has a number of its own."""
    kinds = ("mean-weights", "scaled", "averaged", *(f"pruned-{f:g}" for f in FRACTIONS[1:]))
    network = {kind: scored(error + 0.001 * place, 0.05) for place, kind in enumerate(kinds)}
    network["averaged"]["nll"] = 0.06 + 0.001 * seed
    network["scaled"]["nll"] = 0.05 + 0.001 * (seed % 3)
    if name.startswith("sgd"):
        del network["averaged"]
    metrics: dict[str, Any] = {
        "networks": [network] * 3,
        "ensemble": {kind: scored(error - 0.1, 0.04) for kind in network},
        "weights": {f"{fraction:g}": 1000 for fraction in FRACTIONS},
        "last": [{}] * 3,
    }
    return {"job": f"{name}-400", "seed": seed, "metrics": metrics}


def test_the_tables_say_what_the_results_hold() -> None:
    results = [made_up("sgd-dropped", seed, 1.2 + 0.01 * seed) for seed in range(5)]
    results += [made_up("mixture-dropped", seed, 1.4 + 0.02 * seed) for seed in range(5)]
    text = COMPARISON.table(results)
    assert "| SGD, pixels dropped | 5 | 1.22 +- 0.01 |  | 0.0500 +- 0.0000 |" in text
    assert "| Bayes, scale mixture, pixels dropped | 5 | 1.44 +- 0.01 | 1.44 +- 0.01 |" in text
    assert "SGD, pixels dropped, ensemble of 3 | 5 | 1.12 +- 0.01" in text
    assert "| 3,000 |" in text, "weights of all members"
    fixed, _, later = text.partition("Not among those")
    pattern = r"^\| 2x400 \| Bayes, .*\| (.*) \| (.*) \| (.*) \| (.*) \| (.*) \|$"
    rows = re.findall(pattern, fixed, re.M)
    [added] = re.findall(pattern, later, re.M)
    assert added[:2] == ("nll, averaged against scaled", "+0.0112")
    assert added[2] == added[3], "adjusted for one comparison"
    assert f"{len(rows)} comparisons" in text
    p = welch_p_value([1.4 + 0.02 * s for s in range(5)], [1.2 + 0.01 * s for s in range(5)])
    assert ("error, mean weights", "+0.22", f"{p:.2g}") in [row[:3] for row in rows]
    ours, theirs = (
        [mean + step * s for s in range(5)] for mean, step in ((1.4, 0.02), (1.2, 0.01))
    )
    assert {f"{ttest_rel(ours, theirs).pvalue:.2g}"} <= {row[4] for row in rows}
    assert not re.search(r"\| .* \|  \|$", text.partition("Welch's")[2])
    fewer = COMPARISON.table(results[1:]).partition("Welch's")[2]
    assert re.search(r"\|  \|$", fewer, re.M), "other seeds are not paired"
    whole = [float(row[3]) for row in rows]
    assert all(float(row[2]) <= adjusted for row, adjusted in zip(rows, whole, strict=True))


def test_an_ensemble_has_the_settings_of_the_comparison() -> None:
    made = {job.name: job.config["settings"] for job in ENSEMBLE.jobs((3,), False)}
    like = {job.name: job.config["settings"] for job in COMPARISON.jobs((3,), False)}
    for name, method, epochs in (
        ("ensemble", "mixture-dropped", 40),
        ("ensemble-100-epochs", "mixture-dropped", 100),
        ("plain-ensemble-100-epochs", "sgd-dropped", 100),
    ):
        asked = {**like[f"{method}-400"], "hidden": [800, 800], "epochs": epochs}
        assert made.pop(name) == asked
    assert not made
    one, other = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.3, 0.7]]).log()
    first, both = pooled([one, other])
    torch.testing.assert_close(first, one.double(), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(both.exp(), torch.tensor([[0.6, 0.4]]).double(), rtol=1e-6, atol=0.0)


def test_the_bound_is_the_bound() -> None:
    """Temperature 1 everywhere; a warm-up that ends early in the runs that minimise it."""
    jobs = {job.name: job.config for job in BOUND.jobs((0,), False)}
    assert [(job.name, job.seed) for job in BOUND.jobs((0, 4), False) if job.seed] == [
        (name, 4) for name in jobs if name in SEVERAL
    ]
    assert len(jobs) == len(LOWEST) + len(WARM_UPS)
    for name, config in jobs.items():
        if name.startswith("lowest-"):
            assert config["kl_warmup"] <= 0.5
        assert "temperature" not in config
        bnn = make_network({**config, "width": 2}, seed=0)
        assert bnn.layout.num_weights == 784 * 2 + 2 + 2 * 2 + 2 + 2 * 10 + 10
        if config["prior"]["kind"] == "gaussian":
            assert bnn.prior == Gaussian(config["prior"]["std"])


@pytest.mark.slow
@pytest.mark.usefixtures("few_test_images")
@pytest.mark.parametrize("name", NAMES)
def test_quick_runs_are_whole(name: str, tmp_path: Path) -> None:
    experiment = find_experiment(name)
    outcome = reproduce(experiment, tmp_path, Silent3(), quick=True)
    assert [row["job"] for row in outcome.results] == [
        job.name for job in experiment.jobs((0,), True)
    ]
    table = outcome.table.read_text()
    assert table.startswith("**Quick run: ")
    assert "nan" not in table
    assert all(path.stat().st_size > 10_000 for path in outcome.figures)
    if name == "blundell-comparison":
        for row in outcome.results:
            check_ensemble(row["metrics"])


def check_ensemble(metrics: dict[str, Any]) -> None:
    """The log of an average is above the average of logs, with equality for equal members."""
    if "ensemble" in metrics:
        for kind, together in metrics["ensemble"].items():
            alone = [network[kind]["nll"] for network in metrics["networks"]]
            assert len(set(alone)) == 3, "members differ"
            assert together["nll"] < sum(alone) / 3
