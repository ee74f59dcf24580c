"""A Bayesian network for numbers, as a scikit-learn estimator."""

from __future__ import annotations

from typing import Any, Literal, Self, get_args, overload

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data
from torch import Tensor

from bayesify.predictive import GaussianPredictive, Predictive
from bayesify.sklearn.base import BayesianMLP
from bayesify.sklearn.rows import Array, Rows, checked_weights
from bayesify.tabular import Noise, Scaling

__all__ = ["BayesianMLPRegressor"]


class BayesianMLPRegressor(RegressorMixin, BayesianMLP):  # type: ignore[misc]
    """A Bayesian multilayer perceptron for one number or several.

    It predicts with a standard deviation and intervals, from the posterior over its weights and
    the noise that it finds in the targets. Columns and targets are standardised inside, and the
    settings suit the number of rows: there is nothing to tune for a start.

    Args:
        hidden_layer_sizes: units of each hidden layer (ReLU); a linear path stands beside them.
        noise: ``"learned"``, one standard deviation for each target, or ``"input-dependent"``,
            one that depends on the row.
        steps: gradient steps; None chooses by the number of rows.
        batch_size: rows a step; None is 512. A table of no more rows is taken whole.
        learning_rate_init: of Adam at the start, falling to 0; None is the recipe's own.
        num_samples: weight samples that a prediction averages over.
        early_stopping: whether to hold out rows and stop where they are predicted best.
        validation_fraction: the part of the rows that is held out then.
        n_iter_no_change: epochs (50 steps, or a pass over many rows) without progress before it
            stops.
        random_state: seed of everything random: None, an integer or a NumPy RandomState.

    Attributes:
        bnn_: the ``bayesify.BayesianModule``, on standardised columns and targets.
        feature_scaling_: shift and scale of the columns.
        target_scaling_: shift and scale of the targets.
        recipe_: the settings of the training.
        history_: a row for each epoch; see ``bayesify.fit``.
        n_iter_: steps taken.
        n_features_in_: number of columns.
        n_outputs_: number of targets.
        feature_names_in_: the columns' names, where X had names.

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
        hidden_layer_sizes: Any = (50,),
        *,
        noise: Noise = "learned",
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
        self.noise: Noise = noise
        self.steps = steps
        self.batch_size = batch_size
        self.learning_rate_init = learning_rate_init
        self.num_samples = num_samples
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        """Several targets at once are welcome."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Train anew.

        Args:
            X: shape (N, F), numbers without NaN.
            y: shape (N,) or (N, K), numbers without NaN.
            sample_weight: how many times each row counts, shape (N,); 0 leaves it out, and 2 is
                the row twice.

        Raises:
            ValueError: the input is none of this, or a setting is out of its range.
        """
        return self._fit(X, y, sample_weight, streaming=False)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Learn from further rows: the posterior so far is their prior.

        Give each row once only, in any number of pieces: a row given twice counts twice. The
        first piece sets the scaling of columns and targets, so it should be typical. There is no
        early stopping.

        Args:
            X: shape (N, F).
            y: shape (N,) or (N, K), as in the first call.
            sample_weight: as for :meth:`fit`.

        Raises:
            ValueError: as for :meth:`fit`; or y has another number of targets than before.
        """
        return self._fit(X, y, sample_weight, streaming=True)

    def _fit(self, X: Any, y: Any, sample_weight: Any, *, streaming: bool) -> Self:  # noqa: N803
        first = not (streaming and hasattr(self, "bnn_"))
        if self.noise not in get_args(Noise):
            raise ValueError(f'noise must be "learned" or "input-dependent", got {self.noise!r}')
        table, targets = validate_data(
            self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, reset=first
        )
        targets = np.asarray(targets, dtype=np.float64)
        shape = targets.shape[1:]
        if not first and shape != self._target_shape:
            raise ValueError(
                f"y must have the shape {('N', *self._target_shape)} of the first call, got shape "
                f"{targets.shape}"
            )
        weights = checked_weights(sample_weight, len(table))
        rows = Rows.of(table, targets.reshape(len(table), -1), weights)
        if first:
            self._target_shape = shape
            self.n_outputs_ = rows.targets.shape[1]
            self.target_scaling_ = Scaling.of(rows.targets, rows.weights)
            self._begin(rows, self.n_outputs_, self.noise)
        standardised = self.target_scaling_.standardised(rows.targets)
        self._train(rows, standardised, streaming=not first)
        return self

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
        """The mean of the target, in its own units.

        Args:
            X: shape (N, F).
            return_std: whether to give the standard deviation too, as scikit-learn's Gaussian
                processes do: of the target, noise included.

        Returns:
            The mean, of y's shape; with ``return_std`` mean and standard deviation.
        """
        pieces = [
            (piece.mean, self._std(piece) if return_std else None) for piece in self._pieces(X)
        ]
        mean, std = zip(*pieces, strict=True)
        whole: Array = torch.cat(mean).numpy()
        return (whole, torch.cat(std).numpy()) if return_std else whole

    def _std(self, piece: Predictive) -> Tensor:
        """The standard deviation, where its square may overflow, too."""
        assert isinstance(piece, GaussianPredictive)
        unit = self.target_scaling_.scale.reshape(self._target_shape)
        return GaussianPredictive(piece.means / unit, piece.noise_std / unit).total.sqrt() * unit

    def predict_interval(self, X: Any, level: float = 0.95) -> tuple[Array, Array]:  # noqa: N803
        """Where the target lies with probability ``level``: lower and upper ends, of y's shape.

        Equal-tailed, of the full predictive distribution: noise and uncertainty of the weights.

        Raises:
            ValueError: ``level`` is not strictly between 0 and 1.
        """
        pieces = [piece.interval(level) for piece in self._pieces(X)]
        lower, upper = (torch.cat(parts).numpy() for parts in zip(*pieces, strict=True))
        return lower, upper

    def _predictive(self, inputs: Tensor) -> GaussianPredictive:
        p = super()._predictive(inputs)
        assert isinstance(p, GaussianPredictive)
        scaling = self.target_scaling_
        means, stds = p.means * scaling.scale + scaling.shift, p.noise_std * scaling.scale
        if not self._target_shape:
            means, stds = means.squeeze(-1), stds.squeeze(-1)
        return GaussianPredictive(means, stds)
