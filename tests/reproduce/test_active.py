"""Active learning on MNIST: the features, the loop that asks, resuming, the table."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from bayesify.io import StorageError
from bayesify.reproduce import Context, Job, find_experiment, read_results
from bayesify.reproduce.papers.active.asking import Problem, ask, balanced, load_problem
from bayesify.reproduce.papers.active.experiment import REPORTED, labels_needed
from bayesify.reproduce.papers.active.wavelet_features import (
    principal_components,
    scattering,
    straightened,
    wavelets,
)

EXPERIMENT = find_experiment("active")
RESULTS = Path(__file__).resolve().parents[2] / "results" / "active"
METHODS = ("batch-bald", "random", "epig", "bald")


def config_of(method: str, **settings: Any) -> dict[str, Any]:
    [job] = [job for job in EXPERIMENT.jobs((0,), True) if job.name == method]
    return {**job.config, **settings}


def clusters(count: int = 300) -> Problem:
    """Ten noisy clusters, half of the pool in the first three."""
    generator = torch.Generator().manual_seed(0)
    centres = 2.0 * torch.randn(10, 5, generator=generator)

    def draw(targets: torch.Tensor) -> torch.Tensor:
        return centres[targets] + 0.5 * torch.randn(len(targets), 5, generator=generator)

    pool = torch.cat([torch.arange(count // 2) % 3, torch.arange(count // 2) % 10])
    test = torch.arange(200) % 10
    return Problem(draw(pool), pool, draw(test), test)


def test_each_seed_has_every_method_and_the_first_the_trials() -> None:
    jobs = EXPERIMENT.jobs((3, 4), False)
    of_second = {job.name: job.config for job in jobs if job.seed == 4}
    assert set(of_second) == set(METHODS)
    assert not any(config["held_out"] for config in of_second.values())
    shared = [
        {k: v for k, v in c.items() if k not in ("title", "method")} for c in of_second.values()
    ]
    assert all(each == shared[0] for each in shared), "the methods have the same settings"
    others = [job for job in jobs if job.seed == 3 and job.name not in of_second]
    assert others
    assert all("trial" in job.name and job.config["held_out"] == 10_000 for job in others)


def test_a_wavelet_answers_to_waves_of_its_angle() -> None:
    filters = wavelets(6)
    axis = torch.arange(7.0) - 3.0
    for index in range(6):
        angle = index * math.pi / 6
        along = axis * math.cos(angle) + axis.unsqueeze(1) * math.sin(angle)
        wave = (0.75 * math.pi * along).cos()
        answers = (filters.squeeze(1) * wave).sum((1, 2))
        moduli = torch.hypot(answers[:6], answers[6:])
        assert int(moduli.argmax()) == index


def test_a_rotation_by_a_right_angle_moves_the_angles() -> None:
    images = torch.rand(3, 28, 28, generator=torch.Generator().manual_seed(0))
    settings = {"angles": 4, "levels": 2, "grid": 7}
    plain, turned = (
        scattering(each, **settings).reshape(3, -1, 7, 7)
        for each in (images, images.rot90(1, (1, 2)))
    )
    back = turned.rot90(-1, (2, 3))
    torch.testing.assert_close(back[:, 0], plain[:, 0])
    # One level of first moduli: each angle is 90 degrees, two places, from its old one.
    torch.testing.assert_close(back[:, 1:5], plain[:, [3, 4, 1, 2]])
    assert not torch.allclose(back[:, 1:5], plain[:, 1:5])


def test_straightened_images_have_no_slant_and_are_centred() -> None:
    axis = torch.arange(28.0)
    slanted = torch.zeros(2, 28, 28)
    for row in range(6, 22):
        for number, slope in enumerate((0.4, -0.3)):
            place = 12 + number + round(slope * (row - 14))
            slanted[number, row + 2, place : place + 2] = 1.0
    for image in straightened(slanted):
        ink = image / image.sum()
        x, y = (ink.sum(0) * axis).sum(), (ink.sum(1) * axis).sum()
        assert abs(float(x) - 13.5) < 0.3
        assert abs(float(y) - 13.5) < 0.3
        dx, dy = axis - x, (axis - y).unsqueeze(1)
        assert abs(float((ink * dx * dy).sum() / (ink * dy.square()).sum())) < 0.03
    assert torch.equal(straightened(torch.zeros(1, 28, 28)), torch.zeros(1, 28, 28))


@pytest.mark.parametrize("whitening", [0.0, 0.5, 1.0])
def test_components_are_uncorrelated_and_of_average_variance_one(whitening: float) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(500, 6, generator=generator) @ torch.randn(6, 6, generator=generator)
    mean, projection = principal_components(features, 4, whitening=whitening)
    components = (features - mean) @ projection
    covariance = components.T @ components / 500
    variances = covariance.diagonal()
    torch.testing.assert_close(covariance, variances.diag(), atol=1e-4, rtol=0)
    assert float(variances.mean()) == pytest.approx(1.0, rel=1e-4)
    assert bool((variances.diff() <= 1e-4).all())
    original = torch.linalg.eigvalsh((features - mean).T @ (features - mean) / 500).flip(0)[:4]
    expected = original ** (1.0 - whitening)
    torch.testing.assert_close(variances, expected / expected.mean(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wavelets(0), "angles must be at least 1, got 0"),
        (
            lambda: scattering(torch.zeros(1, 28, 28), angles=2, levels=0, grid=7),
            "levels and grid must be at least 1, got 0 and 7",
        ),
        (
            lambda: principal_components(torch.zeros(4, 3), 5, whitening=0.0),
            "num_components must lie from 1 to 3, the number of features, got 5",
        ),
        (
            lambda: balanced(torch.tensor([0, 0, 1]), 2, seed=0),
            "class 1 must have at least 2 examples, got 1",
        ),
    ],
)
def test_what_is_out_of_range_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("method", METHODS)
def test_each_example_is_asked_for_once_and_the_labels_are_spent(method: str) -> None:
    problem = clusters()
    metrics = ask(problem, config_of(method, num_labels=45), 0, Context())
    assert metrics["labels"] == [20, 30, 40, 45]
    assert len(metrics["accuracy"]) == len(metrics["nll"]) == 4
    assert len(set(metrics["asked"])) == 45
    start = problem.pool_targets[metrics["asked"][:20]]
    assert start.bincount().tolist() == [2] * 10
    # All methods begin with the same labels.
    assert metrics["asked"][:20] == balanced(problem.pool_targets, 2, 0)
    assert metrics["asked"][:20] != balanced(problem.pool_targets, 2, 1)


@pytest.mark.parametrize("method", ["batch-bald", "epig"])
def test_labels_that_were_not_asked_for_are_not_read(method: str) -> None:
    problem, config = clusters(), config_of(method)
    metrics = ask(problem, config, 0, Context())
    unknown = torch.ones(len(problem.pool_targets), dtype=torch.bool)
    unknown[metrics["asked"]] = False
    targets = problem.pool_targets.clone()
    targets[unknown] = 99
    start = {"labels": [], "accuracy": [], "nll": [], "asked": metrics["asked"][:20]}
    other = Problem(problem.pool_inputs, targets, problem.test_inputs, problem.test_targets)
    assert _from(start, other, config) == metrics


def _from(state: dict[str, Any], problem: Problem, config: dict[str, Any]) -> dict[str, Any]:
    """Ask with these labels at the start, by way of a stored state."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rounds.json").write_text(json.dumps(state))
        return ask(problem, config, 0, Context(work=Path(folder)))


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("method", ["batch-bald", "random"])
def test_a_job_repeats_and_resumes(method: str, tmp_path: Path) -> None:
    job = Job(method, 0, config_of(method), 1.0)
    parts: list[float] = []
    whole = EXPERIMENT.run(job, Context(on_progress=parts.append))
    assert parts == sorted(parts)
    assert parts[-1] == 1.0
    assert whole["labels"] == [20, 30, 40]

    def stop(part: float) -> None:
        if part > parts[0]:
            raise StoppedError

    with pytest.raises(StoppedError):
        EXPERIMENT.run(job, Context(on_progress=stop, work=tmp_path))
    rest: list[float] = []
    assert EXPERIMENT.run(job, Context(on_progress=rest.append, work=tmp_path)) == whole
    assert rest == parts[1:], "the first round is not run again"


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    (tmp_path / "rounds.json").write_text("[")
    with pytest.raises(StorageError, match=r"rounds.json cannot be read"):
        ask(clusters(), config_of("random"), 0, Context(work=tmp_path))
    state = {"labels": [20], "accuracy": [50.0], "nll": [1.0], "asked": [0, 1]}
    for wrong in ({"labels": []}, {**state, "asked": "x"}, {**state, "asked": [10**7]}):
        (tmp_path / "rounds.json").write_text(json.dumps(wrong))
        with pytest.raises(StorageError, match=r"rounds.json does not hold the state"):
            ask(clusters(), config_of("random"), 0, Context(work=tmp_path))


