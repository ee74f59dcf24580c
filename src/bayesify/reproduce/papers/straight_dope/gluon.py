"""The Straight Dope, "Bayes by Backprop with gluon": the training of an ordinary network.

An ordinary network is made Bayesian and trained without any change to it. The prior is a scale
mixture and the optimiser Adam, as in the document. The document's configuration says pi = .25, but
does not pass it to the loss, whose default is .5; both values are trained here.

The document's text stores no outputs, so there is nothing to compare with. Some lines are missing:
the end of the configuration and of the network, the loaders, the initialisation, the backward pass
and the optimiser's step. The network as printed ends with the second hidden layer. Labels of ten
classes, and a pruning that cuts the last block of weights to 400 x 10, imply an output layer of ten
units, which is added here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import bayesify as bf
from bayesify.datasets import TensorLoader
from bayesify.noise.keys import Stream, derived_seed
from bayesify.reproduce.harness.experiment import (
    Context,
    Experiment,
    Job,
    Result,
    of_job,
)
from bayesify.reproduce.harness.image_runs import images_of
from bayesify.reproduce.harness.seed_statistics import mean_and_error
from bayesify.reproduce.papers.straight_dope.accuracy_and_pruning import (
    TrainAccuracy,
    accuracy_figure,
    accuracy_table,
    measured,
    pruning_figure,
    pruning_table,
    weight_figure,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

_NAME = "straight-dope-gluon"
PROTOCOL: dict[str, Any] = {
    "hidden": 400,
    "std1": 0.75,
    "std2": 0.01,
    "init_std": math.log1p(math.exp(-3.0)),
    "mean_init_std": 0.1,
    "lr": 1e-3,
    "batch_size": 128,
    "epochs": 10,
    "test_samples": 20,
    "fractions": [0.1, 0.25, 0.5, 0.75, 0.95, 0.98, 1.0],
    "limit": None,
}
_QUICK = {"hidden": 50, "epochs": 2, "limit": 3000, "test_samples": 5}
_PI = {"loss-default": 0.5, "config": 0.25}
_JOBS = {"loss-default": "pi .5, as it runs", "config": "pi .25, as it is configured"}


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return two jobs for each seed: pi of the document's loss, and pi of its configuration."""
    protocol, seconds = ({**PROTOCOL, **_QUICK}, 3.0) if quick else (PROTOCOL, 55.0)
    return [
        Job(name, seed, {"pi": pi, **protocol}, seconds, ("mnist",))
        for seed in seeds
        for name, pi in _PI.items()
    ]


def run(job: Job, context: Context) -> dict[str, Any]:
    """Make an ordinary network Bayesian, train it, and prune it."""
    config, seed = job.config, job.seed
    data = images_of(context, "mnist", config["limit"])

    # An ordinary network, with the document's distribution of initial values.
    net = nn.Sequential(
        nn.Linear(784, config["hidden"]),
        nn.ReLU(),
        nn.Linear(config["hidden"], config["hidden"]),
        nn.ReLU(),
        nn.Linear(config["hidden"], 10),
    )
    generator = torch.Generator().manual_seed(derived_seed(seed, Stream.INITIALIZATION, 0))
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=config["mean_init_std"], generator=generator)

    # Its parameters become random variables whose means start at those values.
    bnn = bf.BayesianModule(
        net,
        likelihood=bf.CategoricalLikelihood(),
        prior=_prior(config),
        init_std=config["init_std"],
        seed=seed,
    )

    # Apart from its epsilon, Adam is invariant to summing or averaging over the minibatch.
    train_accuracy = TrainAccuracy(bnn, data, context, config["epochs"])
    history = bf.fit(
        bf.ELBO(bnn, num_data=len(data.train_targets)),
        TensorLoader(data.train_inputs, data.train_targets, config["batch_size"], seed=seed),
        TensorLoader(data.test_inputs, data.test_targets, 2048, shuffle=False),
        epochs=config["epochs"],
        optimizer=partial(torch.optim.Adam, lr=config["lr"], fused=True),
        checkpoint_dir=context.work,
        resume=True,
        callback=train_accuracy,
    )
    return measured(
        bnn,
        data,
        history,
        train_accuracy.percent,
        fractions=config["fractions"],
        test_samples=config["test_samples"],
    )


def table(results: Sequence[Result]) -> str:
    """Return the tables of accuracy by epoch and pruned; nothing is reported."""
    parts = [
        "Reported: nothing. The document stores no output of its code. Ours: accuracy of the mean "
        "weights in percent, mean +- standard error over seeds.",
        accuracy_table(results, _JOBS),
        "Test accuracy with a share of all weights removed, those of the lowest |mean| / std:",
        pruning_table(results, _JOBS),
        _averaged(results),
    ]
    return "\n\n".join(parts) + "\n"


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw accuracy by epoch, pruning, and one weight's posterior."""
    return {
        f"{_NAME}-accuracy": accuracy_figure(results, _JOBS),
        f"{_NAME}-pruning": pruning_figure(results, _JOBS),
        f"{_NAME}-weight": weight_figure(results, _JOBS, lambda result: _prior(result["config"])),
    }


def _prior(config: Any) -> bf.ScaleMixture:
    return bf.ScaleMixture(pi=config["pi"], std1=config["std1"], std2=config["std2"])


def _averaged(results: Sequence[Result]) -> str:
    """Report predictions averaged over weight samples, which the document does not make."""
    said = []
    for job, name in _JOBS.items():
        found = [result["metrics"] for result in of_job(results, job)]
        if found:
            nll, error = (
                mean_and_error([metrics["test"][key] for metrics in found], digits)
                for key, digits in (("nll", 4), ("error_predictive", 2))
            )
            kl = mean_and_error([metrics["kl_nats"] for metrics in found], 0)
            samples = found[0]["test_samples"]
            said.append(
                f"{name}: test nll {nll} nats and error {error} % averaged over {samples} weight "
                f"samples, KL {kl} nats"
            )
    return f"{'; '.join(said)}."


EXPERIMENT = Experiment(
    name=_NAME,
    source='The Straight Dope, "Bayes by Backprop with gluon (NN, classification)"',
    reported="nothing: its text has no outputs; an unmodified network, scale mixture, pruning",
    seeds=(0, 1, 2),
    memory_mb=700,
    jobs=jobs,
    run=run,
    table=table,
    figures=figures,
)
