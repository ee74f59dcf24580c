"""Settings that were tried to reach table 1 of Blundell et al. 2015, and the effect of each.

2x400 units trained on 50,000 training images and measured on the other 10,000 after the last epoch;
no test image is used. The settings that were chosen are in ``mnist_networks``. Each trial has one
seed, so that differences below 0.2 points are within noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from bayesify.reproduce.harness.experiment import Experiment, Job, Result
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error
from bayesify.reproduce.papers.blundell.mnist_networks import (
    DROPPED,
    FRACTIONS,
    GAUSSIAN,
    PRUNABLE,
    SCALE_MIXTURE,
    SGD,
    TEMPERED,
    by_job,
    network_job,
    pruned_errors,
    run_network,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

_HELD_OUT = 10_000
#: Shorter than the final runs, so that more settings can be tried.
EPOCHS = 60
_MOMENTUM: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "batch_size": 128}
_SECONDS = 2.0


class Trial(NamedTuple):
    """A recipe, or one change to it: what is changed, to what, and its relative cost."""

    lever: str
    what: str
    settings: dict[str, Any]
    cost: float = 1.0
    more: Mapping[str, Any] = MappingProxyType({})


def _trials() -> dict[str, Trial]:
    bound = {**SCALE_MIXTURE, "epochs": EPOCHS}
    cold = {**TEMPERED, "epochs": EPOCHS}
    dense = {**bound, "pi": 0.75, "std2": math.exp(-8.0), "init_std": 0.04}
    sparse = {**PRUNABLE, "epochs": EPOCHS}
    dropped = {**DROPPED, "epochs": EPOCHS}
    pixels = {**bound, "dropout_input": DROPPED["dropout_input"]}
    made = {
        "plain": Trial("no prior", "plain network, SGD", {**SGD, "epochs": EPOCHS}),
        "bound": Trial("-", "the recipe of the scale mixture", bound),
        "longer": Trial("epochs", "200", {**bound, "epochs": 200}),
        "no-warmup": Trial("KL warm-up", "none", _without_warmup(bound)),
        "squared-warmup": Trial("KL warm-up", "a square", {**bound, "kl_warmup_power": 2.0}),
        "linear-warmup": Trial("KL warm-up", "a straight line", {**bound, "kl_warmup_power": 1.0}),
        "late-warmup": Trial("KL warm-up", "eighth power", {**bound, "kl_warmup_power": 8.0}),
        "paper-prior": Trial("prior", "T 1, spike exp(-8), pi .75, std .04 at the start", dense),
        "gaussian": Trial("prior", "N(0, .4^2)", {**GAUSSIAN, "epochs": EPOCHS}),
        "slow-rho": Trial("rate of rho", "x0.2", {**bound, "rho_lr_scale": 0.2}),
        "wide-start": Trial("std at the start", ".1", {**bound, "init_std": 0.1}),
        "pixels": Trial("noise on the inputs", "20 % of the pixels dropped", pixels),
        "pixels-earlier": Trial(
            "noise on the inputs", "20 % of the pixels dropped, warm-up squared", dropped
        ),
        "pixels-linear": Trial(
            "noise on the inputs",
            "20 % of the pixels dropped, warm-up a straight line",
            {**dropped, "kl_warmup_power": 1.0},
        ),
        "units": Trial(
            "noise on the inputs",
            "20 % of the pixels and of the hidden units dropped",
            {**pixels, "dropout_hidden": 0.2},
        ),
        "antithetic": Trial(
            "samples", "a pair a step", {**bound, "estimator": "antithetic", "train_samples": 2}
        ),
        "sgd": Trial(
            "optimiser",
            "SGD .1, momentum .9, rho x50, minibatches of 128",
            {**bound, **_MOMENTUM, "rho_lr_scale": 50.0},
            cost=1.5,
        ),
        "averaged-weights": Trial(
            "schedule",
            "constant, weights averaged over the last half",
            {**bound, "schedule": "constant"},
            more={"average_last": 0.5},
        ),
        "ensemble": Trial("ensemble", "3 networks", bound, cost=3.0, more={"members": 3}),
    }
    for name, settings, spike in (("sparse", sparse, ".01"), ("dense", cold, "exp(-8)")):
        tempered = {**settings, "temperature": 0.1}
        made[f"{name}-0.1"] = Trial("temperature", f"T .1, spike {spike}", tempered)
    return made


def _without_warmup(settings: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in settings.items() if name != "kl_warmup_power"}
    return {**kept, "kl_warmup": 0.0}


#: All trials by the name of their job.
TRIALS: Mapping[str, Trial] = MappingProxyType(_trials())
_YLABEL = "error on held-out images (%)"
#: Trials that the figure shows, with their labels.
_DRAWN = {
    "bound": "T 1, spike .01",
    "pixels-earlier": "T 1, spike .01, pixels dropped",
    "paper-prior": "T 1, spike exp(-8)",
    "sparse-0.1": "T .1, spike .01",
    "dense-0.1": "T .1, spike exp(-8)",
}
#: Trials of a quick run: one of each kind.
_QUICK = ("plain", "averaged-weights", "ensemble", "dense-0.1")


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return a job for each trial and seed; a quick run has a few trials only."""
    made = []
    for seed in seeds:
        for name in _QUICK if quick else TRIALS:
            trial = TRIALS[name]
            settings = {**trial.settings, "hidden": [400, 400]}
            epochs = settings["epochs"] * settings.get("train_samples", 1)
            seconds = 6.0 + _SECONDS * trial.cost * epochs
            more = {"held_out": _HELD_OUT, **trial.more}
            made.append(network_job(name, seed, settings, seconds, quick=quick, **more))
    return made


