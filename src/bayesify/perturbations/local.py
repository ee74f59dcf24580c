"""Local reparametrisation: noise on the outputs of a linear operation instead of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayesify.perturbations.base import Treatment, Use
from bayesify.perturbations.operations import LinearCall
from bayesify.perturbations.perexample import LEAST_VARIANCE, Part, Pass, PerExample

__all__ = ["LocalReparameterization", "output_moments"]


@dataclass(frozen=True)
class LocalReparameterization(PerExample):
    """Draw the outputs of linear operations from their own Gaussian (Kingma et al. 2015, eq. 6).

    Where a weight meets each datum once, by a linear layer on rows of data, each datum's outputs
    have the very distribution that weight samples of its own would give. The gradient's variance
    is far smaller than weight sampling's, since the data do not share their noise.

    A weight that a datum meets in several positions, as in a convolution or in a layer over a
    sequence, would get fresh noise in each. That is the custom in the literature, and another
    model than a shared weight: such weights are sampled unless ``per_position`` is True. A weight
    that is used twice in a pass, or in any other way, is always sampled.

    Args:
        per_position: whether to draw fresh noise for each position.
        antithetic: whether samples 2i and 2i + 1 have opposite noise; it needs an even number of
            samples a step.

    Example:
        >>> from torch import nn
        >>> from bayesify.module import BayesianModule
        >>> net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(12, 2))
        >>> bnn = BayesianModule(net, perturbation=LocalReparameterization())
        >>> [(row.name, row.treatment) for row in bnn.coverage(torch.zeros(5, 1, 8))]
        [('0.weight', 'sampled'), ('0.bias', 'sampled'), ('2.weight', 'exact'), ('2.bias', 'exact')]
    """

    per_position: bool = False
    antithetic: bool = False
    takes_variances: ClassVar[bool] = True

    def treatment(self, uses: Sequence[Use]) -> Treatment:
        """See :meth:`Perturbation.treatment`."""
        if not uses:
            return Treatment("sampled", "not used in this pass")
        if len(uses) > 1:
            return Treatment("sampled", f"used {len(uses)} times in a pass")
        function, _, positions, why = uses[0]
        if positions is None:
            return Treatment("sampled", f"used by {function}, {why}")
        if positions == 1:
            return Treatment("exact", f"{function} meets each datum once")
        if not self.per_position:
            met = f"{function} meets each datum in {positions} positions"
            return Treatment("sampled", f"{met}; sampled unless per_position=True")
        return Treatment("per-position", f"{function} draws for each of {positions} positions")

    def perturbed(self, call: LinearCall, weight: Part, bias: Part | None, this: Pass) -> Tensor:
        """See :meth:`PerExample.perturbed`."""
        mean, variance = output_moments(call, weight, bias)
        # Added, where clamping would cost two passes more; it is less than a rounding of any other.
        std = (variance + LEAST_VARIANCE).sqrt()
        noise = this.noise.normals(mean.shape, std.dtype, mean.device)
        if std.dtype != mean.dtype:
            return mean + (std * noise).to(mean.dtype)
        return torch.addcmul(mean, std, noise)


def output_moments(call: LinearCall, weight: Part, bias: Part | None) -> tuple[Tensor, Tensor]:
    """Mean and variance of each output of a linear operation.

    The variance is that operation on the squared inputs with the weights' variances, in float32 at
    least; a part without a std is a constant and adds none.

    Args:
        call: the operation.
        weight: its weight.
        bias: its bias, or None.

    Returns:
        Two tensors of the shape of the outputs.

    Example:
        >>> from torch.nn import functional as F
        >>> mean, std = torch.ones(1, 2), torch.full((1, 2), 0.5)
        >>> call = LinearCall(F.linear, torch.tensor([[1.0, 2.0]]), mean, None, (), {})
        >>> output_moments(call, Part(mean, std, "weight"), None)
        (tensor([[3.]]), tensor([[1.2500]]))
    """
    mean = call.apply(call.inputs, weight.mean, None if bias is None else bias.mean)
    # Squares overflow float16, and small variances vanish in it.
    dtype = torch.promote_types(weight.mean.dtype, torch.float32)
    bias_variance = None if bias is None else bias.variance(dtype)
    variance = weight.variance(dtype)
    if variance is None:
        spread = mean.new_zeros(()) if bias_variance is None else call.channel_view(bias_variance)
        return mean, spread.expand(mean.shape)
    with torch.autocast(mean.device.type, enabled=False):
        squares = call.inputs.to(dtype).square()
        return mean, call.apply(squares, variance, bias_variance)
