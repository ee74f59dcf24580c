"""IVON's update in C++, where the optimiser's own ``step`` makes it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from bayesify.estimators.transforms import is_transformed
from bayesify.training.kernel.compiler import CompilerError
from bayesify.training.kernel.formulas import PriorBlocks, Rates
from bayesify.training.kernel.interface import SampledPosterior
from bayesify.training.kernel.native import NativeIVON, is_readable, ivon_library

__all__ = ["updated_by_kernel"]


def updated_by_kernel(
    prior: PriorBlocks,
    of: SampledPosterior,
    moments: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
    rates: Rates,
) -> bool:
    """Update mean, rho, momentum and h in place, if the kernel can; return whether it did.

    It cannot without a compiler, on another device than the CPU, in half precision, for tensors of
    other classes than PyTorch's, such as shards, and within compiled code.

    Args:
        prior: Gaussian, of each block of weights.
        of: the posterior.
        moments: momentum and h, each of shape (D,).
        gradients: of the loss in mean and rho, each of shape (D,).
        rates: of the step.
    """
    dtype = of.mean.dtype
    vectors = [of.mean, of.rho, *moments, *gradients]
    if of.prior_mean is not None:
        vectors.append(of.prior_mean)
    if (
        torch.compiler.is_compiling()
        or is_transformed()
        or dtype not in (torch.float32, torch.float64)
        or not all(type(each) in (Tensor, torch.nn.Parameter) for each in vectors)
        or not all(is_readable(each, dtype) for each in vectors)
        or not (of.mask is None or is_readable(of.mask, torch.bool))
        or not _has_kernel(dtype, blocks=len(prior.forms) > 1)
    ):
        return False
    NativeIVON(prior, of.mean.numel(), dtype).update(of, moments, gradients, rates)
    # Else autograd would not notice that a graph of before needs the old values.
    increment_version([of.mean, of.rho, *moments])
    return True


@cache
def _has_kernel(dtype: torch.dtype, *, blocks: bool) -> bool:
    """Return whether there is a compiled kernel; it is tried once only."""
    try:
        ivon_library(dtype, blocks=blocks)
    except CompilerError:
        return False
    return True
