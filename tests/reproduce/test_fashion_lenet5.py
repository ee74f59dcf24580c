"""LeNet-5 on Fashion-MNIST: what is random, that ensembles grow, that a stopped job goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bayesify.datasets import ImageData
from bayesify.reproduce import Context, Job, find_experiment
from bayesify.reproduce.papers import fashion_lenet5

EXPERIMENT = find_experiment("fashion-lenet5")
pytestmark = pytest.mark.filterwarnings("ignore:the posterior's standard deviations")
#: LeNet-5 has 61,706 weights and biases; its factors are one for each output and input of a layer.
RANDOM = {"plain": 0, "rank-one": 6 + 1 + 16 + 6 + 120 + 400 + 84 + 120 + 10 + 84}
RANDOM["mean-field"] = 61_706


@pytest.fixture(autouse=True)
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of ten classes, each around an image of its own."""
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.rand(10, 784, generator=generator)
    train, test = torch.arange(200) % 10, torch.arange(60) % 10
    data = ImageData(
        "fashion-mnist",
        prototypes[train] + 0.1 * torch.randn(200, 784, generator=generator),
        train,
        prototypes[test] + 0.1 * torch.randn(60, 784, generator=generator),
        test,
        tuple("abcdefghij"),
    )
    monkeypatch.setattr(fashion_lenet5, "images_of", lambda *_, **__: data)


def small(name: str, **changed: Any) -> Job:
    (job,) = (job for job in EXPERIMENT.jobs((0,), True) if job.name == name)
    return replace(job, config={**job.config, "batch_size": 20, **changed})


@pytest.mark.parametrize("name", fashion_lenet5.METHODS)
def test_every_method_is_measured_alone_and_together(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    whole = fashion_lenet5.ELBO

    def elbo(bnn: Any, num_data: int) -> Any:
        seen.append(bnn)
        return whole(bnn, num_data=num_data)

    monkeypatch.setattr(fashion_lenet5, "ELBO", elbo)
    parts: list[float] = []
    metrics = fashion_lenet5.run(small(name), Context(on_progress=parts.append))
    assert parts == sorted(parts)
    assert parts[-1] == pytest.approx(1.0)
    assert [0 if name == "plain" else bnn.layout.num_weights for bnn in seen] == 2 * [RANDOM[name]]
    alone, ensembles = metrics["alone"], metrics["ensembles"]
    assert len(alone) == len(ensembles) == len(metrics["train_nll"]) == 2
    assert alone[0] == ensembles[0]
    assert alone[0]["nll"] != alone[1]["nll"]
    assert ensembles[1]["nll"] < (alone[0]["nll"] + alone[1]["nll"]) / 2  # Jensen's inequality


def test_it_learns() -> None:
    metrics = fashion_lenet5.run(small("rank-one", epochs=15, members=1), Context())
    assert metrics["ensembles"][-1]["error"] < 5.0


def test_a_stopped_job_goes_on(tmp_path: Path) -> None:
    job = small("rank-one", epochs=2)
    whole = fashion_lenet5.run(job, Context())

    def stop(part: float) -> None:
        if part >= 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fashion_lenet5.run(job, Context(work=tmp_path, on_progress=stop))
    begun: list[float] = []
    assert fashion_lenet5.run(job, Context(work=tmp_path, on_progress=begun.append)) == whole
    assert begun[0] == pytest.approx(0.5)  # the first network is not trained again


def test_the_table_and_the_figure_are_those_of_the_rows() -> None:
    results = [
        {
            "job": name,
            "config": {"members": 2},
            "metrics": {
                "alone": [{"error": 9.0, "nll": nll, "ece": 0.01} for nll in (0.3, 0.25)],
                "ensembles": [{"error": 8.0, "nll": nll, "ece": 0.01} for nll in (0.3, 0.2)],
            },
        }
        for name in ("plain", "rank-one")
    ]
    text = EXPERIMENT.table(results)
    assert "| rank one | 2 | 9.00 +- 0.00 | 0.2750 +- 0.0250 |" in text
    assert "| rank one, ensemble of 2 | 1 | 8.00 | 0.2000 |" in text
    assert "mean field, ensemble" not in text
    (figure,) = EXPERIMENT.figures(results).values()
    assert [line.get_ydata().tolist() for line in figure.axes[0].lines] == 2 * [[0.3, 0.2]]
