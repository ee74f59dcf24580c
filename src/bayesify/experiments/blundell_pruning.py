"""Pruning by signal-to-noise: table 2 of Blundell et al. 2015, and figure 4.

One network is trained, then a share of its weights is removed, those of the lowest |mean| / std;
nothing is trained again after that. Of three networks two are trained on the bound itself, one of
them with noise on its inputs; one is tempered.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from bayesify.experiments.blundell import (
    DROPPED,
    FRACTIONS,
    PRUNABLE,
    REPORTED_PRUNED,
    SCALE_MIXTURE,
    by_unit,
    network_unit,
    pruned_errors,
    run_network,
)
from bayesify.experiments.cells import cell
from bayesify.experiments.experiment import Experiment, Row, Unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

#: By unit: settings, width, seconds an epoch on one core; figure 4 is of the first.
_NETWORKS: dict[str, tuple[dict[str, Any], int, float]] = {
    "dropped-1200": (DROPPED, 1200, 8.5),
    "tempered-1200": (PRUNABLE, 1200, 8.0),
    "bound-400": (SCALE_MIXTURE, 400, 2.1),
}
#: From so many the density of figure 4 is counted.
_POINTS = 50_000


def units(seeds: Sequence[int], quick: bool) -> list[Unit]:
    """Each of the networks; quick, the narrow ones."""
    made = []
    for seed in seeds:
        for name, (settings, width, cost) in _NETWORKS.items():
            if width > 400 and quick:
                continue
            chosen = {**settings, "hidden": [width, width]}
            seconds = 10.0 + cost * settings["epochs"]
            made.append(network_unit(name, seed, chosen, seconds, quick=quick, with_snr=True))
    return made


def table(rows: Sequence[Row]) -> str:
    """Test error with a share of the weights removed, the paper's beside ours."""
    fractions = (0.0, *FRACTIONS)
    found = _found(rows)
    heads = [_title(of[0]) for of in found.values()]
    lines = [
        "| removed | 2x1200, paper (quoted) | " + " | ".join(heads) + " |",
        "|---" * (2 + len(heads)) + "|",
    ]
    for fraction in fractions:
        paper = f"{REPORTED_PRUNED[fraction]:.2f}" if fraction in REPORTED_PRUNED else ""
        cells = [cell(pruned_errors(of, fraction), 2) for of in found.values()]
        lines.append(f"| {100 * fraction:g} % | {paper} | {' | '.join(cells)} |")
    left = [
        f"| weights left at {100 * FRACTIONS[-2]:g} %, file | | "
        + " | ".join(_left(of, FRACTIONS[-2]) for of in found.values())
        + " |"
    ]
    seeds = ", ".join(
        f"{title}: {len(of)}" for title, of in zip(heads, found.values(), strict=True)
    )
    return (
        "Test error in percent of the mean weights with the weights of the lowest signal-to-noise "
        "ratio removed and nothing trained after that; mean +- standard error over seeds "
        f"({seeds}). The prior of all: a scale mixture with pi {SCALE_MIXTURE['pi']:g} and a spike "
        f"of std {SCALE_MIXTURE['std2']:g}.\n\n" + "\n".join([*lines, *left]) + "\n"
    )


def _title(row: Row) -> str:
    settings = row["config"]["settings"]
    title = f"2x{settings['hidden'][0]}, temperature {settings.get('temperature', 1.0):g}"
    return f"{title}, pixels dropped" if settings.get("dropout_input") else title


def _found(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found = by_unit(rows)
    return {name: found[name] for name in _NETWORKS if name in found}


def _left(of: Sequence[Row], fraction: float) -> str:
    parts = [p for row in of for p in row["metrics"]["pruned"] if p["fraction"] == fraction]
    size = mean(part["file_bytes"] for part in parts) / 1e6
    return f"{parts[0]['weights_left']:,}, {size:.2g} MB"


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """The pruning curve, and figure 4 of the first of the networks that is there."""
    import numpy as np
    import torch

    from bayesify.plots.compared import Curve, pruning_compared
    from bayesify.plots.weights import snr_density_and_cdf

    found = _found(rows)
    curves = [
        Curve(
            "paper (quoted), 2x1200",
            list(REPORTED_PRUNED),
            [list(REPORTED_PRUNED.values())],
            reported=True,
        )
    ]
    fractions = (0.0, *FRACTIONS)
    for of in found.values():
        runs = [[part["error_mean_weights"] for part in row["metrics"]["pruned"]] for row in of]
        curves.append(Curve(_title(of[0]), fractions, runs))
    made = {"blundell-pruning": pruning_compared(curves)}
    first = next(iter(found.values()))[0]
    quantiles = np.array(first["metrics"]["snr_decibels"])
    # Between two quantiles the weights lie evenly, as far as is known.
    places = np.linspace(0, len(quantiles) - 1, _POINTS)
    decibels = np.interp(places, np.arange(len(quantiles)), quantiles)
    made["blundell-snr"] = snr_density_and_cdf(torch.from_numpy(decibels))
    return made


EXPERIMENT = Experiment(
    name="blundell-pruning",
    source="Blundell et al. 2015, table 2 and figure 4",
    reported="test error of 2x1200: 1.24 % whole, 1.29 % with 95 % removed, 1.39 % with 98 %",
    seeds=(0,),
    memory_mb=1200,
    units=units,
    run=run_network,
    table=table,
    figures=figures,
)
