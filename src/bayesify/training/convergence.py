"""Convergence of the posterior's standard deviations: a measure and a warning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch

from bayesify.distributions.posteriors import MeanFieldGaussian

__all__ = [
    "STD_RESIDUAL_LIMIT",
    "ConvergenceWarning",
    "residual_advice",
    "std_residual",
    "warn_of_convergence",
]

#: Above this magnitude, in nats per weight, the stds are visibly away from their optimum.
STD_RESIDUAL_LIMIT = 0.5


class ConvergenceWarning(UserWarning):
    """Training stopped before the posterior's standard deviations had converged."""


@torch.no_grad()
def std_residual(posterior: MeanFieldGaussian, scale: float) -> float | None:
    """The derivative of the free energy in log std, averaged over the weights, from one gradient.

    At the optimum each weight's derivative is 0 in expectation: what the data say against noise
    balances the entropy, which alone contributes -1 nat a weight. So a residual near -1 means
    stds that are still far too small, as when rho starts low and its learning rate does not carry
    it; a positive one means stds that are still too large. Being an average over D weights it is
    precise after a few minibatches.

    Args:
        posterior: whose ``rho.grad`` is read.
        scale: what turns the loss into nats of a full-strength KL: N / (temperature x kl_scale x
            minibatch weight).

    Returns:
        Nats a weight, or None if there is no gradient or no weight.

    Example:
        >>> q = MeanFieldGaussian(torch.zeros(4), std=0.5)
        >>> (-q.log_std.sum()).backward()          # the entropy term alone, in nats
        >>> round(std_residual(q, scale=1.0), 4)
        -1.0
    """
    gradient = posterior.rho.grad
    if gradient is None:
        return None
    per_log_std = gradient / posterior.log_std_slope
    if posterior.mask is not None:
        per_log_std = per_log_std[posterior.mask]
    return scale * float(per_log_std.mean()) if per_log_std.numel() else None


def residual_advice(residual: float) -> str:
    """Explain a residual beyond the limit in one sentence.

    Example:
        >>> residual_advice(-0.9)[:72]
        "the posterior's standard deviations have not converged: they are still g"
    """
    direction = "still growing" if residual < 0 else "still shrinking"
    return (
        f"the posterior's standard deviations have not converged: they are {direction}, so that "
        "uncertainty and pruning reflect where they started; train longer, raise rho_lr_scale, or "
        f"start from another init_std (d free energy / d log std is {residual:+.2f} nats a weight, "
        "0 at the optimum)"
    )


def warn_of_convergence(
    history: Sequence[Mapping[str, float | None]],
    epochs: int,
    kl_warmup_epochs: float,
    *,
    stacklevel: int,
) -> None:
    """Warn if the KL never reached its full weight, or if the stds have not converged."""
    if kl_warmup_epochs >= epochs > 0:
        warnings.warn(
            f"the KL's warm-up takes {kl_warmup_epochs:g} epochs and training only {epochs}: the "
            "objective never was the ELBO; shorten the warm-up",
            ConvergenceWarning,
            stacklevel=stacklevel,
        )
    final = history[-1]["std_residual"] if history else None
    # Written so that NaN warns too.
    if final is not None and not abs(final) <= STD_RESIDUAL_LIMIT:
        warnings.warn(residual_advice(final), ConvergenceWarning, stacklevel=stacklevel)
