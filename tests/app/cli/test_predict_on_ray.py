"""``bayesify predict --on ray``: a file of predictions for each file of a table."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import pytest
from tests.app.cli.test_cli import as_json, bayesify, quick_runs
from tests.app.cli.test_errors import check_refused
from tests.ray_cluster import two_nodes
from tests.tabular.test_streaming import frame

pytestmark = [
    # JAX, which other tests may have loaded: Ray begins its processes as forks of this one.
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),
    # Of Ray Data's own, when it is imported.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data"),
]
QUICK = ["--epochs", "2", "--hidden", "4", "--test-samples", "3"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run ``run``, and new rows in the files of ``new``."""
    found = tmp_path_factory.mktemp("many")
    frame(300).to_csv(found / "old.csv", index=False)
    (found / "new").mkdir()
    whole = frame(200).drop(columns="y")
    for part in range(4):
        some = whole[50 * part : 50 * part + 40 + part]
        if part % 2:
            some.to_parquet(found / "new" / f"{part}.parquet")
        else:
            some.to_csv(found / "new" / f"{part}.csv", index=False)
    with quick_runs():
        said = bayesify("train", found / "old.csv", "--target", "y", "--out", found / "run", *QUICK)
    assert said.code == 0, said.err
    return found


@pytest.mark.slow
def test_each_file_is_predicted_as_it_is_alone(place: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    shutil.copytree(place / "new", new)
    with two_nodes() as cluster:
        on = ["--on", f"ray={cluster.address}"]
        given = ["predict", place / "run", new, "--out", tmp_path / "out"]
        said = bayesify(*given, *on)
        assert said.code == 0, said.err
        lines = said.err.splitlines()
        assert lines[:2] == ["4 files, 0 predicted already", "on Ray: 2 nodes, 2 CPUs"]
        assert "166 rows of 4 files predicted" in lines
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert names == {"0.csv", "1.parquet", "2.csv", "3.parquet", "settings.json"}
        for name in names - {"settings.json"}:
            alone = tmp_path / name
            as_json("predict", place / "run", new / name, "--out", alone)
            assert (tmp_path / "out" / name).read_bytes() == alone.read_bytes()
        # A file that was changed, or is not there, is predicted again; the others are not.
        (tmp_path / "out" / "0.csv").unlink()
        os.utime(new / "1.parquet", (1e9, 1e9))  # by an older file
        assert bayesify(*given, *on).err.startswith("4 files, 2 predicted already")
        assert as_json(*given, *on)["predicted_before"] == 4
        assert "nothing is left to predict" in bayesify(*given, *on).err
        # Interrupted with other settings, it leaves no file of the former ones.
        words = [*given, *on, "--force", "--level", "0.5"]
        with mock.patch("ray.data.from_items", side_effect=KeyboardInterrupt):
            assert bayesify(*words).code == 130
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["settings.json"]
        assert bayesify(*words[:-3], *words[-2:]).code == 0
        # One file predicted with others: the rest do not count for those.
        other = ["--level", "0.6"]
        assert bayesify(*given[:2], new / "0.csv", *given[3:], *on, *other, "--force").code == 0
        assert bayesify(*given, *on, *other).err.startswith("4 files, 1 predicted already")
        assert bayesify(*given, *on, "--force").code == 0
        # A file that cannot be read does not stop the others, and is named in one line.
        (new / "00.csv").write_text("a,b\n1,2\n")
        shutil.copy(new / "0.csv", new / "4.csv")
        refused = bayesify(*given, *on)
        assert refused.code == 2
        assert "00.csv" in refused.err.splitlines()[-1]
        assert refused.err.splitlines()[-1].endswith("; the other files are predicted")
        assert (tmp_path / "out" / "4.csv").exists()
        assert not [path for path in (tmp_path / "out").iterdir() if path.suffix == ".tmp"]


@pytest.mark.slow
def test_a_file_that_kills_its_workers_is_given_up(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict_files = pytest.importorskip("bayesify.app.on_ray.predict_files")
    predicted = predict_files._predict

    def dying(item: Any, **given: Any) -> Any:
        if item["source"].endswith("0.csv"):
            with mock.patch("bayesify.app.on_ray.predict_files.write_table", killed):
                return predicted(item, **given)
        return predicted(item, **given)

    def killed(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(predict_files, "_predict", dying)
    with two_nodes() as cluster:
        given = ["predict", place / "run", place / "new", "--out", tmp_path / "out"]
        said = bayesify(*given, "--on", f"ray={cluster.address}")
    assert said.code == 2
    assert "0.csv: the worker died in each of 6 attempts" in said.err.splitlines()[-1]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "1.parquet",
        "2.csv",
        "3.parquet",
        "settings.json",
    ]


def test_what_is_there_is_of_the_same_settings(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    out = tmp_path / "out"
    out.mkdir()
    (out / "settings.json").write_text(json.dumps({"network": "another"}))
    given = ["predict", place / "run", place / "new", "--out", out, "--on", "ray"]
    check_refused(bayesify(*given), "holds something else than predictions of this network")
    (out / "settings.json").write_text("{")
    check_refused(bayesify(*given), "holds something else than predictions of this network")
    given[2] = tmp_path / "none.csv"
    check_refused(bayesify(*given), f"there is no file {tmp_path / 'none.csv'}")


def test_what_it_cannot_do_is_refused(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    out = tmp_path / "out"
    given = ["predict", place / "run", place / "new", "--out", out, "--on"]
    check_refused(bayesify(*given, "dask"), "on must be ray or ray=ADDRESS, got 'dask'")
    check_refused(bayesify(*given, "ray", "--conformal"), "conformal and max-memory cannot be")
    check_refused(bayesify(*given, "ray", "--max-memory", "2GB"), "leave them out")
    twice = tmp_path / "twice"
    twice.mkdir()
    for name in ("a.csv", "a.tsv"):
        pd.DataFrame({"x": [1]}).to_csv(twice / name)
    given[2] = twice
    check_refused(bayesify(*given, "ray"), "a name of its own", "two give a.csv")
    given[2] = place / "new" / "*.csv"
    given[4] = place / "new"
    check_refused(bayesify(*given, "ray"), "holds the files to predict")
    assert not out.exists()
    assert sorted(path.name for path in (place / "new").iterdir()) == [
        "0.csv",
        "1.parquet",
        "2.csv",
        "3.parquet",
    ]
