"""``bayesify train`` and ``predict`` on tables that are streamed, and on folders of files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyarrow import parquet
from tests.app.cli.test_cli import as_json, bayesify, quick_runs
from tests.app.cli.test_errors import check_refused
from tests.tabular.test_streaming import frame
from tests.training.test_resume import timeless

from bayesify.app.cli.epoch_table import EpochTable
from bayesify.app.runs import Run
from bayesify.tabular import files
from bayesify.tabular.streaming import cost

QUICK = ["--epochs", "2", "--passes", "1", "--hidden", "4", "--test-samples", "3"]
STREAMED = ["--max-memory", "4GB"]

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table in three files, and the run ``run`` made from it by streaming."""
    found = tmp_path_factory.mktemp("large")
    (found / "table").mkdir()
    whole = frame(1500)
    for part in range(3):
        whole[500 * part : 500 * part + 500].to_parquet(found / "table" / f"{part}.parquet")
    whole.to_parquet(found / "one.parquet")
    whole.to_csv(found / "one.csv", index=False)
    with quick_runs():
        said = bayesify(
            "train", found / "table", "--target", "y", "--out", found / "run", *QUICK, *STREAMED
        )
    assert said.code == 0, said.err
    (found / "said.txt").write_text(said.err)
    return found


def comparable(run: Path) -> Any:
    metrics = timeless(Run.open(run).metrics())
    del metrics["peak_memory_bytes"]
    return metrics


def test_the_cost_is_said_before_the_table_is_read(place: Path) -> None:
    said = (place / "said.txt").read_text().splitlines()
    assert said[0].startswith("streaming 1,500 rows x 7 columns, ")
    assert "two passes over them of about " in said[0]
    assert (
        "each, within 4.0 GB of memory (50,000 rows at once, 250,000 kept); then 4 bytes" in said[0]
    )
    assert said[1] == "table: 1,200 rows for training, 300 held out by seed 0"
    assert any(line.startswith("largest memory of the process: ") for line in said)


def test_the_folder_is_that_of_any_run(place: Path, tmp_path: Path) -> None:
    names = {path.name for path in (place / "run").iterdir()}
    assert names >= {"checkpoint.safetensors", "metrics.json", "report.html", "table.safetensors"}
    assert "table.arrow" not in names
    metrics = Run.open(place / "run").metrics()
    assert metrics["peak_memory_bytes"] > 0
    assert "--max-memory 4GB" in Run.open(place / "run").command
    # Every other command needs the folder alone.
    copy = Path(shutil.copytree(place / "run", tmp_path / "run"))
    again = as_json("evaluate", copy)
    assert again["test"] == pytest.approx(metrics["test"], rel=1e-6)
    assert as_json("prune", copy, "--fractions", "0.5")["rows"]
    assert as_json("report", copy)["report"]


def test_a_streamed_run_resumes_within_an_epoch(place: Path, tmp_path: Path) -> None:
    options = ["--target", "y", *QUICK, *STREAMED, "--batch-size", "100"]
    start = ["train", place / "table", *options, "--out", tmp_path / "run"]
    whole = bayesify("train", place / "table", *options, "--out", tmp_path / "whole")
    assert whole.code == 0, whole.err

    def stop(self: EpochTable, *, epoch: int, batch: int) -> None:
        if (epoch, batch) == (1, 4):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EpochTable, "on_step", stop)
        assert bayesify(*start).code == 130
    assert (tmp_path / "run" / "table.arrow").exists()
    (tmp_path / "run" / "table.arrow").unlink()  # it is written again
    said = bayesify(*start, "--resume")
    assert said.code == 0, said.err
    assert comparable(tmp_path / "run") == comparable(tmp_path / "whole")


