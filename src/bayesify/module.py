"""Any network, made Bayesian without being edited."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from bayesify import stateless
from bayesify.inputs import Inputs
from bayesify.layout import Selector, shortened
from bayesify.likelihoods import CategoricalLikelihood, Likelihood
from bayesify.noise import NoiseKey, Stream
from bayesify.perturbations import Perturbation
from bayesify.pieces import Known, Pieces, Summary
from bayesify.posteriors import Delta, MeanFieldGaussian, Posterior
from bayesify.prediction import SampledOutputs, run_in_batches
from bayesify.predictive import Predictive
from bayesify.pretrained import RelativeStd, prior_mean_of
from bayesify.priors import Gaussian, Prior
from bayesify.random_network import RandomNetwork

__all__ = ["BayesianModule"]


class BayesianModule(RandomNetwork):
    """A network whose parameters are random variables with a learned posterior.

    The network is copied; the caller's object is never changed. Its random parameters leave the
    copy: ``parameters()`` yields the posterior's parameters, the likelihood's own and the
    deterministic rest, which any optimiser can train. A parameter that the network shares between
    modules is one random variable.

    Args:
        net: an initialised module; its values are the initial means.
        likelihood: what its outputs say about the targets, copied too; default
            ``CategoricalLikelihood()``.
        prior: the density of a weight before any datum; default ``Gaussian(std=0.3)``.
        posterior: the family of q, ``MeanFieldGaussian`` or ``Delta``.
        init_std: initial standard deviation: a number, a vector of shape (D,), or relative to
            each weight's size by ``RelativeStd``; default 0.02 for a Gaussian.
        prior_mean: None for a prior centred at 0, ``"initial"`` for one centred on the network's
            own values (MOPED, Krishnan et al. 2020), or a vector of shape (D,).
        perturbation: how noise enters the forward pass; default ``WeightSampling()``.
        include: the random parameters, by name patterns and module types.
        exclude: deterministic ones, likewise; None excludes the affine parameters of
            normalisation layers.
        seed: what all noise is a function of.

    Raises:
        ValueError, TypeError: no parameter can be made random (see ``ParameterLayout.of``), or a
            component is not of its kind.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> bnn = BayesianModule(net, seed=1)
        >>> bnn(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
        >>> sorted(name for name, _ in bnn.named_parameters())
        ['posterior.mean', 'posterior.rho']
        >>> bnn.predict(torch.zeros(5, 3), num_samples=10).mean.shape
        torch.Size([5, 2])
    """

    prior_mean: Tensor | None

    def __init__(
        self,
        net: nn.Module,
        *,
        likelihood: Likelihood | None = None,
        prior: Prior | None = None,
        posterior: type[Posterior] = MeanFieldGaussian,
        init_std: float | Tensor | RelativeStd | None = None,
        prior_mean: Literal["initial"] | Tensor | None = None,
        perturbation: Perturbation | None = None,
        include: Sequence[Selector] = ("*",),
        exclude: Sequence[Selector] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            net,
            posterior=posterior,
            init_std=init_std,
            perturbation=perturbation,
            include=include,
            exclude=exclude,
            seed=seed,
        )
        if not isinstance(likelihood, Likelihood | None):
            raise TypeError(
                f"likelihood must be a Likelihood such as CategoricalLikelihood(), got "
                f"{likelihood!r}"
            )
        initial = self.posterior.mean.detach()
        self.register_buffer("prior_mean", prior_mean_of(prior_mean, initial))
        self.likelihood: Likelihood = (
            CategoricalLikelihood() if likelihood is None else copy.deepcopy(likelihood)
        )
        self.prior = Gaussian(std=0.3) if prior is None else prior
        self._known: Known = {}

    @property
    def prior(self) -> Prior:
        """The prior as it was given."""
        return self._prior

    @prior.setter
    def prior(self, prior: Prior) -> None:
        if not isinstance(prior, Prior):
            raise TypeError(f"prior must be a Prior such as Gaussian(0.3), got {prior!r}")
        weight_prior = prior.for_layout(self.layout)
        if isinstance(self.posterior, Delta):
            weight_prior.log_prob(self.posterior.mean)  # refuses what needs a spread
        self.weight_prior, self._prior = weight_prior, prior

    @torch.no_grad()
    def predict(
        self,
        inputs: Inputs,
        num_samples: int = 100,
        *,
        keep_samples: bool = False,
        batch_size: int | None = None,
        max_memory: int | str | None = None,
        seed: int | None = None,
    ) -> Predictive:
        """The predictive distribution: an average over the posterior, by weight samples.

        Dropout and batch normalisation are in their evaluation mode meanwhile. Calling twice
        gives the same answer: the weights are a function of the seed.

        Args:
            inputs: the network's inputs, N data first: one tensor, or a sequence or mapping of
                tensors that become positional or keyword arguments.
            num_samples: S, the number of weight samples, at least 1.
            keep_samples: whether the result holds every sample's answer, S times the memory.
            batch_size: how many data go through the network at once; None chooses what is fast.
            max_memory: how much memory the prediction may take, its result included: a number of
                bytes, or text such as ``"64 MB"``. None bounds a single pass only.
            seed: other weight samples than those of the module's own seed.

        Returns:
            A :class:`Predictive` over N data.

        Raises:
            ValueError: ``num_samples`` or ``batch_size`` is below 1, there are no data, or
                ``max_memory`` is too little.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        key = NoiseKey(self.seed if seed is None else seed, Stream.PREDICTION, 0)
        summary = partial(self.likelihood.predictive, keep_samples=keep_samples)
        with stateless.evaluating(self.net):
            pieces = Pieces.of(
                self,
                inputs,
                self._known,
                num_samples=num_samples,
                summary=summary,
                batch_size=batch_size,
                max_memory=max_memory,
            )
            return summary(SampledOutputs(self, inputs, key, num_samples, pieces))

    @torch.no_grad()
    def predict_mean(
        self,
        inputs: Inputs,
        *,
        batch_size: int | None = None,
        max_memory: int | str | None = None,
    ) -> Predictive:
        """The answer of the single network with the mean weights, in one pass of it.

        For few data the calls around that pass cost as much again; see docs/prediction.md.

        Args:
            inputs: as for :meth:`predict`.
            batch_size: likewise.
            max_memory: likewise.

        Returns:
            A :class:`Predictive` without epistemic uncertainty.

        Raises:
            ValueError: ``batch_size`` is below 1, there are no data, or ``max_memory`` is too
                little.
        """
        summary = partial(self.likelihood.predictive, keep_samples=False)
        return summary([self._mean_outputs(inputs, summary, batch_size, max_memory)])

    @torch.no_grad()
    def mean_outputs(
        self,
        inputs: Inputs,
        *,
        batch_size: int | None = None,
        max_memory: int | str | None = None,
    ) -> Tensor:
        """The network's outputs at the mean weights, in evaluation mode, shape (N, ...)."""
        return self._mean_outputs(inputs, None, batch_size, max_memory)

    def _mean_outputs(
        self,
        inputs: Inputs,
        summary: Summary | None,
        batch_size: int | None,
        max_memory: int | str | None,
    ) -> Tensor:
        with stateless.evaluating(self.net):
            pieces = Pieces.of(
                self,
                inputs,
                self._known,
                summary=summary,
                batch_size=batch_size,
                max_memory=max_memory,
            )
            mean = self.posterior.masked_mean.clone()  # which the network may edit in place
            return run_in_batches(self, mean, inputs, pieces.batch_size)

    def to_module(self) -> nn.Module:
        """An ordinary network of the original class, with the mean weights as its parameters.

        Example:
            >>> type(BayesianModule(nn.Linear(3, 2)).to_module())
            <class 'torch.nn.modules.linear.Linear'>
        """
        net = copy.deepcopy(self.net)
        stateless.put_back(net, self.layout, self._means())
        return net

    def extra_repr(self) -> str:
        """The parts that are not modules, and in short how the parameters are perturbed."""
        counts = sorted(self.coverage().counts.items())
        treated = ", ".join(f"{count} {kind}" for kind, count in counts)
        centred = "" if self.prior_mean is None else " about prior_mean"
        return (
            f"random={shortened(self.layout.names, 6)}; num_weights={self.layout.num_weights}, "
            f"prior={self.prior}{centred}, perturbation={self.perturbation} ({treated}), "
            f"seed={self.seed}"
        )
