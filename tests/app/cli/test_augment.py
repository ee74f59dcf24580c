"""``--augment``: images moved in training, of MNIST and of one's own, in resumed runs too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.app.cli.test_cli import as_json, bayesify, quick_runs
from tests.app.cli.test_errors import check_refused
from tests.app.cli.test_folders import write_images
from tests.training.test_resume import timeless

from bayesify.app.runs import Run
from bayesify.app.runs.run_config import RunConfig

DIGITS = ("--hidden", "8", "--limit", "100", "--batch-size", "50", "--epochs", "2")
PHOTOS = ("--size", "8", "--limit", "20", "--batch-size", "10", "--epochs", "2")

pytestmark = pytest.mark.usefixtures("quick")


def train(source: str | Path, folder: Path, *options: str) -> list[dict[str, float | None]]:
    """Train a run, and return its history without times."""
    with quick_runs():
        said = bayesify("train", source, "--out", folder, *options)
    assert said.code == 0, said.err
    return timeless(Run.open(folder).history())


@pytest.mark.parametrize(
    "options",
    [(), ("--baseline", "sgd"), ("--baseline", "dropout"), ("--passes", "2")],
    ids=" ".join,
)
def test_digits_are_moved_in_training(options: tuple[str, ...], tmp_path: Path) -> None:
    moved = train("mnist", tmp_path / "moved", *DIGITS, *options, "--augment", "0.1")
    assert moved != train("mnist", tmp_path / "still", *DIGITS, *options)
    assert moved == train("mnist", tmp_path / "again", *DIGITS, *options, "--augment", "0.1")


def test_so_are_the_images_of_a_prior(tmp_path: Path) -> None:
    centres = {}
    for amount in ("0.0", "0.1"):
        options = (*DIGITS, "--objective", "f-quad", "--prior-epochs", "1", "--augment", amount)
        train("mnist", tmp_path / amount, *options)
        centres[amount] = Run.open(tmp_path / amount).load_module().prior_mean
    assert centres["0.1"] is not None
    assert not centres["0.1"].equal(centres["0.0"])


def test_images_of_ones_own_are_moved_and_measured_as_they_are(tmp_path: Path) -> None:
    photos = write_images(tmp_path / "photos")
    moved = train(photos, tmp_path / "moved", *PHOTOS, "--augment", "0.1")
    assert moved != train(photos, tmp_path / "still", *PHOTOS)
    stored = json.loads((tmp_path / "moved" / "metrics.json").read_text())["test"]
    assert as_json("evaluate", tmp_path / "moved")["test"] == pytest.approx(stored, abs=1e-6)


def test_a_resumed_run_has_the_moves_of_an_uninterrupted_one(tmp_path: Path) -> None:
    options = (*DIGITS, "--augment", "0.1")
    whole = train("mnist", tmp_path / "whole", *options)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with quick_runs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("bayesify.app.cli.epoch_table.HistoryWriter.on_epoch", stop)
        assert bayesify("train", "mnist", "--out", tmp_path / "run", *options).code == 130
    said = bayesify("train", "mnist", "--out", tmp_path / "run", "--resume", "--augment", "0.2")
    check_refused(said, "whose augment is 0.1, but 0.2 was asked for")
    assert train("mnist", tmp_path / "run", *options, "--resume") == whole


def test_a_run_from_before_there_was_augmentation_has_none() -> None:
    settings = RunConfig.of("mnist").to_json()
    del settings["augment"]
    assert RunConfig.from_json(settings) == RunConfig.of("mnist")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("mnist --augment -0.1", "augment must be from 0 to .5, got -0.1"),
        ("mnist --augment 0.6", "augment must be from 0 to .5, got 0.6"),
        ("mnist --augment nan", "augment must be from 0 to .5, got nan"),
        ("{place}/t.csv --target y --augment 0.1", "augment would do nothing here: it applies"),
        ("{place} --encoder {place} --augment 0.1", "augment would do nothing here: it applies"),
    ],
)
def test_what_cannot_be_moved_is_one_clear_error(arguments: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x,y\n" + "\n".join(f"{i},{i % 7}" for i in range(40)))
    words = arguments.format(place=tmp_path).split()
    check_refused(bayesify("train", *words, "--out", tmp_path / "run"), told)
    assert not (tmp_path / "run").exists()
