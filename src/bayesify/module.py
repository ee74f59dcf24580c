"""Any network, made Bayesian without being edited."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesify import stateless
from bayesify.coverage import Coverage
from bayesify.inputs import Inputs, arguments_of, batches_of
from bayesify.layout import ParameterLayout, Selector
from bayesify.likelihoods import CategoricalLikelihood, Likelihood
from bayesify.noise import NoiseKey, Stream, counted, process_rank
from bayesify.perturbations import Call, Perturbation, WeightSampling
from bayesify.perturbations.tracing import Traces, Uses, num_data_of
from bayesify.posteriors import Delta, MeanFieldGaussian, Posterior, WeightDraw
from bayesify.predictive import Predictive
from bayesify.pretrained import RelativeStd, prior_mean_of
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
        super().__init__()
        given = {Likelihood: likelihood, Prior: prior, Perturbation: perturbation}
        for kind, value in given.items():
            if not (value is None or isinstance(value, kind)):
                raise TypeError(f"{kind.__name__.lower()} must be a {kind.__name__}, got {value!r}")
        if not (isinstance(posterior, type) and issubclass(posterior, Posterior)):
            raise TypeError(
                f"posterior must be a class such as MeanFieldGaussian or Delta, got {posterior!r}"
            )
        self.layout = ParameterLayout.of(net, include, exclude)
        self.net = copy.deepcopy(net)
        mean = self.layout.flatten(stateless.take_out(self.net, self.layout))
        if isinstance(init_std, RelativeStd):
            init_std = init_std.of(mean)
        self.posterior = posterior.centred_on(mean, init_std)
        self.posterior.kept = stateless.without_padding(self.net, self.layout, mean)
        self.register_buffer("prior_mean", prior_mean_of(prior_mean, mean))
        self.likelihood: Likelihood = (
            CategoricalLikelihood() if likelihood is None else copy.deepcopy(likelihood)
        )
        self.prior = Gaussian(std=0.3) if prior is None else prior
        self.perturbation = WeightSampling() if perturbation is None else perturbation
        self.seed = operator.index(seed)
        if not -(2**127) <= self.seed < 2**127:
            raise ValueError(f"seed must have at most 128 bits with its sign, got {seed}")
        # A tensor, so that compiled code may count too.
        self._calls = torch.zeros((), dtype=torch.int64)
        self._traces = Traces()
        self._places = stateless.places_of(self.net, self.layout)

    @property
    def prior(self) -> Prior:
        """The prior as it was given."""
        return self._prior

    @prior.setter
    def prior(self, prior: Prior) -> None:
        weight_prior = prior.for_layout(self.layout)
        if isinstance(self.posterior, Delta):
            weight_prior.log_prob(self.posterior.mean)  # refuses what needs a spread
        self.weight_prior, self._prior = weight_prior, prior

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One pass with fresh weights: just what ``net(...)`` would return, no extra axis."""
        key = NoiseKey(self.seed, Stream.CALL, counted(self._calls))
        self._calls += 1
        rank = process_rank()
        outputs, _ = self._perturbed(args, kwargs, key, range(rank, rank + 1))
        return outputs[0]

    def run_with(self, weights: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the network with one flat weight vector, shape (D,)."""
        return self._run(self.layout.unflatten(weights), *args, **kwargs)

    def sample_outputs(
        self, inputs: Inputs, key: NoiseKey, samples: range
    ) -> tuple[Tensor, WeightDraw | None]:
        """Outputs under the weight samples of a noise key, shape (S, N, ...), and the draw.

        Raises:
            TypeError: the network returns something else than a tensor.
        """
        args, kwargs = arguments_of(inputs)
        found, draw = self._perturbed(args, kwargs, key, samples)
        outputs = [_tensor(output) for output in found]
        return (outputs[0].unsqueeze(0) if len(outputs) == 1 else torch.stack(outputs)), draw

    def coverage(self, *args: Any, **kwargs: Any) -> Coverage:
        """How each random parameter is perturbed, and why, from one traced forward pass.

        Args:
            args: example inputs, as the network takes them; without any, what the last traced
                pass found, or ``unknown``.
            kwargs: those by name.

        Returns:
            A row for each random parameter: name, shape, treatment, reason.

        Example:
            >>> bnn = BayesianModule(nn.Linear(3, 2))
            >>> [row.treatment for row in bnn.coverage(torch.zeros(5, 3))]
            ['sampled', 'sampled']
        """
        if args or kwargs:
            self._uses(args, kwargs)
        return Coverage.of(self.layout, self.perturbation, self._traces.last)

    def _run(self, tensors: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        given = {place: tensors[name] for name in tensors for place in self._places[name]}
        return stateless.run_with(self.net, given, args, kwargs)

    def _perturbed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], key: NoiseKey, samples: range
    ) -> tuple[list[Any], WeightDraw | None]:
        call = Call(
            layout=self.layout,
            forward=lambda tensors: self._run(tensors, *args, **kwargs),
            num_data=num_data_of(args, kwargs),
            local_names=lambda: self._local_names(*args, **kwargs),
            snapshot=lambda: stateless.snapshot(self.net),
            unforeseen=self._traces.note,
        )
        return self.perturbation.run(call, self.posterior, key, samples)

    def _local_names(self, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        uses = self._uses(args, kwargs)
        return tuple(n for n in uses if self.perturbation.treatment(uses[n]).kind != "sampled")

    # What torch.compiler.assume_constant_result sets, without its import of the whole compiler:
    # in compiled code the pass is traced once, when that code is made for inputs of these shapes.
    _local_names._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _uses(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Uses:
        return self._traces.uses(self.net, self._run, self._means, args, kwargs)

    def _means(self) -> dict[str, Tensor]:
        return self.layout.unflatten(self.posterior.masked_mean.detach())

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

        with stateless.evaluating(self.net):
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
        with stateless.evaluating(self.net):
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
        stateless.put_back(net, self.layout, self._means())
        return net

    def extra_repr(self) -> str:
        """The parts that are not modules, and in short how the parameters are perturbed."""
        counts = sorted(self.coverage().counts.items())
        treated = ", ".join(f"{count} {kind}" for kind, count in counts)
        return (
            f"random={', '.join(self.layout.names)}; num_weights={self.layout.num_weights}, "
            f"prior={self.prior}, perturbation={self.perturbation} ({treated}), seed={self.seed}"
        )


def _tensor(output: object) -> Tensor:
    if not isinstance(output, Tensor):
        raise TypeError(
            "the network must return one tensor for a likelihood to read, got "
            f"{type(output).__name__}; wrap it in a module that picks the tensor"
        )
    return output
