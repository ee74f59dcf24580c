"""Local reparametrisation: sample the outputs of a linear operation instead of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayesify.distributions.kronecker import Kronecker
from bayesify.distributions.structured import Group, ScaledGroup
from bayesify.estimators.estimator import ParameterUse, Treatment
from bayesify.estimators.moments import ParameterMoments, output_moments, std_of
from bayesify.estimators.operations import LinearOperation
from bayesify.estimators.per_example import PassState, PerExampleEstimator

__all__ = ["LocalReparameterization"]


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

    Under a ``MatrixGaussian`` W - mean = A (scale * E) B^T, bias included as a column, the outputs
    of an example x are A (sqrt(v) * e) from their mean, with v_i = sum_j scale_ij^2 (B^T x)_j^2 and
    as many normals e as outputs: all their covariances are those of a weight sample of the
    example's own. For a matrix normal distribution, scale = r c^T, that covariance is A diag(r^2)
    A^T times the number x^T B diag(c^2) B^T x (Louizos and Welling 2016). Only layers x W^T + b
    without pruned weights are drawn so; other dependent weights are sampled together.

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
        function, positions = uses[0].function, uses[0].positions
        if positions is None:
            return Treatment("sampled", f"used by {function}, {uses[0].why}")
        if positions == 1:
            return Treatment("exact", f"{function} uses it once for each example")
        if not self.per_position:
            reason = f"{function} uses it in {positions} positions of each example"
            return Treatment("sampled", f"{reason}; sampled unless per_position=True")
        return Treatment("per-position", f"{function} draws for each of {positions} positions")

    def draws_outputs_of(self, group: Group) -> bool:
        """See :meth:`PerExampleEstimator.draws_outputs_of`."""
        return isinstance(group.correlation, Kronecker)

    def noisy_output(
        self,
        operation: LinearOperation,
        weight: ParameterMoments,
        bias: ParameterMoments | None,
        state: PassState,
    ) -> Tensor:
        """See :meth:`PerExampleEstimator.noisy_output`."""
        mean, variance = output_moments(operation, weight, bias)
        if weight.joint is not None:
            deviations = _joint_deviations(operation, weight.joint, state)
            if bias is not None and bias.spread is not None:
                deviations = deviations + _drawn(variance, state)
            return mean + deviations.to(mean.dtype)
        std = std_of(variance)
        noise = state.noise.normals(mean.shape, std.dtype, mean.device)
        if std.dtype != mean.dtype:
            return mean + (std * noise).to(mean.dtype)
        return torch.addcmul(mean, std, noise)


def _drawn(variance: Tensor, state: PassState) -> Tensor:
    """Draw independent normals of these variances."""
    noise = state.noise.normals(variance.shape, variance.dtype, variance.device)
    return std_of(variance) * noise


def _joint_deviations(operation: LinearOperation, group: ScaledGroup, state: PassState) -> Tensor:
    """Draw the outputs of a layer of dependent weights, less their mean."""
    assert isinstance(group.correlation, Kronecker)
    with torch.autocast(group.scale.device.type, enabled=False):
        inputs = operation.inputs.to(group.scale.dtype)
        variances, factor = group.correlation.output_noise(group.scale, inputs)
        deviations = _drawn(variances, state)
        return deviations if factor is None else deviations @ factor.T
