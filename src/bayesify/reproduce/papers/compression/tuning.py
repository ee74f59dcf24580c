"""Settings of the compression experiment that were compared on held-out training images.

Each trial changes one recipe. It trains on 50,000 training images and measures the decoded file on
the other 10,000; no test image is used. A trial has one seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from bayesify.reproduce.harness.experiment import Experiment, Job, Result, of_job
from bayesify.reproduce.harness.seed_statistics import mean_and_error
from bayesify.reproduce.papers.compression import experiment
from bayesify.reproduce.papers.compression.networks import NETWORKS
from bayesify.reproduce.papers.compression.recipes import RECIPES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "TRIALS", "Trial"]

_HELD_OUT = 10_000


class Trial(NamedTuple):
    """A recipe and the settings that a trial changes, by phase or on the top level."""

    recipe: str
    what: str
    changes: Mapping[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """The recipe with the changes."""
        made = dict(RECIPES[self.recipe])
        for key, value in self.changes.items():
            made[key] = {**made[key], **value} if isinstance(value, Mapping) else value
        return made


def _trials() -> dict[str, Trial]:
    made = {name: Trial(name, "the recipe", {}) for name in RECIPES}
    small, units, caffe = "lenet-300-100-weights", "lenet-300-100-units", "lenet-5-caffe-weights"
    for name, what, changes in (
        ("no-pixels", "no pixels dropped", {"dropout_input": 0.0}),
        ("fast-rise", "KL rises over 30 %, as a straight line", _warmup(0.3, 1.0)),
        ("low-rate", "learning rate .0015", {"bound": {"lr": 1.5e-3}}),
        ("late", "weights pruned between 20 and 80 %", {"bound": {"prune_between": [0.2, 0.8]}}),
        ("cold", "temperature .3", {"bound": {"temperature": 0.3}}),
        ("tuned-at-1", "second phase at temperature 1", {"tuning": {"temperature": 1.0}}),
        ("tuned-at-0", "second phase without KL", {"tuning": {"temperature": 0.0}}),
        ("coarse", "steps of 1", {"step_size": 1.0}),
    ):
        made[f"{small}-{name}"] = Trial(small, what, changes)
    for temperature in (0.1, 1.0):
        at = {"temperature": temperature}
        changes = {"bound": at, "tuning": at}
        made[f"{units}-{temperature:g}"] = Trial(units, f"temperature {temperature:g}", changes)
    for part in (0.1, 0.2):
        changes = {"dropout_input": part}
        made[f"{caffe}-{part:g}"] = Trial(caffe, f"{part:.0%} of the pixels dropped", changes)
    return made


def _warmup(part: float, power: float) -> dict[str, Any]:
    return {"bound": {"kl_warmup": part, "kl_warmup_power": power}}


#: All trials by the name of their job.
TRIALS = _trials()


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
        "| recipe | what | error | before coding | times fewer weights | weights left | units "
        "| bytes | KL, bytes |",
        "|---" * 9 + "|",
    ]
    for name, trial in TRIALS.items():
        if of := of_job(results, name):
            before = mean_and_error([r["metrics"]["error_before_coding"] for r in of], 2)
            error, *rest = experiment.summary(of)
            cells = " | ".join([trial.recipe, trial.what, error, before, *rest])
            lines.append(f"| {cells} |")
    return "\n".join(lines) + "\n"


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the held-out error by the size of the file, a panel for each network."""
    from bayesify.plots.compared import Curve, curves_compared

    panels: dict[str, list[Curve]] = {}
    for name, trial in TRIALS.items():
        if of := of_job(results, name):
            sizes = [result["metrics"]["bytes"] / 1000.0 for result in of]
            errors = [[result["metrics"]["error"] for result in of]]
            title = NETWORKS[of[0]["config"]["network"]]
            label = f"{trial.recipe.rpartition('-')[2]}, {trial.what}"
            panels.setdefault(title, []).append(Curve(label, sizes, errors, points=True))
    if not panels:
        return {}
    drawn = curves_compared(panels, xlabel="file (kB)", ylabel="held-out error (%)")
    return {"compression-tuning": drawn}


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
