"""Measure the variance of each estimator's gradient, and the time of its step.

bayesify train mnist --out runs/first
python benchmarks/gradient_variance.py runs/first

The run's network is measured at initialisation and after training, on one minibatch. The variance
is that of the gradient of the nll over the weights' noise, summed over all coordinates of mean and
of rho. The script writes every number as JSON and a Markdown table to results/gradient-variance.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from records import require_clean_tree, write
from rich.progress import track
from torch import Tensor

import bayesify as bf
from bayesify.app.runs import Run
from bayesify.reproduce.papers.estimator_comparison import gradient_variance

#: Name, estimator, weight samples a step.
ESTIMATORS: list[tuple[str, bf.Estimator, int]] = [
    ("weight sampling", bf.WeightSampling(), 1),
    ("weight sampling, S = 2", bf.WeightSampling(), 2),
    ("weight sampling, antithetic pair", bf.WeightSampling(antithetic=True), 2),
    ("local reparametrisation", bf.LocalReparameterization(), 1),
    ("local reparametrisation, S = 2", bf.LocalReparameterization(), 2),
    ("local reparametrisation, antithetic pair", bf.LocalReparameterization(antithetic=True), 2),
    ("Flipout", bf.Flipout(), 1),
    ("Flipout, S = 2", bf.Flipout(), 2),
    ("Flipout, antithetic pair", bf.Flipout(antithetic=True), 2),
]


def stepper(net: torch.nn.Module, loss: Callable[[], Tensor]) -> Callable[[], float]:
    """Make a training step with Adam; calling it returns its seconds."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-9, fused=True)

    def step() -> float:
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        optimizer.step()
        return time.perf_counter() - started

    return step


def milliseconds(
    bnn: bf.BayesianModule, inputs: Tensor, targets: Tensor, rounds: int
) -> dict[str, float]:
    """Measure the median step time of each estimator and of the plain network, interleaved."""
    net = bnn.to_module()
    cross_entropy = torch.nn.functional.cross_entropy
    steps = {"plain network": stepper(net, lambda: cross_entropy(net(inputs), targets))}
    for name, estimator, samples in ESTIMATORS:
        own = copy.deepcopy(bnn)
        own.estimator = estimator
        elbo = bf.ELBO(own, num_data=60_000, num_samples=samples)
        steps[name] = stepper(elbo, lambda elbo=elbo: elbo(inputs, targets).loss)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in track(range(rounds), "timing"):
        for name, step in steps.items():
            times[name].append(1e3 * step())
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def table(rows: list[dict[str, Any]]) -> str:
    """Format variances relative to weight sampling's, times relative to the plain network's."""
    states = list(rows[0]["variance"])
    lines = [
        "| estimator | "
        + " | ".join(f"{part}, {state}" for state in states for part in ("mean", "rho"))
        + " | time of a step |",
        "|---" * (2 + 2 * len(states)) + "|",
    ]
    for row in rows:
        cells = [
            f"{row['variance'][state][part] / rows[0]['variance'][state][part]:.3g}"
            for state in states
            for part in ("mean", "rho")
        ]
        lines.append(f"| {row['estimator']} | {' | '.join(cells)} | {row['ratio']:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the results."""
    require_clean_tree()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    run = Run.open(options.run)
    data = run.load_data()
    inputs = data.train_inputs[: options.batch_size]
    targets = data.train_targets[: options.batch_size]
    states = {"at initialisation": run.make_module(), "after training": run.load_module()}
    times = milliseconds(states["at initialisation"], inputs, targets, options.rounds)
    rows: list[dict[str, Any]] = []
    for name, estimator, samples in track(ESTIMATORS, "gradients"):
        found = {}
        for state, bnn in states.items():
            bnn.estimator = estimator
            found[state] = gradient_variance(bnn, inputs, targets, options.repeats, samples)
        rows.append(
            {
                "estimator": name,
                "settings": repr(estimator),
                "samples": samples,
                "variance": found,
                "ms_median": times[name],
                "ratio": times[name] / times["plain network"],
            }
        )
    config = {
        "batch_size": options.batch_size,
        "repeats": options.repeats,
        "rounds": options.rounds,
        "plain_network_ms": times["plain network"],
    }
    write("gradient-variance", run, config, rows, table(rows), time.perf_counter() - started)


if __name__ == "__main__":
    main()
