"""What a step of training says of its minibatch."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from bayesify.inputs import Inputs

__all__ = ["StepValues", "TrainingStep"]


class StepValues(NamedTuple):
    """The parts of a minibatch's loss, ``nll + factor * (kl + penalty)``, cut from the graph."""

    #: Averaged over minibatch and weight samples, in nats.
    nll: Tensor
    #: Shape (S, B_i, ...).
    outputs: Tensor
    #: What multiplies KL and penalty.
    factor: float
    #: KL and penalty in nats, where they were asked for or cost nothing more.
    complexity: tuple[Tensor, Tensor] | None


class TrainingStep(Protocol):
    """One step: first what the minibatch says, then the parameters are moved."""

    #: What kind of step this is, for whoever watches.
    description: str
    #: What makes its noise: "generator" (PyTorch's) or "counter"; a run goes on with the same.
    noise: str

    def evaluate(
        self, inputs: Inputs, targets: Tensor, *, batch_index: int, kl_scale: float, values: bool
    ) -> StepValues:
        """The forward pass.

        Args:
            inputs: of the minibatch.
            targets: shape (B_i, ...).
            batch_index: the minibatch's place in the epoch.
            kl_scale: a further factor on the KL, for its warm-up.
            values: whether the value of the KL is asked for; its gradient does not need it.
        """

    def update(self, *, residual: bool) -> float | None:
        """The backward pass and the optimiser.

        Args:
            residual: whether the result is asked for.

        Returns:
            The derivative of the loss in log std, averaged over the weights, in nats per datum;
            None where there is none.
        """
