"""Commands on damaged data, checkpoints and settings: refused in one line, left as they were."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import shlex
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.app.cli.test_cli import TINY, as_json, bayesify, contents, read_json
from tests.app.cli.test_errors import check_refused
from tests.cases import mlp

import bayesify as bf
from bayesify.datasets import IMAGE_DATASETS, DataFile, TensorLoader
from bayesify.module import networks

MNIST = Path(__file__).parents[3] / "datasets" / "mnist"
READERS = ("evaluate {run}", "prune {run}", "inspect {run}", "report {run}")
RESUME = "train mnist --out {run} --resume"

pytestmark = pytest.mark.usefixtures("quick")


# -------------------------------------------------------------------------------------- the data


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def altered(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    ("damage", "file", "by_option"),
    [(cut, "t10k-labels-idx1-ubyte.gz", True), (altered, "train-images-idx3-ubyte.gz", False)],
)
def test_damaged_data_are_not_used_and_not_skipped(
    damage: Callable[[bytes], bytes],
    file: str,
    by_option: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though a good copy lies in the repository, which is searched after BAYESIFY_DATA."""
    data = tmp_path / "data" / "mnist"
    data.mkdir(parents=True)
    for path in MNIST.glob("*.gz"):
        (data / path.name).symlink_to(path)
    (data / file).unlink()
    (data / file).write_bytes(damage((MNIST / file).read_bytes()))
    options = ["--data-dir", data.parent] if by_option else []
    if not by_option:
        monkeypatch.setenv("BAYESIFY_DATA", str(data.parent))
    said = bayesify("train", "mnist", "--out", tmp_path / "run", *TINY, *options)
    check_refused(said, f"{data / file} is not the right file", "SHA-256", "delete it or put")
    assert not (tmp_path / "run").exists()


def tiny_mnist(folder: Path, labels: list[int]) -> tuple[DataFile, ...]:
    """Black images with these labels, under checksums of their own."""
    files = []
    for file in IMAGE_DATASETS["mnist"].files:
        shape = (len(labels), 28, 28) if "idx3" in file.name else (len(labels),)
        values = bytes(math.prod(shape)) if "idx3" in file.name else bytes(labels)
        header = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
        (folder / f"{file.name}.gz").write_bytes(gzip.compress(header + values))
        files.append(replace(file, sha256=hashlib.sha256(header + values).hexdigest()))
    return tuple(files)


def test_a_label_that_is_no_digit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for labels, code in (([3, 1, 10, 9], 2), ([3, 1, 0, 9], 0)):
        files = tiny_mnist(tmp_path, labels)
        monkeypatch.setitem(IMAGE_DATASETS, "mnist", replace(IMAGE_DATASETS["mnist"], files=files))
        options = ["--hidden", "4", "--epochs", "1", "--data-dir", tmp_path]
        said = bayesify("train", "mnist", "--out", tmp_path / "run", *options)
        assert said.code == code
        if code:
            check_refused(said, "labels from 0 to 9, got 1 outside, the first 10 at index 2")
            assert not (tmp_path / "run").exists()
    assert f"--data-dir {tmp_path}" in read_json(tmp_path / "run" / "config.json")["command"]
    assert as_json("evaluate", tmp_path / "run")["test"]["error_mean_weights"] in (75.0, 100.0)


def test_bad_values_do_not_pass_the_librarys_loader(tmp_path: Path) -> None:
    inputs, targets = torch.zeros(6, 3), torch.arange(6)
    inputs[4, 1] = math.nan
    with pytest.raises(ValueError, match=r"inputs must be finite, got 1 .* at index \(4, 1\)"):
        TensorLoader(inputs, targets, 2)
    elbo = bf.ELBO(bf.BayesianModule(mlp(torch.float32)), num_data=6)
    data = TensorLoader(torch.zeros(6, 3), targets, 2, shuffle=False)
    with pytest.raises(ValueError, match=r"targets must lie from 0 to 3 .* got 5"):
        bf.fit(elbo, data, checkpoint_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------- the run's own files


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (lambda path: path.write_bytes(cut(path.read_bytes())), "cut off or altered"),
    "altered": (lambda path: path.write_bytes(altered(path.read_bytes())), "was altered after"),
    "empty": (lambda path: path.write_bytes(b""), "cut off or altered"),
    "a text": (lambda path: path.write_text("hello"), "cut off or altered"),
    "another network": (
        lambda path: bf.save(bf.BayesianModule(networks.mlp(784, (17,), 10)), path),
        "is of another architecture: its parameter '0.weight' has shape (17, 784), the",
    ),
    "a point": (
        lambda path: bf.save(
            bf.BayesianModule(networks.mlp(784, (16,), 10), posterior=bf.Delta), path
        ),
        "holds a Delta posterior, which is not what",
    ),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is a folder; name a file of it"),
}


