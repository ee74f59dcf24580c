"""Rahmanto's grid search for a scale mixture, section 3 of the document: MNIST, 2x800 units.

A grid of pi x sigma1 x sigma2, judged by the accuracy on the last 10,000 training images, which are
held out; test images are not used. For sigma2 the document gives the ends, 1e-1 and 1e-4, and e^-6,
e^-7 and e^-8 between them; e^-4 fills the gap. It gives neither the number of epochs nor the
learning rate, and its KL has the full weight in each minibatch. Here each point is trained by the
code of ``bayesify train`` on the evidence lower bound, with the KL divided equally among the
minibatches. The number of epochs is such that all 24 points take half an hour on one core.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from bayesify.app.runs import RunConfig
from bayesify.metrics import classification_metrics
from bayesify.reproduce.harness.experiment import (
    Context,
    Experiment,
    Job,
    Result,
    RunJob,
    one_by_one,
)
from bayesify.reproduce.harness.image_runs import curve, held_out, images_of, settings_of, trained
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.result_files import read_results
from bayesify.reproduce.harness.seed_statistics import mean_and_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "REPORTED", "Place"]

_NAME = "rahmanto-grid"
#: The Optuna studies of all seeds, next to the results.
JOURNAL = "journal.log"
#: Begins each trial in the journal.
_TRIAL = '{"op_code":4,'


class Place(NamedTuple):
    """A point of the grid: the mixture's weight, and both components' standard deviations."""

    pi: float
    sigma1: float
    sigma2: float


_PIS = (0.25, 0.5)
_SIGMAS1 = (1.0, math.exp(-1.0))
_SIGMAS2 = (1e-1, math.exp(-4.0), math.exp(-6.0), math.exp(-7.0), math.exp(-8.0), 1e-4)

#: The document's table 1: validation accuracy in percent. It prints sigma1 as 0.368, and sigma2 as
#: 0.00034, 0.00091 and 0.00248.
REPORTED: dict[Place, float] = {
    Place(0.25, 1.0, math.exp(-8.0)): 97.95,
    Place(0.25, 1.0, math.exp(-7.0)): 97.89,
    Place(0.25, math.exp(-1.0), math.exp(-6.0)): 97.88,
    Place(0.25, 1.0, math.exp(-6.0)): 97.83,
}

SETTINGS: dict[str, Any] = {
    "hidden": [800, 800],
    "prior": "scale-mixture",
    "estimator": "sampling",
    "kl": "auto",
    "kl_weighting": "uniform",
    "temperature": 1.0,
    "kl_warmup": 0.5,
    "init_std": 0.02,
    "train_samples": 1,
    "test_samples": 20,
    "optimizer": "adam",
    "lr": 1e-3,
    "rho_lr_scale": 1.0,
    "schedule": "cosine",
    "epochs": 5,
    "batch_size": 128,
    "precision": "float32",
    "backend": "auto",
}
_HELD_OUT = 10_000
#: Estimated seconds of a point on one core.
_SECONDS = 55.0
_QUICK: dict[str, Any] = {
    "hidden": [100, 100],
    "epochs": 4,
    "batch_size": 32,
    "limit": 2000,
    "test_samples": 5,
}
_QUICK_PLACES = list(product(_PIS, _SIGMAS1, (math.exp(-8.0),)))
_QUICK_HELD_OUT = 500


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return a job for each point of the grid, seed by seed."""
    made = []
    for seed in seeds:
        for place in _QUICK_PLACES if quick else product(_PIS, _SIGMAS1, _SIGMAS2):
            pi, sigma1, sigma2 = place
            config = {
                "dataset": "mnist",
                "held_out": _QUICK_HELD_OUT if quick else _HELD_OUT,
                "settings": {
                    **SETTINGS,
                    "pi": pi,
                    "std1": sigma1,
                    "std2": sigma2,
                    **(_QUICK if quick else {}),
                },
            }
            name = f"pi-{pi:g}-sigma1-{sigma1:.3g}-sigma2-{sigma2:.3g}"
            made.append(Job(name, seed, config, 2.0 if quick else _SECONDS, ("mnist",)))
    return made


