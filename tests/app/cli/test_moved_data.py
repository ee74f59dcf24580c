"""Runs whose own data were moved: they are told so, and resumed from the new path."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.app.cli.test_cli import as_json, bayesify, quick_runs
from tests.app.cli.test_damage import tiny_mnist
from tests.app.cli.test_errors import check_refused
from tests.app.cli.test_folders import QUICK as QUICK_IMAGES
from tests.app.cli.test_folders import write_images
from tests.app.cli.test_tables import QUICK, TABLES

from bayesify.app.cli.epoch_table import EpochTable
from bayesify.datasets import IMAGE_DATASETS

pytestmark = pytest.mark.usefixtures("quick")

STREAMED = ["--max-memory", "4GB"]


def train(source: Path, out: Path, *options: str) -> None:
    if source.suffix == ".csv":
        source.write_text(TABLES["regression"])
        options = ("--target", "price", *QUICK, *options)
    else:
        write_images(source)
        options = (*QUICK_IMAGES, *options)
    with quick_runs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(EpochTable, "on_epoch", stop)
        said = bayesify("train", source, "--out", out, *options)
    assert said.code == 130, said.err


def stop(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["table", "streamed", "images"])
def test_it_is_resumed_from_the_new_path(kind: str, tmp_path: Path) -> None:
    run, name = tmp_path / "run", "photos" if kind == "images" else "table.csv"
    old, new = tmp_path / name, tmp_path / "elsewhere" / name
    train(old, run, *(STREAMED if kind == "streamed" else []))
    new.parent.mkdir()
    shutil.move(old, new)
    if kind != "streamed":  # whose rows are in its folder
        resumed = [] if kind == "images" else [["train", old, "--out", run, "--resume"]]
        for command in (["evaluate", run], ["prune", run], *resumed):
            said = bayesify(*command)
            said = said._replace(err=said.err.splitlines(keepends=True)[-1])  # after a note
            told = f"or tell their new path: bayesify train NEWPATH --out {run} --resume"
            check_refused(said, f"there is no file or folder {old}, the data of the run in", told)
    metrics = as_json("train", new, "--out", run, "--resume")
    config = json.loads((run / "config.json").read_text())
    assert config["settings"]["dataset"] == str(new)
    assert str(new) in config["command"]
    assert str(old) not in config["command"]
    assert as_json("evaluate", run)["test"] == pytest.approx(metrics["test"], rel=1e-6)
    shutil.move(new, old)
    again = as_json("train", old, "--out", run, "--resume")
    assert again["test"] == metrics["test"]


@pytest.mark.parametrize("options", [[], STREAMED])
def test_another_table_is_refused(options: list[str], tmp_path: Path) -> None:
    run, old, new = tmp_path / "run", tmp_path / "table.csv", tmp_path / "new.csv"
    train(old, run, *options)
    new.write_text(old.read_text() + "\n")
    before = (run / "config.json").read_bytes()
    said = bayesify("train", new, "--out", run, "--resume")
    check_refused(said, f"{new} was changed after the run was made: its SHA-256 must be")
    check_refused(
        bayesify("train", "mnist", "--out", run, "--resume"), "--resume continues the run in"
    )
    assert (run / "config.json").read_bytes() == before


def test_a_folder_of_digits_is_found_from_anywhere_and_may_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").mkdir()
    files = tiny_mnist(tmp_path / "old", [3, 1, 0, 9])
    monkeypatch.setitem(IMAGE_DATASETS, "mnist", replace(IMAGE_DATASETS["mnist"], files=files))
    run, options = tmp_path / "run", ["--hidden", "4", "--epochs", "1"]
    monkeypatch.chdir(tmp_path)
    said = bayesify("train", "mnist", "--out", run, *options, "--data-dir", "old")
    assert said.code == 0, said.err
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    metrics = as_json("evaluate", run)["test"]
    shutil.move(tmp_path / "old", tmp_path / "new")
    said = bayesify("evaluate", run)
    told = f"or tell their new folder: bayesify train mnist --out {run} --resume --data-dir FOLDER"
    check_refused(said, f"the data of the run in {run} are no longer in {tmp_path / 'old'}", told)
    said = bayesify("train", "mnist", "--out", run, *options, "--resume", "--data-dir", "../new")
    assert said.code == 0, said.err
    assert as_json("evaluate", run)["test"] == metrics
    assert Path(json.loads((run / "config.json").read_text())["data_dir"]).is_absolute()