def table(results: Sequence[Result]) -> str:
    """Return the table of validation errors by trial, whole and pruned."""
    found = by_job(results)
    lines = table_head(
        "| lever | what | temperature | epochs | mean weights | averaged | nll, nats | KL, nats | "
        "75 % / 95 % / 98 % removed |"
    )
    for name, trial in TRIALS.items():
        if name in found:
            lines.append(f"| {trial.lever} | {trial.what} | {_cells(found[name])} |")
    return (
        "Error in percent of 2x400 on 10,000 training images held out, at the last epoch. Averaged "
        "over weight samples, as is the nll.\n\n" + "\n".join(lines) + "\n"
    )


def _cells(of: Sequence[Result]) -> str:
    settings, metrics = of[0]["config"]["settings"], [result["metrics"] for result in of]
    test = [each["test"] for each in metrics]
    plain = "baseline" in settings
    pruned = [pruned_errors(of, fraction) for fraction in (0.75, 0.95, 0.98)]
    kl = [each["kl_nats"] for each in metrics if "kl_nats" in each]
    return " | ".join(
        [
            "" if plain else f"{settings.get('temperature', 1.0):g}",
            str(settings["epochs"]),
            mean_and_error([each["error_mean_weights"] for each in test], 2),
            "" if plain else mean_and_error([each["error_predictive"] for each in test], 2),
            mean_and_error([each["nll"] for each in test], 4),
            mean_and_error(kl, 0) if kl else "",
            " / ".join(mean_and_error(errors, 2) for errors in pruned) if pruned[0] else "",
        ]
    )


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the error by share of weights removed, for several priors and temperatures."""
    from bayesify.plots.compared import Curve, pruning_compared

    found = by_job(results)
    curves = [
        Curve(
            label,
            (0.0, *FRACTIONS),
            [
                [part["error_mean_weights"] for part in result["metrics"]["pruned"]]
                for result in found[name]
            ],
        )
        for name, label in _DRAWN.items()
        if name in found
    ]
    if not curves:
        return {}
    panels = {"Pruning by signal-to-noise ratio": curves}
    return {"blundell-recipe": pruning_compared(panels, ylabel=_YLABEL)}


EXPERIMENT = Experiment(
    name="blundell-recipe",
    source="the search behind table 1 of Blundell et al. 2015",
    reported="nothing: settings tried on 10,000 held-out training images",
    seeds=(0,),
    memory_mb=1200,
    jobs=jobs,
    run=run_network,
    table=table,
    figures=figures,
    on_gpu=True,
)
