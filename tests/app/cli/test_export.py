"""``bayesify export``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.app.cli.test_cli import as_json, bayesify, few_images

from bayesify import load
from bayesify.export import onnx_session, read_metadata
from bayesify.module.networks import mlp

pytestmark = pytest.mark.usefixtures("quick")


def test_a_run_answers_in_onnx_runtime(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "net.onnx"
    found = as_json("export", finished, "--out", out, "--samples", "8")
    assert found["bytes"] == out.stat().st_size
    assert (found["num_samples"], found["outputs"]) == (8, ["mean", "total", "epistemic"])
    assert found["largest_difference"] < 1e-5
    described = read_metadata(out)
    assert described.num_samples == 8
    assert described.classes == tuple("0123456789")
    # From pixels, by the file alone.
    data = few_images("mnist", 200)
    pixels = (data.test_inputs * data.pixel_scale).round().numpy().astype(np.uint8)
    rule = described.input
    inputs = (pixels.astype(np.float32) - rule["shift"][0]) / np.float32(rule["scale"][0])
    mean, total, epistemic = onnx_session(out).run(None, {"input": inputs.astype(np.float32)})
    threshold = described.thresholds["total"]
    assert found["threshold"] == threshold
    assert 0.95 <= float((total <= threshold + 1e-6).mean()) < 0.96
    error = 100.0 * float((torch.from_numpy(mean).argmax(-1) != data.test_targets).double().mean())
    assert found["error"] == pytest.approx(error)
    assert bool((epistemic > 0.0).all())


@pytest.mark.slow
def test_pruned_mean_weights_are_shrunk_and_int8_shows_its_cost(
    finished: Path, tmp_path: Path
) -> None:
    small, whole = tmp_path / "small.onnx", tmp_path / "whole.onnx"
    options = ("--samples", "0", "--out")
    pruned = as_json("export", finished, *options, small, "--fraction", "0.999", "--int8")
    plain = as_json("export", finished, *options, whole)
    assert pruned["weights"] < plain["weights"]
    assert pruned["int8"]["float_bytes"] < plain["bytes"]
    assert 0.0 <= pruned["int8"]["error"] <= 100.0
    assert plain["int8"] is None
    bnn = load(finished / "checkpoint.safetensors", mlp(784, (16,), 10))
    x = few_images("mnist", 200).test_inputs
    mean = onnx_session(whole).run(["mean"], {"input": x.numpy()})[0]
    assert np.allclose(mean, bnn.predict_mean(x).mean, atol=1e-5)


@pytest.mark.slow
def test_a_program_of_pytorch(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "net.pt2"
    said = bayesify("export", finished, "--out", out, "--samples", "4")
    assert said.code == 0
    assert said.out == f"exported: {out}\n"
    assert "4 weight samples" in said.err
    found = torch.export.load(out).module()(few_images("mnist", 200).test_inputs[:3])
    assert found["mean"].shape == (3, 10)


@pytest.mark.parametrize(
    ("out", "options", "message"),
    [
        ("net.txt", (), "out must end in .onnx or .pt2, got net.txt"),
        ("net.pt2", ("--int8",), "int8 is for ONNX"),
        ("net.onnx", ("--samples", "-1"), "samples must be at least 1, or 0"),
        ("net.onnx", ("--fraction", "1.5"), "fraction must be above 0 and below 1, got 1.5"),
        ("net.onnx", ("--fraction", "nan"), "fraction must be above 0 and below 1, got nan"),
        ("net.onnx", ("--pruned", "0.5"), "No such option: --pruned"),
        ("none/net.onnx", (), "there is no folder"),
        ("there.onnx", (), "exists already; choose a new file with --out, or overwrite it"),
    ],
)
def test_wrong_arguments(
    finished: Path, tmp_path: Path, out: str, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "there.onnx").write_text("before")
    said = bayesify("export", finished, "--out", tmp_path / out, *options)
    assert (said.code, said.out) == (2, "")
    assert message in said.err
    assert said.err.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["there.onnx"]


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    said = bayesify("export", tmp_path, "--out", tmp_path / "net.onnx")
    assert said.code == 2
    assert "holds no run" in said.err


def test_a_baseline_cannot_be_pruned(baseline: object, tmp_path: Path) -> None:
    folder = baseline.folder  # type: ignore[attr-defined]
    said = bayesify("export", folder, "--out", tmp_path / "net.onnx", "--fraction", "0.5")
    assert said.code == 2
    assert "no signal-to-noise ratio; leave --fraction out" in said.err
