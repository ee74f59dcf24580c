"""Nine tables of regression, in 20 standard splits: test likelihood and error.

Hernandez-Lobato and Adams (2015) set the protocol: one hidden layer of 50 ReLU units (protein:
100), random splits into 90 % and 10 % (protein: 5 of them), inputs and targets standardised by
the training part. The settings are the same for all nine tables. They were chosen on parts of
the training parts, by no test part; see docs/reproductions.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayesify import (
    ELBO,
    BayesianModule,
    ByGroup,
    Gaussian,
    GaussianLikelihood,
    LocalReparameterization,
    fit,
)
from bayesify.datasets import Passes, Split, TensorLoader, load_regression, standard_splits
from bayesify.datasets.regression import RegressionData
from bayesify.experiments.experiment import Context, Experiment, Progress, Row, Unit
from bayesify.experiments.reported import UCI
from bayesify.experiments.side_by_side import SideBySide
from bayesify.networks import mlp
from bayesify.noise import Stream, derived_seed
from bayesify.predictive import GaussianPredictive
from bayesify.softplus import inverse_softplus
from bayesify.training.schedules import cosine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "EXPERIMENT",
    "PROTOCOL",
    "Standardised",
    "evaluate",
    "standardised",
    "train",
    "validation_splits",
]

#: The settings of all nine tables. Rates and widths are those of standardised inputs and targets.
PROTOCOL: dict[str, Any] = {
    "estimator": "local reparametrisation, one sample a step",
    "noise": "input-dependent, at first 1",
    "prior": "Gaussian; std prior_gain / sqrt(inputs of the unit), of biases 1",
    "prior_gain": 4.0,
    "init_std": 0.03,
    "optimizer": "Adam, cosine to zero",
    "lr": 0.005,
    "steps": 8000,
    "batch_size": 256,
    "kl_warmup": 0.75,
    "test_samples": 500,
}
_QUICK = {"steps": 300, "test_samples": 50}
_STEPS_AN_EPOCH = 100

#: By table: hidden units, splits, seconds on one core.
_TABLES = {
    "boston": (50, 20, 120.0),
    "concrete": (50, 20, 120.0),
    "energy": (50, 20, 120.0),
    "kin8nm": (50, 20, 120.0),
    "naval": (50, 20, 120.0),
    "power": (50, 20, 120.0),
    "protein": (100, 5, 120.0),
    "wine": (50, 20, 120.0),
    "yacht": (50, 20, 120.0),
}


def units(seeds: Sequence[int], quick: bool) -> list[Unit]:
    """One for each table: the networks of all its splits are trained at once."""
    made = []
    for seed in seeds:
        for name, (hidden, splits, seconds) in _TABLES.items():
            config = {"dataset": name, "hidden": hidden, "splits": splits, **PROTOCOL}
            if quick:
                if name not in ("energy", "yacht"):
                    continue
                config |= {"splits": 2, **_QUICK}
                seconds = 10.0
            made.append(Unit(name, seed, config, seconds, (name,)))
    return made


def run(unit: Unit, context: Context) -> dict[str, Any]:
    """Train on every split of one table, and measure on its test part."""
    config = unit.config
    data = load_regression(config["dataset"], context.data_dir, progress=context.on_download)
    splits = standard_splits(len(data.targets), config["splits"])
    table = standardised(data, splits)
    bnn, history = train(table, config, unit.seed, context)
    metrics = evaluate(bnn, table, config["test_samples"])
    return {
        "test_nll": metrics["nll"],
        "test_rmse": metrics["rmse"],
        "test_coverage_95": metrics["coverage_95"],
        "num_train": len(splits[0].train),
        "num_test": len(splits[0].test),
        "train_nll_standardised": history["nll"] / config["splits"],
        "kl_nats": history["kl"] / config["splits"],
        "std_residual": history["std_residual"],
    }


class Standardised(NamedTuple):
    """K splits of one table, side by side; inputs and targets in standard units."""

    #: (N, K, d), (N, K), (M, K, d): datum n of split k is row n of its own training part.
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    #: (M, K) float64, in the target's own units.
    test_targets: Tensor
    #: (K,) float64: mean and standard deviation of the training targets.
    shift: Tensor
    scale: Tensor


def validation_splits(splits: Sequence[Split]) -> list[Split]:
    """Of each training part a tenth, its last rows in the order of the split, as ``test``.

    For choosing settings: the true test parts are in neither.

    Example:
        >>> [outer] = standard_splits(40, 1)
        >>> [inner] = validation_splits([outer])
        >>> len(inner.train), len(inner.test), set(inner.test) <= set(outer.train)
        (32, 4, True)
    """
    counts = [round(0.9 * len(train)) for train, _ in splits]
    return [
        Split(train[:count], train[count:])
        for (train, _), count in zip(splits, counts, strict=True)
    ]


def standardised(data: RegressionData, splits: Sequence[Split]) -> Standardised:
    """Every split, standardised by the statistics of its own training part.

    A feature that is constant in a training part is 0 there.
    """
    parts: list[tuple[Any, ...]] = []
    for train_part, test_part in splits:
        inputs, targets = data.inputs[train_part], data.targets[train_part]
        centre, spread = inputs.mean(0), inputs.std(0)
        # A constant column's std is 0 but for rounding.
        spread = np.where(spread > 1e-9 * np.abs(centre), spread, 1.0)
        shift, scale = targets.mean(), targets.std()
        parts.append(
            (
                (inputs - centre) / spread,
                (targets - shift) / scale,
                (data.inputs[test_part] - centre) / spread,
                data.targets[test_part],
                shift,
                scale,
            )
        )
    stacked = [torch.tensor(np.stack(each, -1)) for each in zip(*parts, strict=True)]
    train_inputs, train_targets, test_inputs, test_targets, shift, scale = stacked
    return Standardised(
        train_inputs.transpose(1, 2).float(),
        train_targets.float(),
        test_inputs.transpose(1, 2).float(),
        *(test_targets, shift, scale),
    )


def train(
    table: Standardised, config: Any, seed: int, context: Context
) -> tuple[BayesianModule, Any]:
    """The networks of all splits, and the last row of their common history."""
    num_data, num_splits, num_features = table.train_inputs.shape
    hidden = config["hidden"]
    nets = [
        mlp(num_features, (hidden,), 2, seed=derived_seed(seed, Stream.INITIALIZATION, split))
        for split in range(num_splits)
    ]
    for net in nets:
        _start_noise_at_one(net[-1])
    gain = config["prior_gain"]
    bnn = BayesianModule(
        SideBySide(nets),
        likelihood=GaussianLikelihood(input_dependent=True),
        prior=ByGroup(
            {
                "weight_0": Gaussian(gain / num_features**0.5),
                "weight_1": Gaussian(gain / hidden**0.5),
                "*": Gaussian(1.0),
            }
        ),
        init_std=config["init_std"],
        perturbation=LocalReparameterization(),
        seed=seed,
    )
    batch = min(config["batch_size"], num_data)
    loader = TensorLoader(
        table.train_inputs, table.train_targets, batch, shuffle=batch < num_data, seed=seed
    )
    passes = Passes(loader, max(1, _STEPS_AN_EPOCH // len(loader)))
    epochs = max(1, round(config["steps"] / len(passes)))
    history = fit(
        ELBO(bnn, num_data=num_data),
        passes,
        epochs=epochs,
        optimizer=partial(torch.optim.Adam, lr=config["lr"], fused=True),
        scheduler=cosine,
        kl_warmup_epochs=config["kl_warmup"] * epochs,
        checkpoint_dir=context.work,
        resume=True,
        callback=Progress(context, epochs),
    )
    return bnn, history[-1]


def evaluate(bnn: BayesianModule, table: Standardised, num_samples: int) -> dict[str, list[float]]:
    """By split: nll in nats, error and coverage of 95 % intervals, in the target's own units."""
    predicted = bnn.predict(table.test_inputs, num_samples)
    assert isinstance(predicted, GaussianPredictive)
    found: dict[str, list[float]] = {"nll": [], "rmse": [], "coverage_95": []}
    for k, targets in enumerate(table.test_targets.unbind(1)):
        # In double precision: some targets vary in their third digit only.
        one = GaussianPredictive(
            predicted.means[..., k].double(), predicted.noise_std[..., k].double()
        ).rescaled(table.shift[k], table.scale[k])
        below = one.cdf(targets)
        found["nll"].append(-float(one.log_prob(targets).mean()))
        found["rmse"].append(float((one.mean - targets).square().mean().sqrt()))
        found["coverage_95"].append(float(((below > 0.025) & (below < 0.975)).double().mean()))
    return found


