"""The specification of a training step: the ELBO, its gradients by autograd, any optimiser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.module.inputs import Inputs
from bayesify.training.accumulation import Accumulation
from bayesify.training.backends.backend import Noise, StepOptions, require_finite
from bayesify.training.convergence import std_residual
from bayesify.training.division import Share
from bayesify.training.elbo import ELBO, ELBOTerms, check_place, fused_as
from bayesify.training.processes import Processes

__all__ = ["AutogradBackend"]


class AutogradBackend:
    """Call the objective, ``loss.backward()`` and ``optimizer.step()``.

    Args:
        elbo: any objective.
        optimizer: any optimiser of its parameters.
        reason: why no faster backend was chosen, for the description.
        fused: whether the objective may use its kernel, whose noise is the counter-based
            generator's.
        processes: those that train together; None is this one alone.
        accumulation: which minibatches share a step of the optimiser; None is one for each.

    Example:
        >>> import torch
        >>> from bayesify.module.bayesian import BayesianModule
        >>> elbo = ELBO(BayesianModule(torch.nn.Linear(3, 2)), num_data=10)
        >>> backend = AutogradBackend(elbo, torch.optim.SGD(elbo.parameters(), lr=0.1))
        >>> x, y = torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)
        >>> terms = backend.step(x, y, StepOptions(batch_index=0))
        >>> terms.nll.requires_grad, elbo.step
        (False, 1)
    """

    noise: Noise

    def __init__(
        self,
        elbo: ELBO,
        optimizer: Optimizer,
        reason: str = "",
        *,
        fused: bool = False,
        processes: Processes | None = None,
        accumulation: Accumulation | None = None,
    ) -> None:
        self._elbo, self._optimizer, self._fused = elbo, optimizer, fused
        self._accumulation = Accumulation() if accumulation is None else accumulation
        self._processes = Processes.alone() if processes is None else processes
        self.noise = "counter" if fused else "generator"
        name = "fused objective" if fused else "autograd"
        self.description = f"{name} ({reason})" if reason else name

    @property
    def unread(self) -> Sequence[str]:
        """None, since the gradient of the KL hides which they are."""
        return ()

    def step(self, inputs: Inputs, targets: Tensor, options: StepOptions) -> ELBOTerms:
        """Make one step; see ``Backend.step``. The value of the KL is always computed.

        Of minibatches that share a step of the optimiser, the last makes it, with the mean of
        their gradients.
        """
        batch_index, kl_scale, share = options.batch_index, options.kl_scale, options.share
        check_place(batch_index, kl_scale)
        elbo, processes, accumulation = self._elbo, self._processes, self._accumulation
        batch = batch_index or 0
        begins, part = accumulation.begins(batch), 1.0 / accumulation.size(batch)
        ends = accumulation.ends(batch)
        place: dict[str, Any] = {"batch_index": batch_index, "kl_scale": kl_scale}
        if share is not None and elbo.kl_weighting == "geometric":
            place["batch_size"] = share.batch_size
        with fused_as(elbo, self._fused):
            terms: ELBOTerms = elbo(inputs, targets, **place)
        if processes.is_alone:
            require_finite(elbo, terms)
            self._backward(terms.loss, part, begins=begins)
        else:
            terms = self._add_up(terms, share, part, begins=begins, ends=ends)
        posterior, residual = elbo.bnn.posterior, None
        if ends:
            if options.with_residual and isinstance(posterior, MeanFieldGaussian):
                residual = std_residual(posterior)  # before the optimiser changes rho
            with fused_as(elbo, self._fused):
                self._optimizer.step()
        loss, nll, kl, penalty = (value.detach() for value in terms[:4])
        factor = terms.kl_factor
        if math.isnan(factor):  # a compiled objective
            batch_size = terms.outputs.shape[1] if share is None else share.batch_size
            factor = elbo.kl_factor(batch_size, batch_index=batch_index, kl_scale=kl_scale)
        return ELBOTerms(loss, nll, kl, penalty, terms.outputs, factor, residual)

    def _backward(self, loss: Tensor, part: float, *, begins: bool) -> None:
        """Add a part of the gradients of a loss to those of the minibatches before it."""
        if begins:
            self._optimizer.zero_grad(set_to_none=True)
        (loss if part == 1.0 else part * loss).backward()

    def _add_up(
        self, terms: ELBOTerms, share: Share | None, of_step: float, *, begins: bool, ends: bool
    ) -> ELBOTerms:
        """Compute the gradients of all processes' losses; return the terms of all.

        They are exchanged once a step of the optimiser.
        """
        elbo, processes = self._elbo, self._processes
        part = 1.0 / processes.count
        weight = part if share is None else share.weight
        nll = weight * terms.nll
        loss = nll + part * (terms.loss - terms.nll)
        pending = processes.begin_sums([loss, nll, part * terms.kl, part * terms.penalty])
        self._backward(loss, of_step, begins=begins)
        loss, nll, kl, penalty = pending.result().to(terms.nll).unbind()
        terms = terms._replace(loss=loss, nll=nll, kl=kl, penalty=penalty)
        require_finite(elbo, terms)
        if ends:
            held = [each for group in self._optimizer.param_groups for each in group["params"]]
            processes.add_up_gradients(held)
        return terms
