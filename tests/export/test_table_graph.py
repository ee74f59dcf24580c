"""A table's run as one ONNX graph: from raw columns to the predictions of ``bayesify predict``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import torch
from tests.export.table_cases import TARGETS, Case, case, close, expected

from bayesify.export import (
    ExportError,
    ExportReport,
    export_table,
    onnx_session,
    read_metadata,
    table_columns,
    table_graph,
)
from bayesify.export.onnx import encoded
from bayesify.export.table_columns import raw_columns
from bayesify.export.table_graph import _texts
from bayesify.tabular.columns import TextColumn, UnusedColumn, column_from_json

SAMPLES = 10
#: Raw cells of each column, and the texts that ``bayesify train`` and ``predict`` read alike.
CITIES = ["Rome", "São Paulo", "", "Oslo", "Ulm", "n/a", " NULL", "rome"]
SOLD = ["yes", "NO", "Yes ", "no", "?", "perhaps", "no", "yes"]
SIZES = ["0.5", "", "-1.25", "900", "NA", "0", "1.5", "0.1"]
INCOMES = ["20", "1", "1e9", "0.001", "55.5", "", "400", "7"]
DATES = ["2021-03-04", "2020-12-24", "", "2190-01-01", "2021-06-30", "2022-01-05"] + 2 * [
    "2020-02-29"
]


def cells(text: str) -> float:
    return float(text) if text not in ("", "NA") else np.nan


def days(text: str) -> float:
    return np.datetime64(text, "D").astype(float) if text else np.nan


class Exported(NamedTuple):
    """A network, its file, and the part of it that PyTorch's exporter made, which takes seconds."""

    case: Case
    report: ExportReport
    traced: bytes


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("classes")
    found, parts = case("classes", folder), []

    def kept(*args: Any) -> bytes:
        parts.append(encoded(*args))
        return parts[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_graph, "encoded", kept)
        report = export_table(*found, folder / "net.onnx", num_samples=SAMPLES)
    return Exported(found, report, parts[0])


def check(case: Case, report: ExportReport) -> None:
    """The graph on raw cells, against the columns' own parsing of their texts."""
    raw = {
        "city": np.array(CITIES, dtype=object),
        "size": np.array([*map(cells, SIZES)]),
        "income": np.array([*map(cells, INCOMES)]),
        "sold": np.array(SOLD, dtype=object),
        "when": np.array([*map(days, DATES)]),
    }
    texts = [CITIES, SIZES, INCOMES, SOLD, DATES]
    columns = case.schema.columns
    values = np.stack(
        [c.parse(np.array(each, dtype=object)) for c, each in zip(columns, texts, strict=True)],
        axis=1,
    )
    session = onnx_session(report.path)
    assert [each.name for each in session.get_inputs()] == [column.name for column in columns]
    found = dict(zip(report.outputs, session.run(list(report.outputs), raw), strict=True))
    one = session.run(["mean"], {name: each[:1] for name, each in raw.items()})[0]
    np.testing.assert_allclose(one, found["mean"][:1], rtol=1e-5)
    p = expected(case, values, SAMPLES)
    std = p.total.sqrt().flatten()
    classes = case.schema.target.classes
    if classes:
        close(torch.from_numpy(found["mean"]), p.mean)
        assert found["prediction"].tolist() == [classes[i] for i in p.prediction]
    else:
        close(torch.from_numpy(found["mean"]), p.mean, std)
        close(torch.from_numpy(found["std"]), std)
    for name in ("total", "epistemic"):
        close(torch.from_numpy(found[name]), getattr(p, name))
    if "quantiles" in found:
        for place, level in enumerate((0.025, 0.5, 0.975)):
            close(torch.from_numpy(found["quantiles"][:, place]), p.quantile(level), std)
    far = case.schema.outside([*values.T])
    names = np.array([column.name for column in columns])
    worst = np.where((far > 0.0).any(axis=1), names[far.argmax(axis=1)], "")
    assert found["outside_column"].tolist() == worst.tolist()
    assert found["outside_training"].tolist() == [bool(name) for name in worst]
    assert {*worst.tolist()} >= {"", "city", "size"}


def test_a_graph_of_classes_reads_raw_cells(exported: Exported) -> None:
    assert exported.report.outputs == (
        "mean",
        "prediction",
        "total",
        "epistemic",
        "outside_training",
        "outside_column",
    )
    check(exported.case, exported.report)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in TARGETS if kind != "classes"])
