"""Estimators for scikit-learn: ``BayesianMLPClassifier`` and ``BayesianMLPRegressor``."""

from bayesify.tabular.classifier import BayesianMLPClassifier
from bayesify.tabular.regressor import BayesianMLPRegressor

__all__ = ["BayesianMLPClassifier", "BayesianMLPRegressor"]
