"""The fused step: the network by autograd, and all else in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from bayesify.elbo import ELBO
from bayesify.fused.leaves import Leaves
from bayesify.fused.samples import SamplePasses, num_passes
from bayesify.fused.support import leaf_kind, refuse, signature, why_not_fused
from bayesify.fused.trainee import Trainee
from bayesify.fused.values import StepValues
from bayesify.inputs import Inputs

__all__ = ["FusedStep"]


class FusedStep:
    """A step of training in two parts: the network's passes, and one kernel for all the rest.

    The kernel goes over the weights once: it turns the network's gradients into those of mean and
    rho, moves both as the optimiser would (its state is the optimiser's own), and leaves behind
    the weights of the next step. Of several weight samples each but the last has its gradients
    added up by the kernel, which then leaves behind the next sample. Noise comes from a
    counter-based generator, so that its numbers are others than the objective's own.

    Args:
        elbo: the objective.
        optimizer: what moves the parameters; ``why_not_fused`` has nothing against the two.
        compiled: False for the same numbers without a compiler, at many times the price.

    Raises:
        CompilerError: the kernel cannot be compiled here.
    """

    noise = "counter"

    def __init__(self, elbo: ELBO, optimizer: Optimizer, *, compiled: bool = True) -> None:
        self._elbo, self._optimizer, self._compiled = elbo, optimizer, compiled
        self._make()

    def _make(self) -> None:
        elbo, optimizer = self._elbo, self._optimizer
        refuse(why_not_fused(elbo, optimizer))
        leaf = torch.empty_like(elbo.bnn.posterior.mean.detach())
        self._trainee = Trainee(elbo, optimizer, leaf, compiled=self._compiled)
        self._leaves = Leaves(elbo, leaf, leaf_kind(elbo), self._trainee.kernel_on_cpu)
        self._passes = SamplePasses(elbo, self._leaves, self._trainee, optimizer)
        self.description = f"fused ({self._trainee.description})"
        self._made_for = signature(elbo, optimizer)

    def evaluate(
        self, inputs: Inputs, targets: Tensor, *, batch_index: int, kl_scale: float, values: bool
    ) -> StepValues:
        """See ``TrainingStep.evaluate``."""
        self.keep_up()
        self._trainee.begin()
        said = self._passes.forward(
            inputs, targets, batch_index=batch_index, kl_scale=kl_scale, values=values
        )
        self._factor = said.factor
        return said

    @property
    def can_be_captured(self) -> bool:
        """Whether :meth:`run_on_device` takes the step: of several weight samples it does not."""
        return num_passes(self._elbo) == 1

    def keep_up(self) -> None:
        """Begin anew where the objective or the optimiser was changed since the last step.

        Raises:
            ValueError: they no longer go with a fused step.
        """
        if self._made_for != signature(self._elbo, self._optimizer):
            self._make()

    def update(self, *, residual: bool) -> float | None:  # noqa: ARG002
        """See ``TrainingStep.update``."""
        return self._trainee.move(*self._passes.backward(), self._factor)

    def prepare(self, batch_size: int, *, batch_index: int, kl_scale: float) -> float:
        """Count a step that :meth:`run_on_device` takes; returns what multiplies the KL."""
        self.keep_up()
        return self._trainee.prepare(batch_size, batch_index=batch_index, kl_scale=kl_scale)

    def run_on_device(self, inputs: Inputs, targets: Tensor) -> tuple[Tensor, Tensor]:
        """A whole step with nothing asked of the processor: nll and outputs."""
        outputs = self._leaves.outputs(inputs)
        nll = self._trainee.elbo.nll(outputs, targets)
        self._trainee.forget_gradients()
        self._leaves.backward(nll)
        self._trainee.advance(*self._leaves.take_gradients())
        return nll.detach(), outputs.detach()

    def conclude(self, *, residual: bool) -> float | None:
        """After :meth:`run_on_device`: move what the kernel does not hold."""
        return self._trainee.conclude(residual=residual)
