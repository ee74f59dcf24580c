"""The search for the settings of each classifier of the fair comparison, on held-out images.

Every method has the same number of trials. The first has the settings that were in use before,
the others are drawn at random from the method's space. A trial trains 2x400 units on 50,000 of
the training images for as many epochs as the comparison does, and is judged on the other 10,000.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from bayesify.datasets import ImageData
from bayesify.noise.keys import Stream, derived_seed
from bayesify.reproduce.harness.experiment import Context, Experiment, Job, Result
from bayesify.reproduce.harness.image_runs import mnist_of
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import with_cost
from bayesify.reproduce.papers.blundell.classifiers import (
    METHODS,
    Network,
    averaged,
    outputs_of,
    pruned,
    scores,
    train_network,
)
from bayesify.training.temperature_scaling import logit_temperature

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "EXPERIMENT",
    "TRIALS",
    "Draw",
    "among",
    "best_trials",
    "between",
    "measured",
    "random_settings",
    "trial_settings",
]

TRIALS = 8
_HELD_OUT = 10_000
#: Shares of the weights removed from each network.
_FRACTIONS = (0.75, 0.95, 0.98)
#: Seconds an epoch of a plain 2x400 network on 50,000 images on one core.
_SECONDS = 1.0

Draw = Callable[[np.random.Generator], Any]


def among(*values: Any) -> Draw:
    """Draw one of the values."""
    return lambda generator: values[int(generator.integers(len(values)))]


def between(low: float, high: float) -> Draw:
    """Draw log-uniformly, and round to three digits, so that settings can be read."""
    return lambda generator: float(
        f"{math.exp(generator.uniform(math.log(low), math.log(high))):.3g}"
    )


_SGD: dict[str, Draw] = {"lr": between(0.02, 0.4), "weight_decay": among(0.0, 1e-5, 3e-5, 1e-4)}
_PIXELS: dict[str, Draw] = {"dropout_input": among(0.1, 0.2, 0.3, 0.4)}
_BAYES: dict[str, Draw] = {
    "lr": between(7e-4, 4e-3),
    "rho_lr_scale": among(1.0, 2.0, 4.0),
    "kl_warmup": among(0.75, 0.95),
    "kl_warmup_power": among(1.0, 2.0, 3.0, 4.0),
}
_MIXTURE: dict[str, Draw] = {
    **_BAYES,
    "pi": among(0.05, 0.1, 0.25),
    "std1": among(0.5, 1.0),
    "std2": among(0.005, 0.01, 0.02),
}
#: What is searched for each method, and how it is drawn.
SPACES: Mapping[str, Mapping[str, Draw]] = MappingProxyType(
    {
        "sgd": _SGD,
        "sgd-dropped": {**_SGD, **_PIXELS},
        "dropout": {**_SGD, **_PIXELS, "dropout_hidden": among(0.2, 0.3, 0.4, 0.5)},
        "gaussian": {**_BAYES, "prior_std": between(0.1, 1.0)},
        "mixture": _MIXTURE,
        "mixture-dropped": {**_MIXTURE, **_PIXELS},
    }
)
_FIRST_SGD = {"lr": 0.1, "weight_decay": 0.0}
_FIRST_BAYES = {"lr": 1.5e-3, "rho_lr_scale": 2.0, "kl_warmup": 0.95, "kl_warmup_power": 4.0}
_FIRST_MIXTURE = {**_FIRST_BAYES, "pi": 0.1, "std1": 1.0, "std2": 0.01}
#: The first trial of each method: the settings of table 1 as it was before this comparison.
_FIRST: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "sgd": _FIRST_SGD,
        "sgd-dropped": {**_FIRST_SGD, "dropout_input": 0.2},
        "dropout": {**_FIRST_SGD, "dropout_input": 0.2, "dropout_hidden": 0.5},
        "gaussian": {**_FIRST_BAYES, "prior_std": 0.4},
        "mixture": _FIRST_MIXTURE,
        "mixture-dropped": {**_FIRST_MIXTURE, "kl_warmup_power": 2.0, "dropout_input": 0.2},
    }
)
_QUICK: dict[str, Any] = {"epochs": 2, "limit": 2000, "batch_size": 32, "hidden": [20, 20]}


def trial_settings(method: str, number: int) -> dict[str, Any]:
    """Return the searched settings of a method's trial; the first are those in use before.

    Example:
        >>> trial_settings("sgd", 0)
        {'lr': 0.1, 'weight_decay': 0.0}
    """
    if number == 0:
        return dict(_FIRST[method])
    return random_settings(SPACES[method], list(SPACES).index(method), number)


def random_settings(space: Mapping[str, Draw], seed: int, number: int) -> dict[str, Any]:
    """Draw the settings of a trial from a space; each number has a stream of its own.

    Example:
        >>> random_settings({"prior": among("gaussian"), "lr": between(0.1, 0.1)}, 0, 3)
        {'prior': 'gaussian', 'lr': 0.1}
    """
    generator = np.random.default_rng(derived_seed(seed, Stream.INITIALIZATION, number))
    return {name: draw(generator) for name, draw in space.items()}


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return a job for each method and trial; a quick run has two trials of each."""
    made = []
    for seed in seeds:
        for number in range(2 if quick else TRIALS):
            for name, method in METHODS.items():
                settings = {**method.fixed, **trial_settings(name, number)}
                seconds = 6.0 + _SECONDS * method.cost * settings["epochs"]
                config = {
                    "method": name,
                    "held_out": 500 if quick else _HELD_OUT,
                    "settings": {**settings, **(_QUICK if quick else {})},
                }
                cost = 2.0 if quick else seconds
                made.append(Job(f"{name}-{number:02d}", seed, config, cost, ("mnist",)))
    return made


