"""The choice of a backend: the one that was asked for, or the fastest that supports the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from torch import Tensor
from torch.optim import Optimizer

from bayesify.estimators.network_state import snapshot
from bayesify.module.inputs import Inputs
from bayesify.noise.keys import saved_generators
from bayesify.training.accumulation import Accumulation
from bayesify.training.backends.autograd import AutogradBackend
from bayesify.training.backends.backend import (
    NOT_COMPILED,
    Backend,
    BackendName,
    Noise,
    StepOptions,
    check_same_noise,
)
from bayesify.training.backends.closed_form import ClosedFormBackend
from bayesify.training.backends.compiled import CompiledBackend
from bayesify.training.backends.graph import GraphBackend
from bayesify.training.backends.leaf import LeafBackend
from bayesify.training.backends.leaves import EditedInPlaceError
from bayesify.training.backends.requirements import (
    UnsupportedRunError,
    require,
    why_no_closed_forms,
    why_not_compiled,
    why_own_code,
)
from bayesify.training.elbo import ELBO, ELBOTerms
from bayesify.training.ivon import IVON
from bayesify.training.kernel.compiler import CompilerError
from bayesify.training.kernel.formulas import leaf_kind, prior_blocks
from bayesify.training.processes import Processes

__all__ = ["check_backend", "check_shared_noise", "make_backend"]

#: Why a network that edits its weights in place cannot be trained, as in EditedInPlaceError.
_NO_KERNEL = "where no C++ kernel samples them; begin a run on a CPU with a C++ compiler"


def check_backend(backend: str) -> None:
    """Raise ValueError for an unknown backend."""
    if backend not in get_args(BackendName):
        known = ", ".join(f'"{name}"' for name in get_args(BackendName))
        raise ValueError(f"backend must be one of {known}, got {backend!r}")


def make_backend(
    elbo: ELBO,
    optimizer: Optimizer,
    backend: BackendName = "auto",
    *,
    noise: Noise | None = None,
    processes: Processes | None = None,
    accumulation: Accumulation | None = None,
) -> Backend:
    """The backend that was asked for, or with ``"auto"`` the fastest that supports the run.

    Args:
        elbo: the objective.
        optimizer: the optimiser of its parameters.
        backend: ``"compiled"``, ``"closed-form"``, ``"autograd"``, or ``"auto"``.
        noise: of the run that is resumed; None for a new one.
        processes: those that train together; None is this one alone.
        accumulation: which minibatches share a step of the optimiser; None is one for each.

    Raises:
        ValueError: ``backend`` is unknown, does not support the run, or has another noise than
            the run that is resumed; or it cannot share its noise between processes.
        CompilerError: ``"compiled"`` needs a C++ compiler, and there is none.

    Example:
        >>> import torch
        >>> from bayesify.module.bayesian import BayesianModule
        >>> elbo = ELBO(BayesianModule(torch.nn.Linear(3, 2)), num_data=1)
        >>> make_backend(elbo, torch.optim.AdamW(elbo.parameters())).description
        'fused objective (the optimizer is AdamW)'
    """
    check_backend(backend)
    processes = Processes.alone() if processes is None else processes
    if isinstance(optimizer, IVON):
        optimizer.check(elbo)
    accumulates = accumulation is not None and accumulation.every > 1
    if processes.shared_noise:
        check_shared_noise(elbo, "autograd" if accumulates else backend)
    elbo.bnn.estimator.check_num_samples(elbo.num_samples)
    check_same_noise(backend, noise)
    if backend == "autograd":
        return AutogradBackend(elbo, optimizer, processes=processes, accumulation=accumulation)
    if accumulates:
        shared = "several minibatches share a step"
        if backend != "auto":
            require(backend, shared)
        fused = noise != "generator" and _has_fused_objective(elbo)
        return AutogradBackend(
            elbo, optimizer, shared, fused=fused, processes=processes, accumulation=accumulation
        )
    if backend == "closed-form":
        return _closed_form(elbo, optimizer, processes, noise, insist=True)
    if noise == "generator":
        return _closed_form(elbo, optimizer, processes, noise, insist=False)
    insist = backend == "compiled"
    reason = why_not_compiled(elbo, optimizer)
    fits = not insist and not processes.shared_noise
    begun = noise == "counter" and _keeps_noise(elbo)
    if reason is not None and fits and (begun or _has_fused_objective(elbo)):
        return AutogradBackend(elbo, optimizer, reason, fused=True, processes=processes)
    if reason is not None and noise == "counter":
        raise ValueError(
            f"this run began with the compiled backend, which no longer supports it: {reason}; "
            "resume with the settings that it had, or begin anew in another folder"
        )
    if insist:
        require("compiled", reason)
    if reason is None:
        try:
            compiled = _compiled(elbo, optimizer, processes)
            return (
                compiled if insist else _WithFallback(compiled, elbo, optimizer, processes, noise)
            )
        except CompilerError as error:
            if noise is not None:  # the same numbers, slowly
                return CompiledBackend(elbo, optimizer, compiled=False, processes=processes)
            if insist:
                raise
            reason = str(error)
    made = _closed_form(elbo, optimizer, processes, noise, insist=False)
    if reason != why_no_closed_forms(elbo):
        made.description += f"; {NOT_COMPILED} {reason}"
    return made


def _has_fused_objective(elbo: ELBO) -> bool:
    return why_no_closed_forms(elbo) is None and elbo.uses_kernel()


def _keeps_noise(elbo: ELBO) -> bool:
    """Return whether the fused objective can go on with a run of the compiled backend."""
    return why_own_code(elbo) is None and elbo.uses_kernel()


def check_shared_noise(elbo: ELBO, backend: str) -> None:
    """Raise ValueError where several processes cannot draw the same weights and save by it."""
    reason = why_no_closed_forms(elbo)
    if backend == "autograd":
        reason = 'backend="autograd" adds up the gradients in mean and rho'
    elif leaf_kind(elbo.bnn.estimator) != "weights":
        reason = f"{type(elbo.bnn.estimator).__name__} has noise for each example"
    if reason is not None:
        raise ValueError(
            f"shared_noise needs weight sampling by the compiled or closed-form backend: {reason}; "
            "leave it out"
        )


def _compiled(elbo: ELBO, optimizer: Optimizer, processes: Processes) -> LeafBackend:
    on_gpu = elbo.bnn.posterior.mean.device.type == "cuda"
    if on_gpu and elbo.num_samples == 1 and processes.is_alone:
        return GraphBackend(elbo, optimizer)
    return CompiledBackend(elbo, optimizer, processes=processes)


def _closed_form(
    elbo: ELBO,
    optimizer: Optimizer,
    processes: Processes,
    noise: Noise | None,
    *,
    insist: bool,
) -> Backend:
    reason = why_no_closed_forms(elbo)
    if insist:
        require("closed-form", reason)
    if reason is not None:
        return AutogradBackend(elbo, optimizer, reason, processes=processes)
    made = ClosedFormBackend(elbo, optimizer, processes=processes)
    return made if insist else _WithFallback(made, elbo, optimizer, processes, noise)


class _WithFallback:
    """A backend on leaves that is replaced where it does not support the run after all.

    The reason is a first pass that edits its weights in place, or a change between steps. The fused
    objective replaces the compiled backend, since it has the same noise.
    """

    def __init__(
        self,
        backend: LeafBackend,
        elbo: ELBO,
        optimizer: Optimizer,
        processes: Processes,
        noise: Noise | None,
    ) -> None:
        self._backend: Backend = backend
        self._elbo, self._optimizer, self._processes = elbo, optimizer, processes
        self._first, self._edits, self._began_with = True, False, noise
        self.noise = backend.noise

    @property
    def description(self) -> str:
        """The description of the backend in use, which may add to it or be replaced."""
        return self._backend.description

    @description.setter
    def description(self, text: str) -> None:
        self._backend.description = text

    @property
    def unread(self) -> Sequence[str]:
        """The unread parameters that the backend in use has found."""
        return self._backend.unread

    def step(self, inputs: Inputs, targets: Tensor, options: StepOptions) -> ELBOTerms:
        """Make one step; see ``Backend.step``."""
        undo = (snapshot(self._elbo.bnn.net), saved_generators()) if self._first else None
        self._first = False
        while True:
            try:
                return self._backend.step(inputs, targets, options)
            except UnsupportedRunError as error:
                self._choose_anew(error)
            except EditedInPlaceError as error:
                if self._processes.shared_noise:
                    raise ValueError(
                        "shared_noise needs a network that does not edit its weights in place; "
                        "leave it out"
                    ) from None
                if undo is None:
                    why = "in a later step than the first; do so from the first step on"
                    raise EditedInPlaceError(why) from error
                for restore in undo:
                    restore()
                self._replace(error)
            except RuntimeError as error:
                if not self._edits or "modified inplace" not in str(error):
                    raise
                raise EditedInPlaceError(_NO_KERNEL) from error

    def _choose_anew(self, error: UnsupportedRunError) -> None:
        """Choose a backend, with the same noise, for a run that was changed between steps."""
        elbo, optimizer, processes = self._elbo, self._optimizer, self._processes
        reason = why_not_compiled(elbo, optimizer) or str(error)
        if self.noise == "generator":
            self._backend = make_backend(elbo, optimizer, noise="generator", processes=processes)
            return
        fused = _keeps_noise(elbo) and not processes.shared_noise
        # Adam allocates what amsgrad needs in its first step only.
        if not fused or "amsgrad" in reason:
            raise ValueError(
                f"the run cannot go on after this change between its steps: {reason}; undo the "
                "change, or begin a run with it"
            ) from error
        self._backend = AutogradBackend(elbo, optimizer, reason, fused=True, processes=processes)

    def _replace(self, error: EditedInPlaceError) -> None:
        """Have autograd compute the gradients of a network that edits its weights in place."""
        elbo, noise = self._elbo, self._began_with
        fused = noise != "generator" and _has_fused_objective(elbo)
        prior = prior_blocks(elbo.bnn.weight_prior, elbo.kl)
        # PyTorch's operations would estimate the KL at the edited weights.
        if not fused and (noise == "counter" or prior is None or not prior.exact):
            raise EditedInPlaceError(_NO_KERNEL) from error
        reason = "the network edits its weights in place"
        self._backend = AutogradBackend(
            elbo, self._optimizer, reason, fused=fused, processes=self._processes
        )
        self._edits, self.noise = True, self._backend.noise
