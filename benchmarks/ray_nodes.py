"""Kill a node of a Ray cluster half-way through an experiment, and compare with a local run.

    python benchmarks/ray_nodes.py koca-dittmann     # stores results/ray-nodes
    python benchmarks/ray_nodes.py rahmanto-grid --seeds 0,1,2,3,4,5
    python benchmarks/ray_nodes.py --show            # writes what is stored into docs/

Runs the short version of an experiment on two nodes of one CPU each, which are processes of this
machine, kills one of them when half of the results are there, and runs the experiment again in
this process. Fails if a result is missing or differs from that of the local run in any number.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import records
from pages import insert
from records import require_clean_tree

from bayesify.reproduce import Context, Job, Result, find_experiment, read_results, reproduce

#: Keys of a result that say where and when it was made.
_ABOUT = ("seconds", "load", "commit", "hardware")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "reproductions.md"


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


def run_and_kill(
    experiment: Any, out: Path, seeds: Sequence[int], context: Context
) -> tuple[Progress, int]:
    """Run an experiment on two nodes and kill one half-way.

    Returns:
        The jobs, and how many were finished when the node was killed.
    """
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **memory})
    node, progress = cluster.add_node(num_cpus=1, **memory), Progress()
    finished = 0

    def kill() -> None:
        nonlocal finished
        progress.half.wait()
        time.sleep(0.5)  # in the middle of a job
        finished = len(progress.finished)
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
    return progress, finished


def table() -> str:
    """Return what is stored as Markdown."""
    lines = [
        "| short version of | jobs | finished when the node was killed | missing | there twice | "
        "with other numbers |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted((records.RESULTS / "ray-nodes").glob("*.json")):
        for row in json.loads(path.read_text())["metrics"]["rows"]:
            keys = ("jobs", "finished_before", "missing", "twice", "different")
            cells = " | ".join(str(row[key]) for key in keys)
            lines.append(f"| `{path.stem}` | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    if sys.argv[1:] == ["--show"]:
        insert(PAGE, "ray-nodes", table())
        return
    require_clean_tree()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment")
    parser.add_argument("--seeds", default="0", help="such as 0,1,2")
    parser.add_argument("--data-dir", type=Path)
    given = parser.parse_args()
    experiment = find_experiment(given.experiment)
    seeds = [int(seed) for seed in given.seeds.split(",")]
    context = Context(data_dir=given.data_dir)
    document = records.resumed("ray-nodes", given.experiment, {"seeds": given.seeds, "quick": True})
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        there, here = Path(name, "ray"), Path(name, "local")
        progress, before = run_and_kill(experiment, there, seeds, context)
        reproduce(experiment, here, Progress(), seeds=seeds, quick=True, context=context)
        ours, local = (
            {(row["job"], row["seed"]): _without_times(row) for row in read_results(folder)}
            for folder in (there, here)
        )
    twice = len(progress.finished) - len(set(progress.finished))
    different = [key for key in ours.keys() & local.keys() if ours[key] != local[key]]
    row = {
        "jobs": len(local),
        "finished_before": before,
        "missing": len(local.keys() - ours.keys()),
        "twice": twice,
        "different": len(different),
    }
    records.store_rows(document, [row], time.perf_counter() - start)
    print(row)
    if row["missing"] or row["twice"] or row["different"]:
        raise SystemExit(f"results are missing, there twice, or differ: {different}")


def _without_times(value: Any) -> Any:
    """Leave out where and when a result was made, and the seconds that a job has measured."""
    if isinstance(value, dict):
        kept = {k: each for k, each in value.items() if "seconds" not in k and k not in _ABOUT}
        return {key: _without_times(each) for key, each in kept.items()}
    return value


if __name__ == "__main__":
    main()
