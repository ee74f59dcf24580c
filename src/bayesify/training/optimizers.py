"""Optimisers over the posterior's parameters, with a learning rate of its own for rho."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from bayesify.elbo import ELBO

__all__ = ["OptimizerFactory", "make_optimizer", "parameter_groups"]

#: Makes an optimiser from parameter groups, as torch's optimiser classes do.
OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]


def parameter_groups(elbo: ELBO) -> list[dict[str, Any]]:
    """The trainable parameters in two groups: all but rho, then rho, if there is one.

    Example:
        >>> import bayesify as bf
        >>> elbo = ELBO(bf.BayesianModule(torch.nn.Linear(2, 1)), num_data=1)
        >>> [len(group["params"]) for group in parameter_groups(elbo)]
        [1, 1]
    """
    rho = getattr(elbo.bnn.posterior, "rho", None)
    rest = [p for p in elbo.parameters() if p.requires_grad and p is not rho]
    groups: list[dict[str, Any]] = [{"params": rest}] if rest else []
    return groups if rho is None else [*groups, {"params": [rho]}]


def make_optimizer(
    elbo: ELBO, optimizer: Optimizer | OptimizerFactory | None, rho_lr_scale: float
) -> Optimizer:
    """The optimiser that ``fit`` was asked for, with rho's rate scaled.

    Raises:
        ValueError: ``rho_lr_scale`` is not positive, or cannot be applied.
    """
    if not (rho_lr_scale > 0.0 and math.isfinite(rho_lr_scale)):
        raise ValueError(f"rho_lr_scale must be positive and finite, got {rho_lr_scale}")
    if isinstance(optimizer, Optimizer):
        if rho_lr_scale != 1.0:
            raise ValueError(
                "rho_lr_scale needs fit to make the optimiser: pass a function of parameter "
                "groups, such as functools.partial(torch.optim.Adam, lr=1e-3), not an optimiser"
            )
        return optimizer
    groups = parameter_groups(elbo)
    # fused: one pass over the flat vectors a step.
    made = torch.optim.Adam(groups, lr=1e-3, fused=True) if optimizer is None else optimizer(groups)
    if rho_lr_scale != 1.0:
        rho = getattr(elbo.bnn.posterior, "rho", None)
        own = [g for g in made.param_groups if len(g["params"]) == 1 and g["params"][0] is rho]
        if not own:
            raise ValueError(
                "rho_lr_scale needs a posterior with a rho, and an optimiser that keeps it in a "
                "parameter group of its own"
            )
        own[0]["lr"] *= rho_lr_scale
    return made
