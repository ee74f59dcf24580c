"""LeNet-5 on Fashion-MNIST: rank-one factors and the mean field next to plain networks.

Each job trains five networks by one method. They are measured one by one and as an ensemble, whose
members have weights of their own: for rank-one networks that is the mixture of Dusenberry et al.
(2020) without their sharing of W. The settings were chosen on the last 10,000 training images; the
test images were used for the stored rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from bayesify.datasets import ImageData, TensorLoader
from bayesify.distributions.posteriors import Delta
from bayesify.distributions.priors import Gaussian
from bayesify.metrics import error_percent, expected_calibration_error, nll
from bayesify.module.bayesian import BayesianModule
from bayesify.module.networks import lenet5
from bayesify.module.rank_one import RankOne, rank_one
from bayesify.prediction import CategoricalPredictive
from bayesify.reproduce.harness.experiment import (
    Context,
    EpochProgress,
    Experiment,
    Job,
    Result,
    of_job,
)
from bayesify.reproduce.harness.image_runs import images_of
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error
from bayesify.training import fit
from bayesify.training.elbo import ELBO
from bayesify.training.schedules import cosine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "METHODS"]

_DATA = "fashion-mnist"
_COMMON: dict[str, Any] = {"members": 5, "batch_size": 128, "test_samples": 50}
#: By job: its name in the table and its settings.
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"method": "plain", "epochs": 12, "lr": 2e-3, "weight_decay": 0.01},
    "rank-one": {
        "method": "rank one",
        # Decay would pull the factors to 0, while their prior is around 1.
        "epochs": 15,
        "lr": 2e-3,
        "weight_decay": 0.0,
        "prior_std": 0.5,
        "init_std": 0.25,
        "kl_warmup": 0.3,
        "rho_lr_scale": 3.0,
    },
    "mean-field": {
        "method": "mean field",
        "epochs": 15,
        "lr": 2e-3,
        "weight_decay": 0.0,
        "prior_std": 0.3,
        "init_std": 0.02,
        "kl_warmup": 0.3,
        "rho_lr_scale": 3.0,
    },
}
#: Seconds on one core.
_SECONDS = {"plain": 500.0, "rank-one": 900.0, "mean-field": 700.0}
_QUICK = {"members": 2, "epochs": 1, "limit": 1000, "test_samples": 3}


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return a job for each method and seed, seed by seed."""
    return [
        Job(
            name,
            seed,
            {"dataset": _DATA, **_COMMON, **method, **(_QUICK if quick else {})},
            3.0 if quick else _SECONDS[name],
            (_DATA,),
        )
        for seed in seeds
        for name, method in METHODS.items()
    ]


def run(job: Job, context: Context) -> dict[str, Any]:
    """Train and measure the networks of one method and seed.

    Returns:
        ``alone``, for each network, and ``ensembles``, of the first one, two, and so on: ``error``
        (percent), ``nll`` (nats) and ``ece`` of the test images; ``train_nll`` (nats) of the last
        epoch, by network.

    Raises:
        DataError: the data set is missing; raised before anything is trained.
    """
    config = job.config
    data = images_of(context, config["dataset"], config.get("limit"))
    count = config["members"]
    found = [
        # No two networks of the experiment have the same initial values.
        _trained(
            job.name,
            config,
            count * job.seed + member,
            data,
            context.part(f"network-{member}", member, count),
        )
        for member in range(count)
    ]
    # Each network predicts once; the prediction of an ensemble is made of those of its members.
    parts = [_predictive(bnn, data, config["test_samples"]) for bnn, _ in found]
    return {
        "alone": [_measured(part, data) for part in parts],
        "ensembles": [
            _measured(CategoricalPredictive.joined(parts[:size]), data) for size in _sizes(count)
        ],
        "train_nll": [train_nll for _, train_nll in found],
    }


def _sizes(count: int) -> range:
    return range(1, count + 1)


