"""Compare the compiled kernel in C++ and by torch.compile: time to compile, time of a step.

    python benchmarks/kernels.py                 # prints a table and JSON
    python benchmarks/kernels.py --write         # writes the table into docs/adr/0005

Both start with empty caches. Times are medians over interleaved calls in one run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bayesify.app.runs.environment import hardware
from bayesify.distributions.priors import ScaleMixture
from bayesify.training.kernel.formulas import PriorBlocks, Rates, prior_blocks
from bayesify.training.kernel.interface import Kernel, Recipe, Vectors
from bayesify.training.kernel.native import NativeKernel
from bayesify.training.kernel.tensors import TensorKernel

ADR = Path(__file__).parents[1] / "docs" / "adr" / "0005-the-kernel-is-cpp-on-cpus.md"
RATES = Rates(1e-3, 0.9, 0.999, 1e-8, 0.1, 0.001)


def vectors(hidden: int) -> Vectors:
    """Make the vectors of a 784-H-H-10 network under Adam."""
    starts = [0]
    for size in (784 * hidden, hidden, hidden * hidden, hidden, 10 * hidden, 10):
        starts.append(starts[-1] + size)
    count = starts[-1]
    mean, rho, leaf = torch.randn(count) * 0.05, torch.full((count,), -3.9), torch.zeros(count)
    moments = [(torch.zeros(count), torch.zeros(count)) for _ in range(2)]
    return Vectors(mean, rho, leaf, moments[0], moments[1], tuple(starts), None, None)


def call(kernel: Kernel, gradients: list[torch.Tensor]) -> float:
    """Time one step, in seconds."""
    started = time.perf_counter()
    kernel.update(gradients, [], step=1, kl_factor=1e-5, rates=(RATES, RATES))
    return time.perf_counter() - started


def measure(threads: int, repeats: int) -> list[dict[str, Any]]:
    """Measure each number of hidden units with each kernel, one row each."""
    torch.set_num_threads(threads)
    form = prior_blocks(ScaleMixture(), "auto")
    assert isinstance(form, PriorBlocks)
    recipe = Recipe(form, "adam", "weights", torch.float32)
    rows = []
    for hidden in (400, 1200):
        kernels: dict[str, Kernel] = {}
        first: dict[str, float] = {}
        gradients: list[torch.Tensor] = []
        for name in ("C++", "torch.compile"):
            state = vectors(hidden)
            sizes = [b - a for a, b in zip(state.starts, state.starts[1:], strict=False)]
            gradients = [torch.randn(size) * 1e-3 for size in sizes]
            started = time.perf_counter()
            if name == "C++":
                kernels[name] = NativeKernel(recipe, state, (1, 2))
            else:
                kernels[name] = TensorKernel(recipe, state, (1, 2), compiled=True)
            kernels[name].refresh(0)
            call(kernels[name], gradients)
            first[name] = time.perf_counter() - started
        times: dict[str, list[float]] = {name: [] for name in kernels}
        for _ in range(repeats):
            for name, kernel in kernels.items():
                times[name].append(call(kernel, gradients))
        for name in kernels:
            milliseconds = 1e3 * statistics.median(times[name][repeats // 10 :])
            rows.append(
                {
                    "hidden": hidden,
                    "kernel": name,
                    "threads": threads,
                    "seconds_to_first_step": first[name],
                    "ms_median": milliseconds,
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Format the rows as Markdown."""
    lines = [
        "| network | kernel | seconds until it has run once | ms a step |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| 2x{row['hidden']} | {row['kernel']} | {row['seconds_to_first_step']:.1f} | "
        f"{row['ms_median']:.2f} |"
        for row in rows
    ]
    threads = rows[0]["threads"]
    return "\n".join(lines) + f"\n\nScale mixture, Adam, float32, {threads} threads.\n"


def main() -> None:
    """Measure and print; with --write, write the table into the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--write", action="store_true", help="write the table into docs/adr/0005")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["XDG_CACHE_HOME"] = empty
        rows = measure(given.threads, given.repeats)
    print(json.dumps({"rows": rows, "hardware": hardware()}, indent=1))
    print(table(rows))
    if given.write:
        text = ADR.read_text()
        new = re.sub(
            r"(## What was measured\n\n).*?(?=\n`torch.compile` spends)",
            lambda found: found.group(1) + table(rows),
            text,
            flags=re.DOTALL,
        )
        ADR.write_text(new)


if __name__ == "__main__":
    main()
