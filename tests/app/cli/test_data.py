"""``bayesify data``: what it lists, what it downloads, and where it says so."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.places import Places, Server
from typer.testing import CliRunner

from bayesify.app.cli.data_command import data, download_bar
from bayesify.datasets import (
    IMAGE_DATASETS,
    REGRESSION_DATASETS,
    DataError,
    DataSet,
    load_images,
)


def test_list_says_where_each_is_and_downloads_nothing(
    places: Places,
    make_tiny: Callable[[dict[str, bytes]], DataSet],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("list went to the network")

    monkeypatch.setattr("requests.get", refuse)
    make_tiny({})
    result = CliRunner().invoke(data, ["list", "--json"])
    assert result.exit_code == 0
    rows = {row["name"]: row for row in json.loads(result.stdout)["datasets"]}
    assert list(rows) == [
        "mnist",
        "fashion-mnist",
        "tiny",
        *REGRESSION_DATASETS,
        "mushroom",
        "clinc150",
    ]
    assert rows["tiny"] == {
        "name": "tiny",
        "description": "made for a test",
        "num_bytes": 1234,
        "license": "none",
        "directories": [str(places.env / "tiny")],
        "missing": [],
        "problem": None,
    }
    assert rows["mnist"]["directories"] == []
    assert len(rows["mnist"]["missing"]) == 4

    monkeypatch.setenv("COLUMNS", "1000")
    assert_where("tiny", str(places.env / "tiny"))
    assert_where("mnist", "not here")
    (places.env / "tiny" / "test-labels.gz").unlink()
    assert_where("tiny", f"{places.env / 'tiny'}, without test-labels")
    (places.env / "tiny" / "test-images.gz").write_bytes(b"")
    assert_where("tiny", "test-images.gz is not the right file")


def test_list_cuts_no_path_on_a_narrow_terminal(
    places: Places,
    make_tiny: Callable[[dict[str, bytes]], DataSet],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_tiny({})
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(data, ["list"]).stdout.splitlines()
    column = "".join(line.split("│")[-2].strip() for line in lines if line.startswith("│"))
    assert f"not here{places.env / 'tiny'}not here" in column


def assert_where(name: str, where: str) -> None:
    result = CliRunner().invoke(data, ["list"])
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if line.split()[1:2] == [name]]
    assert where in line


def test_get_prints_the_paths(
    places: Places, make_tiny: Callable[[dict[str, bytes]], DataSet]
) -> None:
    dataset = make_tiny({})
    paths = [str(places.env / "tiny" / f"{file.name}.gz") for file in dataset.files]
    result = CliRunner().invoke(data, ["get", "tiny"])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == paths
    assert result.stderr == ""


def test_get_downloads_into_the_directory_it_is_given(
    places: Places,
    server: Server,
    make_tiny: Callable[[dict[str, bytes]], DataSet],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    dataset = make_tiny({})
    for file in dataset.files:
        path = places.env / "tiny" / f"{file.name}.gz"
        server.routes[f"/{file.name}.gz"] = path.read_bytes()
    monkeypatch.setitem(
        IMAGE_DATASETS,
        "tiny",
        replace(
            dataset,
            files=tuple(
                replace(file, addresses=(f"{server.base}/{file.name}.gz",))
                for file in dataset.files
            ),
        ),
    )
    target = tmp_path / "target"
    result = CliRunner().invoke(data, ["get", "tiny", "--data-dir", str(target), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "name": "tiny",
        "files": [
            {
                "name": file.name,
                "path": str(target / "tiny" / f"{file.name}.gz"),
                "sha256": file.sha256,
            }
            for file in dataset.files
        ],
    }
    assert len(server.asked) == 4
    assert "train-images.gz" in result.stderr
    assert len(load_images("tiny", target).train_inputs) == 256


def test_get_leaves_a_data_error_to_the_main_program(places: Places) -> None:
    result = CliRunner().invoke(data, ["get", "emnist", "--json"])
    assert isinstance(result.exception, DataError)
    assert result.stdout == ""


def test_the_bar_is_on_standard_error_only(capsys: pytest.CaptureFixture[str]) -> None:
    with download_bar():
        pass
    assert capsys.readouterr() == ("", "")
    with download_bar() as progress:
        progress("tiny.gz", 0, None)
        progress("tiny.gz", 1000, 2000)
        progress("tiny.gz", 2000, 2000)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "tiny.gz" in captured.err
    assert "2.0/2.0 kB" in captured.err