def _trained(
    name: str, config: Mapping[str, Any], seed: int, data: ImageData, context: Context
) -> tuple[BayesianModule, float]:
    """Return a trained network and the nll of its last epoch, in nats."""
    elbo = ELBO(_network(name, config, seed), num_data=len(data.train_targets))
    loader = TensorLoader(data.train_inputs, data.train_targets, config["batch_size"], seed=seed)
    history = fit(
        elbo,
        loader,
        epochs=config["epochs"],
        optimizer=partial(torch.optim.AdamW, lr=config["lr"], weight_decay=config["weight_decay"]),
        scheduler=cosine,
        rho_lr_scale=config.get("rho_lr_scale", 1.0),
        kl_warmup_epochs=config.get("kl_warmup", 0.0) * config["epochs"],
        checkpoint_dir=context.work,
        resume=context.work is not None,
        callback=EpochProgress(context, config["epochs"]),
    )
    return elbo.bnn, float(history[-1]["nll"] or 0.0)


def _network(name: str, config: Mapping[str, Any], seed: int) -> BayesianModule:
    net = lenet5(seed=seed)
    if name == "plain":
        return BayesianModule(net, posterior=Delta, seed=seed)
    prior, init_std = Gaussian(config["prior_std"]), config["init_std"]
    if name == "mean-field":
        return BayesianModule(net, prior=prior, init_std=init_std, seed=seed)
    return BayesianModule(
        rank_one(net),
        include=(RankOne,),
        prior=prior,
        prior_mean="initial",
        init_std=init_std,
        seed=seed,
    )


def _predictive(bnn: BayesianModule, data: ImageData, num_samples: int) -> CategoricalPredictive:
    predictive = bnn.predict(data.test_inputs, num_samples)
    assert isinstance(predictive, CategoricalPredictive)
    return predictive


def _measured(predictive: CategoricalPredictive, data: ImageData) -> dict[str, float]:
    return {
        "error": error_percent(predictive.mean, data.test_targets),
        "nll": nll(predictive.log_mean, data.test_targets),
        "ece": expected_calibration_error(predictive.mean, data.test_targets),
    }


#: By key of a measurement: heading and decimals.
_COLUMNS = {"error": ("error %", 2), "nll": ("nll, nats", 4), "ece": ("ECE", 4)}


def table(results: Sequence[Result]) -> str:
    """Return a line for the single networks of each method, and one for its ensembles."""
    heads = " | ".join(heading for heading, _ in _COLUMNS.values())
    lines = table_head(f"| | networks | {heads} |")
    for name, method in METHODS.items():
        found = of_job(results, name)
        if not found:
            continue
        members = found[0]["config"]["members"]
        kinds = {
            method["method"]: [one for result in found for one in result["metrics"]["alone"]],
            f"{method['method']}, ensemble of {members}": [
                result["metrics"]["ensembles"][-1] for result in found
            ],
        }
        for title, measured in kinds.items():
            cells = [
                mean_and_error([one[key] for one in measured], digits)
                for key, (_, digits) in _COLUMNS.items()
            ]
            lines.append(f"| {title} | {len(measured)} | {' | '.join(cells)} |")
    return (
        "Mean over networks of different seeds +- its standard error; an ensemble counts as one "
        "network. Reported for LeNet-5: plain 9.0 % and .321, ensemble of 10 6.8 % and .200, "
        "mean field 10.5 % and .292.\n\n" + "\n".join(lines) + "\n"
    )


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the test nll over the number of networks in an ensemble."""
    from bayesify.plots.compared import Curve, curves_compared

    curves = []
    for name, method in METHODS.items():
        if found := of_job(results, name):
            runs = [[each["nll"] for each in one["metrics"]["ensembles"]] for one in found]
            shortest = min(map(len, runs))
            curves.append(
                Curve(method["method"], _sizes(shortest), [run[:shortest] for run in runs])
            )
    drawn = curves_compared(
        {"LeNet-5 on Fashion-MNIST": curves},
        xlabel="networks in the ensemble",
        ylabel="test nll (nats)",
    )
    return {"fashion-lenet5": drawn}


EXPERIMENT = Experiment(
    name="fashion-lenet5",
    source="Dusenberry et al. 2020, rank-1 Bayesian networks, at the size of LeNet-5",
    reported="for LeNet-5 on Fashion-MNIST: plain nll .321, ensemble of 10 .200, mean field .292",
    seeds=(0, 1, 2),
    memory_mb=1000,
    jobs=jobs,
    run=run,
    table=table,
    figures=figures,
)
