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

* model: ``BayesianModule``; pretrained networks: ``last_layer``, ``RelativeStd``; several tasks:
  ``MultiHead``; few random factors of deterministic weights: ``rank_one``, ``RankOne``
* likelihoods of classes: ``CategoricalLikelihood``, ``BernoulliLikelihood``, ``OrdinalLikelihood``;
  of numbers: ``GaussianLikelihood``, ``StudentTLikelihood``, ``CensoredGaussianLikelihood``; of
  counts: ``PoissonLikelihood``, ``NegativeBinomialLikelihood``
* priors: ``Gaussian``, ``ScaleMixture`` (the paper's), ``Laplace``, ``StudentT``; by parameter:
  ``ByGroup``; learned: ``EmpiricalGaussian``; for small networks: ``GroupedGaussian``,
  ``SpikeAndSlab``, ``LogUniform`` (improper)
* posteriors: ``MeanFieldGaussian``, ``Delta`` (a point estimate); beyond the mean field:
  ``LowRankGaussian``, ``MatrixGaussian``, ``FullGaussian``, by parameter ``PosteriorByGroup``
* gradient estimators: ``WeightSampling``, ``LocalReparameterization``, ``Flipout``; with a last
  layer that is integrated out: ``ClosedFormLastLayer``
* training: ``ELBO``, ``fit``, ``fit_replicas`` (several networks at once), ``Callback``; pruned as
  it is trained: ``PruningSchedule``; for a loop of your own ``make_step``, ``parameter_groups``; a
  variational optimiser: ``IVON``; examples that arrive in parts: ``StreamingELBO``,
  ``choose_coreset``
* use: ``Predictive``, ``snr``, ``prune``, ``shrink``, ``freeze``, ``save``, ``load``; a file of few
  bits a weight: ``compress``, ``decompress``; guaranteed coverage:
  ``ConformalIntervals``, ``ConformalSets``; certified error: ``learn_prior_mean``,
  ``split_for_prior``, ``PACBayesObjective``, ``certify``, ``Certificate``;
  what to label next: ``acquire``; a table's run of the command line: ``open_run``
* baselines: ``MCDropout``, ``DeepEnsemble``
* subpackages: ``adapters``, ``bandits``, ``datasets``, ``export``, ``metrics``, ``plots``,
  ``referee``, ``sklearn``
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bayesify.distributions.by_group import ByGroup, EmpiricalGaussian
    from bayesify.distributions.families import (
        FullGaussian,
        LowRankGaussian,
        MatrixGaussian,
        PosteriorByGroup,
    )
    from bayesify.distributions.kl import kl_divergence
    from bayesify.distributions.layout import ParameterLayout
    from bayesify.distributions.likelihoods import (
        BernoulliLikelihood,
        CategoricalLikelihood,
        CensoredGaussianLikelihood,
        GaussianLikelihood,
        Likelihood,
        NegativeBinomialLikelihood,
        OrdinalLikelihood,
        PoissonLikelihood,
        StudentTLikelihood,
    )
    from bayesify.distributions.posteriors import Delta, MeanFieldGaussian, Posterior
    from bayesify.distributions.priors import Gaussian, Laplace, Prior, ScaleMixture, StudentT
    from bayesify.distributions.sparsity import GroupedGaussian, LogUniform, SpikeAndSlab
    from bayesify.distributions.structured import PosteriorFamily
    from bayesify.estimators import (
        ClosedFormLastLayer,
        Estimator,
        Flipout,
        LocalReparameterization,
        WeightSampling,
    )
    from bayesify.io import compress, decompress, load, save
    from bayesify.module.acquire import acquire
    from bayesify.module.bayesian import BayesianModule
    from bayesify.module.freezing import freeze
    from bayesify.module.multi_head import MultiHead
    from bayesify.module.outputs import MissingKLWarning
    from bayesify.module.pretrained import RelativeStd, last_layer
    from bayesify.module.pruning import prune, snr
    from bayesify.module.rank_one import RankOne, rank_one
    from bayesify.module.shared_noise import SharedNoiseWarning
    from bayesify.module.shrinking import shrink
    from bayesify.prediction import Predictive
    from bayesify.prediction.conformal import ConformalIntervals, ConformalSets
    from bayesify.training.certificate import Certificate, certify
    from bayesify.training.coreset import choose_coreset
    from bayesify.training.deep_ensemble import DeepEnsemble
    from bayesify.training.elbo import ELBO, ELBOTerms
    from bayesify.training.fit import fit
    from bayesify.training.ivon import IVON
    from bayesify.training.learned_prior import learn_prior_mean, split_for_prior
    from bayesify.training.mc_dropout import MCDropout
    from bayesify.training.optimizers import parameter_groups
    from bayesify.training.own_loop import make_step
    from bayesify.training.pac_bayes import PACBayesObjective
    from bayesify.training.progress import Callback
    from bayesify.training.pruning_schedule import PruningSchedule
    from bayesify.training.replicas import fit_replicas
    from bayesify.training.streaming import StreamingELBO

__version__ = "0.1.0"

#: Everything is imported on first use, so that the command line can answer without PyTorch.
_SUBPACKAGES = (
    "adapters",
    "bandits",
    "datasets",
    "export",
    "metrics",
    "plots",
    "referee",
    "sklearn",
)
_MODULES = {
    "distributions.by_group": ("ByGroup", "EmpiricalGaussian"),
    "distributions.families": (
        "FullGaussian",
        "LowRankGaussian",
        "MatrixGaussian",
        "PosteriorByGroup",
    ),
    "distributions.kl": ("kl_divergence",),
    "distributions.layout": ("ParameterLayout",),
    "distributions.likelihoods": (
        "BernoulliLikelihood",
        "CategoricalLikelihood",
        "GaussianLikelihood",
        "Likelihood",
        "CensoredGaussianLikelihood",
        "NegativeBinomialLikelihood",
        "OrdinalLikelihood",
        "PoissonLikelihood",
        "StudentTLikelihood",
    ),
    "distributions.posteriors": ("Delta", "MeanFieldGaussian", "Posterior"),
    "distributions.priors": ("Gaussian", "Laplace", "Prior", "ScaleMixture", "StudentT"),
    "distributions.sparsity": ("GroupedGaussian", "LogUniform", "SpikeAndSlab"),
    "distributions.structured": ("PosteriorFamily",),
    "estimators": (
        "ClosedFormLastLayer",
        "Estimator",
        "Flipout",
        "LocalReparameterization",
        "WeightSampling",
    ),
    "app.trained_table": ("open_run",),
    "io": ("compress", "decompress", "load", "save"),
    "module.acquire": ("acquire",),
    "training.mc_dropout": ("MCDropout",),
    "training.deep_ensemble": ("DeepEnsemble",),
    "training.certificate": ("Certificate", "certify"),
    "module.bayesian": ("BayesianModule",),
    "module.freezing": ("freeze",),
    "module.multi_head": ("MultiHead",),
    "module.outputs": ("MissingKLWarning",),
    "module.pretrained": ("RelativeStd", "last_layer"),
    "module.pruning": ("prune", "snr"),
    "module.rank_one": ("RankOne", "rank_one"),
    "module.shared_noise": ("SharedNoiseWarning",),
    "module.shrinking": ("shrink",),
    "prediction": ("Predictive",),
    "prediction.conformal": ("ConformalIntervals", "ConformalSets"),
    "training.coreset": ("choose_coreset",),
    "training.elbo": ("ELBO", "ELBOTerms"),
    "training.fit": ("fit",),
    "training.ivon": ("IVON",),
    "training.learned_prior": ("learn_prior_mean", "split_for_prior"),
    "training.optimizers": ("parameter_groups",),
    "training.own_loop": ("make_step",),
    "training.pac_bayes": ("PACBayesObjective",),
    "training.progress": ("Callback",),
    "training.pruning_schedule": ("PruningSchedule",),
    "training.replicas": ("fit_replicas",),
    "training.streaming": ("StreamingELBO",),
}

__all__ = [  # noqa: RUF022 (in the order in which they are used)
    # model
    "BayesianModule",
    "ParameterLayout",
    "SharedNoiseWarning",
    "MissingKLWarning",
    "last_layer",
    "RelativeStd",
    "MultiHead",
    "rank_one",
    "RankOne",
    # likelihoods
    "Likelihood",
    "CategoricalLikelihood",
    "BernoulliLikelihood",
    "GaussianLikelihood",
    "StudentTLikelihood",
    "CensoredGaussianLikelihood",
    "OrdinalLikelihood",
    "PoissonLikelihood",
    "NegativeBinomialLikelihood",
    # priors
    "Prior",
    "Gaussian",
    "ScaleMixture",
    "Laplace",
    "StudentT",
    "ByGroup",
    "EmpiricalGaussian",
    "GroupedGaussian",
    "SpikeAndSlab",
    "LogUniform",
    # posteriors
    "Posterior",
    "MeanFieldGaussian",
    "Delta",
    "PosteriorFamily",
    "LowRankGaussian",
    "MatrixGaussian",
    "FullGaussian",
    "PosteriorByGroup",
    "kl_divergence",
    # gradient estimators
    "Estimator",
    "WeightSampling",
    "LocalReparameterization",
    "Flipout",
    "ClosedFormLastLayer",
    # training
    "ELBO",
    "ELBOTerms",
    "StreamingELBO",
    "choose_coreset",
    "PACBayesObjective",
    "learn_prior_mean",
    "split_for_prior",
    "fit",
    "PruningSchedule",
    "fit_replicas",
    "Callback",
    "make_step",
    "parameter_groups",
    "IVON",
    # use of a trained network
    "Predictive",
    "ConformalIntervals",
    "ConformalSets",
    "certify",
    "Certificate",
    "acquire",
    "snr",
    "prune",
    "shrink",
    "freeze",
    "save",
    "load",
    "compress",
    "decompress",
    "open_run",
    # baselines
    "MCDropout",
    "DeepEnsemble",
]


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of bayesify, on first use."""
    for module, names in _MODULES.items():
        if name in names:
            found = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = found
            return found
    if importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    """List the public names and subpackages only, not the modules that they are imported from."""
    return sorted([*__all__, *_SUBPACKAGES, "__version__"])
