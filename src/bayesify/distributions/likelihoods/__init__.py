"""Likelihoods p(y | x, w): the density of the targets given a network's outputs."""

from bayesify.distributions.likelihoods.bernoulli import BernoulliLikelihood
from bayesify.distributions.likelihoods.categorical import CategoricalLikelihood
from bayesify.distributions.likelihoods.censored import CensoredGaussianLikelihood
from bayesify.distributions.likelihoods.counts import (
    NegativeBinomialLikelihood,
    PoissonLikelihood,
)
from bayesify.distributions.likelihoods.gaussian import GaussianLikelihood
from bayesify.distributions.likelihoods.likelihood import Likelihood
from bayesify.distributions.likelihoods.location_scale import LocationScaleLikelihood
from bayesify.distributions.likelihoods.ordinal import OrdinalLikelihood
from bayesify.distributions.likelihoods.student_t import StudentTLikelihood

__all__ = [
    "BernoulliLikelihood",
    "CategoricalLikelihood",
    "CensoredGaussianLikelihood",
    "GaussianLikelihood",
    "Likelihood",
    "LocationScaleLikelihood",
    "NegativeBinomialLikelihood",
    "OrdinalLikelihood",
    "PoissonLikelihood",
    "StudentTLikelihood",
]