def test_trials_are_measured_on_training_images() -> None:
    plain = load_problem(config_of("random"), None)
    trial = load_problem(config_of("random", held_out=100), None)
    assert len(plain.pool_targets) == 600
    assert len(trial.pool_targets) == 500
    assert len(trial.test_targets) == 100
    whole = torch.cat([trial.pool_targets, trial.test_targets])
    assert torch.equal(whole, plain.pool_targets)


def result(title: str, seed: int, accuracy: list[float], **settings: Any) -> dict[str, Any]:
    config = {**config_of("random"), "title": title, **settings}
    labels = [20, 50, 100, 200][: len(accuracy)]
    metrics = {"labels": labels, "accuracy": accuracy, "nll": [0.2] * len(accuracy)}
    name = f"trial-0-{title}" if config["held_out"] else title
    return {"job": name, "seed": seed, "config": config, "metrics": metrics}


def test_the_table_counts_labels_and_their_share() -> None:
    made = [
        result("BatchBALD", 0, [80.0, 91.0, 95.5, 96.0]),
        result("BatchBALD", 1, [80.0, 89.0, 95.0, 94.0]),
        result("BatchBALD", 2, [80.0, 91.0, 94.0, 97.0]),
        result("random", 0, [80.0, 85.0, 91.0, 95.0]),
        result("random", 1, [80.0, 85.0, 91.0, 95.0]),
        result("random", 2, [80.0, 85.0, 89.0, 94.0]),
        result("BALD", 0, [80.0, 85.0, 88.0, 89.0]),
        result("random", 0, [70.0, 90.0], held_out=100),
    ]
    text = EXPERIMENT.table(made)
    reported = REPORTED["BatchBALD"]
    assert (
        f"| BatchBALD | {reported} | 50 (50 to 100) | 100 (100 to 200) | 0.50 | 0.50 "
        "| 90.33 +- 0.67 | 94.83 +- 0.44 | 95.67 +- 0.88 | 3 |" in text
    )
    assert "| random |  | 100 (100 to 200) | 200 (200 to > 200) |  |  |" in text
    assert f"| BALD | {REPORTED['BALD']} | > 200 | > 200 | - | - | 85.00" in text
    assert "at most 190 labels on 2 of 3 seeds" in text
    assert "of random choice is 0.50, where at most 0.75 is asked for." in text
    assert text.splitlines()[-1] == "| 20 | 0 | 2 | 1 | 70.00, 0.200 | 90.00, 0.200 |"
    drawn = EXPERIMENT.figures(made)["active"]
    assert [axes.get_title(loc="left") for axes in drawn.axes] == ["accuracy", "labels until 95 %"]


def test_a_share_of_an_unknown_number_is_bounded() -> None:
    made = [
        result("BatchBALD", 0, [80.0, 91.0, 95.5, 96.0]),
        result("random", 0, [80.0, 81.0, 82.0, 83.0]),
    ]
    assert EXPERIMENT.figures(made)["active"].axes
    assert "of random choice is < 0.50, where" in EXPERIMENT.table(made)


def test_the_stored_table_follows_from_the_stored_rows() -> None:
    results = read_results(RESULTS)
    assert results, "results/active is not there"
    text = (RESULTS / "table.md").read_text(encoding="utf-8")
    assert text.strip() == EXPERIMENT.table(results).strip()
    for each in results:
        metrics, config = each["metrics"], each["config"]
        assert metrics["labels"][-1] == config["num_labels"] == len(set(metrics["asked"]))
        assert labels_needed(each, 0.0) == 10 * config["start_per_class"]
