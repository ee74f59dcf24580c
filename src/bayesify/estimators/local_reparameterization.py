"""Local reparametrisation: sample the outputs of a linear operation instead of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayesify.estimators.estimator import ParameterUse, Treatment
from bayesify.estimators.operations import LinearOperation
from bayesify.estimators.per_example import (
    MIN_VARIANCE,
    ParameterMoments,
    PassState,
    PerExampleEstimator,
)

__all__ = ["LocalReparameterization", "output_moments"]


@dataclass(frozen=True)
class LocalReparameterization(PerExampleEstimator):
    """Sample the outputs of linear operations from their Gaussian (Kingma et al. 2015, eq. 6).

    If each example uses a weight once, in a linear layer on rows of examples, the outputs of each
    example have exactly the distribution that its own weight sample would give. The gradient has a
    far smaller variance than in weight sampling, since examples do not share their noise.

    If an example uses a weight in several positions, as in a convolution or in a layer over a
    sequence, this method would draw fresh noise in each position. The literature usually does so,
    but it is another model than a shared weight. Such weights are sampled unless ``per_position``
    is True. A weight that is used twice in a pass, or in any other way, is always sampled.

    Args:
        per_position: whether to draw fresh noise for each position.
        antithetic: whether samples 2i and 2i + 1 have opposite noise. It needs an even number of
            samples a step.

    Example:
        >>> from torch import nn
        >>> from bayesify.module.bayesian import BayesianModule
        >>> net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(12, 2))
        >>> bnn = BayesianModule(net, estimator=LocalReparameterization())
        >>> [(row.name, row.treatment) for row in bnn.summary(torch.zeros(5, 1, 8))]
        [('0.weight', 'sampled'), ('0.bias', 'sampled'), ('2.weight', 'exact'), ('2.bias', 'exact')]
    """

    per_position: bool = False
    antithetic: bool = False
    uses_variances: ClassVar[bool] = True

    def treatment(self, uses: Sequence[ParameterUse]) -> Treatment:
        """See :meth:`Estimator.treatment`."""
        if not uses:
            return Treatment("sampled", "not used in this pass")
        if len(uses) > 1:
            return Treatment("sampled", f"used {len(uses)} times in a pass")
        function, _, positions, why = uses[0]
        if positions is None:
            return Treatment("sampled", f"used by {function}, {why}")
        if positions == 1:
            return Treatment("exact", f"{function} uses it once for each example")
        if not self.per_position:
            reason = f"{function} uses it in {positions} positions of each example"
            return Treatment("sampled", f"{reason}; sampled unless per_position=True")
        return Treatment("per-position", f"{function} draws for each of {positions} positions")

    def noisy_output(
        self,
        operation: LinearOperation,
        weight: ParameterMoments,
        bias: ParameterMoments | None,
        state: PassState,
    ) -> Tensor:
        """See :meth:`PerExampleEstimator.noisy_output`."""
        mean, variance = output_moments(operation, weight, bias)
        # Adding costs two passes less than clamping and does not change a larger variance.
        std = (variance + MIN_VARIANCE).sqrt()
        noise = state.noise.normals(mean.shape, std.dtype, mean.device)
        if std.dtype != mean.dtype:
            return mean + (std * noise).to(mean.dtype)
        return torch.addcmul(mean, std, noise)


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
