"""Measure a network on a data set, whole and pruned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bayesify.app.runs.run_data import RunData
from bayesify.distributions.posteriors import Delta
from bayesify.io import encoded_size, model_document
from bayesify.metrics import (
    classification_metrics,
    error_percent,
    regression_metrics,
    reliability,
)
from bayesify.module.bayesian import BayesianModule
from bayesify.module.description_length import kl_nats
from bayesify.module.pruning import prune
from bayesify.prediction import (
    CategoricalPredictive,
    CountPredictive,
    GaussianPredictive,
    NumericPredictive,
    Predictive,
    StudentTPredictive,
)
from bayesify.tabular.censoring import Limits, RecordedPredictive
from bayesify.tabular.outside import widened
from bayesify.tabular.table_data import TableData

__all__ = [
    "FEW_SAMPLES",
    "FRACTIONS",
    "MOST_PRUNED",
    "RowMetrics",
    "distinct_samples",
    "evaluate",
    "evaluate_mean",
    "in_units",
    "predict_rows",
    "prune_table",
    "pruning_samples",
    "recorded",
    "rows_in_units",
    "shown",
    "weights_left",
    "widened_rows",
]

#: Fractions of the weights that the report's pruning table removes.
FRACTIONS = (0.1, 0.25, 0.5, 0.75, 0.95, 0.98, 0.99)
#: Averaging over more samples changes neither a train error nor a pruning curve of classes visibly.
FEW_SAMPLES = 5
_MOST_SHOWN = 50_000
#: Rows of a pruning table of numbers, which needs as many weight samples as the test set.
MOST_PRUNED = 2000
#: Errors in a history and a pruning table, which for numbers are those of standardised targets.
_ERRORS = ("train_error", "test_error", "error_mean_weights", "error_predictive")
#: Metrics that are roots of means over rows.
_ROOTS = ("rmse", "rmse_mean_weights", "mean_std")


def evaluate(
    bnn: BayesianModule, data: RunData, *, num_samples: int, with_train: bool = True
) -> tuple[dict[str, Any], Predictive]:
    """Return the metrics of ``metrics.json``, and the averaged predictions of :func:`shown`.

    The metrics of the test set are None if no examples are held out. For a regression all are in
    the target's own units, not those of the standardised target; of censored numbers they are those
    of the recorded numbers.

    Args:
        bnn: the network.
        data: the data set.
        num_samples: weight samples of the test set's predictions; at most five are used for the
            training set.
        with_train: whether to measure the training set too.
    """
    point = isinstance(bnn.posterior, Delta)
    samples = distinct_samples(bnn, num_samples)
    inputs, targets = shown(data)
    held_out = len(data.test_inputs) > 0
    predictive = recorded(_predicted(bnn, data, inputs, samples, train=not held_out), data)
    metrics: dict[str, Any] = {
        "test": _measured(bnn, predictive, data, inputs, targets) if held_out else None,
        "test_samples": samples if held_out else None,
    }
    if with_train:
        few = min(samples, FEW_SAMPLES)
        predicted = recorded(_predicted(bnn, data, data.train_inputs, few, train=True), data)
        metrics["train"] = _measured(bnn, predicted, data, data.train_inputs, data.train_targets)
        metrics["train_samples"] = few
    metrics["kl_nats"] = None if point else kl_nats(bnn)
    if not bnn.weight_prior.is_proper:
        metrics["kl_is_up_to_a_constant"] = True
    metrics["num_weights"] = bnn.layout.num_weights
    metrics["num_weights_left"] = weights_left(bnn)
    return metrics, predictive


def evaluate_mean(bnn: BayesianModule, data: RunData) -> dict[str, float]:
    """Return the metrics of the network at its mean weights, on :func:`shown`.

    They are those of the ``test`` part of ``metrics.json`` for a plain network.
    """
    inputs, targets = shown(data)
    return _measured(bnn, recorded(bnn.predict_mean(inputs), data), data, inputs, targets)


class RowMetrics:
    """Metrics of a table's rows that come in chunks, as in the ``test`` part of ``metrics.json``.

    Args:
        bnn: the network.
        shift: the target is ``shift + scale * standardised target``.
        scale: see ``shift``.
        limits: limits between which a number was recorded; None for no limits.
    """

    def __init__(
        self, bnn: BayesianModule, shift: float, scale: float, limits: Limits | None = None
    ) -> None:
        self.rows = 0
        self._bnn, self._units = bnn, (shift, scale)
        self._limits = Limits() if limits is None else limits
        self._sums: dict[str, float] = {}
        self._bins: Tensor | None = None

    def update(self, predictive: Predictive, inputs: Tensor, targets: Tensor) -> None:
        """Add the next rows.

        Args:
            predictive: their averaged predictions, in the target's own units.
            inputs: inputs of the network, shape (N, D).
            targets: class indices or numbers in their own units, float64, shape (N,); rows of nan
                are left out.
        """
        known = ~targets.isnan()
        count = int(known.sum())
        if not count:
            return
        limits = self._limits
        at_mean = _within(
            in_units(self._bnn.predict_mean(inputs[known]), *self._units), limits
        ).mean
        truth = targets[known]
        if isinstance(predictive, NumericPredictive):
            some = _within(predictive.at(known), limits)
            assert isinstance(some, NumericPredictive)
            truth = truth.clamp(limits.below, limits.above).unsqueeze(-1)
            found = _regression(some, at_mean, truth)
        else:
            assert isinstance(predictive, CategoricalPredictive)
            entropy = predictive.aleatoric[known]
            classes = CategoricalPredictive(predictive.log_mean[known], entropy)
            labels = truth.long()
            found = classification_metrics(classes, at_mean, labels)
            bins = reliability(classes.mean, labels)
            sums = torch.stack([bins.confidence, bins.accuracy]).nan_to_num() * bins.counts
            self._bins = sums if self._bins is None else self._bins + sums
        self.rows += count
        for name, value in found.items():
            # These are roots of means, which are averaged before the root.
            power = value * value if name in _ROOTS else value
            self._sums[name] = self._sums.get(name, 0.0) + count * power

    def result(self) -> dict[str, float]:
        """Return the metrics of all rows so far, of which there must be one at least."""
        means = {name: total / self.rows for name, total in self._sums.items()}
        found = {name: math.sqrt(m) if name in _ROOTS else m for name, m in means.items()}
        if self._bins is not None:
            found["ece"] = float((self._bins[0] - self._bins[1]).abs().sum()) / self.rows
        return found


def shown(data: RunData) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of the examples that figures and pruning table are about.

    These are the test examples, or the first 50,000 for training if no examples are held out.
    """
    if len(data.test_inputs):
        return data.test_inputs, data.test_targets
    return data.train_inputs[:_MOST_SHOWN], data.train_targets[:_MOST_SHOWN]


