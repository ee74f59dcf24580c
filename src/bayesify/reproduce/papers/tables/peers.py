"""Models that people use for tables, each with its library's defaults on one thread.

All have the interface of the estimators of this library: ``fit(X, y)``, ``predictive(X)`` for a
``Predictive`` and, for numbers, ``predict_interval(X, level)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np
import torch

from bayesify.prediction import CategoricalPredictive, GaussianPredictive
from bayesify.reproduce.papers.tables.sets import Array

__all__ = [
    "LEVEL",
    "BoostedQuantiles",
    "CatBoostNumbers",
    "ConformalNumbers",
    "ConstantNoise",
    "ForestNumbers",
    "GaussianNumbers",
    "NaturalGradientClasses",
    "NaturalGradientNumbers",
    "Probabilities",
    "ProcessClasses",
    "ProcessNumbers",
    "standardised",
]

#: The level of all intervals of the comparison.
LEVEL = 0.9
#: Half the width of the central 90 % interval of the standard Gaussian.
_HALF_WIDTH = 1.6448536269514722
#: For time: most training rows of a Gaussian process for numbers, most columns that have length
#: scales of their own, and most training rows of one for classes.
_PROCESS_ROWS, _PROCESS_SCALES, _CLASS_ROWS = 1000, 20, 500


class GaussianNumbers(ABC):
    """A model that predicts a Gaussian for each row."""

    @abstractmethod
    def fit(self, inputs: Array, targets: Array) -> Self:
        """Train on rows."""

    @abstractmethod
    def mean_and_std(self, inputs: Array) -> tuple[Array, Array]:
        """Return the mean of each row, shape (N,), and the standard deviation, noise included."""

    def predictive(self, inputs: Array) -> GaussianPredictive:
        """Return the predictive distribution of each row."""
        mean, std = self.mean_and_std(inputs)
        stds = np.broadcast_to(std, mean.shape)
        return GaussianPredictive(torch.tensor(mean)[None], torch.tensor(stds)[None])

    def predict_interval(self, inputs: Array, level: float) -> tuple[Array, Array]:
        """Return lower and upper ends of the central interval."""
        low, high = self.predictive(inputs).interval(level)
        return low.numpy(), high.numpy()


class ConstantNoise(GaussianNumbers):
    """A regressor with one standard deviation: that of its residuals on a fifth of the rows.

    The regressor is first trained on the other rows, then on all.

    Args:
        model: a regressor of scikit-learn's interface.
        seed: of the fifth that is held out.
    """

    def __init__(self, model: Any, seed: int) -> None:
        self.model, self.seed = model, seed

    def fit(self, inputs: Array, targets: Array) -> Self:
        """Train on rows."""
        from sklearn.model_selection import train_test_split

        given, held_out = train_test_split(
            np.arange(len(targets)), test_size=0.2, random_state=self.seed
        )
        first = self.model.fit(inputs[given], targets[given])
        residuals = targets[held_out] - first.predict(inputs[held_out])
        self.std = float(np.sqrt(np.mean(residuals**2)))
        self.model.fit(inputs, targets)
        return self

    def mean_and_std(self, inputs: Array) -> tuple[Array, Array]:
        """Return the mean of each row, and the standard deviation of all."""
        return self.model.predict(inputs), np.array(self.std)


class ForestNumbers(GaussianNumbers):
    """A random forest with one standard deviation: that of its out-of-bag residuals."""

    def __init__(self, seed: int) -> None:
        from sklearn.ensemble import RandomForestRegressor

        self.model = RandomForestRegressor(oob_score=True, random_state=seed)

    def fit(self, inputs: Array, targets: Array) -> Self:
        """Train on rows."""
        self.model.fit(inputs, targets)
        self.std = float(np.sqrt(np.mean((targets - self.model.oob_prediction_) ** 2)))
        return self

    def mean_and_std(self, inputs: Array) -> tuple[Array, Array]:
        """Return the mean of each row, and the standard deviation of all."""
        return self.model.predict(inputs), np.array(self.std)


class ProcessNumbers(GaussianNumbers):
    """A Gaussian process with noise, on standardised columns and targets.

    It is trained on at most 1,000 rows. Up to 20 columns each have a length scale; more share one.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def fit(self, inputs: Array, targets: Array) -> Self:
        """Train on rows."""
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

        columns = inputs.shape[1]
        scales = np.ones(columns) if columns <= _PROCESS_SCALES else 1.0
        kernel = ConstantKernel() * RBF(scales) + WhiteKernel()
        process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=self.seed)
        self.model = standardised(process)
        self.model.fit(inputs[:_PROCESS_ROWS], targets[:_PROCESS_ROWS])
        return self

    def mean_and_std(self, inputs: Array) -> tuple[Array, Array]:
        """Return the mean and the standard deviation of each row."""
        mean, std = self.model.predict(inputs, return_std=True)
        return mean, std


class NaturalGradientNumbers(GaussianNumbers):
    """NGBoost with its Gaussian."""

    def __init__(self, seed: int) -> None:
        from ngboost import NGBRegressor

        self.model = NGBRegressor(verbose=False, random_state=seed)

    def fit(self, inputs: Array, targets: Array) -> Self:
        """Train on rows."""
        self.model.fit(inputs, targets)
        return self

    def mean_and_std(self, inputs: Array) -> tuple[Array, Array]:
        """Return the mean and the standard deviation of each row."""
        found = self.model.pred_dist(inputs)
        return found.loc, found.scale


