"""Bayes by Backprop against its baselines on MNIST: the same data, epochs and number of trials.

The settings of each method are those of its best trial in ``tuning``. A network is then trained on
all 60,000 images with each of five seeds, and measured on the test images after the last epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from bayesify.app.runs.measure import weights_left
from bayesify.noise.keys import Stream, derived_seed
from bayesify.reproduce.harness.experiment import Context, Experiment, Job, Result
from bayesify.reproduce.harness.image_runs import images_of
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import (
    holm_adjusted,
    mean_and_error,
    paired_p_value,
    welch_p_value,
    with_cost,
)
from bayesify.reproduce.papers.blundell.classifiers import (
    EPOCHS,
    FRACTIONS,
    METHODS,
    PRUNED_SAMPLES,
    SAMPLES,
    Network,
    averaged,
    is_bayesian,
    outputs_of,
    pruned,
    scores,
    train_network,
)
from bayesify.reproduce.papers.blundell.mnist_networks import by_job
from bayesify.reproduce.papers.blundell.tuning import TRIALS, trial_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["CHOSEN", "EXPERIMENT", "WIDTHS", "Chosen", "headline"]

WIDTHS = (400, 1200)
#: Networks in an ensemble, and the methods that have one.
MEMBERS = 3
ENSEMBLES = ("sgd", "sgd-dropped", "mixture-dropped")


class Chosen(NamedTuple):
    """The best trial of a method in ``tuning``, and its temperature for scaling.

    Args:
        trial: number of the trial.
        logit_temperature: best for its network on the held-out images.
    """

    trial: int
    logit_temperature: float


#: Held by a test to the stored results of ``blundell-tuning``.
CHOSEN: Mapping[str, Chosen] = MappingProxyType(
    {
        "sgd": Chosen(6, 2.07),
        "sgd-dropped": Chosen(3, 1.24),
        "dropout": Chosen(5, 1.42),
        "gaussian": Chosen(1, 2.3),
        "mixture": Chosen(6, 1.61),
        "mixture-dropped": Chosen(0, 1.12),
    }
)
#: Seconds an epoch of a plain network on one core, by width.
_SECONDS = {400: 1.2, 1200: 4.8}
_QUICK: dict[str, Any] = {"epochs": 2, "limit": 2000, "batch_size": 32}


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return a job for each width, seed and method; a quick run has small networks only."""
    made = []
    for width in WIDTHS[:1] if quick else WIDTHS:
        for seed in seeds:
            for name, method in METHODS.items():
                trial, temperature = CHOSEN[name]
                settings = {**method.fixed, **trial_settings(name, trial), "hidden": [width, width]}
                members = MEMBERS if name in ENSEMBLES else 1
                seconds = members * (10.0 + method.cost * EPOCHS * _SECONDS[width])
                if quick:
                    settings |= {**_QUICK, "hidden": [20, 20]}
                    seconds = 3.0 * members
                config = {
                    "method": name,
                    "width": width,
                    "members": members,
                    "logit_temperature": temperature,
                    "settings": settings,
                }
                made.append(Job(f"{name}-{width}", seed, config, seconds, ("mnist",)))
    return made


def run(job: Job, context: Context) -> dict[str, Any]:
    """Train one network, or three for an ensemble, and measure each and their common prediction.

    Returns:
        ``networks``: the scores of each network by kind of prediction, see ``_predictions``; the
        first has the job's seed. ``ensemble``: those of the averaged predictions, where there are
        several networks. ``weights``: the number of weights of one network by the fraction that
        is removed. ``last``: columns of the last row of each network's history.
    """
    settings, count = job.config["settings"], job.config["members"]
    limit = settings.get("limit")
    data = images_of(context, "mnist", limit)
    found: list[dict[str, Tensor]] = []
    lasts = []
    weights: dict[str, int] = {}
    for number in range(count):
        seed = derived_seed(job.seed, Stream.INITIALIZATION, number) if number else job.seed
        part = context.part(f"member-{number}", number, count)
        network = train_network(settings, seed, data, part)
        found.append(_predictions(network, job, data.test_inputs))
        lasts.append(dict(network.last))
        weights = weights or {
            f"{fraction:g}": weights_left(pruned(network.bnn, fraction)) for fraction in FRACTIONS
        }
    made: dict[str, Any] = {
        "networks": [
            {kind: scores(log_probs, data.test_targets) for kind, log_probs in of.items()}
            for of in found
        ],
        "weights": weights,
        "last": lasts,
    }
    if count > 1:
        made["ensemble"] = {
            kind: scores(_mixed([of[kind] for of in found]), data.test_targets) for kind in found[0]
        }
    return made


