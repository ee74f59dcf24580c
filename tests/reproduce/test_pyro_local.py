"""The experiment ``pyro-local``: its networks, its runs, its table and figures."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.killable import Quiet
from tests.places import idx, put, sha256

from bayesify.datasets import IMAGE_DATASETS, DataFile, DataSet, load_images
from bayesify.reproduce import Context, Job, Result, find_experiment, reproduce
from bayesify.reproduce.papers.pyro_local import notebook as pyro_local
from bayesify.reproduce.papers.pyro_local.notebook import dropout_net, make_data, make_elbo
from bayesify.reproduce.papers.pyro_local.notebook_table import (
    REPORTED,
    pyro_figures,
    pyro_table,
    unpacked,
)
from bayesify.reproduce.papers.pyro_local.rated_gaussian import RatedGaussian

pytestmark = [
    pytest.mark.filterwarnings("ignore:the posterior's standard deviations"),
    pytest.mark.filterwarnings("ignore:free energy:UserWarning"),
]
EXPERIMENT = find_experiment("pyro-local")


# ---------------------------------------------------------------------------------------- networks


def test_the_networks_are_those_of_the_document() -> None:
    (bayes, dropout) = (job.config for job in pyro_local.jobs((0,), False))
    elbo = make_elbo({**bayes, "init_scale": bayes["document_init_scale"]}, 50_000, seed=0)
    q = elbo.bnn.posterior
    assert isinstance(q, RatedGaussian)
    assert q.sizes == (784 * 1024, 1025 * 1024, 1025 * 1024, 1025 * 10)
    assert "0.bias" not in elbo.bnn.layout.names
    assert float(q.mean.detach().std()) == pytest.approx(0.01, rel=0.01)
    assert [round(float(part[0]), 4) for part in q.std.detach().split(q.sizes)] == [
        0.025,
        0.099,
        0.099,
        0.1,
    ]
    # A std a tenth of the prior's, within the 0.99 of two layers: log 10 + 0.005 - 0.5 a weight.
    with torch.no_grad():
        kl = float(elbo.complexity(None, 0, range(1))[0]) / 50_000
    assert kl == pytest.approx(-REPORTED["first_loss"], rel=0.01)
    kinds = [type(part).__name__ for part in dropout_net(dropout, 0)]
    hidden = ["Linear", "LeakyReLU", "Dropout"]
    assert kinds == ["Dropout", *hidden * 3, "Linear"]


# -------------------------------------------------------------------------------------------- runs


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set like MNIST in form, 240 + 10 images, and where it is."""
    generator = np.random.default_rng(0)
    prototypes = generator.integers(0, 256, (10, 28, 28))
    contents = {}
    for part, count in (("train", 240), ("test", 10)):
        labels = np.arange(count) % 10
        noise = generator.integers(-90, 91, (count, 28, 28))
        pixels = (prototypes[labels] + noise).clip(0, 255).astype(np.uint8)
        contents[f"{part}-images"] = idx(pixels.shape, pixels.tobytes())
        contents[f"{part}-labels"] = idx((count,), labels.astype(np.uint8).tobytes())
    for file, content in contents.items():
        put(tmp_path / "data" / f"{file}.gz", gzip.compress(content))
    files = tuple(DataFile("mnist", file, sha256(raw)) for file, raw in contents.items())
    made = DataSet("mnist", "made for a test", "none", 1, tuple("abcdefghij"), files)
    monkeypatch.setitem(IMAGE_DATASETS, "mnist", made)
    return tmp_path / "data"


SMALL = {"hidden": [16, 12, 14], "epochs": 3, "batch_size": 20, "held_out": 40, "limit": None}


def small(seed: int = 0, **changed: Any) -> list[Job]:
    quick = pyro_local.jobs((seed,), True)
    return [replace(job, config={**job.config, **SMALL, **changed}) for job in quick]


def without_times(path: Path) -> Mapping[str, Any]:
    row: dict[str, Any] = json.loads(path.read_text())
    assert row.pop("seconds") > 0.0
    del row["load"]
    return row


class StopError(Exception):
    """The process ends here."""