@pytest.mark.parametrize(
    ("damage", "command"),
    [
        *((damage, "evaluate {run}") for damage in DAMAGES),
        *(("altered", command) for command in (*READERS[1:], RESUME)),
    ],
)
def test_a_damaged_checkpoint_is_refused(damage: str, command: str, run: Path) -> None:
    spoil, part = DAMAGES[damage]
    spoil(run / "checkpoint.safetensors")
    names, before = sorted(path.name for path in run.iterdir()), stamps(run)
    said = bayesify(*shlex.split(command.format(run=run)))
    check_refused(said, part, str(run / "checkpoint.safetensors"))
    assert sorted(path.name for path in run.iterdir()) == names
    assert stamps(run) == before


def stamps(place: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in place.iterdir()}


def setting(**changes: Any) -> Callable[[Path], object]:
    def change(run: Path) -> None:
        document = read_json(run / "config.json")
        document["settings"] |= changes
        (run / "config.json").write_text(json.dumps(document))

    return change


@pytest.mark.parametrize(
    "spoil",
    [
        lambda run: (run / "config.json").write_text("{"),
        lambda run: (run / "config.json").write_text("[]"),
        lambda run: (run / "config.json").write_text("{}"),
        lambda run: (run / "config.json").write_text("[" * 100_000),
        lambda run: (run / "config.json").write_bytes(b"\xff\xfe"),
        setting(epochs=-1), setting(seed="x"), setting(seed=1.5), setting(hidden=5),
        setting(hidden=["16"]), setting(hidden=[16.5]), setting(lr="1"), setting(prior=[]),
        setting(batch_size=2.5), setting(test_samples=True), setting(unknown=1), setting(dataset=7),
    ],
)  # fmt: skip
def test_a_damaged_config_is_refused(spoil: Callable[[Path], object], run: Path) -> None:
    spoil(run)
    before = contents(run)
    for command in (*READERS, RESUME):
        said = bayesify(*shlex.split(command.format(run=run)))
        check_refused(said, f"{run / 'config.json'} cannot")
    assert contents(run) == before


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("metrics.json", None, "holds no finished run: there is no"),
        ("metrics.json", "[]", "metrics.json cannot be read"),
        ("metrics.json", '{"test": 3, "train": {}}', "metrics.json cannot be read"),
        ("metrics.json", '{"test": {}}', "metrics.json cannot be read"),
        ("history.csv", None, "history.csv cannot be read"),
        ("history.csv", "epoch,loss\n1,abc\n", "history.csv cannot be read"),
        ("history.csv", "epoch,loss\n1,2,3\n", "history.csv cannot be read"),
    ],
)
def test_a_report_needs_whole_results(name: str, content: str | None, part: str, run: Path) -> None:
    (run / name).unlink()
    if content is not None:
        (run / name).write_text(content)
    page = (run / "report.html").read_bytes()
    check_refused(bayesify("report", run), part)
    assert (run / "report.html").read_bytes() == page


def test_a_run_without_a_checkpoint_says_how_to_go_on(run: Path) -> None:
    (run / "checkpoint.safetensors").unlink()
    for command in READERS:
        said = bayesify(*shlex.split(command.format(run=run)))
        check_refused(said, f"{run} is finished, but its checkpoint.safetensors is not there")
    (run / "metrics.json").unlink()
    for command in set(READERS) - {"report {run}"}:
        said = bayesify(*shlex.split(command.format(run=run)))
        check_refused(said, "has no checkpoint yet", "resume it with bayesify train ... --resume")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("config.json", None, "data_dir must be a text or null, got 5"),
        ("metrics.json", '{"test": {}, "train": {}}', "must hold the measures of test and train"),
        ("history.csv", "garbage\n", "history.csv cannot be read: it must have a column epoch"),
    ],
)
def test_a_file_that_was_edited_is_named(name: str, text: str | None, told: str, run: Path) -> None:
    if text is None:
        text = json.dumps({**read_json(run / name), "data_dir": 5})
    (run / name).write_text(text)
    check_refused(bayesify("report", run), told)
