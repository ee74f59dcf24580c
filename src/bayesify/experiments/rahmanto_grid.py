"""Rahmanto's search for a scale mixture, section 3 of the document: MNIST, 2x800 units.

A grid of pi x sigma1 x sigma2, by the accuracy on the last 10,000 training images, which are not
trained on; test images are not looked at. Of sigma2 the document gives the ends, 1e-1 and 1e-4,
and e^-6, e^-7 and e^-8 between them; e^-4 fills the gap. It says neither for how long the search
trained nor at which rate, and in each minibatch its KL has the full weight. Here each point is
trained by the code of ``bayesify train``, on the evidence lower bound with the KL in equal parts
over the minibatches, for so many epochs as let all 24 points be done within half an hour of one
core.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from bayesify.datasets import load_images
from bayesify.experiments.cells import cell
from bayesify.experiments.experiment import Context, Experiment, Row, Take, Unit
from bayesify.experiments.networks import curve, held_out, settings_of, trained
from bayesify.metrics import classification_metrics
from bayesify.runs import RunConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT", "REPORTED", "Place"]

_NAME = "rahmanto-grid"


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
    "step": "auto",
}
_HELD_OUT = 10_000
#: On one core.
_SECONDS = 55.0
_QUICK: dict[str, Any] = {
    **{"hidden": [100, 100], "epochs": 4, "batch_size": 32},
    **{"limit": 2000, "test_samples": 5},
}
_QUICK_PLACES = list(product(_PIS, _SIGMAS1, (math.exp(-8.0),)))
_QUICK_HELD_OUT = 500


def units(seeds: Sequence[int], quick: bool) -> list[Unit]:
    """One for each point of the grid; one seed after the other."""
    made = []
    for seed in seeds:
        for place in _QUICK_PLACES if quick else product(_PIS, _SIGMAS1, _SIGMAS2):
            pi, sigma1, sigma2 = place
            config = {
                "dataset": "mnist",
                "held_out": _QUICK_HELD_OUT if quick else _HELD_OUT,
                "settings": {
                    **SETTINGS,
                    **{"pi": pi, "std1": sigma1, "std2": sigma2},
                    **(_QUICK if quick else {}),
                },
            }
            name = f"pi-{pi:g}-sigma1-{sigma1:.3g}-sigma2-{sigma2:.3g}"
            made.append(Unit(name, seed, config, 2.0 if quick else _SECONDS, ("mnist",)))
    return made


def run(unit: Unit, context: Context) -> dict[str, Any]:
    """Train the network of one point, and measure it on the images held out."""
    config = unit.config
    settings = settings_of(config["settings"])
    limit = settings.get("limit")
    images = load_images(
        config["dataset"], context.data_dir, limit=limit, progress=context.on_download
    )
    data = held_out(images, config["held_out"])
    made = RunConfig.of(config["dataset"], **settings, seed=unit.seed)
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


def search(units: Sequence[Unit], folder: Path, take: Take) -> None:
    """One study of Optuna for each seed, over the grid, maximising the accuracy.

    Raises:
        ImportError: there is no Optuna, and something is left to do.
        StorageError: the journal is damaged.
    """
    try:
        from bayesify.experiments.searching import grid_search
    except ImportError:
        if all((folder / unit.file_name).exists() for unit in units):
            return  # of what is there, table and figures need no search
        raise
    studies = defaultdict(list)
    for unit in units:
        pi, sigma1, sigma2 = _place(unit.config)
        quick = "-quick" if "limit" in unit.config["settings"] else ""
        point = {
            "pi": pi,
            "minus_ln_sigma1": round(-math.log(sigma1), 3) + 0.0,
            "minus_ln_sigma2": round(-math.log(sigma2), 3) + 0.0,
        }
        studies[f"{_NAME}{quick}-seed-{unit.seed}"].append((unit, point))
    grid_search(studies, folder, take, lambda row: float(row["metrics"]["validation"]["accuracy"]))


def table(rows: Sequence[Row]) -> str:
    """The document's four best beside ours there, our four best, then the whole grid."""
    found = _by_place(rows)
    ranked = sorted(found, key=lambda place: -mean(_values(found[place], "accuracy")))
    ranks = {place: str(rank) for rank, place in enumerate(ranked, start=1)}
    heads = "pi | sigma1 | sigma2 | accuracy, averaged % | mean weights % | nll"
    top = [f"| {heads} |", "|---" * 6 + "|"]
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
            f"| {heads.replace('sigma2 |', 'sigma2 | reported % |')} | our rank |",
            "|---" * 8 + "|",
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


def files(rows: Sequence[Row]) -> dict[str, str]:
    """``grid.csv``: a line for each point and seed."""
    lines = [
        "pi,sigma1,sigma2,seed,validation_accuracy_mean_weights,validation_accuracy_averaged,"
        "validation_nll,quick"
    ]
    for place, of_place in sorted(_by_place(rows).items()):
        for row in of_place:
            got = row["metrics"]["validation"]
            numbers = (*place, row["seed"], got["accuracy_mean_weights"], got["accuracy"])
            cells = [f"{value:.6g}" for value in (*numbers, got["nll"])]
            lines.append(",".join([*cells, str(row["quick"]).lower()]))
    return {"grid.csv": "\n".join(lines) + "\n"}


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Validation error over sigma2, a panel for each pi, a line for each sigma1."""
    from bayesify.plots.grid import Mark, grid_lines

    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for place, of_place in sorted(_by_place(rows).items(), reverse=True):
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


def _by_place(rows: Sequence[Row]) -> dict[Place, list[Row]]:
    found = defaultdict(list)
    for row in rows:
        found[_place(row["config"])].append(row)
    return found


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row["metrics"]["validation"][name] for row in rows]


def _shown(place: Place) -> str:
    return f"{place.pi:g} | {place.sigma1:.3g} | {place.sigma2:.3g}"


def _cells(rows: Sequence[Row]) -> str:
    columns = {"accuracy": 2, "accuracy_mean_weights": 2, "nll": 4}
    return " | ".join(cell(_values(rows, name), digits) for name, digits in columns.items())


def _chance(found: Mapping[Place, list[Row]], ranked: Sequence[Place]) -> list[str]:
    """What so few images leave to chance."""
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
    units=units,
    run=run,
    table=table,
    figures=figures,
    go_through=search,
    files=files,
)