def _predictions(network: Network, job: Job, inputs: Tensor) -> dict[str, Tensor]:
    """Return log probabilities, each of shape (N, K), by kind of prediction.

    ``mean-weights``; ``scaled``, the same after temperature scaling; ``averaged``, where the
    method averages; and with a fraction removed ``pruned-0.95``, at the mean weights, and
    ``averaged-0.95``.
    """
    bnn, settings = network.bnn, job.config["settings"]
    made = {
        "mean-weights": outputs_of(bnn, inputs),
        "scaled": outputs_of(bnn, inputs, job.config["logit_temperature"]),
    }
    mixed = averaged(bnn, settings, inputs, SAMPLES)
    if mixed is not None:
        made["averaged"] = mixed
    for fraction in FRACTIONS[1:]:
        small = pruned(bnn, fraction)
        made[f"pruned-{fraction:g}"] = outputs_of(small, inputs)
        if is_bayesian(small):
            mixed = averaged(small, settings, inputs, PRUNED_SAMPLES)
            assert mixed is not None
            made[f"averaged-{fraction:g}"] = mixed
    return made


def _mixed(members: Sequence[Tensor]) -> Tensor:
    """Return the log of the average of probabilities."""
    return torch.logsumexp(torch.stack(list(members)).double(), 0).sub(math.log(len(members)))


class _Row(NamedTuple):
    """One line of the tables: a method or an ensemble of it, at one width."""

    title: str
    seeds: list[int]
    of: list[Mapping[str, Any]]
    weights: Mapping[str, int]

    def values(self, kind: str, score: str) -> list[float]:
        return [scored[kind][score] for scored in self.of if kind in scored]

    def cell(self, kind: str, score: str) -> str:
        values = self.values(kind, score)
        return mean_and_error(values, 2 if score == "error" else 4) if values else ""

    def cells(self, columns: Mapping[str, tuple[str, str]]) -> str:
        """Return a cell for each column, whose kind of prediction and score are given."""
        return " | ".join(self.cell(kind, score) for kind, score in columns.values())


def _rows(results: Sequence[Result], width: int) -> dict[str, _Row]:
    """Return the rows of a width by name: a method's, and ``ensemble-METHOD``."""
    found = by_job(results)
    made = {}
    for name, method in METHODS.items():
        of = found.get(f"{name}-{width}", [])
        if of:
            weights = of[0]["metrics"]["weights"]
            networks = [result["metrics"]["networks"][0] for result in of]
            made[name] = _Row(method.title, _seeds(of), networks, weights)
    for name in ENSEMBLES:
        of = found.get(f"{name}-{width}", [])
        if of:
            weights = {
                fraction: MEMBERS * count for fraction, count in of[0]["metrics"]["weights"].items()
            }
            mixtures = [result["metrics"]["ensemble"] for result in of]
            title = f"{METHODS[name].title}, ensemble of {MEMBERS}"
            made[f"ensemble-{name}"] = _Row(title, _seeds(of), mixtures, weights)
    return made


def _seeds(results: Sequence[Result]) -> list[int]:
    return [int(result["seed"]) for result in results]


#: Columns by their heads: the kind of prediction and its score.
_SCORES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "error, mean weights": ("mean-weights", "error"),
        "error, averaged": ("averaged", "error"),
        "nll, mean weights": ("mean-weights", "nll"),
        "nll, averaged": ("averaged", "nll"),
        "nll, scaled": ("scaled", "nll"),
    }
)


