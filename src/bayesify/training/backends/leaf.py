"""A training step whose graph ends at the sampled weights; subclasses sample and update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesify.distributions.layout import ParameterLayout
from bayesify.distributions.posteriors import MeanFieldGaussian, WeightDraw
from bayesify.module.inputs import Inputs, arguments_of
from bayesify.noise.keys import NoiseKey, NoiseKind, Stream
from bayesify.noise.threefry import counter_key
from bayesify.training.backends.backend import Noise, require_finite
from bayesify.training.convergence import StdResidual
from bayesify.training.elbo import ELBO, ELBOTerms, detached
from bayesify.training.kernel.formulas import LeafKind, leaf_kind, prior_blocks
from bayesify.training.kernel.interface import Kernel

__all__ = [
    "EditedInPlaceError",
    "LeafBackend",
    "LeafPosterior",
    "Leaves",
    "SampleSource",
    "sample_sources",
]

Gradients = Sequence[Tensor | None]


class SampleSource(NamedTuple):
    """The index of the noise of one weight sample, and whether the sample has its negative.

    Every second sample of antithetic pairs has the negative of the noise before it.
    """

    sample: int
    opposite: bool


def sample_sources(elbo: ELBO) -> list[SampleSource]:
    """The noise of each weight sample of a step, as ``WeightSampling`` uses it.

    An estimator that perturbs outputs runs the network once, on moments.

    Raises:
        ValueError: antithetic pairs need an even number of samples.

    Example:
        >>> from bayesify import BayesianModule, WeightSampling
        >>> pairs = WeightSampling(antithetic=True)
        >>> bnn = BayesianModule(torch.nn.Linear(3, 2), estimator=pairs)
        >>> [tuple(source) for source in sample_sources(ELBO(bnn, num_data=1, num_samples=4))]
        [(0, False), (0, True), (2, False), (2, True)]
    """
    estimator = elbo.bnn.estimator
    estimator.check_num_samples(elbo.num_samples)
    if leaf_kind(estimator) != "weights":
        return [SampleSource(0, opposite=False)]
    if not estimator.antithetic:
        return [SampleSource(k, opposite=False) for k in range(elbo.num_samples)]
    return [SampleSource(k - k % 2, opposite=k % 2 == 1) for k in range(elbo.num_samples)]


class LeafBackend(ABC):
    """A step in which autograd sees the network alone, and closed forms do the rest.

    Several weight samples follow one another, in the memory of one: the gradients of each but the
    last are accumulated before the next is drawn, and its graph is gone by then.

    Args:
        elbo: an objective that the closed forms hold for.
        optimizer: the optimiser of its parameters.
    """

    noise: Noise
    description: str

    def __init__(self, elbo: ELBO, optimizer: Optimizer) -> None:
        self._elbo, self._optimizer = elbo, optimizer
        self._prepare()

    def step(
        self,
        inputs: Inputs,
        targets: Tensor,
        *,
        batch_index: int | None,
        kl_scale: float = 1.0,
        with_kl: bool = False,
        with_residual: bool = False,
    ) -> ELBOTerms:
        """Make one step; see ``Backend.step``."""
        self._keep_up()
        self._begin()
        elbo, count = self._elbo, len(self._sources)
        others = self._other_parameters() if count > 1 else []
        gradients: list[Tensor | None] = [None] * len(others)
        nlls, outputs, values = [], [], []
        for sample in range(count):
            last = sample == count - 1
            if sample:  # drop autocast's casts of the sample before
                torch.clear_autocast_cache()
            found = self._leaves.outputs(inputs)
            nll = elbo.nll(found, targets)
            factor = elbo.kl_factor(found.shape[1], batch_index=batch_index, kl_scale=kl_scale)
            nlls.append(nll.detach())
            outputs.append(detached(found))
            if with_kl and (last or not self._exact):  # an exact KL is no average
                values.append(self._complexity(sample))
            if not last:
                in_mean, _ = self._backward(nll / count, others, gradients)
                self._accumulate(in_mean, sample, factor)
                gradients = [parameter.grad for parameter in others]
                for parameter in others:
                    parameter.grad = None
        elbo.count_step()
        terms = self._terms(nlls, outputs, values, factor)
        require_finite(elbo, terms)
        in_mean, in_spread = self._backward(nll if count == 1 else nll / count, others, gradients)
        residual = self._update(in_mean, in_spread, factor, with_residual=with_residual)
        return terms._replace(std_residual=residual)

    @abstractmethod
    def _prepare(self) -> None:
        """Allocate what the objective as it is needs.

        Sets ``_leaves`` and ``description``, and calls :meth:`_prepare_passes`.
        """

    @abstractmethod
    def _keep_up(self) -> None:
        """Prepare anew where objective or optimiser changed since the last step."""

    @abstractmethod
    def _begin(self) -> None:
        """Fill the leaves for the first sample of the step that the objective is at."""

    @abstractmethod
    def _draw(self, sample: int) -> WeightDraw | None:
        """The weights in the leaves, shape (1, D), or None where the leaves are moments."""

    @abstractmethod
    def _forget_gradients(self) -> None:
        """Clear gradients before a backward pass."""

    @abstractmethod
    def _accumulate(self, in_mean: Gradients, sample: int, factor: float) -> None:
        """Add the gradients of one sample, and fill the leaves for the next one."""

    @abstractmethod
    def _update(
        self, in_mean: Gradients, in_spread: Gradients, factor: float, *, with_residual: bool
    ) -> StdResidual | None:
        """Update all parameters; returns ``ELBOTerms.std_residual`` where it is known."""

    def _prepare_passes(self, leaves: Leaves) -> None:
        prior = prior_blocks(self._elbo.bnn.weight_prior, self._elbo.kl)
        assert prior is not None
        self._exact = prior.exact
        self._sources = sample_sources(self._elbo)
        self._leaves = leaves
        self._unknown = self._elbo.bnn.posterior.mean.new_full((), torch.nan)

    @torch.no_grad()
    def _complexity(self, sample: int) -> tuple[Tensor, Tensor]:
        elbo = self._elbo
        return elbo.complexity(self._draw(sample), elbo.step, range(elbo.num_samples))

    def _backward(
        self, nll: Tensor, others: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> tuple[Gradients, Gradients]:
        # Not before the forward pass: a network may leave gradients of its own.
        self._forget_gradients()
        for parameter, gradient in zip(others, gradients, strict=True):
            parameter.grad = gradient
        self._leaves.backward(nll)
        return self._leaves.take_gradients()

    def _terms(
        self,
        nlls: Sequence[Tensor],
        outputs: Sequence[Tensor],
        values: Sequence[tuple[Tensor, Tensor]],
        factor: float,
    ) -> ELBOTerms:
        one = len(nlls) == 1
        nll = nlls[0] if one else torch.stack(list(nlls)).mean()
        joined = outputs[0] if one else torch.cat(list(outputs))
        if not values:
            unknown = self._unknown
            return ELBOTerms(unknown, nll, unknown, unknown, joined, factor, has_kl=False)
        kl, penalty = (torch.stack(each).mean() for each in zip(*values, strict=True))
        if one:
            kl, penalty = values[0]
        return ELBOTerms(nll + factor * (kl + penalty), nll, kl, penalty, joined, factor)

    def _other_parameters(self) -> list[Tensor]:
        """The parameters of the optimiser that are neither mean nor rho."""
        posterior = self._elbo.bnn.posterior
        own = (posterior.mean, getattr(posterior, "rho", None))
        held = [each for group in self._optimizer.param_groups for each in group["params"]]
        return [each for each in held if not any(each is one for one in own)]


class EditedInPlaceError(RuntimeError):
    """A network changes its weights in its forward pass, where they are leaves of the graph."""

    def __init__(self) -> None:
        super().__init__(
            "the network must not edit its weights in place under this backend; use "
            'backend="autograd"'
        )


class Leaves:
    """The random parameters of a network as leaves, each a view of a flat vector of shape (D,).

    Autograd ends at the leaves; the gradients of mean and rho follow in closed form.

    Args:
        elbo: the objective.
        leaf: the sampled weights, standard deviations or variances.
        kind: which; for the last two the means are leaves too, the posterior's own.
        kernel: draws the noise of outputs; None for PyTorch's generators.
    """

    def __init__(
        self, elbo: ELBO, leaf: Tensor, kind: LeafKind, kernel: Kernel | None = None
    ) -> None:
        self._elbo, self._kernel = elbo, kernel
        layout, mean = elbo.bnn.layout, elbo.bnn.posterior.mean
        self._first = _views(layout, leaf if kind == "weights" else mean)
        self._second = {} if kind == "weights" else _views(layout, leaf)
        self._stand_in = None
        if kind != "weights":
            self._stand_in = LeafPosterior(
                mean, self._first, self._second, variances=kind == "variances"
            )

    def outputs(self, inputs: Inputs) -> Tensor:
        """The network's outputs for the step that the objective is at, shape (S, N, ...).

        Raises:
            EditedInPlaceError: the network changes its weights in its pass.
        """
        leaves = [*self._first.values(), *self._second.values()]
        versions = [leaf._version for leaf in leaves]
        try:
            outputs = self._run(inputs)
        except RuntimeError as error:
            if "a leaf Variable that requires grad" not in str(error):
                raise
            raise EditedInPlaceError from error
        if versions != [leaf._version for leaf in leaves]:
            raise EditedInPlaceError
        return outputs

    def _run(self, inputs: Inputs) -> Tensor:
        bnn = self._elbo.bnn
        if self._stand_in is None:
            args, kwargs = arguments_of(inputs)
            return bnn.tensor_of(bnn.run_with_named(self._first, *args, **kwargs)).unsqueeze(0)
        key = NoiseKey(bnn.seed, Stream.TRAINING, self._elbo.step)
        if self._kernel is not None:
            key = _CounterKey(key.seed, key.stream, key.step, self._kernel)
        samples = range(self._elbo.num_samples)
        outputs, _ = bnn.sample_outputs(inputs, key, samples, posterior=self._stand_in)
        return outputs

    def backward(self, nll: Tensor) -> None:
        """Discard gradients that the forward pass left, then run the backward pass."""
        self.take_gradients()
        if nll.requires_grad:  # not where a pass used no weight at all
            nll.backward()

    def take_gradients(self) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
        """The gradients of each parameter, in weights or means and in spreads, then forgotten.

        None stands for zeros; the second is empty where the network ran on weights.
        """
        return _taken(self._first), _taken(self._second)


class LeafPosterior(MeanFieldGaussian):
    """The posterior as an estimator sees it, with leaves instead of mean and rho."""

    def __init__(
        self,
        mean: Tensor,
        means: dict[str, Tensor],
        spreads: dict[str, Tensor],
        *,
        variances: bool,
    ) -> None:
        nn.Module.__init__(self)
        self.mean = nn.Parameter(mean.detach(), requires_grad=False)
        self.register_buffer("mask", None)
        self._moments = means, spreads
        self.gives_variances = variances

    def moments_of(
        self,
        layout: ParameterLayout,  # noqa: ARG002
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the leaves."""
        return self._moments


@dataclass(frozen=True)
class _CounterKey(NoiseKey):
    """A key whose normals the kernel draws."""

    kernel: Kernel

    def numbers(
        self,
        kind: NoiseKind,
        sample: int,
        place: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Tensor:
        if kind != "normal":
            return super().numbers(kind, sample, place, size, dtype, device)
        words = counter_key(self, sample, place)
        return self.kernel.normals(words, int(self.step), size).to(dtype)


def _views(layout: ParameterLayout, vector: Tensor) -> dict[str, Tensor]:
    parts = layout.unflatten(vector.detach())
    return {name: part.detach().requires_grad_() for name, part in parts.items()}


def _taken(leaves: dict[str, Tensor]) -> list[Tensor | None]:
    gradients = [leaf.grad for leaf in leaves.values()]
    for leaf in leaves.values():
        # The next backward pass then hands its tensor over, and adds nothing.
        leaf.grad = None
    return gradients
