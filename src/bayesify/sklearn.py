"""Estimators for scikit-learn: ``BayesianMLPClassifier`` and ``BayesianMLPRegressor``."""

try:
    from bayesify.tabular.classifier import BayesianMLPClassifier
    from bayesify.tabular.regressor import BayesianMLPRegressor
except ModuleNotFoundError as error:
    if (error.name or "").startswith("bayesify"):
        raise
    raise ModuleNotFoundError(
        f"bayesify.sklearn needs scikit-learn, pandas and pyarrow, but {error.name} is missing; "
        "pip install 'bayesify[sklearn]'",
        name=error.name,
    ) from error

__all__ = ["BayesianMLPClassifier", "BayesianMLPRegressor"]
