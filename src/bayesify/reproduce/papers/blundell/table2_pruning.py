"""Table 2 and figure 4 of Blundell et al. 2015: pruning by signal-to-noise ratio.

A network is trained, then the share of its weights with the lowest |mean| / std is removed, with no
training afterwards. Of the three networks two are trained on the bound, one of them with dropped
pixels; the third is tempered.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from bayesify.reproduce.harness.experiment import Experiment, Job, Result
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error
from bayesify.reproduce.papers.blundell.mnist_networks import (
    DROPPED,
    FRACTIONS,
    PRUNABLE,
    REPORTED_PRUNED,
    SCALE_MIXTURE,
    by_job,
    network_job,
    pruned_errors,
    run_network,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

#: By job: settings, width, seconds per epoch on one core. Figure 4 shows the first.
_NETWORKS: dict[str, tuple[dict[str, Any], int, float]] = {
    "dropped-1200": (DROPPED, 1200, 8.5),
    "tempered-1200": (PRUNABLE, 1200, 8.0),
    "bound-400": (SCALE_MIXTURE, 400, 2.1),
}
#: Number of points from which the density of figure 4 is estimated.
_POINTS = 50_000


def jobs(seeds: Sequence[int], quick: bool) -> list[Job]:
    """Return a job for each network and seed; a quick run has the narrow network only."""
    made = []
    for seed in seeds:
        for name, (settings, width, cost) in _NETWORKS.items():
            if width > 400 and quick:
                continue
            chosen = {**settings, "hidden": [width, width]}
            seconds = 10.0 + cost * settings["epochs"]
            made.append(network_job(name, seed, chosen, seconds, quick=quick, with_snr=True))
    return made


def table(results: Sequence[Result]) -> str:
    """Return the table of test errors by share of weights removed, the paper's next to ours."""
    fractions = (0.0, *FRACTIONS)
    found = _found(results)
    heads = [_title(of[0]) for of in found.values()]
    lines = table_head("| removed | 2x1200, paper (quoted) | " + " | ".join(heads) + " |")
    for fraction in fractions:
        paper = f"{REPORTED_PRUNED[fraction]:.2f}" if fraction in REPORTED_PRUNED else ""
        cells = [mean_and_error(pruned_errors(of, fraction), 2) for of in found.values()]
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


def _title(result: Result) -> str:
    settings = result["config"]["settings"]
    title = f"2x{settings['hidden'][0]}, temperature {settings.get('temperature', 1.0):g}"
    return f"{title}, pixels dropped" if settings.get("dropout_input") else title


def _found(results: Sequence[Result]) -> dict[str, list[Result]]:
    found = by_job(results)
    return {name: found[name] for name in _NETWORKS if name in found}


def _left(of: Sequence[Result], fraction: float) -> str:
    parts = [p for result in of for p in result["metrics"]["pruned"] if p["fraction"] == fraction]
    size = mean(part["file_bytes"] for part in parts) / 1e6
    return f"{parts[0]['weights_left']:,}, {size:.2g} MB"


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Draw the pruning curves, and figure 4 for the first network that has a result."""
    import numpy as np
    import torch

    from bayesify.plots.compared import Curve, pruning_compared
    from bayesify.plots.weights import snr_density_and_cdf

    found = _found(results)
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
        runs = [
            [part["error_mean_weights"] for part in result["metrics"]["pruned"]] for result in of
        ]
        curves.append(Curve(_title(of[0]), fractions, runs))
    made = {"blundell-pruning": pruning_compared({"Pruning by signal-to-noise ratio": curves})}
    first = next(iter(found.values()))[0]
    quantiles = np.array(first["metrics"]["snr_decibels"])
    # Only quantiles are stored: weights are taken as evenly spaced between two of them.
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
    jobs=jobs,
    run=run_network,
    table=table,
    figures=figures,
    on_gpu=True,
)
