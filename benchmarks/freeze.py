"""Time frozen networks, predict and the plain network on one example and on 1,000.

python benchmarks/freeze.py

The contestants run in turn, a round after the other, and the median of each is divided by that of
the plain network in the same runtime and rounds. Each runs twice in a round: first after the
others, whose weights have taken the place of its own in the CPU's caches, then once more. Run it on
a machine that does nothing else. Every number goes to results/freeze, and the table to
docs/export.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from pages import DOCS, insert
from records import commit, require_clean_tree, store_rows, stored
from rich.progress import track

import bayesify as bf
from bayesify.export import export_onnx
from bayesify.module.networks import mlp

NAME, SET = "freeze", "mlp-400"
SAMPLES = 32
PLAIN = {"PyTorch": "plain network", "ONNX Runtime": "plain network, ONNX Runtime"}
CALLS = ("first call", "repeated")
Contestant = Callable[[], Any]


def contestants(examples: int, folder: Path) -> dict[str, Contestant]:
    """Make the functions to time, by name."""
    torch.manual_seed(0)
    net = mlp(784, (400, 400), 10).eval()
    bnn = bf.BayesianModule(net)
    net.requires_grad_(False)
    x = torch.rand(examples, 784)
    local = bf.freeze(bnn, SAMPLES)
    stacked = bf.freeze(bnn, SAMPLES, estimator=bf.WeightSampling())
    found: dict[str, Contestant] = {
        PLAIN["PyTorch"]: lambda: net(x),
        "freeze, local reparametrisation": lambda: local(x),
        "freeze, weight sampling": lambda: stacked(x),
        "predict": lambda: bnn.predict(x, num_samples=SAMPLES),
    }
    exported = {
        PLAIN["ONNX Runtime"]: net,
        "freeze, local reparametrisation, ONNX Runtime": local,
        "freeze, weight sampling, ONNX Runtime": stacked,
    }
    for place, (name, network) in enumerate(exported.items()):
        path = folder / f"{examples}-{place}.onnx"
        export_onnx(network, path, x[:5] if examples > 1 else x)
        found[name] = _runner(path, {"input": x.numpy()})
    return found


def _runner(path: Path, inputs: dict[str, Any]) -> Contestant:
    # With ONNX Runtime's own settings, as one who has the file would have it.
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, inputs)


def measure(examples: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Time all contestants on a number of examples, in turn."""
    found = contestants(examples, folder)
    seconds: dict[tuple[str, str], list[float]] = {
        (name, call): [] for name in found for call in CALLS
    }
    with torch.inference_mode():
        for place in track(range(rounds + 3), f"{examples} examples"):
            for name, run in found.items():
                for call in CALLS:
                    started = time.perf_counter()
                    run()
                    if place >= 3:  # the first rounds allocate
                        seconds[name, call].append(time.perf_counter() - started)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    rows = []
    for (name, call), median in medians.items():
        runtime = "ONNX Runtime" if name.endswith("ONNX Runtime") else "PyTorch"
        quarters = statistics.quantiles(seconds[name, call], n=4)
        rows.append(
            {
                "examples": examples,
                "contestant": name,
                "call": call,
                "ms_median": 1e3 * median,
                "ms_iqr": 1e3 * (quarters[2] - quarters[0]),
                "ratio": median / medians[PLAIN[runtime], call],
            }
        )
    return rows


def table() -> str:
    """Format the ratios to the plain network in the same runtime."""
    rows = stored(NAME, SET, {})["metrics"]["rows"]
    columns = list(dict.fromkeys((row["examples"], row["call"]) for row in rows))
    heads = [f"{n:,} example{'s' if n > 1 else ''}, {call}" for n, call in columns]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    for name in dict.fromkeys(row["contestant"] for row in rows):
        own = {(row["examples"], row["call"]): row for row in rows if row["contestant"] == name}
        cells = [f"{own[c]['ms_median']:.3g} ms, {own[c]['ratio']:.1f}" for c in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, store and show."""
    require_clean_tree()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200, help="rounds on one example")
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads of PyTorch; ONNX Runtime chooses"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = {"num_samples": SAMPLES, "rounds": arguments.rounds, "threads": arguments.threads}
    document = stored(NAME, SET, config)
    document |= {"config": {"set": SET, **config}, "commit": commit()}
    document |= {"metrics": {"rows": []}, "seconds": 0.0}
    started = time.perf_counter()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for examples, rounds in ((1, arguments.rounds), (1_000, max(5, arguments.rounds // 20))):
            rows += measure(examples, rounds, Path(folder))
    store_rows(document, rows, time.perf_counter() - started)
    insert(DOCS / "export.md", NAME, table())
    print(table())


if __name__ == "__main__":
    main()
