"""Quantisation of weights to multiples of a step that follows from their posterior."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from bayesify.distributions.posteriors import GaussianPosterior
from bayesify.io.entropy_coding import IntArray
from bayesify.module.bayesian import BayesianModule

__all__ = ["Quantized", "quantize", "quantize_means", "typical_std"]

FloatArray: TypeAlias = npt.NDArray[np.float64]


class Quantized(NamedTuple):
    """Integers and a step in the weights' unit, whose product are the weights of a tensor."""

    integers: IntArray
    step: float

    @property
    def weights(self) -> torch.Tensor:
        """The weights, float64."""
        return torch.from_numpy(self.integers * self.step)


def quantize_means(bnn: BayesianModule, step: float) -> dict[str, Quantized]:
    """Quantise the mean weights of a network, by the name of their parameter.

    Args:
        bnn: the network.
        step: as for :func:`quantize`.

    Raises:
        TypeError: the posterior has no std, as a point estimate.
        ValueError: step is not positive and finite, or as :func:`quantize` does.

    Example:
        >>> from torch import nn
        >>> bnn = BayesianModule(nn.Linear(2, 1, bias=False), init_std=0.5)
        >>> _ = bnn.posterior.mean.data.copy_(torch.tensor([-1.1, 2.0]))
        >>> quantize_means(bnn, step=1.0)["weight"].weights
        tensor([[-1.,  2.]], dtype=torch.float64)
    """
    if not 0.0 < step < float("inf"):
        raise ValueError(f"step must be positive and finite, got {step}")
    posterior = bnn.posterior
    if not isinstance(posterior, GaussianPosterior):
        raise TypeError(
            "the steps of compression follow from the posterior's std, but got "
            f"{type(posterior).__name__}; train with posterior=MeanFieldGaussian"
        )
    means = bnn.layout.unflatten(posterior.masked_mean.detach().cpu().double())
    stds = bnn.layout.unflatten(posterior.full_std.detach().cpu().double())
    return {name: quantize(means[name].numpy(), stds[name].numpy(), step) for name in means}


def typical_std(means: FloatArray, stds: FloatArray) -> float:
    """Return one std for a tensor: the root of the sum of mean^2 over the sum of (mean / std)^2.

    It is a harmonic mean of the variances with the weights mean^2, so that the many weights of an
    unpruned network that are near zero compared with their std hardly count. It is 0 if all means
    are.

    Example:
        >>> typical_std(np.array([2.0, 0.0]), np.array([0.5, 1.0]))
        0.5
    """
    used = means != 0.0
    if not used.any():
        return 0.0
    squares = np.square(means[used])
    return float(np.sqrt(squares.sum() / (squares / np.square(stds[used])).sum()))


def quantize(means: FloatArray, stds: FloatArray, step: float) -> Quantized:
    """Quantise the weights of a tensor to the nearest multiples of one step.

    Args:
        means: any shape; exactly zero where pruned.
        stds: the same shape; ignored where pruned.
        step: the step as a multiple of :func:`typical_std`.

    Returns:
        The weights, which differ from the means by half a step at most. bfloat16 represents the
        step exactly; it is 0 if all means are.

    Raises:
        ValueError: a mean is not finite, or an integer would not be below 2^30.

    Example:
        >>> integers, size = quantize(np.array([0.0, 1.0, -2.1]), np.full(3, 0.5), step=1.0)
        >>> integers.tolist(), size
        ([0, 2, -4], 0.5)
    """
    if not np.isfinite(means).all():
        raise ValueError("weights must be finite, got some that are not; train again")
    typical = typical_std(means, stds)
    if typical == 0.0:
        return Quantized(np.zeros(means.shape, np.int64), 0.0)
    size = float(torch.tensor(step * typical, dtype=torch.bfloat16))
    largest = float(np.abs(means).max())
    if not largest < size * 2.0**30:
        raise ValueError(
            f"weights must be below 2^30 steps, got {largest:g} and a step of {step:g} times the "
            f"typical std {typical:g}; give a larger step"
        )
    return Quantized(np.rint(means / size).astype(np.int64), size)
