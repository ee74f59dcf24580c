"""Linear operations: calls of PyTorch functions that are linear in weight and in input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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

    A product such as ``x @ w`` is the linear layer whose weight has the axes of ``w`` in another
    order: those of the outputs first. Several axes count as one.

    Args:
        function: ``F.linear``, a convolution or a transposed convolution.
        inputs: shape (rows, ..., features) for a linear layer, (rows, channels, ...) for a
            convolution.
        weight: the weight.
        bias: the bias, or None.
        args: further positional arguments, such as stride and padding.
        kwargs: further keyword arguments.
        output_axes: axes of the weight that belong to output features or channels.
        input_axes: axes of the weight that belong to input features or channels.
        name: the function that the network called.
        reshape: turns this operation's outputs into those of the network's call.
    """

    function: Callable[..., Tensor]
    inputs: Tensor
    weight: Tensor
    bias: Tensor | None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    output_axes: tuple[int, ...] = (0,)
    input_axes: tuple[int, ...] = (1,)
    name: str = "linear"
    reshape: Callable[[Tensor], Tensor] | None = None

    def apply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the same operation to other tensors; ``reshape`` is left to the caller."""
        return self.function(inputs, self._matrix(weight), bias, *self.args, **self.kwargs)

    def _matrix(self, weight: Tensor) -> Tensor:
        axes = self.output_axes + self.input_axes
        if self.function is not F.linear or axes == (0, 1):
            return weight
        ordered = weight.permute(axes)
        if not self.output_axes:
            return ordered.flatten().unsqueeze(0)
        return ordered.flatten(0, len(self.output_axes) - 1).flatten(1)

    def on_unfolded(self, inputs: Tensor) -> LinearOperation:
        """Return the operation on its inputs before their axes were folded into rows.

        Args:
            inputs: shape (rows, ..., features).
        """
        if self.function is not F.linear:
            return self
        return replace(self, inputs=inputs, reshape=partial(_folded, reshape=self.reshape))

    def layer_of(self, weight: str | None, bias: str | None) -> tuple[str, ...]:
        """Return the names of weight and bias, those that are random, of a layer x W^T + b.

        Any other operation has none.
        """
        plain = self.function is F.linear and self.weight.dim() == 2
        if not plain or (self.output_axes, self.input_axes) != ((0,), (1,)):
            return ()
        return tuple(name for name in (weight, bias) if name is not None)

    def use(
        self,
        outputs: Tensor,
        batch_size: int | None,
        *,
        of_bias: bool = False,
        layer: tuple[str, ...] = (),
    ) -> ParameterUse:
        """Describe how this operation uses its weight, or its bias.

        Args:
            outputs: the result of the operation.
            batch_size: the number of examples in the minibatch, or None if it is not known.
            of_bias: whether to describe the use of the bias.
            layer: its :meth:`layer_of`.
        """
        name = self.name
        shape = self.inputs.shape
        linear = self.function is F.linear
        # F.linear also accepts a vector as weight, and a convolution one example without its axis.
        weight_dim = self._matrix(self.weight).dim()
        has_rows = len(shape) >= 2 and weight_dim == 2 if linear else len(shape) == weight_dim
        # A single number may be the bias of all outputs, which then share its noise.
        shared = of_bias and self.bias is not None and self.bias.numel() < self.num_outputs(outputs)
        if batch_size is None or not has_rows or shared or shape[0] % batch_size:
            return ParameterUse(name)
        rows = shape[0] // batch_size
        if linear:
            return ParameterUse(name, rows, rows * prod(shape[1:-1]), layer=layer)
        # A weight is used at each output of a convolution and at each input of a transposed one; a
        # bias is used at each output of both.
        used_at = shape if self.function in _TRANSPOSED and not of_bias else outputs.shape
        return ParameterUse(name, rows, rows * prod(used_at[2:]))

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
    """Parse a call of a linear layer or of a convolution; return None if it is neither."""
    if function not in _LINEAR:
        return None
    rest = dict(kwargs)
    missing = ("input", "weight", "bias")[len(args) :]
    inputs, weight, bias = *args[:3], *(rest.pop(name, None) for name in missing)
    if not isinstance(inputs, Tensor) or not isinstance(weight, Tensor):
        return None
    axes: tuple[tuple[int, ...], tuple[int, ...]] = ((0,), (1,))
    return LinearOperation(
        function,
        inputs,
        weight,
        bias,
        tuple(args[3:]),
        rest,
        *(axes[::-1] if function in _TRANSPOSED else axes),
        name=function.__name__,
    )


def _folded(outputs: Tensor, reshape: Callable[[Tensor], Tensor] | None) -> Tensor:
    rows = outputs.flatten(0, -2)
    return rows if reshape is None else reshape(rows)
