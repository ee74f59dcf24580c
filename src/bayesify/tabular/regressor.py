"""Bayesian network for numbers, as a scikit-learn estimator."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args, overload

import numpy as np
import torch
from sklearn.base import RegressorMixin
from torch import Tensor

from bayesify.prediction import GaussianPredictive, Predictive
from bayesify.prediction.conformal import ConformalIntervals
from bayesify.tabular.advice import TableWarning, without_wild
from bayesify.tabular.conformal import Method
from bayesify.tabular.estimator import BayesianMLP, Rows
from bayesify.tabular.model import Noise
from bayesify.tabular.scaling import Scaling
from bayesify.tabular.weights import Array, DistinctRows, checked_weights

__all__ = ["BayesianMLPRegressor"]


class BayesianMLPRegressor(RegressorMixin, BayesianMLP):  # type: ignore[misc]
    """Bayesian multilayer perceptron for one number or several.

    It predicts with a standard deviation and intervals, from the posterior over its weights and
    the noise that it finds in the targets. Columns and targets are standardised inside, and the
    defaults suit the number of rows.

    Args:
        hidden_layer_sizes: units of each hidden layer (ReLU), in parallel to a linear path.
        noise: ``"input-dependent"``, a standard deviation that depends on the row, or
            ``"learned"``, one for each target.
        steps: gradient steps; None chooses by the number of rows.
        batch_size: rows a step; None is 512. A step uses all rows of a table with no more.
        learning_rate_init: of Adam at the start, falling to 0; None is the recipe's own.
        num_samples: weight samples that a prediction averages over.
        early_stopping: whether to hold out rows and keep the parameters with their lowest nll.
        validation_fraction: the part of the rows that is held out then.
        n_iter_no_change: epochs (50 steps, or a pass over many rows) without progress before
            training stops.
        random_state: seed of everything random: None, an integer or a NumPy RandomState.

    Attributes:
        bnn_: the ``bayesify.BayesianModule``, on encoded columns and standardised targets.
        columns_: what each column holds, and how it becomes inputs of the network.
        target_scaling_: shift and scale of the targets, without wild ones.
        recipe_: the settings of the training.
        relevance_: relative width of the prior for each column, shape (F,).
        history_: a row for each epoch; see ``bayesify.fit``.
        n_iter_: number of steps.
        conformal_: the scores of the rows of :meth:`calibrate`, once it was called.
        fold_models_: the models of its folds; empty without folds.
        n_features_in_: number of columns.
        n_outputs_: number of targets.
        feature_names_in_: names of the columns, if X had names.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = BayesianMLPRegressor(random_state=0).fit(X, y)
        >>> mean, std = model.predict(X[:3], return_std=True)
        >>> lower, upper = model.predict_interval(X[:3], level=0.95)
        >>> bool((lower < mean).all() and (mean < upper).all())
        True
    """

    target_scaling_: Scaling
    n_outputs_: int
    _target_shape: tuple[int, ...]

    def __init__(
        self,
        hidden_layer_sizes: Any = (50, 50),
        *,
        noise: Noise = "input-dependent",
        steps: int | None = None,
        batch_size: int | None = None,
        learning_rate_init: float | None = None,
        num_samples: int = 200,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 5,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            hidden_layer_sizes,
            steps=steps,
            batch_size=batch_size,
            learning_rate_init=learning_rate_init,
            num_samples=num_samples,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            n_iter_no_change=n_iter_no_change,
            random_state=random_state,
        )
        self.noise: Noise = noise

    def __sklearn_tags__(self) -> Any:
        """Return the tags, with several targets at once."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Train on further rows, with the posterior so far as the prior.

        Give each row once only: a row given twice counts twice. The first call sets the scaling of
        columns and targets, so its rows should be typical. There is no early stopping.

        Args:
            X: as for :meth:`fit`.
            y: shape (N,) or (N, K), as in the first call.
            sample_weight: as for :meth:`fit`.

        Raises:
            ValueError: as for :meth:`fit`; or y has another number of targets than before.
        """
        return self._fit(X, y, sample_weight, further=True)

    def _fit(self, X: Any, y: Any, sample_weight: Any, *, further: bool) -> Self:  # noqa: N803
        first = not (further and hasattr(self, "bnn_"))
        if self.noise not in get_args(Noise):
            raise ValueError(f'noise must be "learned" or "input-dependent", got {self.noise!r}')
        table, numbers = self._table(X, y, first=first, sample_weight=sample_weight)
        shape = numbers.shape[1:]
        weights = checked_weights(sample_weight, len(table))
        rows = DistinctRows.of(table, numbers.reshape(len(table), -1), weights)
        self._check_counts(sample_weight, weights, rows)
        numbers, note = without_wild(rows.targets.numpy(), rows.weights.numpy())
        if note is not None:
            warnings.warn(note, TableWarning, stacklevel=3)
        tamed = torch.from_numpy(numbers)
        if first:
            self._target_shape = shape
            self.n_outputs_ = rows.targets.shape[1]
            self.target_scaling_ = Scaling.of(tamed, rows.weights)
            self._begin(rows, self.n_outputs_, self.noise)
        stopping = self.early_stopping and not further
        targets = self.target_scaling_.standardised(tamed)
        self._train(rows, targets, streaming=not first, early_stopping=stopping)
        return self

    def _table(
        self,
        X: Any,  # noqa: N803
        y: Any,
        *,
        first: bool,
        sample_weight: Any = None,
    ) -> tuple[Array, Array]:
        """Return the checked rows and targets, which set the form of later ones if ``first``."""
        table, targets = self._checked(
            X, y, first=first, sample_weight=sample_weight, multi_output=True, y_numeric=True
        )
        numbers: Array = np.asarray(targets, dtype=np.float64)
        if not first and numbers.shape[1:] != self._target_shape:
            raise ValueError(
                f"y must have the shape {('N', *self._target_shape)} of the first call, got shape "
                f"{numbers.shape}"
            )
        return table, numbers

    def _calibration_targets(self, X: Any, y: Any) -> Array:  # noqa: N803
        return self._table(X, y, first=False)[1]

    def _scored(self, model: Self, X: Any, targets: Array) -> ConformalIntervals:  # noqa: N803
        mean, std = map(torch.from_numpy, model.predict(X, return_std=True))
        # A copy, since a column of a data frame is read-only.
        return ConformalIntervals.of(mean, std, torch.from_numpy(np.array(targets)))

    @overload
    def predict(self, X: Any) -> Array: ...  # noqa: N803
    @overload
    def predict(self, X: Any, return_std: Literal[False]) -> Array: ...  # noqa: N803
    @overload
    def predict(self, X: Any, return_std: Literal[True]) -> tuple[Array, Array]: ...  # noqa: N803
    def predict(
        self,
        X: Any,  # noqa: N803
        return_std: bool = False,
    ) -> Array | tuple[Array, Array]:
        """Return the mean of the target, in its units.

        Args:
            X: shape (N, F).
            return_std: whether to return the standard deviation of the target too, noise
                included, as scikit-learn's Gaussian processes do.

        Returns:
            The mean, of y's shape; with ``return_std`` mean and standard deviation.
        """
        parts = [
            (batch.mean, self._std(batch) if return_std else None) for batch in self._batches(X)
        ]
        mean, std = zip(*parts, strict=True)
        whole: Array = torch.cat(mean).numpy()
        return (whole, torch.cat(std).numpy()) if return_std else whole

    def _std(self, p: Predictive) -> Tensor:
        """Return the standard deviation, also if its square overflows."""
        assert isinstance(p, GaussianPredictive)
        unit = self.target_scaling_.scale.reshape(self._target_shape)
        return GaussianPredictive(p.means / unit, p.noise_std / unit).total.sqrt() * unit

    def predict_interval(
        self,
        X: Any,  # noqa: N803
        level: float = 0.95,
        method: Method = "bayes",
    ) -> tuple[Array, Array]:
        """Return lower and upper ends of the interval of probability ``level``, of y's shape.

        Args:
            X: shape (N, F).
            level: probability, of each target on its own.
            method: ``"bayes"``, equal tails of the full predictive distribution, with noise and
                uncertainty of the weights; or ``"conformal"``, mean and standard deviation with
                the factor that :meth:`calibrate` found, whose coverage is guaranteed.

        Raises:
            ValueError: ``level`` is not strictly between 0 and 1, there is no such method, or the
                calibration is missing or has too few rows for the level.
        """
        if self._is_conformal(method):
            mean, std = self._stacked(
                lambda model, rows: np.stack(model.predict(rows, return_std=True), axis=-1), X
            ).unbind(-1)
            assert isinstance(self.conformal_, ConformalIntervals)
            low, high = self.conformal_.interval(mean, std, level)
            return low.numpy(), high.numpy()
        ends = [batch.interval(level) for batch in self._batches(X)]
        lower, upper = (torch.cat(parts).numpy() for parts in zip(*ends, strict=True))
        return lower, upper

    def _stored_targets(self) -> dict[str, Any]:
        scaling = self.target_scaling_
        return {
            "shape": list(self._target_shape),
            "shift": scaling.shift.tolist(),
            "scale": scaling.scale.tolist(),
        }

    def _restore_targets(self, stored: Mapping[str, Any]) -> int:
        self._target_shape = tuple(stored["shape"])
        shift, scale = (torch.tensor(stored[n], dtype=torch.float64) for n in ("shift", "scale"))
        self.target_scaling_ = Scaling(shift, scale)
        self.n_outputs_ = len(shift)
        return self.n_outputs_

    @property
    def _marginal(self) -> Tensor:
        return torch.ones(())  # the variance of standardised targets

    def _predictive(self, rows: Rows, *, keep_samples: bool = False) -> GaussianPredictive:
        p = super()._predictive(rows, keep_samples=keep_samples)
        assert isinstance(p, GaussianPredictive)
        scaling = self.target_scaling_
        means, stds = p.means * scaling.scale + scaling.shift, p.noise_std * scaling.scale
        if not self._target_shape:
            means, stds = means.squeeze(-1), stds.squeeze(-1)
        return GaussianPredictive(means, stds)
