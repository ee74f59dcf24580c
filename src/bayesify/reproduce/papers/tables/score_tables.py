"""Markdown tables of the scores of all models on all sets, and their mean ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

from bayesify.reproduce.harness.experiment import Result
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error
from bayesify.reproduce.papers.tables.models import MODELS
from bayesify.reproduce.papers.tables.sets import SETS, Group, Kind

__all__ = [
    "GROUPS",
    "KINDS",
    "RANKED",
    "Values",
    "close_to_best",
    "mean_ranks",
    "score_tables",
    "values_of",
]

GROUPS: tuple[Group, ...] = ("decision", "development")
KINDS: tuple[Kind, ...] = ("numbers", "classes")


class _Score(NamedTuple):
    """A score: its name in the results, its title, whether more is better, and its decimals."""

    name: str
    title: str
    more: bool = False
    #: None: three significant digits.
    digits: int | None = None


#: The scores that models are ranked by.
RANKED: Mapping[Kind, tuple[_Score, ...]] = {
    "numbers": (_Score("nll", "nll", digits=2), _Score("crps", "CRPS"), _Score("rmse", "RMSE")),
    "classes": (
        _Score("nll", "nll", digits=3),
        _Score("accuracy", "accuracy", more=True, digits=1),
        _Score("brier", "Brier", digits=3),
        _Score("ece", "ECE", digits=3),
    ),
}
_SHOWN: Mapping[Kind, tuple[_Score, ...]] = {
    "numbers": (
        *RANKED["numbers"],
        _Score("coverage", "Coverage of the 90 % intervals, in percent", digits=1),
        _Score("width", "Mean width of the 90 % intervals"),
    ),
    "classes": RANKED["classes"],
}
_TITLES: Mapping[Group, str] = {
    "decision": "Decision sets, used for no choice",
    "development": "Development sets, on whose training rows settings may be chosen",
}
#: Scores without a best value: a narrow interval is good only if it covers.
_UNMARKED = ("coverage", "width")

#: The values of a score over all splits, by set and model.
Values = dict[str, dict[str, list[float]]]


def values_of(results: Sequence[Result], kind: Kind, group: Group, score: str) -> Values:
    """Return a score's values by set and model, in the order of the sets and models.

    Sets and models without any are left out.
    """
    found: Values = {}
    for name, table in SETS.items():
        for model in MODELS:
            values = [
                value
                for result in results
                if result["config"]["set"] == name and result["config"]["model"] == model
                for value in result["metrics"].get(score, ())
            ]
            if values and (table.kind, table.group) == (kind, group):
                found.setdefault(name, {})[model] = values
    return found


def mean_ranks(values: Values, *, more: bool = False) -> tuple[dict[str, float], int]:
    """Return each model's mean rank, and the number of sets: those that all models were run on.

    Rank 1 is the best mean over the splits; equal means share their ranks.

    Args:
        values: the values of a score by set and model.
        more: whether more is better.

    Example:
        >>> mean_ranks({"a": {"x": [1.0], "y": [2.0]}, "b": {"x": [3.0], "y": [3.0]}})
        ({'x': 1.25, 'y': 1.75}, 2)
    """
    from scipy.stats import rankdata

    models = list(dict.fromkeys(model for of_set in values.values() for model in of_set))
    ranks: list[Any] = []
    for of_set in values.values():
        if all(model in of_set for model in models):
            means = [float(f"{mean(of_set[model]):.6g}") for model in models]
            ranks.append(rankdata([-value if more else value for value in means]))
    if not ranks:
        return {}, 0
    return {
        model: float(mean(float(of_set[place]) for of_set in ranks))
        for place, model in enumerate(models)
    }, len(ranks)


def close_to_best(results: Sequence[Result], model: str) -> tuple[int, int]:
    """Count the sets on which a model's RMSE, or accuracy, is within a factor of 1.05 of the best.

    Returns:
        Their number, and that of all sets that the model was run on.
    """
    ratios: list[float] = []  # at least 1
    for group in GROUPS:
        errors = values_of(results, "numbers", group, "rmse").values()
        accuracies = values_of(results, "classes", group, "accuracy").values()
        ratios += [mean(e[model]) / min(map(mean, e.values())) for e in errors if model in e]
        ratios += [max(map(mean, a.values())) / mean(a[model]) for a in accuracies if model in a]
    return sum(ratio <= 1.05 for ratio in ratios), len(ratios)


def score_tables(results: Sequence[Result]) -> str:
    """Return the mean ranks of all models, then every score on every set."""
    parts = []
    for group in GROUPS:
        for kind in KINDS:
            parts += _ranks(results, kind, group)
    for group in GROUPS:
        for kind in KINDS:
            for score in _SHOWN[kind]:
                parts += _grid(values_of(results, kind, group, score.name), score, kind, group)
    return "\n".join(parts)


def _ranks(results: Sequence[Result], kind: Kind, group: Group) -> list[str]:
    """Return the lines of a table of mean ranks, coverage and width."""
    ranks = {
        score.title: mean_ranks(values_of(results, kind, group, score.name), more=score.more)
        for score in RANKED[kind]
    }
    # Seconds are stored and not shown: the machine had other work, which slows models unequally.
    fits = values_of(results, kind, group, "fit_seconds")
    models = [name for name in MODELS if any(name in of_set for of_set in fits.values())]
    if not models:
        return []
    count = max(number for _, number in ranks.values())
    heads = ["model", *(f"rank by {title}" for title in ranks)]
    columns = [[_number(found.get(model), 1) for model in models] for found, _ in ranks.values()]
    for place, (found, _) in enumerate(ranks.values()):
        best = min(found.values(), default=None)
        columns[place] = [
            f"**{cell}**" if best is not None and found.get(model) == best else cell
            for model, cell in zip(models, columns[place], strict=True)
        ]
    if kind == "numbers":
        heads += ["coverage, mean", "lowest and highest", "width"]
        coverage = values_of(results, kind, group, "coverage")
        relative = _relative_widths(values_of(results, kind, group, "width"))
        covered = {model: _by_set(coverage, model) for model in models}
        columns += [
            [f"{mean(covered[model]):.1f}" for model in models],
            [f"{min(covered[model]):.1f}, {max(covered[model]):.1f}" for model in models],
            [f"{relative[model]:.2f}" for model in models],
        ]
    titles = [MODELS[model].title for model in models]
    return [
        f"**{_TITLES[group]}: {kind}.** Mean ranks over {count} sets.",
        "",
        *table_head(f"| {' | '.join(heads)} |"),
        *(f"| {' | '.join(row)} |" for row in zip(titles, *columns, strict=True)),
        "",
    ]


def _by_set(values: Values, model: str) -> list[float]:
    return [mean(of_set[model]) for of_set in values.values() if model in of_set]


def _relative_widths(width: Values) -> dict[str, float]:
    """Return each model's geometric mean over the sets of its width / the models' median."""
    logs: dict[str, list[float]] = {}
    for of_set in width.values():
        means = {model: mean(values) for model, values in of_set.items()}
        middle = median(means.values())
        for model, value in means.items():
            logs.setdefault(model, []).append(math.log(value / middle))
    return {model: math.exp(mean(found)) for model, found in logs.items()}


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _grid(values: Values, score: _Score, kind: Kind, group: Group) -> list[str]:
    """Return the lines of one score's table: a row for each set, a column for each model."""
    if not values:
        return []
    models = [name for name in MODELS if any(name in of_set for of_set in values.values())]
    unit = " in the target's unit" if score.digits is None and score.name != "ece" else ""
    lines = [
        f"{score.title}{unit}; {group} sets, {kind}:",
        "",
        *table_head(f"| | {' | '.join(MODELS[model].title for model in models)} |"),
    ]
    for name, of_set in values.items():
        means = {model: mean(found) for model, found in of_set.items()}
        best = (max if score.more else min)(means.values())
        digits = _digits(list(means.values())) if score.digits is None else score.digits
        cells = []
        for model in models:
            cell = mean_and_error(of_set.get(model, []), digits)
            marked = model in means and means[model] == best and score.name not in _UNMARKED
            cells.append(f"**{cell}**" if marked else cell)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def _digits(means: Sequence[float]) -> int:
    """Return the decimals of three significant digits of the smallest mean."""
    least = min(abs(value) for value in means)
    return max(0, 2 - math.floor(math.log10(least))) if least > 0.0 else 3
