"""p(y | x, w): what the network's outputs say about the targets."""

from bayesify.likelihoods.base import Likelihood
from bayesify.likelihoods.classes import BernoulliLikelihood, CategoricalLikelihood
from bayesify.likelihoods.gaussian import GaussianLikelihood

__all__ = ["BernoulliLikelihood", "CategoricalLikelihood", "GaussianLikelihood", "Likelihood"]
