"""A training step whose graph ends at the sampled weights; subclasses sample and update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesify.distributions.layout import ParameterLayout
from bayesify.distributions.posteriors import MeanFieldGaussian, WeightDraw
from bayesify.module.inputs import Inputs, Repeated, arguments_of
from bayesify.noise.keys import NoiseKey, NoiseKind, Stream
from bayesify.noise.threefry import counter_key
from bayesify.training.backends.backend import Noise, require_finite
from bayesify.training.convergence import StdResidual
from bayesify.training.division import Share
from bayesify.training.elbo import ELBO, ELBOTerms, detached
from bayesify.training.kernel.formulas import LeafKind, leaf_kind, prior_blocks
from bayesify.training.kernel.interface import Kernel
from bayesify.training.processes import Processes

__all__ = [
    "EditedInPlaceError",
    "LeafBackend",
    "LeafPosterior",
    "Leaves",
    "SampleSource",
    "gather",
    "sample_sources",
]

Gradients = Sequence[Tensor | None]


class SampleSource(NamedTuple):
    """The index of the noise of one weight sample, and whether the sample has its negative.

    Every second sample of antithetic pairs has the negative of the noise before it.
    """

    sample: int
    opposite: bool


def sample_sources(elbo: ELBO, first: int = 0) -> list[SampleSource]:
    """The noise of each weight sample of a step, as ``WeightSampling`` uses it.

    An estimator that perturbs outputs runs the network once, on moments; the noise of their KL is
    the same in all processes.

    Args:
        elbo: the objective.
        first: index of the first sample, where other processes have those before it.

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
        return [SampleSource(first + k, opposite=False) for k in range(elbo.num_samples)]
    return [SampleSource(first + k - k % 2, opposite=k % 2 == 1) for k in range(elbo.num_samples)]


class LeafBackend(ABC):
    """A step in which autograd sees the network alone, and closed forms do the rest.

    Several weight samples follow one another, in the memory of one: the gradients of each but the
    last are accumulated before the next is drawn, and its graph is gone by then.

    Args:
        elbo: an objective that the closed forms hold for.
        optimizer: the optimiser of its parameters.
        processes: those that train together; None is this one alone.
    """

    noise: Noise
    description: str

    def __init__(
        self, elbo: ELBO, optimizer: Optimizer, *, processes: Processes | None = None
    ) -> None:
        self._elbo, self._optimizer = elbo, optimizer
        self._processes = Processes.alone() if processes is None else processes
        self._unread: Sequence[str] | None = None
        self._prepare()

    @property
    def unread(self) -> Sequence[str]:
        """See ``Backend.unread``."""
        return self._unread or ()

    def step(
        self,
        inputs: Inputs,
        targets: Tensor,
        *,
        batch_index: int | None,
        kl_scale: float = 1.0,
        with_kl: bool = False,
        with_residual: bool = False,
        share: Share | None = None,
    ) -> ELBOTerms:
        """Make one step; see ``Backend.step``."""
        self._elbo.bnn.own_trained_parameters()
        self._keep_up()
        self._begin()
        elbo, count, processes = self._elbo, len(self._sources), self._processes
        # Each process adds its part of the loss, and no process the whole of the KL.
        part = 1.0 / processes.count
        weight = part if share is None else share.weight
        others = self._other_parameters() if count > 1 else []
        gradients: list[Tensor | None] = [None] * len(others)
        nlls, outputs, values = [], [], []
        passes = Repeated() if count > 1 else None
        for sample in range(count):
            last = sample == count - 1
            if sample:  # drop autocast's casts of the sample before
                torch.clear_autocast_cache()
            found = self._leaves.outputs(inputs if passes is None else passes.take(inputs))
            nll = elbo.nll(found, targets)
            size = found.shape[1] * processes.count if share is None else share.batch_size
            factor = elbo.kl_factor(size, batch_index=batch_index, kl_scale=kl_scale)
            nlls.append(nll.detach())
            outputs.append(detached(found))
            if with_kl and (last or not self._exact):  # an exact KL is no average
                values.append(self._complexity(sample))
            if not last:
                in_mean, _ = self._backward(_part(nll, weight, count), others, gradients)
                [in_mean] = self._summed(in_mean)
                self._accumulate(in_mean, sample, factor)
                gradients = [parameter.grad for parameter in others]
                for parameter in others:
                    parameter.grad = None
        elbo.count_step()
        terms = self._terms(nlls, outputs, values, factor)
        if processes.is_alone:
            require_finite(elbo, terms)
            found_gradients = self._backward(_part(nll, weight, count), others, gradients)
        else:
            own = weight * terms.nll, part * terms.kl, part * terms.penalty
            pending = processes.begin_sums(own)
            found_gradients = self._backward(_part(nll, weight, count), others, gradients)
            whole, kl, penalty = pending.result().to(terms.nll).unbind()
            loss = whole + factor * (kl + penalty)
            terms = terms._replace(loss=loss, nll=whole, kl=kl, penalty=penalty)
            require_finite(elbo, terms)
            processes.add_up_gradients(self._other_parameters())
        if self._unread is None or self._unread:
            names = zip(elbo.bnn.layout.names, found_gradients[0], strict=True)
            without = [name for name, gradient in names if gradient is None]
            before = without if self._unread is None else self._unread
            self._unread = [name for name in without if name in before]
        in_mean, in_spread = self._summed(*found_gradients)
        residual = self._update(in_mean, in_spread, factor, with_residual=with_residual)
        return terms._replace(std_residual=residual)

    @property
    def _adds_leaf_gradients(self) -> bool:
        """Whether the processes add up the gradients in the leaves.

        Not where each has weights of its own: the one in rho depends on these.
        """
        own_weights = leaf_kind(self._elbo.bnn.estimator) == "weights"
        return not self._processes.is_alone and (self._processes.shared_noise or not own_weights)

    def _summed(self, *gradients: Gradients) -> Sequence[Gradients]:
        """The gradients in the leaves, or their sums over the processes."""
        if not self._adds_leaf_gradients:
            return gradients
        starts = self._elbo.bnn.layout.starts
        rows = list(zip(self._joined, gradients, strict=False))
        for row, parts in rows:
            if parts:
                gather(row, starts, parts)
        self._processes.add_up([self._joined[: sum(map(bool, gradients))]])
        return [
            [row[start:stop] for start, stop in pairwise(starts)] if parts else parts
            for row, parts in rows
        ]

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
        self._sources = self._sources_of()
        if self._adds_leaf_gradients:
            mean = self._elbo.bnn.posterior.mean.detach()
            self._joined = mean.new_empty(2, mean.numel())
        self._leaves = leaves
        self._unknown = self._elbo.bnn.posterior.mean.new_full((), torch.nan)

    def _sources_of(self) -> list[SampleSource]:
        return sample_sources(self._elbo, self._processes.first_sample(self._elbo.num_samples))

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

    def __init__(self, why: str = 'under this backend; use backend="auto"') -> None:
        super().__init__(
            f"the network must not edit its weights in place {why}, or compute new ones, as "
            "weight.clamp(-1, 1) instead of weight.clamp_(-1, 1)"
        )


