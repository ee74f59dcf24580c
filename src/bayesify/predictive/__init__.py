"""What a Bayesian network answers: the predictive distribution and its uncertainty, split."""

from bayesify.predictive.base import (
    Abstention,
    Predictive,
    SizedIterable,
    Uncertainty,
    stacked,
)
from bayesify.predictive.bernoulli import BernoulliPredictive
from bayesify.predictive.categorical import CategoricalPredictive
from bayesify.predictive.gaussian import GaussianPredictive

__all__ = [
    "Abstention",
    "BernoulliPredictive",
    "CategoricalPredictive",
    "GaussianPredictive",
    "Predictive",
    "SizedIterable",
    "Uncertainty",
    "stacked",
]