def table(rows: Sequence[Row]) -> str:
    """Test nll and error beside the literature's, a line each."""
    from bayesify.experiments.reported import uci_table

    return uci_table(_pooled(rows, "test_nll"), _pooled(rows, "test_rmse"))


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Test nll beside the literature's."""
    from bayesify.plots.bands import comparison

    return {"uci": comparison(UCI["nll"], _pooled(rows, "test_nll"))}


def _pooled(rows: Sequence[Row], metric: str) -> dict[str, tuple[float, float]]:
    """By table: the mean over splits, of each the mean over seeds, and its standard error."""
    found = {}
    for name in _TABLES:
        of_table = [row["metrics"][metric] for row in rows if row["config"]["dataset"] == name]
        if of_table:
            by_split = [mean(values) for values in zip(*of_table, strict=True)]
            found[name] = mean(by_split), stdev(by_split) / len(by_split) ** 0.5
    return found


def _start_noise_at_one(output: Any) -> None:
    # The standard deviation of the targets themselves, and at first nearly the same for all.
    with torch.no_grad():
        output.weight[1].mul_(0.1)
        output.bias[1] = inverse_softplus(torch.tensor(1.0))


EXPERIMENT = Experiment(
    name="uci",
    source="Hernandez-Lobato and Adams 2015; Wu et al. 2019, tables of test log-likelihood",
    reported="nine tables, test nll and RMSE of Graves VI, PBP, MC dropout, ensembles, MCVI, DVI",
    seeds=(0,),
    memory_mb=600,
    units=units,
    run=run,
    table=table,
    figures=figures,
)
