"""Mean and variance of weights, and of the outputs of linear operations on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.distributions.structured import ScaledGroup
from bayesify.estimators.operations import LinearOperation

__all__ = ["MIN_VARIANCE", "ParameterMoments", "closed_form_moments", "output_moments", "std_of"]

#: Added to variances, since the gradient of the square root overflows at 0; its root is negligible.
MIN_VARIANCE = 1e-36


@dataclass(frozen=True)
class ParameterMoments:
    """Mean and spread of the weight or the bias of one linear operation.

    Args:
        mean: the mean, or the tensor itself if no noise is added within the operation.
        spread: the standard deviation, or None if no noise is added within the operation.
        name: the name in the layout, or empty if no noise is added within the operation.
        squared: whether ``spread`` is the variance.
        joint: the weights that this parameter's depend on, if they do; their noise is that of the
            whole layer.
    """

    mean: Tensor
    spread: Tensor | None = None
    name: str = ""
    squared: bool = False
    joint: ScaledGroup | None = None

    @property
    def std(self) -> Tensor | None:
        """Standard deviation, or None."""
        if self.spread is None or not self.squared:
            return self.spread
        return (self.spread + MIN_VARIANCE).sqrt()

    def variance(self, dtype: torch.dtype) -> Tensor | None:
        """Return the variance in a wider dtype, or None."""
        if self.spread is None or self.squared:
            return self.spread
        return self.spread.to(dtype).square()


def output_moments(
    operation: LinearOperation, weight: ParameterMoments, bias: ParameterMoments | None
) -> tuple[Tensor, Tensor]:
    """Compute mean and variance of each output of a linear operation.

    The variance is the same operation applied to squared inputs and the weights' variances, in
    float32 or wider. A parameter without spread is a constant and adds no variance.

    Args:
        operation: the linear operation.
        weight: the moments of its weight.
        bias: the moments of its bias, or None.

    Returns:
        Mean and variance, with the shape of the outputs.

    Example:
        >>> from torch.nn import functional as F
        >>> mean, std = torch.ones(1, 2), torch.full((1, 2), 0.5)
        >>> operation = LinearOperation(F.linear, torch.tensor([[1.0, 2.0]]), mean, None)
        >>> output_moments(operation, ParameterMoments(mean, std, "weight"), None)
        (tensor([[3.]]), tensor([[1.2500]]))
    """
    mean = operation.apply(operation.inputs, weight.mean, None if bias is None else bias.mean)
    # In float16 squares would overflow and small variances would vanish.
    dtype = torch.promote_types(weight.mean.dtype, torch.float32)
    bias_variance = None if bias is None else bias.variance(dtype)
    variance = weight.variance(dtype)
    if variance is None:
        if bias_variance is None:
            return mean, mean.new_zeros(()).expand(mean.shape)
        return mean, operation.channel_view(bias_variance).expand(mean.shape)
    with torch.autocast(mean.device.type, enabled=False):
        squares = operation.inputs.to(dtype).square()
        return mean, operation.apply(squares, variance, bias_variance)


def closed_form_moments(
    operation: LinearOperation, weight: ParameterMoments, bias: ParameterMoments | None
) -> tuple[Tensor, Tensor]:
    """Compute mean and variance of each output, also where weights depend on each other.

    Args:
        operation: the linear operation.
        weight: the moments of its weight.
        bias: the moments of its bias, or None.

    Returns:
        As for :func:`output_moments`.

    Example:
        >>> from bayesify.distributions.correlations import Triangular
        >>> from torch.nn import functional as F
        >>> correlation = Triangular(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
        >>> group = ScaledGroup(("weight",), correlation, torch.ones(2))
        >>> moments = ParameterMoments(torch.ones(1, 2), name="weight", joint=group)
        >>> operation = LinearOperation(F.linear, torch.ones(3, 2), moments.mean, None)
        >>> closed_form_moments(operation, moments, None)[1].flatten().tolist()  # 1 + 2 + 2 * 1
        [5.0, 5.0, 5.0]
    """
    mean, variances = output_moments(operation, weight, bias)
    parts = [part for part in (weight, bias) if part is not None and part.joint is not None]
    groups = {part.joint.names: part.joint for part in parts if part.joint is not None}
    with torch.autocast(mean.device.type, enabled=False):
        for group in groups.values():
            inputs = operation.inputs.to(group.scale.dtype)
            if weight.joint is not group:  # these are the biases alone
                inputs = inputs[..., :0]
            num_outputs = operation.num_outputs(mean)
            variances = variances + group.correlation.output_variances(
                group.scale, inputs, num_outputs
            )
    return mean, variances


def std_of(variance: Tensor) -> Tensor:
    """Return the square root, whose gradient at 0 is finite; without gradients exactly 0 there.

    Example:
        >>> variance = torch.zeros(1, requires_grad=True)
        >>> std_of(variance).backward(); bool(variance.grad.isfinite())
        True
    """
    # Adding costs two passes less than clamping and does not change a larger variance.
    return (variance + MIN_VARIANCE if torch.is_grad_enabled() else variance).sqrt()
