"""The fused step on a GPU: captured once as a graph, so that a step is one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from bayesify.fused.step import FusedStep
from bayesify.fused.values import StepValues
from bayesify.inputs import Inputs

__all__ = ["CudaRecorder", "GraphedStep", "Recorder"]

#: Ordinary steps before the capture, which make buffers and compile what is compiled.
_WARM_UP = 3


class Recorder(Protocol):
    """Runs a function once and gives back what runs it again on the same memory."""

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record ``function``."""


class CudaRecorder:
    """A CUDA graph."""

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """See :class:`Recorder`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        return graph.replay


class GraphedStep:
    """A fused step whose passes and kernel are launched as one.

    The first steps are ordinary ones; so is every step of several weight samples, or that needs
    more than the gradients, or whose minibatch has another shape than the captured one, as the
    last of an epoch may have. The network must not choose its way by the data: a captured graph
    goes the same way always.

    Where the loss is not finite, the parameters have moved by the time that it is seen.

    Args:
        step: the step, on a GPU.
        record: captures it.
    """

    noise = "counter"

    def __init__(self, step: FusedStep, record: Recorder | None = None) -> None:
        self._step = step
        self._record = CudaRecorder() if record is None else record
        self._ordinary = 0
        self._replay: Callable[[], None] | None = None
        self._shapes: list[torch.Size] = []
        self._refused = False
        self._replayed = False
        self.description = f"{step.description}, as a graph"

    def evaluate(
        self, inputs: Inputs, targets: Tensor, *, batch_index: int, kl_scale: float, values: bool
    ) -> StepValues:
        """See ``TrainingStep.evaluate``; a captured step moves the parameters too."""
        parts, structure = tree_flatten((inputs, targets))
        shapes = [part.shape for part in parts]
        self._replayed = False
        ready = self._ordinary >= _WARM_UP and not values and not self._refused
        ready = ready and self._step.can_be_captured
        if self._replay is None and ready:
            self._capture(parts, structure)
        if self._replay is None or not ready or shapes != self._shapes:
            self._ordinary += 1
            return self._step.evaluate(
                inputs, targets, batch_index=batch_index, kl_scale=kl_scale, values=values
            )
        for own, part in zip(self._parts, parts, strict=True):
            own.copy_(part, non_blocking=True)
        factor = self._step.prepare(len(targets), batch_index=batch_index, kl_scale=kl_scale)
        self._replay()
        self._replayed = True
        return StepValues(self._nll, self._outputs, factor, None)

    def update(self, *, residual: bool) -> float | None:
        """See ``TrainingStep.update``."""
        if self._replayed:
            return self._step.conclude(residual=residual)
        return self._step.update(residual=residual)

    def _capture(self, parts: list[Tensor], structure: TreeSpec) -> None:
        # A minibatch may be a view of the data, which must not be written.
        self._parts = [part.clone() for part in parts]
        self._shapes = [part.shape for part in parts]
        inputs, targets = tree_unflatten(self._parts, structure)

        def passes() -> None:
            self._nll, self._outputs = self._step.run_on_device(inputs, targets)

        try:
            self._replay = self._record(passes)
        except RuntimeError as error:  # the network asks the processor for something
            self._refused = True
            self.description += f", but not captured: {str(error).splitlines()[0]}"
