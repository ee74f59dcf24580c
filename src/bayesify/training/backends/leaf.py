"""A training step whose graph ends at the sampled weights; subclasses sample and update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from bayesify.distributions.posteriors import WeightDraw
from bayesify.module.edited_inputs import Repeated
from bayesify.module.inputs import Inputs
from bayesify.training.backends.backend import Noise, StepOptions, require_finite
from bayesify.training.backends.leaves import Leaves, ParameterGradients, gather
from bayesify.training.convergence import StdResidual
from bayesify.training.elbo import ELBO, ELBOTerms, detached
from bayesify.training.kernel.formulas import leaf_kind, prior_blocks
from bayesify.training.processes import Processes

__all__ = ["LeafBackend", "SampleSource", "sample_sources"]

#: Steps after which a parameter without a gradient is one that no output depends on: fewer may all
#: have left out a layer that is dropped at random.
_ENOUGH_STEPS = 20


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
        self._unread, self._steps_seen = set(elbo.bnn.layout.names), 0
        self._prepare()

    @property
    def unread(self) -> Sequence[str]:
        """See ``Backend.unread``."""
        names = self._elbo.bnn.layout.names
        enough = self._steps_seen >= _ENOUGH_STEPS and self._processes.is_alone
        return [name for name in names if name in self._unread] if enough else ()

    def step(self, inputs: Inputs, targets: Tensor, options: StepOptions) -> ELBOTerms:
        """Make one step; see ``Backend.step``."""
        self._elbo.bnn.own_trained_parameters()
        self._keep_up()
        self._begin()
        elbo, count, processes = self._elbo, len(self._sources), self._processes
        batch_index, kl_scale, share = options.batch_index, options.kl_scale, options.share
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
            if options.with_kl and (last or not self._exact):  # an exact KL is no average
                values.append(self._complexity(sample))
            if not last:
                in_mean, _ = self._backward(_part(nll, weight, count), others, gradients)
                self._note_reads(in_mean)
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
        self._note_reads(found_gradients[0])
        self._steps_seen += 1
        in_mean, in_spread = self._summed(*found_gradients)
        residual = self._update(in_mean, in_spread, factor, with_residual=options.with_residual)
        return terms._replace(std_residual=residual)

    def _note_reads(self, in_mean: ParameterGradients) -> None:
        """Note which parameters the outputs of a pass depended on."""
        if self._unread:
            names = zip(self._elbo.bnn.layout.names, in_mean, strict=True)
            self._unread -= {name for name, gradient in names if gradient is not None}

    @property
    def _adds_leaf_gradients(self) -> bool:
        """Whether the processes add up the gradients in the leaves.

        Not where each has weights of its own: the one in rho depends on these.
        """
        if self._processes.is_alone:
            return False
        return self._processes.shared_noise or leaf_kind(self._elbo.bnn.estimator) != "weights"

    def _summed(self, *gradients: ParameterGradients) -> Sequence[ParameterGradients]:
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
    def _accumulate(self, in_mean: ParameterGradients, sample: int, factor: float) -> None:
        """Add the gradients of one sample, and fill the leaves for the next one."""

    @abstractmethod
    def _update(
        self,
        in_mean: ParameterGradients,
        in_spread: ParameterGradients,
        factor: float,
        *,
        with_residual: bool,
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
    ) -> tuple[ParameterGradients, ParameterGradients]:
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
            return ELBOTerms.without_kl(nll, joined, factor, self._unknown)
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


def _part(nll: Tensor, weight: float, count: int) -> Tensor:
    """A process's part of the nll, of one of several weight samples."""
    if weight != 1.0:
        return nll * (weight / count)
    return nll if count == 1 else nll / count
