"""``bayesify bench`` as a command: what it prints and stores, and what it refuses."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.app.bench.test_bench import ASKED, NEEDS_COMPILER, TINY
from tests.app.cli.test_cli import Said, bayesify

from bayesify.app.bench import Group, cases, measure, measuring, peers

CONTRACT = ("case", "estimator", "path", "hidden", "batch", "ms_median", "ms_iqr", "ratio")


@pytest.fixture
def tiny_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CASES", {each.name: each for each in (TINY, ASKED)})


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda _: None)


def bench(*arguments: object) -> Said:
    return bayesify("bench", "--threads", "1", "--steps", "2", *arguments)


@pytest.mark.slow
@NEEDS_COMPILER
def test_the_json_is_as_promised(tiny_cases: None, no_peers: None, tmp_path: Path) -> None:
    out, figure = tmp_path / "cpu.json", tmp_path / "times.png"
    said = bench("--json", "--peers", "--uncommitted", "--out", out, "--figure", figure)
    assert said.code == 0, said.err
    assert re.match(r"2 x 2 rounds on .*: about \d+ s", said.err)
    printed = json.loads(said.out)
    assert isinstance(printed["hardware"], str)
    assert {"bayesify", "python", "torch"} <= set(printed["versions"])
    assert printed["notes"] == [
        "not installed: torchbnn, bayesian-torch, blitz, torch-uncertainty, ivon-opt"
    ]
    rows = printed["rows"]
    training = [row for row in rows if row["case"] == "mlp-400"]
    expected = {("plain-net", "none", "adam"), ("plain-net", "none", "sgd")}
    expected |= {
        (path, estimator, "adam")
        for path in ("closed-form", "compiled")
        for estimator in ("sampling", "local", "flipout")
    }
    expected |= {("closed-form", "sampling", "sgd"), ("compiled", "sampling", "sgd")}
    expected |= {("closed-form", "sampling", "ivon"), ("compiled", "sampling", "ivon")}
    expected |= {("own-loop", "sampling", name) for name in ("adam", "sgd", "ivon")}
    assert {(row["path"], row["estimator"], row["optimizer"]) for row in training} == expected
    for row in rows:
        assert set(CONTRACT) | {"peak_mb"} <= set(row)
        assert (row["hidden"], row["batch"], row["threads"]) == (8, 16, 1)
        assert row["ms_median"] > 0
        assert row["peak_mb"] > 0
        (plain,) = [
            other
            for other in rows
            if (other["case"], other["path"], other["optimizer"])
            == (row["case"], "plain-net", row["optimizer"].replace("ivon", "adam"))
        ]
        assert math.isclose(row["ratio"], row["ms_median"] / plain["ms_median"])
        names = {"compiled": ("passes", "traffic", "noise")}
        if row["optimizer"] != "ivon":  # whose step is no optimizer's of PyTorch
            names["own-loop"] = ("passes", "traffic", "update", "noise")
        with_floor = row["estimator"] == "sampling" and row["path"] in names
        assert ("floor_ms" in row) == with_floor
        if with_floor:
            parts = [row[f"floor_{part}_ms"] for part in names[row["path"]]]
            assert sum(name.startswith("floor_") for name in row) == len(parts) + 1
            assert math.isclose(row["floor_ms"], sum(parts))
            assert math.isclose(row["ratio_floor"], row["floor_ms"] / plain["ms_median"])

    stored = json.loads(out.read_text())
    for name in ("experiment", "quick", "config", "seed", "commit", "versions", "seconds"):
        assert name in stored
    assert stored["metrics"]["rows"] == rows
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_tables_on_the_terminal(tiny_cases: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    said = bench("--case", "predict", "--batch", "8", "--batch", "4")
    assert said.code == 0
    lines = [line.split() for line in said.out.splitlines() if line.strip()]
    assert lines[0] == ["predict,", "batch", "8"]
    assert lines[1] == ["step", "ms", "spread", "ratio", "paired", "floor", "MB", "vectors"]
    assert lines[2][0] == "plain-net"
    assert lines[3][:2] == ["bayesify,", "sampling"]
    assert lines[4] == ["predict,", "batch", "4"]


def test_ctrl_c_shows_what_is_there_and_stores_nothing(
    tiny_cases: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(groups: list[Group], **options: Any) -> measuring.Measurement:
        found = measure(groups[:1], rounds=1)
        found.interrupted = True
        return found

    monkeypatch.setattr("bayesify.app.cli.bench_command.measure", interrupted)
    out = tmp_path / "cpu.json"
    said = bench("--case", "predict", "--uncommitted", "--out", out)
    assert said.code == 130
    assert "predict, batch 16" in said.out
    assert "stopped early: nothing was stored" in said.out
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "mlp-401"], "case must be one of mlp-400, mlp-1200, .*, got 'mlp-401'"),
        (["--batch", "0"], "batch must be at least 1, got 0"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--threads", "0"], "threads must be at least 1, got 0"),
        (["--threads", "100000"], "threads must be at most 1,024, got 100000"),
        (["--batch", "16", "--batch", str(10**19)], "batch must be at most 2,147,483,647"),
        (["--device", "gpu"], "device must be auto, cpu or cuda, got 'gpu'"),
        (["--out", "/nowhere/cpu.json"], "there is no folder /nowhere"),
        (["--figure", "/nowhere/a.png"], "there is no folder /nowhere"),
        (["--figure", "a.jpg"], "figure must end in .png, got a.jpg"),
    ],
)
def test_wrong_settings(arguments: list[str], message: str) -> None:
    said = bayesify("bench", *arguments)
    assert said.code == 2
    assert said.out == ""
    (line,) = said.err.strip().splitlines()
    assert re.search(message, line), line


@pytest.mark.parametrize("option", ["--out", "--figure"])
def test_a_folder_is_refused_before_anything_is_measured(
    option: str, tiny_cases: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bayesify.app.cli.bench_command.measure", None)
    said = bench("--uncommitted", option, tmp_path)
    assert said.code == 2
    assert said.err.strip().endswith(f"{tmp_path} is a folder; choose a file with {option}")


@pytest.mark.parametrize("option", ["--out", "--figure"])
def test_rows_that_cannot_be_stored_are_shown(
    option: str, tiny_cases: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(path: Path, _: bytes | str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("bayesify.app.cli.bench_command.atomic_write", full)
    asked = ("--case", "predict", "--store-disturbed", "--uncommitted", "--json")
    said = bench(*asked, option, tmp_path / "file.png")
    assert said.code == 2
    assert "No space left on device" in said.err
    assert json.loads(said.out)["rows"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["peers", "resident"])
def test_what_is_measured_on_a_cpu_only(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bayesify.app.cli.bench_command.requested_device", lambda _: "cuda")
    said = bayesify("bench", f"--{option}", "--device", "cuda")
    assert said.code == 2
    assert f"{option} is measured on the CPU only; leave it out with a GPU" in said.err


def test_rows_of_uncommitted_code_are_not_stored(
    tiny_cases: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bayesify.app.cli.bench_command.commit", lambda: "0123456789abcdef-dirty")
    said = bench("--case", "predict", "--out", tmp_path / "cpu.json")
    assert said.code == 2
    assert "differs from 0123456789ab; commit or undo the changes" in said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_threads_are_given_back(tiny_cases: None) -> None:
    before = torch.get_num_threads()
    assert bayesify("bench", "--case", "predict", "--steps", "1", "--threads", "2").code == 0
    assert torch.get_num_threads() == before
