"""The training step of ``fit``, for a loop of one's own."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from bayesify.module.inputs import Inputs, check_not_copied
from bayesify.module.threads import one_thread_if_small, rows_of
from bayesify.training.agreement import begin_together, check_alike
from bayesify.training.backends import BackendName, StepOptions, make_backend
from bayesify.training.checks import check_can_divide, check_gradients_are_on, check_objective
from bayesify.training.elbo import ELBO, ELBOTerms
from bayesify.training.optimizers import check_decay, check_holds, check_takes_steps
from bayesify.training.processes import Processes

__all__ = ["Step", "make_step"]


class Step(Protocol):
    """One training step: forward and backward pass, and the optimiser."""

    def __call__(
        self,
        inputs: Inputs,
        targets: Tensor,
        *,
        batch_index: int | None = None,
        kl_scale: float = 1.0,
        with_kl: bool = False,
    ) -> ELBOTerms:
        """Update the parameters by one minibatch.

        Args:
            inputs: as for ``BayesianModule.predict``, B_i examples.
            targets: shape (B_i, ...).
            batch_index: i - 1, the minibatch's place in the epoch, for geometric weights.
            kl_scale: a further factor on the KL, for its warm-up.
            with_kl: whether to compute the value of the KL too. Its gradient needs none; without
                it ``loss`` and ``kl`` are NaN.

        Returns:
            nll in nats per example, and the rest as from ``ELBO``, without a graph.

        Raises:
            NonFiniteLossError: the nll is NaN or infinite; nothing was updated.
            RuntimeError: gradients are switched off, as within ``torch.no_grad()``.
            ValueError: ``batch_index`` or ``kl_scale`` is out of its range, or a geometric weight
                lacks its index.
        """


def make_step(
    elbo: ELBO,
    optimizer: Optimizer,
    *,
    backend: BackendName = "auto",
    shared_noise: bool = False,
) -> Step:
    """Return the step that ``fit`` makes, for a loop of one's own.

    It replaces ``zero_grad``, the objective, ``backward`` and ``optimizer.step``, and reads and
    advances the optimiser's own state, so that schedulers and checkpoints work as ever. With Adam,
    SGD or IVON one kernel does all but the network's passes. It returns the nll and the outputs;
    ``loss`` and ``kl``, which no gradient needs, are NaN without ``with_kl=True``, see
    :class:`Step`.

    Under ``torch.distributed`` the processes begin with the first one's parameters. Each brings its
    part of the minibatch, all of one size, and the step adds up their gradients: leave
    ``DistributedDataParallel`` out. Buffers, as of batch normalisation, are each process's own.

    Args:
        elbo: the objective.
        optimizer: of its parameters.
        backend: see ``fit``.
        shared_noise: see ``fit``.

    Raises:
        TypeError: ``elbo`` is no ``ELBO``, or ``optimizer`` no optimiser, or one that needs a
            closure.
        ValueError: ``backend`` is unknown, or does not support this objective and optimiser; the
            optimiser holds no parameter of the objective, or has weight decay for rho; or the
            objective cannot be divided among several processes.
        CompilerError: ``"compiled"`` needs a C++ compiler, and there is none.

    Example:
        >>> from bayesify import BayesianModule
        >>> _ = torch.manual_seed(0)
        >>> elbo = ELBO(BayesianModule(torch.nn.Linear(3, 2)), num_data=10)
        >>> step = make_step(elbo, torch.optim.Adam(elbo.parameters(), lr=0.1))
        >>> x, y = torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)
        >>> nlls = [float(step(x, y).nll) for _ in range(50)]
        >>> nlls[-1] < nlls[0]
        True
    """
    check_objective(elbo, "make_step")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {optimizer!r}; make it from "
            "bayesify.parameter_groups(elbo)"
        )
    check_holds(elbo, optimizer)
    check_decay(elbo, optimizer)
    check_takes_steps(optimizer)
    check_can_divide(elbo)
    processes = Processes(shared_noise=shared_noise)
    begin_together(elbo, processes)
    made = make_backend(elbo, optimizer, backend, processes=processes)
    check_alike(elbo, optimizer, made, processes, {"step": elbo.step})

    def step(
        inputs: Inputs,
        targets: Tensor,
        *,
        batch_index: int | None = None,
        kl_scale: float = 1.0,
        with_kl: bool = False,
    ) -> ELBOTerms:
        check_gradients_are_on()
        if elbo.step == 0:
            check_not_copied(inputs, targets)
        torch.clear_autocast_cache()  # of casts of the parameters before the last update
        with one_thread_if_small(elbo.bnn, elbo.num_samples * rows_of(inputs)):
            return made.step(inputs, targets, StepOptions(batch_index, kl_scale, with_kl))

    return step
