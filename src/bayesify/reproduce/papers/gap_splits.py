"""Rows between the training rows: structured posteriors against the mean field on gap splits.

Foong et al. (2019) leave out the middle third of one feature at a time, and find that a mean field
is too sure there. The settings are those of the nine UCI tables, but for the noise, which has one
std for all rows, as in the paper, and for the estimator, weight sampling, under which all these
posteriors can be trained at once. No setting was chosen by any gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from torch import nn

from bayesify import (
    BayesianModule,
    DeepEnsemble,
    FullGaussian,
    GaussianLikelihood,
    LowRankGaussian,
    MatrixGaussian,
    MeanFieldGaussian,
    PosteriorFamily,
    WeightSampling,
)
from bayesify.datasets import gap_splits, load_regression
from bayesify.module.networks import mlp
from bayesify.noise.keys import Stream, derived_seed
from bayesify.reproduce.harness.experiment import Context, Experiment, Job, Result
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error
from bayesify.reproduce.papers import uci

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "METHODS"]

_HIDDEN, _MEMBERS = 50, 5
_PROTOCOL: dict[str, Any] = {
    **{key: value for key, value in uci.PROTOCOL.items() if key not in ("estimator", "noise")},
    "estimator": "weight sampling, one sample a step",
    "hidden": _HIDDEN,
    "noise": "one std for all rows, learned",
    "init_noise_std": 1.0,
}
_QUICK: dict[str, Any] = {"steps": 200, "test_samples": 50, "splits": 2}
_MEAN_FIELD, _MIXTURE = "mean field", "mixture of 5 mean fields"

#: The posterior of each method, or of each part of the mixture.
METHODS: Mapping[str, type[MeanFieldGaussian] | PosteriorFamily] = {
    _MEAN_FIELD: MeanFieldGaussian,
    _MIXTURE: MeanFieldGaussian,
    "low rank 10": LowRankGaussian(10),
    "by layer": MatrixGaussian(),
    "full covariance": FullGaussian(),
}
#: Seconds on one core, by table.
_SECONDS = {"energy": 150.0, "naval": 400.0}


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return a job for each table and method, which trains the networks of all splits at once."""
    made = []
    for seed in seeds:
        for dataset, seconds in _SECONDS.items():
            for method in METHODS:
                config = {"dataset": dataset, "method": method, **_PROTOCOL}
                if quick:
                    if dataset != "energy":
                        continue
                    config |= _QUICK
                name = f"{dataset}-{method.replace(' ', '-')}"
                made.append(Job(name, seed, config, 5.0 if quick else seconds, (dataset,)))
    return made


def run(job: Job, context: Context) -> dict[str, Any]:
    """Train on what each gap leaves, and measure in the gaps.

    Returns:
        ``nll`` (nats), ``rmse`` (unit of the target) and ``coverage_95`` of the test part, each by
        split; the number of training and of test rows.
    """
    config = job.config
    data = load_regression(config["dataset"], context.data_dir, progress=context.on_download)
    splits = gap_splits(data.inputs)[: config.get("splits")]
    table = uci.standardised(data, splits)
    count = _MEMBERS if config["method"] == _MIXTURE else 1
    trained = [
        uci.train(
            table,
            config,
            derived_seed(job.seed, Stream.INITIALIZATION, member),
            context.part(f"member-{member}", member, count),
            _network,
        )[0]
        for member in range(count)
    ]
    networks: list[Any] = trained[0]
    if count > 1:
        networks = [DeepEnsemble(of_split) for of_split in zip(*trained, strict=True)]
    return {
        **uci.evaluate(networks, table, config["test_samples"]),
        "num_train": len(table.train_inputs),
        "num_test": len(table.test_inputs),
    }


def _network(num_features: int, config: Mapping[str, Any], seed: int) -> BayesianModule:
    net = mlp(num_features, (config["hidden"],), 1, seed=seed)
    return BayesianModule(
        net.append(nn.Flatten(0)),  # (N,), as the targets
        likelihood=GaussianLikelihood(config["init_noise_std"], learn_std=True),
        prior=uci.prior_by_inputs(num_features, config),
        posterior=METHODS[config["method"]],
        init_std=config["init_std"],
        estimator=WeightSampling(),
        seed=seed,
    )


def table(results: Sequence[Result]) -> str:
    """Return a table for each data set: means over the gaps, and how many of them each wins."""
    parts = [
        "Test part: the middle third of one feature. Mean +- standard error over the features' "
        "splits, whose nll (nats) is dominated by the worst, and therefore the median too; in how "
        f"many splits the nll is lower than the {_MEAN_FIELD}'s; RMSE in the unit of the target; "
        "the share of 95 % intervals that hold the target, in percent."
    ]
    for dataset in _SECONDS:
        found = _by_method(results, dataset)
        if not found:
            continue
        rows = next(iter(found.values()))
        count = len(rows["nll"])
        parts.append(
            f"**{dataset}**, {count} split{'s' if count > 1 else ''}, {rows['num_train']:,} "
            f"training and {rows['num_test']:,} test rows"
        )
        heads = "nll", "median", "lower than the mean field's", "RMSE", "95 % intervals hold, %"
        lines = table_head(f"| | {' | '.join(heads)} |")
        for method, metrics in found.items():
            cells = [
                mean_and_error(metrics["nll"], 2),
                f"{median(metrics['nll']):.2f}",
                _wins(metrics["nll"], found.get(_MEAN_FIELD, metrics)["nll"], method),
                mean_and_error(metrics["rmse"], 2 if dataset == "energy" else 5),
                mean_and_error([100.0 * share for share in metrics["coverage_95"]], 1),
            ]
            lines.append(f"| {method} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _wins(nlls: Sequence[float], others: Sequence[float], method: str) -> str:
    if method == _MEAN_FIELD:
        return ""
    return f"{sum(a < b for a, b in zip(nlls, others, strict=True))} of {len(nlls)}"


def _by_method(results: Sequence[Result], dataset: str) -> dict[str, dict[str, Any]]:
    """Return the metrics of a data set by method; of several seeds, their means by split."""
    found: dict[str, dict[str, Any]] = {}
    for method in METHODS:
        metrics = [
            result["metrics"]
            for result in results
            if (result["config"]["dataset"], result["config"]["method"]) == (dataset, method)
        ]
        if metrics:
            found[method] = {
                **metrics[0],
                **{
                    key: [
                        mean(of_split) for of_split in zip(*(m[key] for m in metrics), strict=True)
                    ]
                    for key in ("nll", "rmse", "coverage_95")
                },
            }
    return found


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the test nll of each split."""
    from bayesify.plots.compared import Curve, curves_compared

    panels = {
        dataset: [
            Curve(method, range(1, len(metrics["nll"]) + 1), [metrics["nll"]], points=True)
            for method, metrics in _by_method(results, dataset).items()
        ]
        for dataset in _SECONDS
    }
    drawn = {dataset: curves for dataset, curves in panels.items() if curves}
    if not drawn:
        return {}
    return {
        "gap-splits": curves_compared(
            drawn, xlabel="feature whose middle is left out", ylabel="test nll (nats)"
        )
    }


EXPERIMENT = Experiment(
    name="gap-splits",
    source='Foong et al. 2019, "In-between" uncertainty in Bayesian neural networks, section 4.2',
    reported="a mean field is too sure between the training rows; on energy and naval most of all",
    seeds=(0,),
    memory_mb=1500,
    jobs=jobs,
    run=run,
    table=table,
    figures=figures,
)
