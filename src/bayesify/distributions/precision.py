"""Numbers that stay in float32 when a network is converted to a narrower dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

__all__ = ["Conversion", "WideModule", "at_least_float32", "wide_default_dtype", "widely"]

#: A conversion as ``nn.Module._apply`` makes it, such as to another dtype or device.
Conversion = Callable[[Tensor], Tensor]


class WideModule(nn.Module):
    """A module whose parameters and buffers are in float32 at least, also after ``bfloat16()``.

    A step of an optimiser changes rho by less than one unit of bfloat16's eight bits: rounded to
    these, the standard deviations would stay where they began, and nothing would tell.

    Example:
        >>> class Scale(WideModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.log_scale = nn.Parameter(torch.zeros(1))
        >>> Scale().bfloat16().log_scale.dtype, Scale().double().log_scale.dtype
        (torch.float32, torch.float64)
    """

    def _apply(self, fn: Conversion, recurse: bool = True) -> Self:
        return super()._apply(widely(fn), recurse)  # type: ignore[no-untyped-call,no-any-return]


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a tensor in float32, or in its own dtype if that is wider.

    Sums over many examples or weights, and squares, overflow half precision.

    Example:
        >>> at_least_float32(torch.zeros(1, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def wide_default_dtype() -> torch.dtype:
    """Return PyTorch's default dtype, or float32 where that is narrower.

    Example:
        >>> wide_default_dtype()
        torch.float32
    """
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def widely(conversion: Conversion) -> Conversion:
    """Return a conversion that leaves numbers in float32 where it would make them narrower.

    Example:
        >>> widely(Tensor.half)(torch.zeros(1, dtype=torch.float64)).dtype
        torch.float32
    """

    def convert(tensor: Tensor) -> Tensor:
        made = conversion(tensor)
        is_narrow = made.is_floating_point() and made.dtype.itemsize < 4
        return tensor.to(made.device, torch.float32) if is_narrow else made

    return convert
