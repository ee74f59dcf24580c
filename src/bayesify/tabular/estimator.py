"""Base class of the two scikit-learn estimators: settings, training and prediction."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, Generic, NamedTuple, Self

import numpy as np
import torch
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, check_is_fitted, check_X_y, validate_data
from torch import Tensor

from bayesify.distributions.families import PosteriorName
from bayesify.distributions.likelihoods import Likelihood
from bayesify.module.bayesian import BayesianModule
from bayesify.prediction import Predictive
from bayesify.prediction.predictive import P_co
from bayesify.tabular.advice import check_repeats, check_sum
from bayesify.tabular.cells import Floats
from bayesify.tabular.columns import Column, RangedColumn
from bayesify.tabular.conformal import Calibrated
from bayesify.tabular.early_stopping import EarlyStopping, NoProgressError, StepCounter
from bayesify.tabular.frames import (
    columns_of,
    frame_of,
    number_columns,
    takes_any_number,
    values_of,
)
from bayesify.tabular.likelihoods import has_classes
from bayesify.tabular.model import Noise, TableNet
from bayesify.tabular.outside import widened
from bayesify.tabular.recipe import TableRecipe
from bayesify.tabular.schema import tail_of
from bayesify.tabular.stored_estimator import StorableEstimator
from bayesify.tabular.weights import Array, DistinctRows, per_counted_row
from bayesify.training.convergence import ConvergenceWarning
from bayesify.training.history import History

__all__ = ["BayesianMLP", "Rows"]

#: Predicted numbers that are in memory at once, unless :meth:`BayesianMLP.predictive` is called.
_MOST_NUMBERS = 4_000_000


class BayesianMLP(Calibrated, StorableEstimator, Generic[P_co]):
    """Bayesian multilayer perceptron for a table; the subclasses define its targets."""

    bnn_: BayesianModule
    columns_: tuple[Column, ...]
    recipe_: TableRecipe
    history_: History
    n_iter_: int
    #: The rows so far, as their weights count them.
    _num_rows: float

    def __init__(
        self,
        hidden_layer_sizes: Any = (50, 50),
        *,
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
        self.hidden_layer_sizes = hidden_layer_sizes
        self.posterior: PosteriorName = posterior
        self.steps = steps
        self.batch_size = batch_size
        self.learning_rate_init = learning_rate_init
        self.num_samples = num_samples
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        """Return the tags, with missing values, texts and categories."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Train from scratch.

        Args:
            X: shape (N, F): a data frame with columns of numbers, texts, dates or booleans, or an
                array; missing values are allowed.
            y: a classifier's labels, shape (N,): integers, text or booleans; a regressor's
                numbers without NaN, shape (N,) or (N, K).
            sample_weight: the number of times that each row counts, shape (N,). 0 leaves the row
                out, and 2 is the row twice.

        Raises:
            ValueError: the input does not have this form, or a setting is out of its range.

        Warns:
            TableWarning: the table most likely teaches something else than was meant.
            ConvergenceWarning: training was too short.
        """
        with self._restored_after_errors():
            return self._fit(X, y, sample_weight, further=False)

    @contextlib.contextmanager
    def _restored_after_errors(self) -> Iterator[None]:
        """Leave what an earlier call found as it was where a later one fails or is interrupted."""
        before = dict(self.__dict__)
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

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

    def _check_counts(self, sample_weight: Any, weights: Floats, rows: DistinctRows) -> None:
        """Warn of weights, or of rows given several times, that most likely nobody wants."""
        if sample_weight is None:
            check_repeats(rows.weights.numpy())
        else:
            check_sum(weights)

    def _recipe(self, num_rows: int, *, has_classes: bool) -> TableRecipe:
        """Return the settings of the training."""
        return TableRecipe.for_rows(
            num_rows,
            has_classes=has_classes,
            hidden=tuple(np.atleast_1d(self.hidden_layer_sizes).tolist()),
            steps=self.steps,
            batch_size=self.batch_size,
            lr=self.learning_rate_init,
            posterior=self.posterior,
        )

    def _begin(
        self,
        rows: DistinctRows,
        num_outputs: int,
        likelihood: Likelihood,
        *,
        noise: Noise | None = None,
        log_rates: Sequence[float] | None = None,
    ) -> None:
        """Fit the columns, and build a new network for these rows."""
        self.recipe_ = self._recipe(len(rows.weights), has_classes=has_classes(likelihood))
        values, weights = rows.inputs.numpy(), rows.weights.numpy()
        ranged = sum(isinstance(column, RangedColumn) for column in self.columns_)
        tail = tail_of(weights.sum(), ranged)
        self.columns_ = tuple(
            column.fit(values[:, place], tail=tail, weights=weights)
            for place, column in enumerate(self.columns_)
        )
        num_inputs = sum(len(column.features) for column in self.columns_)
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        self.bnn_ = self.recipe_.module(
            max(1, num_inputs),
            num_outputs,
            noise=noise,
            likelihood=likelihood,
            log_rates=log_rates,
            seed=seed,
        )
        self.history_, self.n_iter_, self._num_rows = [], 0, 0.0

    def _train(self, rows: DistinctRows, targets: Tensor, *, early_stopping: bool) -> None:
        """Train on rows, with their targets in the form of the likelihood.

        Where there were rows before, their posterior is the prior.
        """
        self._drop_calibration()
        # A copy of what there was, which stays if the training is interrupted.
        bnn = self.bnn_ = copy.deepcopy(self.bnn_)
        if self._num_rows:  # as many steps as for these rows alone
            alone = self._recipe(len(rows.weights), has_classes=has_classes(bnn.likelihood))
            self._check_same_network(alone)
            self.recipe_ = replace(
                self.recipe_, steps=alone.steps, batch_size=alone.batch_size, lr=alone.lr
            )
        whole = DistinctRows(self._encoded(rows.inputs.numpy()), targets, rows.weights)
        counter = StepCounter()
        if not early_stopping:
            history = self.recipe_.fit(
                bnn,
                *whole[:2],
                weights=whole.weights,
                num_before=self._num_rows,
                callback=counter,
            )
            history = per_counted_row(history, whole.weights)
        else:
            train, held_out = whole.split(self.validation_fraction, bnn.seed)
            warm = self.recipe_.kl_warmup * self.recipe_.steps
            counter = stopping = EarlyStopping(bnn, self.n_iter_no_change, warm)
            with contextlib.suppress(NoProgressError):
                self.recipe_.fit(
                    bnn, *train[:2], weights=train.weights, validation=held_out, callback=stopping
                )
            stopping.restore_best()
            history = per_counted_row(stopping.rows, train.weights, held_out.weights)
        self._num_rows += float(rows.weights.sum())
        self.history_ = [*self.history_, *history]
        self.n_iter_ += counter.steps
        if counter.has_not_converged:
            steps, rate = self.recipe_.steps, self.learning_rate_init
            larger = "" if rate is None else " or a larger learning_rate_init"
            warnings.warn(
                "training ended before the uncertainty of the weights had converged, so that "
                "standard deviations and intervals depend on where it began; train longer, with "
                f"steps={2 * steps} instead of {steps}{larger}",
                ConvergenceWarning,
                stacklevel=4,
            )

    def _check_same_network(self, recipe: TableRecipe) -> None:
        """Raise ValueError if the settings are of another network than the trained one."""
        for name, part in (("hidden_layer_sizes", "hidden"), ("posterior", "posterior")):
            own, given = getattr(self.recipe_, part), getattr(recipe, part)
            if own != given:
                raise ValueError(
                    f"{name} must be {own!r}, as in training, got {given!r}; set it back, or call "
                    "fit"
                )

    def predictive(self, X: Any, *, keep_samples: bool = False) -> P_co:  # noqa: N803
        """Return the predictive distribution of each row, with its uncertainty split.

        Args:
            X: shape (N, F).
            keep_samples: whether a classifier's result holds the probabilities of every weight
                sample; a regressor's always holds its means.

        Returns:
            Mean, samples, total, aleatoric and epistemic uncertainty, log density, quantiles and
            intervals, all in the units of y, as PyTorch tensors. See ``bayesify.Predictive``. It
            holds ``num_samples`` numbers or more for each row of a regression. Rows outside the
            training data have a wider one, see ``bayesify.tabular.outside.widened``.
        """
        return self._predictive(self._rows(X), keep_samples=keep_samples)

    @property
    def relevance_(self) -> Array:
        """Relative width of the prior that training learned for each column, shape (F,).

        It is the largest factor over the inputs of a column, such as the levels of a category: 1
        before training, small for a column that the network hardly uses, and 0 for one without
        inputs or of a single number or date. It is not an importance: the weights that it
        multiplies may be of any size, and columns that tell the same share it. See
        :class:`TableNet`.

        Raises:
            NotFittedError: it is not trained.
            AttributeError: a file of an earlier version has no such factors.

        Example:
            >>> from bayesify.sklearn import BayesianMLPRegressor
            >>> x = np.random.default_rng(0).normal(size=(100, 3))
            >>> model = BayesianMLPRegressor(steps=500, random_state=0).fit(x, x[:, 1])
            >>> int(model.relevance_.argmax())
            1
        """
        check_is_fitted(self)
        net = self.bnn_.net
        assert isinstance(net, TableNet)
        if net.log_relevance is None:
            raise AttributeError(
                "relevance_ needs a model whose training learned the widths of the prior, got a "
                "file of an earlier version; train it again"
            )
        factors = net.log_relevance.detach().exp().tolist()
        found = []
        for column in self.columns_:
            own, factors = factors[: len(column.features)], factors[len(column.features) :]
            constant = isinstance(column, RangedColumn) and not column.std
            found.append(max(own[1:] if constant else own, default=0.0))
        return np.array(found)

    def outside_scores(self, X: Any) -> Array:  # noqa: N803
        """Return how far each row lies outside the training data, shape (N,).

        It is the largest distance over the columns: for a number or a date that beyond training's
        range, in interquartile ranges; inf for a new level, for a missing value where training had
        none, and for another value than the only one of training. Within it is 0. See
        docs/tables.md for the range.

        Args:
            X: shape (N, F).
        """
        return self._rows(X).distances.numpy()

    def _checked(
        self,
        X: Any,  # noqa: N803
        y: Any = "no_validation",
        *,
        first: bool,
        sample_weight: Any = None,
        **options: Any,
    ) -> Any:
        """Return the values of the columns (N, F), and y where it is given.

        The first call finds out what the columns hold. ``sample_weight`` tells which rows count.
        """
        numeric = first or all(map(takes_any_number, self.columns_))
        frame = frame_of(X, always=not numeric)
        if frame is None:
            found = validate_data(
                self,
                X,
                y,
                dtype=np.float64,
                ensure_all_finite="allow-nan",
                reset=first,
                **options,
            )
            if first:
                used = _used(found[0], sample_weight)
                self.columns_ = number_columns(used, getattr(self, "feature_names_in_", None))
            return found
        validate_data(self, X, reset=first, skip_check_array=True)
        columns = columns_of(_used(frame, sample_weight)) if first else self.columns_
        values = values_of(columns, frame, fitted=not first)
        if first:
            self.columns_ = columns
        if isinstance(y, str) and y == "no_validation":
            return check_array(values, ensure_all_finite=False, estimator=self)
        return check_X_y(values, y, ensure_all_finite=False, estimator=self, **options)

    def _encoded(self, values: Floats) -> Tensor:
        """Return the inputs of the network for the values of the columns, at least one."""
        blocks = [c.encode(values[:, place]) for place, c in enumerate(self.columns_)]
        inputs = np.concatenate(blocks, axis=1, dtype=np.float64)
        # A network needs an input, even if no column varied in training.
        return torch.from_numpy(inputs if inputs.shape[1] else np.zeros((len(values), 1)))

    def _rows(self, X: Any) -> Rows:  # noqa: N803
        check_is_fitted(self)
        values = self._checked(X, first=False)
        distances = [c.outside(values[:, place]) for place, c in enumerate(self.columns_)]
        return Rows(self._encoded(values), torch.from_numpy(np.max(distances, axis=0)))

    @property
    @abstractmethod
    def _marginal(self) -> Tensor:
        """What training's targets alone tell, in the form of the likelihood, for ``widened``."""

    @abstractmethod
    def _predictive(self, rows: Rows, *, keep_samples: bool = False) -> P_co:
        """Return the predictive distribution of rows, in the units of y."""

    def _widened(self, rows: Rows, *, keep_samples: bool) -> Predictive:
        """Return that of the network, wider outside the training data."""
        plain = self.bnn_.predict(
            rows.inputs, num_samples=self.num_samples, keep_samples=keep_samples
        )
        return widened(plain, rows.distances, self._marginal)

    def _batches(self, X: Any) -> Iterator[P_co]:  # noqa: N803
        """Yield the predictive distribution of a batch of rows at a time, to bound the memory."""
        rows = self._rows(X)
        outputs = math.prod(self.bnn_.mean_outputs(rows.inputs[:1]).shape[1:])
        size = max(1, _MOST_NUMBERS // (int(self.num_samples) * outputs))
        for parts in zip(*(part.split(size) for part in rows), strict=True):
            yield self._predictive(Rows(*parts))


class Rows(NamedTuple):
    """Rows to predict.

    Example:
        >>> Rows(torch.zeros(5, 3), torch.zeros(5)).inputs.shape
        torch.Size([5, 3])
    """

    #: Inputs of the network, shape (N, D).
    inputs: Tensor
    #: How far each row lies outside the training data, shape (N,).
    distances: Tensor


def _used(table: Any, sample_weight: Any) -> Any:
    """Return the rows of positive weight."""
    try:
        weights = np.asarray(sample_weight, dtype=float)
    except (TypeError, ValueError):  # checked later
        return table
    if weights.shape != (len(table),):  # one number, or checked later
        return table
    return table[weights > 0.0]


def _is_count(value: Any) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and int(value) >= 1
