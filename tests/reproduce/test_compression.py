"""Compression of small networks on MNIST: what a job does, what is counted, and the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bayesify as bf
from bayesify.reproduce import Context, Job, Result, find_experiment
from bayesify.reproduce.harness.image_runs import mnist_of
from bayesify.reproduce.papers.compression.experiment import decoded
from bayesify.reproduce.papers.compression.networks import (
    NETWORKS,
    make_network,
    num_nonzero,
    units_left,
)
from bayesify.reproduce.papers.compression.recipes import CHOSEN, RECIPES, TRIALS
from bayesify.reproduce.papers.compression.unit_pruning import (
    UnitPruning,
    prune_units,
    unit_scores,
)

EXPERIMENT, TUNING = find_experiment("compression"), find_experiment("compression-tuning")
pytestmark = [
    pytest.mark.filterwarnings("ignore:the posterior's standard deviations"),
    pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning"),
]


def small(name: str, **changes: Any) -> Job:
    """A quick job with 300 images."""
    [job] = [job for job in EXPERIMENT.jobs((0,), True) if job.name == name]
    config = {**job.config, "limit": 300, "batch_size": 50, **changes}
    return Job(job.name, job.seed, config, job.seconds, job.datasets)


def chain() -> nn.Sequential:
    """A convolution of 3 filters, 12 features after it, 5 hidden units."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 3, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(12, 5),
            nn.ReLU(),
            nn.Linear(5, 2),
        )


@pytest.mark.parametrize(
    ("name", "count", "units"),
    [
        ("lenet-300-100", 266_610, [784, 300, 100]),
        ("lenet-5-caffe", 431_080, [20, 50, 800, 500]),
        ("2x1200", 2_395_210, [784, 1200, 1200]),
    ],
)
def test_the_networks_have_the_sizes_of_the_literature(
    name: str, count: int, units: list[int]
) -> None:
    net = make_network(name, seed=1)
    assert sum(parameter.numel() for parameter in net.parameters()) == count
    assert num_nonzero(net) == count
    assert units_left(net) == units
    assert net(torch.zeros(2, 784)).shape == (2, 10)
    again, other = make_network(name, seed=1), make_network(name, seed=2)
    assert all(map(torch.equal, net.parameters(), again.parameters()))
    assert not any(map(torch.equal, net.parameters(), other.parameters()))


def test_only_weights_and_units_that_are_used_are_counted() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        net[0].weight[:, 1] = 0.0
        net[2].weight[:, 2] = 0.0
    assert num_nonzero(net) == 23 - 3 - 2
    assert units_left(net) == [3, 2]


def test_the_score_of_a_unit_is_the_information_of_its_weights() -> None:
    bnn = bf.BayesianModule(chain(), init_std=0.1)
    first, channels, hidden = unit_scores(bnn)
    nats = 0.5 * torch.log1p((bnn.posterior.mean / 0.1).square()).detach()
    parts = bnn.layout.unflatten(nats)
    torch.testing.assert_close(first, parts["0.weight"].sum()[None])
    own = parts["0.weight"].flatten(1).sum(1) + parts["0.bias"]
    read = parts["4.weight"].view(5, 3, 4).sum((0, 2))
    torch.testing.assert_close(channels, own + read)
    torch.testing.assert_close(
        hidden, parts["4.weight"].sum(1) + parts["4.bias"] + parts["6.weight"].sum(0)
    )


def test_pruned_units_are_those_of_the_lowest_scores_and_shrink_removes_them() -> None:
    bnn = bf.BayesianModule(chain(), init_std=0.1)
    _, channels, hidden = unit_scores(bnn)
    prune_units(bnn, (1, 2, 3))
    left = bf.shrink(bnn, torch.zeros(1, 1, 8, 8))
    assert units_left(left) == [2, 8, 3]
    parts = bnn.layout.unflatten(bnn.posterior.mean.detach())
    assert parts["0.weight"].flatten(1).any(1).nonzero().flatten().tolist() == sorted(
        channels.argsort()[1:].tolist()
    )
    assert parts["4.bias"].nonzero().flatten().tolist() == sorted(hidden.argsort()[2:].tolist())
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(left(x), bnn.to_module()(x))
    with pytest.raises(ValueError, match="one number for each of 3 layers, got 2"):
        prune_units(bnn, (1, 2))


@pytest.mark.parametrize("units", [(), (3, 0)])
def test_units_of_a_schedule_are_checked(units: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="units must be at least 1 for each layer"):
        UnitPruning(0.9, from_epoch=1, until_epoch=2, units=units)


def test_units_are_pruned_on_the_schedule() -> None:
    x, y = torch.randn(60, 8), torch.randint(2, (60,))
    loader = bf.datasets.TensorLoader(x, y, 20)
    net = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 2))
    bnn = bf.BayesianModule(net)
    schedule = UnitPruning(0.2, from_epoch=0, until_epoch=2, units=(5, 3))
    bf.fit(bf.ELBO(bnn, num_data=60), loader, epochs=3, pruning=schedule)
    weight = bnn.to_module()[0].weight
    assert int(weight.any(1).sum()) == 3
    assert int(weight.any(0).sum()) == 5


