"""Any network, made Bayesian without being edited."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayesify.inputs import Inputs, arguments_of, batches_of
from bayesify.layout import ParameterLayout
from bayesify.likelihoods import CategoricalLikelihood, Likelihood
from bayesify.noise import NoiseKey, Stream
from bayesify.perturbations import Perturbation, WeightSampling
from bayesify.posteriors import MeanFieldGaussian, Posterior, WeightDraw
from bayesify.predictive import Predictive
from bayesify.priors import Gaussian, Prior

__all__ = ["BayesianModule"]


class BayesianModule(nn.Module):
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
        init_std: initial standard deviation of every weight; default 0.02 for a Gaussian.
        perturbation: how noise enters the forward pass; default ``WeightSampling()``.
        include: name patterns of the random parameters.
        exclude: name patterns of deterministic ones; None excludes the affine parameters of
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

    def __init__(
        self,
        net: nn.Module,
        *,
        likelihood: Likelihood | None = None,
        prior: Prior | None = None,
        posterior: type[Posterior] = MeanFieldGaussian,
        init_std: float | Tensor | None = None,
        perturbation: Perturbation | None = None,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_kind("net", net, nn.Module)
        _check_kind("likelihood", likelihood, Likelihood | None)
        _check_kind("prior", prior, Prior | None)
        _check_kind("perturbation", perturbation, Perturbation | None)
        if not (isinstance(posterior, type) and issubclass(posterior, Posterior)):
            raise TypeError(
                f"posterior must be a class such as MeanFieldGaussian or Delta, got {posterior!r}"
            )
        self.layout = ParameterLayout.of(net, include, exclude)
        self.net = copy.deepcopy(net)
        mean = self.layout.flatten(_take_out(self.net, self.layout))
        self.posterior = posterior.centred_on(mean, init_std)
        self.likelihood: Likelihood = (
            CategoricalLikelihood() if likelihood is None else copy.deepcopy(likelihood)
        )
        self.prior = Gaussian(std=0.3) if prior is None else prior
        self.perturbation = WeightSampling() if perturbation is None else perturbation
        self.seed = operator.index(seed)
        if not -(2**127) <= self.seed < 2**127:
            raise ValueError(f"seed must have at most 128 bits with its sign, got {seed}")
        self._num_calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One pass with fresh weights: just what ``net(...)`` would return, no extra axis."""
        key = NoiseKey(self.seed, Stream.CALL, self._num_calls)
        self._num_calls += 1
        outputs, _ = self.perturbation.run(
            lambda weights: self.run_with(weights, *args, **kwargs), self.posterior, key, range(1)
        )
        return outputs[0]

    def run_with(self, weights: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the network with one flat weight vector, shape (D,)."""
        tensors = self.layout.with_ties(self.layout.unflatten(weights))
        # Recurrent layers keep what they ran with, which would hold the graph and defy deepcopy.
        recurrent = [module for module in self.net.modules() if isinstance(module, nn.RNNBase)]
        held = [(module._flat_weights, module._flat_weight_refs) for module in recurrent]
        try:
            return functional_call(self.net, tensors, args, kwargs, tie_weights=False)
        finally:
            for module, (flat_weights, references) in zip(recurrent, held, strict=True):
                module._flat_weights, module._flat_weight_refs = flat_weights, references

    def sample_outputs(
        self, inputs: Inputs, key: NoiseKey, samples: range
    ) -> tuple[Tensor, WeightDraw | None]:
        """Outputs under the weight samples of a noise key, shape (S, N, ...), and the draw.

        Raises:
            TypeError: the network returns something else than a tensor.
        """
        args, kwargs = arguments_of(inputs)
        outputs, draw = self.perturbation.run(
            lambda weights: _tensor(self.run_with(weights, *args, **kwargs)),
            self.posterior,
            key,
            samples,
        )
        return (outputs[0].unsqueeze(0) if len(outputs) == 1 else torch.stack(outputs)), draw

    @torch.no_grad()
    def predict(
        self,
        inputs: Inputs,
        num_samples: int = 100,
        *,
        keep_samples: bool = False,
        batch_size: int = 4096,
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
            batch_size: how many data go through the network at once.
            seed: other weight samples than those of the module's own seed.

        Returns:
            A :class:`Predictive` over N data.

        Raises:
            ValueError: ``num_samples`` or ``batch_size`` is below 1, or there are no data.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        key = NoiseKey(self.seed if seed is None else seed, Stream.PREDICTION, 0)
        batches = list(batches_of(inputs, batch_size))

        def outputs() -> Iterator[Tensor]:
            for sample in range(num_samples):
                noise = self.posterior.noise(key, range(sample, sample + 1))
                weights = self.posterior.draw(noise).weights[0]
                yield torch.cat([_tensor(self.run_with(weights, *a, **k)) for a, k in batches])

        with evaluating(self.net):
            return self.likelihood.predictive(outputs(), keep_samples=keep_samples)

    @torch.no_grad()
    def predict_mean(self, inputs: Inputs, *, batch_size: int = 4096) -> Predictive:
        """The answer of the single network with the mean weights, at that network's price.

        Args:
            inputs: as for :meth:`predict`.
            batch_size: how many data go through the network at once.

        Returns:
            A :class:`Predictive` without epistemic uncertainty.

        Raises:
            ValueError: ``batch_size`` is below 1, or there are no data.
        """
        outputs = self.mean_outputs(inputs, batch_size=batch_size)
        return self.likelihood.predictive([outputs], keep_samples=False)

    @torch.no_grad()
    def mean_outputs(self, inputs: Inputs, *, batch_size: int = 4096) -> Tensor:
        """The network's outputs at the mean weights, in evaluation mode, shape (N, ...)."""
        with evaluating(self.net):
            return torch.cat(
                [
                    _tensor(self.run_with(self.posterior.masked_mean, *args, **kwargs))
                    for args, kwargs in batches_of(inputs, batch_size)
                ]
            )

    def to_module(self) -> nn.Module:
        """An ordinary network of the original class, with the mean weights as its parameters.

        Example:
            >>> type(BayesianModule(nn.Linear(3, 2)).to_module())
            <class 'torch.nn.modules.linear.Linear'>
        """
        net = copy.deepcopy(self.net)
        tensors = self.layout.unflatten(self.posterior.masked_mean.detach())
        for name, aliases in zip(self.layout.names, self.layout.ties, strict=True):
            parameter = nn.Parameter(tensors[name].clone())
            for alias in aliases:
                owner, _, leaf = alias.rpartition(".")
                setattr(net.get_submodule(owner), leaf, parameter)
        return net

    def extra_repr(self) -> str:
        """The parts that are not modules."""
        return (
            f"random={', '.join(self.layout.names)}; num_weights={self.layout.num_weights}, "
            f"prior={self.prior}, perturbation={self.perturbation}, seed={self.seed}"
        )


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Put every part of ``net`` in evaluation mode, and back as it was afterwards."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _take_out(net: nn.Module, layout: ParameterLayout) -> dict[str, Tensor]:
    """Remove the random parameters from ``net`` and return their values."""
    values = {}
    for name, aliases in zip(layout.names, layout.ties, strict=True):
        values[name] = net.get_parameter(name).detach()
        for alias in aliases:
            owner, _, leaf = alias.rpartition(".")
            # None keeps the place: forgetting to supply the weight then fails loudly.
            net.get_submodule(owner)._parameters[leaf] = None
    return values


def _tensor(output: object) -> Tensor:
    if not isinstance(output, Tensor):
        raise TypeError(
            "the network must return one tensor for a likelihood to read, got "
            f"{type(output).__name__}; wrap it in a module that picks the tensor"
        )
    return output


def _check_kind(name: str, value: object, kind: Any) -> None:
    if not isinstance(value, kind):
        expected = getattr(kind, "__name__", str(kind))
        raise TypeError(f"{name} must be a {expected}, got {value!r}")
