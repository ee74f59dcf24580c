"""``bayesify.open_run``: the predictions of the command line, as a data frame."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tests.app.cli.test_cli import bayesify, quick_runs
from tests.app.cli.test_tables import QUICK, TABLES

import bayesify as bf
from bayesify.app.runs import RunError
from bayesify.tabular.files import TableError


@pytest.fixture(scope="module", params=TABLES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("opened")
    (place / "table.csv").write_text(TABLES[request.param])
    with quick_runs():
        out = ("--out", place / "run")
        assert bayesify("train", place / "table.csv", "--target", "price", *out, *QUICK).code == 0
        said = bayesify("predict", place / "run", place / "table.csv", "--out", place / "p.csv")
        assert said.code == 0, said.err
    return place


def test_it_predicts_what_the_command_line_writes(place: Path) -> None:
    run = bf.open_run(place / "run")
    written = pd.read_csv(place / "p.csv", keep_default_na=False)
    found = run.predict(place / "table.csv")
    assert list(found.columns) == list(written.columns)
    frame = pd.read_csv(place / "table.csv", parse_dates=["when"])
    frame.index = pd.Index([f"row {i}" for i in range(len(frame))])
    frame["sold"] = frame["sold"] == "yes"
    with pytest.warns(UserWarning, match="sold: 'false' as 'no', 'true' as 'yes'"):
        of_frame = run.predict(frame)
    assert list(of_frame.index) == list(frame.index)
    for name in written.columns:
        kind = written[name].dtype
        if kind.kind in "if":
            np.testing.assert_allclose(found[name].astype(float), written[name])
            np.testing.assert_allclose(of_frame[name].astype(float), written[name])
        else:
            assert found[name].tolist() == written[name].tolist()
    assert found["outside_training"].dtype == bool


def test_options_and_errors(place: Path) -> None:
    run = bf.open_run(place / "run")
    frame = pd.read_csv(place / "table.csv")
    with pytest.raises(RunError, match="samples must be at least 1"):
        run.predict(frame, samples=0)
    frame["size"] = "much"
    with pytest.raises(TableError, match="the column 'size' must hold numbers with a decimal"):
        run.predict(frame)
    with pytest.warns(UserWarning, match="--lenient reads on"):
        assert run.predict(frame, lenient=True)["outside_training"].all()
    with pytest.raises(TableError, match="lacks the column 'city'"):
        run.predict(frame.drop(columns="city"))


def test_a_frame_of_mixed_types(place: Path) -> None:
    frame = pd.read_csv(place / "table.csv")
    frame["size"] = [float(x) if i % 2 else x for i, x in enumerate(frame["size"].astype(object))]
    frame.loc[0, "city"] = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = bf.open_run(place / "run").predict(frame)
    assert found["outside_column"].tolist()[0] == "city"


def test_a_run_of_images_is_no_table(tmp_path: Path) -> None:
    tiny = ["--hidden", "2", "--epochs", "1", "--limit", "20", "--test-samples", "1"]
    with quick_runs():
        assert bayesify("train", "mnist", "--out", tmp_path / "run", *tiny).code == 0
    with pytest.raises(RunError, match="must hold a run of a table, got one of images"):
        bf.open_run(tmp_path / "run")


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tables.md").read_text(encoding="utf-8")
    make, use = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(make, {})
    with quick_runs():
        said = bayesify(
            "train", "diabetes.csv", "--target", "target", "--out", "runs/diabetes", *QUICK
        )
    assert said.code == 0, said.err
    names: dict[str, pd.DataFrame] = {}
    exec(use, names)
    assert names["found"]["outside_training"].tolist() == [True] + [False] * 21
