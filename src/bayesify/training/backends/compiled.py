"""The compiled backend: the network by autograd, and one kernel for all the rest."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from bayesify.distributions.posteriors import WeightDraw
from bayesify.module.inputs import Inputs
from bayesify.training.backends.backend import Noise
from bayesify.training.backends.leaf import LeafBackend
from bayesify.training.backends.leaves import Leaves, ParameterGradients
from bayesify.training.backends.requirements import (
    require,
    signature,
    why_not_compiled,
)
from bayesify.training.convergence import StdResidual
from bayesify.training.elbo import ELBO
from bayesify.training.kernel.formulas import leaf_kind
from bayesify.training.kernel.posterior_update import PosteriorUpdate
from bayesify.training.processes import Processes

__all__ = ["CompiledBackend"]


class CompiledBackend(LeafBackend):
    """Run the network and one kernel over the weights.

    The kernel goes over the weights once: it turns the network's gradients into those of mean and
    rho, updates both as the optimiser would (with the optimiser's own state), and writes the
    weights of the next step. Its noise comes from a counter-based generator, as that of the
    objective does where it runs by the kernel, and differs from that of ``fused=False``.

    Args:
        elbo: the objective.
        optimizer: Adam, SGD or IVON; ``why_not_compiled`` returns None for it.
        compiled: False for the same numbers without a compiler, many times slower.
        processes: those that train together; None is this one alone.

    Raises:
        ValueError: there is no kernel for this objective and optimiser.
        CompilerError: the kernel cannot be compiled on this machine.

    Example:
        >>> from bayesify.training.backends import StepOptions
        >>> from bayesify.module.bayesian import BayesianModule
        >>> elbo = ELBO(BayesianModule(torch.nn.Linear(3, 2)), num_data=10)
        >>> sgd = torch.optim.SGD(elbo.parameters(), lr=0.1)
        >>> backend = CompiledBackend(elbo, sgd, compiled=False)
        >>> x, y = torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)
        >>> terms = backend.step(x, y, StepOptions(batch_index=0))
        >>> backend.noise, elbo.step
        ('counter', 1)
    """

    noise: Noise = "counter"

    def __init__(
        self,
        elbo: ELBO,
        optimizer: Optimizer,
        *,
        compiled: bool = True,
        processes: Processes | None = None,
    ) -> None:
        self._compiled = compiled
        super().__init__(elbo, optimizer, processes=processes)

    def _prepare(self) -> None:
        elbo, optimizer = self._elbo, self._optimizer
        require("compiled", why_not_compiled(elbo, optimizer))
        leaf = torch.empty_like(elbo.bnn.posterior.mean.detach())
        # With weights of its own, a process adds up the gradients of all its samples.
        self._adds_own = not self._processes.is_alone and not self._adds_leaf_gradients
        update = self._posterior_update = PosteriorUpdate(
            elbo,
            optimizer,
            leaf,
            self._sources_of(),
            compiled=self._compiled,
            from_sums=self._adds_own,
        )
        first = self._processes.first_sample(elbo.num_samples)
        kind = leaf_kind(elbo.bnn.estimator)
        self._prepare_passes(Leaves(elbo, leaf, kind, update.kernel, first_sample=first))
        self.description = f"compiled ({update.description})"
        self._prepared_for = signature(elbo, optimizer)

    def _keep_up(self) -> None:
        if self._prepared_for != signature(self._elbo, self._optimizer):
            self._prepare()

    def _begin(self) -> None:
        self._posterior_update.begin()

    def _draw(self, sample: int) -> WeightDraw | None:
        return self._posterior_update.draw(sample)

    def _forget_gradients(self) -> None:
        self._posterior_update.forget_gradients()

    def _accumulate(self, in_mean: ParameterGradients, sample: int, factor: float) -> None:
        part = 1.0 / self._processes.count if self._adds_own else 1.0
        self._posterior_update.accumulate(in_mean, sample, factor * part)

    def _update(
        self,
        in_mean: ParameterGradients,
        in_spread: ParameterGradients,
        factor: float,
        *,
        with_residual: bool,
    ) -> StdResidual | None:
        if self._adds_own:
            self._accumulate(in_mean, len(self._sources) - 1, factor)
            self._processes.add_up([self._posterior_update.sums])
            in_mean = [None] * len(in_mean)
        return self._posterior_update.update(
            in_mean, in_spread, factor, with_residual=with_residual
        )

    def _run_on_device(self, inputs: Inputs, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Run a whole step without reading from the device: nll and outputs."""
        outputs = self._leaves.outputs(inputs)
        nll = self._elbo.nll(outputs, targets)
        self._posterior_update.forget_gradients()
        self._leaves.backward(nll)
        self._posterior_update.advance(*self._leaves.take_gradients())
        return nll.detach(), outputs.detach()
