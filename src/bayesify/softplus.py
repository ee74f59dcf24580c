"""softplus, which turns rho into a standard deviation, and its kin, to full precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["inverse_softplus", "log_of_softplus", "log_softplus", "softplus", "softplus_ratio"]

# Above this rho, log(1 + exp(rho)) equals rho in float64 too.
_SOFTPLUS_THRESHOLD = 40.0


def softplus(rho: Tensor, *, out: Tensor | None = None) -> Tensor:
    """log(1 + exp(rho)), in float64 to full precision too; ``out`` is filled where it is given.

    Example:
        >>> softplus(torch.tensor([-1.0, 30.0]))
        tensor([ 0.3133, 30.0000])
    """
    if out is not None:
        filled: Tensor = torch.ops.aten.softplus.out(rho, 1.0, _SOFTPLUS_THRESHOLD, out=out)
        return filled
    return F.softplus(rho, threshold=_SOFTPLUS_THRESHOLD)


def inverse_softplus(std: Tensor) -> Tensor:
    """The rho with softplus(rho) = std, for std > 0, stable for tiny and huge values.

    Example:
        >>> F.softplus(inverse_softplus(torch.tensor(0.25)))
        tensor(0.2500)
    """
    rho = std.double() + torch.log(-torch.expm1(-std.double()))
    return rho.to(std.dtype)


def log_softplus(rho: Tensor) -> Tensor:
    """log softplus(rho) with derivative sigmoid(rho) / softplus(rho), which tends to 1 below.

    softplus itself underflows near rho = -104 in float32, and its logarithm would be -inf.

    Example:
        >>> log_softplus(torch.tensor([-500.0, 0.0, 500.0])).round(decimals=2).tolist()
        [-500.0, -0.3..., 6.2...]
    """
    result: Tensor = _LogSoftplus.apply(rho)  # type: ignore[no-untyped-call]
    return result


class _LogSoftplus(torch.autograd.Function):
    """With a backward of its own: half the passes over D numbers of what autograd would record."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rho: Tensor) -> Tensor:
        return log_of_softplus(softplus(rho), rho)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (rho,) = ctx.saved_tensors
        return grad * softplus_ratio(softplus(rho))


def log_of_softplus(std: Tensor, rho: Tensor) -> Tensor:
    """log softplus(rho), where softplus(rho) = std is at hand already.

    Example:
        >>> log_of_softplus(torch.tensor([0.0]), torch.tensor([-500.0]))
        tensor([-500.])
    """
    # Where std nears underflow, log softplus(rho) = rho - exp(rho) / 2 + ... is rho.
    return torch.where(std < 2.0 * torch.finfo(std.dtype).tiny, rho, std.log())


def softplus_ratio(std: Tensor, out: Tensor | None = None, spare: Tensor | None = None) -> Tensor:
    """d log std / d rho = sigmoid(rho) / std, from std = softplus(rho); it tends to 1 below.

    Args:
        std: of any shape.
        out: what to write it into instead of a new tensor.
        spare: what may be overwritten instead of a new tensor.

    Example:
        >>> softplus_ratio(torch.tensor([0.0, 500.0]))
        tensor([1.0000, 0.0020])
    """
    # sigmoid(rho) = 1 - exp(-softplus(rho)).
    negative = torch.clamp_max(torch.neg(std, out=spare), -torch.finfo(std.dtype).tiny, out=spare)
    return torch.div(torch.expm1(negative, out=out), negative, out=out)
