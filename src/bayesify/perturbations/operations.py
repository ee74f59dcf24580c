"""Operations that are linear in weight and in input, as PyTorch's functions are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.perturbations.base import Use

__all__ = ["LinearCall", "linear_call"]

_TRANSPOSED: tuple[Callable[..., Tensor], ...] = (
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
)
_LINEAR: tuple[Callable[..., Tensor], ...] = (
    F.linear,
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    *_TRANSPOSED,
)
#: Several matrices at once, each with rows of its own: networks side by side.
_BATCHED = torch.baddbmm


@dataclass(frozen=True)
class LinearCall:
    """One call ``operation(inputs, weight, bias, ...)``, linear in weight and in inputs.

    Args:
        operation: ``F.linear``, a convolution, a transposed convolution, or ``torch.baddbmm``.
        inputs: shape (rows, ..., features) of a linear layer, (rows, channels, ...) of a
            convolution, (matrices, rows, features) of ``baddbmm``.
        weight: the second argument.
        bias: the third, or None.
        rest: stride, padding and so on, by position.
        named: the same by name.
    """

    operation: Callable[..., Tensor]
    inputs: Tensor
    weight: Tensor
    bias: Tensor | None
    rest: tuple[Any, ...]
    named: Mapping[str, Any]

    def apply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same call with other tensors."""
        if self.operation is _BATCHED:
            if bias is None:
                return torch.bmm(inputs, weight)
            return torch.baddbmm(bias, inputs, weight)
        return self.operation(inputs, weight, bias, *self.rest, **self.named)

    def use(self, outputs: Tensor, num_data: int | None, *, of_bias: bool = False) -> Use:
        """What this call is to its weight, or to its bias.

        Args:
            outputs: what it returned.
            num_data: the size of the minibatch, or None if it is not known.
            of_bias: which of the two.
        """
        name = self.operation.__name__
        shape = self.inputs.shape
        if self.operation is _BATCHED:
            # Each datum has one row for each matrix, and meets each once; its rows are not the
            # inputs' first axis, which Flipout's signs need.
            by_row = shape[1] == num_data and not (of_bias and self._bias_is_shared(outputs))
            return Use(name, None, 1, _IN_MATRICES) if by_row else Use(name)
        linear = self.operation is F.linear
        # A linear layer also takes a vector as weight, a convolution one datum without its axis.
        weight_dim = self.weight.dim()
        has_rows = len(shape) >= 2 == weight_dim if linear else len(shape) == weight_dim
        # One number may be the bias of all outputs, which then share its noise.
        shared = of_bias and self.bias is not None and self.bias.numel() < self.num_outputs(outputs)
        if num_data is None or not has_rows or shared or shape[0] % num_data:
            return Use(name)
        rows = shape[0] // num_data
        if linear:
            return Use(name, rows, rows * prod(shape[1:-1]))
        # A weight is met at each output of a convolution, each input of a transposed one; a bias
        # at each output of both.
        met = shape if self.operation in _TRANSPOSED and not of_bias else outputs.shape
        return Use(name, rows, rows * prod(met[2:]))

    def _bias_is_shared(self, outputs: Tensor) -> bool:
        matrices, _, features = outputs.shape
        return self.bias is not None and self.bias.shape != (matrices, 1, features)

    @property
    def weight_axes(self) -> tuple[int, int]:
        """The weight's axes of output and of input features or channels."""
        return (1, 0) if self.operation in _TRANSPOSED else (0, 1)

    @property
    def num_inputs(self) -> int:
        """Input features or channels."""
        return self.inputs.shape[-1 if self.operation is F.linear else 1]

    def num_outputs(self, outputs: Tensor) -> int:
        """Output features or channels."""
        return outputs.shape[-1 if self.operation is F.linear else 1]

    def channel_view(self, values: Tensor) -> Tensor:
        """Values of shape (..., channels), viewed so that they broadcast over inputs or outputs."""
        if self.operation is _BATCHED:
            return values
        positions = [1] * (self.inputs.dim() - 2)
        if self.operation is F.linear:
            return values.view(*values.shape[:-1], *positions, values.shape[-1])
        return values.view(*values.shape, *positions)


_IN_MATRICES = "one of several matrices with rows of their own"


def linear_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> LinearCall | None:
    """Read a call of a PyTorch function, or None where it is no such operation."""
    if function is _BATCHED:
        whole = len(args) == 3 and not kwargs and all(isinstance(part, Tensor) for part in args)
        return LinearCall(function, args[1], args[2], args[0], (), {}) if whole else None
    if function not in _LINEAR:
        return None
    named = dict(kwargs)
    missing = ("input", "weight", "bias")[len(args) :]
    inputs, weight, bias = *args[:3], *(named.pop(name, None) for name in missing)
    if not isinstance(inputs, Tensor) or not isinstance(weight, Tensor):
        return None
    return LinearCall(function, inputs, weight, bias, tuple(args[3:]), named)
