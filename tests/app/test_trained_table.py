"""``bayesify.open_run``: the predictions of the command line, as a data frame."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from tests.app.cli.test_cli import bayesify, quick_runs
from tests.app.cli.test_errors import check_refused
from tests.app.cli.test_tables import QUICK, TABLES, trained

import bayesify as bf
from bayesify.app.runs import Run, RunError
from bayesify.app.runs.measure import in_units
from bayesify.io import StorageError
from bayesify.module.pruning import prune
from bayesify.tabular.files import TableError
from bayesify.tabular.new_table import NewTable


@pytest.fixture(scope="module", params=TABLES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("opened")
    trained(place, TABLES[request.param])
    with quick_runs():
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


def test_an_identifier_with_the_name_of_an_output_leaves_numbers(tmp_path: Path) -> None:
    x = np.linspace(-1.0, 1.0, 60)
    rows = pd.DataFrame({"total": range(1, 61), "x": x, "std": [f"key {i}" for i in range(60)]})
    rows["std (input)"] = [f"other {i}" for i in range(60)]
    rows["y"] = np.sin(3.0 * x)
    rows.to_csv(tmp_path / "t.csv", index=False)
    with quick_runs():
        out = ("--out", tmp_path / "run", *QUICK)
        assert bayesify("train", tmp_path / "t.csv", "--target", "y", *out).code == 0
    found = bf.open_run(tmp_path / "run").predict(rows)
    assert found.columns.is_unique
    assert found["std (input)"].tolist() == rows["std (input)"].tolist()
    assert found["std (input) (input)"].tolist() == rows["std"].tolist()
    assert {str(found[name].dtype) for name in ("mean", "std", "total")} == {"float64"}


def test_a_polars_frame_is_read_as_that_of_pandas(place: Path) -> None:
    run = bf.open_run(place / "run")
    found = run.predict(pl.read_csv(place / "table.csv"))
    pd.testing.assert_frame_equal(found, run.predict(place / "table.csv"))


def test_options_and_errors(place: Path) -> None:
    run = bf.open_run(place / "run")
    frame = pd.read_csv(place / "table.csv")
    with pytest.raises(RunError, match="samples must be at least 1"):
        run.predict(frame, num_samples=0)
    if run.run.class_names:
        with pytest.raises(RunError, match=r"level would do nothing here.*; leave it out$"):
            run.predict(frame, level=0.5)
    else:
        assert "lower_50" in run.predict(frame, level=0.5).columns
        assert "lower_99.99999" in run.predict(frame, level=0.9999999).columns
        assert "upper_7" in run.predict(frame, level=0.07).columns
    frame["size"] = "much"
    with pytest.raises(TableError, match="the column 'size' must hold numbers with a decimal"):
        run.predict(frame)
    with pytest.warns(UserWarning, match="--lenient reads on"):
        assert run.predict(frame, lenient=True)["outside_training"].all()
    with pytest.raises(TableError, match="lacks the column 'city'"):
        run.predict(frame.drop(columns="city"))


def test_a_pruned_network_predicts(place: Path, tmp_path: Path) -> None:
    """As the command line does and the library itself, with or without the run's checkpoint."""
    small, out = tmp_path / "small.safetensors", tmp_path / "p.csv"
    assert bayesify("prune", place / "run", "--fractions", "0.5", "--out", small).code == 0
    table = place / "table.csv"
    found = bf.open_run(place / "run", pruned=small).predict(table)
    command = ("predict", place / "run", table, "--out", out, "--pruned", small)
    said = bayesify(*command)
    assert said.code == 0, said.err
    written = pd.read_csv(out, keep_default_na=False)
    run = Run.open(place / "run")
    expected = prune(run.load_module(), 0.5)
    assert run.table is not None
    (rows,) = NewTable.open(table, run.table)
    p = in_units(expected.predict(rows.inputs, 3), run.table.target.shift, run.table.target.scale)
    name = "mean" if not run.class_names else f"p({run.class_names[0]})"
    mean = p.mean[:, 0]
    for answers in (found, written):
        np.testing.assert_allclose(answers[name].astype(float), mean, rtol=1e-5)
    whole = bf.open_run(place / "run").predict(table)
    assert not np.allclose(found[name], whole[name], rtol=1e-5)

    alone = Path(shutil.copytree(place / "run", tmp_path / "run"))
    (alone / "checkpoint.safetensors").unlink()
    pd.testing.assert_frame_equal(bf.open_run(alone, pruned=small).predict(table), found)
    with pytest.raises(RunError, match=r"is finished, but its .* predict with --pruned FILE"):
        bf.open_run(alone)


def test_a_file_that_is_not_the_pruned_network_of_the_run(place: Path, tmp_path: Path) -> None:
    run, small = place / "run", tmp_path / "small.safetensors"
    with pytest.raises(StorageError, match="there is no file"):
        bf.open_run(run, pruned=small)
    bnn = Run.open(run).load_module()
    bf.save(bnn, small)
    with pytest.raises(RunError, match="must hold a pruned network, got one with all its weights"):
        bf.open_run(run, pruned=small)
    with torch.no_grad():
        bnn.posterior.mean.mul_(2.0)
    bf.save(prune(bnn, 0.5), small)
    said = bayesify("predict", run, place / "table.csv", "--out", tmp_path / "p", "--pruned", small)
    check_refused(said, "must hold weights of the run", "got others; write it with bayesify prune")
    assert not (tmp_path / "p").exists()


def test_what_is_no_table(place: Path) -> None:
    run = bf.open_run(place / "run")
    frame = pd.read_csv(place / "table.csv")
    for wrong in (frame["size"], frame.iloc[0], frame.to_numpy(), {"size": [1.0]}, None):
        message = f"must be a pandas DataFrame or the path of a file, got {type(wrong).__name__};"
        with pytest.raises(TypeError, match=message):
            run.predict(wrong)  # type: ignore[arg-type]
    assert len(run.predict(frame.iloc[0].to_frame().T)) == 1
    for empty in (frame.iloc[:0], pd.DataFrame()):
        with pytest.raises(TableError, match="the data frame has no rows; give it one at least"):
            run.predict(empty)
    twice = pd.concat([frame, frame[["size"]]], axis=1)
    with pytest.raises(TableError, match="has the column name 'size' more than once"):
        run.predict(twice)
    with pytest.raises(TableError, match=r"the column 'size' must hold numbers .* like '1000"):
        run.predict(frame.assign(size=10**400))
    with pytest.warns(UserWarning, match="did not have are ignored: 'new'"):
        more = run.predict(frame.assign(new=1))
    pd.testing.assert_frame_equal(more, run.predict(frame))


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
