"""Pruning of the weights with the lowest signal-to-noise ratio or magnitude."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.parametrizations import _SpectralNorm, _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList

from bayesify.distributions.posteriors import GaussianPosterior
from bayesify.module.bayesian import BayesianModule
from bayesify.module.random_network import check_bayesian
from bayesify.noise.arguments import one_number
from bayesify.prediction.predictive import P_co

__all__ = [
    "check_pruning",
    "normalised_rows",
    "prune",
    "prune_in_place",
    "snr",
    "snr_decibels",
]


def snr(bnn: BayesianModule) -> Tensor:
    """Compute the signal-to-noise ratio |mean| / std of every random weight, shape (D,).

    Graves 2011; Blundell et al. 2015, section 5.1 and figure 4. Pruned weights have ratio 0. A
    ratio that overflows the dtype is set to its largest finite number.

    Args:
        bnn: a network with D random weights, whose posterior has a std.

    Raises:
        TypeError: the object is no Bayesian network, or its posterior has no std.

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
    """Compute 20 log10(|mean| / std) of every random weight, in decibels, shape (D,); -inf for 0.

    Raises:
        TypeError: the object is no Bayesian network, or its posterior has no std.

    Example:
        >>> from torch import nn
        >>> bnn = BayesianModule(nn.Linear(1, 1, bias=False), init_std=0.1)
        >>> with torch.no_grad():
        ...     _ = bnn.posterior.mean.fill_(1.0)
        >>> snr_decibels(bnn)
        tensor([20.])
    """
    return _log_snr(bnn) * (20.0 / math.log(10.0))


def prune(
    bnn: BayesianModule[P_co], fraction: float, criterion: Literal["snr", "magnitude"] = "snr"
) -> BayesianModule[P_co]:
    """Remove a fraction of all random weights: the lowest by signal-to-noise ratio, or magnitude.

    Weights of all layers are compared with each other, including biases. A pruned weight is exactly
    zero in the mean and in every sample, also after further training, saving and loading, and is
    not part of the KL.

    Of each row that ``torch.nn.utils.parametrizations.weight_norm`` divides by its norm, the
    highest weight is kept, since a row of zeros has no direction; its unit is removed by its
    magnitude ``original0``. Of a tensor under ``spectral_norm`` the highest weight is kept, too.

    Args:
        bnn: the network, which is not changed.
        fraction: the fraction of the D weights that is pruned afterwards, from 0 to 1. The result
            has floor(fraction D) pruned weights, or more if more were pruned before; but never
            those kept of normalised rows.
        criterion: ``"snr"`` removes the weights with the lowest |mean| / std, ``"magnitude"`` those
            with the lowest |mean|, which a point estimate has too.

    Returns:
        A new BayesianModule.

    Raises:
        ValueError: fraction is not between 0 and 1, or the criterion is unknown.
        TypeError: the criterion is ``"snr"`` and the posterior has no std, as a point estimate.

    Example:
        >>> from torch import nn
        >>> small = prune(BayesianModule(nn.Linear(4, 5)), fraction=0.8)
        >>> int((small.posterior.mean != 0).sum())
        5
    """
    check_bayesian(bnn, "prune")
    pruned = copy.deepcopy(bnn)
    prune_in_place(pruned, fraction, criterion)
    return pruned


@torch.no_grad()
def prune_in_place(bnn: BayesianModule, fraction: float, criterion: str = "snr") -> None:
    """Prune the network that is given, as :func:`prune` prunes a copy.

    A mask that the posterior has already is updated in place, so that what refers to it, such as a
    training backend, need not be made anew.

    Example:
        >>> from torch import nn
        >>> bnn = BayesianModule(nn.Linear(4, 5))
        >>> prune_in_place(bnn, 0.8); int(bnn.posterior.mask.sum())
        5
    """
    check_pruning(fraction, criterion)
    posterior = bnn.posterior
    # Already pruned weights sort first, then weights with mean 0, whose logarithm is clamped.
    ratio = _log_snr(bnn) if criterion == "snr" else posterior.mean.abs().log()
    ratio = ratio.clamp_min(torch.finfo(posterior.mean.dtype).min)
    if posterior.mask is not None:
        ratio = torch.where(posterior.mask, ratio, -math.inf)
    num_kept = 0
    for rows in normalised_rows(bnn):
        ratio[rows.gather(1, ratio[rows].argmax(1, keepdim=True))] = math.inf
        num_kept += len(rows)
    # The factor compensates rounding: 0.29 * 100 is slightly below 29 in binary.
    num_pruned = math.floor(fraction * ratio.numel() * (1.0 + 1e-12))
    num_pruned = min(num_pruned, ratio.numel() - num_kept)
    if posterior.mask is None:
        posterior.mask = torch.ones_like(ratio, dtype=torch.bool)
    # A stable sort prunes weights with equal ratios in the order of the flat vector.
    posterior.mask[ratio.argsort(stable=True)[:num_pruned]] = False
    posterior.mean.masked_fill_(~posterior.mask, 0.0)


def normalised_rows(bnn: BayesianModule) -> Iterator[Tensor]:
    """Yield the places, in the flat vector, of the weights that are divided by one norm.

    Their shape is (rows, weights of a row): the rows of a weight norm, or the whole tensor of a
    spectral norm. Where all of a row are zero, it has no direction.

    Example:
        >>> from torch import nn
        >>> net = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3, bias=False))
        >>> list(normalised_rows(BayesianModule(net)))
        [tensor([[3, 4],
                [5, 6],
                [7, 8]])]
    """
    layout = bnn.layout
    places = layout.unflatten(torch.arange(layout.num_weights, device=bnn.posterior.mean.device))
    first = {alias: aliases[0] for aliases in layout.ties for alias in aliases}
    for path, module in bnn.net.named_modules():
        norm = module[0] if isinstance(module, ParametrizationList) else None
        if isinstance(norm, _WeightNorm):
            tensor, axis = "original1", norm.dim
        elif isinstance(norm, _SpectralNorm):
            tensor, axis = "original", -1
        else:
            continue
        name = first.get(f"{path}.{tensor}")
        if name is not None:
            own = places[name]
            # -1 stands for one norm of the whole tensor.
            yield own.reshape(1, -1) if axis == -1 else own.movedim(axis, 0).flatten(1)


def check_pruning(fraction: float, criterion: str) -> None:
    """Check the arguments of :func:`prune`.

    Raises:
        TypeError: fraction is no number.
        ValueError: fraction is not between 0 and 1, or the criterion is unknown.
    """
    if not 0.0 <= one_number("fraction", fraction) <= 1.0:
        raise ValueError(f"fraction must lie between 0 and 1, got {fraction}")
    if criterion not in ("snr", "magnitude"):
        raise ValueError(f"criterion must be snr or magnitude, got {criterion!r}")


@torch.no_grad()
def _log_snr(bnn: BayesianModule) -> Tensor:
    # In logarithms, since the ratio itself overflows float32 at rho = -100.
    check_bayesian(bnn, "a signal-to-noise ratio")
    posterior = bnn.posterior
    if not isinstance(posterior, GaussianPosterior):
        raise TypeError(
            "the signal-to-noise ratio needs a posterior with a std, got "
            f"{type(posterior).__name__}; train with posterior=MeanFieldGaussian, or prune with "
            "criterion='magnitude'"
        )
    log_ratio = posterior.mean.abs().log() - posterior.log_std
    if posterior.mask is None:
        return log_ratio
    return torch.where(posterior.mask, log_ratio, -math.inf)
