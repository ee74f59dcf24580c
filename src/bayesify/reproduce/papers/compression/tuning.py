"""Settings of the compression experiment that were compared on held-out training images.

Each trial changes one recipe. It trains on 50,000 training images and measures the decoded file on
the other 10,000; no test image is used. A trial has one seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from bayesify.reproduce.harness.experiment import Experiment, Job, Result, of_job
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error
from bayesify.reproduce.papers.compression import experiment
from bayesify.reproduce.papers.compression.recipes import CHOSEN, TRIALS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

_HELD_OUT = 10_000


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return a job for each trial and seed; a quick run has two trials."""
    names = ["lenet-300-100-weights", "lenet-300-100-units"] if quick else TRIALS
    held_out = 500 if quick else _HELD_OUT
    return [
        experiment.compression_job(
            name, seed, TRIALS[name].settings, quick=quick, held_out=held_out
        )
        for seed in seeds
        for name in names
    ]


def table(results: Sequence[Result]) -> str:
    """Return a row for each trial."""
    lines = [
        "Error in percent of the decoded network on 10,000 training images held out, after the "
        "last epoch.",
        "",
        *table_head(
            "| recipe | what | error | before coding | times fewer weights | weights left | units "
            "| bytes | KL, bytes |"
        ),
    ]
    for name, trial in TRIALS.items():
        if of := of_job(results, name):
            before = mean_and_error([r["metrics"]["error_before_coding"] for r in of], 2)
            error, *rest = experiment.summary(of)
            what = f"{trial.what}, chosen" if name in CHOSEN.values() else trial.what
            cells = " | ".join([trial.recipe, what, error, before, *rest])
            lines.append(f"| {cells} |")
    return "\n".join(lines) + "\n"


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the held-out error of each trial, a panel for each recipe with several."""
    from bayesify.plots.rows import Panel, rows_figure

    errors: dict[str, dict[str, list[float]]] = {}
    for name, trial in TRIALS.items():
        if of := of_job(results, name):
            found = [result["metrics"]["error"] for result in of]
            errors.setdefault(trial.recipe, {})[trial.what] = found
    panels = [
        Panel(recipe, "held-out error (%)", found)
        for recipe, found in errors.items()
        if len(found) > 1
    ]
    return {"compression-tuning": rows_figure(panels)} if panels else {}


EXPERIMENT: Experiment = replace(
    experiment.EXPERIMENT,
    name="compression-tuning",
    source="the search behind the compression experiment",
    reported="nothing: settings tried on 10,000 held-out training images",
    seeds=(0,),
    jobs=jobs,
    table=table,
    figures=figures,
)
