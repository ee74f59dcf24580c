"""Test accuracy on MNIST against the number of labels, by the method that chooses them.

The settings were chosen by trials on held-out training images with random labels, which are jobs
too. The test images were used for nothing but the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, median_low
from typing import TYPE_CHECKING, Any

from bayesify.reproduce.harness.experiment import (
    Context,
    Experiment,
    Job,
    Result,
    by_title,
    is_trial,
)
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error, with_cost
from bayesify.reproduce.papers.active.asking import ask, load_problem

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "REPORTED", "labels_needed"]

#: Labels until 95 % of the test images are right: the median of Kirsch et al.
REPORTED: Mapping[str, int] = {"BatchBALD": 190, "BALD": 250}
_METHODS = {"BatchBALD": "batch-bald", "random": "random", "EPIG": "epig", "BALD": "bald"}
_COLOURS = dict(zip(_METHODS, ("blue", "grey", "green", "vermillion"), strict=True))
_REFERENCE = "random"
_LEVELS = (90.0, 95.0)
#: What is asked of BatchBALD: labels until 95 %, and their share of those that random choice needs.
_WANTED_LABELS, _WANTED_SHARE = 190, 0.75

_SETTINGS: dict[str, Any] = {
    "limit": None,
    "held_out": 0,
    "num_test": None,
    "angles": 6,
    "levels": 3,
    "grid": 4,
    "components": 100,
    "whitening": 0.0,
    "hidden": [],
    "posterior": "mean-field",
    "prior_std": 2.0,
    "init_std": 0.5,
    "temperature": 1.0,
    "steps": 100,
    "lr": 0.03,
    "train_samples": 1,
    "start_per_class": 2,
    "batch": 10,
    "num_labels": 220,
    "candidates": 1000,
    "targets": 200,
    "num_samples": 100,
    "test_samples": 50,
}
#: Seconds on one core of a run with all labels; the features are computed once for all.
_SECONDS = {"batch-bald": 45.0, "random": 20.0, "epig": 30.0, "bald": 20.0}
_QUICK: dict[str, Any] = {
    "limit": 600,
    "num_test": 500,
    "angles": 2,
    "levels": 2,
    "components": 20,
    "steps": 30,
    "num_labels": 40,
    "candidates": 100,
    "targets": 20,
    "num_samples": 10,
    "test_samples": 10,
}
#: Each is a change of the settings above, tried on held-out training images with the first seed
#: and random labels, so that no method that chooses has a part in it.
_TRIALS: list[dict[str, Any]] = [
    {},
    {"prior_std": 5.0},
    {"prior_std": 1.0},
    {"prior_std": 0.5, "init_std": 0.25},
    {"temperature": 0.1},
    {"components": 50},
    {"components": 200},
    {"components": 200, "whitening": 0.5, "prior_std": 1.0},
    {"whitening": 0.5, "prior_std": 1.0},
    {"whitening": 0.25, "prior_std": 3.0},
]
_HELD_OUT = {"held_out": 10_000, "batch": 90, "num_labels": 200}


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return the methods for each seed, then the trials of the first seed."""
    made: list[Job] = []
    for title, method in _METHODS.items():
        config, seconds = {"title": title, "method": method, **_SETTINGS}, _SECONDS[method]
        if quick:
            config, seconds = {**config, **_QUICK}, 1.0
        made += [Job(method, seed, config, seconds, ("mnist",)) for seed in seeds]
    for number, changed in enumerate(_TRIALS if not quick else []):
        config = {"title": _REFERENCE, "method": _METHODS[_REFERENCE], **_SETTINGS, **_HELD_OUT}
        made.append(Job(f"trial-{number}", seeds[0], {**config, **changed}, 4.0, ("mnist",)))
    return made


def run(job: Job, context: Context) -> dict[str, Any]:
    """Label, train and measure until the labels are spent.

    Raises:
        DataError: the data set is missing; raised before anything is trained.
    """
    data_dir = None if context.data_dir is None else str(context.data_dir)
    return ask(load_problem(job.config, data_dir), job.config, job.seed, context)


