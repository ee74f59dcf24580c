"""Experiments on a Ray cluster: the rows of a local run, whatever workers and nodes die."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.app.cli.test_cli import bayesify
from tests.app.cli.test_errors import check_refused
from tests.killable import EPOCHS, Silent3, trains, without_times
from tests.ray_cluster import own_ray_folder, two_nodes
from tests.reproduce.test_experiments import Silent, toy

from bayesify.io import StorageError
from bayesify.reproduce import EXPERIMENTS, read_results, reproduce

pytestmark = [
    # JAX, which other tests may have loaded: Ray begins its processes as forks of this one.
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:the posterior's standard deviations"),
    pytest.mark.filterwarnings("ignore:free energy:UserWarning"),
]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [without_times(result) for result in read_results(folder)]


@pytest.mark.slow
def test_rows_are_those_of_a_local_run(tmp_path: Path, epochs_done: Path) -> None:
    watcher = Silent3()
    with two_nodes() as cluster:
        found = reproduce(trains(), tmp_path / "ray", watcher, on=f"ray={cluster.address}")
    assert watcher.said[:2] == ["4 of 4", "2 nodes, 2 CPUs"]
    assert sorted(line for line in watcher.said if line.startswith("end ")) == [
        f"end {name} {seed} {seed}" for name in "ab" for seed in (0, 1)
    ]
    done = epochs_done.read_text().splitlines()
    assert len(done) == len(set(done)) == 4 * EPOCHS  # none of them twice
    local = reproduce(trains(), tmp_path / "local", Silent3())
    assert rows(tmp_path / "ray") == rows(tmp_path / "local")
    assert found.table.read_bytes() == local.table.read_bytes()
    names = [{path.name for path in (tmp_path / each).iterdir()} for each in ("ray", "local")]
    assert names[0] == names[1]


@pytest.mark.slow
def test_a_node_that_dies_loses_an_epoch_at_most(
    tmp_path: Path, epochs_done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP_SECONDS", "0.1")
    with two_nodes() as cluster:

        def kill() -> None:
            wait_until(lambda: {"a 0 3", "b 0 3"} <= {*epochs_done.read_text().splitlines()})
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)

        killer = threading.Thread(target=kill)
        killer.start()
        reproduce(trains(), tmp_path / "ray", Silent3(), on=f"ray={cluster.address}")
        killer.join()
    done = Counter(epochs_done.read_text().splitlines())
    assert max(done.values()) == 1  # no epoch that a checkpoint holds was trained again
    assert len(done) >= 4 * EPOCHS - 1  # one may have ended before it was written here
    monkeypatch.delenv("STEP_SECONDS")
    reproduce(trains(), tmp_path / "local", Silent3())
    assert rows(tmp_path / "ray") == rows(tmp_path / "local")


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(6000):
        if true():
            return
        time.sleep(0.05)
    raise AssertionError("it has not happened in five minutes")


@pytest.mark.slow
def test_a_job_that_kills_its_workers_is_given_up(
    tmp_path: Path, epochs_done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILL_AT", "b 0 4 2")
    with (
        two_nodes() as cluster,
        pytest.raises(ConnectionError, match=r"b, seed 0, failed .* 6 times .*: WorkerCrashed"),
    ):
        reproduce(trains(), tmp_path, Silent3(), on=f"ray={cluster.address}")
    assert epochs_done.read_text().count("b 0 3") == 1  # each attempt resumed
    monkeypatch.delenv("KILL_AT")
    reproduce(trains(), tmp_path, Silent3())
    assert epochs_done.read_text().count("b 0 4") == 1
    assert not (tmp_path / ".work").exists()


@pytest.mark.slow
def test_errors_of_nodes_and_jobs_name_what_to_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(job: Any, context: Any) -> dict[str, Any]:
        raise StorageError(f"{job.name} cannot be read")

    with two_nodes() as cluster:
        on = f"ray={cluster.address}"
        with pytest.raises(StorageError, match=r"cannot be read; remove .*, and the same command"):
            reproduce(replace(toy(), run=fails), tmp_path, Silent(), on=on)
        with monkeypatch.context() as patch:
            patch.setattr("bayesify.app.on_ray.cluster._code", lambda: "0.0.1")
            with pytest.raises(StorageError, match=r"same code, but .* of 0\.0\.1; install"):
                reproduce(toy(), tmp_path, Silent(), on=on)
        monkeypatch.setattr(Path, "touch", Path.exists)  # as on another disk
        with pytest.raises(StorageError, match=r"must share .*, but .* has no such folder, or ano"):
            reproduce(toy(), tmp_path, Silent(), on=on)


@pytest.mark.slow
def test_a_cluster_is_started_if_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setitem(EXPERIMENTS, "toy", toy())
    monkeypatch.chdir(tmp_path)
    with own_ray_folder():  # else the cluster of another test would be found
        said = bayesify("reproduce", "toy", "--quick", "--on", "ray")
    assert said.code == 0, said.err
    assert "on Ray: 1 node, " in said.err
    assert not ray.is_initialized()
    refused = bayesify("reproduce", "toy", "--uncommitted", "--on", "ray=127.0.0.1:9")
    assert refused.code == 2
    assert "no Ray cluster answers at 127.0.0.1:9" in refused.err
    assert "ray start --head" in refused.err


def test_ray_is_needed_only_for_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("bayesify.reproduce.harness.ray_jobs", "bayesify.app.on_ray.cluster"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match=r"pip install 'bayesify\[ray\]'"):
        reproduce(toy(), tmp_path, Silent(), on="ray")
    local = reproduce(toy(), tmp_path, Silent()).results
    assert reproduce(toy(), tmp_path, Silent(), on="ray").results == local


@pytest.mark.parametrize("on", ["", "ray=", "dask", "ray:auto"])
def test_other_clusters_are_refused(on: str) -> None:
    said = bayesify("reproduce", "uci", "--quick", "--on", on)
    check_refused(said, f"on must be ray or ray=ADDRESS, got '{on}'")


def test_every_experiment_can_be_sent_to_another_machine() -> None:
    cloudpickle = pytest.importorskip("ray").cloudpickle
    for experiment in EXPERIMENTS.values():
        for quick in (False, True):
            jobs = experiment.jobs(experiment.usual_seeds(quick=quick), quick)
            sent, there = cloudpickle.loads(cloudpickle.dumps((experiment, jobs)))
            assert there == jobs
            assert sent.name == experiment.name
