"""Compare priors by the error that is left after pruning by signal-to-noise.

python benchmarks/sparsity_priors.py [NAME ...] [--epochs 25] [--seeds 3]

It takes about an hour on one core, and resumes.

A 784-300-100-10 network is trained on the first 55,000 training images of MNIST with each prior and
otherwise equal settings. Fractions of its weights are then removed at once, without further
training. Measured are the errors of the mean weights on the other 5,000 images, and the inputs and
hidden units that are left. No test image is used. The results are in results/sparsity-priors.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from records import RESULTS, require_clean_tree, resumed, store_rows
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import bayesify as bf
from bayesify.datasets import TensorLoader, load_images
from bayesify.io import atomic_write
from bayesify.reproduce.harness.seed_statistics import mean_and_error

EXPERIMENT = "sparsity-priors"
FRACTIONS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.97, 0.98, 0.985, 0.99)
TRAINED = 55_000
BATCH = 128
PRIORS: dict[str, tuple[str, Callable[[], bf.Prior]]] = {
    "gaussian": ("N(0, 0.1^2)", lambda: bf.Gaussian(0.1)),
    "empirical": ("EmpiricalGaussian()", bf.EmpiricalGaussian),
    "scale-mixture": ("ScaleMixture(0.1, 0.5, 0.02)", lambda: bf.ScaleMixture(0.1, 0.5, 0.02)),
    "log-uniform": ("LogUniform()", bf.LogUniform),
    "grouped-weight": ('GroupedGaussian("weight")', lambda: bf.GroupedGaussian("weight")),
    "grouped-input": ('GroupedGaussian("input")', lambda: bf.GroupedGaussian("input")),
    "grouped-output": ('GroupedGaussian("output")', lambda: bf.GroupedGaussian("output")),
    "spike-and-slab": ("SpikeAndSlab(0.1, 0.5, 0.02)", lambda: bf.SpikeAndSlab(0.1, 0.5, 0.02)),
}


def train(prior: bf.Prior, epochs: int, seed: int) -> tuple[bf.BayesianModule, dict[str, Any]]:
    """Return the trained network and the last row of its history."""
    data = load_images("mnist")
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
    )
    bnn = bf.BayesianModule(
        net, prior=prior, estimator=bf.LocalReparameterization(), init_std=0.02, seed=seed
    )
    loader = TensorLoader(
        data.train_inputs[:TRAINED].flatten(1), data.train_targets[:TRAINED], BATCH, seed=seed
    )
    history = bf.fit(
        bf.ELBO(bnn, num_data=TRAINED),
        loader,
        epochs=epochs,
        optimizer=lambda groups: torch.optim.Adam(groups, lr=2e-3),
        rho_lr_scale=5.0,
        kl_warmup_epochs=epochs // 2,
        scheduler=CosineAnnealingLR,
    )
    return bnn, history[-1]


def units_left(bnn: bf.BayesianModule) -> list[int]:
    """Count the pixels and hidden units with a weight into the next layer and one from the last."""
    weights = bnn.layout.unflatten(bnn.posterior.masked_mean.detach())
    matrices = [weight != 0.0 for weight in weights.values() if weight.dim() == 2]
    used = torch.ones(matrices[-1].shape[0], dtype=torch.bool)
    alive = []
    for matrix in reversed(matrices):  # used by the outputs
        used = (matrix & used[:, None]).any(dim=0)
        alive.append(used)
    alive.reverse()
    reached = alive[0]
    counts = [int(reached.sum())]
    for matrix, used in zip(matrices[:-1], alive[1:], strict=True):  # and reached by the inputs
        reached = (matrix & reached).any(dim=1) & used
        counts.append(int(reached.sum()))
    return counts


def error(bnn: bf.BayesianModule, inputs: Tensor, targets: Tensor) -> float:
    """Percentage of wrong classes of the mean weights."""
    with torch.no_grad():
        wrong = bnn.mean_outputs(inputs).argmax(-1) != targets
    return float(100.0 * wrong.double().mean())


def measure(name: str, epochs: int, seed: int) -> dict[str, Any]:
    """Train with a prior and prune by each fraction."""
    started = time.perf_counter()
    bnn, last = train(PRIORS[name][1](), epochs, seed)
    data = load_images("mnist")
    inputs, targets = data.train_inputs[TRAINED:].flatten(1), data.train_targets[TRAINED:]
    pruned = []
    for fraction in FRACTIONS:
        small = bf.prune(bnn, fraction)
        pruned.append(
            {
                "fraction": fraction,
                "error": error(small, inputs, targets),
                "units": units_left(small),
            }
        )
    return {
        "seed": seed,
        "nll": last["nll"],
        "kl_nats": last["kl"],
        "is_proper": bnn.weight_prior.is_proper,
        "std_residual_worst": last["std_residual_worst"],
        "pruned": pruned,
        "seconds": time.perf_counter() - started,
    }


def table() -> str:
    """Tabulate the stored results as Markdown: mean and standard error over the seeds."""
    shown = (0.0, 0.9, 0.95, 0.98, 0.99)
    lines = [
        "Error in percent of the mean weights of 784-300-100-10 on 5,000 training images held out, "
        "weights removed in one shot by signal-to-noise ratio; mean +- standard error over the "
        "seeds.",
        "",
        "| prior | seeds | "
        + " | ".join(f"error, {100 * f:g} % removed" for f in shown)
        + " | units left at 95 % |",
        "|---" * (len(shown) + 3) + "|",
    ]
    for name, (label, _) in PRIORS.items():
        path = RESULTS / EXPERIMENT / f"{name}.json"
        if not path.exists():
            continue
        rows = json.loads(path.read_text(encoding="utf-8"))["metrics"]["rows"]
        at = {
            fraction: [p for row in rows for p in row["pruned"] if p["fraction"] == fraction]
            for fraction in shown
        }
        cells = [mean_and_error([p["error"] for p in at[fraction]], 2) for fraction in shown]
        units = [round(fmean(n)) for n in zip(*(p["units"] for p in at[0.95]), strict=True)]
        cells = [str(len(rows)), *cells, "-".join(map(str, units))]
        lines.append(f"| `{label}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what is not stored, or write the table."""
    require_clean_tree()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PRIORS))
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in PRIORS]:
        parser.error(f"NAME must be one of {', '.join(PRIORS)}, got {unknown[0]}")
    torch.set_num_threads(1)
    for name in options.names or PRIORS:
        document = resumed(EXPERIMENT, name, {"epochs": options.epochs})
        done = {row["seed"] for row in document["metrics"]["rows"]}
        if document["config"]["epochs"] != options.epochs:
            parser.error(f"{name} is stored with {document['config']['epochs']} epochs")
        for seed in sorted(set(range(options.seeds)) - done):
            row = measure(name, options.epochs, seed)
            store_rows(document, [row], row["seconds"])
            print(name, seed, [(p["fraction"], p["error"], p["units"]) for p in row["pruned"]])
    atomic_write(RESULTS / EXPERIMENT / "table.md", table())
    print(table())


if __name__ == "__main__":
    main()
