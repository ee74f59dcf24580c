"""Compare fresh noise at each position of a convolution with one weight for all positions.

bayesify train mnist --net lenet5 --estimator flipout --epochs 20 --out runs/lenet5-flipout
python benchmarks/per_position.py runs/lenet5-flipout

The trained means get one std for all weights. Flipout, local reparametrisation as it is by default
and with per_position=True then give the expected nll of test images and its gradient. The script
writes every number as JSON and a Markdown table to results/per-position.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from records import require_clean_tree, write
from rich.progress import track
from torch import Tensor

import bayesify as bf
from bayesify.app.runs import Run
from bayesify.distributions.softplus import inverse_softplus
from bayesify.noise.keys import NoiseKey, Stream

STDS = (0.02, 0.05, 0.1)
ESTIMATORS: dict[str, bf.Estimator] = {
    "Flipout": bf.Flipout(),
    "local": bf.LocalReparameterization(),
    "local, per position": bf.LocalReparameterization(per_position=True),
}


def measure(
    bnn: bf.BayesianModule, inputs: Tensor, targets: Tensor, passes: int
) -> tuple[float, float, Tensor]:
    """Return the expected nll, its standard error, and its mean gradient in mean and rho."""
    theta = [bnn.posterior.mean, bnn.posterior.get_parameter("rho")]
    values, gradient = [], torch.zeros(2 * bnn.layout.num_weights)
    for step in range(passes):
        outputs, _ = bnn.sample_outputs(inputs, NoiseKey(0, Stream.TRAINING, step), range(1))
        nll = -bnn.likelihood.log_prob(outputs, targets).mean()
        gradient += torch.cat(torch.autograd.grad(nll, theta)) / passes
        values.append(float(nll.detach()))
    nlls = torch.tensor(values, dtype=torch.float64)
    return float(nlls.mean()), float(nlls.std()) / math.sqrt(passes), gradient


def table(rows: list[dict[str, Any]]) -> str:
    """Format the nll by estimator, and the agreement of the gradients with Flipout's."""
    lines = [
        "| std | " + " | ".join(f"nll, {name}" for name in ESTIMATORS) + " | cosine of the "
        "gradients, local | per position | their length, local | per position |",
        "|---" * (5 + len(ESTIMATORS)) + "|",
    ]
    for row in rows:
        nlls = [f"{row[name]['nll']:.4f} +- {row[name]['error']:.4f}" for name in ESTIMATORS]
        others = [row[name] for name in list(ESTIMATORS)[1:]]
        cosines = [f"{other['cosine']:.3f}" for other in others]
        lengths = [f"{other['length']:.2f}" for other in others]
        lines.append(f"| {row['std']:g} | " + " | ".join([*nlls, *cosines, *lengths]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the results."""
    require_clean_tree()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the folder of a finished run of lenet5")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--passes", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    run = Run.open(options.run)
    data, bnn = run.load_data(), run.load_module()
    inputs, targets = data.test_inputs[: options.images], data.test_targets[: options.images]
    rows = []
    for std in track(STDS, "measuring"):
        with torch.no_grad():
            bnn.posterior.get_parameter("rho").fill_(inverse_softplus(torch.tensor(std)))
        row: dict[str, Any] = {"std": std}
        gradients = {}
        for name, estimator in ESTIMATORS.items():
            bnn.estimator = estimator
            nll, error, gradients[name] = measure(bnn, inputs, targets, options.passes)
            exact = gradients["Flipout"]
            row[name] = {
                "nll": nll,
                "error": error,
                "cosine": float(torch.cosine_similarity(gradients[name], exact, dim=0)),
                "length": float(gradients[name].norm() / exact.norm()),
            }
        rows.append(row)
    config = {"images": options.images, "passes": options.passes}
    write("per-position", run, config, rows, table(rows), time.perf_counter() - started)


if __name__ == "__main__":
    main()
