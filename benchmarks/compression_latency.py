"""Time one pass of the compressed networks on a CPU, compared with the whole networks.

bayesify reproduce compression
python benchmarks/compression_latency.py

The networks are decoded from the files that the results hold, and shrunk. Each is timed on one
thread in ONNX Runtime and in PyTorch, in turns with the whole network, on a machine with no other
load. The table goes to results/compression-latency and into docs/small-networks.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from records import RESULTS, require_clean_tree, resumed, store_rows
from torch import Tensor, nn

from bayesify.app.runs.environment import load_average
from bayesify.datasets import load_images
from bayesify.io import atomic_write
from bayesify.module.shrinking import shrink
from bayesify.reproduce import read_results
from bayesify.reproduce.papers.compression.experiment import decoded
from bayesify.reproduce.papers.compression.literature import REPORTED_SPEED
from bayesify.reproduce.papers.compression.networks import NETWORKS, make_network
from bayesify.reproduce.papers.compression.recipes import RECIPES

NAME = "compression-latency"
BATCHES = (1, 1000)
#: Turns of a measurement, and seconds of a turn of each contestant.
ROUNDS, SECONDS = 31, 0.02


def main() -> None:
    """Time the networks that were not timed yet, and write the table."""
    require_clean_tree()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the networks of this seed")
    seed = parser.parse_args().seed
    torch.set_num_threads(1)
    inputs = load_images("mnist").test_inputs[: max(BATCHES)]
    for result in read_results(RESULTS / "compression"):
        if result["seed"] != seed or result["quick"]:
            continue
        document = resumed(NAME, result["job"], {"seed": seed, "rounds": ROUNDS})
        if not document["metrics"]["rows"]:
            started = time.perf_counter()
            store_rows(document, measured(result, inputs), time.perf_counter() - started)
    atomic_write(RESULTS / NAME / "table.md", table(stored_rows()))
    print(table(stored_rows()))


def measured(result: Mapping[str, Any], inputs: Tensor) -> list[dict[str, Any]]:
    """Return a row for each size of batch: milliseconds of each contestant, and the load."""
    from bayesify.export import export_onnx

    whole, net = make_network(result["config"]["network"]).eval(), decoded(result)
    small = shrink(net, inputs[:2])
    selecting = shrink(net, inputs[:2], select_inputs=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        sessions = {}
        for name, each in (("whole", whole), ("small", small), ("selecting", selecting)):
            export_onnx(each, f"{folder}/{name}.onnx", inputs[:2])
            sessions[name] = _session(Path(folder, f"{name}.onnx"))
        for batch in BATCHES:
            part = inputs[:batch].contiguous()
            contestants = {f"{name}, ONNX Runtime": run(part) for name, run in sessions.items()}
            contestants["whole, PyTorch"] = _pass(whole, part)
            contestants["small, PyTorch"] = _pass(small, part)
            rows.append({"batch": batch, "load": load_average(), "ms": _times(contestants)})
    return rows


def _session(path: Path) -> Callable[[Tensor], Callable[[], object]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    [entry] = session.get_inputs()

    def with_inputs(inputs: Tensor) -> Callable[[], object]:
        array: np.ndarray[Any, Any] = inputs.numpy()
        return lambda: session.run(None, {entry.name: array})

    return with_inputs


def _pass(net: nn.Module, inputs: Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.inference_mode():
            return net(inputs)

    return run


def _times(contestants: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median milliseconds of one call of each, timed in turns."""
    counts, times = {}, {name: [] for name in contestants}
    for name, call in contestants.items():
        call()
        started = time.perf_counter()
        call()
        counts[name] = max(1, round(SECONDS / (time.perf_counter() - started)))
    for _ in range(ROUNDS):
        for name, call in contestants.items():
            started = time.perf_counter()
            for _ in range(counts[name]):
                call()
            times[name].append((time.perf_counter() - started) / counts[name])
    return {name: 1e3 * median(values) for name, values in times.items()}


def stored_rows() -> dict[str, list[dict[str, Any]]]:
    """Return the stored rows by job, in the order of the recipes."""
    found = {}
    for name in RECIPES:
        path = RESULTS / NAME / f"{name}.json"
        if path.exists():
            found[name] = json.loads(path.read_text(encoding="utf-8"))["metrics"]["rows"]
    return found


def table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the times as Markdown, with the literature's in the header line."""
    lines = [
        "Milliseconds of one pass on one thread, median. Small is the network without its dead "
        "units; selecting, without the inputs that a layer does not read, too, which it selects "
        "first. The last columns: how many times faster the better of the two is in ONNX Runtime "
        "than the whole network in ONNX Runtime and in PyTorch, and the literature's first of "
        "these.",
        "",
        "| network | batch | whole, ONNX Runtime | small, ONNX Runtime | selecting, ONNX Runtime "
        "| whole, PyTorch | small, PyTorch | times faster | than PyTorch | literature |",
        "|---" * 10 + "|",
    ]
    for name, rows in found.items():
        network = RECIPES[name]["network"]
        for row in rows:
            ms = row["ms"]
            best = min(ms["small, ONNX Runtime"], ms["selecting, ONNX Runtime"])
            cells = [f"{NETWORKS[network]}, {name.rpartition('-')[2]}", f"{row['batch']:,}"]
            cells += [f"{value:.3g}" for value in ms.values()]
            cells += [f"{ms['whole, ONNX Runtime'] / best:.1f}"]
            cells += [f"{ms['whole, PyTorch'] / best:.1f}"]
            cells += [f"{REPORTED_SPEED[network]:g}" if network in REPORTED_SPEED else ""]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