def pruning_samples(data: RunData, test_samples: int) -> int:
    """Return how many weight samples a pruning table averages over.

    An error of numbers is higher with few samples, whatever is removed. That of the whole network
    is to be the one of ``metrics.json``, which uses few samples where no examples are held out.

    Args:
        data: the data set.
        test_samples: weight samples of the test set's predictions.
    """
    is_few = bool(data.class_names) or not len(data.test_inputs)
    return FEW_SAMPLES if is_few else test_samples


def prune_table(
    bnn: BayesianModule,
    data: RunData,
    fractions: Sequence[float],
    *,
    num_samples: int = FEW_SAMPLES,
) -> list[dict[str, Any]]:
    """Return error and file size of a network as it is and with each fraction removed.

    Of a network that is pruned already, fractions that would remove no more weights are left out.

    The error is that on :func:`shown`: in percent, or on its first 2,000 rows the mean squared
    error of the standardised target, which is a fraction of its variance; of a censored number that
    of the recorded number.

    Raises:
        ValueError: a fraction is not between 0 and 1.
        TypeError: the network is a point estimate.
    """
    rows: list[dict[str, Any]] = []
    inputs, targets = shown(data)
    if not data.class_names:
        inputs, targets = inputs[:MOST_PRUNED], targets[:MOST_PRUNED]
    own = 1.0 - weights_left(bnn) / bnn.layout.num_weights
    for fraction in dict.fromkeys((own, *(each for each in fractions if each > own))):
        small = prune(bnn, fraction) if fraction > own else bnn
        # The network's own fraction is rounded, so that another one may be the same.
        if any(row["weights_left"] == weights_left(small) for row in rows):
            continue
        averaged = _predicted(small, data, inputs, num_samples, train=not len(data.test_inputs))
        rows.append(
            {
                "fraction": fraction,
                "weights_left": weights_left(small),
                "error_mean_weights": _error(small.predict_mean(inputs), data, targets),
                "error_predictive": _error(averaged, data, targets),
                "file_bytes": encoded_size(*model_document(small)),
            }
        )
    return rows


def predict_rows(
    bnn: BayesianModule,
    inputs: Tensor,
    distances: Tensor,
    samples: int,
    marginal: Sequence[float],
) -> Predictive:
    """Return the predictions for rows of a table, by :func:`widened_rows`.

    Args:
        bnn: the network.
        inputs: its inputs, shape (N, D).
        distances: how far each row lies outside the training data, shape (N,).
        samples: weight samples.
        marginal: as ``Target.marginal``; nothing is widened without it.
    """
    return widened_rows(bnn.predict(inputs, samples), distances, marginal)


