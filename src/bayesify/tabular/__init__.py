"""Tables: read files, build and train one table model, offer it to scikit-learn.

The names here need no pandas and no scikit-learn. ``training_table`` and ``new_table`` read files;
``classifier`` and ``regressor`` are the estimators, which users import from ``bayesify.sklearn``.
"""

from bayesify.tabular.advice import TableWarning
from bayesify.tabular.model import Noise, TableNet, prior_by_inputs, table_baseline, table_module
from bayesify.tabular.recipe import TableRecipe
from bayesify.tabular.scaling import Scaling
from bayesify.tabular.weights import WeightedLikelihood

__all__ = [
    "Noise",
    "Scaling",
    "TableNet",
    "TableRecipe",
    "TableWarning",
    "WeightedLikelihood",
    "prior_by_inputs",
    "table_baseline",
    "table_module",
]