@pytest.mark.parametrize("place_of_stop", ["cli.prepare_run.store_table", "runs.folder.versions"])
def test_a_run_stopped_while_its_folder_is_made_begins_anew(
    place: Path, tmp_path: Path, place_of_stop: str
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    start = ["train", place / "table", "--target", "y", *QUICK, *STREAMED, "--out"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"bayesify.app.{place_of_stop}", stop)
        assert bayesify(*start, tmp_path / "run").code == 130
    assert not list(tmp_path.rglob("table.*"))
    (tmp_path / "run").mkdir(exist_ok=True)  # and as if it had been killed
    for name in ("table.json", ".lock", ".table.safetensors.1-2.tmp", ".config.json.1-2.tmp"):
        (tmp_path / "run" / name).write_text("{")
    said = bayesify(*start, tmp_path / "run", "--resume")
    assert said.code == 0, said.err
    assert comparable(tmp_path / "run") == comparable(place / "run")
    for number, names in enumerate((["table.json"], [".lock", "table.json", "notes.txt"])):
        (tmp_path / f"own{number}").mkdir()
        for name in names:
            (tmp_path / f"own{number}" / name).write_text("{}")
        check_refused(bayesify(*start, tmp_path / f"own{number}"), f"own{number} holds other files")


@pytest.mark.parametrize("target", ["y", "city"])
def test_streamed_and_in_memory_predict_alike(place: Path, tmp_path: Path, target: str) -> None:
    found = {}
    epochs = "60" if target == "y" else "20"  # so that both have converged
    settings = ["--epochs", epochs, "--hidden", "8", "--batch-size", "128", "--passes", "1"]
    for name, more in (("memory", []), ("streamed", STREAMED)):
        run = tmp_path / name
        said = bayesify(
            "train", place / "one.parquet", "--target", target, "--out", run, *settings, *more
        )
        assert said.code == 0, said.err
        found[name] = as_json("evaluate", run, place / "one.csv")["metrics"]
    for measure in ("nll", "crps" if target == "y" else "brier"):
        assert found["streamed"][measure] == pytest.approx(found["memory"][measure], abs=0.06)


@pytest.mark.parametrize("source", ["one.parquet", "one.csv", "table", "table/*.parquet"])
def test_predictions_are_the_same_bytes_whatever_the_files(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    out = tmp_path / "some.csv"
    found = as_json("predict", place / "run", place / source, "--out", out, *STREAMED)
    assert found["rows"] == found["rows_measured"] == 1500
    assert found["peak_memory_bytes"] > 0
    assert as_json("predict", place / "run", place / "one.csv", "--out", tmp_path / "all.csv")
    assert out.read_bytes() == (tmp_path / "all.csv").read_bytes()


def test_predictions_as_parquet_are_those_of_the_csv(place: Path, tmp_path: Path) -> None:
    for name in ("p.csv", "p.parquet"):
        as_json("predict", place / "run", place / "table", "--out", tmp_path / name)
    text, table = pd.read_csv(tmp_path / "p.csv"), parquet.read_table(tmp_path / "p.parquet")
    typed = table.to_pandas()
    assert list(typed) == list(text)
    assert typed["outside_training"].dtype == bool
    assert typed["id"].tolist() == [str(value) for value in text["id"]]
    for name in ("row", "mean", "std", "lower_95", "total"):
        assert typed[name].tolist() == pytest.approx(text[name].tolist(), rel=1e-9)


def test_a_failure_leaves_no_file(place: Path, tmp_path: Path) -> None:
    bad = frame(50)
    bad.loc[49, "y"] = 1e200
    bad.to_parquet(tmp_path / "bad.parquet")
    for out in ("p.csv", "p.parquet"):
        said = bayesify("predict", place / "run", tmp_path / "bad.parquet", "--out", tmp_path / out)
        check_refused(said, "must be at most 1e+150 in size, got 1e+200 in row 50")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.parquet"]


def test_bad_input_gets_one_line(place: Path, tmp_path: Path) -> None:
    train = ["train", place / "one.parquet", "--target", "y", "--out", tmp_path / "run"]
    predict = ["predict", place / "run", place / "table", "--out"]
    out = [*predict, tmp_path / "p.csv"]
    bytes_wanted = "max-memory must be a number of bytes such as 2GB"
    check_refused(bayesify(*train, "--max-memory", "much"), bytes_wanted, "got much")
    check_refused(bayesify(*out, "--max-memory", "much"), bytes_wanted, "got 'much'")
    check_refused(
        bayesify(*train, "--max-memory", "1MB"), "max-memory must be at least", "got 1 MB"
    )
    check_refused(bayesify(*out, "--max-memory", "1MB"), "max-memory must be at least", "got 1 MB")
    check_refused(bayesify(*train, *STREAMED, "--tune", "90s"), "tune needs the table in memory")
    texts = ["--text", "city", "--encoder", "nothing"]
    cannot = "columns of texts or images cannot be streamed: leave out --max-memory"
    check_refused(bayesify(*train, *STREAMED, *texts), cannot)
    images = ["--image", "city", "--encoder", "nothing"]
    check_refused(bayesify(*train, *STREAMED, *images), cannot)
    mnist = ["train", "mnist", "--out", tmp_path / "run", *STREAMED]
    check_refused(bayesify(*mnist), "max-memory would do nothing here: it applies only to tables")
    said = bayesify(*predict, place / "table" / "p.parquet")
    check_refused(said, "would be one of the files of the table in")
    nothing = [*predict[:2], tmp_path / "*.csv", "--out", tmp_path / "p.csv"]
    check_refused(bayesify(*nothing), "no file matches")
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_does_not_fit_is_streamed(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ["train", place / "one.parquet", "--target", "y", "--out", tmp_path / "run", *QUICK]
    # 80 % of the free memory is more than the cap needs, and less than the table does.
    monkeypatch.setattr(cost, "available_memory", lambda: 5 * 10**9)
    monkeypatch.setattr(cost, "memory_needed", lambda *_: 5 * 10**9)
    said = bayesify(*start)
    assert said.code == 0, said.err
    assert said.err.startswith("note: the table is streamed, because it does not fit")
    settings = json.loads((tmp_path / "run" / "config.json").read_text())["settings"]
    assert settings["max_memory"] == "4000000000 B"


def test_several_processes_share_the_free_memory(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "available_memory", lambda: 10 * 10**9)
    monkeypatch.setattr(cost, "memory_needed", lambda *_: 3 * 10**9)
    file = files.open_table(place / "one.parquet")
    assert cost.fitting_memory(file, processes=2) is None
    assert cost.fitting_memory(file, processes=4) == 2 * 10**9


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_the_number_of_rows_of_a_text_is_estimated(name: str, tmp_path: Path) -> None:
    frame(60_000).to_csv(tmp_path / name, index=False)
    found = cost.StreamCost.of(files.open_table(tmp_path / name))
    assert found.rows == pytest.approx(60_000, rel=0.05)
    assert not found.is_exact
