"""The Straight Dope, "Bayes by Backprop from scratch": 2x400 units on MNIST, ten epochs.

Its rate of .001 is on the summed loss of 128 images, which is .128 on ours, their mean; its
standard deviations start at softplus(-3), its means from N(0, .1^2). It samples the KL, we take the
closed form, of the same value; the last minibatch of an epoch has 96 images, of which it takes the
sum, we the mean. Its accuracies are those of the mean weights.

The document describes two hidden layers, but its ``net`` stops one layer short: the second hidden
layer is made, sampled, priced by the KL and pruned, and never used. So every seed is trained twice,
``as-described`` and ``as-run``. The former is what this command trains, too::

    bayesify train mnist --prior-std 1 --optimizer sgd --lr 0.128 --batch-size 128
        --rho-lr-scale 1 --schedule constant --epochs 10 --kl-warmup 0
        --init-std 0.04858735 --mean-init-std 0.1 --kl closed --out DIR
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from bayesify.datasets import TensorLoader, load_images
from bayesify.experiments.cells import cell
from bayesify.experiments.experiment import Context, Experiment, Row, Unit
from bayesify.experiments.networks import settings_of
from bayesify.experiments.straight_dope import (
    TrainAccuracy,
    accuracy_figure,
    accuracy_table,
    measured,
    pruning_figure,
    pruning_table,
    weight_figure,
)
from bayesify.module import BayesianModule
from bayesify.networks import mlp
from bayesify.priors import Prior
from bayesify.pruning import prune
from bayesify.runs import RunConfig
from bayesify.runs.train import make_elbo, optimizer_factory
from bayesify.training import fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "REPORTED", "SkipsItsSecondLayer"]

_NAME = "straight-dope-scratch"

#: Of the document's one run: accuracies in percent, by epoch and by the share of weights removed,
#: and its moving average of the loss of a minibatch, in nats.
REPORTED: dict[str, Any] = {
    "test": [94.55, 95.93, 96.41, 96.84, 97.23, 97.33, 97.56, 97.49, 97.65, 97.75],
    "train": [94.5617, 96.2783, 96.9783, 97.53, 97.8633, 98.0483, 98.23, 98.4, 98.5883, 98.78],
    "pruned": {
        **{0.0: 97.75, 0.1: 97.77, 0.25: 97.79, 0.5: 97.56, 0.75: 96.02, 0.95: 72.59},
        **{0.99: 37.53, 1.0: 9.8},
    },
    "loss": 2582.93,
}
#: Options of ``bayesify train``.
SETTINGS: dict[str, Any] = {
    "hidden": [400, 400],
    "prior": "gaussian",
    "prior_std": 1.0,
    "init_std": math.log1p(math.exp(-3.0)),
    "mean_init_std": 0.1,
    "estimator": "sampling",
    "kl": "closed",
    "kl_warmup": 0.0,
    "optimizer": "sgd",
    "lr": 0.128,
    "rho_lr_scale": 1.0,
    "schedule": "constant",
    "batch_size": 128,
    "epochs": 10,
    "test_samples": 20,
}
_FRACTIONS = [0.1, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0]
_UNITS = {"as-described": "as described", "as-run": "as run"}
_UNUSED = ("net.2.weight", "net.2.bias")
_QUICK = {"hidden": [50, 50], "epochs": 2, "limit": 3000, "test_samples": 5}
_NUM_TEST = 10_000


class SkipsItsSecondLayer(nn.Module):
    """The network as the document runs it: the second hidden layer has weights, but no use.

    Args:
        net: two hidden layers of ReLU, as ``bayesify.networks.mlp`` makes them.

    Example:
        >>> import torch
        >>> net = SkipsItsSecondLayer(mlp(3, (4, 4), 2))
        >>> net(torch.zeros(5, 3)).shape, sum(p.numel() for p in net.parameters())
        (torch.Size([5, 2]), 46)
    """

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (N, k) of inputs (N, d)."""
        first, relu, _, _, output = self.net
        logits: Tensor = output(relu(first(inputs)))
        return logits


