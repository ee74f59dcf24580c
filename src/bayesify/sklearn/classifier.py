"""A Bayesian network for classes, as a scikit-learn estimator."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import column_or_1d, validate_data

from bayesify.sklearn.base import BayesianMLP
from bayesify.sklearn.rows import Array, Rows, checked_weights

__all__ = ["BayesianMLPClassifier"]


class BayesianMLPClassifier(ClassifierMixin, BayesianMLP):  # type: ignore[misc]
    """A Bayesian multilayer perceptron for classes of any labels.

    Its probabilities are averages over the posterior, trained by variational inference. Columns
    are standardised inside, and the settings suit the number of rows: there is nothing to tune
    for a start.

    Args:
        hidden_layer_sizes: units of each hidden layer (ReLU); a linear path stands beside them.
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
        classes_: the labels, sorted, shape (K,).
        bnn_: the ``bayesify.BayesianModule``, on standardised columns.
        feature_scaling_: shift and scale of the columns.
        recipe_: the settings of the training.
        history_: a row for each epoch; see ``bayesify.fit``.
        n_iter_: steps taken.
        n_features_in_: number of columns.
        feature_names_in_: their names, where X had names.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> model = BayesianMLPClassifier(random_state=0).fit(X, y)
        >>> model.predict(X[:3])
        array([0, 0, 0])
        >>> model.predictive(X[:3]).epistemic.shape
        torch.Size([3])
    """

    classes_: Array

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
        """Train anew.

        Args:
            X: shape (N, F), numbers without NaN.
            y: labels, shape (N,): integers, text, booleans.
            sample_weight: how many times each row counts, shape (N,); 0 leaves it out, and 2 is
                the row twice.

        Raises:
            ValueError: the input is none of this, or a setting is out of its range.
        """
        table, labels = self._checked(X, y, reset=True)
        weights = checked_weights(sample_weight, len(table))
        self.classes_ = unique_labels(labels[weights > 0.0])
        rows = self._rows(table, labels, weights)
        self._begin(rows, len(self.classes_), None)
        self._train(rows, rows.targets[:, 0].long(), streaming=False)
        return self

    def partial_fit(
        self,
        X: Any,  # noqa: N803
        y: Any,
        classes: Any = None,
        sample_weight: Any = None,
    ) -> Self:
        """Learn from further rows: the posterior so far is their prior.

        Give each row once only, in any number of pieces: a row given twice counts twice. The
        first piece sets the scaling of the columns, so it should be typical. There is no early
        stopping.

        Args:
            X: shape (N, F).
            y: labels, shape (N,).
            classes: all labels there will ever be; needed in the first call only.
            sample_weight: as for :meth:`fit`.

        Raises:
            ValueError: as for :meth:`fit`; or ``classes`` is missing, differs from what it was, or
                does not hold a label of y.
        """
        first = not hasattr(self, "bnn_")
        if first and classes is None:
            raise ValueError("classes must be passed on the first call to partial_fit.")
        table, labels = self._checked(X, y, reset=first)
        weights = checked_weights(sample_weight, len(table))
        known = self.classes_ if classes is None else unique_labels(classes)
        if not first and not np.array_equal(known, self.classes_):
            raise ValueError(
                f"classes must be those of the first call, {self.classes_}, got {known}"
            )
        unknown = np.setdiff1d(labels, known)
        if len(unknown):
            raise ValueError(f"y must hold only the classes {known}, got {unknown} too")
        self.classes_ = known
        rows = self._rows(table, labels, weights)
        if first:
            self._begin(rows, len(known), None)
        self._train(rows, rows.targets[:, 0].long(), streaming=not first)
        return self

    def predict(self, X: Any) -> Array:  # noqa: N803
        """The most probable label of each row, shape (N,)."""
        best = self.predict_proba(X).argmax(axis=1)
        labels: Array = self.classes_[best]
        return labels

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """The probability of each of ``classes_``, shape (N, K)."""
        probabilities = np.concatenate([piece.mean.numpy() for piece in self._pieces(X)])
        # Rounding over the samples: none is over 1, which scikit-learn's metrics insist on.
        normalised: Array = probabilities / probabilities.sum(axis=1, keepdims=True)
        return normalised

    def _checked(self, X: Any, y: Any, *, reset: bool) -> tuple[Array, Array]:  # noqa: N803
        table, labels = validate_data(self, X, y, dtype=np.float64, reset=reset)
        labels = column_or_1d(labels, warn=True)
        check_classification_targets(labels)
        return table, labels

    def _rows(self, table: Array, labels: Array, weights: Array) -> Rows:
        # A label of weight 0 may be none of the classes; its row is left out.
        index = np.searchsorted(self.classes_, labels)
        return Rows.of(table, index[:, None], weights)
