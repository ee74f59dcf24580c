"""The models of the comparison: their names, packages and how they are built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from bayesify.datasets import DataError
from bayesify.reproduce.papers.tables import networks, peers
from bayesify.reproduce.papers.tables.peers import ConstantNoise, Probabilities, standardised
from bayesify.reproduce.papers.tables.sets import Kind

__all__ = ["MODELS", "OURS", "Make", "TableModel"]

#: Builds a model that is not trained, from the seed of everything random. It has ``fit(X, y)`` and
#: ``predictive(X)``; for numbers ``predict_interval(X, level)``, and where it has no
#: ``predictive``, ``predict(X)``.
Make = Callable[[int], Any]
#: The name of this library's estimators.
OURS = "bayesify"


@dataclass(frozen=True)
class TableModel:
    """A model for numbers, for classes or both.

    Args:
        title: as in the tables.
        package: the distribution that it needs.
        seconds: estimated CPU seconds of a fit with its predictions, on average over the sets.
        numbers: builds the model of numbers; None if there is none.
        classes: builds the model of classes; None if there is none.
    """

    title: str
    package: str
    seconds: float
    numbers: Make | None
    classes: Make | None

    def make(self, kind: Kind) -> Make | None:
        """Return what builds the model for a kind of targets."""
        return self.numbers if kind == "numbers" else self.classes

    def version(self) -> str:
        """Return name and version of the package.

        Raises:
            DataError: it is not installed.

        Example:
            >>> MODELS["linear"].version().split()[0]
            'scikit-learn'
        """
        try:
            return f"{self.package} {metadata.version(self.package)}"
        except metadata.PackageNotFoundError:
            raise DataError(
                f"the experiment tables needs {self.package}; pip install 'bayesify[cli,bench]'"
            ) from None


def _bayesify_numbers(seed: int) -> Any:
    from bayesify.sklearn import BayesianMLPRegressor

    return BayesianMLPRegressor(random_state=seed)


def _bayesify_classes(seed: int) -> Any:
    from bayesify.sklearn import BayesianMLPClassifier

    return BayesianMLPClassifier(random_state=seed)


def _linear_numbers(seed: int) -> Any:
    from sklearn.linear_model import Ridge

    return ConstantNoise(standardised(Ridge()), seed)


def _linear_classes(seed: int) -> Any:
    from sklearn.linear_model import LogisticRegression

    return Probabilities(standardised(LogisticRegression(random_state=seed)))


def _forest_classes(seed: int) -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return Probabilities(RandomForestClassifier(random_state=seed))


def _boosted_numbers(seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    return ConstantNoise(HistGradientBoostingRegressor(random_state=seed), seed)


def _boosted_classes(seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier

    return Probabilities(HistGradientBoostingClassifier(random_state=seed))


def _lightgbm_classes(seed: int) -> Any:
    from lightgbm import LGBMClassifier

    return Probabilities(LGBMClassifier(n_jobs=1, verbose=-1, random_state=seed))


def _catboost_classes(seed: int) -> Any:
    from catboost import CatBoostClassifier

    return Probabilities(
        CatBoostClassifier(
            random_seed=seed, thread_count=1, verbose=False, allow_writing_files=False
        )
    )


#: All models by name; ours is the first.
MODELS: dict[str, TableModel] = {
    OURS: TableModel("bayesify", "bayesify", 3.0, _bayesify_numbers, _bayesify_classes),
    "linear": TableModel(
        "ridge, logistic regression", "scikit-learn", 0.1, _linear_numbers, _linear_classes
    ),
    "random-forest": TableModel(
        "random forest", "scikit-learn", 1.0, peers.ForestNumbers, _forest_classes
    ),
    "boosted-trees": TableModel(
        "boosted trees (scikit-learn)", "scikit-learn", 1.0, _boosted_numbers, _boosted_classes
    ),
    "lightgbm": TableModel("LightGBM", "lightgbm", 1.0, peers.BoostedQuantiles, _lightgbm_classes),
    "catboost": TableModel("CatBoost", "catboost", 6.0, peers.CatBoostNumbers, _catboost_classes),
    "ngboost": TableModel(
        "NGBoost", "ngboost", 8.0, peers.NaturalGradientNumbers, peers.NaturalGradientClasses
    ),
    "gaussian-process": TableModel(
        "Gaussian process", "scikit-learn", 10.0, peers.ProcessNumbers, peers.ProcessClasses
    ),
    "ensemble": TableModel(
        "ensemble of 5 networks", "torch", 2.0, networks.EnsembleNumbers, networks.EnsembleClasses
    ),
    "laplace": TableModel(
        "last-layer Laplace", "laplace-torch", 1.0, networks.LaplaceNumbers, networks.LaplaceClasses
    ),
    "conformal": TableModel(
        "boosted trees, conformal (MAPIE)", "MAPIE", 2.0, peers.ConformalNumbers, None
    ),
}
