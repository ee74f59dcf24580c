"""What predictions cost, beside the plain network's passes, and how much memory they take.

python benchmarks/prediction.py --threads 2 > results/prediction/cpu.json
python benchmarks/prediction.py --report results/prediction/cpu.json    # into docs/prediction.md

Every ratio is of times taken in turn in one process, a median over rounds. Five parts, each of
which ``--parts`` can leave out:

price: S weight samples of a network of two layers of 400 units over 10,000 images of noise, beside
    S passes of the plain network in evaluation mode, with our batch size and with its own best. A
    plain pass is timed after each weight sample, so that both meet the same machine.
mean: predict_mean beside one pass of the plain network, for several numbers of data.
batches: the plain network's time for a datum by how many go through at once, and the tensors'
    bytes of such a pass. What the library would choose is marked.
sharing: a loop over 64 weight samples beside passes that 8, 16 or 64 of them share, drawing weights
    left out; what the library chooses, and what it gains with drawing.
memory: the growth of a process's peak memory over a prediction under a cap, for every cap in a
    process of its own: fresh, and after a prediction of two data, which loads torch's kernels.

Prints one JSON object, and its tables in Markdown on standard error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prediction_memory import NETWORKS, made, memory
from torch import Tensor, nn

import bayesify as bf
import bayesify.module
from bayesify import stateless
from bayesify.footprint import Footprint
from bayesify.noise import NoiseKey, Stream
from bayesify.pieces import Pieces
from bayesify.prediction import SampledOutputs
from bayesify.runs.environment import commit, hardware, versions

DOCS = Path(__file__).resolve().parents[1] / "docs" / "prediction.md"
PARTS = ("price", "mean", "batches", "sharing", "memory")
MOST_SHARED = 500_000
KEY = NoiseKey(0, Stream.PREDICTION, 0)


def in_turn(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, round by round, the first round left out."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    return {name: times[1:] for name, times in seconds.items()}


def ratio(times: list[float], others: list[float]) -> float:
    """The median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def passes(net: nn.Module, x: Tensor, batch_size: int, count: int = 1) -> None:
    """Passes of the plain network over all data."""
    for _ in range(count):
        torch.cat([net(part) for part in x.split(batch_size)])


class Interleaved(SampledOutputs):
    """Outputs under weight samples, with a plain pass after each that is timed apart."""

    plain: Callable[[], object]
    plain_seconds: list[float]
    seconds: list[float]

    def __iter__(self) -> Iterator[Tensor]:
        cls, resumed = type(self), time.perf_counter()
        for outputs in super().__iter__():
            yield outputs
            used = time.perf_counter()
            cls.plain()
            cls.seconds.append(used - resumed)
            resumed = time.perf_counter()
            cls.plain_seconds.append(resumed - used)


def price(samples: int, rounds: int) -> dict[str, Any]:
    """A prediction beside as many plain passes."""
    net, bnn, x = made("784-400-400-10", 10_000)
    sizes = {size: partial(passes, net, x, size) for size in (256, 512, 1000, 2000, 10_000)}
    found = in_turn({str(size): call for size, call in sizes.items()}, 10)
    best = min(sizes, key=lambda size: statistics.median(found[str(size)]))
    ours = pieces_of(bnn, x, samples).batch_size
    ratios: dict[int, list[float]] = {ours: [], best: []}
    bayesify.module.SampledOutputs = Interleaved  # type: ignore[misc]
    for _ in range(rounds):
        for size, values in ratios.items():
            Interleaved.plain = partial(passes, net, x, size)
            Interleaved.seconds, Interleaved.plain_seconds = [], []
            started = time.perf_counter()
            bnn.predict(x, samples)
            inside = sum(Interleaved.seconds) + sum(Interleaved.plain_seconds)
            around = time.perf_counter() - started - inside
            # Of a hundred the median: another program's second would be in the sum.
            sample = statistics.median(Interleaved.seconds)
            values.append(
                (around / samples + sample) / statistics.median(Interleaved.plain_seconds)
            )
    bayesify.module.SampledOutputs = SampledOutputs  # type: ignore[misc]
    return {
        "samples": samples,
        "batch_size": ours,
        "ratio": statistics.median(ratios[ours]),
        "best_batch_size": best,
        "ratio_to_best": statistics.median(ratios[best]),
        "ratios": ratios[ours],
        "ratios_to_best": ratios[best],
    }


def mean(rounds: int) -> list[dict[str, Any]]:
    """The mean network beside the plain one."""
    rows = []
    for name in ("13-50-1", "784-400-400-10", "conv"):
        for num_data in (1, 100, 10_000 if name != "conv" else 500):
            net, bnn, x = made(name, num_data)
            size = pieces_of(bnn, x).batch_size
            calls = {"mean": partial(bnn.predict_mean, x), "plain": partial(passes, net, x, size)}
            times = in_turn(calls, rounds * (40 if num_data < 500 else 4))
            rows.append(
                {
                    "network": name,
                    "data": num_data,
                    "ms_plain": 1e3 * statistics.median(times["plain"]),
                    "ratio": ratio(times["mean"], times["plain"]),
                }
            )
    return rows


