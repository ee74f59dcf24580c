"""Measure a network on a data set, whole and pruned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bayesify.app.runs.folder import RunData
from bayesify.distributions.kl import kl_divergence
from bayesify.distributions.posteriors import Delta
from bayesify.io import encoded_size, model_meta, model_tensors
from bayesify.metrics import (
    classification_metrics,
    error_percent,
    regression_metrics,
    reliability,
)
from bayesify.module.bayesian import BayesianModule
from bayesify.module.pruning import prune
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.prediction import CategoricalPredictive, GaussianPredictive, Predictive
from bayesify.tabular.table_data import TableData

__all__ = [
    "FEW_SAMPLES",
    "FRACTIONS",
    "RowMetrics",
    "evaluate",
    "in_units",
    "prune_table",
    "shown",
    "weights_left",
]

#: Fractions of the weights that the report's pruning table removes.
FRACTIONS = (0.1, 0.25, 0.5, 0.75, 0.95, 0.98, 0.99)
#: Averaging over more samples changes neither a train error nor a pruning curve visibly.
FEW_SAMPLES = 5
_MOST_SHOWN = 50_000
#: Metrics that are roots of means over rows.
_ROOTS = ("rmse", "rmse_mean_weights", "mean_std")


def evaluate(
    bnn: BayesianModule, data: RunData, *, num_samples: int, with_train: bool = True
) -> tuple[dict[str, Any], Predictive]:
    """Return the metrics of ``metrics.json``, and the averaged predictions of :func:`shown`.

    The metrics of the test set are None if no examples are held out. For a regression all are in
    the target's own units, not those of the standardised target.

    Args:
        bnn: the network.
        data: the data set.
        num_samples: weight samples of the test set's predictions; at most five are used for the
            training set.
        with_train: whether to measure the training set too.
    """
    point = isinstance(bnn.posterior, Delta)
    samples = 1 if point else num_samples
    inputs, targets = shown(data)
    predictive = in_units(bnn.predict(inputs, samples), *_units(data))
    held_out = len(data.test_inputs) > 0
    metrics: dict[str, Any] = {
        "test": _measured(bnn, predictive, data, inputs, targets) if held_out else None,
        "test_samples": samples if held_out else None,
    }
    if with_train:
        few = min(samples, FEW_SAMPLES)
        predicted = in_units(bnn.predict(data.train_inputs, few), *_units(data))
        metrics["train"] = _measured(bnn, predicted, data, data.train_inputs, data.train_targets)
        metrics["train_samples"] = few
    metrics["kl_nats"] = None if point else _kl(bnn)
    metrics["num_weights"] = bnn.layout.num_weights
    metrics["num_weights_left"] = weights_left(bnn)
    return metrics, predictive


class RowMetrics:
    """Metrics of a table's rows that come in chunks, as in the ``test`` part of ``metrics.json``.

    Args:
        bnn: the network.
        shift: the target is ``shift + scale * standardised target``.
        scale: see ``shift``.
    """

    def __init__(self, bnn: BayesianModule, shift: float, scale: float) -> None:
        self.rows = 0
        self._bnn, self._units = bnn, (shift, scale)
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
        at_mean = in_units(self._bnn.predict_mean(inputs[known]), *self._units).mean
        truth = targets[known]
        if isinstance(predictive, GaussianPredictive):
            noise = predictive.noise_std.expand_as(predictive.means)
            some = GaussianPredictive(predictive.means[:, known], noise[:, known])
            found = _regression(some, at_mean, truth.unsqueeze(-1))
        else:
            assert isinstance(predictive, CategoricalPredictive)
            entropy = predictive.expected_entropy[known]
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


def prune_table(
    bnn: BayesianModule,
    data: RunData,
    fractions: Sequence[float],
    *,
    num_samples: int = FEW_SAMPLES,
) -> list[dict[str, Any]]:
    """Return error and file size with no weight removed and with each fraction removed.

    The error is the likelihood's on :func:`shown`: in percent, or the mean squared error of the
    standardised target, which is a fraction of its variance.

    Raises:
        ValueError: a fraction is not between 0 and 1.
        TypeError: the network is a point estimate.
    """
    rows = []
    inputs, targets = shown(data)
    for fraction in dict.fromkeys((0.0, *fractions)):
        small = prune(bnn, fraction) if fraction else bnn
        whole = small.mean_outputs(inputs)
        averaged = small.predict(inputs, num_samples)
        rows.append(
            {
                "fraction": fraction,
                "weights_left": weights_left(small),
                "error_mean_weights": float(bnn.likelihood.error(whole, targets)),
                "error_predictive": _error(averaged, targets),
                "file_bytes": encoded_size(
                    model_tensors(small), {"kind": "model", "model": model_meta(small)}
                ),
            }
        )
    return rows


def in_units(predictive: Predictive, shift: float, scale: float) -> Predictive:
    """Return a prediction of a standardised number in its own units; one of classes unchanged."""
    if not isinstance(predictive, GaussianPredictive):
        return predictive
    # In float64, because a target may be far from 0 in units of its spread.
    wide = GaussianPredictive(predictive.means.double(), predictive.noise_std.double())
    return wide.rescaled(shift, scale)


def _units(data: RunData) -> tuple[float, float]:
    return (data.shift, data.scale) if isinstance(data, TableData) else (0.0, 1.0)


def _error(predictive: Predictive, targets: Tensor) -> float:
    if isinstance(predictive, GaussianPredictive):
        return float((predictive.mean - targets).double().square().mean())
    return error_percent(predictive.mean, targets)


def _measured(
    bnn: BayesianModule, predictive: Predictive, data: RunData, inputs: Tensor, targets: Tensor
) -> dict[str, float]:
    shift, scale = _units(data)
    at_mean = in_units(bnn.predict_mean(inputs), shift, scale).mean
    if isinstance(predictive, GaussianPredictive):
        return _regression(predictive, at_mean, targets.double() * scale + shift)
    return classification_metrics(predictive, at_mean, targets)


def _regression(predictive: GaussianPredictive, at_mean: Tensor, truth: Tensor) -> dict[str, float]:
    whole = float((at_mean - truth).square().mean().sqrt())
    return {"rmse_mean_weights": whole, **regression_metrics(predictive, truth)}


@torch.no_grad()
def _kl(bnn: BayesianModule) -> float:
    key = NoiseKey(bnn.seed, Stream.PREDICTION, 1)
    draw = bnn.posterior.draw(bnn.posterior.noise(key, range(1)))
    return float(kl_divergence(bnn.posterior, bnn.weight_prior, draw, prior_mean=bnn.prior_mean))


def weights_left(bnn: BayesianModule) -> int:
    """Return the number of random weights that are not pruned."""
    mask = bnn.posterior.mask
    return bnn.layout.num_weights if mask is None else int(mask.sum())
