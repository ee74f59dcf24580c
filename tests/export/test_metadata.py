"""The description of an exported network."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from bayesify.export import ExportMetadata, read_metadata
from bayesify.io import StorageError

DESCRIPTION = ExportMetadata(
    "classification",
    32,
    classes=("null", "größer"),
    input={"kind": "image", "shape": [784]},
    thresholds={"total": 0.5},
)


def write_onnx(path: Path, text: str | None) -> Path:
    model = onnx.helper.make_model(onnx.helper.make_graph([], "empty", [], []))
    if text is not None:
        onnx.helper.set_model_props(model, {"bayesify": text})
    onnx.save(model, path)
    return path


def test_a_description_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "net.onnx", DESCRIPTION.to_json())
    assert read_metadata(path) == DESCRIPTION
    with zipfile.ZipFile(tmp_path / "net.pt2", "w") as archive:
        archive.writestr("net/extra/bayesify", DESCRIPTION.to_json())
    assert read_metadata(tmp_path / "net.pt2") == DESCRIPTION


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "ranking"}, "kind must be one of classification, regression, got 'ranking'"),
        ({"num_samples": -1}, "at least 0, got -1"),
        ({"thresholds": {"total": float("nan")}}, "threshold of total must be finite"),
        ({"quantiles": (0.5, 1.0)}, "between 0 and 1, got 1.0"),
    ],
)
def test_wrong_values_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExportMetadata(**{"kind": "regression", "num_samples": 1, **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_samples": "3"}, "num_samples must be a whole number, got '3'"),
        ({"thresholds": None}, "thresholds must be a mapping, got None"),
        ({"thresholds": {"total": "a"}}, "the threshold of total must be a number, got 'a'"),
        ({"input": [1]}, "input must be a mapping"),
        ({"classes": "ab"}, "classes must be a sequence, got 'ab'"),
        ({"quantiles": 0.5}, "quantiles must be a sequence, got 0.5"),
    ],
)
def test_values_of_another_type_are_named(
    tmp_path: Path, values: dict[str, object], message: str
) -> None:
    described = {"kind": "regression", "num_samples": 1, **values}
    with pytest.raises(TypeError, match=message):
        ExportMetadata(**described)  # type: ignore[arg-type]
    path = write_onnx(tmp_path / "net.onnx", json.dumps({"format": 1, **described}))
    with pytest.raises(StorageError, match=message):
        read_metadata(path)


def test_values_of_numpy_and_pytorch_are_stored() -> None:
    found = ExportMetadata(
        "classification",
        np.int64(4),  # type: ignore[arg-type]
        classes=np.array(["a", "b"]),  # type: ignore[arg-type]
        thresholds={"total": torch.tensor(0.5), "epistemic": np.float32(0.25)},  # type: ignore[dict-item]
    )
    assert ExportMetadata.from_json(found.to_json()) == found
    assert found.thresholds == {"total": 0.5, "epistemic": 0.25}
    assert found.classes == ("a", "b")
    numbered = ExportMetadata("classification", 4, classes=torch.tensor([0, 1]))  # type: ignore[arg-type]
    assert numbered.classes == ("0", "1")
    with pytest.raises(TypeError, match="input must hold values of JSON"):
        ExportMetadata("classification", 4, input={"mean": np.float32(0.5)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "must have a description, as bayesify exports it of frozen networks"),
        ("{", "cannot be read"),
        ("[]", "JSON object of format 1"),
        ('{"format": 2}', "JSON object of format 1"),
        ('{"format": 1, "kind": "regression"}', "other entries"),
        ('{"format": 1, "kind": "regression", "num_samples": "x"}', "cannot be read"),
    ],
)
def test_a_damaged_description_is_an_error(tmp_path: Path, text: str | None, message: str) -> None:
    path = write_onnx(tmp_path / "net.onnx", text)
    with pytest.raises(StorageError, match=message):
        read_metadata(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_altered_archive_is_an_error(tmp_path: Path, method: int) -> None:
    path, errors = tmp_path / "net.pt2", 0
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("net/extra/bayesify", ExportMetadata("regression", 8).to_json())
    whole = path.read_bytes()
    for place in range(len(whole)):  # one bit of each byte
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 8]) + whole[place + 1 :])
        try:  # some bits, such as those of the time, change nothing
            read_metadata(path)
        except StorageError:
            errors += 1
    assert errors > len(whole) // 2


def test_other_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is no file"):
        read_metadata(tmp_path / "net.onnx")
    for name in ("net.onnx", "net.pt2"):
        (tmp_path / name).write_bytes(b"\x07nothing of the kind")
        with pytest.raises(StorageError, match="not a whole"):
            read_metadata(tmp_path / name)


def test_a_description_of_any_length_is_not_read(tmp_path: Path) -> None:
    """A small archive may hold much."""
    with zipfile.ZipFile(tmp_path / "net.pt2", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("net/extra/bayesify", b" " * (64 * 2**20 + 1))
    assert (tmp_path / "net.pt2").stat().st_size < 100_000
    with pytest.raises(StorageError, match="is too long, 67,108,865 bytes"):
        read_metadata(tmp_path / "net.pt2")
