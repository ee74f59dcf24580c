"""Continual learning on MNIST: the tasks, what a job computes, resuming, the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bayesify as bf
from bayesify.datasets import load_images
from bayesify.reproduce import Context, Job, find_experiment, results_of
from bayesify.reproduce.papers.continual.experiment import REPORTED
from bayesify.reproduce.papers.continual.learning import learn, make_network
from bayesify.reproduce.papers.continual.task_sequences import permuted_tasks, split_tasks

EXPERIMENT = find_experiment("continual")
RESULTS = Path(__file__).resolve().parents[2] / "results" / "continual"
pytestmark = [
    pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:the posterior's standard deviations"),
]


def small(name: str, **settings: Any) -> Job:
    """A job with 300 images and small networks, measured on 60 of them."""
    [job] = [job for job in EXPERIMENT.jobs((0,), True) if job.name == name]
    tiny = {"limit": 300, "num_samples": 2, "epochs": 1, "coreset_epochs": 1, "held_out": 60}
    return Job(job.name, job.seed, {**job.config, **tiny, **settings}, job.seconds, job.datasets)


def test_each_seed_has_every_method_and_the_first_the_trials() -> None:
    jobs = EXPERIMENT.jobs((3, 4), False)
    of_second = {job.name: job.config for job in jobs if job.seed == 4}
    coresets = ("vcl-random-coreset", "vcl-k-center-coreset")
    methods = ("vcl", "vcl-matrix-gaussian", *coresets, "fine-tuning")
    assert set(of_second) == {f"{b}-{method}" for b in ("permuted", "split") for method in methods}
    assert of_second["permuted-vcl"]["hidden"] == [100, 100]
    assert of_second["split-vcl"]["hidden"] == [256, 256]
    assert not any(config["held_out"] for config in of_second.values())
    others = [job for job in jobs if job.seed == 3 and job.name not in of_second]
    assert all("trial" in job.name and job.config["held_out"] == 10_000 for job in others)


def test_permuted_tasks_have_one_order_of_pixels_in_both_parts() -> None:
    data = load_images("mnist", limit=50)
    for task in permuted_tasks(data, 2, seed=0):
        (train, targets), (test, _) = task.train(), task.test()
        assert task.pixels is not None
        assert torch.equal(train, data.train_inputs[:, task.pixels])
        assert torch.equal(test, data.test_inputs[:, task.pixels])
        assert torch.equal(targets, data.train_targets)
        assert not torch.equal(train, data.train_inputs)


def test_split_tasks_have_each_image_once() -> None:
    data = load_images("mnist", limit=200)
    tasks = split_tasks(data)
    assert [task.head for task in tasks] == [0, 1, 2, 3, 4]
    for task in tasks:
        inputs, targets = task.train()
        assert task.classes is not None
        for target, label in enumerate(task.classes):
            assert torch.equal(
                inputs[targets == target], data.train_inputs[data.train_targets == label]
            )
    assert sum(len(task.test()[1]) for task in tasks) == len(data.test_targets)


@pytest.mark.parametrize(
    "name",
    ["permuted-fine-tuning", "permuted-vcl-matrix-gaussian", "split-vcl-k-center-coreset"],
)
def test_a_job_repeats_and_resumes(name: str, tmp_path: Path) -> None:
    job = small(name)
    parts: list[float] = []
    metrics = EXPERIMENT.run(job, Context(on_progress=parts.append, work=tmp_path))
    assert parts[-1] == 1.0
    assert parts == sorted(parts)
    assert metrics == EXPERIMENT.run(job, Context(work=tmp_path)) == EXPERIMENT.run(job, Context())
    assert [len(row) for row in metrics["accuracies"]] == [1, 2]
    assert all(0.0 <= value <= 100.0 for row in metrics["accuracies"] for value in row)


def test_a_coreset_is_learned_by_the_copy_that_predicts_only() -> None:
    job = small("split-vcl-random-coreset")
    tasks = split_tasks(load_images("mnist", limit=300))[:2]
    means: list[list[torch.Tensor]] = []
    for epochs in (1, 3):
        bnn = make_network(job.config, tasks, 0)
        stages = learn(bnn, tasks, {**job.config, "coreset_epochs": epochs}, 0, Context())
        seen = [(copied.posterior.mean.detach(), copied is bnn) for copied in stages]
        assert not any(same for _, same in seen)
        means.append([bnn.posterior.mean.detach(), *(mean for mean, _ in seen)])
    assert torch.equal(means[0][0], means[1][0])
    assert not torch.equal(means[0][1], means[1][1])


def test_the_heads_of_other_tasks_do_not_change() -> None:
    job = small("split-vcl")
    tasks = split_tasks(load_images("mnist", limit=300))[:2]
    bnn = make_network(job.config, tasks, 0)
    assert isinstance(bnn.net, bf.MultiHead)
    first, second = (bnn.layout.slice_of(f"heads.{i}.weight") for i in range(2))
    stages = [bnn.posterior.mean.detach().clone()]
    stages += [
        each.posterior.mean.detach().clone() for each in learn(bnn, tasks, job.config, 0, Context())
    ]
    assert torch.equal(stages[0][second], stages[1][second])
    assert not torch.equal(stages[0][first], stages[1][first])
    assert torch.equal(stages[1][first], stages[2][first])
    assert not torch.equal(stages[1][second], stages[2][second])


@pytest.mark.parametrize("narrow", [False, True])
def test_a_task_begins_with_the_initial_stds(narrow: bool) -> None:
    job = small("permuted-vcl", init_std=0.02, narrow=narrow, rho_lr_scale=300.0)
    data = load_images("mnist", limit=300)
    tasks = permuted_tasks(data, 2, seed=0)
    bnn = make_network(job.config, tasks, seed=0)
    widest: list[float] = []

    def after(_: float) -> None:
        assert isinstance(bnn.posterior, bf.MeanFieldGaussian)
        widest.append(float(bnn.posterior.std.detach().max()))

    list(learn(bnn, tasks, job.config, 0, Context(on_progress=after)))
    first, end_of_first, second, _ = widest  # the start and the end of each task's one epoch
    assert first == pytest.approx(0.02)
    assert end_of_first > 0.03
    assert second == pytest.approx(0.02 if narrow else end_of_first)


def result(name: str, title: str, seed: int, accuracies: list[list[float]]) -> dict[str, Any]:
    benchmark, trial = name.partition("-")[0], "trial" in name
    config = {"benchmark": benchmark, "title": title, "num_tasks": 2, "held_out": 9 * trial}
    settings = {
        "prior_mean": None,
        "prior_std": 0.1,
        "init_std": 0.02,
        "lr": 0.005,
        "rho_lr_scale": 0.3,
        "batch_size": 64,
        "epochs": 10,
        "narrow": seed == 0,
    }
    metrics = {"accuracies": accuracies}
    return {"job": name, "seed": seed, "config": {**config, **settings}, "metrics": metrics}


def test_the_table_averages_over_the_tasks_so_far() -> None:
    made = [
        result("permuted-vcl", "VCL", 0, [[98.0], [90.0, 96.0]]),
        result("permuted-vcl", "VCL", 1, [[96.0], [92.0, 98.0]]),
        result("split-fine-tuning", "fine-tuning", 0, [[99.0], [50.0, 99.0]]),
        result("permuted-trial-0", "VCL", 0, [[98.0], [80.0, 90.0]]),
        result("permuted-trial-1", "VCL", 1, [[98.0], [80.0, 80.0]]),
    ]
    text = EXPERIMENT.table(made)
    assert "| VCL | 90.0 | 97.00 +- 1.00 | 94.00 +- 1.00 | 91.00 +- 1.00 | 2 |" in text
    assert "| fine-tuning |  | 99.00 | 74.50 | 50.00 | 1 |" in text
    assert f"| EWC | {REPORTED['split']['EWC']:.1f} | | | | |" in text
    assert (
        "| permuted | mean field | 0 | 0.1 | 0.02 | yes | 0.005 | 0.3 | 64 | 10 | 85.00 |" in text
    )
    assert (
        "| permuted | mean field | 0 | 0.1 | 0.02 | first only | 0.005 | 0.3 | 64 | 10 | 80.00 |"
        in text
    )
    drawn = EXPERIMENT.figures(made)["continual"]
    assert [axes.get_title(loc="left") for axes in drawn.axes] == ["permuted", "split"]


def test_the_stored_table_follows_from_the_stored_accuracies() -> None:
    results = results_of(EXPERIMENT, RESULTS)
    assert results, "results/continual is not there"
    text = (RESULTS / "table.md").read_text(encoding="utf-8")
    assert text.strip() == EXPERIMENT.table(results).strip()
    for each in results:
        rows = each["metrics"]["accuracies"]
        assert [len(row) for row in rows] == list(range(1, each["config"]["num_tasks"] + 1))
