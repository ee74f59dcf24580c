"""Base class of the two scikit-learn estimators: settings, training and prediction."""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Iterator
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from bayesify.module.bayesian import BayesianModule
from bayesify.prediction import Predictive
from bayesify.tabular.model import Noise
from bayesify.tabular.recipe import Silent, TableRecipe
from bayesify.tabular.scaling import Scaling
from bayesify.tabular.weights import DistinctRows
from bayesify.training.history import EpochRow, History

__all__ = ["BayesianMLP"]

#: Predicted numbers that are in memory at once, unless :meth:`BayesianMLP.predictive` is called.
_MOST_NUMBERS = 4_000_000


class BayesianMLP(BaseEstimator):  # type: ignore[misc]
    """Bayesian multilayer perceptron for a table; the subclasses define its targets."""

    bnn_: BayesianModule
    feature_scaling_: Scaling
    recipe_: TableRecipe
    history_: History
    n_iter_: int

    def __init__(
        self,
        hidden_layer_sizes: Any = (50,),
        *,
        steps: int | None = None,
        batch_size: int | None = None,
        learning_rate_init: float | None = None,
        num_samples: int = 200,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 5,
        random_state: Any = None,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.steps = steps
        self.batch_size = batch_size
        self.learning_rate_init = learning_rate_init
        self.num_samples = num_samples
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Train from scratch.

        Args:
            X: shape (N, F), numbers without NaN.
            y: a classifier's labels, shape (N,): integers, text or booleans; a regressor's
                numbers without NaN, shape (N,) or (N, K).
            sample_weight: the number of times that each row counts, shape (N,). 0 leaves the row
                out, and 2 is the row twice.

        Raises:
            ValueError: the input does not have this form, or a setting is out of its range.
        """
        return self._fit(X, y, sample_weight, further=False)

    @abstractmethod
    def _fit(self, X: Any, y: Any, sample_weight: Any, *, further: bool) -> Self:  # noqa: N803
        """Train from scratch, or on further rows with the posterior so far as the prior."""

    def _check_settings(self) -> None:
        """Raise ValueError for settings out of range."""
        for name in ("num_samples", "n_iter_no_change", "steps", "batch_size"):
            value = getattr(self, name)
            if not (_is_count(value) or (value is None and name in ("steps", "batch_size"))):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        sizes = self.hidden_layer_sizes
        units = [sizes] if np.ndim(sizes) == 0 else list(sizes)
        if not units or not all(map(_is_count, units)):
            raise ValueError(
                f"hidden_layer_sizes must be positive numbers of units such as (50,), got {sizes!r}"
            )
        rate = self.learning_rate_init
        if rate is not None and not (isinstance(rate, Real) and 0.0 < rate < math.inf):
            raise ValueError(
                f"learning_rate_init must be positive and finite, or None, got {rate!r}"
            )
        part = self.validation_fraction
        if not (isinstance(part, Real) and 0.0 < part < 1.0):
            raise ValueError(f"validation_fraction must lie strictly between 0 and 1, got {part!r}")

    def _begin(self, rows: DistinctRows, num_outputs: int, noise: Noise | None) -> None:
        """Build a new network for these rows."""
        self._check_settings()
        self.recipe_ = TableRecipe.for_rows(
            len(rows.weights),
            hidden=tuple(np.atleast_1d(self.hidden_layer_sizes).tolist()),
            steps=self.steps,
            batch_size=self.batch_size,
            lr=self.learning_rate_init,
        )
        self.feature_scaling_ = Scaling.of(rows.inputs, rows.weights)
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        self.bnn_ = self.recipe_.module(self.n_features_in_, num_outputs, noise=noise, seed=seed)
        self.history_, self.n_iter_ = [], 0

    def _train(
        self, rows: DistinctRows, targets: Tensor, *, streaming: bool, early_stopping: bool
    ) -> None:
        """Train on rows, with their targets in the form of the likelihood."""
        bnn = self.bnn_
        inputs = self.feature_scaling_.standardised(rows.inputs)
        whole = DistinctRows(inputs, targets, rows.weights)
        if not early_stopping:
            counter = _StepCounter()
            history = self.recipe_.fit(
                bnn, *whole[:2], weights=whole.weights, streaming=streaming, callback=counter
            )
        else:
            train, held_out = whole.split(self.validation_fraction, bnn.seed)
            warm = self.recipe_.kl_warmup * self.recipe_.steps
            counter = stopping = _EarlyStopping(bnn, self.n_iter_no_change, warm)
            with contextlib.suppress(_NoProgressError):
                self.recipe_.fit(
                    bnn, *train[:2], weights=train.weights, validation=held_out, callback=stopping
                )
            stopping.restore_best()
            history = stopping.rows
        self.history_ = [*self.history_, *history]
        self.n_iter_ += counter.steps

    def predictive(self, X: Any, *, keep_samples: bool = False) -> Predictive:  # noqa: N803
        """Return the predictive distribution of each row, with its uncertainty split.

        Args:
            X: shape (N, F).
            keep_samples: whether a classifier's result holds the probabilities of every weight
                sample; a regressor's always holds its means.

        Returns:
            Mean, samples, total, aleatoric and epistemic uncertainty, log density, quantiles and
            intervals, all in the units of y, as PyTorch tensors. See ``bayesify.Predictive``. It
            holds ``num_samples`` numbers or more for each row of a regression.
        """
        return self._predictive(self._inputs(X), keep_samples=keep_samples)

    def _inputs(self, X: Any) -> Tensor:  # noqa: N803
        check_is_fitted(self)
        table = validate_data(self, X, dtype=np.float64, reset=False)
        return self.feature_scaling_.standardised(torch.as_tensor(np.array(table)))

    def _predictive(self, inputs: Tensor, *, keep_samples: bool = False) -> Predictive:
        return self.bnn_.predict(inputs, num_samples=self.num_samples, keep_samples=keep_samples)

    def _batches(self, X: Any) -> Iterator[Predictive]:  # noqa: N803
        """Yield the predictive distribution of a batch of rows at a time, to bound the memory."""
        inputs = self._inputs(X)
        outputs = math.prod(self.bnn_.mean_outputs(inputs[:1]).shape[1:])
        for part in inputs.split(max(1, _MOST_NUMBERS // (self.num_samples * outputs))):
            yield self._predictive(part)


def _is_count(value: Any) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and int(value) >= 1


class _StepCounter(Silent):
    """Callback that counts steps."""

    steps = 0

    def on_step(self, *, epoch: int, batch: int) -> None:  # noqa: ARG002
        self.steps += 1


class _NoProgressError(Exception):
    """The nll of the held-out rows has not improved for the epochs of patience."""


class _EarlyStopping(_StepCounter):
    """Keep the parameters with the lowest nll of held-out rows; stop without progress.

    Args:
        bnn: the network in training.
        patience: epochs without progress.
        warm: steps of the warm-up, in which the objective is not yet the ELBO.
    """

    def __init__(self, bnn: BayesianModule, patience: int, warm: float) -> None:
        self._bnn, self._patience, self._warm = bnn, patience, warm
        self._best, self._stale = math.inf, 0
        self._state: list[Tensor] | None = None
        self.rows: History = []

    def on_epoch(self, row: EpochRow) -> None:
        self.rows.append(row)
        if self.steps < self._warm:
            return
        nll = row["validation_nll"]
        assert nll is not None
        if self._state is None or nll < self._best:
            self._best, self._stale = nll, 0
            self._state = [value.detach().clone() for value in self._bnn.parameters()]
            return
        self._stale += 1
        if self._stale >= self._patience:
            raise _NoProgressError

    @torch.no_grad()
    def restore_best(self) -> None:
        """Put the best parameters back."""
        if self._state is not None:
            for value, best in zip(self._bnn.parameters(), self._state, strict=True):
                value.copy_(best)
