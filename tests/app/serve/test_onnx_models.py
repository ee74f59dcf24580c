"""Exported files: they are answered as their run, and wrong files are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from fastapi.testclient import TestClient
from onnx import TensorProto, helper
from tests.app.cli.test_cli import bayesify
from tests.app.cli.test_errors import check_refused

import bayesify as bf
from bayesify.app.runs import Run
from bayesify.app.serve.limits import ServiceLimits
from bayesify.app.serve.onnx_model import OnnxModel
from bayesify.app.serve.requests import Examples, InputError
from bayesify.app.serve.run_model import RunModel
from bayesify.app.serve.service import make_app
from bayesify.export import ExportMetadata, export_onnx, read_metadata
from bayesify.io.files import StorageError
from bayesify.tabular.columns import CategoryColumn, NumberColumn


@pytest.fixture(scope="module")
def digits(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "digits.onnx"
    said = bayesify("export", runs["digits"], "--out", out, "--samples", "16")
    assert said.code == 0, said.err
    return out


@pytest.mark.slow
def test_a_file_of_images_is_answered_as_its_run(digits: Path, runs: dict[str, Path]) -> None:
    run = Run.open(runs["digits"])
    own = RunModel(run, run.load_module(), num_samples=16, level=0.95, coverage=0.95)
    exported = OnnxModel(digits)
    images = (126.0 * run.load_data().test_inputs[:20]).round().reshape(-1, 28, 28).tolist()

    def difference(first: list[Any], second: list[Any]) -> float:
        answers = own.predict(own.read(Examples(first)))
        others = exported.predict(exported.read(Examples(second)))
        parts = [
            [[*each["probabilities"].values(), each["total"], each["epistemic"]] for each in some]
            for some in (answers, others)
        ]
        return float(np.abs(np.subtract(*parts)).max())

    assert difference(images, images) < 1e-4
    assert difference(images, images[::-1]) > 1e-2
    assert exported.card.threshold == pytest.approx(own.card.threshold, rel=1e-3)
    assert exported.card.num_samples == 16
    with TestClient(make_app(exported, ServiceLimits())) as client:
        answer = client.post("/predict", json={"examples": images[:1]}).json()["answers"][0]
    assert answer["votes"] is None
    assert answer["outside"] is None
    with pytest.raises(InputError, match="28 x 28 pixels"):
        exported.read(Examples([[1]]))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A graph whose mean is the column x, and which calls a row outside in its category's text."""
    columns = [
        {"input": "x", **NumberColumn(name="x", missing=True).to_json()},
        {"input": "city", **CategoryColumn(name="city", levels=("Rome", "Oslo"), kept=2).to_json()},
    ]
    metadata = ExportMetadata(
        "regression",
        8,
        input={"kind": "table", "target": "price", "columns": columns},
        thresholds={"total": 4.0},
        quantiles=(0.05, 0.5, 0.95),
    )
    nodes = [
        helper.make_node("Identity", ["x"], ["mean"]),
        helper.make_node("Abs", ["x"], ["std"]),
        helper.make_node("Abs", ["x"], ["epistemic"]),
        helper.make_node("Constant", [], ["one"], value_ints=[1]),
        helper.make_node("Unsqueeze", ["x", "one"], ["wide"]),
        helper.make_node("Constant", [], ["two"], value=_doubles([-2.0, 0.0, 2.0])),
        helper.make_node("Add", ["wide", "two"], ["quantiles"]),
        helper.make_node("Identity", ["city"], ["outside_column"]),
    ]
    number, text = TensorProto.DOUBLE, TensorProto.STRING
    graph = helper.make_graph(
        nodes,
        "table",
        [
            helper.make_tensor_value_info("x", number, ["batch"]),
            helper.make_tensor_value_info("city", text, ["batch"]),
        ],
        [
            *(
                helper.make_tensor_value_info(name, number, ["batch"])
                for name in ("mean", "std", "epistemic")
            ),
            helper.make_tensor_value_info("quantiles", number, ["batch", 3]),
            helper.make_tensor_value_info("outside_column", text, ["batch"]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    helper.set_model_props(model, {"bayesify": metadata.to_json()})
    path = tmp_path / "table.onnx"
    onnx.save(model, path)
    return path


def test_a_description_that_lacks_an_entry_is_refused(tmp_path: Path) -> None:
    bnn = bf.BayesianModule(torch.nn.Linear(4, 2), seed=0)
    shape = {"kind": "image", "image_shape": [1, 2, 2], "shape": [4]}
    metadata = ExportMetadata(
        "classification", 8, classes=("a", "b"), input={**shape, "shift": [0.0], "scale": [255.0]}
    )
    path = tmp_path / "net.onnx"
    export_onnx(bf.freeze(bnn, 8), path, torch.zeros(2, 4), metadata=metadata)
    with pytest.raises(StorageError, match=r"shift, scale, but pixels is missing; write it"):
        OnnxModel(path)


IMAGE = {
    "kind": "image",
    "image_shape": [1, 2, 2],
    "shape": [4],
    "pixels": [0, 255],
    "shift": [0.0],
    "scale": [255.0],
}


def exported(path: Path, metadata: dict[str, Any], **options: Any) -> Path:
    """A small network's file with this description."""
    likelihood = bf.GaussianLikelihood(1.0) if metadata["kind"] == "regression" else None
    bnn = bf.BayesianModule(torch.nn.Linear(4, 2 - bool(likelihood)), likelihood=likelihood)
    frozen = bf.freeze(bnn, 4, **options)
    given = ExportMetadata(num_samples=4, quantiles=frozen.quantiles, **metadata)
    export_onnx(frozen, path, torch.zeros(2, 4), metadata=given)
    return path


def described_as(file: Path, path: Path, **changes: Any) -> Path:
    """A copy of a file whose description differs."""
    model, about = onnx.load(file), dataclasses.replace(read_metadata(file), **changes)
    del model.metadata_props[:]
    helper.set_model_props(model, {"bayesify": about.to_json()})
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of two classes that is served."""
    described = {"kind": "classification", "classes": ("a", "b"), "input": IMAGE}
    path = exported(tmp_path_factory.mktemp("classes") / "right.onnx", described)
    OnnxModel(path)
    return path


@pytest.mark.parametrize(
    "change",
    [
        {"classes": ()},
        {"classes": ("a", "b", "c")},
        {"input": {**IMAGE, "shape": [5]}},
        {"input": {**IMAGE, "image_shape": [1, 2]}},
        {"input": {**IMAGE, "pixels": 5}},
    ],
    ids=str,
)
def test_a_file_that_could_answer_nothing_is_refused(
    change: dict[str, Any], classes: Path, tmp_path: Path
) -> None:
    path = described_as(classes, tmp_path / "net.onnx", **change)
    with pytest.raises(StorageError, match="cannot be served, as its description is not that"):
        OnnxModel(path)


def test_the_interval_is_equal_tailed_whatever_the_order_of_the_levels(tmp_path: Path) -> None:
    described = {"kind": "regression", "input": IMAGE}
    path = exported(tmp_path / "net.onnx", described, quantiles=(0.5, 0.95, 0.05))
    model = OnnxModel(path)
    [answer] = model.predict(model.read(Examples([[[0, 255], [9, 3]]])))
    assert answer["lower"] < answer["prediction"] < answer["upper"]
    assert model.card.level == pytest.approx(0.9)
    for levels in ((0.1, 0.5), (0.5,)):
        other = described_as(path, tmp_path / "other.onnx", quantiles=levels)
        with pytest.raises(StorageError, match="for an equal-tailed interval, got"):
            OnnxModel(other)


def _doubles(values: list[float]) -> onnx.TensorProto:
    return helper.make_tensor("two", TensorProto.DOUBLE, [len(values)], values)


def test_a_file_of_a_table_gets_raw_columns(table: Path) -> None:
    rows = [{"x": 1.5, "city": "Oslo"}, {"x": "3", "city": "Bonn"}, {"x": -1, "city": None}]
    with TestClient(make_app(OnnxModel(table), ServiceLimits())) as client:
        response = client.post("/predict", json={"examples": rows})
        assert response.status_code == 200, response.text
        wrong = client.post("/predict", json={"examples": [{"x": "a", "city": None}]})
        missing = client.post("/predict", json={"examples": [{"x": None, "city": "Rome"}]})
    answers = response.json()["answers"]
    assert [each["prediction"] for each in answers] == [1.5, 3.0, -1.0]
    assert [(each["lower"], each["upper"]) for each in answers] == [(-0.5, 3.5), (1, 5), (-3, 1)]
    assert [each["outside"] for each in answers] == ["Oslo", "not Rome", ""]
    assert [each["abstain"] for each in answers] == [False, True, False]
    assert response.json()["level"] == pytest.approx(0.9)
    assert wrong.json()["detail"] == (
        "examples[0].x: must be a number or null, or a text in the form of training: numbers with "
        'a decimal point, got "a"'
    )
    # This graph makes NaN of a missing value, which is no answer.
    assert missing.status_code == 422
    assert "a prediction must be finite" in missing.json()["detail"]


def test_rows_of_a_file_may_have_unused_columns(table: Path) -> None:
    row = {"x": 1.5, "city": "Oslo", "price": 3}
    old = OnnxModel(table)  # as of earlier versions
    assert old.card.unused_columns == ["price"]
    usual = old.predict(old.read(Examples([row])))
    with pytest.raises(InputError, match=r"\[0\]\.id: the training table had no such column"):
        old.read(Examples([{**row, "id": 7}]))
    unused = {**read_metadata(table).input, "unused": ["const", "id"]}
    described_as(table, table, input=unused)
    new = OnnxModel(table)
    assert new.card.unused_columns == ["const", "id", "price"]
    assert new.predict(new.read(Examples([{**row, "id": 7}]))) == usual
    with pytest.raises(InputError, match="no such column"):
        new.read(Examples([{**row, "other": 7}]))


def test_other_files_are_refused(tmp_path: Path, table: Path) -> None:
    for name, content in {"a.onnx": b"no network", "b.onnx": b""}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(StorageError):
            OnnxModel(tmp_path / name)
        check_refused(bayesify("serve", tmp_path / name, "--port", "0"), name)
    model = onnx.load(table)
    other = ExportMetadata("classification", 8, classes=("a", "b"), input={"kind": "sound"})
    del model.metadata_props[:]
    helper.set_model_props(model, {"bayesify": other.to_json()})
    onnx.save(model, tmp_path / "c.onnx")
    check_refused(bayesify("serve", tmp_path / "c.onnx", "--port", "0"), "as images or as a table")
    check_refused(bayesify("serve", tmp_path / "none.onnx", "--port", "0"), "there is no file")
    said = bayesify("serve", table, "--port", "0", "--samples", "3")
    check_refused(said, "samples is for a run; an ONNX file has its own")