def headline(results: Sequence[Result]) -> str:
    """Return the short table of the narrow networks: error, nll, and error after pruning."""
    columns = {
        **_SCORES,
        "error with 75 % removed": ("pruned-0.75", "error"),
        "95 %": ("pruned-0.95", "error"),
    }
    rows = _rows(results, WIDTHS[0])
    lines = table_head(f"| 2x{WIDTHS[0]} | {' | '.join(columns)} |")
    lines += [f"| {row.title} | {row.cells(columns)} |" for row in rows.values()]
    return "\n".join(lines)


def table(results: Sequence[Result]) -> str:
    """Return errors and nll, pruning, tests of differences, and the bound, by width."""
    widths = [width for width in WIDTHS if _rows(results, width)]
    parts = [
        f"All of {EPOCHS} epochs, with the best of {TRIALS} trials each on held-out training "
        "images. Test error in percent and nll in nats per image, mean +- standard error over the "
        f"seeds. Averaged over {SAMPLES} weight samples, or passes with dropout; scaled: "
        "temperature scaling of the predictions at the mean weights, at both widths with the "
        f"temperature of the best trial, which had 2x{WIDTHS[0]}. An ensemble averages the "
        f"predictions of {MEMBERS} networks; for the scaled nll each of them is scaled by itself."
    ]
    parts += [f"**2x{width}**\n\n{_errors(_rows(results, width))}" for width in widths]
    parts.append(
        "Test error at the mean weights with a share of the weights removed, by signal-to-noise "
        "ratio, or by magnitude where there is no noise; nothing is trained afterwards. Of an "
        "ensemble that share of each network is removed."
    )
    parts += [f"**2x{width}**\n\n{_pruned(_rows(results, width))}" for width in widths]
    parts.append(_tests(results))
    parts.append(_bounds(results, widths))
    return "\n\n".join(part for part in parts if part) + "\n"


def _errors(rows: Mapping[str, _Row]) -> str:
    lines = table_head(f"| | seeds | {' | '.join(_SCORES)} |")
    lines += [f"| {row.title} | {len(row.of)} | {row.cells(_SCORES)} |" for row in rows.values()]
    return "\n".join(lines)