def batches(rounds: int) -> list[dict[str, Any]]:
    """Time of a datum by batch size."""
    rows = []
    for name in ("13-50-1", "784-100-10", "784-400-400-10", "lenet5", "conv"):
        num_data = 512 if name == "conv" else 4096
        net, bnn, x = made(name, num_data)
        with stateless.evaluating(bnn.net):
            footprint, _ = Footprint.of(bnn, x, 10**9)
        sizes = [2**power for power in range(4, 13) if 2**power <= num_data]
        times = in_turn({str(size): partial(passes, net, x, size) for size in sizes}, rounds)
        chosen = pieces_of(bnn, x).batch_size
        for size in sizes:
            micros = 1e6 * statistics.median(times[str(size)]) / num_data
            row = {"network": name, "batch_size": size, "us_per_datum": micros}
            taken = footprint.taken(size)
            rows.append({**row, "bytes_of_pass": taken, "chosen": chosen})
    return rows


def sharing(rounds: int) -> list[dict[str, Any]]:
    """A loop over weight samples beside passes that they share."""
    rows = []
    for name in [name for name in NETWORKS if name != "conv"]:
        for num_data in (1, 8, 32, 128, 512, 1024):
            _, bnn, x = made(name, num_data)
            with stateless.evaluating(bnn.net):
                footprint, _ = Footprint.of(bnn, x, 10**9)
            taken = footprint.taken(num_data)
            if taken > MOST_SHARED:
                continue
            size = bnn.layout.num_weights
            weights = bnn.posterior.mean + 0.02 * torch.randn(64, size)
            calls: dict[str, Callable[[], object]] = {
                "loop": lambda b=bnn, w=weights, x=x: [b.run_with(row, x) for row in w]
            }
            for group in (8, 16, 64):
                outputs = SampledOutputs(bnn, x, KEY, 64, Pieces(num_data, group))
                calls[str(group)] = lambda o=outputs, w=weights, g=group: [
                    o._shared(part) for part in w.split(g)
                ]
            chosen = pieces_of(bnn, x, 64)
            for whole, pieces in (("whole loop", Pieces(num_data, 1)), ("whole", chosen)):
                calls[whole] = partial(list, SampledOutputs(bnn, x, KEY, 64, pieces))
            with stateless.evaluating(bnn.net):
                times = in_turn(calls, rounds)
            rows.append(
                {
                    "network": name,
                    "weights": size,
                    "data": num_data,
                    "bytes_of_pass": taken,
                    "us_loop": 1e6 * statistics.median(times["loop"]) / 64,
                    **{f"ratio_{g}": ratio(times["loop"], times[g]) for g in ("8", "16", "64")},
                    "chosen": chosen.group,
                    "ratio_whole": ratio(times["whole loop"], times["whole"]),
                }
            )
    return rows


def pieces_of(bnn: bf.BayesianModule, x: Tensor, samples: int = 1) -> Pieces:
    """What the library would choose."""
    with stateless.evaluating(bnn.net):
        return Pieces.of(bnn, x, {}, num_samples=samples)


def report(document: dict[str, Any]) -> None:
    """Write what was measured into the documentation, between its marks."""
    metrics = document["metrics"]
    whole = metrics["price"]
    lines = [
        f"Measured on {document['hardware']}, commit `{document['commit'][:12]}`.",
        f"{whole['samples']} weight samples of a 784-400-400-10 network over 10,000 images take "
        f"**{whole['ratio']:.2f}** times as long as {whole['samples']} passes of the plain network "
        f"with the same batches ({whole['batch_size']} images, chosen by the library), and "
        f"{whole['ratio_to_best']:.2f} times as long as with the plain network's best.",
        "The network with the mean weights, beside the plain network; with a pass of less than a "
        "millisecond the calls around it are what costs:",
        table([{**row, "ratio": f"{row['ratio']:.2f}"} for row in metrics["mean"]]).strip(),
        "By how much a prediction raises the process's peak of resident memory, in a fresh process "
        "(which loads kernels meanwhile) and in one that has predicted before:",
        table(metrics["memory"]).strip(),
    ]
    before, begin, rest = DOCS.read_text().partition("<!-- prediction: begin -->")
    _, end, after = rest.partition("<!-- prediction: end -->")
    text = "\n\n".join(textwrap.fill(line, 105) if line[0] != "|" else line for line in lines)
    DOCS.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def table(rows: list[dict[str, Any]]) -> str:
    """Rows in Markdown."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
    for row in rows:
        cells = [f"{value:.4g}" if isinstance(value, float) else value for value in row.values()]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


@torch.no_grad()
def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--report", type=Path, metavar="JSON", help="write docs/prediction.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.report:
        report(json.loads(options.report.read_text()))
        return
    started = time.perf_counter()
    parts: dict[str, Callable[[], Any]] = {
        "price": partial(price, options.samples, options.rounds),
        "mean": partial(mean, options.rounds),
        "batches": partial(batches, options.rounds),
        "sharing": partial(sharing, options.rounds),
        "memory": partial(memory, options.samples),
    }
    metrics = {}
    for name in options.parts:
        metrics[name] = parts[name]()
        rows = metrics[name] if isinstance(metrics[name], list) else [metrics[name]]
        print(f"{name}\n{table(rows)}", file=sys.stderr, flush=True)
    document = {
        "experiment": "prediction",
        "config": {"threads": options.threads, "rounds": options.rounds},
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "metrics": metrics,
        "seconds": time.perf_counter() - started,
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