class CatBoostNumbers(GaussianNumbers):
    """CatBoost with the loss ``RMSEWithUncertainty``."""

    def __init__(self, seed: int) -> None:
        from catboost import CatBoostRegressor

        self.model = CatBoostRegressor(
            loss_function="RMSEWithUncertainty",
            random_seed=seed,
            thread_count=1,
            verbose=False,
            allow_writing_files=False,
        )

    def fit(self, inputs: Array, targets: Array) -> Self:
        """Train on rows."""
        self.model.fit(inputs, targets)
        return self

    def mean_and_std(self, inputs: Array) -> tuple[Array, Array]:
        """Return the mean and the standard deviation of each row."""
        found = self.model.predict(inputs, prediction_type="RMSEWithUncertainty", thread_count=1)
        return found[:, 0], np.sqrt(found[:, 1])


class BoostedQuantiles(GaussianNumbers):
    """LightGBM three times: the mean, and the 5 % and 95 % quantiles as the interval.

    The standard deviation is that of the Gaussian with an interval of this width, and at least
    1 % of that of the targets, because quantiles that are estimated apart can cross.
    """

    def __init__(self, seed: int) -> None:
        from lightgbm import LGBMRegressor

        common = {"n_jobs": 1, "verbose": -1, "random_state": seed}
        self.mean = LGBMRegressor(**common)
        ends = (0.5 - LEVEL / 2, 0.5 + LEVEL / 2)
        self.ends = [LGBMRegressor(objective="quantile", alpha=q, **common) for q in ends]

    def fit(self, inputs: Array, targets: Array) -> Self:
        """Train on rows."""
        for model in (self.mean, *self.ends):
            model.fit(inputs, targets)
        self.least = 0.01 * float(targets.std())
        return self

    def mean_and_std(self, inputs: Array) -> tuple[Array, Array]:
        """Return the mean and the standard deviation of each row."""
        low, high = self.predict_interval(inputs, LEVEL)
        return self._predict(self.mean, inputs), np.maximum(
            (high - low) / (2.0 * _HALF_WIDTH), self.least
        )

    def predict_interval(self, inputs: Array, level: float) -> tuple[Array, Array]:
        """Return the two quantiles of each row, the lower one first."""
        if level != LEVEL:
            raise ValueError(f"level must be {LEVEL}, which the quantiles are of, got {level}")
        low, high = (self._predict(model, inputs) for model in self.ends)
        return np.minimum(low, high), np.maximum(low, high)

    def _predict(self, model: Any, inputs: Array) -> Array:
        found: Array = np.asarray(model.predict(inputs))
        return found


class ConformalNumbers:
    """Cross-conformal intervals (CV+, 5 folds, by MAPIE) around scikit-learn's boosted trees.

    They have no density, hence neither nll nor CRPS.
    """

    def __init__(self, seed: int) -> None:
        from mapie.regression import CrossConformalRegressor
        from sklearn.ensemble import HistGradientBoostingRegressor

        trees = HistGradientBoostingRegressor(random_state=seed)
        self.model = CrossConformalRegressor(trees, confidence_level=LEVEL, random_state=seed)

    def fit(self, inputs: Array, targets: Array) -> Self:
        """Train on rows."""
        self.model.fit_conformalize(inputs, targets)
        return self

    def predict(self, inputs: Array) -> Array:
        """Return the mean of each row."""
        return self._predict(inputs)[0]

    def predict_interval(self, inputs: Array, level: float) -> tuple[Array, Array]:
        """Return lower and upper ends of the interval."""
        if level != LEVEL:
            raise ValueError(f"level must be {LEVEL}, which the intervals are of, got {level}")
        ends = self._predict(inputs)[1].reshape(len(inputs), 2)
        return ends[:, 0], ends[:, 1]

    def _predict(self, inputs: Array) -> tuple[Array, Array]:
        mean, ends = self.model.predict_interval(inputs)
        return mean, ends


class Probabilities:
    """A classifier of scikit-learn's interface for classes 0..K-1.

    Args:
        model: the classifier.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def fit(self, inputs: Array, targets: Array) -> Self:
        """Train on rows."""
        self.model.fit(inputs, targets)
        return self

    def predictive(self, inputs: Array) -> CategoricalPredictive:
        """Return the predictive distribution of each row."""
        probabilities = torch.tensor(self.model.predict_proba(inputs), dtype=torch.float64)
        return CategoricalPredictive.from_logits([probabilities.log()])


class NaturalGradientClasses(Probabilities):
    """NGBoost with a categorical distribution."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def fit(self, inputs: Array, targets: Array) -> Self:
        """Train on rows."""
        from ngboost import NGBClassifier
        from ngboost.distns import k_categorical

        distribution = k_categorical(int(targets.max()) + 1)
        self.model = NGBClassifier(Dist=distribution, verbose=False, random_state=self.seed)
        return super().fit(inputs, targets)


class ProcessClasses(Probabilities):
    """A Gaussian process for classes, on standardised columns; trained on at most 500 rows."""

    def __init__(self, seed: int) -> None:
        from sklearn.gaussian_process import GaussianProcessClassifier
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel

        process = GaussianProcessClassifier(ConstantKernel() * RBF(), random_state=seed)
        super().__init__(standardised(process))

    def fit(self, inputs: Array, targets: Array) -> Self:
        """Train on rows."""
        return super().fit(inputs[:_CLASS_ROWS], targets[:_CLASS_ROWS])


def standardised(model: Any) -> Any:
    """Return a pipeline that standardises the columns first."""
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), model)
