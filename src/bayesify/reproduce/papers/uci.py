"""Nine UCI regression tables in 20 standard splits: test log-likelihood and error.

Hernandez-Lobato and Adams (2015) set the protocol: one hidden layer of 50 ReLU units (protein:
100), random splits into 90 % and 10 % (protein: 5 of them), inputs and targets standardised by
the training part. The settings are the same for all nine tables. They were chosen on parts of
the training parts, without any test part; see docs/reproductions.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    DeepEnsemble,
    Gaussian,
    GaussianLikelihood,
    LocalReparameterization,
    fit_replicas,
)
from bayesify.datasets import Passes, Split, TensorLoader, load_regression, standard_splits
from bayesify.datasets.regression import RegressionData
from bayesify.distributions.softplus import inverse_softplus
from bayesify.module.networks import mlp
from bayesify.noise.keys import Stream, derived_seed
from bayesify.prediction import GaussianPredictive
from bayesify.reproduce.harness.experiment import Context, EpochProgress, Experiment, Job, Result
from bayesify.reproduce.harness.markdown import table_head
from bayesify.training.convergence import STD_RESIDUAL_LIMIT
from bayesify.training.schedules import cosine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "EXPERIMENT",
    "PROTOCOL",
    "REPORTED",
    "Standardised",
    "evaluate",
    "prior_by_inputs",
    "standardised",
    "train",
    "validation_splits",
]

#: The settings of all nine tables, for standardised inputs and targets.
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
_NAMES = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")


def _by_table(*values: float) -> dict[str, float]:
    return dict(zip(_NAMES, values, strict=True))


#: Means over the standard splits of the nine tables: test nll in nats, test RMSE. Graves VI and
#: PBP from Hernandez-Lobato and Adams (2015), MC dropout from Mukhoti et al. (2018), the ensemble
#: from Lakshminarayanan et al. (2017), MCVI and DVI from Wu et al. (2019).
REPORTED: dict[str, dict[str, dict[str, float]]] = {
    "nll": {
        "Graves VI": _by_table(2.90, 3.39, 2.39, -0.90, -3.73, 2.89, 2.99, 0.98, 3.43),
        "PBP": _by_table(2.57, 3.16, 2.04, -0.90, -3.73, 2.84, 2.97, 0.97, 1.63),
        "MC dropout": _by_table(2.40, 2.93, 1.21, -1.14, -4.45, 2.80, 2.87, 0.93, 1.25),
        "ensemble of 5": _by_table(2.41, 3.06, 1.38, -1.20, -5.63, 2.79, 2.83, 0.94, 1.18),
        "MCVI": _by_table(2.46, 3.07, 1.03, -1.14, -5.94, 2.80, 2.87, 0.92, 0.68),
        "DVI": _by_table(2.41, 3.06, 1.01, -1.13, -6.29, 2.80, 2.85, 0.90, 0.47),
    },
    "rmse": {
        "PBP": _by_table(3.01, 5.67, 1.80, 0.10, 0.01, 4.12, 4.73, 0.64, 1.02),
        "MC dropout": _by_table(2.90, 4.82, 0.54, 0.079, 0.0007, 4.01, 4.27, 0.62, 0.67),
    },
}
_BEATEN = ("Graves VI", "PBP")
_MATCHED = "MCVI"

_QUICK = {"steps": 300, "test_samples": 50}
_STEPS_AN_EPOCH = 100

#: By table: hidden units, splits, seconds on one core.
_TABLES = {
    "boston": (50, 20, 200.0),
    "concrete": (50, 20, 200.0),
    "energy": (50, 20, 200.0),
    "kin8nm": (50, 20, 200.0),
    "naval": (50, 20, 200.0),
    "power": (50, 20, 200.0),
    "protein": (100, 5, 120.0),
    "wine": (50, 20, 200.0),
    "yacht": (50, 20, 200.0),
}


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return a job for each table, which trains the networks of all its splits at once."""
    made = []
    for seed in seeds:
        for name, (hidden, splits, seconds) in _TABLES.items():
            config = {"dataset": name, "hidden": hidden, "splits": splits, **PROTOCOL}
            if quick:
                if name not in ("energy", "yacht"):
                    continue
                config |= {"splits": 2, **_QUICK}
                seconds = 10.0
            made.append(Job(name, seed, config, seconds, (name,)))
    return made


def run(job: Job, context: Context) -> dict[str, Any]:
    """Train on every split of one table, and measure on the test parts."""
    config = job.config
    data = load_regression(config["dataset"], context.data_dir, progress=context.on_download)
    splits = standard_splits(len(data.targets), config["splits"])
    table = standardised(data, splits)
    networks, last_rows = train(table, config, job.seed, context)
    metrics = evaluate(networks, table, config["test_samples"])
    return {
        "test_nll": metrics["nll"],
        "test_rmse": metrics["rmse"],
        "test_coverage_95": metrics["coverage_95"],
        "num_train": len(splits[0].train),
        "num_test": len(splits[0].test),
        "train_nll_standardised": mean(row["nll"] for row in last_rows),
        "kl_nats": mean(row["kl"] for row in last_rows),
        "std_residual": mean(row["std_residual"] for row in last_rows),
    }


