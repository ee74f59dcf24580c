"""The search behind the defaults of ``bayesify train`` on images, on held-out training images.

The first trial has the defaults before the search, with their 25 epochs. The others are drawn at
random, half with a Gaussian prior and half with a scale mixture, and have 30, few enough that the
first command ends within three minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from bayesify.datasets import ImageData
from bayesify.reproduce.harness.experiment import Context, Experiment, Job, Result
from bayesify.reproduce.harness.image_runs import mnist_of
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.papers.blundell.classifiers import train_network
from bayesify.reproduce.papers.blundell.tuning import (
    Draw,
    among,
    between,
    measured,
    random_settings,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "TRIALS", "best_trial"]

#: Trials of each prior.
TRIALS = 8
_HELD_OUT = 10_000
_FRACTIONS = (0.75, 0.9, 0.95)
#: The error may rise by this many points when 90 % of the weights are removed.
_RISE = 0.1
_SECONDS = 3.0

_FIXED: dict[str, Any] = {
    "hidden": [400, 400],
    "epochs": 30,
    "schedule": "cosine",
    "batch_size": 256,
    "estimator": "sampling",
    "optimizer": "adam",
    "init_std": 0.02,
    "precision": "float32",
}
_SCHEDULE: dict[str, Draw] = {
    "lr": between(1e-3, 5e-3),
    "rho_lr_scale": among(1.5, 2.0, 4.0, 8.0),
    "kl_warmup": among(0.25, 0.5, 0.75, 0.95),
    "kl_warmup_power": among(1.0, 2.0, 4.0),
}
_SPACES: Mapping[str, Mapping[str, Draw]] = MappingProxyType(
    {
        "gaussian": {**_SCHEDULE, "prior": among("gaussian"), "prior_std": between(0.1, 0.5)},
        "scale-mixture": {
            **_SCHEDULE,
            "prior": among("scale-mixture"),
            "pi": among(0.05, 0.1, 0.25),
            "std1": among(0.5, 1.0),
            "std2": among(0.01, 0.02),
        },
    }
)
_FIRST: dict[str, Any] = {
    "lr": 1.5e-3,
    "rho_lr_scale": 1.5,
    "kl_warmup": 0.75,
    "kl_warmup_power": 1.0,
    "prior": "gaussian",
    "prior_std": 0.3,
    "epochs": 25,
}
#: Settings that the trials vary, as columns of the table.
_SEARCHED = (
    "prior",
    "prior_std",
    "pi",
    "std1",
    "std2",
    "lr",
    "rho_lr_scale",
    "kl_warmup",
    "kl_warmup_power",
    "epochs",
)
_QUICK_TRIALS = ("before", "gaussian-00", "scale-mixture-00")
_QUICK: dict[str, Any] = {"epochs": 2, "limit": 2000, "batch_size": 32, "hidden": [20, 20]}


def _trials() -> dict[str, dict[str, Any]]:
    made = {"before": {**_FIXED, **_FIRST}}
    for place, (prior, space) in enumerate(_SPACES.items()):
        for number in range(TRIALS):
            drawn = random_settings(space, place, number)
            made[f"{prior}-{number:02d}"] = {**_FIXED, **drawn}
    return made


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return a job for each trial; a quick run has the first of each kind."""
    made = []
    for seed in seeds:
        for name, settings in _trials().items():
            if quick and name not in _QUICK_TRIALS:
                continue
            config = {
                "held_out": 500 if quick else _HELD_OUT,
                "settings": {**settings, **(_QUICK if quick else {})},
            }
            seconds = 2.0 if quick else 10.0 + _SECONDS * settings["epochs"]
            made.append(Job(name, seed, config, seconds, ("mnist",)))
    return made


def run(job: Job, context: Context) -> dict[str, Any]:
    """Train the network of a trial, and measure it on the held-out images."""
    data: ImageData = mnist_of(job, context)
    settings = job.config["settings"]
    network = train_network(settings, job.seed, data, context)
    return measured(network, settings, data, _FRACTIONS)


def _keeps_its_error(result: Result) -> bool:
    metrics = result["metrics"]
    whole, part = metrics["mean_weights"]["error"], metrics["pruned"]["0.9"]["error"]
    return bool(part <= whole + _RISE + 1e-9)


def best_trial(results: Sequence[Result]) -> Result | None:
    """Return the trial with the lowest averaged nll among those that can be pruned.

    Those are the trials whose error at the mean weights rises by at most a tenth of a point when
    90 % of the weights are removed.
    """
    prunable = [result for result in results if _keeps_its_error(result)]
    return min(prunable, key=lambda result: result["metrics"]["averaged"]["nll"], default=None)


def table(results: Sequence[Result]) -> str:
    """Return all trials by their averaged nll; the one that was chosen is in bold."""
    best = best_trial(results)
    lines = table_head(
        f"| {' | '.join(_SEARCHED)} | error, averaged | mean weights | nll, averaged | "
        "75 / 90 / 95 % removed | free energy | untrained | derivative, worst group |"
    )
    for result in sorted(results, key=lambda result: result["metrics"]["averaged"]["nll"]):
        settings, metrics = result["config"]["settings"], result["metrics"]
        last, mixed = metrics["last"], metrics["averaged"]
        cells = [
            *(_shown(settings.get(name, "")) for name in _SEARCHED),
            f"{mixed['error']:.2f}",
            f"{metrics['mean_weights']['error']:.2f}",
            f"{mixed['nll']:.4f}",
            " / ".join(f"{of['error']:.2f}" for of in metrics["pruned"].values()),
            *(_rounded(last[name], ".2f") for name in ("free_energy", "free_energy_untrained")),
            _rounded(last["std_residual_worst"], "+.2f"),
        ]
        if result is best:
            cells = [f"**{cell}**" if cell else cell for cell in cells]
        lines.append(f"| {' | '.join(cells)} |")
    return (
        f"On {_HELD_OUT:,} training images held out, 2x400 units, one seed. Errors in percent, nll "
        "and free energy in nats per image. Chosen, in bold: the lowest averaged nll among the "
        f"trials whose error rises by at most {_RISE} points with 90 % of the weights removed. The "
        "derivative is that of the free energy in log std, in nats a weight (0 at the optimum).\n\n"
        + "\n".join(lines)
        + "\n"
    )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _rounded(value: float | None, digits: str) -> str:
    return "" if value is None else format(value, digits)


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the nll of each trial over its error with 90 % of the weights removed."""
    from bayesify.plots.compared import Curve, curves_compared

    curves = []
    for prior in _SPACES:
        points = sorted(
            (result["metrics"]["pruned"]["0.9"]["error"], result["metrics"]["averaged"]["nll"])
            for result in results
            if result["config"]["settings"]["prior"] == prior
        )
        if points:
            errors, nlls = zip(*points, strict=True)
            curves.append(Curve(prior.replace("-", " "), errors, [nlls], points=True))
    if not curves:
        return {}
    drawn = curves_compared(
        {"10,000 training images held out": curves},
        xlabel="error with 90 % of the weights removed (%)",
        ylabel="nll, averaged (nats)",
    )
    return {"train-defaults": drawn}


EXPERIMENT = Experiment(
    name="train-defaults",
    source="the search behind the defaults of bayesify train",
    reported="nothing: settings tried on 10,000 held-out training images",
    seeds=(0,),
    memory_mb=1200,
    jobs=jobs,
    run=run,
    table=table,
    figures=figures,
    on_gpu=True,
)
