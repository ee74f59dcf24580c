"""Bayesian network for classes, as a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import column_or_1d
from torch import Tensor

from bayesify.distributions.families import PosteriorName
from bayesify.distributions.likelihoods import CategoricalLikelihood, OrdinalLikelihood
from bayesify.prediction import CategoricalPredictive
from bayesify.prediction.conformal import ConformalSets, smallest_sets
from bayesify.tabular.conformal import Method
from bayesify.tabular.estimator import BayesianMLP, Rows
from bayesify.tabular.weights import Array, DistinctRows, checked_weights, class_factors

__all__ = ["BayesianMLPClassifier"]


class BayesianMLPClassifier(ClassifierMixin, BayesianMLP[CategoricalPredictive]):  # type: ignore[misc]
    """Bayesian multilayer perceptron for classes of any labels.

    Its probabilities are averages over the posterior, trained by variational inference. Columns
    are standardised inside, and the defaults suit the number of rows.

    Args:
        hidden_layer_sizes: units of each hidden layer (ReLU), in parallel to a linear path.
        ordered: whether the classes have an order, such as grades, which takes fewer rows to
            learn: True for that of the sorted labels, or all labels in their order, such as
            ``["low", "middle", "high"]``; see ``bayesify.OrdinalLikelihood``.
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
        class_weight: the number of times that a row of each class counts, a mapping by label;
            ``"balanced"`` gives all classes the same sum of weights, and leaves the sum over all
            rows. It multiplies ``sample_weight``.
        random_state: seed of everything random: None, an integer or a NumPy RandomState.

    Attributes:
        classes_: the labels, sorted, shape (K,), also if they have another order: that of the
            columns of :meth:`predict_proba`, on which scikit-learn's metrics rely.
        class_order_: the labels in the order of ``predictive``: that of ``ordered``, or sorted.
        bnn_: the ``bayesify.BayesianModule``, on encoded columns.
        class_prior_: the frequency of each class in training, by the rows' weights, shape (K,).
        columns_: what each column holds, and how it becomes inputs of the network.
        recipe_: the settings of the training.
        relevance_: relative width of the prior for each column, shape (F,).
        history_: a row for each epoch; see ``bayesify.fit``. Means are over rows as they count,
            errors over distinct rows.
        n_iter_: number of steps.
        conformal_: the scores of the rows of :meth:`calibrate`, once it was called.
        fold_models_: the models of its folds; empty without folds.
        n_features_in_: number of columns.
        feature_names_in_: names of the columns, if X had names.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> model = BayesianMLPClassifier(steps=200, random_state=0).fit(X, y)
        >>> model.predict(X[:3])
        array([0, 0, 0])
        >>> model.predictive(X[:3]).epistemic.shape
        torch.Size([3])
        >>> size = np.array(["small", "medium", "large"])[np.digitize(X[:, 2], [3.0, 5.0])]
        >>> sizes = ["small", "medium", "large"]
        >>> model = BayesianMLPClassifier(ordered=sizes, steps=200, random_state=0)
        >>> model.fit(X, size).predict(X[[0, 60, 120]])
        array(['small', 'medium', 'large'], dtype='<U6')
    """

    classes_: Array
    class_order_: Array
    class_prior_: Array
    _class_counts: Array

    def __init__(
        self,
        hidden_layer_sizes: Any = (50, 50),
        *,
        ordered: Any = False,
        posterior: PosteriorName = "mean-field",
        steps: int | None = None,
        batch_size: int | None = None,
        learning_rate_init: float | None = None,
        num_samples: int = 200,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 5,
        class_weight: Any = None,
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
        self.ordered = ordered
        self.class_weight = class_weight

    def partial_fit(
        self,
        X: Any,  # noqa: N803
        y: Any,
        classes: Any = None,
        sample_weight: Any = None,
    ) -> Self:
        """Train on further rows, with the present posterior as the prior.

        Give each row once only: a row given twice counts twice. The first call sets the scaling of
        the columns, so its rows should be typical. There is no early stopping. ``steps``,
        ``batch_size`` and ``learning_rate_init`` may change between the calls.

        Args:
            X: as for :meth:`fit`.
            y: labels, shape (N,).
            classes: all labels of this and later calls; needed in the first call only.
            sample_weight: as for :meth:`fit`.

        Raises:
            ValueError: as for :meth:`fit`; ``classes`` is missing, differs from the first call, or
                does not hold a label of y; or ``ordered``, ``hidden_layer_sizes`` or ``posterior``
                differs from the first call.
        """
        if not hasattr(self, "bnn_") and classes is None:
            raise ValueError("classes must be passed on the first call to partial_fit.")
        with self._restored_after_errors():
            return self._fit(X, y, sample_weight, further=True, classes=classes)

    def _fit(
        self,
        X: Any,  # noqa: N803
        y: Any,
        sample_weight: Any,
        *,
        further: bool,
        classes: Any = None,
    ) -> Self:
        self._check_settings()
        first = not (further and hasattr(self, "bnn_"))
        y = _plain_labels(y)
        table, labels = self._checked(X, y, first=first, sample_weight=sample_weight)
        labels = column_or_1d(labels, warn=True)
        check_classification_targets(labels)
        weights = checked_weights(sample_weight, len(table))
        if not further:
            classes = labels[weights > 0.0]
        known = self.classes_ if classes is None else unique_labels(classes)
        order = self._order(known)
        known = np.sort(order)
        if not first and not np.array_equal(known, self.classes_):
            raise ValueError(
                f"classes must be those of the first call, {self.classes_}, got {known}"
            )
        if not first:
            self._check_order(order)
        unknown = np.setdiff1d(labels, known) if further else ()
        if len(unknown):
            raise ValueError(f"y must hold only the classes {known}, got {unknown} too")
        self.classes_, self.class_order_ = known, order
        # A label of weight 0 may be none of the classes; its row is left out.
        index = np.searchsorted(known, labels)
        if self.class_weight == "balanced" and further:
            raise ValueError(
                'class_weight="balanced" needs all rows at once, and partial_fit has a part of '
                "them; give the weights of the classes as a mapping by label"
            )
        used = weights > 0.0
        counts = np.bincount(index[used], weights[used], minlength=len(known))
        factors = class_factors(self.class_weight, known, counts)
        counted = weights.copy()
        counted[used] *= factors[index[used]]
        # In the order of the network's classes.
        places = self._places[np.minimum(index, len(known) - 1)]
        rows = DistinctRows.of(table, places[:, None], counted)
        if self.class_weight is None or sample_weight is not None:
            self._check_counts(sample_weight, weights, rows)
        if first:
            self._class_counts = np.zeros(len(known))
            likelihood = OrdinalLikelihood(len(known)) if self._is_ordered else None
            outputs = len(known) if likelihood is None else 1
            self._begin(rows, outputs, likelihood or CategoricalLikelihood())
        self._class_counts = self._class_counts + factors * counts
        self.class_prior_ = self._class_counts / self._class_counts.sum()
        stopping = self.early_stopping and not further
        targets = rows.targets[:, 0].long()
        self._train(rows, targets, early_stopping=stopping)
        return self

    @property
    def _is_ordered(self) -> bool:
        return not isinstance(self.ordered, bool | np.bool_) or bool(self.ordered)

    @property
    def _places(self) -> npt.NDArray[np.int64]:
        """Place of each of ``classes_`` among the network's classes, shape (K,)."""
        return np.argsort(self.class_order_)

    def _order(self, known: Array) -> Array:
        """Return the labels in the order of the network's classes.

        Args:
            known: those of y or of ``classes``, sorted.

        Raises:
            ValueError: ``ordered`` is no list of distinct labels, or lacks one; or there is only
                one class to order.
        """
        order: Array = known
        if not isinstance(self.ordered, bool | np.bool_):
            if isinstance(self.ordered, str) or np.ndim(self.ordered) != 1:
                raise ValueError(
                    "ordered must be True, False or all labels in their order such as "
                    f'["low", "middle", "high"], got {self.ordered!r}'
                )
            order = np.asarray(self.ordered)
            order = order.astype(object) if known.dtype == object else order
            absent = [label for label in known.tolist() if label not in order.tolist()]
            if absent or len(set(order.tolist())) < len(order):
                raise ValueError(
                    "ordered must have each class of y once, got "
                    f"{order.tolist()}" + (f" without {absent}" if absent else "")
                )
        if self._is_ordered and len(order) < 2:
            raise ValueError(f"ordered needs at least 2 classes, got one class, {order.tolist()}")
        return order

    def _check_order(self, order: Array) -> None:
        """Check that ``ordered`` is as it was in training.

        Args:
            order: the labels in the order that ``ordered`` gives them.

        Raises:
            ValueError: it is not.
        """
        has_order = isinstance(self.bnn_.likelihood, OrdinalLikelihood)
        if self._is_ordered != has_order or not np.array_equal(order, self.class_order_):
            trained = f"for {self.class_order_.tolist()}" if has_order else "without an order"
            raise ValueError(
                f"ordered must be as in training, which was {trained}, got {self.ordered!r}; set "
                "it back, or call fit"
            )

    def _stored_targets(self) -> dict[str, Any]:
        self._check_order(self._order(self.classes_))
        return {
            "classes": self.classes_.tolist(),
            "order": self._places.tolist(),
            "type": self.classes_.dtype.str,
            "counts": self._class_counts.tolist(),
        }

    def _restore_targets(self, stored: Mapping[str, Any]) -> int:
        self.classes_ = np.array(stored["classes"], dtype=np.dtype(stored["type"]))
        # Files of earlier versions have no order.
        places = stored.get("order", range(len(self.classes_)))
        self.class_order_ = self.classes_[np.argsort(places)]
        self._class_counts = np.array(stored["counts"])
        self.class_prior_ = self._class_counts / self._class_counts.sum()
        return 1 if self._is_ordered else len(self.classes_)

    @property
    def _marginal(self) -> Tensor:
        shares = np.empty(len(self.classes_))
        shares[self._places] = self.class_prior_
        return torch.from_numpy(shares)

    def _predictive(self, rows: Rows, *, keep_samples: bool = False) -> CategoricalPredictive:
        p = self._widened(rows, keep_samples=keep_samples)
        assert isinstance(p, CategoricalPredictive)
        return p

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Return the most probable label of each row, shape (N,)."""
        best = self.predict_proba(X).argmax(axis=1)
        labels: Array = self.classes_[best]
        return labels

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """Return the probability of each of ``classes_``, shape (N, K)."""
        probabilities = np.concatenate([batch.mean.numpy() for batch in self._batches(X)])
        probabilities = probabilities[:, self._places]
        # Rounding may leave a mean over 1, which scikit-learn's metrics reject.
        normalised: Array = probabilities / probabilities.sum(axis=1, keepdims=True)
        return normalised

    def predict_set(
        self,
        X: Any,  # noqa: N803
        level: float = 0.95,
        method: Method = "bayes",
    ) -> Array:
        """Return which of ``classes_`` are in a set that holds the label with ``level``.

        Args:
            X: shape (N, F).
            level: probability that the set holds the label.
            method: ``"bayes"``, the most probable labels up to a total of ``level``; or
                ``"conformal"``, up to the total that :meth:`calibrate` found, whose coverage is
                guaranteed.

        Returns:
            Booleans, shape (N, K). Each set holds the label of :meth:`predict`.

        Raises:
            ValueError: ``level`` is not strictly between 0 and 1, there is no such method, or the
                calibration is missing or has too few rows for the level.

        Example:
            >>> from sklearn.datasets import load_iris
            >>> X, y = load_iris(return_X_y=True)
            >>> model = BayesianMLPClassifier(steps=200, random_state=0).fit(X[::3], y[::3])
            >>> model = model.calibrate(X[1::3], y[1::3])
            >>> sets = model.predict_set(X[2::3], level=0.9, method="conformal")
            >>> sets.shape, bool(sets.any(axis=1).all())
            ((50, 3), True)
        """
        conformal = self._is_conformal(method)
        probabilities = self.predict_proba(X)
        if conformal:
            assert isinstance(self.conformal_, ConformalSets)
            parts = self._stacked(self._all_classes, X)
            member: Array = self.conformal_.sets(parts, level).numpy()
        else:
            member = smallest_sets(torch.from_numpy(probabilities), level).numpy()
        member[np.arange(len(member)), probabilities.argmax(axis=1)] = True
        return member

    def _calibration_targets(self, X: Any, y: Any) -> Array:  # noqa: N803
        y = _plain_labels(y)
        _, labels = self._checked(X, y, first=False)
        labels = column_or_1d(labels, warn=True)
        unknown = np.setdiff1d(labels, self.classes_)
        if len(unknown):
            raise ValueError(
                f"y must hold only the classes {self.classes_} of the model, got {unknown} too; "
                "train it on rows of every class"
            )
        return np.asarray(labels)

    def _fold_model(self, targets: Array) -> Any:
        model = super()._fold_model(targets)
        if isinstance(self.class_weight, Mapping):
            # A fold may lack a rare class, whose weight would be an error.
            known = np.unique(targets).tolist()
            weights = {label: w for label, w in self.class_weight.items() if label in known}
            model.set_params(class_weight=weights)
        return model

    def _scored(self, model: Self, X: Any, targets: Array) -> ConformalSets:  # noqa: N803
        index = np.searchsorted(self.classes_, targets)
        probabilities = torch.from_numpy(self._all_classes(model, X))
        return ConformalSets.of(probabilities, torch.from_numpy(index))

    def _all_classes(self, model: Self, X: Any) -> Array:  # noqa: N803
        """Return the probabilities of a fold's model, 0 for classes that the fold lacks."""
        found = model.predict_proba(X)
        whole: Array = np.zeros((len(found), len(self.classes_)))
        whole[:, np.searchsorted(self.classes_, model.classes_)] = found
        return whole


def _plain_labels(y: Any) -> Any:
    """Return the labels, whole numbers and booleans of pandas' own types in those of NumPy.

    scikit-learn would make float64 of them, in which 2**53 + 1 is 2**53.

    Raises:
        ValueError: a label is missing.
    """
    if isinstance(y, pd.DataFrame) and y.shape[1] == 1:
        y = y.iloc[:, 0]
    missing = np.asarray(pd.isna(np.asarray(y, dtype=object)))
    if y is not None and missing.any():
        raise ValueError(
            f"labels must all be there, got {int(missing.sum())} of {missing.size} rows "
            "without one; leave these rows out"
        )
    dtype = getattr(getattr(y, "dtype", None), "numpy_dtype", None)  # of pandas' types alone
    return y.to_numpy(dtype=dtype) if dtype is not None and dtype.kind in "iub" else y
