"""Flipout: one weight perturbation for the minibatch, with signs of its own for each datum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from bayesify.perturbations.base import Treatment, Use
from bayesify.perturbations.operations import LinearCall
from bayesify.perturbations.perexample import Part, Pass, PerExample

__all__ = ["Flipout"]


@dataclass(frozen=True)
class Flipout(PerExample):
    """Multiply a shared perturbation by random signs of each datum (Wen et al. 2018, eqs 3, 4).

    Datum n meets the weight mean + (std * noise) * (s_n r_n^T), with random signs s_n of the
    outputs and r_n of the inputs. Its distribution is weight sampling's, and what different data
    meet is uncorrelated, which takes away most of the gradient's variance. A datum's signs are
    the same in all positions and in all uses of a weight within a pass, so that it meets one
    weight everywhere: exact in convolutions, sequences and shared layers too.

    A weight that meets other rows than the data, or is used in any other way, is sampled. A network
    that puts the data of a minibatch in another order between two uses of a weight is beyond what
    tracing can see: there a datum meets two patterns of signs.

    Args:
        antithetic: whether samples 2i and 2i + 1 have opposite noise; it needs an even number of
            samples a step.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from bayesify.module import BayesianModule
        >>> net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
        >>> bnn = BayesianModule(net, perturbation=Flipout())
        >>> [(row.name, row.treatment) for row in bnn.coverage(torch.zeros(5, 7, dtype=torch.long))]
        [('0.weight', 'sampled'), ('1.weight', 'exact'), ('1.bias', 'exact')]
    """

    antithetic: bool = False

    def treatment(self, uses: Sequence[Use]) -> Treatment:
        """See :meth:`Perturbation.treatment`."""
        if not uses:
            return Treatment("sampled", "not used in this pass")
        for use in uses:
            if use.rows is None:
                return Treatment("sampled", f"used by {use.function}, {use.why}")
            if use.rows > 1:
                return Treatment("sampled", f"{use.function} has {use.rows} rows for each datum")
        functions = " and ".join(dict.fromkeys(use.function for use in uses))
        return Treatment("exact", f"{functions} meets each datum with signs of its own")

    def perturbed(self, call: LinearCall, weight: Part, bias: Part | None, this: Pass) -> Tensor:
        """See :meth:`PerExample.perturbed`."""
        outputs = call.apply(call.inputs, weight.mean, None if bias is None else bias.mean)
        rows = call.inputs.shape[0]
        if weight.spread is not None:
            out_axis, in_axis = call.weight_axes
            flips = _signs(weight, in_axis, (rows, call.num_inputs), this)
            flipped = call.inputs * call.channel_view(flips).to(call.inputs.dtype)
            shared = call.apply(flipped, _perturbation(weight, this), None)
            flips = _signs(weight, out_axis, (rows, call.num_outputs(outputs)), this)
            outputs = outputs + shared * call.channel_view(flips).to(shared.dtype)
        if bias is not None and bias.spread is not None:
            flips = _signs(bias, 0, (rows, bias.mean.numel()), this)
            own = call.channel_view(flips * _perturbation(bias, this))
            outputs = outputs + own.to(outputs.dtype)
        return outputs


def _perturbation(part: Part, this: Pass) -> Tensor:
    """The shared std * noise of a parameter, the same wherever it is used in a pass."""
    key = f"{part.name} noise"
    if key not in this.drawn:
        assert part.std is not None
        mean = part.mean
        this.drawn[key] = part.std * this.noise.normals(mean.shape, mean.dtype, mean.device)
    return this.drawn[key]


def _signs(part: Part, axis: int, shape: tuple[int, int], this: Pass) -> Tensor:
    """The signs of each datum along one axis of a parameter, the same wherever it is used."""
    key = f"{part.name} axis {axis}"
    if key not in this.drawn:
        this.drawn[key] = this.noise.signs(shape, part.mean.dtype, part.mean.device)
    return this.drawn[key]
