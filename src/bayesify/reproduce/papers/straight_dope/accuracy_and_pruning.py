"""Accuracy and pruning in both documents of "The Straight Dope": measurements, tables, figures.

Both documents follow the accuracy of the mean weights on test and training images, then remove
weights by signal-to-noise ratio, and plot the posterior of one weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bayesify.app.runs.measure import evaluate, weights_left
from bayesify.datasets import ImageData
from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.distributions.priors import Prior
from bayesify.io import StorageError, atomic_write
from bayesify.module.bayesian import BayesianModule
from bayesify.module.pruning import prune
from bayesify.reproduce.harness.experiment import (
    Context,
    EpochProgress,
    Result,
    of_job,
)
from bayesify.reproduce.harness.markdown import table_head
from bayesify.reproduce.harness.seed_statistics import mean_and_error
from bayesify.training.history import EpochRow, History

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "TrainAccuracy",
    "accuracy_figure",
    "accuracy_table",
    "measured",
    "pruning_figure",
    "pruning_table",
    "series",
    "weight_figure",
]

#: File next to the checkpoint.
_FILE = "train-accuracy.json"


class TrainAccuracy(EpochProgress):
    """A callback of ``fit`` that measures the mean weights' accuracy on the training images.

    ``fit`` itself measures the sampled weights only. The accuracies are saved next to the
    checkpoint. If a run was killed between checkpoint and measurement, the measurement is made when
    the run resumes.

    Args:
        bnn: the network that is trained.
        data: images; the training part is used.
        context: its ``on_progress`` is called; its ``work`` holds the checkpoint.
        epochs: number of epochs of the training.
    """

    def __init__(self, bnn: BayesianModule, data: ImageData, context: Context, epochs: int) -> None:
        super().__init__(context, epochs)
        self._bnn, self._data, self._work = bnn, data, context.work
        #: Accuracy in percent after each epoch.
        self.percent: list[float] = []

    def on_start(self, *, epochs: int, batches: int, history: History) -> None:  # noqa: ARG002
        """Read the accuracies of the epochs before an interruption.

        Raises:
            StorageError: the accuracy of an epoch before the last is missing.
        """
        path = None if self._work is None else self._work / _FILE
        if path is not None and history and path.exists():
            self.percent = _read(path)[: len(history)]
        if len(self.percent) == len(history) - 1:  # the network is in the state after that epoch
            self._measure()
        if len(self.percent) != len(history):
            raise StorageError(
                f"{path} must hold the accuracy after each of {len(history)} epochs, got "
                f"{len(self.percent)}; remove {self._work} to train anew"
            )

    def on_epoch(self, row: EpochRow) -> None:
        """Measure, then report the epoch."""
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
    """Return all measurements of a trained network.

    Args:
        bnn: the trained network.
        data: the images it was trained on.
        history: from ``fit``, with the test images for validation.
        train_accuracy: accuracy of the mean weights by epoch, in percent.
        fractions: shares of the weights to remove; 0 is added.
        test_samples: number of weight samples of the averaged predictions.

    Returns:
        ``test_accuracy`` and ``train_accuracy`` of the mean weights by epoch, in percent; ``loss``
        and ``nll`` by epoch, nats per image; ``pruning``, a line each with ``fraction``,
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


def series(results: Sequence[Result], job: str, key: str) -> list[list[float]]:
    """Return one metric by epoch, a list for each result of a job.

    Example:
        >>> series([{"job": "a", "metrics": {"loss": [2.0, 1.0]}}], "a", "loss")
        [[2.0, 1.0]]
    """
    return [result["metrics"][key] for result in of_job(results, job)]