@pytest.mark.parametrize(
    "name",
    [
        "lenet-300-100-units",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("lenet-300-100-weights", "lenet-5-caffe-units")
        ),
    ],
)
def test_a_job_measures_the_decoded_file(name: str) -> None:
    job = small(name)
    parts: list[float] = []
    metrics = EXPERIMENT.run(job, Context(on_progress=parts.append))
    assert parts == sorted(parts)
    assert parts[-1] == 1.0
    net = decoded({"config": job.config, "metrics": metrics})
    data = mnist_of(job, Context())
    wrong = net.eval()(data.test_inputs).argmax(-1) != data.test_targets
    assert metrics["error"] == pytest.approx(100.0 * float(wrong.double().mean()))
    assert metrics["weights_left"] == num_nonzero(net)
    left = (1.0 - job.config["bound"]["fraction"]) * metrics["num_weights"]
    assert metrics["weights_left"] <= left + 1.0
    assert 0 < metrics["bytes"] < 8.0 * left
    if "units" in job.config["bound"]:
        wanted = [5, 10, 160, 16] if "caffe" in name else job.config["bound"]["units"]
        assert all(a <= b for a, b in zip(metrics["units"], wanted, strict=True))


def test_a_job_reports_float32_and_augments_images_as_its_recipe_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "bayesify.reproduce.harness.half_precision.has_fast_bfloat16"
    monkeypatch.setattr(module, lambda: False)
    files = []
    for amount in (0.1, 0.0):
        with pytest.warns(UserWarning, match="trained in float32: this CPU has no bfloat16"):
            files.append(
                EXPERIMENT.run(small("lenet-300-100-units", moved=amount), Context())["file"]
            )
    assert files[0] != files[1]


@pytest.mark.slow
def test_a_stopped_job_resumes(tmp_path: Path) -> None:
    job = small("lenet-300-100-units")
    whole = EXPERIMENT.run(job, Context())
    calls: list[float] = []

    def stop(part: float) -> None:
        calls.append(part)
        if part > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EXPERIMENT.run(job, Context(work=tmp_path, on_progress=stop))
    assert EXPERIMENT.run(job, Context(work=tmp_path)) == whole


def test_settings_are_chosen_on_images_that_are_held_out() -> None:
    assert {name: TRIALS[trial].recipe for name, trial in CHOSEN.items()} == {
        name: name for name in RECIPES
    }
    for job in TUNING.jobs((0,), False):
        assert job.config["held_out"] == 10_000
    [job] = [job for job in TUNING.jobs((0,), True) if job.name == "lenet-300-100-weights"]
    whole = mnist_of(Job(job.name, 0, {"limit": 2000}, 1.0), Context())
    parts = mnist_of(job, Context())
    assert len(parts.test_inputs) == job.config["held_out"] == 500
    assert len(parts.train_inputs) == 1500
    together = torch.cat([parts.train_inputs, parts.test_inputs]).sum(1)
    torch.testing.assert_close(together.sort().values, whole.train_inputs.sum(1).sort().values)
    assert all("held_out" not in job.config for job in EXPERIMENT.jobs((0,), False))


def made_up(name: str, seed: int, error: float, size: int) -> Result:
    metrics = {
        "error": error,
        "error_before_coding": error,
        "num_weights": 266_610,
        "weights_left": 2666,
        "units": [100, 50, 31],
        "bytes": size,
        "kl_bytes": 900.0,
    }
    network = TRIALS[name].settings["network"]
    return {"job": name, "seed": seed, "config": {"network": network}, "metrics": metrics}


def test_the_table_has_the_literature_and_the_means_over_seeds() -> None:
    name = "lenet-300-100-weights"
    results = [made_up(name, 0, 1.8, 5000), made_up(name, 1, 2.0, 6000)]
    text = EXPERIMENT.table(results)
    assert "| sparse variational dropout | | 1.92 | 68 |" in text
    ours = "1.90 +- 0.10 | 100 | 2,666 | 100-50-31 | 5,500 | 900"
    assert f"| **bayesify, few weights** | 2 | {ours} |" in text
    assert NETWORKS["lenet-5-caffe"] not in text
    (figure,) = EXPERIMENT.figures(results).values()
    assert len(figure.axes) == 1
    assert EXPERIMENT.figures([]) == {}
    trials = [made_up(name, 0, 2.0, 6000), made_up(f"{name}-coarse", 0, 1.8, 5000)]
    tried = TUNING.table(trials)
    assert f"| {name} | steps of 1 | 1.80 | 1.80 | 100 | 2,666 |" in tried
    assert f"| {name} | the first settings, chosen | 2.00 |" in tried
    (drawn,) = TUNING.figures(trials).values()
    [axes] = drawn.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "the first settings",
        "steps of 1",
    ]
    assert TUNING.figures(trials[:1]) == {}  # one trial is no comparison
