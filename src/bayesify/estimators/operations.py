"""Linear operations: calls of PyTorch functions that are linear in weight and in input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.estimators.estimator import ParameterUse

__all__ = ["LinearOperation", "linear_operation"]

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


@dataclass(frozen=True)
class LinearOperation:
    """One call ``function(inputs, weight, bias, ...)``, linear in weight and in inputs.

    Args:
        function: ``F.linear``, a convolution or a transposed convolution.
        inputs: shape (rows, ..., features) for a linear layer, (rows, channels, ...) for a
            convolution.
        weight: the weight.
        bias: the bias, or None.
        args: further positional arguments, such as stride and padding.
        kwargs: further keyword arguments.
    """

    function: Callable[..., Tensor]
    inputs: Tensor
    weight: Tensor
    bias: Tensor | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def apply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the same operation to other tensors."""
        return self.function(inputs, weight, bias, *self.args, **self.kwargs)

    def use(
        self, outputs: Tensor, batch_size: int | None, *, of_bias: bool = False
    ) -> ParameterUse:
        """Describe how this operation uses its weight, or its bias.

        Args:
            outputs: the result of the operation.
            batch_size: the number of examples in the minibatch, or None if it is not known.
            of_bias: whether to describe the use of the bias.
        """
        name = self.function.__name__
        shape = self.inputs.shape
        linear = self.function is F.linear
        # F.linear also accepts a vector as weight, and a convolution one example without its axis.
        weight_dim = self.weight.dim()
        has_rows = len(shape) >= 2 == weight_dim if linear else len(shape) == weight_dim
        # A single number may be the bias of all outputs, which then share its noise.
        shared = of_bias and self.bias is not None and self.bias.numel() < self.num_outputs(outputs)
        if batch_size is None or not has_rows or shared or shape[0] % batch_size:
            return ParameterUse(name)
        rows = shape[0] // batch_size
        if linear:
            return ParameterUse(name, rows, rows * prod(shape[1:-1]))
        # A weight is used at each output of a convolution and at each input of a transposed one; a
        # bias is used at each output of both.
        used_at = shape if self.function in _TRANSPOSED and not of_bias else outputs.shape
        return ParameterUse(name, rows, rows * prod(used_at[2:]))

    @property
    def weight_axes(self) -> tuple[int, int]:
        """Axes of the weight that belong to output and to input features or channels."""
        return (1, 0) if self.function in _TRANSPOSED else (0, 1)

    @property
    def num_inputs(self) -> int:
        """Number of input features or channels."""
        return self.inputs.shape[-1 if self.function is F.linear else 1]

    def num_outputs(self, outputs: Tensor) -> int:
        """Return the number of output features or channels."""
        return outputs.shape[-1 if self.function is F.linear else 1]

    def channel_view(self, values: Tensor) -> Tensor:
        """View values of shape (..., channels) so that they broadcast with inputs or outputs."""
        positions = [1] * (self.inputs.dim() - 2)
        if self.function is F.linear:
            return values.view(*values.shape[:-1], *positions, values.shape[-1])
        return values.view(*values.shape, *positions)


def linear_operation(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> LinearOperation | None:
    """Parse a call of a PyTorch function; return None if it is not a linear operation."""
    if function not in _LINEAR:
        return None
    rest = dict(kwargs)
    missing = ("input", "weight", "bias")[len(args) :]
    inputs, weight, bias = *args[:3], *(rest.pop(name, None) for name in missing)
    if not isinstance(inputs, Tensor) or not isinstance(weight, Tensor):
        return None
    return LinearOperation(function, inputs, weight, bias, tuple(args[3:]), rest)
