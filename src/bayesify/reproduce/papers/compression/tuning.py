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


def _warmup(part: float, power: float) -> dict[str, Any]:
    return {"bound": {"kl_warmup": part, "kl_warmup_power": power}}


def _colder(temperature: float) -> dict[str, Any]:
    return {phase: {"temperature": temperature} for phase in ("bound", "tuning")}


#: A fraction of weights that the pruned units exceed.
_WHOLE: dict[str, Any] = {"fraction": 0.9}


def _late(pixels: float = 0.1, **more: Mapping[str, Any]) -> dict[str, Any]:
    """Units pruned between 10 and 80 % at temperature .1, and a second phase of 80 epochs."""
    bound = {**_WHOLE, "temperature": 0.1, "prune_between": [0.1, 0.8]}
    tuning = {"temperature": 0.03, "epochs": 80, "dropout_input": pixels}
    return {
        "dropout_input": pixels,
        "bound": {**bound, **more.get("bound", {})},
        "tuning": {**tuning, **more.get("tuning", {})},
    }


#: What a trial is in words and what it changes, by the recipe and the end of the trial's name.
_CHANGES: dict[str, dict[str, tuple[str, Mapping[str, Any]]]] = {
    "lenet-300-100-weights": {
        "no-pixels": ("no pixels dropped", {"dropout_input": 0.0}),
        "fast-rise": ("KL rises over 30 %, as a straight line", _warmup(0.3, 1.0)),
        "low-rate": ("learning rate .0015", {"bound": {"lr": 1.5e-3}}),
        "late": ("weights pruned between 20 and 80 %", {"bound": {"prune_between": [0.2, 0.8]}}),
        "cold": ("temperature .3", {"bound": {"temperature": 0.3}}),
        "tuned-at-1": ("second phase at temperature 1", {"tuning": {"temperature": 1.0}}),
        "tuned-at-0": ("second phase without KL", {"tuning": {"temperature": 0.0}}),
        "coarse": ("steps of 1", {"step_size": 1.0}),
    },
    "lenet-300-100-units": {
        "0.1": ("temperature .1", _colder(0.1)),
        "1": ("temperature 1", _colder(1.0)),
        "whole": ("no weights pruned but those of units", {"bound": _WHOLE}),
        "late": ("the same, late and cold", _late()),
        "late-long": ("late and cold, 300 epochs", _late(bound={"epochs": 300})),
        "late-no-pixels": ("late and cold, no pixels dropped", _late(0.0)),
        "late-pixels": ("late and cold, 20 % of the pixels dropped", _late(0.2)),
        "late-tuned-at-0": (
            "late and cold, second phase without KL",
            _late(tuning={"temperature": 0.0}),
        ),
        "late-tuned-long": (
            "late and cold, second phase of 200 epochs at rate .003",
            _late(tuning={"epochs": 200, "lr": 3e-3}),
        ),
    },
    "lenet-5-caffe-weights": {
        "0.1": ("10 % of the pixels dropped", {"dropout_input": 0.1}),
        "0.2": ("20 % of the pixels dropped", {"dropout_input": 0.2}),
        "long": ("300 epochs", {"bound": {"epochs": 300}}),
        "late": ("weights pruned between 10 and 80 %", {"bound": {"prune_between": [0.1, 0.8]}}),
        "cold": ("temperature .3", {"bound": {"temperature": 0.3}}),
        "long-late-cold": (
            "300 epochs, pruned between 10 and 80 %, temperature .3, second phase of 60 epochs",
            {
                "bound": {"epochs": 300, "prune_between": [0.1, 0.8], "temperature": 0.3},
                "tuning": {"epochs": 60},
            },
        ),
    },
    "lenet-5-caffe-units": {
        "late": (
            "units pruned between 10 and 80 %, temperature .3",
            {"bound": {"prune_between": [0.1, 0.8], "temperature": 0.3}},
        ),
    },
    "2x1200": {
        "long": ("200 epochs", {"bound": {"epochs": 200}}),
        "cold": ("temperature .3", {"bound": {"temperature": 0.3}}),
        "tuned-long": (
            "second phase of 40 epochs at temperature .3",
            {"tuning": {"epochs": 40, "temperature": 0.3}},
        ),
        "long-tuned-long": (
            "200 epochs, second phase of 40 at temperature .3",
            {"bound": {"epochs": 200}, "tuning": {"epochs": 40, "temperature": 0.3}},
        ),
    },
}


def _trials() -> dict[str, Trial]:
    made = {name: Trial(name, "the recipe", {}) for name in RECIPES}
    for recipe, trials in _CHANGES.items():
        made |= {
            f"{recipe}-{end}": Trial(recipe, what, changes)
            for end, (what, changes) in trials.items()
        }
    return made


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
