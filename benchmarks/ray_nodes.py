"""Kill a node of a Ray cluster half-way through an experiment, and compare with a local run.

    python benchmarks/ray_nodes.py koca-dittmann
    python benchmarks/ray_nodes.py rahmanto-grid --seeds 0,1,2,3,4,5

Runs the short version of an experiment on two nodes of one CPU each, which are processes of this
machine, kills one of them when half of the results are there, and runs the experiment again in
this process. Fails if a result is missing or differs from that of the local run in any number.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from ray.cluster_utils import Cluster

from bayesify.reproduce import Context, Job, Result, find_experiment, read_results, reproduce

#: Keys of a result that say where and when it was made.
_ABOUT = ("seconds", "load", "commit", "hardware")


class Progress:
    """Prints a line for each finished job, and tells when half of them are finished."""

    def __init__(self) -> None:
        self.half = threading.Event()
        self.finished: list[str] = []

    def on_start(self, jobs: Sequence[Job], left: Sequence[Job]) -> None:
        """Print how many jobs there are."""
        self._jobs = len(left)
        print(f"{len(jobs)} jobs")

    def on_cluster(self, size: str) -> None:
        """Print the size of the cluster."""
        print(f"on Ray: {size}")

    def on_job(self, job: Job) -> None:
        """Do nothing."""

    def on_progress(self, part: float) -> None:
        """Do nothing."""

    def on_wait(self, job: Job) -> None:
        """Do nothing."""

    def on_done(self, job: Job, result: Result) -> None:
        """Print a line for the job."""
        self.finished.append(job.file_name)
        print(f"{len(self.finished)}/{self._jobs} {job.file_name} {result['seconds']:.1f} s")
        if 2 * len(self.finished) >= self._jobs:
            self.half.set()


def run_and_kill(experiment: Any, out: Path, seeds: Sequence[int], context: Context) -> list[str]:
    """Run an experiment on two nodes, kill one half-way, and return the jobs that finished."""
    memory = {"object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **memory})
    node, progress = cluster.add_node(num_cpus=1, **memory), Progress()

    def kill() -> None:
        progress.half.wait()
        time.sleep(0.5)  # in the middle of a job
        cluster.remove_node(node, allow_graceful=False)
        print("a node was killed")

    killer = threading.Thread(target=kill)
    killer.start()
    on = f"ray={cluster.address}"
    try:
        reproduce(experiment, out, progress, seeds=seeds, quick=True, context=context, on=on)
    finally:
        progress.half.set()
        killer.join()
        cluster.shutdown()
    return progress.finished


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment")
    parser.add_argument("--seeds", default="0", help="such as 0,1,2")
    parser.add_argument("--data-dir", type=Path)
    given = parser.parse_args()
    experiment = find_experiment(given.experiment)
    seeds = [int(seed) for seed in given.seeds.split(",")]
    context = Context(data_dir=given.data_dir)
    with tempfile.TemporaryDirectory() as name:
        there, here = Path(name, "ray"), Path(name, "local")
        finished = run_and_kill(experiment, there, seeds, context)
        assert len(finished) == len(set(finished)), "a job was run twice"
        reproduce(experiment, here, Progress(), seeds=seeds, quick=True, context=context)
        rows = [
            [{key: value for key, value in row.items() if key not in _ABOUT} for row in results]
            for results in (read_results(there), read_results(here))
        ]
    for ours, local in zip(*rows, strict=True):
        for key in local:
            found, wanted = _without_times(ours[key]), _without_times(local[key])
            assert found == wanted, (local["job"], local["seed"], key, found, wanted)
    print(f"{len(rows[0])} results on Ray, the same numbers as those of the local run")


def _without_times(value: Any) -> Any:
    """Leave out seconds that a job has measured, and notes on when it was begun."""
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if "seconds" not in key}
        return {key: _without_times(each) for key, each in kept.items()}
    return value


if __name__ == "__main__":
    main()
