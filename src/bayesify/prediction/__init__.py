"""Predictive distributions, with total uncertainty split into aleatoric and epistemic."""

from bayesify.prediction.bernoulli import BernoulliPredictive
from bayesify.prediction.categorical import CategoricalPredictive
from bayesify.prediction.counts import (
    CountPredictive,
    NegativeBinomialPredictive,
    PoissonPredictive,
)
from bayesify.prediction.gaussian import GaussianPredictive
from bayesify.prediction.location_scale import LocationScalePredictive
from bayesify.prediction.numeric import NumericPredictive
from bayesify.prediction.ordinal import OrdinalPredictive
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
    "CountPredictive",
    "GaussianPredictive",
    "LocationScalePredictive",
    "NegativeBinomialPredictive",
    "NumericPredictive",
    "OrdinalPredictive",
    "PoissonPredictive",
    "Predictive",
    "SizedIterable",
    "StudentTPredictive",
    "Uncertainty",
    "stack_samples",
]
