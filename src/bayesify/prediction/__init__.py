"""Predictive distributions, with total uncertainty split into aleatoric and epistemic."""

from bayesify.prediction.bernoulli import BernoulliPredictive
from bayesify.prediction.categorical import CategoricalPredictive
from bayesify.prediction.gaussian import GaussianPredictive
from bayesify.prediction.location_scale import LocationScalePredictive
from bayesify.prediction.predictive import (
    Abstention,
    Predictive,
    SizedIterable,
    Uncertainty,
    stack_samples,
)
from bayesify.prediction.student_t import StudentTPredictive

__all__ = [
    "Abstention",
    "BernoulliPredictive",
    "CategoricalPredictive",
    "GaussianPredictive",
    "LocationScalePredictive",
    "Predictive",
    "SizedIterable",
    "StudentTPredictive",
    "Uncertainty",
    "stack_samples",
]