class Standardised(NamedTuple):
    """K splits of one table, side by side; inputs and targets in standard units."""

    #: (N, K, d), (N, K), (M, K, d): example n of split k is row n of that split's own part.
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    #: (M, K) float64, in the units of the target.
    test_targets: Tensor
    #: (K,) float64: mean and standard deviation of the training targets.
    shift: Tensor
    scale: Tensor


def validation_splits(splits: Sequence[Split]) -> list[Split]:
    """Split each training part: its last tenth, in the order of the split, becomes ``test``.

    Settings are chosen with these splits; the real test parts are in neither part.

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
    """Standardise every split by the statistics of its own training part.

    A feature that is constant in a training part becomes 0 there.
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
        test_targets,
        shift,
        scale,
    )


def heteroscedastic_network(num_features: int, config: Any, seed: int) -> BayesianModule:
    """Make a network whose noise depends on the inputs."""
    net = mlp(num_features, (config["hidden"],), 2, seed=seed)
    _start_noise_at_one(net[-1])
    return BayesianModule(
        net,
        likelihood=GaussianLikelihood(input_dependent=True),
        prior=prior_by_inputs(num_features, config),
        init_std=config["init_std"],
        estimator=LocalReparameterization(),
        seed=seed,
    )


def prior_by_inputs(num_features: int, config: Any) -> ByGroup:
    """Return the prior of one hidden layer: ``prior_gain`` / sqrt(inputs) for the weights' std."""
    gain = config["prior_gain"]
    return ByGroup(
        {
            "0.weight": Gaussian(gain / num_features**0.5),
            "2.weight": Gaussian(gain / config["hidden"] ** 0.5),
            "*": Gaussian(1.0),
        }
    )


