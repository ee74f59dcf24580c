"""Risk certificates on MNIST: what is computed, the table, and what is stored."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bayesify.metrics import binary_kl_inverse
from bayesify.reproduce import Context, Job, find_experiment, read_results
from bayesify.reproduce.papers.certificates import REPORTED

EXPERIMENT = find_experiment("certificates")
RESULTS = Path(__file__).resolve().parents[2] / "results" / "certificates"
pytestmark = [
    pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:the posterior's standard deviations"),
]


def small(name: str, **settings: Any) -> Job:
    """A job with 400 images."""
    [job] = [job for job in EXPERIMENT.jobs((0,), True) if job.name == name]
    tiny = {"limit": 400, "num_samples": 300, "test_samples": 300, **settings}
    return Job(job.name, job.seed, {**job.config, **tiny}, job.seconds, job.datasets)


def test_the_first_seed_has_the_papers_networks_and_each_the_small_ones() -> None:
    jobs = EXPERIMENT.jobs((3, 4), False)
    assert [job.name for job in jobs if job.seed == 4] == ["small-fc-f-quad", "small-lenet5-f-quad"]
    first = {job.name: job.config for job in jobs if job.seed == 3}
    assert {f"{network}-f-quad" for network in REPORTED} <= set(first)
    for name, config in first.items():
        assert name.endswith(config["objective"])
        assert (config["prior_part"], config["num_candidates"]) == (0.5, 5)
    assert first["fc-f-quad"]["hidden"] == [600, 600, 600]


@pytest.mark.parametrize("objective", ["f-quad", "elbo"])
def test_a_job_repeats_and_resumes(objective: str, tmp_path: Path) -> None:
    job = small(f"fc-{objective}")
    parts: list[float] = []
    metrics = EXPERIMENT.run(job, Context(on_progress=parts.append, work=tmp_path))
    assert parts[-1] == 1.0
    assert parts == sorted(parts)
    assert metrics == EXPERIMENT.run(job, Context(work=tmp_path)) == EXPERIMENT.run(job, Context())
    found = metrics["certificate"]
    assert (found["num_examples"], found["num_candidates"]) == (200, 5)
    assert found["kl"] > metrics["at_prior"]["certificate"]["kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn-f-quad", "lenet5-f-quad"])
def test_a_convolutional_job_runs(name: str) -> None:
    metrics = EXPERIMENT.run(small(name, num_samples=40, test_samples=40), Context())
    assert 0.0 < metrics["certificate"]["error_bound"] <= 100.0


def result(name: str, seed: int, bound: float, test: float) -> dict[str, Any]:
    config = {"objective": "f-quad", "delta": 0.025, "delta_sampling": 0.01, "num_candidates": 5}
    certificate = {"error_bound": bound, "kl": 0.5}
    metrics = {
        "certificate": certificate,
        "test_error_sampled": test,
        "test_error_mean_weights": 1.0,
        "at_prior": {"certificate": {"error_bound": bound + 1.0}},
    }
    return {"job": name, "seed": seed, "config": config, "metrics": metrics}


def test_the_table_counts_the_certificates_that_hold() -> None:
    made = [
        result("fc-f-quad", 0, 2.5, 1.8),
        result("small-fc-f-quad", 0, 6.0, 5.0),
        result("small-fc-f-quad", 1, 6.0, 6.5),
        result("small-fc-f-quad", 2, 6.0, 6.0),
    ]
    text = EXPERIMENT.table(made)
    assert (
        "| fully connected, 4 layers, 600 units | f-quad | 2.79 | 2.50 | 3.50 | 1.80 | 1.00 | 0.5 "
        "| 1 of 1 | 1 |" in text
    )
    assert "| 6.00 +- 0.00 | 7.00 +- 0.00 | 5.83 +- 0.44 |" in text
    assert "| 2 of 3 | 3 |" in text
    assert "probability 0.965" in text
    drawn = EXPERIMENT.figures(made)["certificates"]
    assert [label.get_text() for label in drawn.axes[0].get_yticklabels()] == [
        "fully connected, 4 layers, 600 units, f-quad",
        "fully connected, 2x100, 10,000 images, f-quad",
    ]


def test_the_stored_certificates_hold_and_follow_from_their_numbers() -> None:
    results = read_results(RESULTS)
    assert results, "results/certificates is not there"
    for each in results:
        metrics, found = each["metrics"], each["metrics"]["certificate"]
        n, m, count = (found[k] for k in ("num_examples", "num_samples", "num_candidates"))
        assert metrics["test_error_sampled"] <= found["error_bound"], each["job"]
        sampled = binary_kl_inverse(
            found["error"] / 100, math.log(2 * count / found["delta_sampling"]) / m
        )
        complexity = found["kl"] + math.log(2 * n**0.5 * count / found["delta"])
        bound = 100 * binary_kl_inverse(sampled, complexity / n)
        assert found["error_bound"] == pytest.approx(bound, rel=1e-9)
    [fc] = [each for each in results if each["job"] == "fc-f-quad"]
    assert fc["metrics"]["certificate"]["error_bound"] <= 3.0
