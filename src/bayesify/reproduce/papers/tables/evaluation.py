"""Train a model on one split of a set, and measure it."""

from __future__ import annotations

import math
import time

import numpy as np
import torch
from torch import Tensor

from bayesify.metrics import brier, crps, error_percent, expected_calibration_error
from bayesify.prediction import GaussianPredictive, Predictive
from bayesify.reproduce.harness.experiment import Context
from bayesify.reproduce.papers.tables.models import Make
from bayesify.reproduce.papers.tables.peers import LEVEL
from bayesify.reproduce.papers.tables.sets import Array, Part, find_set, parts

__all__ = ["Scores", "class_scores", "evaluate", "number_scores", "quantile_crps"]

#: Numbers by name; None where the model has no density.
Scores = dict[str, float | None]

#: Probabilities of classes count as at least this much in the nll: some trees predict 0.
LEAST_PROBABILITY = 1e-6
#: Levels of the quantiles from which the CRPS of a distribution without a closed form is computed.
_LEVELS = 200


def evaluate(
    make: Make,
    name: str,
    split: int,
    part: Part = "test",
    *,
    context: Context | None = None,
) -> Scores:
    """Train a model on one split of a set, and measure its predictions of the held-out rows.

    Everything runs on one thread. Choose settings with ``part="validation"`` only, which never
    reads a test row, and on development sets only.

    Args:
        make: builds the model from a seed, which is the number of the split; see ``models.Make``.
        name: a set, such as ``"yacht"``.
        split: number of the random split, at least 0.
        part: the rows to predict: the test rows of the split, or validation rows out of its
            training rows, on whose other 80 % the model is trained then.
        context: where the data are.

    Returns:
        ``nll`` in nats per row. For numbers ``crps``, ``rmse`` and ``width`` of the 90 % intervals
        in the target's unit, and their ``coverage`` in percent; ``nll`` and ``crps`` are None
        where the model has no density. For classes ``accuracy`` in percent, ``brier`` and ``ece``.
        CPU seconds ``fit_seconds`` and ``predict_seconds``.

    Raises:
        ValueError: there is no such set or part.
        DataError: the data or the model's package cannot be found.

    Example:
        >>> from bayesify.sklearn import BayesianMLPRegressor
        >>> def make(seed: int) -> BayesianMLPRegressor:
        ...     return BayesianMLPRegressor(steps=300, random_state=seed)
        >>> found = evaluate(make, "yacht", 0, "validation")
        >>> sorted(found)
        ['coverage', 'crps', 'fit_seconds', 'nll', 'predict_seconds', 'rmse', 'width']
    """
    from threadpoolctl import threadpool_limits

    rows, numbers = parts(name, split, part, context), find_set(name).kind == "numbers"
    with threadpool_limits(1):
        begun = time.process_time()
        model = make(split)
        model.fit(rows.train_inputs, rows.train_targets)
        trained = time.process_time()
        dense = hasattr(model, "predictive")
        found = (model.predictive if dense else model.predict)(rows.test_inputs)
        predicted = time.process_time()
        targets = torch.as_tensor(rows.test_targets)
        if numbers:
            interval = model.predict_interval(rows.test_inputs, level=LEVEL)
            scores = number_scores(found, interval, targets)
        else:
            scores = class_scores(found.log_mean, targets)
    return {**scores, "fit_seconds": trained - begun, "predict_seconds": predicted - trained}


def number_scores(
    predicted: Predictive | Array, interval: tuple[Array, Array], targets: Tensor
) -> Scores:
    """Return the scores of predicted numbers.

    Args:
        predicted: the predictive distribution of N rows, or their means.
        interval: lower and upper ends of the intervals, each of shape (N,).
        targets: shape (N,).

    Example:
        >>> ends = np.array([-1.0, -1.0]), np.array([1.0, 1.0])
        >>> found = number_scores(np.zeros(2), ends, torch.tensor([0.0, 2.0]))
        >>> found["coverage"], found["width"], found["nll"]
        (50.0, 2.0, None)
    """
    low, high = (torch.as_tensor(np.asarray(end)) for end in interval)
    scores: Scores = {"nll": None, "crps": None}
    if isinstance(predicted, Predictive):
        mean = predicted.mean
        scores["nll"] = -float(predicted.log_prob(targets).double().mean())
        if isinstance(predicted, GaussianPredictive):
            scores["crps"] = crps(predicted, targets)
        else:
            scores["crps"] = quantile_crps(predicted, targets)
    else:
        mean = torch.as_tensor(predicted)
    return {
        **scores,
        "rmse": float((mean - targets).double().square().mean().sqrt()),
        "coverage": 100.0 * float(((low <= targets) & (targets <= high)).double().mean()),
        "width": float((high - low).double().mean()),
    }


def quantile_crps(predicted: Predictive, targets: Tensor) -> float:
    """Return the continuous ranked probability score from quantiles, for any distribution.

    It is twice the integral over q of the pinball loss of the q-quantile, here by midpoints.

    Example:
        >>> p = GaussianPredictive(torch.zeros(1, 1, dtype=torch.float64), torch.tensor(1.0))
        >>> round(quantile_crps(p, torch.zeros(1, dtype=torch.float64)), 3)
        0.234
    """
    total = 0.0
    for number in range(_LEVELS):
        q = (number + 0.5) / _LEVELS
        above = targets - predicted.quantile(q)
        total += float(torch.maximum(q * above, (q - 1.0) * above).double().mean())
    return 2.0 * total / _LEVELS


def class_scores(log_probs: Tensor, targets: Tensor) -> Scores:
    """Return the scores of predicted classes.

    Args:
        log_probs: logarithm of the class probabilities, shape (N, K).
        targets: class indices, shape (N,).

    Example:
        >>> found = class_scores(torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log(), torch.tensor([1, 1]))
        >>> round(found["nll"], 4), found["accuracy"]
        (7.2543, 0.0)
    """
    probs = log_probs.exp()
    true = log_probs.gather(-1, targets[:, None]).double()
    return {
        "nll": -float(true.clamp_min(math.log(LEAST_PROBABILITY)).mean()),
        "accuracy": 100.0 - error_percent(probs, targets),
        "brier": brier(probs, targets),
        "ece": expected_calibration_error(probs, targets),
    }
