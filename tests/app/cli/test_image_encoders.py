"""Images through a pretrained encoder: a folder, or a column of a table with others."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.app.cli.test_cli import as_json, bayesify, quick_runs, rows_of
from tests.app.cli.test_errors import check_refused
from tests.app.cli.test_folders import CLASSES, write_images
from tests.app.cli.test_image_tables import write_rows
from tests.encoders import save_image_encoder

import bayesify as bf

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.filterwarnings("ignore:.*SwigPy|.*swigvarlink:DeprecationWarning"),
]
QUICK = ("--epochs", "3", "--hidden", "8", "--batch-size", "16")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images, a table of them with a number, two encoders, a run of each."""
    place = tmp_path_factory.mktemp("encoders")
    write_images(place / "photos", 12)
    save_image_encoder(place / "encoder")
    save_image_encoder(place / "other", seed=1)
    rows = [
        [f"photos/{name}/{number}.png", str(10 * kind + number), name]
        for kind, name in enumerate(CLASSES)
        for number in range(12)
        if number not in (3, 4)
    ]
    write_rows(place / "photos.csv", rows, "path,weight,label")
    with quick_runs(figures=True):
        said = train(place / "photos", place, place / "run")
        assert said.code == 0, said.err
        (place / "said.txt").write_text(said.err)
    with quick_runs():
        said = train(place / "photos.csv", place, place / "table", "--target", "label", *IMAGE)
        assert said.code == 0, said.err
        (place / "table.txt").write_text(said.err)
    return place


IMAGE = ("--image", "path")


def train(data: Path, place: Path, out: Path, *more: str) -> object:
    return bayesify("train", data, "--encoder", place / "encoder", "--out", out, *QUICK, *more)


def test_a_folder_becomes_features(place: Path) -> None:
    said = (place / "said.txt").read_text()
    assert "photos: 29 rows for training, 7 held out by seed 0" in said
    assert "target class: 3 classes (classification)" in said
    assert "columns: 1 image; 8 inputs" in said
    files = {path.name for path in (place / "run").iterdir()}
    assert files >= {"table.json", "table.safetensors", "report.html", "least_certain.png"}
    assert "images.json" not in files
    (column,) = json.loads((place / "run" / "table.json").read_text())["columns"]
    assert (column["kind"], column["size"], len(column["means"])) == ("image", 8, 8)
    assert "folder" not in column
    page = (place / "run" / "report.html").read_text()
    assert "Least certain test images" in page
    command = json.loads((place / "run" / "config.json").read_text())["command"]
    assert f"--encoder {place / 'encoder'}" in command
    assert "--net" not in command


def test_the_weights_of_the_encoder_are_not_stored(place: Path) -> None:
    from safetensors import safe_open

    with safe_open(place / "run" / "checkpoint.safetensors", "pt") as stored:
        assert not [name for name in stored.keys() if "encoder" in name]  # noqa: SIM118
    parameters = as_json("inspect", place / "run")["parameters"]
    assert ["8", "8"] in [[str(size) for size in row["shape"]] for row in parameters]