def _pruned(rows: Mapping[str, _Row]) -> str:
    heads = " | ".join(f"{100 * fraction:g} %" for fraction in FRACTIONS[1:])
    lines = table_head(f"| | 0 % | {heads} | weights left at 98 % |")
    for row in rows.values():
        cells = [row.title, row.cell("mean-weights", "error")]
        cells += [row.cell(f"pruned-{fraction:g}", "error") for fraction in FRACTIONS[1:]]
        cells.append(f"{row.weights['0.98']:,}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


#: The comparisons that were fixed before the networks were trained.
_PAIRS = (
    ("gaussian", "sgd"),
    ("mixture", "sgd"),
    ("mixture-dropped", "sgd-dropped"),
    ("mixture-dropped", "dropout"),
    ("ensemble-mixture-dropped", "ensemble-sgd-dropped"),
)
#: By name: the kind of prediction and the score, of the first of a pair and of the second.
_QUANTITIES: Mapping[str, tuple[tuple[str, str], tuple[str, str]]] = MappingProxyType(
    {
        "error, mean weights": (("mean-weights", "error"),) * 2,
        "nll, scaled": (("scaled", "nll"),) * 2,
        "error, 95 % removed": (("pruned-0.95", "error"),) * 2,
    }
)
#: What was compared when the results had been seen.
_LATER = MappingProxyType(
    {"nll, averaged against scaled": (("averaged", "nll"), ("scaled", "nll"))}
)


def _tests(results: Sequence[Result]) -> str:
    """Return Welch tests of the pairs at each width: those fixed before, and a later quantity."""
    fixed = _compared(results, _PAIRS, _QUANTITIES)
    later = _compared(results, _PAIRS[:3], _LATER)
    if not fixed:
        return ""
    found = [
        f"Welch's t-tests of differences, {len(fixed) - 2} comparisons; p adjusted by Holm's "
        "method. A minus favours the first. Welch's test takes the networks as independent; all "
        "methods have the same seeds, hence the same order of the data, so that the p-value of the "
        "paired t-test stands next to it, not adjusted.\n\n" + "\n".join(fixed)
    ]
    if later:
        found.append(
            "Not among those, and chosen when the results had been seen: the nll of the averaged "
            "predictions of the first against that of the second after temperature scaling, "
            f"adjusted for these {len(later) - 2}.\n\n" + "\n".join(later)
        )
    return "\n\n".join(found)


def _compared(
    results: Sequence[Result],
    pairs: Sequence[tuple[str, str]],
    quantities: Mapping[str, tuple[tuple[str, str], tuple[str, str]]],
) -> list[str]:
    """Return the lines of a table, its head first; none if nothing can be compared."""
    found = []
    for width in WIDTHS:
        rows = _rows(results, width)
        for first, second in pairs:
            for name, (of_first, of_second) in quantities.items():
                if first in rows and second in rows:
                    one, other = rows[first], rows[second]
                    ours, theirs = one.values(*of_first), other.values(*of_second)
                    if min(len(ours), len(theirs)) > 1:
                        found.append((width, one, other, name, ours, theirs))
    raw = [welch_p_value(ours, theirs) for *_, ours, theirs in found]
    lines = table_head("| | first | second | quantity | difference | p | p, adjusted | p, paired |")
    for (width, one, other, name, ours, theirs), p, corrected in zip(
        found, raw, holm_adjusted(raw), strict=True
    ):
        digits = 4 if name.startswith("nll") else 2
        difference = f"{mean(ours) - mean(theirs):+.{digits}f}"
        paired = f"{paired_p_value(ours, theirs):.2g}" if one.seeds == other.seeds else ""
        lines.append(
            f"| 2x{width} | {one.title} | {other.title} | {name} | {difference} | {p:.2g} "
            f"| {corrected:.2g} | {paired} |"
        )
    return lines if found else []


def _bounds(results: Sequence[Result], widths: Sequence[int]) -> str:
    """Return the free energy of the Bayesian networks next to that of untrained means."""
    found = by_job(results)
    lines = []
    for width in widths:
        for name, method in METHODS.items():
            last = [
                result["metrics"]["last"][0]
                for result in found.get(f"{name}-{width}", [])
                if result["metrics"]["last"][0]
            ]
            if last:
                cells = [
                    mean_and_error([each[key] for each in last if each[key] is not None], 2)
                    for key in ("free_energy", "free_energy_untrained", "std_residual_worst")
                ]
                lines.append(f"| {method.title}, 2x{width} | {' | '.join(cells)} |")
    if not lines:
        return ""
    head = [
        "The bound: free energy in nats per image, next to that of a posterior with untrained "
        "means; and the derivative of the free energy in log std of the group of weights in which "
        "it exceeds three standard errors by most, in nats a weight (0 at the optimum).",
        "",
        *table_head("| | free energy | untrained | derivative, worst group |"),
    ]
    return "\n".join([*head, *lines])


#: Rows that the figure shows.
_DRAWN = ("sgd", "sgd-dropped", "gaussian", "mixture", "mixture-dropped")


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the error by share of weights removed, a panel for each width."""
    from bayesify.plots.compared import Curve, pruning_compared

    panels = {}
    for width in WIDTHS:
        rows = _rows(results, width)
        curves = []
        for name in _DRAWN:
            if name in rows:
                kinds = ("mean-weights", *(f"pruned-{fraction:g}" for fraction in FRACTIONS[1:]))
                runs = [[scored[kind]["error"] for kind in kinds] for scored in rows[name].of]
                curves.append(Curve(rows[name].title, FRACTIONS, runs))
        if curves:
            panels[f"2x{width}"] = curves
    return {"blundell-comparison": pruning_compared(panels)} if panels else {}


EXPERIMENT = Experiment(
    name="blundell-comparison",
    source="Blundell et al. 2015, table 1 and 2, under one protocol",
    reported="the methods of table 1 and stronger baselines: same epochs, trials and seeds",
    seeds=(0, 1, 2, 3, 4),
    memory_mb=1500,
    jobs=jobs,
    run=run,
    table=with_cost(table),
    figures=figures,
    on_gpu=True,
)