def accuracy_table(
    results: Sequence[Result],
    jobs: Mapping[str, str],
    reported: Mapping[str, Sequence[float]] | None = None,
) -> str:
    """Return Markdown: accuracy of the mean weights by epoch, a column for each job and part.

    Args:
        results: any part of those of an experiment.
        jobs: titles by name of the job; jobs without results are left out.
        reported: in percent by epoch, for ``test`` and ``train``, or None.
    """
    shown = _shown(results, jobs)
    heads, columns = [], []
    for part in ("test", "train"):
        if reported is not None:
            heads.append(f"{part}, reported")
            columns.append([f"{value:.2f}" for value in reported[part]])
        for job, name in shown.items():
            heads.append(f"{part}, {name}")
            runs = series(results, job, f"{part}_accuracy")
            columns.append([mean_and_error(values, 2) for values in zip(*runs, strict=True)])
    lines = table_head(f"| epoch | {' | '.join(heads)} |")
    for epoch in range(max(map(len, columns), default=0)):
        cells = [column[epoch] if epoch < len(column) else "-" for column in columns]
        lines.append(f"| {epoch + 1} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pruning_table(
    results: Sequence[Result],
    jobs: Mapping[str, str],
    reported: Mapping[float, float] | None = None,
) -> str:
    """Return Markdown: test accuracy by share of weights removed.

    Args:
        results: any part of those of an experiment.
        jobs: titles by name of the job.
        reported: percent by the share removed, or None.
    """
    shown = _shown(results, jobs)
    tables = {
        name: [result["metrics"]["pruning"] for result in of_job(results, job)]
        for job, name in shown.items()
    }
    heads = [*([] if reported is None else ["reported"]), *tables]
    lines = table_head(f"| removed | {' | '.join(heads)} |")
    fractions = dict.fromkeys(line["fraction"] for runs in tables.values() for line in runs[0])
    for fraction in fractions:
        cells = []
        if reported is not None:
            cells.append(f"{reported[fraction]:.2f}" if fraction in reported else "-")
        for runs in tables.values():
            found = [line for run in runs for line in run if line["fraction"] == fraction]
            cells.append(mean_and_error([100.0 - line["error_mean_weights"] for line in found], 2))
        lines.append(f"| {100.0 * fraction:.4g} % | {' | '.join(cells)} |")
    return "\n".join(lines)


def accuracy_figure(
    results: Sequence[Result],
    jobs: Mapping[str, str],
    reported: Mapping[str, Sequence[float]] | None = None,
) -> Figure:
    """Draw accuracy by epoch, a panel for test and one for training images."""
    from bayesify.plots import Curve, curves_compared

    panels = {}
    for part, title in (("test", "Test images"), ("train", "Training images")):
        curves = []
        if reported is not None:
            values = reported[part]
            curves.append(Curve("reported", range(1, len(values) + 1), [values], reported=True))
        for job, name in _shown(results, jobs).items():
            runs = series(results, job, f"{part}_accuracy")
            curves.append(Curve.by_epoch(name, runs))
        panels[title] = curves
    return curves_compared(panels, ylabel="accuracy of the mean weights (%)")


def pruning_figure(
    results: Sequence[Result],
    jobs: Mapping[str, str],
    reported: Mapping[float, float] | None = None,
) -> Figure:
    """Draw the test error by share of weights removed."""
    from bayesify.plots import Curve, pruning_compared

    curves = []
    if reported is not None:
        errors = [100.0 - accuracy for accuracy in reported.values()]
        curves.append(Curve("reported", [*reported], [errors], reported=True))
    for job, name in _shown(results, jobs).items():
        runs = [result["metrics"]["pruning"] for result in of_job(results, job)]
        shares = [line["fraction"] for line in runs[0]]
        errors_of = [[line["error_mean_weights"] for line in run] for run in runs]
        curves.append(Curve(name, shares, errors_of))
    panels = {"Pruning by signal-to-noise ratio": curves}
    return pruning_compared(panels, ylabel="test error of the mean weights (%)")


def weight_figure(
    results: Sequence[Result], jobs: Mapping[str, str], prior_of: Callable[[Result], Prior]
) -> Figure:
    """Draw the first weight's posterior for the first seed, a panel for each job."""
    from bayesify.plots import weight_posteriors

    first = {
        job: min(
            (result for result in of_job(results, job)),
            key=lambda result: int(result["seed"]),
        )
        for job in _shown(results, jobs)
    }
    weights = [result["metrics"]["weight"] for result in first.values()]
    return weight_posteriors(
        [weight["mean"] for weight in weights],
        [weight["std"] for weight in weights],
        [jobs[job] for job in first],
        [prior_of(result) for result in first.values()],
    )


def _shown(results: Sequence[Result], jobs: Mapping[str, str]) -> dict[str, str]:
    there = {result["job"] for result in results}
    return {job: name for job, name in jobs.items() if job in there}


def _accuracy(bnn: BayesianModule, outputs: Tensor, targets: Tensor) -> float:
    return round(100.0 - float(bnn.likelihood.error(outputs, targets)), 4)


def _read(path: Path) -> list[float]:
    try:
        found: list[float] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read: {error}; remove {path.parent}") from error
    return found