def train(
    table: Standardised,
    config: Any,
    seed: int,
    context: Context,
    network_of: Callable[[int, Any, int], BayesianModule] = heteroscedastic_network,
) -> tuple[list[BayesianModule], list[Any]]:
    """Train one network for each split, all at once.

    Args:
        table: the splits.
        config: as ``PROTOCOL``.
        seed: of the networks and of the order of the rows.
        context: the surroundings of the job.
        network_of: makes a network from the number of features, ``config`` and a seed.

    Returns:
        The networks, and the last row of each history.
    """
    num_data, num_splits, num_features = table.train_inputs.shape
    networks = [
        network_of(num_features, config, derived_seed(seed, Stream.INITIALIZATION, split))
        for split in range(num_splits)
    ]
    batch = min(config["batch_size"], num_data)
    loaders = [
        TensorLoader(
            table.train_inputs[:, split].contiguous(),
            table.train_targets[:, split].contiguous(),
            batch,
            shuffle=batch < num_data,
            seed=seed,
        )
        for split in range(num_splits)
    ]
    passes = [Passes(loader, max(1, _STEPS_AN_EPOCH // len(loader))) for loader in loaders]
    epochs = max(1, round(config["steps"] / len(passes[0])))
    histories = fit_replicas(
        [ELBO(bnn, num_data=num_data) for bnn in networks],
        passes,
        epochs=epochs,
        optimizer=partial(torch.optim.Adam, lr=config["lr"], fused=True),
        scheduler=cosine,
        kl_warmup_epochs=config["kl_warmup"] * epochs,
        checkpoint_dir=context.work,
        resume=True,
        callback=EpochProgress(context, epochs),
    )
    return networks, [history[-1] for history in histories]


def evaluate(
    networks: Sequence[BayesianModule | DeepEnsemble], table: Standardised, num_samples: int
) -> dict[str, list[float]]:
    """Measure nll in nats, error and coverage of 95 % intervals by split, in the target's units."""
    found: dict[str, list[float]] = {"nll": [], "rmse": [], "coverage_95": []}
    for k, targets in enumerate(table.test_targets.unbind(1)):
        predicted = networks[k].predict(table.test_inputs[:, k], num_samples)
        assert isinstance(predicted, GaussianPredictive)
        # In double precision, because some targets vary in their third digit only.
        one = GaussianPredictive(predicted.means.double(), predicted.noise_std.double()).rescaled(
            table.shift[k], table.scale[k]
        )
        below = one.cdf(targets)
        found["nll"].append(-float(one.log_prob(targets).mean()))
        found["rmse"].append(float((one.mean - targets).square().mean().sqrt()))
        found["coverage_95"].append(float(((below > 0.025) & (below < 0.975)).double().mean()))
    return found


def table(results: Sequence[Result]) -> str:
    """Return the tables of test nll and error next to the literature's, and what qualifies them."""
    means = table_of_means(_pooled(results, "test_nll"), _pooled(results, "test_rmse"))
    return f"{means}\n{_qualifications(results)}"


def _qualifications(results: Sequence[Result]) -> str:
    """Return the coverage of intervals, and whether the standard deviations have converged."""
    coverage = _pooled(results, "test_coverage_95")
    residual = {
        name: mean(
            result["metrics"]["std_residual"]
            for result in results
            if result["config"]["dataset"] == name
        )
        for name in coverage
    }
    covered = [f"{100 * value:.1f} +- {100 * error:.1f}" for value, error in coverage.values()]
    beyond = [name for name in residual if abs(residual[name]) > STD_RESIDUAL_LIMIT]
    lines = [
        "Coverage of our 95 % intervals, in percent; and the derivative of the free energy in log "
        "std, averaged over all weights, in nats a weight (0 at the optimum).",
        "",
        *table_head(f"| | {' | '.join(coverage)} |"),
        f"| coverage | {' | '.join(covered)} |",
        f"| derivative | {' | '.join(f'{value:+.2f}' for value in residual.values())} |",
    ]
    if beyond:
        lines += [
            "",
            f"The standard deviations have not converged on: {', '.join(beyond)} (beyond "
            f"{STD_RESIDUAL_LIMIT:g}).",
        ]
    return "\n".join(lines) + "\n"


def table_of_means(
    nll: Mapping[str, tuple[float, float]], rmse: Mapping[str, tuple[float, float]]
) -> str:
    """Return Markdown of test nll and RMSE by table, ours with the standard error over the splits.

    Example:
        >>> print(table_of_means({"yacht": (0.5, 0.1)}, {"yacht": (1.0, 0.2)}).splitlines()[-1])
        | **bayesify** | 1.00 +- 0.20 |
    """
    lines = ["Test nll, nats per example; less is better.", "", *_grid(REPORTED["nll"], nll), ""]
    below_all = [
        name for name in nll if all(nll[name][0] < REPORTED["nll"][m][name] for m in _BEATEN)
    ]
    other = REPORTED["nll"][_MATCHED]
    lower = [name for name in nll if nll[name][0] < other[name]]
    level = [name for name in nll if nll[name][0] <= other[name] + nll[name][1]]
    lines += [
        f"Lower than {' and '.join(_BEATEN)}: {len(below_all)} of {len(nll)}. No higher than "
        f"{_MATCHED} by more than our standard error: {len(level)}; lower: {len(lower)}.",
        "",
        "Test RMSE, in units of the target.",
        "",
        *_grid(REPORTED["rmse"], rmse),
    ]
    return "\n".join(lines) + "\n"


def _grid(
    reported: Mapping[str, Mapping[str, float]], ours: Mapping[str, tuple[float, float]]
) -> list[str]:
    lines = table_head(f"| | {' | '.join(ours)} |")
    for method, numbers in reported.items():
        lines.append(f"| {method} | {' | '.join(f'{_quoted(numbers[name])}' for name in ours)} |")
    own = [f"{value:{_form(value)}} +- {error:{_form(value)}}" for value, error in ours.values()]
    return [*lines, f"| **bayesify** | {' | '.join(own)} |"]


def _quoted(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:g}"


def _form(value: float) -> str:
    return ".2f" if abs(value) >= 0.3 else ".3f" if abs(value) >= 0.03 else ".5f"


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the test nll next to the literature's."""
    from bayesify.plots.compared import comparison

    return {"uci": comparison(REPORTED["nll"], _pooled(results, "test_nll"))}


def _pooled(results: Sequence[Result], metric: str) -> dict[str, tuple[float, float]]:
    """Return mean and standard error over splits by table; each split is averaged over seeds."""
    found = {}
    for name in _TABLES:
        of_table = [
            result["metrics"][metric] for result in results if result["config"]["dataset"] == name
        ]
        if of_table:
            by_split = [mean(values) for values in zip(*of_table, strict=True)]
            found[name] = mean(by_split), stdev(by_split) / len(by_split) ** 0.5
    return found


def _start_noise_at_one(output: Any) -> None:
    # 1 is the std of the standardised targets; the noise starts nearly equal for all examples.
    with torch.no_grad():
        output.weight[1].mul_(0.1)
        output.bias[1] = inverse_softplus(torch.tensor(1.0))


EXPERIMENT = Experiment(
    name="uci",
    source="Hernandez-Lobato and Adams 2015; Wu et al. 2019, tables of test log-likelihood",
    reported="nine tables, test nll and RMSE of Graves VI, PBP, MC dropout, ensembles, MCVI, DVI",
    seeds=(0,),
    memory_mb=600,
    jobs=jobs,
    run=run,
    table=table,
    figures=figures,
)
