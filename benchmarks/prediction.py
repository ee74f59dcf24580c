"""Measure the time and memory of predictions relative to the plain network's passes.

python benchmarks/prediction.py --threads 2 > results/prediction/cpu.json
python benchmarks/prediction.py --report results/prediction/cpu.json    # into docs/prediction.md

Every ratio is one of times measured in turn in one process, a median over rounds. There are five
parts; ``--parts`` chooses among them:

price: S weight samples of a network of two layers of 400 units over 10,000 images of noise,
    compared with S passes of the plain network in evaluation mode, with our batch size and with
    its own best. A plain pass is timed after each weight sample, so that the machine's load is the
    same.
mean: predict_mean compared with one pass of the plain network, for several numbers of examples.
batches: the plain network's time for an example by batch size, and the bytes of tensors in such a
    pass. The library's choice is marked.
sharing: a loop over 64 weight samples compared with passes that 8, 16 or 64 of them share, without
    drawing weights; the library's choice, and its gain with drawing.
memory: the growth of a process's peak memory during a prediction under a limit, for every limit in
    a process of its own: fresh, and after a prediction of two examples, which loads torch's
    kernels.

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
from records import commit, require_clean_tree
from torch import Tensor, nn

import bayesify as bf
import bayesify.module.bayesian
from bayesify.app.runs.environment import hardware, versions
from bayesify.estimators.network_state import evaluation_mode
from bayesify.module.batching import Batching
from bayesify.module.kept_samples import sampler_of
from bayesify.module.pass_memory import PassMemory
from bayesify.module.sampling import SampledOutputs
from bayesify.noise.keys import NoiseKey, Stream

DOCS = Path(__file__).resolve().parents[1] / "docs" / "prediction.md"
PARTS = ("price", "mean", "batches", "sharing", "memory")
MOST_SHARED = 500_000
KEY = NoiseKey(0, Stream.PREDICTION, 0)


def in_turn(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call, round by round, without the first round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    return {name: times[1:] for name, times in seconds.items()}


def ratio(times: list[float], others: list[float]) -> float:
    """Return the median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def passes(net: nn.Module, x: Tensor, batch_size: int, count: int = 1) -> None:
    """Run the plain network over all examples."""
    for _ in range(count):
        torch.cat([net(part) for part in x.split(batch_size)])


class Interleaved(SampledOutputs):
    """Yield outputs under weight samples; time a plain pass after each, separately."""

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
    """Compare a prediction with as many plain passes."""
    net, bnn, x = made("784-400-400-10", 10_000)
    sizes = {size: partial(passes, net, x, size) for size in (256, 512, 1000, 2000, 10_000)}
    found = in_turn({str(size): call for size, call in sizes.items()}, 10)
    best = min(sizes, key=lambda size: statistics.median(found[str(size)]))
    ours = batching_of(bnn, x, samples).batch_size
    ratios: dict[int, list[float]] = {ours: [], best: []}
    bayesify.module.bayesian.SampledOutputs = Interleaved  # type: ignore[misc]
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
    bayesify.module.bayesian.SampledOutputs = SampledOutputs  # type: ignore[misc]
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
    """Compare the mean network with the plain one."""
    rows = []
    for name in ("13-50-1", "784-400-400-10", "conv"):
        for num_data in (1, 100, 10_000 if name != "conv" else 500):
            net, bnn, x = made(name, num_data)
            size = batching_of(bnn, x).batch_size
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
    """Measure the time of an example by batch size."""
    rows = []
    for name in ("13-50-1", "784-100-10", "784-400-400-10", "lenet5", "conv"):
        num_data = 512 if name == "conv" else 4096
        net, bnn, x = made(name, num_data)
        with evaluation_mode(bnn.net):
            pass_memory, _ = PassMemory.of(bnn, x, 10**9)
        sizes = [2**power for power in range(4, 13) if 2**power <= num_data]
        times = in_turn({str(size): partial(passes, net, x, size) for size in sizes}, rounds)
        chosen = batching_of(bnn, x).batch_size
        for size in sizes:
            micros = 1e6 * statistics.median(times[str(size)]) / num_data
            row = {"network": name, "batch_size": size, "us_per_datum": micros}
            taken = pass_memory.bytes_for(size)
            rows.append({**row, "bytes_of_pass": taken, "chosen": chosen})
    return rows


def sharing(rounds: int) -> list[dict[str, Any]]:
    """Compare a loop over weight samples with passes that they share."""
    rows = []
    for name in [name for name in NETWORKS if name != "conv"]:
        for num_data in (1, 8, 32, 128, 512, 1024):
            _, bnn, x = made(name, num_data)
            with evaluation_mode(bnn.net):
                pass_memory, _ = PassMemory.of(bnn, x, 10**9)
            taken = pass_memory.bytes_for(num_data)
            if taken > MOST_SHARED:
                continue
            size = bnn.layout.num_weights
            weights = bnn.posterior.mean + 0.02 * torch.randn(64, size)
            calls: dict[str, Callable[[], object]] = {
                "loop": lambda b=bnn, w=weights, x=x: [b.run_with(row, x) for row in w]
            }
            draw = sampler_of(bnn.posterior, KEY)
            for group in (8, 16, 64):
                outputs = SampledOutputs(bnn, x, draw, 64, Batching(num_data, group))
                calls[str(group)] = lambda o=outputs, w=weights, g=group: [
                    o._run_group(part) for part in w.split(g)
                ]
            chosen = batching_of(bnn, x, 64)
            for whole, batching in (("whole loop", Batching(num_data, 1)), ("whole", chosen)):
                calls[whole] = partial(list, SampledOutputs(bnn, x, draw, 64, batching))
            with evaluation_mode(bnn.net):
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


def batching_of(bnn: bf.BayesianModule, x: Tensor, samples: int = 1) -> Batching:
    """Return the library's choice of batches."""
    with evaluation_mode(bnn.net):
        return Batching.of(bnn, x, {}, num_samples=samples)


def report(document: dict[str, Any]) -> None:
    """Write the measurements into the documentation, between its marks."""
    metrics = document["metrics"]
    whole = metrics["price"]
    lines = [
        f"Measured on {document['hardware']}, commit `{document['commit'][:12]}`.",
        f"{whole['samples']} weight samples of a 784-400-400-10 network over 10,000 images take "
        f"**{whole['ratio']:.2f}** times as long as {whole['samples']} passes of the plain network "
        f"with the same batches ({whole['batch_size']} images, chosen by the library), and "
        f"{whole['ratio_to_best']:.2f} times as long as with the plain network's best.",
        "The network with the mean weights compared with the plain network; where a pass takes "
        "less than a millisecond, the calls around it are a large part of the cost:",
        table([{**row, "ratio": f"{row['ratio']:.2f}"} for row in metrics["mean"]]).strip(),
        "Growth of the process's peak of resident memory during a prediction, in a fresh process "
        "(which also loads kernels) and in one that has predicted before:",
        table(metrics["memory"]).strip(),
    ]
    before, begin, rest = DOCS.read_text().partition("<!-- prediction: begin -->")
    _, end, after = rest.partition("<!-- prediction: end -->")
    text = "\n\n".join(textwrap.fill(line, 105) if line[0] != "|" else line for line in lines)
    DOCS.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def table(rows: list[dict[str, Any]]) -> str:
    """Format rows as Markdown."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
    for row in rows:
        cells = [f"{value:.4g}" if isinstance(value, float) else value for value in row.values()]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    require_clean_tree()
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