class Leaves:
    """The random parameters of a network as leaves, each a view of a flat vector of shape (D,).

    Autograd ends at the leaves; the gradients of mean and rho follow in closed form.

    Args:
        elbo: the objective.
        leaf: the sampled weights, standard deviations or variances.
        kind: which; for the last two the means are leaves too, the posterior's own.
        kernel: draws the noise of outputs; None for PyTorch's generators.
        first_sample: index of the noise of outputs.
    """

    def __init__(
        self,
        elbo: ELBO,
        leaf: Tensor,
        kind: LeafKind,
        kernel: Kernel | None = None,
        *,
        first_sample: int = 0,
    ) -> None:
        self._elbo, self._kernel, self._first_sample = elbo, kernel, first_sample
        layout, mean = elbo.bnn.layout, elbo.bnn.posterior.mean
        self._first = _views(layout, leaf if kind == "weights" else mean)
        self._second = {} if kind == "weights" else _views(layout, leaf)
        self._leaves = [*self._first.values(), *self._second.values()]
        self._addresses = [each.data_ptr() for each in self._leaves]
        self._vector, self._is_first_pass = leaf, True
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
        versions = [leaf._version for leaf in self._leaves]
        # Edits of .data change no version. Later passes compare no values: that takes as long as a
        # pass over all weights.
        before = self._vector.clone() if self._is_first_pass else None
        self._is_first_pass = False
        try:
            outputs = self._run(inputs)
        except RuntimeError as error:
            if "a leaf Variable that requires grad" not in str(error):
                raise
            raise EditedInPlaceError from error
        if (
            versions != [leaf._version for leaf in self._leaves]
            or self._addresses != [leaf.data_ptr() for leaf in self._leaves]
            or (before is not None and not _is_same(before, self._vector))
        ):
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
        samples = range(self._first_sample, self._first_sample + self._elbo.num_samples)
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
    """A key whose normals the kernel draws, and on a GPU its signs too."""

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
        if kind == "sign" and torch.device(device).type == "cpu":
            return super().numbers(kind, sample, place, size, dtype, device)
        words = counter_key(self, sample, place)
        drawn = self.kernel.normals(words, int(self.step), size)
        # A graph on a GPU must not capture PyTorch's generators: signs are those of normals there.
        return (drawn if kind == "normal" else torch.where(drawn < 0.0, -1.0, 1.0)).to(dtype)


def _views(layout: ParameterLayout, vector: Tensor) -> dict[str, Tensor]:
    parts = layout.unflatten(vector.detach())
    return {name: part.detach().requires_grad_() for name, part in parts.items()}


def _is_same(one: Tensor, two: Tensor) -> bool:
    """Return whether all bits are equal, those of NaN too."""
    return torch.equal(one.view(torch.uint8), two.view(torch.uint8))


def gather(flat: Tensor, starts: Sequence[int], parts: Gradients) -> None:
    """Write the gradients of the parameters into one vector; None stands for zeros."""
    for (start, stop), part in zip(pairwise(starts), parts, strict=True):
        if part is None:
            flat[start:stop].zero_()
        else:
            flat[start:stop].copy_(part.reshape(-1))


def _part(nll: Tensor, weight: float, count: int) -> Tensor:
    """A process's part of the nll, of one of several weight samples."""
    if weight != 1.0:
        return nll * (weight / count)
    return nll if count == 1 else nll / count


def _taken(leaves: dict[str, Tensor]) -> list[Tensor | None]:
    gradients = [leaf.grad for leaf in leaves.values()]
    for leaf in leaves.values():
        # The next backward pass then hands its tensor over, and adds nothing.
        leaf.grad = None
    return gradients
