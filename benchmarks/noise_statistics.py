"""Test that the noise of the compiled backend is standard normal and independent.

python benchmarks/noise_statistics.py --numbers 1000000000
python benchmarks/noise_statistics.py --words | dieharder -a -g 200

Four neighbouring seeds, step after step, in float32 from the compiled kernel: moments, tails,
Kolmogorov-Smirnov, and correlations within a vector, between the halves of a block, between steps
and between seeds. If the noise is standard normal and independent, all tests pass with probability
0.999 at least (Bonferroni). The script also checks that compiled code of three kinds gives the same
numbers, and writes results/noise/statistics.json.

With ``--words`` it writes the generator's 32-bit words to the standard output instead, without end,
for test batteries of others: those of the first seed's steps, one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from scipy import stats
from torch import Tensor, nn

from bayesify import ELBO, BayesianModule, GaussianLikelihood
from bayesify.app.runs.environment import hardware, versions
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.noise.threefry import BLOCK, counter_key, normals, threefry
from bayesify.training.backends import CompiledBackend, StepOptions
from bayesify.training.kernel.compiler import find_compiler

RESULTS = Path(__file__).resolve().parents[1] / "results"
FALSE_ALARM = 1e-3
SEEDS = 4
LAGS = (1, 2, BLOCK // 2, BLOCK)
#: Of the distribution function, for Kolmogorov-Smirnov: at their edges only, which lowers the
#: statistic by less than 1e-6.
BINS = 2**20
#: A standard deviation that softplus gives to the last bit, and by which division is exact.
SCALE = 64.0

Fill = Callable[[int], Tensor]


class Statistics:
    """Sums over vectors of numbers, for the tests."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._bins = torch.zeros(BINS, dtype=torch.int64)
        self._before: list[Tensor] = []
        self._total = 0

    def add(self, vectors: Iterable[Tensor]) -> None:
        """Add one step: a vector for each seed, whose length is a multiple of the block."""
        rows = [vector.double() for vector in vectors]
        for index, row in enumerate(rows):
            self._add_one(row)
            if index:
                self._correlate("neighbouring seeds", rows[index - 1], row)
            if self._before:
                self._correlate("consecutive steps", self._before[index], row)
        self._before = rows

    def p_values(self) -> dict[str, float]:
        """Return the two-sided p-value of each test."""
        found = {}
        for name, total in self._sums.items():
            found[name] = float(2.0 * stats.norm.sf(abs(total) / math.sqrt(self._counts[name])))
        for name, count in self._counts.items():
            if name.startswith("beyond"):
                chance = float(stats.norm.sf(float(name.split()[1])))
                found[name] = float(stats.binomtest(count, self._total, chance).pvalue)
        share = self._bins.cumsum(0).double() / self._total
        edges = torch.arange(1, BINS + 1, dtype=torch.float64) / BINS
        worst = float((share - edges).abs().max())
        found["Kolmogorov-Smirnov"] = float(stats.kstwobign.sf(worst * math.sqrt(self._total)))
        return found

    def _add_one(self, row: Tensor) -> None:
        self._total += row.numel()
        squared = row * row
        # Each of variance 1: Var(z^k) = E z^2k - (E z^k)^2.
        self._add("mean", row)
        self._add("variance", (squared - 1.0) / math.sqrt(2.0))
        self._add("third moment", row * squared / math.sqrt(15.0))
        self._add("fourth moment", (squared * squared - 3.0) / math.sqrt(96.0))
        for limit in (3, 4, 5):
            self._count(f"beyond {limit} above", int((row > limit).sum()))
            self._count(f"beyond {limit} below", int((row < -limit).sum()))
        places = (torch.special.ndtr(row) * BINS).long().clamp_max(BINS - 1)
        self._bins += torch.bincount(places, minlength=BINS)
        for lag in LAGS:
            self._correlate(f"lag {lag}", row[:-lag], row[lag:])
        pairs = row.view(-1, 2, BLOCK // 2)
        self._correlate("cosines and sines", pairs[:, 0], pairs[:, 1])

    def _correlate(self, name: str, one: Tensor, two: Tensor) -> None:
        self._add(name, one * two)
        self._add(f"squares of {name}", (one * one - 1.0) * (two * two - 1.0) / 2.0)

    def _add(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(values.sum())
        self._count(name, values.numel())

    def _count(self, name: str, count: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + count


def rejected(p_values: dict[str, float]) -> dict[str, float]:
    """Return the tests that failed, at a family-wise error rate of ``FALSE_ALARM``."""
    # Written so that NaN fails too.
    return {n: p for n, p in p_values.items() if not p >= FALSE_ALARM / len(p_values)}


class Seen(nn.Module):
    """A network that records the weights with which it is run."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype))
        self.seen = torch.zeros(0)

    def forward(self, inputs: Tensor) -> Tensor:
        """Record the weights."""
        self.seen = self.weight.detach().clone()  # the step writes the next weights there
        return inputs * self.weight[:1]


def fused_filler(
    seed: int, size: int, dtype: torch.dtype = torch.float32, *, compiled: bool = True
) -> Fill:
    """Return the noise of a step of the compiled backend, to the last bit."""
    net, likelihood = Seen(size, dtype), GaussianLikelihood(1.0).to(dtype)
    bnn = BayesianModule(net, likelihood=likelihood, init_std=SCALE, seed=seed)
    elbo, row = ELBO(bnn, num_data=1), torch.zeros(1, 1, dtype=dtype)
    with torch.no_grad():
        bnn.posterior.get_parameter("rho").fill_(SCALE)
    backend = CompiledBackend(elbo, torch.optim.SGD(elbo.parameters(), lr=0.0), compiled=compiled)

    def fill(number: int) -> Tensor:
        elbo.step = number
        backend.step(row, row, StepOptions(batch_index=0))
        return bnn.net.seen / SCALE

    return fill


def plain_filler(seed: int, size: int, dtype: torch.dtype = torch.float32) -> Fill:
    """Return the noise of a step by PyTorch's operations."""
    key = counter_key(NoiseKey(seed, Stream.TRAINING, 0))
    return lambda step: normals(*key, step, size, dtype=dtype, device="cpu")


def differences(size: int) -> dict[str, float]:
    """Return the largest difference of compiled code's numbers from those of plain operations."""
    key, found = counter_key(NoiseKey(0, Stream.TRAINING, 0)), {}
    compiled = torch.compile(normals, fullgraph=True)
    for dtype in (torch.float32, torch.float64):
        name, expected = str(dtype).removeprefix("torch."), plain_filler(0, size, dtype)(3)
        step = torch.tensor(3, dtype=torch.int32)
        got = compiled(*key, step, size, dtype=dtype, device="cpu")
        found[f"torch.compile, {name}"] = float((got - expected).abs().max())
        if find_compiler() is not None:
            got = fused_filler(0, size, dtype)(3)
            found[f"C++, {name}"] = float((got - expected).abs().max())
    return found


def write_words(size: int, stream: BinaryIO) -> None:
    """Write the generator's words for ``size`` places, step after step, until the reader ends."""
    key = counter_key(NoiseKey(0, Stream.TRAINING, 0))
    place = torch.arange(size // 2, dtype=torch.int32)
    with contextlib.suppress(BrokenPipeError):
        for step in itertools.count():
            words = threefry(*key, place, torch.full_like(place, step))
            stream.write(torch.stack(words, dim=1).numpy().tobytes())


def main() -> None:
    """Draw, test, and write the results."""
    from records import commit, require_clean_tree  # the tests load this file from elsewhere

    require_clean_tree()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numbers", type=int, default=100_000_000, help="at least so many")
    parser.add_argument("--size", type=int, default=2**20, help="of a vector, in whole blocks")
    parser.add_argument("--words", action="store_true", help="write 32-bit words, test nothing")
    options = parser.parse_args()
    if options.size % BLOCK:
        parser.error(f"--size must be a multiple of {BLOCK}")
    torch.set_num_threads(1)
    if options.words:
        write_words(options.size, sys.stdout.buffer)
        return
    started = time.perf_counter()
    there_is_one = find_compiler() is not None
    filler, by = (fused_filler, "C++ kernel") if there_is_one else (plain_filler, "PyTorch")
    fillers = [filler(seed, options.size) for seed in range(SEEDS)]
    steps = max(2, -(-options.numbers // (SEEDS * options.size)))
    statistics = Statistics()
    for step in range(steps):
        statistics.add(fill(step) for fill in fillers)
    p_values = statistics.p_values()
    failed = rejected(p_values)
    metrics: dict[str, Any] = {
        "numbers": steps * SEEDS * options.size,
        "by": by,
        "p_values": p_values,
        "limit": FALSE_ALARM / len(p_values),
        "rejected": sorted(failed),
        "verdict": "rejected" if failed else "passed",
        "largest_difference_from_plain_operations": differences(10_000),
    }
    document = {
        "experiment": "noise",
        "quick": False,
        "config": {
            "numbers": options.numbers,
            "size": options.size,
            "seeds": SEEDS,
            "family_wise_error_rate": FALSE_ALARM,
        },
        "seed": 0,
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "metrics": metrics,
        "seconds": time.perf_counter() - started,
    }
    folder = RESULTS / "noise"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "statistics.json").write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(metrics, indent=2))


if __name__ == "__main__":
    main()
