"""``bayesify inspect``: the settings of a run, and its parameters."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from bayesify.app.cli.formatting import plain_table, weights_of
from bayesify.app.cli.opened_run import AsJson, Folder, opened
from bayesify.distributions.posteriors import GaussianPosterior
from bayesify.module.pruning import snr_decibels

__all__ = ["inspect"]


def inspect(folder: Folder, as_json: AsJson = False) -> None:
    """Show the settings of a run, and a summary of each parameter."""
    run = opened(folder)
    bnn = run.load_module()
    posterior = bnn.posterior
    gaussian = isinstance(posterior, GaussianPosterior)
    decibels = snr_decibels(bnn) if gaussian else None
    # Two examples, so that their axis differs from those of size 1.
    summary = bnn.summary(torch.zeros(2, run.num_inputs))
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        means = bnn.layout.unflatten(posterior.mean)
        stds = bnn.layout.unflatten(posterior.std)
        ratios = bnn.layout.unflatten(decibels) if decibels is not None else None
        for name, shape, treatment, reason in summary:
            left = stds[name] > 0.0  # the weights that are not pruned
            rows.append(
                {
                    "name": name,
                    "shape": list(shape),
                    "treatment": treatment if gaussian else None,
                    "reason": reason if gaussian else None,
                    "mean_rms": float(means[name].square().mean().sqrt()),
                    "std_median": _median(stds[name][left]),
                    "snr_db_median": _median(ratios[name][left]) if ratios else None,
                }
            )
    document = {**run.document, "settings": run.config.to_json()}
    if as_json:
        typer.echo(
            json.dumps({**document, "num_weights": bnn.layout.num_weights, "parameters": rows})
        )
        return
    console = Console()
    settings = plain_table("setting", "value")
    idle = run.config.idle()
    for name, value in run.config.to_json().items():
        if value not in (None, []) and name not in idle:
            settings.add_row(name.replace("_", "-"), Text(_shown(value)))
    for name in ("command", "commit", "hardware"):
        settings.add_row(name, Text(_shown(document.get(name))))
    console.print(settings)
    table = plain_table("parameter", "shape", "rms of mean", "median std", "median SNR, dB")
    for row in rows:
        table.add_row(
            row["name"],
            " x ".join(map(str, row["shape"])),
            f"{row['mean_rms']:.4f}",
            "-" if row["std_median"] is None else f"{row['std_median']:.4f}",
            "-" if row["snr_db_median"] is None else f"{row['snr_db_median']:.1f}",
        )
    console.print(table)
    if gaussian:
        treatments = Table(box=None, header_style="bold", pad_edge=False)
        for title in ("parameter", "treatment in training", "why"):
            treatments.add_column(title, overflow="fold")
        for row in rows:
            treatments.add_row(row["name"], row["treatment"], row["reason"])
        console.print("", treatments, "")
    console.print(weights_of(bnn), highlight=False)


def _median(values: Tensor) -> float | None:
    """Return the median, or None of no values and of an infinite one, which JSON has not."""
    median = float(values.median()) if values.numel() else math.inf
    return median if math.isfinite(median) else None


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