def labels_needed(result: Result, percent: float) -> float:
    """Return the smallest number of labels with at least this accuracy; infinity if none has it.

    Example:
        >>> result = {"metrics": {"labels": [20, 30, 40], "accuracy": [80.0, 91.0, 89.0]}}
        >>> labels_needed(result, 90.0), labels_needed(result, 95.0)
        (30, inf)
    """
    metrics = result["metrics"]
    pairs = zip(metrics["labels"], metrics["accuracy"], strict=True)
    return min((labels for labels, accuracy in pairs if accuracy >= percent), default=math.inf)


def table(results: Sequence[Result]) -> str:
    """Return the table of the methods, what was asked for, and the table of the trials."""
    found = by_title([result for result in results if not is_trial(result)], _METHODS)
    parts = []
    if found:
        parts += [
            "Labels until that share of the test images is right for the first time: median over "
            "seeds, in brackets the fewest and the most. Accuracy in percent: mean +- standard "
            "error over seeds.",
            _method_table(found),
        ]
        if {"BatchBALD", _REFERENCE} <= set(found):
            parts.append(_verdict(found))
    trials = [result for result in results if is_trial(result)]
    if trials:
        parts += ["**Trials on held-out training images**", _trial_table(trials)]
    return "\n\n".join(parts) + "\n"


