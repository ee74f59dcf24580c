"""MNIST against Fashion-MNIST: what is computed, by all methods alike, and what is stored."""

from __future__ import annotations

import gzip
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.app.cli.test_cli import bayesify
from tests.places import idx, put, sha256
from tests.reproduce.test_experiments import Silent
from torch import Tensor

from bayesify.app.runs import RunConfig
from bayesify.datasets import IMAGE_DATASETS, DataError, DataFile, DataSet, ImageData
from bayesify.prediction import CategoricalPredictive
from bayesify.reproduce import Context, Job, Result, find_experiment, reproduce
from bayesify.reproduce.papers import mnist_ood as ood

EXPERIMENT = find_experiment("mnist-ood")
pytestmark = [
    pytest.mark.filterwarnings("ignore:the posterior's standard deviations"),
    pytest.mark.filterwarnings("ignore:free energy:UserWarning"),
]
SMALL = {"hidden": [20], "epochs": 3, "batch_size": 20}


class Quiet(Silent):
    """Whose rows have other metrics."""

    def on_done(self, job: Job, row: Result) -> None:
        self.said.append(f"end {job.name} {row['seconds']:.0f}")


@pytest.fixture
def two_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two data sets like MNIST and Fashion-MNIST in form, 200 + 60 images each, and where."""
    generator = np.random.default_rng(0)
    prototypes = generator.integers(0, 256, (2, 10, 28, 28))
    for number, name in enumerate((ood.INSIDE, ood.OUTSIDE)):
        contents = {}
        for part, count in (("train", 200), ("test", 60)):
            labels = np.arange(count) % 10
            noise = generator.integers(-60, 61, (count, 28, 28))
            pixels = (prototypes[number][labels] + noise).clip(0, 255).astype(np.uint8)
            contents[f"{part}-images"] = idx(pixels.shape, pixels.tobytes())
            contents[f"{part}-labels"] = idx((count,), labels.astype(np.uint8).tobytes())
        for file, content in contents.items():
            put(tmp_path / "data" / name / f"{file}.gz", gzip.compress(content))
        made = DataSet(
            name=name,
            description="made for a test",
            license="none",
            num_bytes=1,
            class_names=tuple("abcdefghij"),
            files=tuple(DataFile(name, file, sha256(raw)) for file, raw in contents.items()),
        )
        monkeypatch.setitem(IMAGE_DATASETS, name, made)
    return tmp_path / "data"


def small(name: str, seed: int = 0, **changed: Any) -> Job:
    (job,) = (job for job in ood.jobs((seed,), True) if job.name == name)
    settings = {key: v for key, v in job.config["settings"].items() if key != "limit"}
    return replace(job, config={**job.config, "settings": {**settings, **SMALL, **changed}})


@pytest.mark.parametrize("name", ood.METHODS)
def test_every_method_is_measured_alike(name: str, two_sets: Path) -> None:
    parts: list[float] = []
    metrics = ood.run(small(name), Context(data_dir=two_sets, on_progress=parts.append))
    assert parts == sorted(parts)
    assert parts[-1] == pytest.approx(1.0)
    assert set(metrics["test"]) == {"error", "nll", "brier", "ece"}
    assert set(metrics["auroc"]) == {"entropy", "max_probability", "mutual_information"}
    numbers = [*metrics["test"].values(), *metrics["auroc"].values(), *metrics["train_nll"]]
    assert all(math.isfinite(number) and number >= 0.0 for number in numbers)
    kept = metrics["mutual_information"]
    assert {len(kept["inside"]), len(kept["outside"])} == {60}
    assert min(kept["inside"]) >= 0.0
    assert max(kept["outside"]) > 0.0
    assert ("kl_nats" in metrics) == name.startswith("bayes")
    alone = metrics.get("alone", [])
    assert len({one["test"]["nll"] for one in alone}) == {"plain": 5, "dropout": 1}.get(name, 0)
    assert all("mutual_information" not in one["auroc"] for one in alone)
    if name == "plain":
        mean = sum(one["test"]["nll"] for one in alone) / 5
        assert metrics["test"]["nll"] < mean  # Jensen's inequality
    else:
        assert ood.run(small(name), Context(data_dir=two_sets)) == metrics


def test_it_learns_and_knows_what_it_does_not_know(two_sets: Path) -> None:
    metrics = ood.run(small("plain", epochs=10), Context(data_dir=two_sets))
    assert metrics["test"]["error"] < 5.0
    assert metrics["auroc"]["entropy"] > 0.6


def test_no_two_networks_begin_alike(monkeypatch: pytest.MonkeyPatch, two_sets: Path) -> None:
    seen: list[tuple[str | None, int]] = []
    whole = ood.trained

    def trained(config: RunConfig, *rest: Any) -> Any:
        seen.append((config.baseline, config.seed))
        return whole(config, *rest)

    monkeypatch.setattr(ood, "trained", trained)
    for seed in (0, 1, 2):
        ood.run(small("plain", seed, epochs=1), Context(data_dir=two_sets))
    assert len(set(seen)) == len(seen) == 15


@pytest.mark.parametrize("missing", [ood.INSIDE, ood.OUTSIDE])
def test_missing_data_are_named_before_anything_is_trained(
    two_sets: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(ood, "trained", None)
    for path in (two_sets / missing).iterdir():
        path.unlink()
    mend = rf"train-images\.gz of {missing} .*'bayesify data get {missing} --data-dir"
    with pytest.raises(DataError, match=mend) as raised:
        ood.run(small("bayes"), Context(data_dir=two_sets))
    assert "\n" not in str(raised.value)


def test_the_quick_run_leaves_rows_a_table_and_a_figure(two_sets: Path, tmp_path: Path) -> None:
    experiment = replace(EXPERIMENT, jobs=lambda _, __: [small("bayes"), small("plain")])
    outcome = reproduce(
        experiment, tmp_path / "out", Quiet(), quick=True, context=Context(data_dir=two_sets)
    )
    assert [row["job"] for row in outcome.results] == ["bayes", "plain"]
    text = outcome.table.read_text()
    assert text.startswith("**Quick run")
    assert "| SGD | 5 |" in text
    assert [path.name for path in outcome.figures] == ["mnist-ood.png"]


# ------------------------------------------------------------------------------------------ numbers


class Known:
    """A network whose answers are known."""

    def __init__(self, near: Tensor, far: Tensor) -> None:
        self.answers = {len(part[0]): part for part in (near, far)}

    def predict(self, inputs: Tensor, num_samples: int) -> CategoricalPredictive:
        assert num_samples == 7
        return CategoricalPredictive.from_logits(self.answers[len(inputs)].log())


def by_pairs(inside: Tensor, outside: Tensor) -> float:
    """The area under the ROC curve from its definition."""
    higher = (outside.unsqueeze(0) > inside.unsqueeze(1)).double()
    ties = (outside.unsqueeze(0) == inside.unsqueeze(1)).double()
    return float((higher + 0.5 * ties).mean())


def check_measured(samples: int) -> None:
    generator = torch.Generator().manual_seed(0)
    near, far = (
        (scale * torch.randn(samples, n, 10, generator=generator, dtype=torch.float64)).softmax(-1)
        for scale, n in ((2.0, 50), (1.5, 40))
    )
    y = torch.randint(10, (50,), generator=generator)
    empty = torch.zeros(0, 1)
    data = ImageData("near", empty, y[:0], torch.zeros(50, 1), y, tuple("abcdefghij"))
    found = ood.measure(Known(near, far), data, torch.zeros(40, 1), 7)  # type: ignore[arg-type]
    p, q = near.mean(0), far.mean(0)
    entropy = [-(part * part.log()).sum(-1) for part in (p, q)]
    aleatoric = [-(part * part.log()).sum(-1).mean(0) for part in (near, far)]
    information = [whole - part for whole, part in zip(entropy, aleatoric, strict=True)]
    doubt = [1.0 - part.amax(-1) for part in (p, q)]
    assert found["test"]["error"] == pytest.approx(
        100.0 * float((p.argmax(-1) != y).double().mean())
    )
    assert found["test"]["nll"] == pytest.approx(-float(p[range(50), y].log().mean()))
    auroc = found["auroc"]
    assert auroc["entropy"] == pytest.approx(by_pairs(*entropy), abs=1e-6)
    assert auroc["max_probability"] == pytest.approx(by_pairs(*doubt), abs=1e-6)
    assert auroc["mutual_information"] == pytest.approx(by_pairs(*information), abs=1e-6)
    largest = float(information[1].max())
    assert found["mutual_information"]["outside"][-1] == pytest.approx(largest, rel=1e-3)


def test_the_numbers_are_those_of_their_definitions() -> None:
    check_measured(4)


def test_exchanged_data_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ood.ood_auroc
    monkeypatch.setattr(ood, "ood_auroc", lambda inside, outside: whole(outside, inside))
    with pytest.raises(AssertionError):
        check_measured(4)


def test_the_probability_of_a_sure_network_makes_no_ties() -> None:
    logits = torch.tensor([[0.0, 20.0], [0.0, 21.0], [0.0, 22.0]])
    doubt = ood._doubt(CategoricalPredictive.from_logits([logits]))
    # In float32, 1 - p would be 0 for all three.
    expected = torch.tensor([20.0, 21.0, 22.0], dtype=torch.float64).neg().exp()
    torch.testing.assert_close(doubt, expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("count", [1, 7, 500, 10_000])
def test_what_is_kept_has_the_shares_of_all(count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)).exp()
    kept = torch.tensor(ood.thinned(values))
    assert len(kept) == min(count, 500)
    for cut in (0.1, 0.5, 1.0, 3.0):
        share = (kept <= cut).double().mean()
        assert abs(share - (values <= cut).double().mean()) <= 1.0 / len(kept)


# ------------------------------------------------------------------------------ settings and tables


def test_the_settings_are_those_of_train() -> None:
    for name, baseline in (("bayes", None), ("dropout", "dropout"), ("plain", "sgd")):
        settings = dict(ood.METHODS[name]["settings"])
        default = RunConfig.of("mnist", baseline=baseline).to_json()
        assert settings.pop("epochs") == 20
        assert settings == {key: default[key] for key in settings}
        # And nothing that matters is left to a default that may change.
        made = RunConfig.of("mnist", **{**settings, "hidden": tuple(settings["hidden"])})
        unsaid = {key for key in default if key not in settings} - set(made.idle())
        assert unsaid <= {
            "dataset",
            "epochs",
            "baseline",
            "target",
            "net",
            "mean_init_std",
            "passes",
            "limit",
            "seed",
            "threads",
            "backend",
            "precision",
            "temperature",
            "train_samples",
            "kl",
            "kl_weighting",
            "test_samples",
            "test_fraction",
            "drop",
            "keep",
            "estimator",
            "kl_warmup_power",
            "weight_decay",  # 1 and 0: what there was when these were run
            "posterior",
            "objective",
            "prune_fraction",  # a mean field, the ELBO, none
            "augment",  # 0: likewise
            *(("dropout_input", "dropout_hidden") if baseline is None else ()),  # 0: likewise
        }


def test_full_and_quick_are_the_same_methods() -> None:
    full = {job.name: job.config for job in ood.jobs((0,), False)}
    for job in ood.jobs((0,), True):
        whole, quick = full[job.name]["settings"], job.config["settings"]
        changed = {key for key in quick if quick[key] != whole.get(key)}
        assert (
            {"hidden", "epochs", "limit"}
            <= changed
            <= {"hidden", "epochs", "limit", "test_samples"}
        )


def row(method: str, seed: int, error: float, auroc: float, **more: Any) -> Result:
    test = {"error": error, "nll": 0.05, "brier": 0.02, "ece": 0.01}
    metrics = {"test": test, "auroc": {"entropy": auroc, "max_probability": 0.9}, **more}
    job = {"B": "bayes", "M": "dropout", "e": "plain"}[method[:1] or "e"]
    return {"config": {"method": method}, "job": job, "seed": seed, "metrics": metrics}


def test_the_table_says_who_wins_and_where_we_lose() -> None:
    members = [row("", 0, error, 0.95)["metrics"] for error in (1.5, 1.7)]
    rows = [
        row("MC dropout", 0, 1.6, 0.99),
        row("ensemble of 5", 0, 1.2, 0.97, alone=members),
        *(row("Bayes by Backprop, defaults", seed, 1.50 + 0.02 * seed, 0.98) for seed in (0, 1)),
    ]
    lines = ood.table(rows).splitlines()
    assert lines[4].startswith("| Bayes by Backprop, defaults | 2 | 1.51 +- 0.01 | **0.0500")
    assert lines[5].startswith("| SGD | 2 | 1.60 +- 0.10 |")
    assert lines[6].startswith("| ensemble of 5 | 1 | **1.20** |")
    assert "| **0.9900** |" in lines[7]
    assert lines[-1] == (
        "Bayes by Backprop, defaults loses to SGD on nothing; to ensemble of 5 on error %; to MC "
        "dropout on AUROC by entropy."
    )
    close = [row("Bayes by Backprop", s, 1.5 + 0.2 * s, 0.9) for s in (0, 1)]
    close += [row("MC dropout", s, 1.45 + 0.2 * s, 0.9) for s in (0, 1)]
    assert "to MC dropout on error % (within two standard errors)." in ood.table(close)


@pytest.mark.slow
def test_a_run_shows_images_of_another_kind_that_are_at_hand(
    two_sets: Path, tmp_path: Path
) -> None:
    tiny = ["--hidden", "9", "--epochs", "1", "--test-samples", "3", "--threads", "1"]
    said = bayesify("train", ood.INSIDE, "--out", tmp_path / "run", "--data-dir", two_sets, *tiny)
    assert said.code == 0, said.err
    picture, page = (tmp_path / "run" / name for name in ("out_of_distribution.png", "report.html"))
    assert 'id="out_of_distribution"' in page.read_text(encoding="utf-8")
    picture.unlink()
    for path in (two_sets / ood.OUTSIDE).iterdir():
        path.rename(path.with_name(f"not-{path.name}"))
    assert bayesify("report", tmp_path / "run").code == 0
    assert "out_of_distribution" not in page.read_text(encoding="utf-8")
    assert not picture.exists()
