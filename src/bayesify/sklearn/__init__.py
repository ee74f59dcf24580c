"""Estimators for scikit-learn: ``BayesianMLPClassifier`` and ``BayesianMLPRegressor``."""

from bayesify.sklearn.classifier import BayesianMLPClassifier
from bayesify.sklearn.regressor import BayesianMLPRegressor

__all__ = ["BayesianMLPClassifier", "BayesianMLPRegressor"]
