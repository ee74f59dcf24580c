"""``bayesify train --objective`` and ``bayesify certify``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch
from tests.app.cli.test_cli import TINY, as_json, bayesify, few_images, quick_runs, read_json
from tests.training.test_resume import timeless
from torch import nn

from bayesify import certify, load, split_for_prior
from bayesify.app.launch import Launch
from bayesify.app.runs import Run
from bayesify.module.networks import mlp

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning"),
]
OPTIONS = ["--objective", "f-quad", "--prior-epochs", "3", "--prior-part", "0.6", *TINY]


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("certified") / "run"
    with quick_runs():
        said = bayesify("train", "mnist", "--out", place, *OPTIONS)
    assert said.code == 0, said.err
    assert "prior: epoch 3 of 3, training error" in said.err
    assert "PAC-Bayes, f-quad, mnist" in said.err
    return place


def test_the_posterior_begins_at_a_prior_of_its_part(certified: Path) -> None:
    settings = read_json(certified / "config.json")["settings"]
    assert (settings["objective"], settings["prior_part"]) == ("f-quad", 0.6)
    assert settings["prior_std"] == settings["init_std"] == 0.01
    bnn = load(certified / "checkpoint.safetensors", mlp(784, (16,), 10, dropout=(0.2, 0.2)))
    assert bnn.prior_mean is not None
    moved = (bnn.posterior.mean.detach() - bnn.prior_mean).abs().max()
    assert 0.0 < float(moved) < 0.05
    start = mlp(784, (16,), 10, dropout=(0.2, 0.2))
    initial = torch.cat([each.detach().flatten() for each in start.parameters()])
    assert float((bnn.prior_mean - initial).abs().max()) > 1e-3  # the prior was trained


def test_certify_is_the_librarys(certified: Path) -> None:
    found = as_json("certify", certified, "--samples", "4000", "--delta", "0.03")
    bnn = load(certified / "checkpoint.safetensors", mlp(784, (16,), 10, dropout=(0.2, 0.2)))
    data = few_images("mnist", 200)
    wanted = certify(
        bnn,
        data.train_inputs,
        data.train_targets,
        prior_indices=split_for_prior(200, 0.6, seed=0),
        delta=0.03,
        num_samples=4000,
        num_candidates=5,  # the default width of the prior was chosen among five
    )
    assert (found["num_examples"], found["confidence"]) == (80, 0.96)
    assert found["error_bound"] == wanted.error_bound
    assert found["error"] < found["error_sampling_bound"] < found["error_bound"]
    said = bayesify("certify", certified, "--samples", "4000", "--delta", "0.03")
    assert said.out.strip() == str(wanted)
    alone = as_json(
        "certify", certified, "--samples", "4000", "--delta", "0.03", "--candidates", "1"
    )
    assert alone["error_bound"] < found["error_bound"]


@pytest.mark.parametrize("name", ["samples", "candidates"])
def test_a_number_out_of_range_has_the_name_of_its_option(name: str, tmp_path: Path) -> None:
    said = bayesify("certify", tmp_path, f"--{name}", "0")
    assert (said.code, said.out) == (2, "")
    assert said.err == f"bayesify: {name} must be at least 1, got 0\n"


def test_a_run_on_the_elbo_has_no_certificate(finished: Path) -> None:
    said = bayesify("certify", finished)
    assert (said.code, said.out) == (2, "")
    assert "no certificate can be given" in said.err
    assert "train with --objective f-quad" in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prior-part", "0.3"], "prior-part would do nothing here"),
        (["--objective", "f-quad", "--prior", "laplace"], "needs prior gaussian, got laplace"),
        (["--objective", "f-quad", "--temperature", "2"], "needs temperature 1.0, got 2.0"),
        (["--objective", "f-quad", "--kl", "monte-carlo"], "needs the exact KL"),
        (["--objective", "f-quad", "--kl-warmup", "0.5"], "needs kl-warmup 0.0, got 0.5"),
        (["--objective", "f-quad", "--baseline", "sgd"], "objective would do nothing here"),
        (["--objective", "quad"], "objective must be one of elbo, f-quad, f-classic, f-lambda"),
        (["--objective", "f-quad", "--prior-part", "1"], "prior-part must be above 0 and below 1"),
    ],
)
def test_settings_that_contradict_are_named(
    options: list[str], message: str, tmp_path: Path
) -> None:
    said = bayesify("train", "mnist", "--out", tmp_path / "run", *options)
    assert said.code == 2
    assert message in said.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("part", "counts"), [("0.97", "194 and 6 with prior-part 0.97"), ("0.001", "0 and 200")]
)
def test_too_few_images_for_a_certificate_are_refused_before_training(
    part: str, counts: str, tmp_path: Path
) -> None:
    options = ["--objective", "f-quad", "--prior-epochs", "1", "--prior-part", part, *TINY]
    said = bayesify("train", "mnist", "--out", tmp_path / "run", *options)
    assert said.code == 2
    assert "prior-part must leave at least 1 training image to the prior and 8 to the" in said.err
    assert f"got {counts}" in said.err
    assert "epoch" not in said.err
    assert not (tmp_path / "run").exists()


def test_several_processes_are_refused_before_they_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(_: Launch) -> None:
        raise AssertionError("other processes were started")

    monkeypatch.setattr(Launch, "joined", started)
    said = bayesify("train", "mnist", "--out", tmp_path / "run", *OPTIONS, "--devices", "2")
    assert said.code == 2
    assert "objective f-quad is trained in one process; leave --devices" in said.err
    assert not (tmp_path / "run").exists()


def test_the_report_names_the_objective(certified: Path) -> None:
    # The posterior is trained without the dropout of the prior's network.
    assert "<title>PAC-Bayes, f-quad on mnist" in (certified / "report.html").read_text()


def test_an_interrupted_run_resumes_without_another_prior(certified: Path, tmp_path: Path) -> None:
    whole = load(certified / "checkpoint.safetensors", mlp(784, (16,), 10, dropout=(0.2, 0.2)))
    place = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("bayesify.app.runs.train"), "fit", interrupted)
        assert bayesify("train", "mnist", "--out", place, *OPTIONS).code == 130
    assert not (place / "checkpoint.safetensors").exists()
    said = bayesify("train", "mnist", "--out", place, *OPTIONS, "--resume")
    assert said.code == 0, said.err
    assert "prior: epoch" not in said.err  # it was finished
    found = load(place / "checkpoint.safetensors", mlp(784, (16,), 10, dropout=(0.2, 0.2)))
    assert torch.equal(found.posterior.mean, whole.posterior.mean)
    again = bayesify("train", "mnist", "--out", place, *OPTIONS, "--resume")
    assert again.code == 0, again.err


def test_a_run_resumed_after_an_epoch_is_trained_without_dropout(
    certified: Path, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    with quick_runs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("bayesify.app.cli.epoch_table.HistoryWriter.on_epoch", interrupted)
        assert bayesify("train", "mnist", "--out", place, *OPTIONS).code == 130
    assert (place / "checkpoint.safetensors").exists()
    said = bayesify("train", "mnist", "--out", place, *OPTIONS, "--resume")
    assert said.code == 0, said.err
    rows = [timeless(Run.open(folder).history()) for folder in (certified, place)]
    assert rows[0] == rows[1]
    posteriors = [Run.open(folder).load_module().posterior for folder in (certified, place)]
    assert torch.equal(posteriors[0].mean, posteriors[1].mean)
    modules = Run.open(place).make_module().net.modules()
    assert {each.p for each in modules if isinstance(each, nn.Dropout)} == {0.0}


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
