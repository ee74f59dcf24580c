"""Tables and new rows that cannot be used: exit code 2, one clear line, nothing written."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.app.cli.test_cli import bayesify
from tests.app.cli.test_errors import check_refused
from tests.app.cli.test_tables import QUICK, trained
from tests.tabular.test_training_table import messy

pytestmark = pytest.mark.usefixtures("quick")


HEAD = "x,y\n"
BODY = "".join(f"{i * 0.3},{i * 0.7}\n" for i in range(20))
BAD_TABLES: dict[str, tuple[bytes | str, str]] = {
    "empty": ("", "is empty; it must begin with a row of column names"),
    "only blanks": (" \n\n  \n", "is empty"),
    "header only": (HEAD, "has no rows below its header"),
    "one row": (HEAD + "1,2\n", "has one value only, '2' (rows: 1)"),
    "three rows": (HEAD + "1,2\n7,3\n3,4\n", "must have at least 4 rows with a target"),
    "no such target": ("x,z\n1,2\n", "has no column 'y', which --target asks for; its columns are"),
    "one class": (
        "x,y\n" + "1,no\n" * 9,
        "has one value only, 'no' (rows: 9), so there is nothing to",
    ),
    "constant number": ("x,y\n" + "1,5\n" * 9, "has one value only, '5' (rows: 9)"),
    "empty target": ("x,y\n" + "1,\n" * 9, "the target 'y' is empty"),
    "only the target": ("y\n1\n2\n3\n4\n", "no column to predict 'y' from (it is the only one)"),
    "nothing to go by": (
        "a,b,y\n" + "".join(f"{i},7,{i * i}\n" for i in range(1, 20)),
        "(a: it numbers the rows; b: it is '7' in every row); bring one back with --keep NAME",
    ),
    "too long a row": (HEAD + "1,2\n1,2,3\n", "but row 3 has 3"),
    "too long a row far down": (HEAD + "1,2\n" * 500 + "1,2,3\n", "Expected 2 fields in line 502"),
    "open quote": (HEAD + '1,"2\n' * 3, "close every quote"),
    "zeros": (b"x,y\n1,2\0\n", "is not text: byte 7 is zero"),
    "a workbook": (b"PK\x03\x04 and so on", "an Excel workbook; save the table as CSV"),
    "half a gzip": (b"\x1f\x8b\x08\x00", "cannot be read"),
    "a damaged gzip": (b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 8, "cannot be read"),
    "all classes differ": (
        "x,y\n" + "".join(f"{i * 0.5},label {i}\n" for i in range(9)),
        "has a class of its own for every row, such as 'label 0', so that none can be learned; use "
        "another column for --target",
    ),
    "all dates differ": (
        "x,y\n" + "".join(f"{i * 0.5},2024-01-{i:02}\n" for i in range(1, 20)),
        "convert its dates to numbers, such as days, and use --task regression",
    ),
    "numbers of an accountant": (
        "x,y\n" + "".join(f"{i * 0.5},{i}.25\n{i},({i}.50)\n" for i in range(20)),
        "20 of its 40 cells are numbers: write cells such as '(0.50)' as numbers too",
    ),
    "limits of a laboratory": (
        "x,y\n" + "".join(f"<0.5,{i}\n{i}.75,{i}.5\n{i}.5,{i}.6\n" for i in range(40)),
        "although 80 of its 120 cells are numbers: write cells such as '<0.5' as numbers too if",
    ),
    "amounts of which one occurs twice": (
        "x,y\n0.1,(7)\n0.2,(7)\n" + "".join(f"{i * 0.5},{i}\n{i},({i})\n" for i in range(9, 50)),
        "has 83 different texts in 84 rows, such as '9', too many for classes; 41 of its 84 cells "
        "are numbers: write cells such as '(7)' as numbers too, or, if they are classes, use "
        "--task classification",
    ),
    "too small to square": (
        "x,y\n" + "".join(f"{i * 0.5},{i}.5e-200\n" for i in range(20)),
        "must vary by at least 1e-150, got numbers from 5e-201 to 1.95e-199",
    ),
    "a line for Excel": (
        "sep=;\nx;y\n" + "1.5;2.5\n" * 9,
        "got a line that begins with 'sep='; remove it",
    ),
    "a title": (
        "Sales of May\nx,y\n" + "1.5,2.5\n" * 9,
        "got 'Sales of May' above rows of 2 values; remove the lines above the names",
    ),
    "ambiguous target": ('x,y\n1,"1,234"\n2,"5,678"\n', "may separate thousands or be decimal"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_bad_tables(tmp_path: Path, case: str) -> None:
    content, message = BAD_TABLES[case]
    table = tmp_path / "bad.csv"
    table.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = bayesify("train", table, "--target", "y", "--out", tmp_path / "run", *QUICK)
    check_refused(said, message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.JSON.gz"])
def test_a_file_of_json_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"x": 1, "y": 2}\n')
    said = bayesify("train", tmp_path / name, "--target", "y", "--out", tmp_path / "run", *QUICK)
    check_refused(said, "is JSON by its name; save the table as CSV or Parquet")


BAD_OPTIONS = {
    "": "a table needs --target NAME, the column of",
    "--target z": "has no column 'z'",
    "--target y --task ranking": "task must be one of classification, regression, got ranking",
    "--target y --test-fraction -0.1": "test-fraction must be at least 0 and below 1, got -0.1",
    "--target y --test-fraction 1": "test-fraction must be at least 0 and below 1",
    "--target y --test-fraction nan": "test-fraction must be at least 0 and below 1",
    "--target y --noise loud": "noise must be one of learned, input-dependent, got loud",
    "--target s --noise learned": "noise would do nothing here",
    "--target s --task regression": "regression, got 'a' and other text; use --task classif",
    "--target m --task regression": "regression, got '<5' and other text; 10 of its 20 cells are",
    "--target y --drop z": "has no column 'z', which --drop asks for",
    "--target y --drop y": "--drop y contradicts --target",
    "--target y --drop x --keep x": "--drop x contradicts --keep",
    "--target y --drop x --drop s --drop m": "m: --drop asks for it); drop fewer, or add columns",
    "--target y --net lenet5": "net must be one of table, got lenet5",
    "--target y --baseline dropout": "a table has no dropout baseline",
    "--target y --data-dir /": "data-dir is for mnist and fashion-mnist",
    "--target y --dropout-input 0.1": "dropout-input would do nothing here",
    "--target y --mean-init-std 1": "mean-init-std would do nothing here",
    "--target y --kl-weighting geometric": "add --passes 1",
    "--target y --passes 0": "passes must be at least 1",
    "--target y --batch-size 0": "batch-size must be at least 1",
    "--target y --batch-size -1": "batch-size must be at least 1",
    "--target y --limit 2": "must have at least 4 rows with a target",
}


@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_bad_options(tmp_path: Path, options: str) -> None:
    table = tmp_path / "good.csv"
    rows = "".join(f"{i * 0.3},{i * 0.7},{'ab'[i % 2]},{'<5' if i % 2 else i}\n" for i in range(20))
    table.write_text("x,y,s,m\n" + rows)
    said = bayesify("train", table, "--out", tmp_path / "run", *QUICK, *shlex.split(options))
    check_refused(said, BAD_OPTIONS[options])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", ["--task regression", "--noise learned", "--drop x"])
def test_options_of_tables_are_errors_for_images(tmp_path: Path, options: str) -> None:
    said = bayesify("train", "mnist", "--out", tmp_path / "run", *shlex.split(options))
    check_refused(said, "would do nothing here")


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    out = ("--target", "y", "--out", tmp_path / "run")
    check_refused(bayesify("train", tmp_path / "no.csv", *out), "there is no file")
    check_refused(
        bayesify("train", tmp_path, *out), "holds no table: a folder must have files that end in"
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    (tmp_path / "a.csv").write_text(HEAD + BODY)
    check_refused(bayesify("train", tmp_path / "a.csv", *out), "holds other files")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    trained(place, messy())
    return place


BAD_ROWS = {
    "missing column": ("city,size,sold\nRome,1,yes\n", "lacks the column 'when' of the training"),
    "missing columns": ("city\nRome\n", "lacks columns 'size', 'sold', 'when' of the training"),
    "no rows": ("city,size,sold,when\n", "has no rows below its header"),
    "empty": ("", "is empty"),
    "doubled names": ("city,city,size,sold,when\n", "the column name 'city' more than once"),
    "too long a row": ("city,size,sold,when\n" + "a,1,no,\n" * 500 + "a,1,no,,9\n", "line 502"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_new_rows(made: Path, tmp_path: Path, case: str) -> None:
    content, message = BAD_ROWS[case]
    new = tmp_path / "new.csv"
    new.write_text(content)
    said = bayesify("predict", made / "run", new, "--out", tmp_path / "p.csv", "--json")
    check_refused(said, message)
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--level 1", "level must lie strictly between 0 and 1, got 1.0"),
        ("--level 0", "level must lie strictly between 0 and 1"),
        ("--level nan", "level must lie strictly between 0 and 1"),
        ("--samples 0", "samples must be at least 1, got 0"),
        ("--out there.csv", "there.csv exists already; choose a new file with --out"),
        ("--out no/where/p.csv", "no/where/p.csv cannot be written: there is no folder"),
    ],
)
def test_bad_options_of_predict(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.csv").write_text("mine")
    words = ["--out", "p.csv", *shlex.split(options)]
    check_refused(bayesify("predict", made / "run", made / "table.csv", *words), message)
    assert Path("there.csv").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["there.csv"]


def test_a_place_that_may_not_be_written_to(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)
    said = bayesify("predict", made / "run", made / "table.csv", "--out", tmp_path / "p.csv")
    check_refused(said, "may not be written to")


def test_a_full_disk_leaves_no_trace(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    said = bayesify("predict", made / "run", made / "table.csv", "--out", tmp_path / "p.csv")
    assert said.code == 2
    assert "No space left on device" in said.err
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_table_is_gone_or_changed(made: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(made, tmp_path / "copy"))
    config = place / "run" / "config.json"
    config.write_text(config.read_text().replace(str(made), str(place)))
    (place / "table.csv").write_text(messy(61))
    for command in ("evaluate", "prune", "report"):
        check_refused(bayesify(command, place / "run"), "was changed after the run was made")
    (place / "table.csv").unlink()
    for command in ("evaluate", "prune", "report"):
        check_refused(bayesify(command, place / "run"), "there is no file")
    check_refused(
        bayesify("evaluate", place / "run", "--data-dir", "."),
        "data-dir is for mnist and fashion-mnist",
    )
    (place / "run" / "table.json").unlink()
    check_refused(bayesify("inspect", place / "run"), "table.json, which describes the run's table")


BAD_IMAGES = {
    "missing": (None, "there is no file"),
    "wrong shape": (np.full((2, 27, 28), 9), "must hold images of 28 x 28 = 784 pixels"),
    "a number": (np.float64(9), "must hold images of 28 x 28"),
    "none": (np.zeros((0, 28, 28)), "must hold images of 28 x 28"),
    "scaled": (np.full((2, 784), 0.5), "must be from 0 to 255, got 0.5 to 0.5; multiply them by"),
    "negative": (np.full((2, 784), -5.0), "must be from 0 to 255, got -5 to -5"),
    "not numbers": (np.full((2, 784), "a"), "must hold numbers"),
    "nan": (np.full((2, 784), np.nan), "must be from 0 to 255, got nan"),
    "text": (b"a,b\nc,d\n", "must hold numbers, but row 1 has none in column 1"),
    "no row": (b"a,b\n", "must hold a row of pixels for each image, but has none"),
    "bytes": (b"\x01\x02\0\x03", "must be .npy, .csv or IDX"),
    "half an idx": (bytes([0, 0, 8, 3, 0, 0, 0, 3]), "must have a header of 16 bytes"),
    "half a gzip": (b"\x1f\x8b\x08\x00", "cannot be read"),
    "a damaged gzip": (b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 8, "cannot be read"),
}


@pytest.mark.parametrize("case", BAD_IMAGES)
def test_bad_images(tmp_path: Path, case: str) -> None:
    content, message = BAD_IMAGES[case]
    source, run = tmp_path / "images", tmp_path / "run"
    tiny = ["--hidden", "2", "--epochs", "1", "--limit", "20", "--test-samples", "1"]
    assert bayesify("train", "mnist", "--out", run, *tiny).code == 0
    if isinstance(content, bytes):
        source.write_bytes(content)
    elif content is not None:
        with source.open("wb") as file:
            np.save(file, content)
    check_refused(bayesify("predict", run, source, "--out", tmp_path / "p.csv"), message)
    assert not (tmp_path / "p.csv").exists()
