"""What the experiments on "The Straight Dope" share: the same measurements, tables and figures.

Both documents watch the accuracy of the mean weights on test and training images, then remove
weights by signal-to-noise, and plot the posterior of one weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bayesify.datasets import ImageData
from bayesify.experiments.cells import cell
from bayesify.experiments.experiment import Context, Progress, Row
from bayesify.module import BayesianModule
from bayesify.posteriors import MeanFieldGaussian
from bayesify.priors import Prior
from bayesify.pruning import prune
from bayesify.runs.measure import evaluate, weights_left
from bayesify.storage import StorageError, atomic_write
from bayesify.training.history import History
from bayesify.training.history import Row as HistoryRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    *("TrainAccuracy", "accuracy_figure", "accuracy_table", "measured", "pruning_figure"),
    *("pruning_table", "series", "weight_figure"),
]

#: Beside the checkpoint.
_FILE = "train-accuracy.json"


class TrainAccuracy(Progress):
    """A callback of ``fit``: the mean weights' accuracy on the training images, by epoch.

    ``fit`` itself knows that of the sampled weights only. What was measured is kept beside the
    checkpoint; of an epoch whose end was cut off it is measured when training goes on from there.

    Args:
        bnn: the network that is trained.
        data: of which the training part is used.
        context: told of the progress; its ``work`` holds the checkpoint.
        epochs: in all.
    """

    def __init__(self, bnn: BayesianModule, data: ImageData, context: Context, epochs: int) -> None:
        super().__init__(context, epochs)
        self._bnn, self._data, self._work = bnn, data, context.work
        #: In percent, an epoch each.
        self.percent: list[float] = []

    def on_start(self, *, epochs: int, batches: int, history: History) -> None:  # noqa: ARG002
        """Take up what was measured before.

        Raises:
            StorageError: of an epoch before the last it is lost.
        """
        path = None if self._work is None else self._work / _FILE
        if path is not None and history and path.exists():
            self.percent = _read(path)[: len(history)]
        if len(self.percent) == len(history) - 1:  # the network is as that epoch left it
            self._measure()
        if len(self.percent) != len(history):
            raise StorageError(
                f"{path} must hold the accuracy after each of {len(history)} epochs, got "
                f"{len(self.percent)}; remove {self._work} to train anew"
            )

    def on_epoch(self, row: HistoryRow) -> None:
        """Measure, then tell of the epoch."""
        self._measure()
        super().on_epoch(row)

    def _measure(self) -> None:
        outputs = self._bnn.mean_outputs(self._data.train_inputs)
        self.percent.append(_accuracy(self._bnn, outputs, self._data.train_targets))
        if self._work is not None:
            atomic_write(self._work / _FILE, json.dumps(self.percent))


def measured(
    bnn: BayesianModule,
    data: ImageData,
    history: History,
    train_accuracy: Sequence[float],
    *,
    fractions: Sequence[float],
    test_samples: int,
) -> dict[str, Any]:
    """All that a row says of a trained network.

    Args:
        bnn: trained.
        data: what on.
        history: from ``fit``, with the test images for validation.
        train_accuracy: of the mean weights by epoch, in percent.
        fractions: shares of the weights to remove, beside none.
        test_samples: weight samples of the averaged predictions.

    Returns:
        ``test_accuracy`` and ``train_accuracy`` of the mean weights by epoch, in percent; ``loss``
        and ``nll`` by epoch, nats per image; ``pruning``, a row each with ``fraction``,
        ``weights_left`` and ``error_mean_weights`` in percent; ``weight``, mean and standard
        deviation of the first weight of the first layer; and ``test``, ``test_samples``,
        ``kl_nats`` and ``num_weights`` as of any run.
    """
    posterior = bnn.posterior
    assert isinstance(posterior, MeanFieldGaussian)
    found, _ = evaluate(bnn, data, num_samples=test_samples, with_train=False)
    pruning = []
    for fraction in dict.fromkeys((0.0, *fractions)):
        small = prune(bnn, fraction)
        accuracy = _accuracy(bnn, small.mean_outputs(data.test_inputs), data.test_targets)
        pruning.append(
            {
                "fraction": fraction,
                "weights_left": weights_left(small),
                "error_mean_weights": round(100.0 - accuracy, 4),
            }
        )
    return {
        "test_accuracy": [round(100.0 - float(row["validation_error"] or 0), 4) for row in history],
        "train_accuracy": list(train_accuracy),
        "loss": [row["loss"] for row in history],
        "nll": [row["nll"] for row in history],
        "pruning": pruning,
        "weight": {
            "mean": float(posterior.mean.detach()[0]),
            "std": float(posterior.full_std.detach()[0]),
        },
        **{key: found[key] for key in ("test", "test_samples", "kl_nats", "num_weights")},
    }


def series(rows: Sequence[Row], unit: str, key: str) -> list[list[float]]:
    """One metric by epoch, a list for each row of a unit.

    Example:
        >>> series([{"unit": "a", "metrics": {"loss": [2.0, 1.0]}}], "a", "loss")
        [[2.0, 1.0]]
    """
    return [row["metrics"][key] for row in rows if row["unit"] == unit]


def accuracy_table(
    rows: Sequence[Row],
    units: Mapping[str, str],
    reported: Mapping[str, Sequence[float]] | None = None,
) -> str:
    """Markdown: accuracy of the mean weights by epoch, a column each.

    Args:
        rows: any part of them.
        units: what each is called; those that have no row are left out.
        reported: in percent by epoch, for ``test`` and ``train``, or None.
    """
    shown = _shown(rows, units)
    heads, columns = [], []
    for part in ("test", "train"):
        if reported is not None:
            heads.append(f"{part}, reported")
            columns.append([f"{value:.2f}" for value in reported[part]])
        for unit, name in shown.items():
            heads.append(f"{part}, {name}")
            runs = series(rows, unit, f"{part}_accuracy")
            columns.append([cell(values, 2) for values in zip(*runs, strict=True)])
    lines = [f"| epoch | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for epoch in range(max(map(len, columns), default=0)):
        cells = [column[epoch] if epoch < len(column) else "-" for column in columns]
        lines.append(f"| {epoch + 1} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pruning_table(
    rows: Sequence[Row], units: Mapping[str, str], reported: Mapping[float, float] | None = None
) -> str:
    """Markdown: test accuracy as weights are removed; arguments as for :func:`accuracy_table`.

    Args:
        rows: any part of them.
        units: what each is called.
        reported: percent by the share removed, or None.
    """
    shown = _shown(rows, units)
    tables = {
        name: [row["metrics"]["pruning"] for row in rows if row["unit"] == unit]
        for unit, name in shown.items()
    }
    heads = [*([] if reported is None else ["reported"]), *tables]
    lines = [f"| removed | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    fractions = dict.fromkeys(line["fraction"] for runs in tables.values() for line in runs[0])
    for fraction in fractions:
        cells = []
        if reported is not None:
            cells.append(f"{reported[fraction]:.2f}" if fraction in reported else "-")
        for runs in tables.values():
            found = [line for run in runs for line in run if line["fraction"] == fraction]
            cells.append(cell([100.0 - line["error_mean_weights"] for line in found], 2))
        lines.append(f"| {100.0 * fraction:.4g} % | {' | '.join(cells)} |")
    return "\n".join(lines)


def accuracy_figure(
    rows: Sequence[Row],
    units: Mapping[str, str],
    reported: Mapping[str, Sequence[float]] | None = None,
) -> Figure:
    """Accuracy by epoch, test beside train."""
    from bayesify.plots import Curve, curves_compared

    panels = {}
    for part, title in (("test", "Test images"), ("train", "Training images")):
        curves = []
        if reported is not None:
            values = reported[part]
            curves.append(Curve("reported", range(1, len(values) + 1), [values], reported=True))
        for unit, name in _shown(rows, units).items():
            runs = series(rows, unit, f"{part}_accuracy")
            curves.append(Curve.by_epoch(name, runs))
        panels[title] = curves
    return curves_compared(panels, ylabel="accuracy of the mean weights (%)")


def pruning_figure(
    rows: Sequence[Row], units: Mapping[str, str], reported: Mapping[float, float] | None = None
) -> Figure:
    """Test error as weights are removed."""
    from bayesify.plots import Curve, pruning_compared

    curves = []
    if reported is not None:
        errors = [100.0 - accuracy for accuracy in reported.values()]
        curves.append(Curve("reported", [*reported], [errors], reported=True))
    for unit, name in _shown(rows, units).items():
        runs = [row["metrics"]["pruning"] for row in rows if row["unit"] == unit]
        shares = [line["fraction"] for line in runs[0]]
        errors_of = [[line["error_mean_weights"] for line in run] for run in runs]
        curves.append(Curve(name, shares, errors_of))
    return pruning_compared(curves, ylabel="test error of the mean weights (%)")


def weight_figure(
    rows: Sequence[Row], units: Mapping[str, str], prior_of: Callable[[Row], Prior]
) -> Figure:
    """The posterior of the first weight of the first layer, of the first seed; one panel a unit."""
    from bayesify.plots import weight_posteriors

    first = {
        unit: min((row for row in rows if row["unit"] == unit), key=lambda row: int(row["seed"]))
        for unit in _shown(rows, units)
    }
    weights = [row["metrics"]["weight"] for row in first.values()]
    return weight_posteriors(
        [weight["mean"] for weight in weights],
        [weight["std"] for weight in weights],
        [units[unit] for unit in first],
        [prior_of(row) for row in first.values()],
    )


def _shown(rows: Sequence[Row], units: Mapping[str, str]) -> dict[str, str]:
    there = {row["unit"] for row in rows}
    return {unit: name for unit, name in units.items() if unit in there}


def _accuracy(bnn: BayesianModule, outputs: Tensor, targets: Tensor) -> float:
    return round(100.0 - float(bnn.likelihood.error(outputs, targets)), 4)


def _read(path: Path) -> list[float]:
    try:
        found: list[float] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read: {error}; remove {path.parent}") from error
    return found
