"""Format durations, the reading of data and the results of a run as text."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bayesify.app.runs import ConfigError, Run
from bayesify.distributions.posteriors import Delta
from bayesify.module.batching import parse_bytes
from bayesify.module.bayesian import BayesianModule

__all__ = [
    "NOTHING_HELD_OUT",
    "bytes_of",
    "duration",
    "measure_label",
    "plain_table",
    "reading",
    "seconds_of",
    "summarise",
    "weights_of",
]

#: What is printed instead of the metrics of the test set.
NOTHING_HELD_OUT = "no rows are held out, so that nothing tells how well it predicts new ones"
_LABELS = {
    "error_predictive": "error, averaged predictions (%)",
    "error_mean_weights": "error, mean weights (%)",
    "nll": "negative log-likelihood (nats)",
    "brier": "Brier score",
    "ece": "expected calibration error",
    "rmse": "RMSE, averaged predictions",
    "rmse_mean_weights": "RMSE, mean weights",
    "crps": "CRPS",
    "mean_std": "predicted standard deviation",
    **{f"coverage_{level}": f"coverage of {level} % intervals (%)" for level in (50, 80, 90, 95)},
    **{f"width_{level}": f"width of {level} % intervals" for level in (50, 80, 90, 95)},
}


def measure_label(name: str) -> str:
    """Return the label of a measure in metrics.json.

    Example:
        >>> measure_label("brier"), measure_label("some_other")
        ('Brier score', 'some other')
    """
    return _LABELS.get(name, name.replace("_", " "))


def duration(seconds: float) -> str:
    """Format a time, such as "3 min"."""
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def seconds_of(text: str) -> float:
    """Return the seconds of a time such as 90s, 30m or 2h.

    Raises:
        ConfigError: it is not of this form.

    Example:
        >>> seconds_of("90s"), seconds_of("1.5h")
        (90.0, 5400.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    seconds = float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
    if not 0.0 < seconds < math.inf:
        raise ConfigError(f"tune must be a time such as 90s, 30m or 2h, got {text!r}")
    return seconds


def bytes_of(max_memory: str) -> int:
    """Return the bytes of a cap such as 2GB, 64 MB or 1GiB.

    Raises:
        ConfigError: it is not of this form.

    Example:
        >>> bytes_of("2GB")
        2000000000
    """
    try:
        return parse_bytes(max_memory)
    except ValueError as error:
        raise ConfigError(
            f"max-memory must be a number of bytes such as 2GB or 512 MB, got {max_memory!r}"
        ) from error


def weights_of(bnn: BayesianModule) -> str:
    """Return how many weights a network has, and how many of them are random if some only are."""
    random = bnn.layout.num_weights
    rest = sum(parameter.numel() for parameter in bnn.net.parameters())
    if not rest or isinstance(bnn.posterior, Delta):  # no weight of a plain network is random
        return f"{random + rest:,} weights"
    return f"{random:,} random of {random + rest:,} weights"


@contextmanager
def reading(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """Show that data are read; yield a function to call with how many of how many were read."""
    begun = time.perf_counter()
    with console.status("reading the data ...") as status:

        def on_read(done: int, total: int) -> None:
            left = (time.perf_counter() - begun) / done * (total - done)
            status.update(f"reading {what}: {done:,} of {total:,}, {duration(left)} left ...")

        yield on_read


def summarise(console: Console, run: Run, metrics: dict[str, Any], notes: list[str]) -> None:
    """Print the metrics of the test set, and the notes on them."""
    if metrics["test"] is None:
        console.print(NOTHING_HELD_OUT, highlight=False, soft_wrap=True)
    else:
        _print_test(console, run, metrics)
    for note in notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)


def _print_test(console: Console, run: Run, metrics: dict[str, Any]) -> None:
    test = metrics["test"]
    if run.config.task == "regression":
        name = "RMSE"
        averaged, at_mean = (f"{test[key]:.4g}" for key in ("rmse", "rmse_mean_weights"))
        others = (
            f"CRPS {test['crps']:.4g}, 95 % intervals hold {test['coverage_95']:.1f} % and are "
            f"{test['width_95']:.4g} wide"
        )
    else:
        name, keys = "error", ("error_predictive", "error_mean_weights")
        averaged, at_mean = (f"{test[key]:.2f} %" for key in keys)
        others = f"Brier {test['brier']:.4f}, calibration error {test['ece']:.4f}"
    if run.config.baseline is None:
        samples = f"averaged over {metrics['test_samples']} weight samples"
        at_mean = f"{averaged} {samples}, {at_mean} at the mean weights"
    lines = f"test {name} {at_mean}\nnll {test['nll']:.4f} nats, {others}"
    console.print(lines, highlight=False, markup=False, soft_wrap=True)


def plain_table(*columns: str) -> Table:
    """Return a table without lines, the first column of text and the others of numbers.

    Example:
        >>> [column.justify for column in plain_table("network", "error").columns]
        ['left', 'right']
    """
    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table
