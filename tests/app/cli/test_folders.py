"""A folder of images: trained, measured, predicted and reported as MNIST is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.app.cli.test_cli import as_json, bayesify, quick_runs, rows_of
from tests.app.cli.test_errors import check_refused

QUICK = ("--epochs", "2", "--batch-size", "16", "--size", "8", "--test-samples", "3")
CLASSES = ("bars", "dots", "grey")

pytestmark = pytest.mark.usefixtures("quick")


def write_images(folder: Path, count: int = 10) -> Path:
    """Images of three classes in colour; one lies deeper, one is a JPEG."""
    random = np.random.default_rng(0)
    for name in CLASSES:
        for place in range(count):
            pixels = random.integers(0, 60, (12, 12, 3), dtype=np.uint8)
            if name == "bars":
                pixels[:, ::2] += 150
            if name == "dots":
                pixels[4:8, 4:8, place % 3] += 190
            deeper = folder / name / ("deeper" if place == 3 else "")
            deeper.mkdir(parents=True, exist_ok=True)
            suffix = "JPG" if place == 4 else "png"
            Image.fromarray(pixels).save(deeper / f"{place}.{suffix}")
    (folder / "bars" / "Thumbs.db").write_bytes(b"no image")
    (folder / ".hidden").mkdir()
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("folders")
    write_images(place / "photos")
    with quick_runs(figures=True):
        said = bayesify("train", place / "photos", "--out", place / "run", *QUICK)
    assert said.code == 0, said.err
    assert "photos: 24 images for training, 6 held out by seed 0" in said.err
    assert "3 classes; 8 x 8 pixels in colour" in said.err
    assert "resnet8: 195 random of 74,835 weights" in said.err
    return place


def test_a_run_holds_all(place: Path) -> None:
    names = {path.name for path in (place / "run").iterdir()}
    assert names >= {
        "config.json",
        "images.json",
        "metrics.json",
        "history.csv",
        "report.html",
        "pruning.json",
        "least_certain.png",
        "votes.png",
    }
    schema = json.loads((place / "run" / "images.json").read_text())
    assert schema["classes"] == list(CLASSES)
    assert (schema["size"], schema["channels"]) == (8, 3)
    assert not (place / "run" / "out_of_distribution.png").exists()


def test_it_is_measured_again(place: Path) -> None:
    stored = json.loads((place / "run" / "metrics.json").read_text())
    measured = as_json("evaluate", place / "run")
    assert measured["test"] == pytest.approx(stored["test"], abs=1e-6)
    parameters = as_json("inspect", place / "run")["parameters"]
    assert [row["shape"] for row in parameters] == [[3, 64], [3]]
    rows = as_json("prune", place / "run", "--fractions", "0.5")["rows"]
    assert [row["fraction"] for row in rows] == [0.0, 0.5]


def test_it_is_resumed_and_repeated(place: Path, tmp_path: Path) -> None:
    arguments = ("train", place / "photos", *QUICK)
    assert bayesify(*arguments, "--out", place / "run", "--resume").code == 0
    assert bayesify(*arguments, "--out", tmp_path / "again").code == 0
    metrics = [
        json.loads((run / "metrics.json").read_text())["test"]
        for run in (place / "run", tmp_path / "again")
    ]
    assert metrics[0] == metrics[1]
    command = json.loads((place / "run" / "config.json").read_text())["command"]
    assert str(place / "photos") in command
    assert "--size 8" in command
    assert "--net" not in command


@pytest.mark.parametrize("form", ["folder", "image"])
def test_new_images_are_predicted(place: Path, tmp_path: Path, form: str) -> None:
    source = place / "photos" / "dots"
    source = source / "0.png" if form == "image" else source
    said = as_json("predict", place / "run", source, "--out", tmp_path / "p.csv")
    rows = rows_of(tmp_path / "p.csv")
    assert said["rows"] == len(rows) == (10 if form == "folder" else 1)
    assert {row["prediction"] for row in rows} <= set(CLASSES)
    assert [row["row"] for row in rows] == [str(1 + n) for n in range(len(rows))]
    if form == "folder":
        assert "deeper/3.png" in [row["file"] for row in rows]
    total = sum(float(rows[0][f"p({name})"]) for name in CLASSES)
    assert total == pytest.approx(1.0, abs=1e-5)


def test_what_is_left_out_is_told(place: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(place / "photos", tmp_path / "photos"))
    (folder / "dots" / "5.heic").write_bytes(b"another form")
    note = "note: 1 file without the suffix of an image is left out: 1 .heic"
    commands = {
        "train": ("train", folder, *QUICK, "--out", tmp_path / "run"),
        "predict": ("predict", place / "run", folder / "dots", "--out", tmp_path / "p.csv"),
        "evaluate": ("evaluate", place / "run", folder),
    }
    for name, command in commands.items():
        said = bayesify(*command)
        assert said.code == 0, said.err
        assert note in said.err, name
    assert note.removeprefix("note: ") in (tmp_path / "run" / "report.html").read_text()


def test_all_weights_random(place: Path, tmp_path: Path) -> None:
    said = bayesify("train", place / "photos", "--out", tmp_path / "run", *QUICK, "--random", "all")
    assert said.code == 0, said.err
    parameters = as_json("inspect", tmp_path / "run")["parameters"]
    assert parameters[0]["shape"] == [16, 3, 3, 3]
    command = json.loads((tmp_path / "run" / "config.json").read_text())["command"]
    assert "--random all" in command


def test_a_baseline(place: Path, tmp_path: Path) -> None:
    said = bayesify(
        "train",
        place / "photos",
        "--out",
        tmp_path / "run",
        "--baseline",
        "sgd",
        *QUICK[:-2],
    )
    assert said.code == 0, said.err
    as_json("report", place / "run", "--compare", tmp_path / "run")


def spoil(folder: Path, how: str) -> None:
    """Make of a good folder one that cannot be used."""
    if how == "unreadable":
        (folder / "dots" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    elif how == "cut off":
        path = folder / "dots" / "0.png"
        path.write_bytes(path.read_bytes()[:60])
    elif how == "one class":
        for name in CLASSES[1:]:
            shutil.rmtree(folder / name)
    elif how == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    elif how == "no image":
        shutil.rmtree(folder)
        (folder / "dots").mkdir(parents=True)
        (folder / "dots" / "a.txt").write_text("text")
    elif how == "loose":
        shutil.copy(folder / "dots" / "0.png", folder / "loose.png")
    elif how == "lonely":
        for path in sorted((folder / "dots").rglob("*.*"))[1:]:
            path.unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("unreadable", "0.png cannot be read as an image"),
        ("cut off", "0.png cannot be read as an image"),
        ("one class", "must have images of at least two classes, each in a subfolder, got bars"),
        ("empty", "must hold images such as .png or .jpg, but has none"),
        ("no image", "must hold images such as .png or .jpg, but has none"),
        ("loose", "but 1 lies in none, such as loose.png"),
        ("lonely", "at least 2 images, one to train on and one to hold out, got 1 of dots"),
    ],
)
def test_a_folder_that_cannot_be_used(how: str, message: str, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "photos", 5)
    spoil(folder, how)
    said = bayesify("train", folder, "--out", tmp_path / "run", *QUICK)
    check_refused(said, message)
    assert not (tmp_path / "run").exists()


def test_no_such_folder(tmp_path: Path) -> None:
    said = bayesify("train", tmp_path / "mnits", "--out", tmp_path / "run")
    check_refused(said, "no data set", "no folder of that name; known are mnist, fashion-mnist")
    assert not (tmp_path / "run").exists()


REFUSED = {
    "--size 4": "size must be from 8 to 1,024, got 4",
    "--net mlp": "net must be one of resnet8, got mlp",
    "--hidden 5": "hidden would do nothing here",
    "--baseline dropout": "a folder of images has no dropout baseline",
    "--dropout-input 0.2": "dropout-input would do nothing here",
    "--data-dir .": "give the path of the data themselves",
    "--random some": "random must be one of all, last-layer, got some",
    "--random all --baseline sgd": "random would do nothing here",
    "--limit 100": "limit must be at most 24, the number of training images, got 100",
    "--test-fraction 1": "test-fraction must be at least 0 and below 1",
    "--test-fraction 0": "test-fraction must be above 0 for a folder of images",
}


@pytest.mark.parametrize("options", REFUSED)
def test_a_wrong_option_is_refused(options: str, place: Path, tmp_path: Path) -> None:
    said = bayesify("train", place / "photos", "--out", tmp_path / "run", *options.split())
    check_refused(said, REFUSED[options])


def test_size_is_for_folders(tmp_path: Path) -> None:
    said = bayesify("train", "mnist", "--out", tmp_path / "run", "--size", "28")
    check_refused(said, "size would do nothing here: it applies only to folders and tables of")


def test_a_folder_that_changed(place: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(place / "run", tmp_path / "run"))
    folder = Path(shutil.copytree(place / "photos", tmp_path / "photos"))
    settings = json.loads((run / "config.json").read_text())
    settings["settings"]["dataset"] = str(folder)
    (run / "config.json").write_text(json.dumps(settings))
    assert bayesify("evaluate", run).code == 0
    Image.new("RGB", (12, 12)).save(folder / "dots" / "0.png")
    said = bayesify("evaluate", run)
    check_refused(said, "were changed after the run was made: their SHA-256 must be")


def test_an_unreadable_new_image(place: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "a.png").write_bytes(b"none")
    said = bayesify("predict", place / "run", tmp_path / "new", "--out", tmp_path / "p.csv")
    check_refused(said, "a.png cannot be read as an image")
    assert not (tmp_path / "p.csv").exists()
    said = bayesify("predict", place / "run", tmp_path / "none", "--out", tmp_path / "p.csv")
    check_refused(said, "there is no file or folder")
