"""``bayesify predict`` for a run with images: every form of file gives the same answers."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from tests.app.cli.test_cli import as_json, bayesify, quick_runs
from tests.app.cli.test_errors import check_refused
from tests.app.cli.test_tables import rows_of

from bayesify.app.runs import Run
from bayesify.datasets import load_images

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("form", ["npy", "flat npy", "one", "csv", "kaggle", "idx", "idx.gz"])
def test_images_are_predicted_too(tmp_path: Path, form: str, images_run: Path) -> None:
    data = load_images("mnist", limit=3)
    pixels = (data.train_inputs * data.pixel_scale).round().numpy().astype(np.uint8)
    source = tmp_path / "images"
    count = 1 if form == "one" else 3
    if form.endswith("npy") or form == "one":
        array = pixels if form == "flat npy" else pixels.reshape(-1, 28, 28)
        with source.open("wb") as file:
            np.save(file, array[0] if form == "one" else array)
    elif "idx" in form:
        content = bytes([0, 0, 8, 3, 0, 0, 0, 3, 0, 0, 0, 28, 0, 0, 0, 28]) + pixels.tobytes()
        source.write_bytes(gzip.compress(content) if "gz" in form else content)
    else:
        lines = [",".join(map(str, row)) for row in pixels]
        if form == "kaggle":
            lines = [f"{label},{line}" for label, line in zip((5, 0, 4), lines, strict=True)]
            lines.insert(0, ",".join(["label", *(f"pixel{i}" for i in range(784))]))
        source.write_text("\n".join(lines) + "\n")
    said = as_json("predict", images_run, source, "--out", tmp_path / "p.csv")
    assert said["rows"] == count
    probs = Run.open(images_run).load_module().predict(data.train_inputs, 2).mean
    for row, expected in zip(rows_of(tmp_path / "p.csv"), probs, strict=False):
        assert [float(row[f"p({k})"]) for k in range(10)] == pytest.approx(
            expected.tolist(), abs=1e-6
        )


@pytest.fixture(scope="module")
def images_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("images") / "run"
    tiny = ["--hidden", "8", "--epochs", "1", "--limit", "100", "--test-samples", "2"]
    with quick_runs():
        assert bayesify("train", "mnist", "--out", place, *tiny).code == 0
    return place


def test_a_folder_is_no_file_of_digits(tmp_path: Path, images_run: Path) -> None:
    said = bayesify("predict", images_run, tmp_path, "--out", tmp_path / "p.csv")
    check_refused(said, f"{tmp_path} is a folder; name a file of it, .npy, .csv or IDX")
