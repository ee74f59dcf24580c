"""A table of paths of images and their classes: trained, measured and predicted as a folder is."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from tests.app.cli.test_cli import as_json, bayesify, quick_runs, rows_of
from tests.app.cli.test_errors import check_refused
from tests.app.cli.test_folders import CLASSES, QUICK, write_images

NAMED = ("--target", "label", "--image", "path")

pytestmark = pytest.mark.usefixtures("quick")


def write_table(folder: Path, name: str = "photos.csv", count: int = 10) -> Path:
    """A table next to a folder of images; one row has no class, one image is in two rows."""
    write_images(folder / "files", count)
    rows = []
    for path in sorted((folder / "files").rglob("*.*")):
        if path.suffix.lower() in (".png", ".jpg"):
            inside = path.relative_to(folder)
            rows.append([inside.as_posix(), inside.parts[1], "x"])
    rows.append([rows[0][0], rows[0][1], "y"])
    rows.append([rows[3][0], "", "y"])
    write_rows(folder / name, rows)
    return folder / name


def write_rows(path: Path, rows: list[list[str]], header: str = "path,label,note") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header.split(","))
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tables")
    table = write_table(place)
    with quick_runs(figures=True):
        said = bayesify("train", table, *NAMED, "--out", place / "run", *QUICK)
    assert said.code == 0, said.err
    (place / "said.txt").write_text(said.err)
    return place


def test_what_was_found_is_printed(place: Path) -> None:
    said = (place / "said.txt").read_text()
    assert "photos.csv: 25 images for training, 6 held out by seed 0" in said
    assert "3 classes; 8 x 8 pixels in colour" in said
    assert "note: not used: 'note'" in said
    assert "note: 1 row names an image that another row names: an image in both parts" in said
    assert "note: 1 row has no class in 'label' and is left out" in said
    assert "resnet8: 195 random of 74,835 weights" in said


def test_a_run_holds_all(place: Path) -> None:
    names = {path.name for path in (place / "run").iterdir()}
    assert names >= {"images.json", "report.html", "least_certain.png", "votes.png"}
    assert "table.json" not in names
    schema = json.loads((place / "run" / "images.json").read_text())
    assert schema["classes"] == list(CLASSES)
    assert schema["columns"] == ["path", "label"]
    page = (place / "run" / "report.html").read_text()
    assert "Bayes by Backprop on photos.csv: label" in page


def test_it_is_measured_resumed_and_repeated(place: Path, tmp_path: Path) -> None:
    stored = json.loads((place / "run" / "metrics.json").read_text())["test"]
    measured = as_json("evaluate", place / "run")["test"]
    assert measured == pytest.approx(stored, abs=1e-6)
    arguments = ("train", place / "photos.csv", *NAMED, *QUICK)
    assert bayesify(*arguments, "--out", place / "run", "--resume").code == 0
    assert bayesify(*arguments, "--out", tmp_path / "again").code == 0
    again = json.loads((tmp_path / "again" / "metrics.json").read_text())["test"]
    assert again == stored
    command = json.loads((place / "run" / "config.json").read_text())["command"]
    assert "--target label --image path" in command
    assert "--net" not in command
    rows = as_json("prune", place / "run", "--fractions", "0.5")["rows"]
    assert [row["fraction"] for row in rows] == [0.0, 0.5]
    as_json("report", place / "run")


def test_paths_are_relative_to_the_table(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = Path(shutil.copytree(place / "files", tmp_path / "moved" / "files"))
    write_rows(
        tmp_path / "moved" / "new.csv", [["files\\dots\\0.png"], ["files/bars/1.png"]], "path"
    )
    monkeypatch.chdir(tmp_path)
    said = as_json("predict", place / "run", "moved/new.csv", "--out", tmp_path / "p.csv")
    rows = rows_of(tmp_path / "p.csv")
    assert [row["file"] for row in rows] == ["files\\dots\\0.png", "files/bars/1.png"]
    assert (said["rows"], said["metrics"]) == (2, None)
    alone = as_json("predict", place / "run", moved / "dots" / "0.png", "--out", tmp_path / "q.csv")
    assert alone["rows"] == 1
    (one,) = rows_of(tmp_path / "q.csv")
    for name in CLASSES:
        assert float(one[f"p({name})"]) == pytest.approx(float(rows[0][f"p({name})"]), abs=1e-5)


def test_new_rows_with_classes_are_measured(place: Path, tmp_path: Path) -> None:
    rows = [["files/dots/0.png", "dots"], ["files/bars/1.png", ""], ["files/bars/2.png", "cars"]]
    rows += [["files/grey/5.png", "dots"]]
    write_rows(place / "new.csv", rows, "path,label")
    found = as_json("evaluate", place / "run", place / "new.csv")
    assert (found["rows"], found["rows_measured"]) == (4, 2)
    assert found["rows_not_measured"] == (
        "images that are not measured: 1 without a class, 1 of a class that training did not have"
    )
    said = as_json("predict", place / "run", place / "new.csv", "--out", tmp_path / "p.csv")
    assert said["metrics"] == pytest.approx(found["metrics"], abs=1e-6)
    predicted = rows_of(tmp_path / "p.csv")
    wrong = [predicted[0]["prediction"] != "dots", predicted[3]["prediction"] != "dots"]
    assert found["metrics"]["error_predictive"] == pytest.approx(50.0 * sum(wrong))


def test_force_overwrites_no_table_of_a_pattern(place: Path) -> None:
    new = place / "more.csv"
    write_rows(new, [["files/dots/0.png"]], "path")
    before = new.read_bytes()
    said = bayesify("predict", place / "run", place / "more*.csv", "--out", new, "--force")
    check_refused(said, "more.csv is a file of the input; choose another file with --out")
    assert new.read_bytes() == before


def test_a_folder_of_new_images_is_measured(place: Path, tmp_path: Path) -> None:
    by_folder = as_json("evaluate", place / "run", place / "files")
    assert by_folder["rows_measured"] == 30
    rows = [[row["path"], row["label"]] for row in rows_of(place / "photos.csv")[:30]]
    write_rows(place / "same.csv", rows, "path,label")
    by_table = as_json("evaluate", place / "run", place / "same.csv")
    assert by_table["metrics"] == pytest.approx(by_folder["metrics"], abs=1e-6)


def good_rows(folder: Path) -> list[list[str]]:
    write_images(folder / "files", 3)
    return [[f"files/{name}/{n}.png", name] for name in CLASSES for n in range(3)]


def spoil(folder: Path, rows: list[list[str]], how: str) -> list[list[str]]:
    """Make of a good table one that cannot be used."""
    match how:
        case "missing":
            rows[4][0] = "files/dots/none.png"
        case "no path":
            rows[4][0] = " "
        case "unreadable":
            (folder / rows[4][0]).write_bytes(b"\x89PNG\r\n\x1a\n and no more")
        case "cut off":
            path = folder / rows[4][0]
            path.write_bytes(path.read_bytes()[:60])
        case "a folder":
            rows[4][0] = "files/dots"
        case "one class":
            return [[path, "dots"] for path, _ in rows]
        case "lonely":
            rows[0][1] = "other"
        case "no class":
            return [[path, ""] for path, _ in rows]
        case "no rows":
            return []
    return rows


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "photos.csv, row 5: there is no image "),
        ("no path", "photos.csv, row 5: the column 'path' must name an image, got none; name one"),
        ("unreadable", "photos.csv, row 5: "),
        ("cut off", "photos.csv, row 5: "),
        ("a folder", "photos.csv, row 5: "),
        ("one class", "of at least two classes, named in the column 'label', got dots alone"),
        ("lonely", "at least 2 images, one to train on and one to hold out, got 1 of other"),
        ("no class", "must have images of at least two classes"),
        ("no rows", "photos.csv has no rows below its header"),
    ],
)
def test_a_table_that_cannot_be_used(how: str, message: str, tmp_path: Path) -> None:
    rows = spoil(tmp_path, good_rows(tmp_path), how)
    table = write_rows(tmp_path / "photos.csv", rows, "path,label")
    said = bayesify("train", table, *NAMED, "--out", tmp_path / "run", *QUICK)
    check_refused(said, message)
    if how in ("unreadable", "cut off", "a folder"):
        check_refused(said, "cannot be read as an image")
    assert not (tmp_path / "run").exists()


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "photos.csv").write_text("")
    said = bayesify("train", tmp_path / "photos.csv", *NAMED, "--out", tmp_path / "run", *QUICK)
    check_refused(said, "photos.csv is empty; it must begin with a row of column names")
    assert not (tmp_path / "run").exists()


REFUSED = {
    "--image path": "a table needs --target NAME",
    "--target label --image nothing": "no column 'nothing' with the paths of images; its columns",
    "--target nothing --image path": "has no column 'nothing', which --target asks for",
    "--target path --image path": "--image path contradicts --target",
    "--target label --image path --drop note": "drop would do nothing here",
    "--target label --image path --task classification": "task would do nothing here",
    "--target label --image path --text note": "columns of texts need --encoder",
    "--target label --image path --hidden 5": "hidden would do nothing here",
    "--target label --image path --net mlp": "net must be one of resnet8, got mlp",
    "--target label --image path --tune 5s": "tune is for tables",
    "--target label --image path --test-fraction 0": "above 0 for a table of images, got 0",
    "--target label --image path --limit 100": "limit must be at most 25, the number of training",
}


@pytest.mark.parametrize("options", REFUSED)
def test_a_wrong_option_is_refused(options: str, place: Path, tmp_path: Path) -> None:
    table = place / "photos.csv"
    said = bayesify("train", table, "--out", tmp_path / "run", *options.split(), *QUICK[:2])
    check_refused(said, REFUSED[options])
    assert not (tmp_path / "run").exists()


def test_image_is_for_tables(place: Path, tmp_path: Path) -> None:
    said = bayesify("train", place / "files", "--out", tmp_path / "run", "--image", "path")
    check_refused(said, "image would do nothing here: it applies only to tables")


NEW = {
    "files/dots/none.png,dots": "new.csv, row 1: there is no image ",
    ",dots": "new.csv, row 1: the column 'path' must name an image",
}


@pytest.mark.parametrize("row", NEW)
def test_new_rows_that_cannot_be_read(row: str, place: Path, tmp_path: Path) -> None:
    new = place / "new.csv"
    new.write_text(f"path,label\n{row}\n")
    said = bayesify("predict", place / "run", new, "--out", tmp_path / "p.csv")
    check_refused(said, NEW[row])
    assert not (tmp_path / "p.csv").exists()
    check_refused(bayesify("evaluate", place / "run", new), NEW[row])


def test_a_new_table_without_what_is_needed(place: Path, tmp_path: Path) -> None:
    new = place / "new.csv"
    new.write_text("file,label\nfiles/dots/0.png,dots\n")
    said = bayesify("predict", place / "run", new, "--out", tmp_path / "p.csv")
    check_refused(said, "has no column 'path' with the paths of images; its columns are 'file'")
    new.write_text("path\nfiles/dots/0.png\n")
    said = bayesify("evaluate", place / "run", new)
    check_refused(said, "has no column 'label', the classes to measure by")
    new.write_text("path,label\nfiles/dots/0.png,cars\n")
    said = bayesify("evaluate", place / "run", new)
    check_refused(said, "must have images of the classes bars, dots, grey, got none")


def test_a_run_of_a_folder_takes_no_table(place: Path, tmp_path: Path) -> None:
    said = bayesify("train", place / "files", "--out", tmp_path / "run", *QUICK)
    assert said.code == 0, said.err
    said = bayesify("predict", tmp_path / "run", place / "photos.csv", "--out", tmp_path / "p.csv")
    check_refused(said, "is a table, but the run's own images are those of a folder")


def test_an_image_that_changed(place: Path, tmp_path: Path) -> None:
    for name in ("files", "run"):
        shutil.copytree(place / name, tmp_path / name)
    table = Path(shutil.copy(place / "photos.csv", tmp_path / "photos.csv"))
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    settings["settings"]["dataset"] = str(table)
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings))
    assert bayesify("evaluate", tmp_path / "run").code == 0
    table.write_text(table.read_text().replace(",bars,", ",dots,", 1))
    said = bayesify("evaluate", tmp_path / "run")
    check_refused(said, "the images of ", "were changed after the run was made")
    shutil.copy(place / "photos.csv", table)
    Image.new("RGB", (12, 12)).save(tmp_path / "files" / "dots" / "0.png")
    said = bayesify("evaluate", tmp_path / "run")
    check_refused(said, "were changed after the run was made: their SHA-256 must be")
