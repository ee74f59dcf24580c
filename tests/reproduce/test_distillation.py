"""Distillation in the compression experiment: what a minibatch holds and what is maximised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bayesify as bf
from bayesify.datasets import AugmentedImages, TensorLoader
from bayesify.reproduce import Context, Job, find_experiment
from bayesify.reproduce.papers.compression.distillation import DistillationLikelihood, TaughtImages
from bayesify.reproduce.papers.compression.experiment import decoded
from bayesify.reproduce.papers.compression.networks import num_nonzero
from bayesify.reproduce.papers.compression.recipes import TRIALS

EXPERIMENT = find_experiment("compression")
TEACHER = {
    "training": {"epochs": 2, "lr": 2e-3, "temperature": 0.0},
    "share": 0.7,
    "temperature": 2.0,
}


def taught_targets(labels: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
    return torch.stack([nn.functional.one_hot(labels, taught.shape[-1]).to(taught), taught], dim=1)


def test_a_teacher_sees_the_images_that_are_learned_from() -> None:
    images, labels = torch.rand(6, 16), torch.arange(6) % 3
    teacher = nn.Linear(16, 3)
    loader = AugmentedImages(TensorLoader(images, labels, 4, seed=1), 0.3, (4, 4))
    taught = TaughtImages(loader, teacher, temperature=2.0)
    taught.set_epoch(1)
    assert (len(taught), taught.num_data) == (2, 6)
    seen = []
    for moved, targets in taught:
        assert not (moved[:, None] == images).all(-1).any()
        assert not targets.requires_grad
        torch.testing.assert_close(targets[:, 1], (teacher(moved) / 2.0).softmax(-1).detach())
        assert targets[:, 0].sum(-1).tolist() == [1.0] * len(moved)
        seen += targets[:, 0].argmax(-1).tolist()
    assert sorted(seen) == sorted(labels.tolist())


def test_without_a_share_the_labels_alone_count() -> None:
    outputs, labels = torch.randn(2, 5, 3), torch.randint(3, (5,))
    targets = taught_targets(labels, torch.rand(5, 3).softmax(-1))
    plain = bf.CategoricalLikelihood()
    alone = DistillationLikelihood(0.0, temperature=2.0)
    torch.testing.assert_close(alone.log_prob(outputs, targets), plain.log_prob(outputs, labels))
    assert alone.error(outputs[0], targets) == plain.error(outputs[0], labels)
    assert alone.error_count(targets) == plain.error_count(labels) == 5


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_teachers_own_outputs_are_the_best(temperature: float) -> None:
    outputs = torch.randn(1, 5, 3, dtype=torch.float64)
    targets = taught_targets(
        torch.zeros(5, dtype=torch.long), (outputs[0] / temperature).softmax(-1)
    )
    likelihood = DistillationLikelihood(1.0, temperature)
    at_best = outputs.clone().requires_grad_()
    [gradient] = torch.autograd.grad(likelihood.log_prob(at_best, targets).sum(), at_best)
    assert gradient.abs().max() < 1e-12
    # T^2 keeps the size of the gradient: for small logits it is (q - f) / K whatever T is.
    small = torch.full((1, 1, 2), 0.0, dtype=torch.float64, requires_grad=True)
    wanted = taught_targets(
        torch.tensor([0]), (torch.tensor([[0.02, 0.0]]) / temperature).softmax(-1)
    )
    [gradient] = torch.autograd.grad(likelihood.log_prob(small, wanted.double()).sum(), small)
    assert float(gradient[0, 0, 0]) == pytest.approx(0.005, rel=1e-3)


def job(**more: Any) -> Job:
    """A quick job with 300 images."""
    [quick] = [each for each in EXPERIMENT.jobs((0,), True) if each.name == "lenet-300-100-units"]
    config = {**quick.config, "limit": 300, "batch_size": 50, **more}
    return Job(quick.name, 0, config, 1.0, quick.datasets)


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_a_taught_job_measures_its_file_and_differs_from_one_without_a_teacher() -> None:
    files = []
    for each in (job(teacher=TEACHER), job()):
        parts: list[float] = []
        metrics = EXPERIMENT.run(each, Context(on_progress=parts.append))
        assert parts == sorted(parts)
        assert parts[-1] == 1.0
        net = decoded({"config": each.config, "metrics": metrics})
        assert metrics["weights_left"] == num_nonzero(net)
        files.append(metrics["file"])
    assert files[0] != files[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
@pytest.mark.parametrize("done", [0.4, 0.7])
def test_a_stopped_job_resumes_with_its_teacher(tmp_path: Path, done: float) -> None:
    tuning = {**job().config["tuning"], "epochs": 3}
    taught = job(teacher=TEACHER, tuning=tuning)

    def stop(part: float) -> None:
        if part > done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EXPERIMENT.run(taught, Context(work=tmp_path, on_progress=stop))
    assert EXPERIMENT.run(taught, Context(work=tmp_path)) == EXPERIMENT.run(taught, Context())


def test_a_trial_has_its_teacher() -> None:
    settings = TRIALS["lenet-5-caffe-weights-taught"].settings
    assert set(settings["teacher"]) == {"training", "share", "temperature"}
    assert "teacher" not in TRIALS["lenet-5-caffe-weights-moved-long"].settings