def run(job: Job, context: Context) -> dict[str, Any]:
    """Train the network of one point, and measure it on the held-out images."""
    config = job.config
    settings = settings_of(config["settings"])
    limit = settings.get("limit")
    images = images_of(context, config["dataset"], limit)
    data = held_out(images, config["held_out"])
    made = RunConfig.of(config["dataset"], **settings, seed=job.seed)
    bnn, history = trained(made, data, context)
    measured = classification_metrics(
        bnn.predict(data.test_inputs, made.test_samples),
        bnn.predict_mean(data.test_inputs).mean,
        data.test_targets,
    )
    return {
        "validation": {
            "accuracy": round(100.0 - measured["error_predictive"], 6),
            "accuracy_mean_weights": round(100.0 - measured["error_mean_weights"], 6),
            **{name: measured[name] for name in ("nll", "brier", "ece")},
        },
        "num_train": len(data.train_targets),
        "num_validation": len(data.test_targets),
        "train_nll": history[-1]["nll"],
        "kl_nats": history[-1]["kl"],
        "validation_error_by_epoch": curve(history, "validation_error", 3),
    }


def search(jobs: Sequence[Job], folder: Path, run_job: RunJob) -> None:
    """Run all points of the grid, then write them as Optuna studies, one for each seed.

    The studies are made from the files of results. They are written anew when a point was missing
    before, or the journal is or lacks a seed.

    Raises:
        ImportError: Optuna is not installed, and there is something left to do.
        StorageError: a result in the folder is damaged.
    """
    journal = folder / JOURNAL
    written = journal.read_text(encoding="utf-8") if journal.exists() else ""
    seeds = {job.seed for job in jobs}
    has_seeds = all(any(f'"{_study(s, q)}"' in written for q in (False, True)) for s in seeds)
    is_finished = has_seeds and all((folder / job.file_name).exists() for job in jobs)
    # Other points may have been found since the journal was written.
    if is_finished and written.count(_TRIAL) == len(read_results(folder)):
        return
    # Imported before the jobs are run, as Optuna may not be installed.
    from bayesify.reproduce.harness.optuna_study import FinishedTrial, write_studies

    one_by_one(jobs, folder, run_job)
    studies = defaultdict(list)
    for result in read_results(folder):
        pi, sigma1, sigma2 = _place(result["config"])
        parameters = {
            "pi": pi,
            "minus_ln_sigma1": round(-math.log(sigma1), 3) + 0.0,
            "minus_ln_sigma2": round(-math.log(sigma2), 3) + 0.0,
        }
        accuracy = float(result["metrics"]["validation"]["accuracy"])
        name = _study(result["seed"], result["quick"])
        studies[name].append(FinishedTrial(parameters, accuracy))
    write_studies(journal, studies)


def _study(seed: int, quick: bool) -> str:
    return f"{_NAME}{'-quick' if quick else ''}-seed-{seed}"


def table(results: Sequence[Result]) -> str:
    """Return the document's four best points with ours there, our four best, and the whole grid."""
    found = _by_place(results)
    ranked = sorted(found, key=lambda place: -mean(_values(found[place], "accuracy")))
    ranks = {place: str(rank) for rank, place in enumerate(ranked, start=1)}
    heads = "pi | sigma1 | sigma2 | accuracy, averaged % | mean weights % | nll"
    top = table_head(f"| {heads} |")
    reported = [
        f"| {_shown(place)} | {value:.2f} | {_cells(found.get(place, []))} "
        f"| {ranks.get(place, '-')} |"
        for place, value in REPORTED.items()
    ]
    best = [f"| {_shown(place)} | {_cells(found[place])} |" for place in ranked[:4]]
    whole = [f"| {_shown(place)} | {_cells(found[place])} |" for place in sorted(found)]
    return "\n".join(
        [
            f"The four best settings reported, and ours at the same points, of {len(found)} that "
            "are done. Accuracy on the held-out training images.",
            "",
            *table_head(f"| {heads.replace('sigma2 |', 'sigma2 | reported % |')} | our rank |"),
            *reported,
            "",
            "Our four best.",
            "",
            *top,
            *best,
            "",
            *_chance(found, ranked),
            "The whole grid.",
            "",
            *top,
            *whole,
        ]
    )


