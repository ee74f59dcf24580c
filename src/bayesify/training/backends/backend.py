"""The interface of every training backend, and the check that each step makes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from bayesify.module.inputs import Inputs
from bayesify.training.division import Share
from bayesify.training.elbo import ELBO, ELBOTerms

__all__ = [
    "NOISE_OF",
    "NOT_COMPILED",
    "Backend",
    "BackendName",
    "Noise",
    "NonFiniteLossError",
    "StepOptions",
    "check_same_noise",
    "require_finite",
]

BackendName = Literal["auto", "compiled", "closed-form", "autograd"]
#: The source of a run's noise: PyTorch's generators or the counter-based generator of the kernel.
Noise = Literal["generator", "counter"]
#: What precedes, in a description, the reason why a step is not compiled.
NOT_COMPILED = "not compiled:"
#: The noise of each backend but "auto".
NOISE_OF: dict[str, Noise] = {
    "compiled": "counter",
    "closed-form": "generator",
    "autograd": "generator",
}


def check_same_noise(backend: BackendName, noise: Noise | None) -> None:
    """Check that a run resumes with the noise that it began with.

    Args:
        backend: the backend that is asked for.
        noise: that of the steps so far, or None.

    Raises:
        ValueError: the backend has another.

    Example:
        >>> check_same_noise("auto", "counter")
    """
    if noise is not None and NOISE_OF.get(backend, noise) != noise:
        fitting = " or ".join(f'"{name}"' for name in NOISE_OF if NOISE_OF[name] == noise)
        raise ValueError(
            f"this run began with the noise of backend={fitting}; resume with that or with "
            f'backend="auto", got backend="{backend}"'
        )


class NonFiniteLossError(ArithmeticError):
    """The loss, or a parameter, became NaN or infinite; the last checkpoint is untouched.

    Example:
        >>> import bayesify as bf
        >>> from bayesify.training import NonFiniteLossError
        >>> from torch.utils.data import DataLoader
        >>> elbo = bf.ELBO(bf.BayesianModule(torch.nn.Linear(4, 3)), num_data=40)
        >>> loader = DataLoader([(torch.full((4,), torch.nan), 0)] * 40, batch_size=20)
        >>> try:
        ...     bf.fit(elbo, loader, epochs=1, progress=False)
        ... except NonFiniteLossError as error:
        ...     print(str(error)[:60])
        the network's output at step 1 (epoch 1, minibatch 1) is NaN
    """

    #: The index of the network among several that are trained at once.
    network = 0
    #: Whether targets of the minibatch are NaN, or infinite where they must not be.
    has_wrong_targets = False


class StepOptions(NamedTuple):
    """What changes from one training step to the next, besides the minibatch.

    Args:
        batch_index: the minibatch's index within the epoch, from 0, for geometric weights.
        kl_scale: a further factor on the KL, for its warm-up.
        with_kl: whether to compute the value of the KL; its gradient does not need it.
        with_residual: whether to measure ``std_residual``.
        share: this process's share of the minibatch, where there are several; None where all
            have parts of one size.
    """

    batch_index: int | None
    kl_scale: float = 1.0
    with_kl: bool = False
    with_residual: bool = False
    share: Share | None = None


class Backend(Protocol):
    """One implementation of a training step: forward pass, backward pass and update.

    The objective's own step counter and the optimiser's state are read and advanced, so that
    a run can change its backend between steps. ``AutogradBackend`` is the specification: all others
    compute its gradients to rounding, given the same noise.
    """

    #: The backend and its reasons, in words, for progress output.
    description: str
    #: A run must resume with the noise that it began with.
    noise: Noise

    @property
    def unread(self) -> Sequence[str]:
        """The random parameters in which none of many steps had a gradient of the likelihood.

        There are none where the backend does not know, as with several processes.
        """

    def step(self, inputs: Inputs, targets: Tensor, options: StepOptions) -> ELBOTerms:
        """Compute the objective of one minibatch and update the parameters.

        Of several processes each computes its part of the minibatch, and all make the same update.

        Args:
            inputs: as for ``BayesianModule.predict``, B_i examples.
            targets: shape (B_i, ...).
            options: what changes from step to step.

        Returns:
            The terms at the parameters before the update; of the whole minibatch, but for the
            outputs.

        Raises:
            NonFiniteLossError: a term is NaN or infinite; the parameters are then as they were,
                save for a captured CUDA graph, which has updated them.
        """


def require_finite(elbo: ELBO, terms: ELBOTerms) -> None:
    """Raise NonFiniteLossError where a term that was computed is NaN or infinite."""
    known = (terms.nll, terms.kl, terms.penalty) if terms.has_kl else (terms.nll,)
    if all(math.isfinite(float(value.detach())) for value in known):
        return
    if not bool(torch.isfinite(terms.outputs).all()):
        what = "the network's output"
    elif not bool(terms.nll.isfinite()):
        what = "the nll"
    else:
        what = "the KL or penalty"
    raise NonFiniteLossError(f"{what} at step {elbo.step} is NaN or infinite")
