"""Conformal calibration of the scikit-learn estimators: intervals and sets with a guarantee."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from numbers import Integral
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from bayesify.module.bayesian import BayesianModule
from bayesify.prediction.conformal import Conformal
from bayesify.tabular.weights import Array, checked_weights

__all__ = ["Calibrated", "Method"]

#: Where an interval or a set comes from: the predictive distribution alone, or also calibration.
Method = Literal["bayes", "conformal"]


class Calibrated(ABC):
    """Base class of estimators whose intervals or sets can be calibrated."""

    bnn_: BayesianModule
    conformal_: Conformal
    fold_models_: list[Self]

    def calibrate(
        self,
        X: Any,  # noqa: N803
        y: Any,
        *,
        cv: int | None = None,
        sample_weight: Any = None,
    ) -> Self:
        """Calibrate what ``method="conformal"`` returns; all other predictions stay as they are.

        The guarantee is for new rows that are exchangeable with these. ``fit`` and ``partial_fit``
        drop the calibration.

        Args:
            X: without ``cv`` rows that the model was not trained on (split conformal prediction);
                with ``cv`` the rows that it was trained on.
            y: their targets or labels, as for ``fit``.
            cv: None, or the number of folds of CV+, which trains that many further models and
                needs no rows of its own. All of them answer each ``method="conformal"``.
            sample_weight: with ``cv`` the weights of the rows in ``fit``, with which the further
                models are trained. They are of the training alone: each row has one score, and the
                guarantee is for new rows drawn as these rows are, without weights. It holds if a
                row's weight is exchangeable with the row, such as a function of it.

        Raises:
            ValueError: the input does not have the form of that of ``fit``, a label is none of the
                model's classes, cv is not a number of folds, or there are weights without ``cv``.
        """
        check_is_fitted(self)
        if cv is None and sample_weight is not None:
            raise ValueError(
                "sample_weight must come with cv, whose models are trained with it, got cv=None; "
                "leave it out: each calibration row counts once"
            )
        targets = self._calibration_targets(X, y)
        models: list[Self] = []
        if cv is None:
            conformal = self._scored(self, X, targets)
        else:
            models, conformal = self._cross_scored(X, targets, cv, sample_weight)
        self.fold_models_, self.conformal_ = models, conformal
        return self

    def _cross_scored(
        self,
        X: Any,  # noqa: N803
        targets: Array,
        cv: Any,
        sample_weight: Any,
    ) -> tuple[list[Self], Conformal]:
        """Train a model without each fold, and score the fold with it."""
        count = len(targets)
        whole = isinstance(cv, Integral) and not isinstance(cv, bool)
        if not whole or not 2 <= int(cv) <= count:
            raise ValueError(
                f"cv must be None or a number of folds from 2 to the number of rows, {count}, got "
                f"{cv!r}"
            )
        weights = None if sample_weight is None else checked_weights(sample_weight, count)
        # The theorem is for folds of one size: what is left over is trained on by every model.
        size = count // int(cv)
        order = np.random.default_rng(self.bnn_.seed).permutation(count)
        models, parts = [], []
        for start in range(0, size * int(cv), size):
            held, rest = order[start : start + size], np.delete(order, slice(start, start + size))
            own = None if weights is None else weights[rest]
            trained_on = targets[rest] if own is None else targets[rest][own > 0.0]
            model: Self = self._fold_model(trained_on).fit(
                _safe_indexing(X, rest), targets[rest], own
            )
            models.append(model)
            parts.append(self._scored(model, _safe_indexing(X, held), targets[held]))
        return models, type(parts[0]).joined(parts)

    def _fold_model(self, targets: Array) -> Any:  # noqa: ARG002
        """Return an untrained model with the settings of this one, for a fold's targets."""
        return clone(self)

    def _drop_calibration(self) -> None:
        """Forget the calibration of the posterior so far."""
        for name in ("conformal_", "fold_models_"):
            self.__dict__.pop(name, None)

    def _is_conformal(self, method: Method) -> bool:
        """Return whether the method is conformal, and calibrated.

        Raises:
            ValueError: there is no such method.
            NotFittedError: the model is not calibrated.
        """
        if method not in get_args(Method):
            raise ValueError(f'method must be "bayes" or "conformal", got {method!r}')
        check_is_fitted(self)
        if method == "conformal" and not hasattr(self, "conformal_"):
            raise NotFittedError(
                'method="conformal" needs a calibration since the last fit: call calibrate(X, y) '
                "with rows that the model was not trained on, or calibrate(X, y, cv=10) with the "
                "training rows"
            )
        return method == "conformal"

    def _stacked(self, predict: Callable[[Self, Any], Array], X: Any) -> Tensor:  # noqa: N803
        """Return the prediction, or those of all models of the folds along a first axis."""
        if not self.fold_models_:
            return torch.from_numpy(predict(self, X))
        return torch.from_numpy(np.stack([predict(model, X) for model in self.fold_models_]))

    @abstractmethod
    def _calibration_targets(self, X: Any, y: Any) -> Array:  # noqa: N803
        """Check rows and targets as ``fit`` does, and return the targets."""

    @abstractmethod
    def _scored(self, model: Self, X: Any, targets: Array) -> Conformal:  # noqa: N803
        """Return the scores of rows that the model, this one or a fold's, was not trained on."""