def files(results: Sequence[Result]) -> dict[str, str]:
    """Return ``grid.csv``, with a line for each point and seed."""
    lines = [
        "pi,sigma1,sigma2,seed,validation_accuracy_mean_weights,validation_accuracy_averaged,"
        "validation_nll,quick"
    ]
    for place, of_place in sorted(_by_place(results).items()):
        for result in of_place:
            got = result["metrics"]["validation"]
            numbers = (*place, result["seed"], got["accuracy_mean_weights"], got["accuracy"])
            cells = [f"{value:.6g}" for value in (*numbers, got["nll"])]
            lines.append(",".join([*cells, str(result["quick"]).lower()]))
    return {"grid.csv": "\n".join(lines) + "\n"}


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the validation error over sigma2, a panel for each pi, a line for each sigma1."""
    from bayesify.plots.grid import Mark, grid_lines

    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for place, of_place in sorted(_by_place(results).items(), reverse=True):
        lines = panels.setdefault(f"pi = {place.pi:g}", {})
        error = 100.0 - mean(_values(of_place, "accuracy"))
        lines.setdefault(f"sigma1 = {place.sigma1:.3g}", []).append((place.sigma2, error))
    marks = [
        Mark(f"pi = {pi:g}", f"sigma1 = {sigma1:.3g}", sigma2, 100.0 - value)
        for (pi, sigma1, sigma2), value in REPORTED.items()
    ]
    if not panels:
        return {}
    return {
        _NAME: grid_lines(
            dict(sorted(panels.items())),
            marks,
            xlabel="sigma2",
            ylabel="validation error (%); ours averaged",
        )
    }


def _place(config: Mapping[str, Any]) -> Place:
    settings = config["settings"]
    return Place(settings["pi"], settings["std1"], settings["std2"])


def _by_place(results: Sequence[Result]) -> dict[Place, list[Result]]:
    found = defaultdict(list)
    for result in results:
        found[_place(result["config"])].append(result)
    return found


def _values(results: Sequence[Result], name: str) -> list[float]:
    return [result["metrics"]["validation"][name] for result in results]


def _shown(place: Place) -> str:
    return f"{place.pi:g} | {place.sigma1:.3g} | {place.sigma2:.3g}"


def _cells(results: Sequence[Result]) -> str:
    columns = {"accuracy": 2, "accuracy_mean_weights": 2, "nll": 4}
    return " | ".join(
        mean_and_error(_values(results, name), digits) for name, digits in columns.items()
    )


def _chance(found: Mapping[Place, list[Result]], ranked: Sequence[Place]) -> list[str]:
    """State the standard error of an accuracy on so few images."""
    if not ranked:
        return []
    best = mean(_values(found[ranked[0]], "accuracy")) / 100.0
    count = found[ranked[0]][0]["metrics"]["num_validation"]
    error = 100.0 * math.sqrt(best * (1.0 - best) / count)
    spread = max(REPORTED.values()) - min(REPORTED.values())
    return [
        f"On {count:,} images the best accuracy has a standard error of {error:.2f} by itself (the "
        "difference of two on the same images has a smaller one); the four reported ones span "
        f"{spread:.2f}. Epochs: {found[ranked[0]][0]['config']['settings']['epochs']}.",
        "",
    ]


EXPERIMENT = Experiment(
    name=_NAME,
    source="Rahmanto, reproduction study in PyTorch, table 1",
    reported="validation accuracy of the four best of a search over pi, sigma1, sigma2: 97.95 %",
    seeds=(0,),
    memory_mb=1000,
    jobs=jobs,
    run=run,
    table=table,
    figures=figures,
    schedule=search,
    files=files,
    on_gpu=True,
)
