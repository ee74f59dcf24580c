"""The description of an exported network."""

from __future__ import annotations

import zipfile
from pathlib import Path

import onnx
import pytest

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
    ("text", "message"),
    [
        (None, "not a network that bayesify exported"),
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
