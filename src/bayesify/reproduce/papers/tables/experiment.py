"""The estimators for tables, at their defaults, next to models that people use at theirs.

Eleven models on 31 sets, real and generated, in five random splits into 80 % and 20 % of the rows.
Nothing is tuned for any set.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayesify.io import StorageError, atomic_write
from bayesify.reproduce.harness.experiment import Context, Experiment, Job, Result
from bayesify.reproduce.papers.tables.evaluation import Scores, evaluate
from bayesify.reproduce.papers.tables.models import MODELS, OURS
from bayesify.reproduce.papers.tables.score_tables import (
    GROUPS,
    KINDS,
    RANKED,
    close_to_best,
    mean_ranks,
    score_tables,
    values_of,
)
from bayesify.reproduce.papers.tables.sets import MOST_ROWS, SETS, SPLITS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

_QUICK_SETS, _QUICK_MODELS = ("yacht", "wine-kinds"), (OURS, "random-forest")


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return a job for each set and model, which has all splits."""
    made = []
    for seed in seeds:
        for table in SETS.values():
            for name, model in MODELS.items():
                if model.make(table.kind) is None:
                    continue
                if quick and not (table.name in _QUICK_SETS and name in _QUICK_MODELS):
                    continue
                splits = 1 if quick else SPLITS
                config = {
                    "set": table.name,
                    "group": table.group,
                    "model": name,
                    "splits": splits,
                    "most_rows": MOST_ROWS,
                }
                job = f"{table.name}-{name}"
                made.append(Job(job, seed, config, model.seconds * splits, table.datasets))
    return made


def run(job: Job, context: Context) -> dict[str, Any]:
    """Train and measure a model on each split of a set; finished splits are kept in ``work``."""
    model, splits = MODELS[job.config["model"]], job.config["splits"]
    make = model.make(SETS[job.config["set"]].kind)
    assert make is not None
    version, found = model.version(), []
    for number in range(splits):
        stored = None if context.work is None else context.work / f"split-{number}.json"
        if stored is not None and stored.exists():
            found.append(_read(stored))
        else:
            scores = evaluate(make, job.config["set"], job.seed * splits + number, context=context)
            found.append({k: v if v is None else float(f"{v:.6g}") for k, v in scores.items()})
            if stored is not None:
                stored.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(stored, json.dumps(found[-1]))
        if context.on_progress is not None:
            context.on_progress((number + 1) / splits)
    names = [name for name, value in found[0].items() if value is not None]
    return {"package": version, **{name: [scores[name] for scores in found] for name in names}}


def _read(path: Path) -> Scores:
    try:
        scores: Scores = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StorageError(f"{path} cannot be read as the scores of a split ({error})") from error
    numbers = scores.values() if isinstance(scores, dict) else []
    if not numbers or not all(each is None or isinstance(each, float) for each in numbers):
        raise StorageError(f"{path} does not hold the scores of a split by their names")
    return scores


def table(results: Sequence[Result]) -> str:
    """Return mean ranks, then each score on each set, and the versions of the packages."""
    packages = sorted({result["metrics"]["package"] for result in results})
    missing = [model.title for name, model in MODELS.items() if not _has(results, name)]
    splits = max(len(result["metrics"]["fit_seconds"]) for result in results)
    head = (
        f"Mean +- standard error over {splits} random splits, in which the test rows overlap. The "
        "best mean is in bold; rank 1 is the best, and equal means share their ranks. nll in nats. "
        "Width of intervals: relative to the models' median on each set, geometric mean. "
        f"Packages: {', '.join(packages)}."
    )
    if missing:
        head += f" Without results here: {', '.join(missing)}."
    close, count = close_to_best(results, OURS)
    if count:
        head += (
            f"\n\nThe RMSE or accuracy of {MODELS[OURS].title} is within a factor of 1.05 of the "
            f"best model's on {close} of {count} sets."
        )
    return f"{head}\n\n{score_tables(results)}"


def _has(results: Sequence[Result], model: str) -> bool:
    return any(result["config"]["model"] == model for result in results)


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the mean ranks."""
    from bayesify.reproduce.papers.tables.rank_figure import rank_figure

    panels = {}
    for group in GROUPS:
        for kind in KINDS:
            ranks, count = {}, 0
            for score in RANKED[kind]:
                values = values_of(results, kind, group, score.name)
                found, sets = mean_ranks(values, more=score.more)
                if found:
                    ranks[score.title] = {MODELS[name].title: rank for name, rank in found.items()}
                    count = sets
            if ranks:
                panels[f"{kind.capitalize()}, {count} {group} sets"] = ranks
    return {"tables": rank_figure(panels, MODELS[OURS].title)} if panels else {}


EXPERIMENT = Experiment(
    name="tables",
    source="the estimators for tables next to models that people use, all at their defaults",
    reported="nothing: nll, CRPS, errors and intervals on 31 sets",
    seeds=(0,),
    memory_mb=1500,
    jobs=jobs,
    run=run,
    table=table,
    figures=figures,
)
