"""Removing the weights that carry the least information: signal-to-noise pruning."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from bayesify.module import BayesianModule
from bayesify.posteriors import MeanFieldGaussian

__all__ = ["prune", "snr", "snr_decibels"]


def snr(bnn: BayesianModule) -> Tensor:
    """The signal-to-noise ratio |mean| / std of every random weight, shape (D,).

    Graves 2011; Blundell et al. 2015, section 2.2 and figure 4. Pruned weights have ratio 0; a
    ratio too large for the dtype is its largest number.

    Raises:
        TypeError: the posterior is a point estimate, which has no noise.

    Example:
        >>> from torch import nn
        >>> bnn = BayesianModule(nn.Linear(2, 1, bias=False), init_std=0.5)
        >>> with torch.no_grad():
        ...     _ = bnn.posterior.mean.copy_(torch.tensor([-1.0, 0.25]))
        >>> snr(bnn)
        tensor([2.0000, 0.5000])
    """
    log_ratio = _log_snr(bnn)
    return log_ratio.exp().clamp_max(torch.finfo(log_ratio.dtype).max)


def snr_decibels(bnn: BayesianModule) -> Tensor:
    """20 log10(|mean| / std) of every random weight, in decibels, shape (D,); -inf for 0.

    Example:
        >>> from torch import nn
        >>> bnn = BayesianModule(nn.Linear(1, 1, bias=False), init_std=0.1)
        >>> with torch.no_grad():
        ...     _ = bnn.posterior.mean.fill_(1.0)
        >>> snr_decibels(bnn)
        tensor([20.])
    """
    return _log_snr(bnn) * (20.0 / math.log(10.0))


def prune(bnn: BayesianModule, fraction: float) -> BayesianModule:
    """Remove the given fraction of all random weights, those of the lowest signal-to-noise ratio.

    The comparison is global: over all layers, biases included. A removed weight is exactly zero in
    the mean and in every sample, also after further training, saving and loading, and leaves the
    KL.

    Args:
        bnn: the network, which is not changed.
        fraction: how much of the D weights to remove in all, from 0 to 1; floor(fraction D)
            weights. What was pruned before counts.

    Returns:
        A new BayesianModule.

    Raises:
        ValueError: fraction is not between 0 and 1.
        TypeError: the posterior is a point estimate.

    Example:
        >>> from torch import nn
        >>> small = prune(BayesianModule(nn.Linear(4, 5)), fraction=0.8)
        >>> int((small.posterior.mean != 0).sum())
        5
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction must lie between 0 and 1, got {fraction}")
    # What was pruned before goes first, then the weights of mean 0, whose logarithm is -inf too.
    ratio = _log_snr(bnn).clamp_min(torch.finfo(bnn.posterior.mean.dtype).min)
    if bnn.posterior.kept is not None:
        ratio = torch.where(bnn.posterior.kept, ratio, -math.inf)
    # Rounding must not lose a weight: 0.29 * 100 is below 29 in binary.
    num_pruned = math.floor(fraction * ratio.numel() * (1.0 + 1e-12))
    pruned = copy.deepcopy(bnn)
    posterior = pruned.posterior
    kept = torch.ones_like(ratio, dtype=torch.bool)
    # A stable sort: weights of equal ratio go in the order of the flat vector.
    kept[ratio.argsort(stable=True)[:num_pruned]] = False
    if posterior.kept is not None:
        kept &= posterior.kept
    posterior.kept = kept
    with torch.no_grad():
        posterior.mean.masked_fill_(~kept, 0.0)
    return pruned


@torch.no_grad()
def _log_snr(bnn: BayesianModule) -> Tensor:
    # The ratio itself overflows float32 at rho = -100.
    posterior = bnn.posterior
    if not isinstance(posterior, MeanFieldGaussian):
        raise TypeError(
            "the signal-to-noise ratio needs a posterior with a std, got "
            f"{type(posterior).__name__}; train with posterior=MeanFieldGaussian"
        )
    log_ratio = posterior.mean.abs().log() - posterior.log_std
    if posterior.kept is None:
        return log_ratio
    return torch.where(posterior.kept, log_ratio, -math.inf)
