"""Time one pass of the compressed networks on a CPU, compared with the whole networks.

bayesify reproduce compression
python benchmarks/compression_latency.py

The networks are decoded from the files that the results hold, and shrunk. Each is timed on one
thread in ONNX Runtime, in int8 too, and in PyTorch, in turns with the whole network, on a machine
with no other load. In ONNX Runtime inputs and outputs are bound before, so that the time is that of
the network, without passing arrays to `InferenceSession.run`. The test error is measured of what is
timed. The table goes to results/compression-latency and into docs/small-networks.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from records import RESULTS, require_clean_tree, resumed, store_rows
from torch import Tensor, nn

from bayesify.app.bench.disturbance import Watch
from bayesify.app.runs.environment import load_average
from bayesify.datasets import ImageData, load_images
from bayesify.io import atomic_write
from bayesify.metrics import error_percent
from bayesify.module.shrinking import shrink
from bayesify.reproduce import read_results
from bayesify.reproduce.papers.compression.experiment import decoded
from bayesify.reproduce.papers.compression.literature import REPORTED_SPEED
from bayesify.reproduce.papers.compression.networks import NETWORKS, make_network
from bayesify.reproduce.papers.compression.recipes import RECIPES

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

NAME = "compression-latency"
BATCHES = (1, 1000)
#: Turns of a measurement, and seconds of a turn of each contestant.
ROUNDS, SECONDS = 31, 0.02
#: Attempts at an undisturbed measurement.
TRIES = 3


def main() -> None:
    """Time the networks that were not timed yet, and write the table."""
    require_clean_tree()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the networks of this seed")
    seed = parser.parse_args().seed
    torch.set_num_threads(1)
    data = load_images("mnist")
    for result in read_results(RESULTS / "compression"):
        if result["seed"] != seed or result["quick"]:
            continue
        document = resumed(NAME, result["job"], {"seed": seed, "rounds": ROUNDS})
        if not document["metrics"]["rows"]:
            started = time.perf_counter()
            store_rows(document, measured(result, data), time.perf_counter() - started)
    atomic_write(RESULTS / NAME / "table.md", table(stored_rows()))
    print(table(stored_rows()))


def measured(result: Mapping[str, Any], data: ImageData) -> list[dict[str, Any]]:
    """Return a row for each size of batch: milliseconds of each contestant, and the load.

    Each has the errors of the small network, in percent of the test images.
    """
    from bayesify.export import export_onnx

    inputs = data.test_inputs[: max(BATCHES)]
    whole, net = make_network(result["config"]["network"]).eval(), decoded(result)
    small = shrink(net, inputs[:2])
    selecting = shrink(net, inputs[:2], select_inputs=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        sessions = {}
        for name, each in (
            ("whole", whole),
            ("small", small),
            ("selecting", selecting),
            ("int8", small),
        ):
            export_onnx(each, f"{folder}/{name}.onnx", inputs[:2], int8=name == "int8")
            sessions[name] = _session(f"{folder}/{name}.onnx")
        error = {}
        for name in ("small", "int8"):
            [logits] = sessions[name].run(None, {"input": data.test_inputs.numpy()})
            error[name] = error_percent(torch.from_numpy(logits).softmax(-1), data.test_targets)
        for batch in BATCHES:
            part = inputs[:batch].contiguous()
            contestants = {
                f"{name}, ONNX Runtime": _bound(session, part) for name, session in sessions.items()
            }
            contestants["whole, PyTorch"] = _pass(whole, part)
            contestants["small, PyTorch"] = _pass(small, part)
            ms = _undisturbed(contestants)
            rows.append({"batch": batch, "load": load_average(), "ms": ms, "error": error})
    return rows


def _session(path: str) -> InferenceSession:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _bound(session: InferenceSession, inputs: Tensor) -> Callable[[], object]:
    """Return a pass over inputs, which it reads where they are and does not keep."""
    binding = session.io_binding()
    binding.bind_cpu_input("input", inputs.numpy())
    binding.bind_output("output")
    return partial(session.run_with_iobinding, binding)


def _pass(net: nn.Module, inputs: Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.inference_mode():
            return net(inputs)

    return run


def _undisturbed(contestants: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the times of turns in which others hardly used the CPU.

    Raises:
        SystemExit: others used it in each attempt.
    """
    for _ in range(TRIES):
        watch = Watch()
        ms = _times(contestants)
        if not watch.is_disturbed:
            return ms
    raise SystemExit("other programs used the CPU; end them and run again: what is stored stays")


def _times(contestants: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median milliseconds of one call of each, timed in turns.

    The first call of a turn, which finds the caches full of another's data, is not counted.
    """
    counts, times = {}, {name: [] for name in contestants}
    for name, call in contestants.items():
        call()
        started = time.perf_counter()
        call()
        counts[name] = max(1, round(SECONDS / (time.perf_counter() - started)))
    for _ in range(ROUNDS):
        for name, call in contestants.items():
            call()
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
        "first; int8, the small one with weights of 8 bits. Times faster: the better of small and "
        "selecting in ONNX Runtime, compared with the whole network in ONNX Runtime and in "
        "PyTorch; int8 compared with both; and the literature's first of these. Test errors in "
        "percent.",
        "",
        "| network | batch | whole, ONNX Runtime | small, ONNX Runtime | selecting, ONNX Runtime "
        "| int8, ONNX Runtime | whole, PyTorch | small, PyTorch | times faster | than PyTorch "
        "| int8, times faster | than PyTorch | literature | error | error in int8 |",
        "|---" * 15 + "|",
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
            cells += [f"{ms['whole, ONNX Runtime'] / ms['int8, ONNX Runtime']:.1f}"]
            cells += [f"{ms['whole, PyTorch'] / ms['int8, ONNX Runtime']:.1f}"]
            cells += [f"{REPORTED_SPEED[network]:g}" if network in REPORTED_SPEED else ""]
            cells += [f"{row['error'][name]:.2f}" for name in ("small", "int8")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
