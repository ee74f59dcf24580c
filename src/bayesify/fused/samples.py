"""The weight samples of a step, one after the other: the memory of one, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from bayesify.elbo import ELBO
from bayesify.fused.formulas import prior_form
from bayesify.fused.leaves import Leaves
from bayesify.fused.support import leaf_kind
from bayesify.fused.values import StepValues
from bayesify.inputs import Inputs
from bayesify.posteriors import WeightDraw

__all__ = ["SamplePasses", "SampledStep", "Source", "judge", "num_passes", "sources"]


class Source(NamedTuple):
    """Whose noise a weight sample has.

    ``opposite`` is whether it has the negative of that, as every second of antithetic pairs.
    """

    sample: int
    opposite: bool


class SampledStep(Protocol):
    """What a step does between the passes of its weight samples."""

    def forget_gradients(self) -> None:
        """Before a backward pass."""

    def accumulate(self, in_mean: Sequence[Tensor | None], sample: int, factor: float) -> None:
        """Keep what a sample's backward pass said, and have the leaf ready for the next one."""

    def draw(self, sample: int) -> WeightDraw | None:
        """The weights that the leaf holds, shape (1, D), or None where it holds none."""


def num_passes(elbo: ELBO) -> int:
    """How many weight vectors a step runs the network on.

    Raises:
        ValueError: pairs are asked of an odd number of samples.
    """
    elbo.bnn.perturbation.check_num_samples(elbo.num_samples)
    return elbo.num_samples if leaf_kind(elbo) == "weights" else 1


def sources(elbo: ELBO) -> list[Source]:
    """The noise of each weight sample of a step, as ``WeightSampling`` has it.

    Example:
        >>> from bayesify import BayesianModule, WeightSampling
        >>> pairs = WeightSampling(antithetic=True)
        >>> bnn = BayesianModule(torch.nn.Linear(3, 2), perturbation=pairs)
        >>> [tuple(source) for source in sources(ELBO(bnn, num_data=1, num_samples=4))]
        [(0, False), (0, True), (2, False), (2, True)]
    """
    if not (leaf_kind(elbo) == "weights" and elbo.bnn.perturbation.antithetic):
        return [Source(sample, opposite=False) for sample in range(num_passes(elbo))]
    return [Source(k - k % 2, opposite=k % 2 == 1) for k in range(num_passes(elbo))]


def judge(
    elbo: ELBO,
    outputs: Tensor,
    targets: Tensor,
    *,
    batch_index: int,
    kl_scale: float,
    draw: Callable[[], WeightDraw | None] | None,
) -> tuple[Tensor, StepValues]:
    """The nll of outputs (S, B_i, ...) with its graph, and what a step says of them.

    Args:
        elbo: the objective, whose step is not counted.
        outputs: with their graph.
        targets: shape (B_i, ...).
        batch_index: see ``TrainingStep.evaluate``.
        kl_scale: likewise.
        draw: gives the weights that the KL is estimated at; None where its value is not asked for.
    """
    nll = elbo.nll(outputs, targets)
    factor = elbo.kl_factor(outputs.shape[1], batch_index=batch_index, kl_scale=kl_scale)
    complexity = None
    if draw is not None:
        with torch.no_grad():
            complexity = elbo.complexity(draw(), elbo.step, range(elbo.num_samples))
    return nll, StepValues(nll.detach(), outputs.detach(), factor, complexity)


class SamplePasses:
    """The passes of a step: forward and backward for each weight sample, but for the last backward.

    What the objective has of all samples at once follows one after the other: its outputs, the
    buffers that a pass changes, the random numbers of dropout. A sample's graph is gone before
    the next is begun.

    Args:
        elbo: the objective.
        leaves: the network.
        step: whose passes they are.
        optimizer: whose other parameters have gradients that are summed over the samples.
    """

    def __init__(self, elbo: ELBO, leaves: Leaves, step: SampledStep, optimizer: Optimizer) -> None:
        form = prior_form(elbo.bnn.weight_prior, elbo.kl)
        assert form is not None
        self._elbo, self._leaves, self._step, self._optimizer = elbo, leaves, step, optimizer
        self._exact, self._count = form.exact, num_passes(elbo)

    def forward(
        self, inputs: Inputs, targets: Tensor, *, batch_index: int, kl_scale: float, values: bool
    ) -> StepValues:
        """All passes but the last backward one, for which see :meth:`backward`.

        The arguments are those of ``TrainingStep.evaluate``.
        """
        elbo, last = self._elbo, self._count - 1
        self._others = self._also_trained() if last else []
        self._gradients: list[Tensor | None] = [None] * len(self._others)
        found: list[StepValues] = []
        for sample in range(self._count):
            if sample:  # under autocast, the casts of the sample before
                torch.clear_autocast_cache()
            # An exact KL is no average: once is enough.
            wanted = values and (sample == last or not self._exact)
            nll, said = judge(
                elbo,
                self._leaves.outputs(inputs),
                targets,
                batch_index=batch_index,
                kl_scale=kl_scale,
                draw=partial(self._step.draw, sample) if wanted else None,
            )
            self._nll = nll if last == 0 else nll / self._count
            found.append(said)
            if sample < last:
                self._step.accumulate(self.backward()[0], sample, said.factor)
                self._gradients = [parameter.grad for parameter in self._others]
                for parameter in self._others:
                    parameter.grad = None
        elbo.count_step()
        return found[0] if last == 0 else _averaged(found)

    def backward(self) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
        """The last sample's backward pass, and the gradients in the leaves."""
        # Not before the forward pass: a network may leave gradients of its own.
        self._step.forget_gradients()
        for parameter, gradient in zip(self._others, self._gradients, strict=True):
            parameter.grad = gradient
        self._leaves.backward(self._nll)
        return self._leaves.take_gradients()

    def _also_trained(self) -> list[Tensor]:
        q = self._elbo.bnn.posterior
        own = (q.mean, getattr(q, "rho", None))
        held = [each for group in self._optimizer.param_groups for each in group["params"]]
        return [each for each in held if not any(each is one for one in own)]


def _averaged(found: Sequence[StepValues]) -> StepValues:
    """What a step says, of what it says of each of its samples."""
    parts = [said.complexity for said in found if said.complexity is not None]
    complexity = None
    if parts:
        kl, penalty = (torch.stack(each).mean() for each in zip(*parts, strict=True))
        complexity = kl, penalty
    return StepValues(
        torch.stack([said.nll for said in found]).mean(),
        torch.cat([said.outputs for said in found]),
        found[0].factor,
        complexity,
    )