def widened_rows(
    predictive: Predictive, distances: Tensor, marginal: Sequence[float]
) -> Predictive:
    """Return predictions for rows of a table, with less trust in those outside training's.

    Every command predicts so: a calibration, and metrics of held-out rows, are of the predictor
    that new rows meet.

    Args:
        predictive: of N rows.
        distances: how far each row lies outside the training data, shape (N,).
        marginal: as ``Target.marginal``; nothing is widened without it.
    """
    return widened(predictive, distances, torch.tensor(marginal)) if marginal else predictive


def in_units(predictive: Predictive, shift: float, scale: float) -> Predictive:
    """Return a prediction of a standardised number in its own units; one of classes unchanged."""
    if isinstance(predictive, CountPredictive):  # counts are not standardised
        wide: Predictive = replace(predictive, log_rates=predictive.log_rates.double())  # type: ignore[type-var]
        return wide
    if not isinstance(predictive, GaussianPredictive | StudentTPredictive):
        return predictive
    # In float64, because a target may be far from 0 in units of its spread.
    return replace(predictive, means=predictive.means.double()).rescaled(shift, scale)


def rows_in_units(rows: Sequence[Mapping[str, Any]], scale: float) -> list[dict[str, Any]]:
    """Return rows of numbers with roots of mean squares, in the target's unit, for its errors.

    Args:
        rows: of a history or of a pruning table, whose errors are those of standardised targets.
        scale: the standard deviation of the target.

    Example:
        >>> rows_in_units([{"fraction": 0.5, "error_predictive": 0.25, "test_error": None}], 10.0)
        [{'fraction': 0.5, 'error_predictive': 5.0, 'test_error': None}]
    """
    return [
        {
            name: value**0.5 * scale if name in _ERRORS and value is not None else value
            for name, value in row.items()
        }
        for row in rows
    ]


def recorded(predictive: Predictive, data: RunData) -> Predictive:
    """Return a prediction as the data's targets were recorded: in their units and limits."""
    if not isinstance(data, TableData):
        return predictive
    return _within(in_units(predictive, data.shift, data.scale), data.limits)


def _within(predictive: Predictive, limits: Limits) -> Predictive:
    if limits.are_open or not isinstance(predictive, GaussianPredictive):
        return predictive
    return RecordedPredictive.of(predictive, limits)


def _predicted(
    bnn: BayesianModule, data: RunData, inputs: Tensor, samples: int, *, train: bool
) -> Predictive:
    """Return the predictions for the first examples of a part of the data."""
    if not isinstance(data, TableData):
        return bnn.predict(inputs, samples)
    distances = (data.train_distances if train else data.test_distances)[: len(inputs)]
    return predict_rows(bnn, inputs, distances, samples, data.marginal)


def _error(predictive: Predictive, data: RunData, targets: Tensor) -> float:
    mean = recorded(predictive, data).mean
    if isinstance(predictive, NumericPredictive):
        assert isinstance(data, TableData)
        return float(((mean - data.numbers(targets)) / data.scale).square().mean())
    return error_percent(mean, targets)


def _measured(
    bnn: BayesianModule, predictive: Predictive, data: RunData, inputs: Tensor, targets: Tensor
) -> dict[str, float]:
    at_mean = recorded(bnn.predict_mean(inputs), data).mean
    if isinstance(predictive, NumericPredictive):
        assert isinstance(data, TableData)
        return _regression(predictive, at_mean, data.numbers(targets))
    return classification_metrics(predictive, at_mean, targets)


def _regression(predictive: NumericPredictive, at_mean: Tensor, truth: Tensor) -> dict[str, float]:
    whole = float((at_mean - truth).square().mean().sqrt())
    return {"rmse_mean_weights": whole, **regression_metrics(predictive, truth)}


def distinct_samples(bnn: BayesianModule, num_samples: int) -> int:
    """Return how many of so many weight samples differ: one of a point estimate.

    Example:
        >>> from bayesify.distributions.posteriors import Delta
        >>> point = BayesianModule(torch.nn.Linear(2, 1), posterior=Delta)
        >>> distinct_samples(point, 100)
        1
    """
    return 1 if isinstance(bnn.posterior, Delta) else num_samples


def weights_left(bnn: BayesianModule) -> int:
    """Return the number of random weights that are not pruned."""
    mask = bnn.posterior.mask
    return bnn.layout.num_weights if mask is None else int(mask.sum())