@pytest.mark.slow
def test_a_stopped_run_goes_on_and_is_like_another(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = replace(EXPERIMENT, jobs=lambda _, __: small())
    context = Context(data_dir=digits)
    reproduce(experiment, tmp_path / "one", Quiet(), quick=True, context=context)
    whole = pyro_local._Rates.on_step

    def stopping(self: Any, *, epoch: int, batch: int) -> None:
        whole(self, epoch=epoch, batch=batch)
        if (epoch, batch) == (2, 4):
            raise StopError

    monkeypatch.setattr(pyro_local._Rates, "on_step", stopping)
    with pytest.raises(StopError):
        reproduce(experiment, tmp_path / "stopped", Quiet(), quick=True, context=context)
    kept = tmp_path / "stopped" / ".work" / "bayes-seed-0" / "checkpoint.safetensors"
    assert kept.exists()
    monkeypatch.setattr(pyro_local._Rates, "on_step", whole)
    reproduce(experiment, tmp_path / "stopped", Quiet(), quick=True, context=context)
    for file in ("bayes-seed-0.json", "dropout-seed-0.json"):
        one, stopped = (without_times(tmp_path / name / file) for name in ("one", "stopped"))
        assert one == stopped
    bayes = without_times(tmp_path / "one" / "bayes-seed-0.json")["metrics"]
    rates = bayes["rates_by_epoch"]
    assert len(rates) == 4
    assert rates[0] == [0.25, 0.99, 0.99, 1.0]
    assert rates[-1] == bayes["rates"] != rates[0]
    assert len(bayes["one_sample_accuracies"]) == 30
    assert len(bayes["curve"]["train"]) == len(bayes["curve"]["held_out"]) == 3
    data = make_data(load_images("mnist", digits), 40, seed=0)
    for each in bayes["digits"]:
        assert sum(each["votes"]) == 30 > max(each["votes"])
        torch.testing.assert_close(
            unpacked(each["pixels"]).flatten(), data.test_inputs[each["index"]]
        )
        assert int(data.test_targets[each["index"]]) == each["label"]
    pictures = {path.name for path in (tmp_path / "one").glob("*.png")}
    assert pictures >= {"pyro-accuracy.png", "pyro-rates.png"}


def test_the_split_is_of_the_training_images(digits: Path) -> None:
    images = load_images("mnist", digits)
    parts = [make_data(images, 40, seed) for seed in (0, 0, 1)]
    assert torch.equal(parts[0].test_inputs, parts[1].test_inputs)
    assert not torch.equal(parts[0].test_inputs, parts[2].test_inputs)
    for part in parts:
        together = torch.cat([part.train_inputs, part.test_inputs])
        assert len(part.train_inputs) == 200
        assert float(together.max()) == 1.0
        theirs = (images.train_inputs * 126.0 / 255.0).sum(-1).sort().values
        torch.testing.assert_close(together.sum(-1).sort().values, theirs)


# ------------------------------------------------------------------------------- table and figures


def row(name: str, seed: int = 0, accuracy: float = 97.5, num_digits: int = 5) -> Result:
    """Made up."""
    (config,) = (u.config for u in pyro_local.jobs((seed,), False) if u.name == name)
    places = ("one_sample", "averaged", "mean_weights" if name == "bayes" else "off")
    metrics: dict[str, Any] = {
        "accuracy": dict.fromkeys(places, accuracy),
        "nll": dict.fromkeys(places, 0.1),
        "one_sample_accuracies": [accuracy - 0.1, accuracy + 0.1],
        "curve": {
            "train": [100.0 - 50.0 / (i + 1) for i in range(config["epochs"])],
            "held_out": [100.0 - 30.0 / (i + 1) for i in range(config["epochs"])],
        },
    }
    if name == "bayes":
        metrics |= {
            "kl_nats": 4.5e6,
            "kl_nats_initial": 8.75e6,
            "kl_nats_initial_document": 5.28e6,
            "num_train": 50_000,
            "std_residual": -0.97,
            "disagree_percent": 6.5,
            "std_mean": [0.1, 0.2, 0.3, 0.4],
            "rates": [0.4, 0.99, 0.99, 1.0],
            "rates_by_epoch": [[0.25 + 0.005 * i, 0.99, 0.99, 1.0] for i in range(31)],
            "digits": [
                {
                    "index": i,
                    "label": i % 10,
                    "votes": [0] * (i % 9) + [10, 20] + [0] * (8 - i % 9),
                    "pixels": pyro_local.packed(torch.rand(784)),
                }
                for i in range(num_digits)
            ],
        }
    return {"job": name, "seed": seed, "config": config, "metrics": metrics}


def test_the_table_says_what_the_numbers_say() -> None:
    text = pyro_table([row("bayes"), row("bayes", 1, 97.7), row("dropout", 0, 96.0)])
    assert "| Bayesian network, one weight sample | 96.92 | 97.60 +- 0.10 |" in text
    assert "| dropout network, dropout left on | 97.14 | 96.00 |" in text
    assert "one weight sample: 97.60 %, 0.68 points above the 96.92 % reported, 6.8 of our" in text
    assert "of 4 single samples 4 reach it, and the lowest has 97.40 %" in text
    assert "96.00 %, 1.14 points below the 97.14 % reported." in text
    assert "| 0 | 4,500,000 | 90.00 | 0.400, 0.990, 0.990 |" in text
    assert "Our KL is 175.00 nats for each training image at the start (105.60 with" in text
    assert "and 90.00 at the end." in text
    level = pyro_table([row("bayes", 0, 96.92)])
    assert "one weight sample: 96.92 %, level with the 96.92 % reported" in level
    assert "in log std is -0.97 nats a weight, 0 at the optimum: at this learning rate" in text
    assert "Settings that are not the document's, Bayesian network: " in text


@pytest.mark.parametrize("names", [("bayes",), ("dropout",), ("dropout", "bayes")])
def test_a_part_of_the_rows_is_a_table_and_figures(names: tuple[str, ...]) -> None:
    rows = [row(name) for name in names]
    text = pyro_table(rows)
    assert ("Bayesian network, one" in text) == ("bayes" in names)
    made = pyro_figures(rows)
    expected = {"pyro-accuracy", *(("pyro-rates", "pyro-votes") if "bayes" in names else ())}
    assert set(made) == expected
    assert len(made["pyro-accuracy"].axes) == len(names)
    if "bayes" in names:
        titles = [part.get_suptitle() for part in made["pyro-votes"].subfigs[:5]]
        assert titles[0] == "true 0\npredicted 1\nvotes: 20 for 1, 10 for 0"
    assert "pyro-votes" not in pyro_figures([row("bayes", num_digits=0)])
