"""softplus, its inverse, its logarithm and its logarithmic derivative, to full precision.

A standard deviation is std = softplus(rho) = log(1 + exp(rho)).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["inverse_softplus", "log_softplus", "log_std_from", "softplus", "softplus_ratio"]

# Above this threshold log(1 + exp(rho)) rounds to rho, also in float64.
_SOFTPLUS_THRESHOLD = 40.0


def softplus(rho: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute log(1 + exp(rho)), into ``out`` if it is given; float64 keeps full precision.

    Example:
        >>> softplus(torch.tensor([-1.0, 30.0]))
        tensor([ 0.3133, 30.0000])
    """
    if out is not None:
        filled: Tensor = torch.ops.aten.softplus.out(rho, 1.0, _SOFTPLUS_THRESHOLD, out=out)
        return filled
    return F.softplus(rho, threshold=_SOFTPLUS_THRESHOLD)


def inverse_softplus(std: Tensor) -> Tensor:
    """Solve softplus(rho) = std for rho, with std > 0; stable for tiny and huge values.

    Example:
        >>> F.softplus(inverse_softplus(torch.tensor(0.25)))
        tensor(0.2500)
    """
    rho = std.double() + torch.log(-torch.expm1(-std.double()))
    return rho.to(std.dtype)


def log_softplus(rho: Tensor) -> Tensor:
    """Compute log softplus(rho), finite for every finite rho, and differentiable.

    The derivative is sigmoid(rho) / softplus(rho), which tends to 1 as rho falls. softplus itself
    underflows near rho = -104 in float32, where its logarithm would be -inf.

    Example:
        >>> log_softplus(torch.tensor([-500.0, 0.0, 500.0])).round(decimals=2).tolist()
        [-500.0, -0.3..., 6.2...]
    """
    result: Tensor = _LogSoftplus.apply(rho)  # type: ignore[no-untyped-call]
    return result


class _LogSoftplus(torch.autograd.Function):
    """log softplus with a manual backward: half of autograd's passes over D numbers."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rho: Tensor) -> Tensor:
        return log_std_from(softplus(rho), rho)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (rho,) = ctx.saved_tensors
        return grad * softplus_ratio(softplus(rho))


def log_std_from(std: Tensor, rho: Tensor) -> Tensor:
    """Compute log softplus(rho) from std = softplus(rho), which the caller has already.

    Example:
        >>> log_std_from(torch.tensor([0.0]), torch.tensor([-500.0]))
        tensor([-500.])
    """
    # Near underflow log softplus(rho) = rho - exp(rho) / 2 + ... rounds to rho.
    return torch.where(std < 2.0 * torch.finfo(std.dtype).tiny, rho, std.log())


def softplus_ratio(std: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """Compute d log std / d rho = sigmoid(rho) / std from std = softplus(rho).

    The ratio tends to 1 as rho falls.

    Args:
        std: standard deviations, of any shape.
        out: tensor to write the result into; None allocates one.
        scratch: tensor that may be overwritten; None allocates one.

    Example:
        >>> softplus_ratio(torch.tensor([0.0, 500.0]))
        tensor([1.0000, 0.0020])
    """
    # sigmoid(rho) = 1 - exp(-softplus(rho)).
    tiny = torch.finfo(std.dtype).tiny
    negative = torch.clamp_max(torch.neg(std, out=scratch), -tiny, out=scratch)
    return torch.div(torch.expm1(negative, out=out), negative, out=out)