def run(job: Job, context: Context) -> dict[str, Any]:
    """Train the network of a trial, and measure it on the held-out images."""
    data: ImageData = mnist_of(job, context)
    settings = job.config["settings"]
    return measured(train_network(settings, job.seed, data, context), settings, data, _FRACTIONS)


def measured(
    network: Network, settings: Mapping[str, Any], data: ImageData, fractions: Sequence[float]
) -> dict[str, Any]:
    """Return the scores on the images held out: whole, and at the mean weights after pruning."""
    inputs, targets = data.test_inputs, data.test_targets
    temperature = _temperature(network.bnn.mean_outputs(inputs), targets)
    mixed = averaged(network.bnn, settings, inputs)
    return {
        "mean_weights": scores(outputs_of(network.bnn, inputs), targets),
        "scaled": scores(outputs_of(network.bnn, inputs, temperature), targets),
        "logit_temperature": temperature,
        "averaged": None if mixed is None else scores(mixed, targets),
        "pruned": {
            f"{fraction:g}": scores(outputs_of(pruned(network.bnn, fraction), inputs), targets)
            for fraction in fractions
        },
        "last": dict(network.last),
    }


def _temperature(logits: Tensor, targets: Tensor) -> float:
    """Return the best temperature, or 1 where there is none: all is right, or chance."""
    try:
        return logit_temperature(logits, targets)
    except ValueError:
        return 1.0


def judged(result: Result) -> tuple[float, float]:
    """Return the numbers by which a trial is judged, on the held-out images; smaller is better.

    They are the error at the mean weights in percent, as in the paper's table, and for trials of
    equal error the nll there in nats per image after temperature scaling.
    """
    metrics = result["metrics"]
    return metrics["mean_weights"]["error"], metrics["scaled"]["nll"]


def best_trials(results: Sequence[Result]) -> dict[str, Result]:
    """Return the best trial of each method, by ``judged``."""
    best: dict[str, Result] = {}
    for result in results:
        method = result["config"]["method"]
        if method not in best or judged(result) < judged(best[method]):
            best[method] = result
    return best


def table(results: Sequence[Result]) -> str:
    """Return a table of trials for each method, its best trial in bold."""
    best = [id(result) for result in best_trials(results).values()]
    heads = (
        "| {} | error at the mean weights | nll there | scaled | averaged error | averaged nll | "
        "75 / 95 / 98 % removed | free energy |"
    )
    parts = [
        f"On {_HELD_OUT:,} training images held out, 2x400 units, {TRIALS} trials of each method. "
        "Errors in percent, nll in nats per image; scaled: after temperature scaling on the same "
        "images; averaged over weight samples or passes with dropout. A trial is judged by its "
        "error at the mean weights; the best is in bold. The first trial has the settings in use "
        "before, the others were drawn at random."
    ]
    for name, method in METHODS.items():
        of = [result for result in results if result["config"]["method"] == name]
        if not of:
            continue
        searched = list(SPACES[name])
        lines = table_head(heads.format(" | ".join(searched)))
        lines += [_line(result, searched, best=id(result) in best) for result in of]
        parts.append(f"**{method.title}**: {len(of)} trials\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _line(result: Result, searched: Sequence[str], *, best: bool) -> str:
    settings, metrics = result["config"]["settings"], result["metrics"]
    mixed, free_energy = metrics["averaged"], metrics["last"].get("free_energy")
    cells = [
        *(f"{settings[name]:g}" for name in searched),
        f"{metrics['mean_weights']['error']:.2f}",
        f"{metrics['mean_weights']['nll']:.4f}",
        f"{metrics['scaled']['nll']:.4f}",
        "" if mixed is None else f"{mixed['error']:.2f}",
        "" if mixed is None else f"{mixed['nll']:.4f}",
        " / ".join(f"{of['error']:.2f}" for of in metrics["pruned"].values()),
        "" if free_energy is None else f"{free_energy:.2f}",
    ]
    if best:
        cells[0] = f"**{cells[0]}**"
    return f"| {' | '.join(cells)} |"


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the lowest error over the number of trials."""
    from bayesify.plots.compared import Curve, curves_compared

    curves = []
    for name, method in METHODS.items():
        found = [judged(result)[0] for result in results if result["config"]["method"] == name]
        if found:
            curves.append(Curve.by_epoch(method.title, [list(accumulate(found, min))]))
    if not curves:
        return {}
    panels = {"10,000 training images held out": curves}
    drawn = curves_compared(panels, xlabel="trials", ylabel="lowest error so far (%)")
    return {"blundell-tuning": drawn}


EXPERIMENT = Experiment(
    name="blundell-tuning",
    source="the search behind blundell-comparison",
    reported="nothing: the same number of trials for each method, on held-out training images",
    seeds=(0,),
    memory_mb=1200,
    jobs=jobs,
    run=run,
    table=with_cost(table),
    figures=figures,
    on_gpu=True,
)
