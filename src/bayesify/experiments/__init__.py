"""Tables and figures of the literature, each reproduced by one command and one file."""

from bayesify.experiments import (
    blundell_pruning,
    blundell_recipe,
    blundell_table1,
    estimators,
    koca_dittmann,
    mushroom,
    ood,
    pyro_local,
    rahmanto_grid,
    rahmanto_widths,
    regression_curve,
    straight_dope_gluon,
    straight_dope_scratch,
    uci,
)
from bayesify.experiments.desk import read_row, read_rows, stored_row
from bayesify.experiments.experiment import Context, Experiment, Row, Unit, Watcher
from bayesify.experiments.reproducing import Outcome, reproduce

__all__ = [
    "EXPERIMENTS",
    "Context",
    "Experiment",
    "Outcome",
    "Row",
    "Unit",
    "Watcher",
    "find_experiment",
    "read_row",
    "read_rows",
    "reproduce",
    "stored_row",
]

#: By name. To add one: a file with an ``EXPERIMENT``, and its row here.
EXPERIMENTS: dict[str, Experiment] = {
    each.EXPERIMENT.name: each.EXPERIMENT
    for each in (
        blundell_table1,
        blundell_pruning,
        blundell_recipe,
        straight_dope_scratch,
        straight_dope_gluon,
        koca_dittmann,
        rahmanto_grid,
        rahmanto_widths,
        pyro_local,
        estimators,
        regression_curve,
        uci,
        ood,
        mushroom,
    )
}


def find_experiment(name: str) -> Experiment:
    """The experiment called ``name``.

    Raises:
        ValueError: there is none; the known ones are listed.

    Example:
        >>> find_experiment("uci").seeds
        (0,)
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name!r}; known are {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
