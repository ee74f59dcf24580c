"""The experiments on The Straight Dope: what is trained, measured, stored and said."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.killable import Forked, Quiet, without_times
from torch import nn

import bayesify as bf
from bayesify.app.runs import RunConfig
from bayesify.datasets import ImageData, TensorLoader, load_images
from bayesify.io import StorageError
from bayesify.module.networks import mlp
from bayesify.reproduce import Context, Experiment, Job, find_experiment, reproduce
from bayesify.reproduce.harness.image_runs import settings_of, trained
from bayesify.reproduce.papers.straight_dope import gluon, scratch
from bayesify.reproduce.papers.straight_dope.accuracy_and_pruning import TrainAccuracy

pytestmark = [
    pytest.mark.filterwarnings("ignore:the posterior's standard deviations"),
    pytest.mark.filterwarnings("ignore:free energy:UserWarning"),
]
NAMES = ("straight-dope-scratch", "straight-dope-gluon")
TINY = {"epochs": 3, "limit": 400, "test_samples": 2}


def tiny(name: str) -> Experiment:
    """The experiment with networks that train in a moment, and no figures."""
    experiment = find_experiment(name)

    def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
        return [replace(job, config=smaller(job.config)) for job in experiment.jobs(seeds, True)]

    return replace(experiment, jobs=jobs, figures=lambda _: {})


def smaller(config: Any) -> dict[str, Any]:
    if "settings" in config:
        return {**config, "settings": {**config["settings"], **TINY, "hidden": [20, 20]}}
    return {**config, **TINY, "hidden": 20}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_quick_runs_differ_in_their_times_only(name: str, tmp_path: Path) -> None:
    watcher = Quiet()
    experiment = find_experiment(name)
    one = reproduce(experiment, tmp_path / "one", watcher, quick=True)
    other = reproduce(experiment, tmp_path / "other", Quiet(), quick=True)
    assert json.dumps([*map(without_times, one.results)]) == json.dumps(
        [*map(without_times, other.results)]
    )
    assert len(one.results) == 2
    assert one.table.read_bytes() == other.table.read_bytes()
    assert one.table.read_text().startswith("**Quick run")
    assert all(path.stat().st_size > 10_000 for path in one.figures)
    assert {"0.5", "1"} <= set(watcher.said)  # of two epochs each
    for row in one.results:
        metrics = row["metrics"]
        assert len(metrics["test_accuracy"]) == len(metrics["train_accuracy"]) == 2
        assert metrics["test_accuracy"][-1] == pytest.approx(
            100.0 - metrics["test"]["error_mean_weights"], abs=1e-3
        )
        assert metrics["test_accuracy"][-1] > 40.0  # of chance's 10
        whole, *_, nothing = metrics["pruning"]
        assert whole["error_mean_weights"] == pytest.approx(
            100.0 - metrics["test_accuracy"][-1], abs=1e-3
        )
        assert (nothing["weights_left"], nothing["error_mean_weights"]) == (0, 90.2)


def test_the_network_as_described_is_what_train_trains() -> None:
    (job,) = tiny(NAMES[0]).jobs((3,), True)[:1]
    metrics = scratch.run(job, Context())
    config = RunConfig.of("mnist", **settings_of(job.config["settings"], seed=3))
    _, history = trained(config, load_images("mnist", limit=400), Context())
    errors = [100.0 - accuracy for accuracy in metrics["test_accuracy"]]
    assert errors == pytest.approx([row["validation_error"] for row in history], abs=1e-3)
    assert metrics["loss"] == [row["loss"] for row in history]


def test_the_second_layer_counts_and_does_nothing() -> None:
    net = mlp(6, (5, 5), 3, init_std=0.1)
    skips = scratch.SkipsItsSecondLayer(copy.deepcopy(net))
    inputs = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    before = skips(inputs)
    with torch.no_grad():
        skips.net[2].weight.normal_()
        skips.net[2].bias.normal_()
    assert torch.equal(skips(inputs), before)
    assert not torch.equal(net(inputs), before)
    assert bf.BayesianModule(skips).layout.num_weights == bf.BayesianModule(net).layout.num_weights


@pytest.mark.filterwarnings("ignore::bayesify.training.UnreadParameterWarning")
def test_as_run_says_how_many_weights_are_of_no_use() -> None:
    (job,) = tiny(NAMES[0]).jobs((0,), True)[1:]
    pruning = scratch.run(job, Context())["pruning"]
    assert pruning[0]["unused_left"] == 20 * 20 + 20
    assert pruning[0]["weights_left"] == 784 * 20 + 20 + 20 * 20 + 20 + 20 * 10 + 10
    left = [line["unused_left"] for line in pruning]
    assert left == sorted(left, reverse=True)
    assert 0 < left[3] < left[0]  # as many go as of the others: no example tells them apart
    assert left[-1] == 0


def test_the_library_is_given_what_the_document_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(elbo: bf.ELBO, *_: Any, optimizer: Any, **options: Any) -> None:
        seen.append((elbo, optimizer([nn.Parameter(torch.zeros(1))]), options))
        raise KeyboardInterrupt

    seen: list[tuple[bf.ELBO, torch.optim.Optimizer, dict[str, Any]]] = []
    monkeypatch.setattr(bf, "fit", fit)
    for job in gluon.jobs((0,), False):
        with pytest.raises(KeyboardInterrupt):
            gluon.run(job, Context())
    for (elbo, adam, options), pi in zip(seen, (0.5, 0.25), strict=True):
        bnn = elbo.bnn
        assert elbo.num_data == 60_000
        assert elbo.temperature == 1.0
        assert bnn.prior == bf.ScaleMixture(pi=pi, std1=0.75, std2=0.01)
        assert [type(part).__name__ for part in bnn.net] == ["Linear", "ReLU"] * 2 + ["Linear"]
        assert bnn.layout.num_weights == 784 * 400 + 400 + 400 * 400 + 400 + 400 * 10 + 10
        rho = torch.full_like(bnn.posterior.rho, -3.0)
        torch.testing.assert_close(bnn.posterior.rho.detach(), rho)
        # Of 478,410 normal numbers the std is within 0.5 % of its own, at over 4 standard errors.
        assert float(bnn.posterior.mean.detach().std()) == pytest.approx(0.1, rel=5e-3)
        assert isinstance(adam, torch.optim.Adam)
        assert adam.param_groups[0]["lr"] == 1e-3
        assert options["epochs"] == 10


def test_the_settings_are_those_of_the_document() -> None:
    (job, _) = scratch.jobs((0,), False)
    config = RunConfig.of("mnist", **settings_of(job.config["settings"]))
    assert config.make_prior() == bf.Gaussian(1.0)
    assert config.lr / config.batch_size == pytest.approx(1e-3)  # on the summed loss
    assert math.log(math.expm1(config.init_std)) == pytest.approx(-3.0)
    assert (config.optimizer, config.momentum, config.schedule) == ("sgd", 0.0, "constant")
    assert (config.hidden, config.epochs, config.batch_size) == ((400, 400), 10, 128)
    assert (config.kl_warmup, config.rho_lr_scale, config.temperature) == (0.0, 1.0, 1.0)


# -------------------------------------------------------------------------------------- interrupted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "moment", "last"),
    # In the middle of the third epoch; between the second's checkpoint and its measurement.
    [(NAMES[0], "on_step", 2), (NAMES[1], "on_epoch", 2)],
)
def test_a_killed_run_gives_the_same_rows(
    name: str, moment: str, last: int, tmp_path: Path
) -> None:
    whole_callback = getattr(TrainAccuracy, moment)

    def die(self: TrainAccuracy, row: Any = None, *, epoch: int = 1, batch: int = 2) -> None:
        if (row["epoch"] if row else epoch) == last and batch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if row:
            whole_callback(self, row)

    def run() -> None:
        setattr(TrainAccuracy, moment, die)
        reproduce(tiny(name), tmp_path / "killed", Quiet())

    assert Forked(run).wait() == -signal.SIGKILL
    (kept,) = (path for path in (tmp_path / "killed" / ".work").iterdir() if path.is_dir())
    assert (kept / "checkpoint.safetensors").exists()
    resumed = reproduce(tiny(name), tmp_path / "killed", Quiet(), seeds=(0,))
    whole = reproduce(tiny(name), tmp_path / "whole", Quiet(), seeds=(0,))
    assert [*map(without_times, resumed.results)] == [*map(without_times, whole.results)]
    assert resumed.table.read_bytes() == whole.table.read_bytes()


def made_up() -> tuple[bf.BayesianModule, ImageData]:
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    targets = (inputs.sum(1) > 0).long()
    data = ImageData("made up", inputs, targets, inputs, targets, ("a", "b"))
    return bf.BayesianModule(mlp(3, (5,), 2), seed=1), data


def train(work: Path | None, epochs: int, kept: list[torch.Tensor] | None = None) -> TrainAccuracy:
    bnn, data = made_up()
    watcher = TrainAccuracy(bnn, data, Context(work=work), epochs)
    bf.fit(
        bf.ELBO(bnn, num_data=40),
        TensorLoader(data.train_inputs, data.train_targets, 8),
        epochs=epochs,
        optimizer=partial(torch.optim.Adam, lr=0.05),
        checkpoint_dir=work,
        resume=True,
        callback=watcher,
    )
    if kept is not None:
        kept.append(bnn.mean_outputs(data.train_inputs))
    return watcher


def test_the_train_accuracy_is_of_the_mean_weights(tmp_path: Path) -> None:
    outputs: list[torch.Tensor] = []
    by_epoch = train(None, 4, outputs).percent
    right = outputs[0].argmax(-1) == made_up()[1].train_targets
    assert by_epoch[-1] == pytest.approx(100.0 * float(right.double().mean()))
    assert len(set(by_epoch)) > 1
    # In parts, of which the last has nothing to train, it is the same.
    assert [train(tmp_path, epochs).percent for epochs in (2, 4, 4)][1:] == [by_epoch, by_epoch]


@pytest.mark.parametrize("content", [None, "[50.0]", "{"])
def test_a_lost_measurement_is_named(tmp_path: Path, content: str | None) -> None:
    train(tmp_path, 3)
    path = tmp_path / "train-accuracy.json"
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(StorageError, match=r"train-accuracy\.json .*remove "):
        train(tmp_path, 4)


# ------------------------------------------------------------------------------ tables and figures
