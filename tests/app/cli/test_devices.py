"""``bayesify train`` in several processes: errors, and real ones that are stopped or killed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import socket
from typing import Any

import pytest
import torch
from tests.app.cli.test_cli import Said, as_json, bayesify, read_json, without_figures
from tests.app.cli.test_errors import check_refused

from bayesify.app.launch import Launch, requested_device, requested_launch
from bayesify.io import read_tensors

TRAIN = ["train", "mnist", "--limit", "1500", "--hidden", "30,30", "--batch-size", "64"]
#: With it a run lasts long enough to be stopped in the middle.
LONG = [*TRAIN, "--epochs", "25", "--test-samples", "2"]
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "RANK": "2"}


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--devices", "0"], "devices must be at least 1, got 0"),
        (["--nodes", "-1"], "nodes must be at least 1, got -1"),
        (["--nodes", "2"], "nodes 2 needs MASTER_ADDR, MASTER_PORT, NODE_RANK in the environment"),
        (["--device", "gpu"], "device must be auto, cpu or cuda, got 'gpu'"),
        (["--shared-noise"], "shared-noise would do nothing in one process; leave it out"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(
    options: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "run"
    check_refused(bayesify(*TRAIN, "--out", out, *options), expected)
    assert not out.exists()


@pytest.mark.parametrize(
    ("nodes", "rank", "expected"),
    [
        (None, "1", "NODE_RANK must be 0 or unset, with one machine, got '1'"),
        (2, "5", "NODE_RANK must be a number from 0 to 1, got '5'"),
        (2, "x", "NODE_RANK must be a number from 0 to 1, got 'x'"),
    ],
)
def test_a_wrong_rank_of_the_node_is_refused(
    nodes: int | None, rank: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("NODE_RANK", rank)
    with pytest.raises(ValueError, match=re.escape(expected)):
        requested_launch(2, nodes)
    alone = requested_launch(None, None)
    assert alone.is_first, "one process has nobody to meet"
    assert (alone.count, alone.waits_for, alone.command) == (1, None, "")


def test_a_gpu_is_needed_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [requested_device(name) for name in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(ValueError, match=r"device cuda needs a GPU, but torch .* (build|finds)"):
        requested_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [requested_device(name) for name in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    assert requested_launch(2, None, "cuda") == Launch(2, 1, by_torchrun=False, device="cuda")
    with pytest.raises(ValueError, match="devices must be at most the 2 GPUs here, got 3"):
        requested_launch(3, None, "cuda")


def test_a_search_in_several_processes_is_refused(tmp_path: Path) -> None:
    train = ["train", make_table(tmp_path), "--target", "y", "--out", tmp_path / "run"]
    check_refused(
        bayesify(*train, "--devices", "2", "--tune", "5s"),
        "give several processes the same --tune-storage",
    )


def test_torchrun_decides_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    launch = requested_launch(None, 2)
    assert launch == Launch(2, 2, by_torchrun=True)
    assert (launch.count, launch.is_first, launch.command) == (4, False, "")
    with pytest.raises(ValueError, match="torchrun has started 4 processes on 2 nodes, got dev"):
        requested_launch(3, None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="every node must have as many processes, got 3 here"):
        requested_launch(None, None)


def test_a_launch_knows_its_options_and_the_first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not Launch(2, 1, by_torchrun=False).is_first
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert Launch(2, 3, by_torchrun=False).is_first
    assert Launch(2, 3, by_torchrun=False).command == " --devices 2 --nodes 3"
    assert Launch(2, 1, by_torchrun=False).command == " --devices 2"
    assert Launch(2, 1, by_torchrun=True, device="cuda").command == " --device cuda"
    shared = Launch(2, 1, by_torchrun=False, shared_noise=True)
    assert shared.command == " --devices 2 --shared-noise"
    assert shared.waits_for is None
    monkeypatch.setenv("NODE_RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert Launch(2, 2, by_torchrun=False).waits_for == "10.0.0.1:29500"


# ---------------------------------------------------------------------------------- real processes


def make_table(folder: Path) -> Path:
    path = folder / "t.csv"
    path.write_text("x,z,y\n" + "".join(f"{n % 11},{n % 13},{n % 7}\n" for n in range(3000)))
    return path


def run(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bayesify", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def run_alone(*words: object) -> Said:
    """Train by one process, this one."""
    with without_figures():
        return bayesify(*words)


def torchrun(*words: object, restarts: int = 0) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", "2", "--max-restarts", str(restarts), "-m", "bayesify"]
    return [*launcher, *map(str, words)]


@contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a group of its own; kill the group at the end."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Else processes that torchrun starts again can meet the addresses of the last ones.
            env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )
        try:
            yield process
        finally:
            for pid in (process.pid, *children_of(process.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def children_of(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(each) for each in found.stdout.split()]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)


def epochs_of(out: Path) -> int:
    path = out / "history.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    return read_tensors(out / "checkpoint.safetensors")[0]


def check_same_weights(one: Path, other: Path) -> None:
    found, expected = weights_of(one), weights_of(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run by two processes that nothing disturbed."""
    out = tmp_path_factory.mktemp("devices") / "whole"
    done = run(*LONG, "--out", out, "--devices", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == read_json(out / "metrics.json")
    assert done.stderr.count("epoch     loss") == 1
    assert "what 2 processes wait for each other" in done.stderr
    return out


@pytest.mark.slow
def test_two_processes_train_one_run(whole: Path, tmp_path: Path) -> None:
    config = read_json(whole / "config.json")
    assert (config["processes"], config["device"]) == (2, "cpu")
    assert epochs_of(whole) == 25
    error = read_json(whole / "metrics.json")["test"]["error_predictive"]
    alone = tmp_path / "alone"
    assert run_alone(*LONG, "--out", alone).code == 0
    assert read_json(alone / "config.json")["processes"] == 1
    # The same minibatches and objective, other noise.
    one = read_json(alone / "metrics.json")["test"]["error_predictive"]
    assert abs(error - one) < 2.0
    assert not torch.equal(weights_of(whole)["posterior.mean"], weights_of(alone)["posterior.mean"])
    assert as_json("evaluate", whole)["test"]["error_predictive"] == error


@pytest.mark.slow
def test_the_first_process_alone_tells_an_error_and_nothing_is_left(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [*TRAIN, "--out", str(out), "--estimator", "flipout", "--shared-noise"]
    done = run(*words, "--devices", "2")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.count("bayesify: shared_noise needs weight sampling") == 1
    assert done.stderr.count("bayesify: ") == 1, "the other process tells another error"
    assert not out.exists()
    words = [*TRAIN, "--out", str(out), "--objective", "f-quad"]
    done = subprocess.run(torchrun(*words), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.count("bayesify: objective f-quad is trained in one process") == 1
    assert done.stderr.count("bayesify: ") == 1
    assert not out.exists()


@pytest.mark.slow
def test_two_processes_share_a_streamed_table(tmp_path: Path) -> None:
    words = ["train", make_table(tmp_path), "--target", "y", "--max-memory", "3GB"]
    words += ["--epochs", "3", "--test-samples", "2", "--estimator", "sampling"]
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    assert run_alone(*words, "--out", alone).code == 0
    done = run(*words, "--out", shared, "--devices", "2", "--shared-noise")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("streaming about 3,000 rows") == 1
    found, expected = weights_of(shared), weights_of(alone)
    for name in ("posterior.mean", "posterior.rho"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)
    assert not list(shared.glob("*.arrow"))


def on_two_machines(*commands: list[object]) -> list[tuple[int, str]]:
    """The exit codes and what was said of a command on each of two machines, which are this one."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    machines = [
        subprocess.Popen(
            [sys.executable, "-m", "bayesify", *map(str, words), "--nodes", "2"],
            stderr=subprocess.PIPE,
            text=True,
            env={**meet, "NODE_RANK": str(rank)},
        )
        for rank, words in enumerate(commands)
    ]
    said = [each.communicate(timeout=200)[1] for each in machines]
    assert f"connecting with the first machine at 127.0.0.1:{port}" in said[1]
    assert "Traceback" not in "".join(said)
    return [(each.returncode, text) for each, text in zip(machines, said, strict=True)]


@pytest.mark.slow
def test_machines_that_do_not_share_the_folder_are_told(tmp_path: Path) -> None:
    outs = [tmp_path / "run0", tmp_path / "run1"]
    (code, first), (other, second) = on_two_machines(*([*TRAIN, "--out", out] for out in outs))
    assert (code, other) == (2, 2)
    assert f"{outs[1]} holds no run" in second
    assert "all machines must see --out under the same path" in second
    assert "another one failed" in first


@pytest.mark.slow
def test_the_command_on_the_second_machine_fails_with_the_first(tmp_path: Path) -> None:
    words = [*TRAIN, "--out", tmp_path / "run", "--objective", "f-quad"]
    (code, first), (other, second) = on_two_machines(words, words)
    assert (code, other) == (2, 2)
    assert "objective f-quad is trained in one process" in first
    assert "another one failed" in second
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_killed_process_is_started_again_by_torchrun(whole: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    with started(torchrun(*LONG, "--out", out, restarts=2), log) as agent:
        wait_until(lambda: epochs_of(out) >= 3, agent, log)
        os.kill(max(children_of(agent.pid)), signal.SIGKILL)
        assert agent.wait(timeout=250) == 0, log.read_text()
    assert "resuming after epoch" in log.read_text()
    assert (out / "report.html").exists()
    check_same_weights(out, whole)


@pytest.mark.slow
def test_ctrl_c_stops_both_and_other_numbers_may_resume(whole: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "-m", "bayesify", *LONG, "--out", str(out), "--devices", "2"]
    with started(command, log) as first:
        wait_until(lambda: epochs_of(out) >= 3, first, log)
        os.killpg(first.pid, signal.SIGINT)  # as a terminal sends it
        assert first.wait(timeout=100) == 130, log.read_text()
    text = log.read_text()
    assert "Traceback" not in text
    words = shlex.split(re.findall(r"^stopped; resume with: (.*)$", text, re.MULTILINE)[0])
    assert words[-3:] == ["--devices", "2", "--resume"]
    note = "resumed by 1 process instead of 2: the minibatches and the objective are the same"

    other = Path(shutil.copytree(out, tmp_path / "other"))
    alone = run_alone(*(word.replace(str(out), str(other)) for word in words[1:-3]), "--resume")
    assert alone.code == 0, alone.err
    assert note in alone.err
    assert epochs_of(other) == 25

    both = run(*words[1:])
    assert both.returncode == 0, both.stderr
    assert note not in both.stderr
    check_same_weights(out, whole)
