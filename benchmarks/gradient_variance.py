"""Measure the variance of each estimator's gradient.

bayesify train mnist --out runs/first
python benchmarks/gradient_variance.py runs/first

The run's network is measured at initialisation and after training, on one minibatch. The variance
is that of the gradient of the nll over the weights' noise, summed over all coordinates of mean and
of rho. The script writes every number as JSON and a Markdown table to results/gradient-variance.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from records import require_clean_tree, write
from rich.progress import track

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


def table(rows: list[dict[str, Any]]) -> str:
    """Format variances relative to weight sampling's."""
    states = list(rows[0]["variance"])
    lines = [
        "| estimator | "
        + " | ".join(f"{part}, {state}" for state in states for part in ("mean", "rho"))
        + " |",
        "|---" * (1 + 2 * len(states)) + "|",
    ]
    for row in rows:
        cells = [
            f"{row['variance'][state][part] / rows[0]['variance'][state][part]:.3g}"
            for state in states
            for part in ("mean", "rho")
        ]
        lines.append(f"| {row['estimator']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the results."""
    require_clean_tree()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    run = Run.open(options.run)
    data = run.load_data()
    inputs = data.train_inputs[: options.batch_size]
    targets = data.train_targets[: options.batch_size]
    states = {"at initialisation": run.make_module(), "after training": run.load_module()}
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
            }
        )
    config = {"batch_size": options.batch_size, "repeats": options.repeats}
    write("gradient-variance", run, config, rows, table(rows), time.perf_counter() - started)


if __name__ == "__main__":
    main()
