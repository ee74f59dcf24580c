"""bayesify: train any PyTorch network as a Bayesian neural network by variational inference.

It implements Bayes by Backprop (Blundell, Cornebise, Kavukcuoglu, Wierstra: Weight Uncertainty in
Neural Networks, ICML 2015) as a training method, not as an architecture: no layer is replaced, and
the network is not edited.

    import bayesify as bf

    bnn = bf.BayesianModule(net, likelihood=bf.CategoricalLikelihood())  # the model
    elbo = bf.ELBO(bnn, num_data=60_000)                                 # its objective
    bf.fit(elbo, train_loader, epochs=10)                                # training
    p = bnn.predict(x)                                                   # p.mean, p.epistemic, ...
    bf.save(bf.prune(bnn, fraction=0.95), "model.safetensors")           # 5 % of the weights

Where to look next:

* model: ``BayesianModule``; pretrained networks: ``last_layer``, ``RelativeStd``
* likelihoods: ``CategoricalLikelihood``, ``BernoulliLikelihood``, ``GaussianLikelihood``
* priors: ``Gaussian``, ``ScaleMixture`` (the paper's), ``Laplace``, ``StudentT``; by parameter:
  ``ByGroup``; learned: ``EmpiricalGaussian``
* posteriors: ``MeanFieldGaussian``, ``Delta`` (a point estimate)
* gradient estimators: ``WeightSampling``, ``LocalReparameterization``, ``Flipout``
* training: ``ELBO``, ``fit``, ``fit_replicas`` (several networks at once)
* use: ``Predictive``, ``snr``, ``prune``, ``save``, ``load``
* baselines: ``MCDropout``, ``DeepEnsemble``
* subpackages, imported on first use: ``bandits``, ``datasets``, ``metrics``, ``plots``,
  ``sklearn``
"""

import importlib
from types import ModuleType

from bayesify.baselines import DeepEnsemble, MCDropout
from bayesify.distributions.by_group import ByGroup, EmpiricalGaussian
from bayesify.distributions.kl import kl_divergence
from bayesify.distributions.layout import ParameterLayout
from bayesify.distributions.likelihoods import (
    BernoulliLikelihood,
    CategoricalLikelihood,
    GaussianLikelihood,
    Likelihood,
)
from bayesify.distributions.posteriors import Delta, MeanFieldGaussian, Posterior
from bayesify.distributions.priors import Gaussian, Laplace, Prior, ScaleMixture, StudentT
from bayesify.estimators import (
    Estimator,
    Flipout,
    LocalReparameterization,
    WeightSampling,
)
from bayesify.io import load, save
from bayesify.module.bayesian import BayesianModule
from bayesify.module.pretrained import RelativeStd, last_layer
from bayesify.module.random_network import SharedNoiseWarning
from bayesify.prediction import Predictive
from bayesify.pruning import prune, snr
from bayesify.training import fit, fit_replicas
from bayesify.training.elbo import ELBO, ELBOTerms

__version__ = "0.1.0"

#: Subpackages that are imported on first use, so that ``import bayesify`` stays fast.
_LAZY = ("bandits", "datasets", "metrics", "plots", "sklearn")

__all__ = [  # noqa: RUF022 (in the order in which they are used)
    # model
    "BayesianModule",
    "ParameterLayout",
    "SharedNoiseWarning",
    "last_layer",
    "RelativeStd",
    # likelihoods
    "Likelihood",
    "CategoricalLikelihood",
    "BernoulliLikelihood",
    "GaussianLikelihood",
    # priors
    "Prior",
    "Gaussian",
    "ScaleMixture",
    "Laplace",
    "StudentT",
    "ByGroup",
    "EmpiricalGaussian",
    # posteriors
    "Posterior",
    "MeanFieldGaussian",
    "Delta",
    "kl_divergence",
    # gradient estimators
    "Estimator",
    "WeightSampling",
    "LocalReparameterization",
    "Flipout",
    # training
    "ELBO",
    "ELBOTerms",
    "fit",
    "fit_replicas",
    # use of a trained network
    "Predictive",
    "snr",
    "prune",
    "save",
    "load",
    # baselines
    "MCDropout",
    "DeepEnsemble",
]


def __getattr__(name: str) -> ModuleType:
    """Import a public subpackage on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    """List the public names and subpackages only, not the modules that they are imported from."""
    return sorted([*__all__, *_LAZY, "__version__"])
