"""Key numbers and tables of a report: metrics, the pruning table, the least certain texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2.filters import do_filesizeformat

from bayesify.app.report.parts import Table, fixed
from bayesify.plots import Record

__all__ = ["KeyNumber", "key_numbers", "metric_table", "parts_table", "pruning_table", "text_table"]

#: Name, unit and decimals of each known metric; None are by its size.
_METRICS = {
    "error_predictive": ("error, averaged prediction", "%", 2),
    "error_mean_weights": ("error, mean weights", "%", 2),
    "nll": ("negative log likelihood", "nats per example", 4),
    "brier": ("Brier score", "0 best, 2 worst", 4),
    "ece": ("expected calibration error", "0 best, 1 worst", 4),
    "rmse": ("RMSE, averaged prediction", "", None),
    "rmse_mean_weights": ("RMSE, mean weights", "", None),
    "crps": ("CRPS", "", None),
    "mean_std": ("predicted standard deviation", "", None),
    **{f"coverage_{p}": (f"coverage of {p} % intervals", "%", 1) for p in (50, 80, 90, 95)},
    **{f"width_{p}": (f"width of {p} % intervals", "", None) for p in (50, 80, 90, 95)},
}

#: Heading, unit after the number, note and decimals of each metric among the key numbers.
_KEY_NUMBERS = {
    "error_predictive": ("test error", " %", "averaged prediction", 2),
    "error_mean_weights": ("test error", " %", "mean weights", 2),
    "rmse": ("test RMSE", "", "averaged prediction", None),
    "rmse_mean_weights": ("test RMSE", "", "mean weights", None),
    "nll": ("negative log likelihood", "", "nats per example", 4),
    "crps": ("CRPS", "", "unit of the target", None),
    "coverage_95": ("coverage of 95 % intervals", " %", "of the test targets", 1),
    "brier": ("Brier score", "", "0 best, 2 worst", 4),
    "ece": ("calibration error (ECE)", "", "0 best, 1 worst", 4),
}


class KeyNumber(NamedTuple):
    """One key number."""

    heading: str
    value: str
    note: str


def key_numbers(metrics: Mapping[str, Any]) -> list[KeyNumber]:
    """Return the numbers at the top of a report, of those that ``metrics.json`` holds."""
    test = metrics.get("test") or {}
    tiles = [
        KeyNumber(heading, fixed(test[key], digits) + suffix, note)
        for key, (heading, suffix, note, digits) in _KEY_NUMBERS.items()
        if test.get(key) is not None
    ]
    if metrics.get("kl_nats"):
        unit = "nats, up to a constant" if metrics.get("kl_is_up_to_a_constant") else "nats"
        tiles.append(KeyNumber("KL from the prior", f"{metrics['kl_nats']:,.0f}", unit))
    if metrics.get("free_energy") is not None:
        untrained = metrics.get("free_energy_untrained")
        note = "nats per example"
        if untrained is not None:
            note += f"; with untrained means {fixed(untrained, 2)}"
        tiles.append(KeyNumber("free energy", fixed(metrics["free_energy"], 2), note))
    if metrics.get("num_weights") is not None:
        left = metrics.get("num_weights_left", metrics["num_weights"])
        note = "" if left == metrics["num_weights"] else f"{left:,} left after pruning"
        tiles.append(KeyNumber("weights", f"{metrics['num_weights']:,}", note))
    if metrics.get("seconds_train") is not None:
        tiles.append(KeyNumber("training time", _duration(metrics["seconds_train"]), ""))
    return tiles


def pruning_table(rows: Sequence[Record], *, is_regression: bool) -> Table:
    """Tabulate the rows of ``pruning.json``."""
    loss, unit, digits = ("RMSE", "", None) if is_regression else ("error", " (%)", 2)
    columns: dict[str, tuple[str, Any]] = {
        "fraction": ("removed", lambda value: f"{100 * value:.4g} %"),
        "weights_left": ("weights left", lambda value: f"{value:,.0f}"),
        "error_mean_weights": (f"{loss}, mean weights{unit}", lambda value: fixed(value, digits)),
        "error_predictive": (f"{loss}, averaged{unit}", lambda value: fixed(value, digits)),
        "file_bytes": ("size on disk", do_filesizeformat),
    }
    used = [key for key in columns if any(row.get(key) is not None for row in rows)]
    return Table(
        [columns[key][0] for key in used],
        [
            [columns[key][1](row[key]) if row.get(key) is not None else "" for key in used]
            for row in rows
        ],
    )


def text_table(rows: Sequence[Record]) -> Table:
    """Tabulate texts with their predictions and uncertainties."""
    heads = ("text", "true", "predicted", "total", "epistemic")
    cells = [
        [*(str(row[head]) for head in heads[:3]), *(f"{row[head]:#.3g}" for head in heads[3:])]
        for row in rows
    ]
    return Table(heads, cells, has_texts=True)


def parts_table(metrics: Mapping[str, Any]) -> Table:
    """Tabulate the metrics of the test and the training data."""
    return metric_table({part: metrics for part in ("test", "train") if metrics.get(part)})


def metric_table(runs: Mapping[str, Mapping[str, Any]], part: str | None = None) -> Table:
    """Tabulate metrics with one column per run; None takes the part named like the column."""
    parts = {name: run.get(part or name) or {} for name, run in runs.items()}
    keys = dict.fromkeys((*_METRICS, *(key for values in parts.values() for key in values)))
    rows = []
    for key in keys:
        name, unit, digits = _METRICS.get(key, (key.replace("_", " "), "", 4))
        values = [values.get(key) for values in parts.values()]
        if any(value is not None for value in values):
            label = f"{name} ({unit})" if unit else name
            rows.append([label, *("" if v is None else fixed(v, digits) for v in values)])
    return Table(["", *parts], rows)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
