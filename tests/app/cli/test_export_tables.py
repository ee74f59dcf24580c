"""``bayesify export`` of a table: the predictions of ``bayesify predict`` from raw columns."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests.app.cli.test_cli import as_json, bayesify
from tests.app.cli.test_errors import check_refused
from tests.app.cli.test_tables import QUICK, TABLES, trained
from tests.tabular.test_training_table import messy

import bayesify as bf
from bayesify.export import onnx_session, read_metadata
from bayesify.tabular.columns import RangedColumn, column_from_json

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("exported")
    trained(place, TABLES["classification"])
    return place


@pytest.mark.slow
@pytest.mark.parametrize("task", TABLES)
def test_the_graph_predicts_as_predict_does(task: str, tmp_path: Path) -> None:
    """New rows with missing cells, an unknown city and a size far outside."""
    trained(tmp_path, TABLES[task])
    out, table = tmp_path / "net.onnx", tmp_path / "new.csv"
    report = as_json("export", tmp_path / "run", "--out", out, "--samples", "9")
    new = pd.read_csv(
        tmp_path / "table.csv" if task == "regression" else _written(table, messy(40)),
        dtype=str,
        keep_default_na=False,
    ).drop(columns="price")
    new.loc[0, "city"], new.loc[1, "size"], new.loc[2, "sold"] = "Atlantis", "1e6", ""
    new.to_csv(table, index=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = bf.open_run(tmp_path / "run").predict(table, num_samples=9, lenient=True)
    description = read_metadata(out)
    assert description.thresholds == {"total": report["threshold"]}
    raw = {}
    for entry in description.input["columns"]:
        column = column_from_json({k: v for k, v in entry.items() if k != "input"})
        cells = new[column.name].to_numpy(object)
        raw[entry["input"]] = column.parse(cells) if isinstance(column, RangedColumn) else cells
    found = dict(zip(report["outputs"], onnx_session(out).run(report["outputs"], raw), strict=True))
    for name in ("outside_training", "outside_column"):
        assert found[name].tolist() == expected[name].tolist()
    assert {*found["outside_column"]} >= {"", "city", "size"}
    pairs = {name: name for name in ("total", "epistemic")}
    if task == "classification":
        assert found["prediction"].tolist() == expected["prediction"].tolist()
        probabilities = expected[[f"p({name})" for name in description.classes]]
        np.testing.assert_allclose(found["mean"], probabilities, atol=1e-5)
    else:
        pairs |= {"mean": "mean", "std": "std"}
        found |= {"lower": found["quantiles"][:, 0], "upper": found["quantiles"][:, 2]}
        pairs |= {"lower": "lower_95", "upper": "upper_95"}
    for own, other in pairs.items():
        np.testing.assert_allclose(found[own], expected[other], rtol=1e-5, atol=1e-5)


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "net.pt2"], "must be exported to .onnx: a program of PyTorch takes no texts"),
        (["--out", "net.onnx", "--int8"], "int8 is for runs on images"),
        (["--out", "net.onnx", "--data-dir", "."], "data-dir is for mnist and fashion-mnist"),
    ],
)
def test_what_is_not_for_tables(
    place: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    out = tmp_path / options[1]
    check_refused(bayesify("export", place / "run", "--out", out, *options[2:]), message)
    assert not out.exists()


@pytest.mark.slow
def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "export-tables.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    # The search for a quantile is a part of the graph; the test above exports all of its steps.
    monkeypatch.setattr("bayesify.export.table_network._BISECTIONS", 4)
    rng = np.random.default_rng(0)
    rows = [
        f"{rng.normal(80.0, 20.0):.1f},{('Rome', 'Oslo')[i % 2]},{rng.normal()}" for i in range(50)
    ]
    Path("houses.csv").write_text("\n".join(["area,city,price", *rows]) + "\n")
    train = ["train", "houses.csv", "--target", "price", "--out", "runs/houses", *QUICK]
    assert bayesify(*train).code == 0
    names: dict[str, Any] = {}
    exec(*snippets, names)
    assert names["found"]["quantiles"].shape == (1, 3)
    assert names["found"]["outside_column"].tolist() == [""]
