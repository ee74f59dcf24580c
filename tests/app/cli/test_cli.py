"""The commands on tiny runs with MNIST: what they write, what they print, and where."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.training.test_resume import timeless

from bayesify import BayesianModule, load
from bayesify.app.cli import main
from bayesify.app.runs import RunConfig, folder
from bayesify.datasets import ImageData, find_test_inputs, load_images
from bayesify.module.networks import mlp

TINY = ["--hidden", "16", "--epochs", "2", "--limit", "200", "--batch-size", "50"]
TINY += ["--threads", "1", "--test-samples", "2"]
MIXTURE = ["--prior", "scale-mixture", "--pi", "0.3", "--std2", "0.01", "--kl", "monte-carlo"]
MIXTURE += ["--kl-weighting", "geometric", "--schedule", "constant", "--optimizer", "sgd"]
MIXTURE += ["--momentum", "0.5", "--lr", "1e-3", "--seed", "-3", "--train-samples", "2"]
MIXTURE += ["--init-std", "0.05", "--mean-init-std", "0.1", "--kl-warmup", "0", "--hidden", "8,7"]
BASELINES = {
    "sgd": ["--baseline", "sgd", *TINY[:-2]],
    "dropout": ["--baseline", "dropout", "--dropout-hidden", "0.3", *TINY[:-2]],
}

pytestmark = pytest.mark.usefixtures("quick")


class Said(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str


def bayesify(*arguments: object) -> Said:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    redirected = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with redirected[0], redirected[1], pytest.raises(SystemExit) as leaving:
        main([str(each) for each in arguments])
    return Said(leaving.value.code, out.getvalue(), err.getvalue())


def as_json(*arguments: object) -> dict[str, Any]:
    """The one JSON object that a command with --json prints."""
    said = bayesify(*arguments, "--json")
    assert said.code == 0, said.err
    assert said.out.count("\n") == 1
    assert said.out.endswith("}\n")
    return json.loads(said.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@lru_cache
def few_images(name: str, limit: int | None) -> ImageData:
    data = load_images(name, limit=limit)
    return replace(data, test_inputs=data.test_inputs[:500], test_targets=data.test_targets[:500])


@contextlib.contextmanager
def without_figures() -> Iterator[None]:
    """No figures in reports: they are tested elsewhere and take seconds."""
    finish = importlib.import_module("bayesify.app.runs.finish")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "build_figures", lambda *_, **__: {})
        patch.setattr(finish, "column_effects", lambda *_: [])
        yield


@contextlib.contextmanager
def quick_runs(*, figures: bool = False) -> Iterator[None]:
    """500 test images, and no figures."""

    def few(name: str, data_dir: str | None = None, **options: Any) -> ImageData:
        if data_dir or os.environ.get("BAYESIFY_DATA"):
            return load_images(name, data_dir, **options)
        return few_images(name, options["limit"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "load_images", few)
        with contextlib.nullcontext() if figures else without_figures():
            yield


class Whole(NamedTuple):
    """A run with all that belongs to it."""

    folder: Path
    said: Said


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    place = tmp_path_factory.mktemp("cli") / "a [red]run :a:"
    with quick_runs(figures=True):
        return Whole(place, bayesify("train", "mnist", "--out", place, *TINY))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def trained(whole: Whole) -> BayesianModule:
    return load(whole.folder / "checkpoint.safetensors", mlp(784, (16,), 10))


def contents(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.iterdir()}


# ----------------------------------------------------------------------------------- what is left


def test_a_run_leaves_what_was_promised(whole: Whole) -> None:
    place, said = whole
    assert said.code == 0, said.err
    assert said.out == f"report: {place / 'report.html'}\n"
    for part in ("12,730 weights, 200 images; 2 epochs", "  1/2 ", "  2/2 ", "test error "):
        assert part in said.err
    assert said.err.count("worth less than no training") == 1
    names = {"config.json", "metrics.json", "history.csv", "checkpoint.safetensors"}
    names |= {"pruning.json", "report.html", "learning_curves.png", "reliability.png"}
    names |= {"least_certain.png", "most_certain.png", "pruning.png", "snr.png"}
    names |= {"risk_coverage.png", "votes.png"}
    if find_test_inputs("fashion-mnist") is not None:  # not in the repository
        names |= {"out_of_distribution.png"}
    names |= {"weight_densities.png", "weight_posteriors.png"}
    files = contents(place)
    assert set(files) == names
    page = files["report.html"].decode()
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    for name, content in files.items():
        if name.endswith(".png"):
            assert content.startswith(b"\x89PNG")
    assert page.count("data:image/png") == sum(name.endswith(".png") for name in names)

    metrics = read_json(place / "metrics.json")
    keys = {"error_mean_weights", "error_predictive", "nll", "brier", "ece"}
    for part in ("test", "train"):
        assert keys <= metrics[part].keys()
        assert 0 < metrics[part]["error_predictive"] < 90
    assert metrics["num_weights"] == metrics["num_weights_left"] == 784 * 16 + 16 + 16 * 10 + 10
    assert metrics["epochs"] == metrics["test_samples"] == 2
    assert metrics["kl_nats"] > 0
    assert 0.0 < metrics["free_energy_untrained"] < metrics["free_energy"], "as the note says"
    assert f"with untrained means {metrics['free_energy_untrained']:.2f}" in page
    unpruned = json.loads((place / "pruning.json").read_text())[0]  # one number for one thing
    for name in ("error_mean_weights", "error_predictive"):
        assert unpruned[name] == pytest.approx(metrics["test"][name])
    assert 0 < metrics["seconds_train"] < 600
    assert any("worth less than no training" in note for note in metrics["notes"])

    rows = rows_of(place / "history.csv")
    assert [row["epoch"] for row in rows] == ["1", "2"]
    columns = {"loss", "nll", "kl", "train_error", "test_error", "test_nll", "learning_rate"}
    assert columns <= rows[0].keys()
    assert float(rows[-1]["test_error"]) == pytest.approx(metrics["test"]["error_mean_weights"])
    assert float(rows[-1]["seconds"]) == metrics["seconds_train"]

    config = read_json(place / "config.json")
    expected = RunConfig.of(
        "mnist", hidden=(16,), epochs=2, limit=200, batch_size=50, test_samples=2, threads=1
    )
    assert RunConfig.from_json(config["settings"]) == expected
    assert {"bayesify", "torch", "numpy", "safetensors", "python"} <= config["versions"].keys()
    assert config["hardware"]
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|None", str(config["commit"]))
    assert shlex.split(config["command"])[:5] == ["bayesify", "train", "mnist", "--out", str(place)]


def test_a_run_without_a_name_has_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mnist", "mnist-2"):
        said = bayesify("train", "mnist", *TINY)
        assert said.out == f"report: runs/{name}/report.html\n", said.err
        assert (tmp_path / "runs" / name / "report.html").exists()


def test_evaluating_again_gives_the_metrics(whole: Whole) -> None:
    metrics, again = read_json(whole.folder / "metrics.json"), as_json("evaluate", whole.folder)
    assert again == {name: metrics[name] for name in again}
    assert {"test", "train", "kl_nats", "num_weights"} <= again.keys()
    bnn, data = trained(whole), few_images("mnist", 200)
    for part in ("test", "train"):
        x, y = getattr(data, f"{part}_inputs"), getattr(data, f"{part}_targets")
        wrong = bnn.predict_mean(x).mean.argmax(-1) != y
        assert again[part]["error_mean_weights"] == pytest.approx(
            100 * float(wrong.double().mean())
        )
        assert again[part]["nll"] == pytest.approx(-float(bnn.predict(x, 2).log_prob(y).mean()))
    said = bayesify("evaluate", whole.folder, "--samples", "1")
    assert said.code == 0
    assert f"{metrics['test']['error_mean_weights']:.2f}" in said.out
    assert re.search(r"weight samples +1 +1\n", said.out)


def test_inspecting_shows_settings_and_parameters(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    shown = as_json("inspect", whole.folder)
    assert shown["settings"] == read_json(whole.folder / "config.json")["settings"]
    assert shown["num_weights"] == 12730
    assert {row["name"]: row["shape"] for row in shown["parameters"]} == {
        "0.weight": [16, 784], "0.bias": [16], "2.weight": [10, 16], "2.bias": [10]
    }  # fmt: skip
    bnn = trained(whole)
    weights = bnn.layout.unflatten(bnn.posterior.mean.detach())["2.weight"]
    row = shown["parameters"][2]
    assert row["mean_rms"] == pytest.approx(float(weights.square().mean().sqrt()))
    assert 0 < row["std_median"] < 0.1
    said = bayesify("inspect", whole.folder)
    assert said.code == 0
    assert shown["command"] in said.out  # though its path looks like Rich's markup
    assert f"{row['mean_rms']:.4f}" in said.out


def test_pruning_everything_calls_every_digit_0(whole: Whole) -> None:
    rows = as_json("prune", whole.folder, "--fractions", "1", "--samples", "1")["rows"]
    assert [row["weights_left"] for row in rows] == [12730, 0]
    others = 100 * float((few_images("mnist", 200).test_targets != 0).double().mean())
    assert rows[1]["error_mean_weights"] == pytest.approx(others)
    assert rows[1]["error_predictive"] == pytest.approx(others)
    assert rows[0]["error_mean_weights"] < 90


def test_pruning_writes_a_smaller_file(whole: Whole, tmp_path: Path) -> None:
    before, file = contents(whole.folder), tmp_path / "small.safetensors"
    said = as_json("prune", whole.folder, "--fractions", "0.5,0.9", "--out", file)
    small = load(file, mlp(784, (16,), 10))
    zeros = small.to_module().state_dict()
    assert sum(int((tensor == 0).sum()) for tensor in zeros.values()) == 11457  # floor(.9 * 12730)
    data = few_images("mnist", 200)
    wrong = small.predict_mean(data.test_inputs).mean.argmax(-1) != data.test_targets
    row = said["rows"][2]
    assert (row["fraction"], row["weights_left"]) == (0.9, 1273)
    assert row["error_mean_weights"] == pytest.approx(100 * float(wrong.double().mean()))
    assert said["written"]["bytes"] == row["file_bytes"] == file.stat().st_size
    assert (
        said["written"]["bytes_unpruned"] == said["rows"][0]["file_bytes"] > 4 * file.stat().st_size
    )
    file = tmp_path / "[b]:b:"
    text = bayesify("prune", whole.folder, "--fractions", "0.9", "--out", file)
    assert text.code == 0
    for part in (
        f"{file}: {file.stat().st_size:,} bytes",
        f"{said['rows'][0]['file_bytes']:,} unpruned",
    ):
        assert part in text.out
    assert contents(whole.folder) == before


def test_baselines_are_measured_like_the_rest(baseline: Whole, quick: None) -> None:
    place, said = baseline
    assert said.code == 0, said.err
    metrics = read_json(place / "metrics.json")
    assert metrics["kl_nats"] is metrics["temperature"] is metrics["std_residual"] is None
    assert metrics["test_samples"] == 1
    assert metrics["test"]["error_predictive"] == metrics["test"]["error_mean_weights"] < 89
    assert metrics["notes"] == []
    again = as_json("evaluate", place)
    assert again == {name: metrics[name] for name in again}
    assert {row["std_median"] for row in as_json("inspect", place)["parameters"]} == {None}
    assert rows_of(place / "history.csv")[0]["kl"] == "0.0"
    assert bayesify("report", place).code == 0


# ------------------------------------------------------------------------- repeating and resuming


@pytest.mark.parametrize("options", [MIXTURE, BASELINES["dropout"][:4]], ids=["mixture", "dropout"])
def test_the_command_in_config_json_repeats_the_run(options: list[str], tmp_path: Path) -> None:
    tiny = TINY[:-2] if "--baseline" in options else TINY
    first = as_json("train", "mnist", "--out", tmp_path / "first", *tiny, *options)
    words = shlex.split(read_json(tmp_path / "first" / "config.json")["command"])
    assert words[0] == "bayesify"
    words[words.index(str(tmp_path / "first"))] = str(tmp_path / "second")
    second = as_json(*words[1:])
    assert (
        timeless(second)
        == timeless(first)
        == timeless(read_json(tmp_path / "first" / "metrics.json"))
    )
    one, two = (read_json(tmp_path / name / "config.json") for name in ("first", "second"))
    assert one["settings"] == two["settings"]
