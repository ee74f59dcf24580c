"""bayesify: any PyTorch network, trained as a Bayesian one by variational inference.

Bayes by Backprop (Blundell, Cornebise, Kavukcuoglu, Wierstra: Weight Uncertainty in Neural
Networks, ICML 2015) as a training method rather than an architecture.
"""

from bayesify.baselines import DeepEnsemble, MCDropout
from bayesify.divergence import kl_divergence
from bayesify.elbo import ELBO, ELBOTerms
from bayesify.groups import ByGroup, EmpiricalGaussian
from bayesify.layout import ParameterLayout
from bayesify.likelihoods import (
    BernoulliLikelihood,
    CategoricalLikelihood,
    GaussianLikelihood,
    Likelihood,
)
from bayesify.module import BayesianModule
from bayesify.perturbations import (
    Flipout,
    LocalReparameterization,
    Perturbation,
    WeightSampling,
)
from bayesify.posteriors import Delta, MeanFieldGaussian, Posterior
from bayesify.predictive import Predictive
from bayesify.pretrained import RelativeStd, last_layer
from bayesify.priors import Gaussian, Laplace, Prior, ScaleMixture, StudentT
from bayesify.pruning import prune, snr
from bayesify.saving import load, save
from bayesify.training import fit, fit_replicas

__version__ = "0.1.0"

__all__ = [
    "ELBO",
    "BayesianModule",
    "BernoulliLikelihood",
    "ByGroup",
    "CategoricalLikelihood",
    "DeepEnsemble",
    "Delta",
    "ELBOTerms",
    "EmpiricalGaussian",
    "Flipout",
    "Gaussian",
    "GaussianLikelihood",
    "Laplace",
    "Likelihood",
    "LocalReparameterization",
    "MCDropout",
    "MeanFieldGaussian",
    "ParameterLayout",
    "Perturbation",
    "Posterior",
    "Predictive",
    "Prior",
    "RelativeStd",
    "ScaleMixture",
    "StudentT",
    "WeightSampling",
    "fit",
    "fit_replicas",
    "kl_divergence",
    "last_layer",
    "load",
    "prune",
    "save",
    "snr",
]
