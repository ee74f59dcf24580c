"""Averages of class probabilities over weight samples, computed one sample at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "AveragedProbabilities",
    "accumulation_dtype",
    "average_probabilities",
    "entropy",
    "join_averages",
]


class AveragedProbabilities(NamedTuple):
    """The average of S distributions over K classes, and the entropies that it needs.

    Args:
        log_mean: logarithm of the averaged probabilities, shape (..., K).
        expected_entropy: entropy averaged over the S distributions, in nats, shape (...); None for
            a single one, whose entropy is that of ``log_mean``, found where it is asked for.
        mutual_information: KL divergence from their average, averaged over the S distributions, in
            nats, shape (...).
        log_samples: logarithm of the probabilities of each distribution, shape (S, ..., K), or
            None.
    """

    log_mean: Tensor
    expected_entropy: Tensor | None
    mutual_information: Tensor
    log_samples: Tensor | None


def average_probabilities(
    log_probs: Iterable[Tensor], count: int, *, keep_samples: bool
) -> AveragedProbabilities:
    """Average ``count`` distributions over classes, holding one block of them at a time.

    The averaged probabilities are accumulated as logarithms, so that a class to which every sample
    gives a tiny probability still has a finite nll, and in float32 or wider, since in half
    precision the sum would stop growing. The entropies and the divergences
    KL(p_s || average) = cross-entropy - entropy are accumulated in float64 from the probabilities,
    because they are small differences where the samples nearly agree.

    Args:
        log_probs: the log probabilities in blocks of samples, shape (S_i, ..., K).
        count: S, the number of samples in all blocks.
        keep_samples: whether the result holds the log probabilities of all samples.

    Raises:
        ValueError: there is no sample.

    Example:
        >>> blocks = [torch.tensor([[0.5, 0.5]] * size).log() for size in (1, 2)]
        >>> average = average_probabilities(blocks, 3, keep_samples=False)
        >>> average.log_mean.exp(), average.mutual_information
        (tensor([0.5000, 0.5000]), tensor(0.))
    """
    log_sum: Tensor | None = None
    prob_sum = entropy_sum = torch.zeros(())
    log_samples: Tensor | None = None
    start = 0
    for block in log_probs:
        if count == 1:
            return _of_one(block[0], keep_samples=keep_samples)
        dtype, stop = block.dtype, start + len(block)
        if keep_samples:
            if log_samples is None:
                log_samples = block.new_empty((count, *block.shape[1:]))
            log_samples[start:stop] = block
        wide, alone = torch.promote_types(dtype, torch.float32), len(block) == 1
        probs = block.to(accumulation_dtype(block)).exp()
        if block.requires_grad:
            # The gradient of a sum of zeros alone, of which each logarithm is -inf, would be NaN.
            block = block.to(wide).clamp_min(torch.finfo(wide).min)
        summed = block[0] if alone else block.to(wide).logsumexp(0)
        if log_sum is None:
            log_sum = summed.to(wide, copy=True)
        else:
            # Autograd does not allow the in-place form.
            out = None if summed.requires_grad or log_sum.requires_grad else log_sum
            log_sum = torch.logaddexp(log_sum, summed, out=out)
        del block, summed
        probs, entropies = _normalise(probs)
        if alone:  # without a copy
            probs, entropies = probs[0], entropies[0]
        else:
            probs, entropies = probs.sum(0), entropies.sum(0)
        if start == 0:
            prob_sum, entropy_sum = probs, entropies
        else:
            prob_sum += probs
            entropy_sum += entropies
        del probs, entropies
        start = stop
    if log_sum is None:
        raise ValueError("at least one weight sample is needed, got none")
    mean, expected = prob_sum / count, entropy_sum / count
    information = _normalise(mean)[1] - expected
    log_mean = log_sum - math.log(count)
    if log_mean.requires_grad:
        log_mean = log_mean.masked_fill(log_mean <= torch.finfo(wide).min, -math.inf)
    return AveragedProbabilities(
        log_mean.to(dtype),
        expected.to(dtype),
        information.clamp_min(0.0).to(dtype),
        log_samples,
    )


def _of_one(log_probs: Tensor, *, keep_samples: bool) -> AveragedProbabilities:
    """Return the average of a single distribution, which differs from nothing."""
    samples = log_probs.unsqueeze(0) if keep_samples else None
    nothing = log_probs.new_zeros(log_probs.shape[:-1])
    return AveragedProbabilities(log_probs, None, nothing, samples)


def join_averages(parts: Sequence[AveragedProbabilities]) -> AveragedProbabilities:
    """Average several averages in equal shares.

    The result has all of their samples if each holds the same number of samples, else None.
    """
    blocks = [part.log_mean.unsqueeze(0) for part in parts]
    means = average_probabilities(blocks, len(parts), keep_samples=False)
    samples = [part.log_samples for part in parts if part.log_samples is not None]
    equal = len(samples) == len(parts) and len({len(part) for part in samples}) == 1
    within = torch.stack([part.mutual_information for part in parts]).mean(0)
    return AveragedProbabilities(
        means.log_mean,
        torch.stack([_expected_entropy(part) for part in parts]).mean(0),
        within + means.mutual_information,
        torch.cat(samples) if equal else None,
    )


def _expected_entropy(of: AveragedProbabilities) -> Tensor:
    return entropy(of.log_mean) if of.expected_entropy is None else of.expected_entropy


def entropy(log_probs: Tensor) -> Tensor:
    """Compute the entropy in nats over the last axis; log p may be -inf."""
    return _normalise(log_probs.to(accumulation_dtype(log_probs)).exp())[1].to(log_probs.dtype)


def _normalise(probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities that sum to 1, and their entropy, both to full relative precision.

    The largest probability is replaced by 1 - rest, with rest the sum of the others, and its
    entropy is computed from rest. For a nearly certain prediction the entropy is of the order of
    rest, which would vanish in the rounding error of 1.
    """
    largest = probs.argmax(-1, keepdim=True)
    others = _scatter(probs, largest, 0.0)
    terms = _entropies(others).sum(-1, keepdim=True)
    rest = others.sum(-1, keepdim=True)
    # The largest of K is at least 1 / K, but the sum of rounded ones can exceed 1. The correction
    # has no gradient: that of a clamp would be 0 where equal classes are above by a rounding.
    rest = rest - (rest.detach() - (1.0 - 1.0 / probs.shape[-1])).clamp_min(0.0)
    top = 1.0 - rest
    total = terms.addcmul_(top, rest.neg_().log1p_(), value=-1.0)
    return _scatter(others, largest, top), total.squeeze(-1)


def _entropies(probs: Tensor) -> Tensor:
    """Compute -p log p, elementwise."""
    if probs.requires_grad:
        # The slope at 0 is infinite, and times the slope 0 of exp not a number; at 1 it is finite.
        probs = probs.where(probs > 0.0, 1.0)
    terms: Tensor = torch.special.entr(probs)
    return terms


def _scatter(tensor: Tensor, index: Tensor, value: Tensor | float) -> Tensor:
    # Autograd does not allow the in-place form.
    scatter: Any = tensor.scatter if tensor.requires_grad else tensor.scatter_
    filled: Tensor = scatter(-1, index, value)
    return filled


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Return float64, or float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64
