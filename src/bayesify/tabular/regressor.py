"""Bayesian network for numbers, as a scikit-learn estimator."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from numbers import Real
from typing import Any, Literal, Self, get_args, overload

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score
from torch import Tensor

from bayesify.distributions.families import PosteriorName
from bayesify.prediction import (
    GaussianPredictive,
    LocationScalePredictive,
    NumericPredictive,
    Predictive,
    StudentTPredictive,
)
from bayesify.prediction.conformal import ConformalIntervals, whole_ends
from bayesify.tabular.advice import TableWarning, without_wild
from bayesify.tabular.censoring import Limits, RecordedPredictive
from bayesify.tabular.conformal import Method
from bayesify.tabular.estimator import BayesianMLP, Rows
from bayesify.tabular.likelihoods import (
    COUNTS,
    LARGEST_COUNT,
    CountStatistics,
    NumberLikelihood,
    check_are_numbers,
    check_unchanged,
    number_likelihood,
    wrong_count,
)
from bayesify.tabular.model import Noise, TableNet
from bayesify.tabular.scaling import Scaling
from bayesify.tabular.weights import Array, DistinctRows, checked_weights

__all__ = ["BayesianMLPRegressor"]


class BayesianMLPRegressor(RegressorMixin, BayesianMLP[NumericPredictive]):  # type: ignore[misc]
    """Bayesian multilayer perceptron for one number or several.

    It predicts with a standard deviation and intervals, from the posterior over its weights and
    the noise that it finds in the targets. Columns and targets are standardised inside, and the
    defaults suit the number of rows.

    Args:
        hidden_layer_sizes: units of each hidden layer (ReLU), in parallel to a linear path.
        likelihood: distribution of a target given the row: ``"gaussian"``; ``"student-t"``, with
            heavier tails, for targets with outliers; ``"poisson"`` for counts, whose variance is
            their mean; ``"negative-binomial"`` for counts that vary more; ``"censored"``, a
            Gaussian of which only numbers between ``censored_below`` and ``censored_above`` were
            recorded. Counts are not standardised.
        noise: ``"input-dependent"``, a standard deviation that depends on the row, or
            ``"learned"``, one for each target. Counts have neither, and allow only the default:
            their mean and likelihood give their variance.
        censored_below: lower limit of a censored target: of a number recorded there or below it is
            known only that it is at most the limit. None for no limit.
        censored_above: upper limit, as ``censored_below``. All predictions are of the number
            itself, which may lie beyond the limits.
        posterior: family of the posterior: ``"mean-field"``, or ``"low-rank"`` or ``"matrix"``
            under which weights depend on each other, at several times the price.
        steps: gradient steps, rounded up to whole epochs of the history; None chooses by the
            number of rows, those of each call of ``partial_fit``.
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
        target_scaling_: shift and scale of the targets, without wild ones; 0 and 1 for counts.
        recipe_: the settings of the training.
        relevance_: relative width of the prior for each column, shape (F,).
        history_: a row for each epoch; see ``bayesify.fit``. Means are over rows as they count,
            errors over distinct rows.
        n_iter_: number of steps.
        conformal_: the scores of the rows of :meth:`calibrate`, once it was called.
        fold_models_: the models of its folds; empty without folds.
        n_features_in_: number of columns.
        n_outputs_: number of targets.
        feature_names_in_: names of the columns, if X had names.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = BayesianMLPRegressor(steps=200, random_state=0).fit(X, y)
        >>> mean, std = model.predict(X[:3], return_std=True)
        >>> lower, upper = model.predict_interval(X[:3], level=0.95)
        >>> bool((lower < mean).all() and (mean < upper).all())
        True
        >>> visits = np.random.default_rng(0).poisson(np.exp(X[:, 2] * 20))
        >>> counts = BayesianMLPRegressor(likelihood="poisson", steps=300, random_state=0)
        >>> counts = counts.fit(X, visits)
        >>> counts.predict_interval(X[:1], level=0.9)
        (array([1.]), array([7.]))
    """

    target_scaling_: Scaling
    _count_spread: Tensor
    n_outputs_: int
    _target_shape: tuple[int, ...]

    def __init__(
        self,
        hidden_layer_sizes: Any = (50, 50),
        *,
        likelihood: NumberLikelihood = "gaussian",
        noise: Noise = "input-dependent",
        censored_below: float | None = None,
        censored_above: float | None = None,
        posterior: PosteriorName = "mean-field",
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
            posterior=posterior,
            steps=steps,
            batch_size=batch_size,
            learning_rate_init=learning_rate_init,
            num_samples=num_samples,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            n_iter_no_change=n_iter_no_change,
            random_state=random_state,
        )
        self.likelihood: NumberLikelihood = likelihood
        self.noise: Noise = noise
        self.censored_below = censored_below
        self.censored_above = censored_above

    def __sklearn_tags__(self) -> Any:
        """Return the tags, with several targets at once."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.positive_only = self.likelihood in COUNTS
        return tags

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Train on further rows, with the posterior so far as the prior.

        Give each row once only: a row given twice counts twice. The first call sets the scaling of
        columns and targets, so its rows should be typical. There is no early stopping. ``steps``,
        ``batch_size`` and ``learning_rate_init`` may change between the calls.

        Args:
            X: as for :meth:`fit`.
            y: shape (N,) or (N, K), as in the first call.
            sample_weight: as for :meth:`fit`.

        Raises:
            ValueError: as for :meth:`fit`; y has another number of targets than before; or
                ``hidden_layer_sizes``, ``posterior``, ``likelihood`` or ``noise`` differs from the
                first call.
        """
        with self._restored_after_errors():
            return self._fit(X, y, sample_weight, further=True)

    def _fit(self, X: Any, y: Any, sample_weight: Any, *, further: bool) -> Self:  # noqa: N803
        self._check_settings()
        first = not (further and hasattr(self, "bnn_"))
        noise, limits = self._checked_noise(), self._limits()
        if not first:
            self._check_same_noise()
        table, numbers = self._table(X, y, first=first, sample_weight=sample_weight)
        shape = numbers.shape[1:]
        weights = checked_weights(sample_weight, len(table))
        rows = DistinctRows.of(table, numbers.reshape(len(table), -1), weights)
        self._check_counts(sample_weight, weights, rows)
        ordinary = self._ordinary(rows, limits, first=first)
        if first:
            self._target_shape = shape
            self.n_outputs_ = rows.targets.shape[1]
            likelihood, log_rates = number_likelihood(self.likelihood), None
            if self.likelihood in COUNTS:
                found = CountStatistics.of(rows.targets, rows.weights)
                log_rates, self._count_spread = found.log_rates.tolist(), found.spread
                zero = torch.zeros(self.n_outputs_, dtype=torch.float64)
                self.target_scaling_ = Scaling(zero, zero + 1.0)
            else:
                self.target_scaling_ = Scaling.of(ordinary, rows.weights)
            self._begin(rows, self.n_outputs_, likelihood, noise=noise, log_rates=log_rates)
        # The likelihoods of counts and of Student's t know values far from the others.
        targets = ordinary if self.likelihood in ("gaussian", "censored") else rows.targets
        if self.likelihood == "censored":
            exact = limits.is_exact(rows.targets).unsqueeze(-1)
            pairs = torch.stack([targets, targets], dim=-1).where(
                exact, limits.bounds(rows.targets)
            )
            ends = [self.target_scaling_.standardised(each) for each in pairs.unbind(-1)]
            targets = torch.stack(ends, dim=-1)
        else:
            targets = self.target_scaling_.standardised(targets)
        stopping = self.early_stopping and not further
        self._train(rows, targets, early_stopping=stopping)
        return self

    def _checked_noise(self) -> Noise | None:
        """Return the noise that the network predicts; None for counts."""
        number_likelihood(self.likelihood)
        if self.noise not in get_args(Noise):
            raise ValueError(f'noise must be "learned" or "input-dependent", got {self.noise!r}')
        if self.likelihood not in COUNTS:
            return self.noise
        if self.noise != "input-dependent":
            raise ValueError(
                f"noise={self.noise!r} would do nothing with likelihood={self.likelihood!r}, where "
                "the mean gives the variance; leave it out"
            )
        return None

    def _check_same_noise(self) -> None:
        """Raise ValueError if the setting is another noise than the network's."""
        net = self.bnn_.net
        assert isinstance(net, TableNet)
        own: Noise = "input-dependent" if net.input_dependent else "learned"
        if net.noise is not None and self.noise != own:
            raise ValueError(
                f"noise must be {own!r}, as in training, got {self.noise!r}; set it back, or call "
                "fit"
            )

    def _limits(self) -> Limits:
        """Return the limits of a censored target; those of other targets are open."""
        given = (self.censored_below, self.censored_above)
        if any(limit is not None and not _is_finite(limit) for limit in given):
            raise ValueError(
                "censored_below and censored_above must be finite numbers or None, got "
                f"{given[0]!r} and {given[1]!r}"
            )
        if (self.likelihood == "censored") == (given == (None, None)):
            raise ValueError(
                'likelihood="censored" needs censored_below, censored_above or both'
                if self.likelihood == "censored"
                else "censored_below and censored_above would do nothing with "
                f'likelihood={self.likelihood!r}; use likelihood="censored"'
            )
        return Limits.between(*given)

    def _ordinary(self, rows: DistinctRows, limits: Limits, *, first: bool) -> Tensor:
        """Return the recorded targets without wild ones, of which a Gaussian warns."""
        if self.likelihood in COUNTS:
            return rows.targets
        recorded = rows.targets.clamp(limits.below, limits.above)
        # Only the scaling, which is that of the first rows, needs numbers that are known.
        if first and not bool(limits.is_exact(rows.targets).any(0).all()):
            raise ValueError(
                f"y must have numbers between the limits {limits.below} and {limits.above} for "
                "each target, got none; correct the limits"
            )
        numbers, note = without_wild(recorded.numpy(), rows.weights.numpy())
        if note is not None and self.likelihood != "student-t":
            warnings.warn(note, TableWarning, stacklevel=4)
        return torch.from_numpy(numbers)

    def _table(
        self,
        X: Any,  # noqa: N803
        y: Any,
        *,
        first: bool,
        sample_weight: Any = None,
    ) -> tuple[Array, Array]:
        """Return the checked rows and targets, which set the form of later ones if ``first``."""
        check_are_numbers(y)
        if not first:
            check_unchanged(self.bnn_.likelihood, self.likelihood)
        table, targets = self._checked(
            X, y, first=first, sample_weight=sample_weight, multi_output=True, y_numeric=True
        )
        numbers: Array = np.asarray(targets, dtype=np.float64)
        if not first and numbers.shape[1:] != self._target_shape:
            shape = ", ".join(("N", *map(str, self._target_shape))) + "," * (not self._target_shape)
            raise ValueError(
                f"y must have the shape ({shape}) of the first call, got shape {numbers.shape}"
            )
        wrong = wrong_count(numbers) if self.likelihood in COUNTS else None
        if wrong is not None:
            raise ValueError(
                f"y must hold counts, integers from 0 to {LARGEST_COUNT:g}, for likelihood="
                f'{self.likelihood!r}, got {wrong:g}; use likelihood="gaussian" for other numbers'
            )
        return table, numbers

    def _calibration_targets(self, X: Any, y: Any) -> Array:  # noqa: N803
        limits = self._limits()
        # The guarantee is for the recorded number of a censored target.
        return self._table(X, y, first=False)[1].clip(limits.below, limits.above)

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
        unit = self.target_scaling_.scale.reshape(self._target_shape)
        if isinstance(p, StudentTPredictive):
            p = StudentTPredictive(p.means / unit, p.scale / unit, p.df)
        elif isinstance(p, GaussianPredictive):
            p = GaussianPredictive(p.means / unit, p.noise_std / unit)
        return p.total.sqrt() * unit

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:  # noqa: N803
        """Return R^2 of the predicted means, as all of scikit-learn's regressors do.

        For a censored target, y and the prediction are those of the recorded number
        min(max(number, censored_below), censored_above).

        Args:
            X: shape (N, F).
            y: true targets, shape (N,) or (N, K).
            sample_weight: weights of the rows, shape (N,).
        """
        limits = self._limits()
        if limits.are_open:
            return float(super().score(X, y, sample_weight))
        parts = [
            RecordedPredictive.of(p, limits).mean
            for p in self._batches(X)
            if isinstance(p, GaussianPredictive)
        ]
        recorded = np.clip(np.asarray(y, dtype=np.float64), limits.below, limits.above)
        return float(r2_score(recorded, torch.cat(parts).numpy(), sample_weight=sample_weight))

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
                the factor that :meth:`calibrate` found, whose coverage is guaranteed: of a
                censored target that of the recorded number. Ends of counts are whole.

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
            if self.likelihood in COUNTS:
                low, high = whole_ends(low, high)
            return low.numpy(), high.numpy()
        ends = [batch.interval(level) for batch in self._batches(X)]
        lower, upper = (torch.cat(parts).double().numpy() for parts in zip(*ends, strict=True))
        return lower, upper

    def _stored_targets(self) -> dict[str, Any]:
        check_unchanged(self.bnn_.likelihood, self.likelihood)
        scaling = self.target_scaling_
        spread = self._count_spread.tolist() if self.likelihood in COUNTS else None
        return {
            "shape": list(self._target_shape),
            "shift": scaling.shift.tolist(),
            "scale": scaling.scale.tolist(),
            **({} if spread is None else {"spread": spread}),
        }

    def _restore_targets(self, stored: Mapping[str, Any]) -> int:
        self._target_shape = tuple(stored["shape"])
        shift, scale = (torch.tensor(stored[n], dtype=torch.float64) for n in ("shift", "scale"))
        self.target_scaling_ = Scaling(shift, scale)
        if self.likelihood in COUNTS:
            self._count_spread = torch.tensor(stored["spread"], dtype=torch.float64)
        self.n_outputs_ = len(shift)
        return self.n_outputs_

    @property
    def _marginal(self) -> Tensor:
        check_unchanged(self.bnn_.likelihood, self.likelihood)
        # The variance of standardised targets is 1.
        return self._count_spread if self.likelihood in COUNTS else torch.ones(())

    def _predictive(self, rows: Rows, *, keep_samples: bool = False) -> NumericPredictive:
        p = self._widened(rows, keep_samples=keep_samples)
        assert isinstance(p, NumericPredictive)
        if isinstance(p, LocationScalePredictive):
            p = p.rescaled(self.target_scaling_.shift, self.target_scaling_.scale)
        return p if self._target_shape else p.at((..., 0))


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
