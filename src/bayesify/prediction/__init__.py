"""Predictive distributions, with total uncertainty split into aleatoric and epistemic."""

from bayesify.prediction.bernoulli import BernoulliPredictive
from bayesify.prediction.categorical import CategoricalPredictive
from bayesify.prediction.gaussian import GaussianPredictive
from bayesify.prediction.predictive import (
    Abstention,
    Predictive,
    SizedIterable,
    Uncertainty,
    stack_samples,
)

__all__ = [
    "Abstention",
    "BernoulliPredictive",
    "CategoricalPredictive",
    "GaussianPredictive",
    "Predictive",
    "SizedIterable",
    "Uncertainty",
    "stack_samples",
]
