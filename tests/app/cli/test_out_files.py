"""The file of --out: links are followed, devices and pipes are refused."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from tests.app.cli.test_cli import bayesify
from tests.app.cli.test_errors import check_refused
from tests.app.cli.test_tables import QUICK

import bayesify as bf
from bayesify.io import StorageError

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``table.csv`` and its run, which no test changes."""
    place = tmp_path_factory.mktemp("outs")
    rows = "".join(f"{i % 13},{(i * i) % 17}\n" for i in range(60))
    (place / "table.csv").write_text("x,y\n" + rows)
    said = bayesify(
        "train",
        place / "table.csv",
        "--target",
        "y",
        "--out",
        place / "run",
        *QUICK,
        "--task",
        "regression",
    )
    assert said.code == 0, said.err
    return place


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def is_fifo(path: Path) -> bool:
    return stat.S_ISFIFO(path.lstat().st_mode)


@pytest.mark.parametrize(
    "command", ["predict {run} {table} --force", "prune {run}", "compress {run}"]
)
def test_a_pipe_is_refused_and_stays(command: str, trained: Path, fifo: Path) -> None:
    words = command.format(run=trained / "run", table=trained / "table.csv").split()
    said = bayesify(*words, "--out", fifo)
    check_refused(said, f"--out: {fifo} must be a file, got a device or pipe; name a file")
    assert is_fifo(fifo)


def test_a_link_to_a_pipe_is_refused(trained: Path, fifo: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.csv"
    link.symlink_to(fifo)
    said = bayesify("predict", trained / "run", trained / "table.csv", "--out", link, "--force")
    check_refused(said, f"--out: {link} must be a file, got a device or pipe")
    assert link.is_symlink()
    assert is_fifo(fifo)


def test_a_link_in_a_circle_is_refused(trained: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "one.csv", tmp_path / "other.csv"
    one.symlink_to(other)
    other.symlink_to(one)
    said = bayesify("predict", trained / "run", trained / "table.csv", "--out", one)
    check_refused(said, f"--out: {one} must be a file, got a symbolic link that leads back to it")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_what_a_killed_process_had_written_is_removed(
    trained: Path, tmp_path: Path, suffix: str
) -> None:
    out, another = tmp_path / f"p{suffix}", tmp_path / f".q{suffix}.99999999-1.tmp"
    left, new = (tmp_path / f".p{suffix}.9999999{number}-1.tmp" for number in (8, 9))
    for path in (left, new, another):
        path.write_text("cut off")
    for path in (left, another):
        os.utime(path, (0, 0))
    assert bayesify("predict", trained / "run", trained / "table.csv", "--out", out).code == 0
    # What was written within an hour may be of another machine that shares the folder.
    assert sorted(tmp_path.iterdir()) == sorted([out, another, new])


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_the_file_behind_a_link_is_replaced(trained: Path, tmp_path: Path, suffix: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    file, link = tmp_path / "elsewhere" / f"p{suffix}", tmp_path / f"link{suffix}"
    file.write_text("old")
    link.symlink_to(file)
    said = bayesify("predict", trained / "run", trained / "table.csv", "--out", link, "--force")
    assert said.code == 0, said.err
    assert link.is_symlink()
    assert len(file.read_bytes()) > 100
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == [file.name]


def test_the_report_behind_a_link_is_replaced(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained / "run", tmp_path / "run"))
    page = tmp_path / "page.html"
    (run / "report.html").rename(page)
    (run / "report.html").symlink_to(page)
    page.write_text("old")
    assert bayesify("report", run).code == 0
    assert (run / "report.html").is_symlink()
    assert "</html>" in page.read_text()


def test_the_library_saves_to_no_pipe(fifo: Path) -> None:
    with pytest.raises(StorageError, match=r"must be a file, got a device or pipe; name a file"):
        bf.save(bf.BayesianModule(torch.nn.Linear(2, 1)), fifo)
    assert is_fifo(fifo)


def test_standard_output_is_no_file(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = bayesify("predict", trained / "run", trained / "table.csv", "--out", "-")
    check_refused(said, "--out must be a file, got -")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command", ["train {} --target y", "predict {run} {}", "evaluate {run} {}"]
)
@pytest.mark.parametrize("source", ["pipe", "-"])
def test_a_pipe_is_no_table(
    command: str, source: str, trained: Path, fifo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(fifo.parent)
    words = command.format(fifo if source == "pipe" else "-", run=trained / "run").split()
    out = [] if words[0] == "evaluate" else ["--out", fifo.parent / "out"]
    got = "a device or pipe" if source == "pipe" else "standard input"
    check_refused(bayesify(*words, *out), f"read more than once, got {got}", "save it as a file")
    assert not (fifo.parent / "out").exists()
