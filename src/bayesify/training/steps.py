"""Which step ``fit`` takes, and the one by autograd that any objective and optimiser can take."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor
from torch.optim import Optimizer

from bayesify.elbo import ELBO
from bayesify.fused import (
    CompilerError,
    DirectStep,
    EditedInPlaceError,
    FusedStep,
    GraphedStep,
    StepValues,
    TrainingStep,
    why_no_closed_forms,
    why_not_fused,
)
from bayesify.fused.support import leaf_kind
from bayesify.inputs import Inputs
from bayesify.posteriors import MeanFieldGaussian
from bayesify.stateless import snapshot
from bayesify.training.convergence import std_residual

__all__ = ["NOISES", "AutogradStep", "StepKind", "check_step", "make_step"]

StepKind = Literal["auto", "plain", "fused"]

#: What the noise of a run was made by; a run goes on with the same.
NOISES = ("generator", "counter")


def check_step(step: str) -> None:
    """Raise ValueError for an unknown kind of step."""
    if step not in get_args(StepKind):
        raise ValueError(f'step must be "auto", "plain" or "fused", got {step!r}')


def make_step(
    elbo: ELBO, optimizer: Optimizer, step: StepKind, *, noise: str | None = None
) -> TrainingStep:
    """The step that was asked for, or with ``"auto"`` the fastest that there is.

    Args:
        elbo: the objective.
        optimizer: what moves its parameters.
        step: ``"fused"``, ``"plain"``, or ``"auto"`` for the fused one where it can be taken.
        noise: of the run that goes on, one of ``NOISES``; None for a new one.

    Raises:
        ValueError: ``step`` is unknown, or ``"fused"`` cannot be taken; or it does not go with
            the noise of the run.
        CompilerError: ``"fused"`` needs a compiler, and there is none.
    """
    check_step(step)
    elbo.bnn.perturbation.check_num_samples(elbo.num_samples)
    if noise is not None and step != "auto" and noise != _NOISE_OF[step]:
        raise ValueError(
            f'this run was begun with step="{_STEP_OF[noise]}", whose noise is another; go on '
            f'with that or with step="auto", got step="{step}"'
        )
    wanted = step if noise is None else _STEP_OF[noise]
    if wanted == "plain":
        return _plain_step(elbo, optimizer)
    reason = why_not_fused(elbo, optimizer)
    if reason is not None and wanted == "fused":
        mend = 'use step="auto"'
        if noise is not None:
            mend = "with which this run was begun: go on as it was, or begin anew in another folder"
        raise ValueError(f'step="fused" cannot be taken: {reason}; {mend}')
    if reason is None:
        try:
            return _Guarded(_fused_step(elbo, optimizer), elbo, optimizer, insist=step == "fused")
        except CompilerError as error:
            if noise is not None:  # the same numbers, slowly
                return FusedStep(elbo, optimizer, compiled=False)
            if wanted == "fused":
                raise
            reason = str(error)
    made = _plain_step(elbo, optimizer)
    if not made.description.endswith(f"({reason})"):
        made.description += f"; not fused: {reason}"
    return made


class AutogradStep:
    """The objective as it stands, its gradients by autograd, and any optimiser.

    Args:
        elbo: the objective.
        optimizer: what moves its parameters.
        why: what stands against a faster step.
    """

    noise = "generator"

    def __init__(self, elbo: ELBO, optimizer: Optimizer, why: str) -> None:
        self._elbo, self._optimizer = elbo, optimizer
        self.description = f"plain, gradients by autograd ({why})"

    def evaluate(
        self,
        inputs: Inputs,
        targets: Tensor,
        *,
        batch_index: int,
        kl_scale: float,
        values: bool,  # noqa: ARG002
    ) -> StepValues:
        """See ``TrainingStep.evaluate``."""
        elbo = self._elbo
        terms = elbo(inputs, targets, batch_index=batch_index, kl_scale=kl_scale)
        self._loss = terms.loss
        factor = elbo.kl_factor(terms.outputs.shape[1], batch_index=batch_index, kl_scale=kl_scale)
        complexity = terms.kl.detach(), terms.penalty.detach()
        return StepValues(terms.nll.detach(), terms.outputs, factor, complexity)

    def update(self, *, residual: bool) -> float | None:
        """See ``TrainingStep.update``."""
        self._optimizer.zero_grad(set_to_none=True)
        self._loss.backward()
        posterior, found = self._elbo.bnn.posterior, None
        if residual and isinstance(posterior, MeanFieldGaussian):
            found = std_residual(posterior, 1.0)  # before rho is moved
        self._optimizer.step()
        return found


class _Guarded:
    """A step on leaves that gives way to autograd where the first pass edits its weights."""

    def __init__(
        self, step: TrainingStep, elbo: ELBO, optimizer: Optimizer, *, insist: bool
    ) -> None:
        self._step, self._elbo, self._optimizer = step, elbo, optimizer
        self._sure = insist
        self.description, self.noise = step.description, step.noise

    def evaluate(
        self, inputs: Inputs, targets: Tensor, *, batch_index: int, kl_scale: float, values: bool
    ) -> StepValues:
        undo = None if self._sure else snapshot(self._elbo.bnn.net)
        try:
            return self._step.evaluate(
                inputs, targets, batch_index=batch_index, kl_scale=kl_scale, values=values
            )
        except EditedInPlaceError:
            if undo is None:
                raise
            undo()
            why = "the network edits its weights in place"
            self._step = AutogradStep(self._elbo, self._optimizer, why)
            self.description, self.noise = self._step.description, self._step.noise
        finally:
            self._sure = True
        return self._step.evaluate(
            inputs, targets, batch_index=batch_index, kl_scale=kl_scale, values=values
        )

    def update(self, *, residual: bool) -> float | None:
        return self._step.update(residual=residual)


_STEP_OF = {"generator": "plain", "counter": "fused"}
_NOISE_OF = {step: noise for noise, step in _STEP_OF.items()}


def _plain_step(elbo: ELBO, optimizer: Optimizer) -> TrainingStep:
    reason = why_no_closed_forms(elbo)
    if reason is not None:
        return AutogradStep(elbo, optimizer, reason)
    return _Guarded(DirectStep(elbo, optimizer), elbo, optimizer, insist=False)


def _fused_step(elbo: ELBO, optimizer: Optimizer) -> TrainingStep:
    fused = FusedStep(elbo, optimizer)
    # Noise of PyTorch's generators cannot be captured: each replay would have the same.
    on_gpu = elbo.bnn.posterior.mean.device.type == "cuda"
    graphed = on_gpu and leaf_kind(elbo) == "weights" and fused.can_be_captured
    return GraphedStep(fused) if graphed else fused
