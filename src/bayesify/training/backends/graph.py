"""The compiled backend on a GPU: a step is captured once as a CUDA graph, then launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from bayesify.module.inputs import Inputs
from bayesify.training.backends.backend import StepOptions, require_finite
from bayesify.training.backends.compiled import CompiledBackend
from bayesify.training.elbo import ELBO, ELBOTerms

__all__ = ["CudaRecorder", "GraphBackend", "Recorder"]

#: Ordinary steps before the capture: they allocate buffers and compile what is compiled.
_WARM_UP = 3


class Recorder(Protocol):
    """Run a function once and return a function that runs it again on the same memory."""

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record ``function``."""


class CudaRecorder:
    """A CUDA graph.

    Args:
        device: the GPU whose work is captured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """See :class:`Recorder`."""
        with torch.cuda.device(self._device):
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            try:
                with torch.cuda.graph(graph):
                    function()
            except RuntimeError:
                _leave_capture(stream)
                raise
        return graph.replay


def _leave_capture(stream: torch.cuda.Stream) -> None:
    """Undo what PyTorch leaves of a capture that failed.

    It stays on the stream of the capture, and takes the generator for one that is captured, so
    that every later use of it fails.
    """
    torch.cuda.set_stream(stream)
    torch.cuda.synchronize()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


def _shape_of(parts: Sequence[object], structure: TreeSpec) -> object:
    """What two minibatches share that one graph can take; None where a part is no tensor."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) < len(parts):
        return None
    return structure, [(part.shape, part.dtype) for part in tensors]


class GraphBackend(CompiledBackend):
    """Launch forward pass, backward pass and kernel as one graph.

    The first steps are ordinary ones; so is every step with several weight samples, every step that
    computes the value of the KL, and every minibatch of another shape, dtype or structure than the
    captured one, such as the last of an epoch, or with arguments that are no tensors. A captured
    graph always takes the same path: a network that branches on the data must not be captured.

    The returned terms are overwritten by the next step. Where the loss is not finite, the
    parameters have been updated by the time it is seen.

    Args:
        elbo: the objective, on a GPU.
        optimizer: see ``CompiledBackend``.
        record: captures the step; None is a CUDA graph.
        compiled: see ``CompiledBackend``.
    """

    def __init__(
        self,
        elbo: ELBO,
        optimizer: Optimizer,
        record: Recorder | None = None,
        *,
        compiled: bool = True,
    ) -> None:
        device = elbo.bnn.posterior.mean.device
        self._record = CudaRecorder(device) if record is None else record
        self._replay: Callable[[], None] | None
        self._shape: object = None
        self._failed = False
        super().__init__(elbo, optimizer, compiled=compiled)

    def step(self, inputs: Inputs, targets: Tensor, options: StepOptions) -> ELBOTerms:
        """Make one step; see ``Backend.step``."""
        self._keep_up()
        if self._trained != self._trained_now():
            self._prepare()
        parts, structure = tree_flatten((inputs, targets))
        shape = _shape_of(parts, structure)
        ready = self._ordinary_steps >= _WARM_UP and not options.with_kl and not self._failed
        ready = ready and len(self._sources) == 1 and shape is not None
        # The factor of a PAC-Bayes objective depends on the nll of its own step.
        ready = ready and not self._elbo.running
        if self._replay is None and ready:
            self._capture(parts, structure)
        if self._replay is None or not ready or shape != self._shape:
            self._ordinary_steps += 1
            return super().step(inputs, targets, options)
        for own, part in zip(self._parts, parts, strict=True):
            own.copy_(part, non_blocking=True)
        elbo, update = self._elbo, self._posterior_update
        factor = elbo.kl_factor(
            len(targets), batch_index=options.batch_index, kl_scale=options.kl_scale
        )
        update.prepare(factor)
        elbo.count_step()
        self._replay()
        terms = ELBOTerms.without_kl(self._nll, self._outputs, factor, self._unknown)
        require_finite(elbo, terms)
        return terms._replace(std_residual=update.conclude(with_residual=options.with_residual))

    def _prepare(self) -> None:
        super()._prepare()
        self._replay = None  # a captured graph reads and writes the vectors of before
        self._ordinary_steps, self._failed = 0, False
        self._trained = self._trained_now()
        self.description += ", as a graph"

    def _trained_now(self) -> list[bool]:
        """Which of the optimiser's other parameters are trained, as a captured graph has them."""
        return [each.requires_grad for each in self._other_parameters()]

    def _capture(self, parts: list[Tensor], structure: TreeSpec) -> None:
        # A minibatch may be a view of the data, which must not be written.
        self._parts = [part.clone() for part in parts]
        self._shape = _shape_of(parts, structure)
        inputs, targets = tree_unflatten(self._parts, structure)

        def passes() -> None:
            self._nll, self._outputs = self._run_on_device(inputs, targets)

        try:
            self._replay = self._record(passes)
        except RuntimeError as error:  # the network reads a value from the device
            self._failed = True
            # Where the capture ends with an error of its own, the first one says more.
            first = str(error.__context__ or error).splitlines()[0]
            self.description += f", but not captured: {first}"