def test_a_graph_of_every_kind_of_target(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A graph has each step of the search for a quantile as nodes of its own. With all of them it
    # takes half a minute: tests/app/cli/test_export_tables.py exports such a graph, a Gaussian one.
    monkeypatch.setattr("bayesify.export.table_network._BISECTIONS", 4)
    found = case(kind, tmp_path)
    report = export_table(*found, tmp_path / "net.onnx", num_samples=SAMPLES)
    assert ("quantiles" in report.outputs) == (kind in ("gaussian", "censored"))
    check(found, report)


def test_the_description_names_inputs_and_classes(exported: Exported) -> None:
    found, report, _ = exported
    description = read_metadata(report.path)
    assert (description.kind, description.num_samples) == ("classification", SAMPLES)
    assert description.classes == found.schema.target.classes
    assert description.input["kind"] == "table"
    inputs = description.input["columns"]
    assert tuple(each["input"] for each in inputs) == report.inputs
    assert [each["kind"] for each in inputs] == ["category", "number", "number", "flag", "date"]
    columns = [{name: v for name, v in each.items() if name != "input"} for each in inputs]
    assert tuple(map(column_from_json, columns)) == found.schema.columns
    onnx.checker.check_model(onnx.load(report.path), full_check=True)
    assert report.largest_difference < 1e-5
    assert report.path.stat().st_size == report.bytes


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "levels": (
        "value_nodes",
        lambda column, *names: table_columns.value_nodes(
            dataclasses.replace(column, levels=column.levels[::-1])
            if column.kind == "category"
            else column,
            *names,
        ),
    ),
    "texts": ("_texts", lambda name, texts: _texts(name, texts[::-1])),
    "columns": (
        "raw_columns",
        lambda columns, names, values: raw_columns(columns, names, np.roll(values, 1, axis=0)),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_graph_is_not_written(
    fault: str, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, wrong = FAULTS[fault]
    monkeypatch.setattr(table_graph, "encoded", lambda *_: exported.traced)
    path = tmp_path / "net.onnx"
    path.write_bytes(b"of before")
    monkeypatch.setattr(table_graph, name, wrong)
    with pytest.raises(ExportError, match=r"nothing is written|labels are not"):
        export_table(*exported.case, path, num_samples=SAMPLES)
    assert path.read_bytes() == b"of before"


def test_names_of_columns_that_are_taken(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an output, by another column, and by values within the graph."""
    bnn, schema = exported.case
    names = ["mean", "total", "total (input)", "network/input", "columns/0"]
    columns = [
        dataclasses.replace(column, name=name)
        for column, name in zip(schema.columns, names, strict=True)
    ]
    other = dataclasses.replace(
        schema,
        columns=(*columns, UnusedColumn(name="shelf")),
        dropped={"const": "it is '7' in every row", "id": "it numbers the rows"},
        carried=("id", "total"),
    )
    monkeypatch.setattr(table_graph, "encoded", lambda *_: exported.traced)
    report = export_table(bnn, other, tmp_path / "net.onnx", num_samples=SAMPLES)
    assert len({*report.inputs, *report.outputs}) == 5 + len(report.outputs)
    description = read_metadata(report.path).input
    assert [each["name"] for each in description["columns"]] == names
    assert description["columns"][0]["input"] == "mean (input)"
    assert description["unused"] == ["const", "id", "shelf"]


def test_what_cannot_be_exported(exported: Exported, tmp_path: Path) -> None:
    bnn, schema = exported.case
    text = TextColumn(name="note", encoder="folder", sha256="", size=3)
    wrong = dataclasses.replace(schema, columns=(*schema.columns, text))
    with pytest.raises(ExportError, match="got texts in 'note', which a pretrained network reads"):
        export_table(bnn, wrong, tmp_path / "net.onnx")
    none = dataclasses.replace(schema, columns=(UnusedColumn(name="id"),))
    with pytest.raises(ExportError, match="must have a column that the network uses, got none"):
        export_table(bnn, none, tmp_path / "net.onnx")
    with pytest.raises(ValueError, match=r"must end in \.onnx, got net\.pt2"):
        export_table(bnn, schema, tmp_path / "net.pt2")
    with pytest.raises(ValueError, match="num_samples must be 0"):
        export_table(bnn, schema, tmp_path / "net.onnx", num_samples=-3)
    assert not any(tmp_path.iterdir())