@pytest.mark.parametrize("run", ["run", "table"])
def test_it_is_measured_from_stored_features(
    run: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = json.loads((place / run / "metrics.json").read_text())["test"]
    monkeypatch.setattr(
        "bayesify.tabular.columns.images.image_encoder", lambda _: pytest.fail("it was read")
    )
    assert as_json("evaluate", place / run)["test"] == pytest.approx(stored, abs=1e-6)
    as_json("report", place / run)
    assert as_json("prune", place / run, "--fractions", "0.5")["rows"]


def test_without_stored_features_they_are_computed_again(place: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(place / "run", tmp_path / "run"))
    (run / "table.safetensors").unlink()
    stored = json.loads((run / "metrics.json").read_text())["test"]
    assert as_json("evaluate", run)["test"] == pytest.approx(stored, abs=1e-6)


def test_training_is_repeated_and_resumed(place: Path, tmp_path: Path) -> None:
    assert train(place / "photos", place, tmp_path / "again").code == 0
    first, again = (
        json.loads((run / "metrics.json").read_text())["test"]
        for run in (place / "run", tmp_path / "again")
    )
    assert first == again
    assert train(place / "photos", place, tmp_path / "again", "--resume").code == 0
    resumed = json.loads((tmp_path / "again" / "metrics.json").read_text())["test"]
    assert resumed == pytest.approx(first, abs=1e-6)  # of features that were stored


@pytest.mark.parametrize("form", ["folder", "image", "table"])
def test_new_images_are_predicted(form: str, place: Path, tmp_path: Path) -> None:
    source = place / "photos" / "dots"
    if form == "image":
        source = source / "0.png"
    if form == "table":
        source = write_rows(source / "new.csv", [["0.png"], ["deeper/3.png"]], "file")
    said = as_json("predict", place / "run", source, "--out", tmp_path / "p.csv")
    rows = rows_of(tmp_path / "p.csv")
    (place / "photos" / "dots" / "new.csv").unlink(missing_ok=True)
    assert said["rows"] == len(rows) == {"folder": 12, "image": 1, "table": 2}[form]
    assert rows[0]["file"] == "0.png"
    assert "deeper/3.png" in [row["file"] for row in rows] or form == "image"
    assert {row["prediction"] for row in rows} <= set(CLASSES)
    assert {row["outside_training"] for row in rows} <= {"true", "false"}


def test_new_images_are_measured(place: Path) -> None:
    found = as_json("evaluate", place / "run", place / "photos")
    assert (found["rows"], found["rows_measured"]) == (36, 36)
    again = as_json("evaluate", place / "table", place / "photos.csv")
    assert (again["rows"], again["rows_measured"]) == (30, 30)


def test_an_image_unlike_all_others_lies_outside(place: Path, tmp_path: Path) -> None:
    checks = np.indices((16, 16)).sum(0) % 2 * 255
    Image.fromarray(checks.astype(np.uint8)).save(tmp_path / "checks.png")
    said = as_json("predict", place / "run", tmp_path / "checks.png", "--out", tmp_path / "p.csv")
    assert said["outside"] == 1
    (row,) = rows_of(tmp_path / "p.csv")
    assert (row["outside_training"], row["outside_column"]) == ("true", "file")


def test_an_image_stands_beside_other_columns(place: Path, tmp_path: Path) -> None:
    said = (place / "table.txt").read_text()
    assert "1 image, 1 number; 9 inputs" in said
    columns = json.loads((place / "table" / "metrics.json").read_text())["importance"]
    assert columns is None  # six held-out rows
    write_rows(place / "new.csv", [["photos/dots/0.png", "1"], ["", "3"]], "path,weight")
    as_json("predict", place / "table", place / "new.csv", "--out", tmp_path / "p.csv")
    rows = rows_of(tmp_path / "p.csv")
    assert [row["path"] for row in rows] == ["photos/dots/0.png", ""]
    assert rows[1]["outside_column"] == "path"  # no image was missing in training
    said = bayesify("predict", place / "table", place / "photos", "--out", tmp_path / "q.csv")
    check_refused(said, "photos lacks the column 'weight' of the training table")


def test_images_are_enough_where_the_table_had_no_other_columns(
    place: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    said = train(place / "photos.csv", place, run, "--target", "label", *IMAGE, "--drop", "weight")
    assert said.code == 0, said.err
    for source, count in ((place / "photos" / "dots" / "0.png", 1), (place / "photos", 36)):
        assert (
            as_json("predict", run, source, "--out", tmp_path / "p.csv", "--force")["rows"] == count
        )
    measured = as_json("evaluate", run, place / "photos")
    assert (measured["rows"], measured["rows_measured"]) == (36, 36)


def test_a_number_can_be_predicted_from_images(place: Path, tmp_path: Path) -> None:
    said = train(
        place / "photos.csv",
        place,
        tmp_path / "run",
        "--target",
        "weight",
        *IMAGE,
        "--task",
        "regression",
        "--drop",
        "label",
    )
    assert said.code == 0, said.err
    assert "Least certain test images" in (tmp_path / "run" / "report.html").read_text()


def test_from_python(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pandas as pd

    run = bf.open_run(place / "table")
    by_file = run.predict(place / "photos.csv")
    monkeypatch.chdir(place)
    by_frame = run.predict(pd.read_csv(place / "photos.csv"))
    assert np.allclose(by_file["p(dots)"], by_frame["p(dots)"], atol=1e-6)


def test_a_plain_baseline(place: Path, tmp_path: Path) -> None:
    said = train(place / "photos", place, tmp_path / "run", "--baseline", "sgd")
    assert said.code == 0, said.err
    as_json("report", place / "run", "--compare", tmp_path / "run")


REFUSED = {
    "photos --encoder EMPTY": "must be the folder, or the name on Hugging Face's hub, of a",
    "photos --encoder FILE": "must be the folder, or the name on Hugging Face's hub, of a",
    "photos --encoder ENCODER --size 8": "size would do nothing here: it applies only to folders",
    "photos --encoder ENCODER --net resnet8": "net must be one of table, got resnet8",
    "photos --encoder ENCODER --random all": "random would do nothing here",
    "photos --encoder ENCODER --text path": "text would do nothing here",
    "photos.csv --target label --encoder ENCODER": "encoder reads texts or images; name their",
    "photos.csv --target label --image path --text label --encoder ENCODER": "an encoder each",
    "photos.csv --target label --image weight --encoder ENCODER": "must hold paths of images for",
    "photos.csv --target path --image path --encoder ENCODER": "contradicts --target",
    "photos.csv --target label --image none --encoder ENCODER": "has no column 'none', which --im",
}


@pytest.mark.parametrize("options", REFUSED)
def test_a_wrong_option_is_refused(
    options: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    words = {"ENCODER": place / "encoder", "EMPTY": tmp_path / "empty", "FILE": place / "said.txt"}
    data, *rest = options.split()
    given = [str(words.get(word, word)) for word in rest]
    said = bayesify("train", place / data, "--out", tmp_path / "run", *QUICK, *given)
    check_refused(said, REFUSED[options])
    assert not (tmp_path / "run").exists()


def test_an_encoder_is_for_own_data(place: Path, tmp_path: Path) -> None:
    said = bayesify("train", "mnist", "--out", tmp_path / "run", "--encoder", place / "encoder")
    check_refused(said, "encoder would do nothing here")


@pytest.mark.parametrize("how", ["missing", "cut off"])
def test_an_image_that_cannot_be_read(how: str, place: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(place / "photos", tmp_path / "photos"))
    table = Path(shutil.copy(place / "photos.csv", tmp_path / "photos.csv"))
    path = folder / "dots" / "5.png"
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:60])
    with table.open(newline="") as file:
        row = [cells[0] for cells in csv.reader(file)].index("photos/dots/5.png")
    said = train(table, place, tmp_path / "run", "--target", "label", *IMAGE)
    message = "there is no image" if how == "missing" else "cannot be read as an image"
    check_refused(said, f"photos.csv, row {row}: ", message)
    assert not (tmp_path / "run").exists()
    said = bayesify("predict", place / "table", table, "--out", tmp_path / "p.csv")
    check_refused(said, f"photos.csv, row {row}: ", message)
    assert not (tmp_path / "p.csv").exists()


def test_images_that_changed(place: Path, tmp_path: Path) -> None:
    for name in ("photos", "run", "table"):
        shutil.copytree(place / name, tmp_path / name)
    shutil.copy(place / "photos.csv", tmp_path / "photos.csv")
    for name, data in (("run", "photos"), ("table", "photos.csv")):
        settings = json.loads((tmp_path / name / "config.json").read_text())
        settings["settings"]["dataset"] = str(tmp_path / data)
        (tmp_path / name / "config.json").write_text(json.dumps(settings))
        assert bayesify("evaluate", tmp_path / name).code == 0
    Image.new("RGB", (12, 12)).save(tmp_path / "photos" / "dots" / "0.png")
    for name in ("run", "table"):
        said = bayesify("evaluate", tmp_path / name)
        check_refused(said, "changed after the run was made: ", "SHA-256 must be")


def test_an_encoder_with_other_weights(place: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(place / "run", tmp_path / "run"))
    schema = (run / "table.json").read_text()
    (run / "table.json").write_text(schema.replace(str(place / "encoder"), str(place / "other")))
    said = bayesify("predict", run, place / "photos", "--out", tmp_path / "p.csv")
    check_refused(said, "must have the weights of the training, with SHA-256")
    assert not (tmp_path / "p.csv").exists()