def units(seeds: Sequence[int], quick: bool) -> list[Unit]:
    """Two for each seed: the network as it is described, and as it is run."""
    settings, seconds = ({**SETTINGS, **_QUICK}, 3.0) if quick else (SETTINGS, 50.0)
    return [
        Unit(name, seed, {"fractions": _FRACTIONS, "settings": settings}, seconds, ("mnist",))
        for seed in seeds
        for name in _UNITS
    ]


def run(unit: Unit, context: Context) -> dict[str, Any]:
    """Train one network, and measure it epoch by epoch and pruned."""
    config = RunConfig.of("mnist", **settings_of(unit.config["settings"], seed=unit.seed))
    data = load_images("mnist", context.data_dir, limit=config.limit, progress=context.on_download)
    net = mlp(784, config.hidden, 10, init_std=config.mean_init_std, seed=unit.seed)
    bnn = BayesianModule(
        SkipsItsSecondLayer(net) if unit.name == "as-run" else net,
        prior=config.make_prior(),
        init_std=config.init_std,
        seed=unit.seed,
    )
    train_accuracy = TrainAccuracy(bnn, data, context, config.epochs)
    history = fit(
        make_elbo(bnn, config, data),
        TensorLoader(data.train_inputs, data.train_targets, config.batch_size, seed=unit.seed),
        TensorLoader(data.test_inputs, data.test_targets, 2048, shuffle=False),
        epochs=config.epochs,
        optimizer=optimizer_factory(config),
        rho_lr_scale=config.rho_lr_scale,
        kl_warmup_epochs=config.kl_warmup * config.epochs,
        checkpoint_dir=context.work,
        resume=True,
        callback=train_accuracy,
    )
    fractions = unit.config["fractions"]
    metrics = measured(
        *(bnn, data, history, train_accuracy.percent),
        fractions=fractions,
        test_samples=config.test_samples,
    )
    if unit.name == "as-run":
        for line in metrics["pruning"]:
            line["unused_left"] = _unused_left(bnn, line["fraction"])
    return metrics


