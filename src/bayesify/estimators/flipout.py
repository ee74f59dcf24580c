"""Flipout: one weight sample for the minibatch, with random signs for each example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.estimators.estimator import ParameterUse, Treatment
from bayesify.estimators.operations import LinearOperation
from bayesify.estimators.per_example import ParameterMoments, PassState, PerExampleEstimator

__all__ = ["Flipout"]


@dataclass(frozen=True)
class Flipout(PerExampleEstimator):
    """Multiply the shared noise of a weight by random signs of each example.

    Wen et al. 2018, eqs 3 and 4: example n has the weight mean + (std * noise) * (r_n s_n^T), with
    random signs r_n of the outputs and s_n of the inputs. The distribution of this weight is the
    same as in weight sampling. The weights of different examples are uncorrelated, which removes
    most of the gradient's variance. The signs of an example are the same in all positions and in
    all uses of a weight within a pass, so that each example has one weight everywhere. Flipout is
    therefore exact in convolutions, sequences and shared layers too.

    A weight whose operation has other rows than the examples, or that is used in any other way, is
    sampled. Tracing cannot detect a network that reorders the examples of a minibatch between two
    uses of a weight: there an example has two patterns of signs, as where two convolutions with
    different numbers of groups share a kernel.

    Args:
        antithetic: whether samples 2i and 2i + 1 have opposite noise. It needs an even number of
            samples a step.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from bayesify.module.bayesian import BayesianModule
        >>> net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
        >>> bnn = BayesianModule(net, estimator=Flipout())
        >>> [(row.name, row.treatment) for row in bnn.summary(torch.zeros(5, 7, dtype=torch.long))]
        [('0.weight', 'sampled'), ('1.weight', 'exact'), ('1.bias', 'exact')]
    """

    antithetic: bool = False

    def treatment(self, uses: Sequence[ParameterUse]) -> Treatment:
        """See :meth:`Estimator.treatment`."""
        if not uses:
            return Treatment("sampled", "not used in this pass")
        for use in uses:
            if use.rows is None:
                return Treatment("sampled", f"used by {use.function}, {use.why}")
            if use.rows > 1:
                return Treatment("sampled", f"{use.function} has {use.rows} rows for each example")
        # Compiled code cannot compare names of functions, and shows nobody the reason.
        known = uses[:1] if torch.compiler.is_compiling() else uses
        functions = " and ".join(dict.fromkeys(use.function for use in known))
        return Treatment("exact", f"{functions} uses random signs for each example")

    def noisy_output(
        self,
        operation: LinearOperation,
        weight: ParameterMoments,
        bias: ParameterMoments | None,
        state: PassState,
    ) -> Tensor:
        """See :meth:`PerExampleEstimator.noisy_output`."""
        inputs = operation.inputs
        outputs = operation.apply(inputs, weight.mean, None if bias is None else bias.mean)
        rows = inputs.shape[0]
        if weight.spread is not None:
            signs = _signs(weight, operation.input_axes, (rows, operation.num_inputs), state)
            flipped = inputs * operation.channel_view(signs).to(inputs.dtype)
            shared = operation.apply(flipped, _shared_noise(weight, state), None)
            shape = (rows, operation.num_outputs(outputs))
            signs = _signs(weight, operation.output_axes, shape, state)
            outputs = outputs + shared * operation.channel_view(signs).to(shared.dtype)
        if bias is not None and bias.spread is not None:
            signs = _signs(bias, (0,), (rows, bias.mean.numel()), state)
            bias_noise = operation.channel_view(signs * _shared_noise(bias, state))
            outputs = outputs + bias_noise.to(outputs.dtype)
        return outputs


def _shared_noise(parameter: ParameterMoments, state: PassState) -> Tensor:
    """Return std * noise of a parameter, drawn once per pass for all examples and uses."""
    key = f"{parameter.name} noise"
    if key not in state.drawn:
        assert parameter.std is not None
        mean = parameter.mean
        noise = state.noise.normals(mean.shape, mean.dtype, mean.device)
        state.drawn[key] = (parameter.std * noise).to(mean.dtype)
    return state.drawn[key]


def _signs(
    parameter: ParameterMoments, axes: tuple[int, ...], shape: tuple[int, int], state: PassState
) -> Tensor:
    """Return each example's signs along axes of a parameter, drawn once per pass.

    Args:
        parameter: the parameter.
        axes: axes that are one in the operation; each has signs of its own, so that a use with
            other axes together has the same weight.
        shape: the number of examples and that of the axes' features.
        state: the state of the pass.
    """
    mean = parameter.mean
    signs = mean.new_ones((shape[0], 1)) if len(axes) != 1 else None
    for axis in axes:
        size = shape[1] if signs is None else mean.shape[axis]
        key = f"{parameter.name} axis {axis}"
        if key in state.drawn and state.drawn[key].shape[1] != size:
            key += f" of {size}"  # a convolution with another number of groups
        if key not in state.drawn:
            state.drawn[key] = state.noise.signs((shape[0], size), mean.dtype, mean.device)
        drawn = state.drawn[key]
        signs = drawn if signs is None else (signs[:, :, None] * drawn[:, None]).flatten(1)
    assert signs is not None
    return signs
