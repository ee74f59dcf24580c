"""Reproduce tables and figures of the literature, each by one command."""

from bayesify.reproduce.harness.experiment import (
    Context,
    Experiment,
    Job,
    ProgressListener,
    Result,
)
from bayesify.reproduce.harness.result_files import (
    read_result,
    read_results,
    results_of,
    stored_result,
)
from bayesify.reproduce.harness.run_experiment import Outcome, named_jobs, reproduce
from bayesify.reproduce.papers import (
    certificates,
    estimator_comparison,
    fashion_lenet5,
    gap_splits,
    koca_dittmann,
    mnist_ood,
    train_defaults,
    uci,
)
from bayesify.reproduce.papers.active import experiment as active
from bayesify.reproduce.papers.blundell import (
    bound,
    comparison,
    ensemble,
    figure5_regression,
    figure6_mushroom,
    recipe_search,
    table1,
    table2_pruning,
    tuning,
)
from bayesify.reproduce.papers.clinc150 import experiment as clinc150
from bayesify.reproduce.papers.clinc150 import tuning as clinc150_tuning
from bayesify.reproduce.papers.compression import experiment as compression
from bayesify.reproduce.papers.compression import tuning as compression_tuning
from bayesify.reproduce.papers.continual import experiment as continual
from bayesify.reproduce.papers.pyro_local import notebook
from bayesify.reproduce.papers.rahmanto import prior_grid, widths
from bayesify.reproduce.papers.referee import experiment as referee
from bayesify.reproduce.papers.straight_dope import gluon, scratch
from bayesify.reproduce.papers.tables import experiment as tables

__all__ = [
    "EXPERIMENTS",
    "Context",
    "Experiment",
    "Job",
    "Outcome",
    "ProgressListener",
    "Result",
    "find_experiment",
    "named_jobs",
    "read_result",
    "read_results",
    "reproduce",
    "results_of",
    "stored_result",
]

#: All experiments by name. To add one, write a module with an ``EXPERIMENT`` and list it here.
EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        table1,
        table2_pruning,
        recipe_search,
        tuning,
        comparison,
        ensemble,
        bound,
        scratch,
        gluon,
        koca_dittmann,
        prior_grid,
        widths,
        notebook,
        estimator_comparison,
        figure5_regression,
        uci,
        mnist_ood,
        fashion_lenet5,
        figure6_mushroom,
        train_defaults,
        clinc150_tuning,
        clinc150,
        tables,
        certificates,
        referee,
        gap_splits,
        compression_tuning,
        compression,
        continual,
        active,
    )
}


def find_experiment(name: str) -> Experiment:
    """Return the experiment called ``name``.

    Raises:
        ValueError: there is none; the message lists the known ones.

    Example:
        >>> find_experiment("uci").seeds
        (0,)
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name!r}; known are {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