def table(rows: Sequence[Row]) -> str:
    """Accuracy by epoch and pruned beside the document's, and whether that is reached."""
    parts = [
        "Accuracy of the mean weights in percent, mean +- standard error over seeds "
        f"({_counts(rows)}); the document's are of one run.",
        accuracy_table(rows, _UNITS, REPORTED),
        *(_verdict(rows, unit) for unit in _UNITS),
        "Test accuracy with a share of all weights removed, those of the lowest |mean| / std:",
        pruning_table(rows, _UNITS, REPORTED["pruned"]),
        _of_the_unused(rows),
        "After the last epoch; the first weight, whose posterior the document plots, is that of a "
        "pixel in the corner, black in every image, so that the prior alone moves it:",
        _last_table(rows),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Accuracy by epoch, pruning, and one weight's posterior."""
    return {
        f"{_NAME}-accuracy": accuracy_figure(rows, _UNITS, REPORTED),
        f"{_NAME}-pruning": pruning_figure(rows, _UNITS, REPORTED["pruned"]),
        f"{_NAME}-weight": weight_figure(rows, _UNITS, _prior_of),
    }


def _prior_of(row: Row) -> Prior:
    return RunConfig.of("mnist", **settings_of(row["config"]["settings"])).make_prior()


def _unused_left(bnn: BayesianModule, fraction: float) -> int:
    """How many weights of the layer that is not used survive pruning."""
    kept = prune(bnn, fraction).posterior.kept
    assert kept is not None
    return sum(int(kept[bnn.layout.slice_of(name)].sum()) for name in _UNUSED)


def _counts(rows: Sequence[Row]) -> str:
    counts = {name: sum(row["unit"] == unit for row in rows) for unit, name in _UNITS.items()}
    return ", ".join(f"{name}: {count}" for name, count in counts.items() if count)


def _verdict(rows: Sequence[Row], unit: str) -> str:
    """The headline: the last epoch's test accuracy against the document's."""
    found = [row["metrics"]["test_accuracy"] for row in rows if row["unit"] == unit]
    if not found:
        return ""
    theirs = REPORTED["test"][-1]
    ours = [accuracies[-1] for accuracies in found]
    # Of theirs, from the number of test images alone.
    error = math.sqrt(theirs * (100.0 - theirs) / _NUM_TEST)
    level = mean(ours)
    word = "beaten" if level > theirs else "matched" if level >= theirs - error else "not reached"
    if word == "matched":
        word = f"matched within the {error:.2f} that {_NUM_TEST:,} test images leave open"
    return (
        f"**The network {_UNITS[unit]}: {cell(ours, 2)} % after {len(found[0])} epochs (seeds: "
        f"{len(ours)}) against {theirs} % reported: {word}.**"
    )


def _of_the_unused(rows: Sequence[Row]) -> str:
    """What the layer that is not used has to do with the document's pruned accuracies."""
    far = {unit: _distance(rows, unit) for unit in _UNITS}
    distances = [f"{far[unit]:.1f} points {_UNITS[unit]}" for unit in _UNITS if far[unit] >= 0.0]
    said = f"Pruned, ours are from the reported on average {' and '.join(distances)}."
    lines = [line for row in rows if row["unit"] == "as-run" for line in row["metrics"]["pruning"]]
    if not lines:
        return said
    share = {
        fraction: mean(
            line["unused_left"] / line["weights_left"]
            for line in lines
            if line["fraction"] == fraction
        )
        for fraction in (0.0, 0.95)
    }
    return (
        f"{said} As run, {lines[0]['unused_left']:,} of {lines[0]['weights_left']:,} weights, "
        f"{100 * share[0.0]:.0f} %, belong to the hidden layer that is not used, and of those left "
        f"when 95 % are removed {100 * share[0.95]:.0f} %: to remove them costs nothing, and to "
        "keep them helps nobody."
    )


def _distance(rows: Sequence[Row], unit: str) -> float:
    """From the reported pruned accuracies, in points, averaged over the shares; -1 if none."""
    found = [row["metrics"]["pruning"] for row in rows if row["unit"] == unit]
    gaps = []
    for lines in zip(*found, strict=True):
        if lines[0]["fraction"] == 1.0:
            continue  # nothing is left in any network
        ours = 100.0 - mean(line["error_mean_weights"] for line in lines)
        gaps.append(abs(ours - REPORTED["pruned"][lines[0]["fraction"]]))
    return mean(gaps) if gaps else -1.0


def _last_table(rows: Sequence[Row]) -> str:
    found = {
        name: [row["metrics"] for row in rows if row["unit"] == unit]
        for unit, name in _UNITS.items()
    }
    found = {name: metrics for name, metrics in found.items() if metrics}
    lines = [f"| | reported | {' | '.join(found)} |", "|---" * (2 + len(found)) + "|"]

    def line(label: str, value: Callable[[Any], float], digits: int, reported: str = "-") -> None:
        cells = [cell([value(metrics) for metrics in each], digits) for each in found.values()]
        lines.append(f"| {label} | {reported} | {' | '.join(cells)} |")

    batch = SETTINGS["batch_size"]
    line("loss of a minibatch, nats", lambda m: batch * m["loss"][-1], 1, f"{REPORTED['loss']:.1f}")
    line("KL, nats", lambda m: m["kl_nats"], 0)
    line("test nll of the average, nats", lambda m: m["test"]["nll"], 4)
    line("test error of the average, %", lambda m: m["test"]["error_predictive"], 2)
    line("the first weight's mean, its size", lambda m: abs(m["weight"]["mean"]), 3)
    line("the first weight's std", lambda m: m["weight"]["std"], 4)
    return "\n".join(lines)


EXPERIMENT = Experiment(
    name=_NAME,
    source='The Straight Dope, "Bayes by Backprop from scratch (NN, classification)"',
    reported="MNIST, test accuracy by epoch to 97.75 %; pruned 50 % 97.56, 95 % 72.59; a weight",
    seeds=(0, 1, 2, 3, 4),
    memory_mb=700,
    units=units,
    run=run,
    table=table,
    figures=figures,
)
