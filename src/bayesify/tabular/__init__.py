"""How a small network is trained on a table of numbers: settings by size, scaling, weights."""

from bayesify.tabular.network import Noise, TableNet, prior_by_inputs
from bayesify.tabular.recipe import Silent, TableRecipe
from bayesify.tabular.scaling import Scaling
from bayesify.tabular.streaming import StreamingELBO
from bayesify.tabular.weights import WeightedLikelihood

__all__ = [
    "Noise",
    "Scaling",
    "Silent",
    "StreamingELBO",
    "TableNet",
    "TableRecipe",
    "WeightedLikelihood",
    "prior_by_inputs",
]
