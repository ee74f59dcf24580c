"""Quantisation of weights to multiples of a step that follows from their posterior."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from bayesify.distributions.posteriors import GaussianPosterior
from bayesify.io.entropy_coding import IntArray
from bayesify.module.bayesian import BayesianModule
from bayesify.module.pruning import normalised_rows
from bayesify.noise.arguments import positive_number

__all__ = ["Quantized", "quantize", "quantize_means", "typical_std"]

FloatArray: TypeAlias = npt.NDArray[np.float64]


class Quantized(NamedTuple):
    """Integers and a unit, whose product are the weights of a tensor."""

    integers: IntArray
    unit: float

    @property
    def weights(self) -> torch.Tensor:
        """The weights, float64."""
        # A product with an array without axes is a number of NumPy.
        return torch.from_numpy(np.asarray(self.integers * self.unit))


def quantize_means(bnn: BayesianModule, step_size: float) -> dict[str, Quantized]:
    """Quantise the mean weights of a network, by the name of their parameter.

    Of a row that weight norm or spectral norm divides by its norm, and whose means all round to
    zero, the largest becomes one unit, since a row of zeros has no direction.

    Args:
        bnn: the network.
        step_size: as for :func:`quantize`.

    Raises:
        TypeError: the network is no BayesianModule, its posterior has no std, as a point estimate,
            or step_size is no number.
        ValueError: step_size is not positive and finite, or as :func:`quantize` does.

    Example:
        >>> from torch import nn
        >>> bnn = BayesianModule(nn.Linear(2, 1, bias=False), init_std=0.5)
        >>> _ = bnn.posterior.mean.data.copy_(torch.tensor([-1.1, 2.0]))
        >>> quantize_means(bnn, step_size=1.0)["weight"].weights
        tensor([[-1.,  2.]], dtype=torch.float64)
    """
    if not isinstance(bnn, BayesianModule):
        raise TypeError(
            "a BayesianModule is needed, from whose stds the steps of compression follow, got "
            f"{type(bnn).__name__}"
        )
    step_size = positive_number("step_size", step_size)
    posterior = bnn.posterior
    if not isinstance(posterior, GaussianPosterior):
        raise TypeError(
            "the steps of compression follow from the posterior's std, but got "
            f"{type(posterior).__name__}; train with posterior=MeanFieldGaussian"
        )
    flat_means = posterior.masked_mean.detach().cpu().double()
    means = bnn.layout.unflatten(flat_means)
    stds = bnn.layout.unflatten(posterior.full_std.detach().cpu().double())
    found = {name: quantize(means[name].numpy(), stds[name].numpy(), step_size) for name in means}
    integers = bnn.layout.flatten({name: torch.as_tensor(found[name].integers) for name in found})
    for rows in normalised_rows(bnn):
        places = rows.cpu()[~integers[rows.cpu()].any(1)]
        largest = places.gather(1, flat_means[places].abs().argmax(1, keepdim=True))
        integers[largest] = flat_means[largest].sign().long()
    kept = bnn.layout.unflatten(integers)
    return {name: Quantized(kept[name].numpy(), found[name].unit) for name in found}


def typical_std(means: FloatArray, stds: FloatArray) -> float:
    """Return one std for a tensor: the root of the sum of mean^2 over the sum of (mean / std)^2.

    It is the root of a harmonic mean of the variances with weights mean^2, so that the many weights
    of an unpruned network that are near zero compared with their std hardly count. It is 0 if all
    means are, or the std of a mean that is not.

    Example:
        >>> typical_std(np.array([2.0, 0.0]), np.array([0.5, 1.0]))
        0.5
    """
    used = means != 0.0
    if not used.any():
        return 0.0
    squares = np.square(means[used])
    with np.errstate(divide="ignore"):  # a std may underflow, and the result then is 0
        return float(np.sqrt(squares.sum() / (squares / np.square(stds[used])).sum()))


def quantize(means: FloatArray, stds: FloatArray, step_size: float) -> Quantized:
    """Quantise the weights of a tensor to the nearest multiples of one unit.

    Args:
        means: any shape; exactly zero where pruned.
        stds: the same shape; ignored where pruned.
        step_size: distance of the multiples, itself a multiple of :func:`typical_std`.

    Returns:
        The weights, which differ from the means by half a unit at most. bfloat16 represents the
        unit exactly; it is 0 if all means are.

    Raises:
        ValueError: a mean is not finite, the unit would be infinite, or an integer would not be
            below 2^30.

    Example:
        >>> integers, unit = quantize(np.array([0.0, 1.0, -2.1]), np.full(3, 0.5), step_size=1.0)
        >>> integers.tolist(), unit
        ([0, 2, -4], 0.5)
    """
    if not np.isfinite(means).all():
        raise ValueError("weights must be finite, got some that are not; train again")
    if not means.any():
        return Quantized(np.zeros(means.shape, np.int64), 0.0)
    typical = typical_std(means, stds)
    unit = float(torch.tensor(step_size * typical, dtype=torch.bfloat16))
    if np.isinf(unit):
        raise ValueError(
            f"a step must be a finite float32, got {step_size:g} x the typical std {typical:g}; "
            "give a smaller step_size"
        )
    largest = float(np.abs(means).max())
    if not largest < unit * 2.0**30:
        raise ValueError(
            f"weights must be below 2^30 steps, got {largest:g} and steps of {step_size:g} times "
            f"the typical std {typical:g}; give a larger step_size"
        )
    return Quantized(np.rint(means / unit).astype(np.int64), unit)
