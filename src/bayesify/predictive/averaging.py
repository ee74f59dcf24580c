"""Averages of class probabilities over weight samples, one sample at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Average", "averaged", "averages_joined", "entropy"]


class Average(NamedTuple):
    """What is held of S distributions over K classes.

    Args:
        log_mean: logarithm of the averaged probabilities, shape (..., K).
        expected_entropy: the averaged entropy, in nats, shape (...).
        mutual_information: the averaged KL divergence from the average, in nats, shape (...).
        log_samples: logarithm of each one's probabilities, shape (S, ..., K), or None.
    """

    log_mean: Tensor
    expected_entropy: Tensor
    mutual_information: Tensor
    log_samples: Tensor | None


def averaged(log_probs: Iterable[Tensor], count: int, *, keep_samples: bool) -> Average:
    """The average of ``count`` distributions, of shape (..., K), made as they are asked for.

    The averaged probabilities are summed as logarithms, so that a class that no sample believes
    in has a finite nll, and in float32 at least: in half precision the sum would stand still. The
    entropies, and the divergences KL(p_s || average) = cross-entropy - entropy, are summed in
    float64 from the probabilities themselves: they are small differences where the samples nearly
    agree.

    Raises:
        ValueError: there is none.

    Example:
        >>> found = averaged([torch.tensor([0.5, 0.5]).log()] * 3, 3, keep_samples=False)
        >>> found.log_mean.exp(), found.mutual_information
        (tensor([0.5000, 0.5000]), tensor(0.))
    """
    log_sum: Tensor | None = None
    prob_sum = entropy_sum = torch.zeros(())
    kept: Tensor | None = None
    index = -1  # and no enumerate, which would hold the sample while the next is made
    for sample in log_probs:
        index += 1
        if keep_samples:
            if kept is None:
                kept = sample.new_empty((count, *sample.shape))
            kept[index] = sample
        probs = sample.to(_wide(sample)).exp()
        if log_sum is None:
            dtype = sample.dtype
            log_sum = sample.to(torch.promote_types(dtype, torch.float32), copy=True)
            prob_sum, entropy_sum = torch.zeros_like(probs), torch.zeros_like(probs[..., 0])
        else:
            # In place, unless the result is to be differentiated.
            out = None if sample.requires_grad or log_sum.requires_grad else log_sum
            log_sum = torch.logaddexp(log_sum, sample, out=out)
        del sample
        probs, entropies = _split(probs)
        prob_sum += probs
        entropy_sum += entropies
        del probs, entropies
    if log_sum is None:
        raise ValueError("at least one weight sample is needed, got none")
    mean, expected = prob_sum / count, entropy_sum / count
    information = _split(mean)[1] - expected
    return Average(
        (log_sum - math.log(count)).to(dtype),
        expected.to(dtype),
        information.clamp_min(0.0).to(dtype),
        kept,
    )


def averages_joined(parts: Sequence[Average]) -> Average:
    """The average, in equal shares, of several averages.

    Its samples are all of theirs, if they have equally many.
    """
    means = averaged([part.log_mean for part in parts], len(parts), keep_samples=False)
    kept = [part.log_samples for part in parts if part.log_samples is not None]
    whole = len(kept) == len(parts) and len({len(part) for part in kept}) == 1
    inside = torch.stack([part.mutual_information for part in parts]).mean(0)
    return Average(
        means.log_mean,
        torch.stack([part.expected_entropy for part in parts]).mean(0),
        inside + means.mutual_information,
        torch.cat(kept) if whole else None,
    )


def entropy(log_probs: Tensor) -> Tensor:
    """Entropy in nats over the last axis, also where log p is -inf."""
    return _split(log_probs.to(_wide(log_probs)).exp())[1].to(log_probs.dtype)


def _split(probs: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities that sum to 1 to full precision, and their entropy to full relative precision.

    The greatest is put as 1 - rest, and enters the entropy so: of a network that is certain the
    entropy is as small as the rest, which the rounding of 1 would drown.
    """
    greatest = probs.argmax(-1, keepdim=True)
    others = _filled(probs, greatest, 0.0)
    terms = torch.special.entr(others).sum(-1, keepdim=True)
    rest = others.sum(-1, keepdim=True)
    top = 1.0 - rest
    found = terms.addcmul_(top, rest.neg_().log1p_(), value=-1.0)
    return _filled(others, greatest, top), found.squeeze(-1)


def _filled(tensor: Tensor, index: Tensor, value: Tensor | float) -> Tensor:
    # In place, unless the result is to be differentiated.
    fill: Any = tensor.scatter if tensor.requires_grad else tensor.scatter_
    filled: Tensor = fill(-1, index, value)
    return filled


def _wide(tensor: Tensor) -> torch.dtype:
    # Apple's GPUs have no float64.
    return torch.float32 if tensor.device.type == "mps" else torch.float64
