"""bayesify: any PyTorch network, trained as a Bayesian one by variational inference.

Bayes by Backprop (Blundell, Cornebise, Kavukcuoglu, Wierstra: Weight Uncertainty in Neural
Networks, ICML 2015) as a training method rather than an architecture.
"""

from bayesify.divergence import kl_divergence
from bayesify.elbo import ELBO, ELBOTerms
from bayesify.layout import ParameterLayout
from bayesify.likelihoods import CategoricalLikelihood, GaussianLikelihood, Likelihood
from bayesify.module import BayesianModule
from bayesify.perturbations import Perturbation, WeightSampling
from bayesify.posteriors import Delta, MeanFieldGaussian, Posterior
from bayesify.predictive import Predictive
from bayesify.priors import Gaussian, Laplace, Prior, ScaleMixture
from bayesify.pruning import prune, snr
from bayesify.saving import load, save
from bayesify.training import fit

__version__ = "0.1.0"

__all__ = [
    "ELBO",
    "BayesianModule",
    "CategoricalLikelihood",
    "Delta",
    "ELBOTerms",
    "Gaussian",
    "GaussianLikelihood",
    "Laplace",
    "Likelihood",
    "MeanFieldGaussian",
    "ParameterLayout",
    "Perturbation",
    "Posterior",
    "Predictive",
    "Prior",
    "ScaleMixture",
    "WeightSampling",
    "fit",
    "kl_divergence",
    "load",
    "prune",
    "save",
    "snr",
]