def _method_table(found: Mapping[str, Sequence[Result]]) -> str:
    shown = [labels for labels in (50, 100, 200) if _accuracies(found, labels)]
    levels = [f"to {level:.0f} %" for level in _LEVELS]
    head = [
        "",
        "reported, to 95 %",
        *levels,
        *(f"{each}, share of random's" for each in levels),
        *(f"accuracy with {labels} labels" for labels in shown),
        "seeds",
    ]
    lines = table_head(f"| {' | '.join(head)} |")
    for title, of in found.items():
        cells = [
            title,
            str(REPORTED.get(title, "")),
            *(_spread([labels_needed(result, level) for result in of], of) for level in _LEVELS),
            *(_share(found, title, level) for level in _LEVELS),
            *(mean_and_error(_accuracies({title: of}, labels), 2) for labels in shown),
            str(len(of)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _accuracies(found: Mapping[str, Sequence[Result]], labels: int) -> list[float]:
    """Return the accuracies with this number of labels, one for each result that has it."""
    metrics = [result["metrics"] for of in found.values() for result in of]
    return [
        accuracy
        for each in metrics
        for number, accuracy in zip(each["labels"], each["accuracy"], strict=True)
        if number == labels
    ]


def _median_needed(results: Sequence[Result], level: float) -> float:
    # The lower of two, so that it stays a number where half of the runs end before.
    return median_low(labels_needed(result, level) for result in results)


def _spread(values: Sequence[float], results: Sequence[Result]) -> str:
    most = max(result["metrics"]["labels"][-1] for result in results)

    def text(value: float) -> str:
        return f"> {most}" if math.isinf(value) else f"{value:g}"

    if len(values) == 1:
        return text(values[0])
    return f"{text(median_low(values))} ({text(min(values))} to {text(max(values))})"


def _share(found: Mapping[str, Sequence[Result]], title: str, level: float) -> str:
    if _REFERENCE not in found or title == _REFERENCE:
        return ""
    needed = _median_needed(found[title], level)
    of_random = _median_needed(found[_REFERENCE], level)
    if math.isinf(needed):
        return "-"
    if math.isinf(of_random):
        most = max(result["metrics"]["labels"][-1] for result in found[_REFERENCE])
        return f"< {needed / most:.2f}"
    return f"{needed / of_random:.2f}"


def _verdict(found: Mapping[str, Sequence[Result]]) -> str:
    """Return what is asked of BatchBALD next to what was measured."""
    needed = [labels_needed(result, 95.0) for result in found["BatchBALD"]]
    enough = sum(value <= _WANTED_LABELS for value in needed)
    share = _share(found, "BatchBALD", 95.0)
    return (
        f"BatchBALD has 95 % with at most {_WANTED_LABELS} labels on {enough} of {len(needed)} "
        f"seeds. Its share of the labels of random choice is {share}, where at most "
        f"{_WANTED_SHARE:.2f} is asked for."
    )


def _trial_table(results: Sequence[Result]) -> str:
    shown = {
        "components": "components",
        "whitening": "whitening",
        "prior_std": "prior's std",
        "temperature": "temperature",
    }
    labels = results[0]["metrics"]["labels"]
    head = [*shown.values(), *(f"accuracy, nll with {number} random labels" for number in labels)]
    lines = table_head(f"| {' | '.join(head)} |")
    for result in results:
        metrics = result["metrics"]
        cells = [f"{result['config'][key]:g}" for key in shown]
        measured = zip(metrics["accuracy"], metrics["nll"], strict=True)
        cells += [f"{accuracy:.2f}, {nll:.3f}" for accuracy, nll in measured]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the accuracy against the number of labels, and the labels that each method needs."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from bayesify.plots.style import STYLE

    found = by_title([result for result in results if not is_trial(result)], _METHODS)
    with rc_context(STYLE):
        figure = Figure(figsize=(9.0, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _draw_curves(left, found)
        _draw_needed(right, found)
    return {"active": figure}


def _draw_curves(axes: Axes, found: Mapping[str, Sequence[Result]]) -> None:
    from bayesify.plots.style import COLOURS

    lowest = 90.0
    for title, of in found.items():
        labels = of[0]["metrics"]["labels"]
        by_labels = list(zip(*(result["metrics"]["accuracy"] for result in of), strict=True))
        labels = labels[: len(by_labels)]
        means = [mean(values) for values in by_labels]
        colour = COLOURS[_COLOURS[title]]
        low, high = [min(v) for v in by_labels], [max(v) for v in by_labels]
        axes.fill_between(labels, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(labels, means, color=colour, label=title)
        lowest = min(lowest, *low)
    axes.axhline(95.0, color=COLOURS["ink"], lw=0.8, ls=":")
    axes.set(title="accuracy", xlabel="labels", ylabel="test accuracy (%)")
    axes.set_ylim(math.floor(lowest), 100.0)
    if found:
        axes.legend(loc="lower right")


def _draw_needed(axes: Axes, found: Mapping[str, Sequence[Result]]) -> None:
    from bayesify.plots.style import COLOURS

    titles = list(found)[::-1]
    labels: set[str] = set()
    for place, title in enumerate(titles):
        colour = COLOURS[_COLOURS[title]]
        count = len(found[title])
        for number, result in enumerate(found[title]):
            needed = labels_needed(result, 95.0)
            height = place + 0.7 * ((number + 0.5) / count - 0.5)
            if math.isinf(needed):
                last = result["metrics"]["labels"][-1]
                label = f"not with {last}"
                axes.plot(last, height, ">", ms=4.5, color=colour, label=_once(label, labels))
            else:
                axes.plot(needed, height, "o", ms=4, color=colour)
        if title in REPORTED:
            label = _once("reported", labels)
            axes.plot(REPORTED[title], place, "x", ms=7, mew=1.6, color=COLOURS["ink"], label=label)
    axes.set(title="labels until 95 %", xlabel="labels", ylim=(-0.9, len(titles) - 0.4))
    axes.set_yticks(range(len(titles)), titles)
    axes.set_xlim(0.0, 1.06 * axes.get_xlim()[1])
    if labels:
        axes.legend(loc="lower left")


def _once(label: str, seen: set[str]) -> str:
    """Return the label the first time, then one that a legend leaves out."""
    if label in seen:
        return "_" + label
    seen.add(label)
    return label


EXPERIMENT = Experiment(
    name="active",
    source="Kirsch, van Amersfoort and Gal 2019, BatchBALD, on MNIST",
    reported="MNIST, 95 % of the test images right: BatchBALD with 190 labels, BALD with 250",
    seeds=(0, 1, 2, 3, 4),
    memory_mb=1500,
    jobs=jobs,
    run=run,
    table=with_cost(table),
    figures=figures,
)
