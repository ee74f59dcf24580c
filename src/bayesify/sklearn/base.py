"""What both estimators share: settings, training on rows, and prediction in pieces."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from numbers import Real
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from bayesify.module import BayesianModule
from bayesify.predictive import Predictive
from bayesify.sklearn.rows import Rows
from bayesify.tabular import Noise, Scaling, Silent, TableRecipe
from bayesify.training.history import History, Row

__all__ = ["BayesianMLP"]

#: Numbers of a prediction that are held at once, beside what :meth:`predictive` gives.
_HELD = 4_000_000


class BayesianMLP(BaseEstimator):  # type: ignore[misc]
    """The part of an estimator that does not depend on what is predicted."""

    hidden_layer_sizes: Any
    steps: int | None
    batch_size: int | None
    learning_rate_init: float | None
    num_samples: int
    early_stopping: bool
    validation_fraction: float
    n_iter_no_change: int
    random_state: Any

    bnn_: BayesianModule
    feature_scaling_: Scaling
    recipe_: TableRecipe
    history_: History
    n_iter_: int

    def _check_settings(self) -> None:
        """Refuse settings that are out of range, before anything is changed."""
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

    def _begin(self, rows: Rows, num_outputs: int, noise: Noise | None) -> None:
        """A new network for these rows."""
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
        self.bnn_ = self.recipe_.module(
            self.n_features_in_,
            num_outputs,
            noise=noise,
            seed=seed,
        )
        self.history_, self.n_iter_ = [], 0

    def _train(self, rows: Rows, targets: Tensor, *, streaming: bool) -> None:
        """Train on rows, of which ``targets`` are what the likelihood takes."""
        bnn = self.bnn_
        inputs = self.feature_scaling_.standardised(rows.inputs)
        whole = Rows(inputs, targets, rows.weights)
        if not self.early_stopping or streaming:
            watch = _Counting()
            history = self.recipe_.fit(
                bnn, *whole[:2], weights=whole.weights, streaming=streaming, callback=watch
            )
        else:
            train, held_out = whole.split(self.validation_fraction, bnn.seed)
            warm = self.recipe_.kl_warmup * self.recipe_.steps
            watch = stopping = _EarlyStopping(bnn, self.n_iter_no_change, warm)
            with contextlib.suppress(_NoProgressError):
                self.recipe_.fit(
                    bnn,
                    *train[:2],
                    weights=train.weights,
                    validation=(held_out.inputs, held_out.targets, held_out.weights),
                    callback=stopping,
                )
            stopping.restore_best()
            history = stopping.rows
        self.history_ = [*self.history_, *history]
        self.n_iter_ += watch.steps

    def predictive(self, X: Any) -> Predictive:  # noqa: N803
        """The whole predictive distribution of each row, with its uncertainty split.

        Args:
            X: shape (N, F).

        Returns:
            Mean, samples, total, aleatoric and epistemic uncertainty, log density, quantiles and
            intervals, all in the units of y, as PyTorch tensors. See ``bayesify.Predictive``. It
            holds ``num_samples`` numbers or more for each row of a regression.
        """
        return self._predictive(self._inputs(X))

    def _inputs(self, X: Any) -> Tensor:  # noqa: N803
        check_is_fitted(self)
        table = validate_data(self, X, dtype=np.float64, reset=False)
        return self.feature_scaling_.standardised(torch.as_tensor(np.array(table)))

    def _predictive(self, inputs: Tensor) -> Predictive:
        return self.bnn_.predict(inputs, num_samples=self.num_samples)

    def _pieces(self, X: Any) -> Iterator[Predictive]:  # noqa: N803
        """The predictive distribution, of so many rows at a time that memory does not grow."""
        inputs = self._inputs(X)
        outputs = math.prod(self.bnn_.mean_outputs(inputs[:1]).shape[1:])
        for part in inputs.split(max(1, _HELD // (self.num_samples * outputs))):
            yield self._predictive(part)


def _is_count(value: Any) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and int(value) >= 1


class _Counting(Silent):
    """Counts steps."""

    steps = 0

    def on_step(self, *, epoch: int, batch: int) -> None:  # noqa: ARG002
        self.steps += 1


class _NoProgressError(Exception):
    """The held-out rows have not been predicted better for a while."""


class _EarlyStopping(_Counting):
    """Keeps the parameters under which held-out rows are predicted best, and says when to stop.

    Args:
        bnn: the network in training.
        patience: epochs without progress.
        warm: steps of the warm-up, in which the objective is not yet the ELBO.
    """

    def __init__(self, bnn: BayesianModule, patience: int, warm: float) -> None:
        self._bnn, self._patience, self._warm = bnn, patience, warm
        self._best, self._stale = math.inf, 0
        self._state: dict[str, Any] | None = None
        self.rows: History = []

    def on_epoch(self, row: Row) -> None:
        self.rows.append(row)
        if self.steps < self._warm:
            return
        nll = row["validation_nll"]
        assert nll is not None
        if self._state is None or nll < self._best:
            self._best, self._stale = nll, 0
            self._state = self._parameters(clone=True)
            return
        self._stale += 1
        if self._stale >= self._patience:
            raise _NoProgressError

    def restore_best(self) -> None:
        """Put the best parameters back."""
        if self._state is not None:
            with torch.no_grad():
                for name, value in self._parameters(clone=False).items():
                    value.copy_(self._state[name])

    def _parameters(self, *, clone: bool) -> dict[str, Tensor]:
        # By what they are: training wraps the likelihood, and with it the names of its parameters.
        named = self._bnn.named_parameters()
        return {n: p.detach().clone() if clone else p for n, p in named}
