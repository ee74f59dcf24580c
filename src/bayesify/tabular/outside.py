"""Widen the predictive distribution of rows that lie outside the training data."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from bayesify.prediction import (
    CategoricalPredictive,
    CountPredictive,
    GaussianPredictive,
    Predictive,
    StudentTPredictive,
)
from bayesify.prediction.averaging import entropy

__all__ = ["COPIES", "FEWEST_SAMPLES", "doubt", "shuffled_normal_quantiles", "widen", "widened"]

#: Largest share of the training frequencies in the probabilities of a row outside.
_MOST_MIXED = 0.5
#: Fewer weight samples cannot carry another variance of their means.
FEWEST_SAMPLES = 8
#: So often those of few samples are repeated, where noise cannot carry it either.
COPIES = 32


def doubt(distances: Tensor) -> Tensor:
    """Return d / (1 + d), from 0 for a row within to 1.

    Args:
        distances: how far each row lies outside, shape (N,), inf included.

    Example:
        >>> doubt(torch.tensor([0.0, 1.0, float("inf")])).tolist()
        [0.0, 0.5, 1.0]
    """
    return torch.where(distances.isinf(), 1.0, distances / (1.0 + distances))


def widened(predictive: Predictive, distances: Tensor, marginal: Tensor) -> Predictive:
    """Return predictions with less trust in rows outside; those of rows within are unchanged.

    The network was not checked there, so that its prediction may be no better than that of the
    targets alone. With w = d / (1 + d) for a distance d, the variance of a number grows by w times
    the variance of the training targets, as epistemic uncertainty; its mean stays. The logarithm
    of a count's mean varies more by w times that of a log-normal variable with the mean and the
    variance of the training counts; its mean stays too. Classes: with
    probability w / 2 the label is drawn by the training frequencies, and not by the network. Which
    of the two holds is lack of knowledge, so that what is added is epistemic. Where weight samples
    are kept, a share w / 2 of them, chosen at random, is replaced by certain predictions, of each
    class as often as in training; the mean over the samples then differs from the mean of the
    prediction by that choice. Fewer than 8 weight samples of
    a number cannot carry another variance, which then is noise.

    Args:
        predictive: of N rows.
        distances: how far each row lies outside, shape (N,), inf included.
        marginal: variance of the training targets, a number or shape (K,); for counts the
            ``spread`` of ``CountStatistics``; or the frequencies of the classes in training, shape
            (K,).

    Example:
        >>> p = GaussianPredictive(torch.randn(100, 2), torch.tensor(0.5))
        >>> q = widened(p, torch.tensor([0.0, 1.0]), torch.tensor(4.0))
        >>> (q.total - p.total).round(decimals=4).tolist()
        [0.0, 2.0]
    """
    if not bool((distances > 0.0).any()):
        return predictive
    return widen(predictive, distances, marginal)


def widen(
    predictive: Predictive,
    distances: Tensor,
    marginal: Tensor,
    scores: Tensor | None = None,
) -> Predictive:
    """Return what :func:`widened` does, by operations that do not depend on the values.

    A program that traces the operations records them.

    Args:
        predictive: of N rows.
        distances: as for :func:`widened`.
        marginal: as for :func:`widened`.
        scores: :func:`shuffled_normal_quantiles` of the number of weight samples, or None to
            compute them.
    """
    far = distances > 0.0
    share = doubt(distances)
    if isinstance(predictive, CategoricalPredictive):
        return _mixed(predictive, far, _MOST_MIXED * share, marginal)
    if isinstance(predictive, CountPredictive):
        return _spread(predictive, far, share, marginal, scores)
    assert isinstance(predictive, GaussianPredictive | StudentTPredictive)
    means = predictive.means
    axes = (-1, *[1] * (means.dim() - 2))
    extra = (share.reshape(axes) * marginal).to(means).expand(means.shape[1:])
    if len(means) < FEWEST_SAMPLES:
        if isinstance(predictive, StudentTPredictive):
            scale, df = (part.to(means) for part in (predictive.scale, predictive.df))
            wide = (scale.square() + extra * (df - 2.0) / df).sqrt()
            return dataclasses.replace(
                predictive, scale=torch.where(far.reshape(axes), wide, scale.expand_as(means))
            )
        noise = predictive.noise_std.to(means).expand_as(means)
        wide = torch.where(far.reshape(axes), (noise.square() + extra).sqrt(), noise)
        return GaussianPredictive(means, wide)
    moved = means + extra.sqrt() * _uncorrelated_scores(means, scores)
    return dataclasses.replace(predictive, means=torch.where(far.reshape(axes), moved, means))


def _spread(
    predictive: CountPredictive,
    far: Tensor,
    share: Tensor,
    marginal: Tensor,
    scores: Tensor | None,
) -> CountPredictive:
    """Return counts whose logarithmic means vary by ``share * marginal`` more, of equal means."""
    rates = predictive.log_rates
    if len(rates) < FEWEST_SAMPLES:  # equal samples of one distribution are that distribution
        predictive = predictive.subset([*range(len(rates))] * COPIES)
        rates = predictive.log_rates
    axes = (-1, *[1] * (rates.dim() - 2))
    extra = (share.reshape(axes) * marginal).to(rates).expand(rates.shape[1:])
    moved = rates + extra.sqrt() * _uncorrelated_scores(rates, scores)
    moved = moved + (rates.logsumexp(0) - moved.logsumexp(0))
    wide = torch.where(far.reshape(axes), moved, rates)
    found: CountPredictive = dataclasses.replace(predictive, log_rates=wide)  # type: ignore[type-var]
    return found


def shuffled_normal_quantiles(count: int) -> Tensor:
    """Return ``count`` equally probable quantiles of a normal in a fixed random order, float64.

    Example:
        >>> shuffled_normal_quantiles(3).round(decimals=2)
        tensor([ 0.9700, -0.9700,  0.0000], dtype=torch.float64)
    """
    generator = torch.Generator()
    generator.manual_seed(0)  # so that the same row has the same prediction in every call
    ranks = torch.randperm(count, generator=generator).double()
    scores: Tensor = torch.special.ndtri((ranks + 0.5) / count)
    return scores


def _uncorrelated_scores(means: Tensor, scores: Tensor | None) -> Tensor:
    """Return numbers like S draws of a normal, of variance 1 and uncorrelated with the means."""
    normal = shuffled_normal_quantiles(len(means)) if scores is None else scores
    normal = normal.to(means).reshape(-1, *[1] * (means.dim() - 1))
    offsets = means - means.mean(0)
    # In units of their largest, so that no square overflows.
    largest = offsets.abs().amax(0)
    offsets = offsets / largest.where(largest > 0.0, 1.0)
    squares = offsets.square().sum(0)
    free = normal - offsets * ((offsets * normal).sum(0) / squares.where(squares > 0.0, 1.0))
    free = free - free.mean(0)
    found: Tensor = free / free.square().mean(0).sqrt()
    return found


def _mixed(
    p: CategoricalPredictive, far: Tensor, share: Tensor, frequencies: Tensor
) -> CategoricalPredictive:
    part = share.to(p.log_mean)
    added = part.unsqueeze(-1) * frequencies.to(p.log_mean)
    mixed = ((1.0 - part).unsqueeze(-1) * p.log_mean.exp() + added).log()
    log_mean = torch.where(far.unsqueeze(-1), mixed, p.log_mean)
    aleatoric = torch.where(far, (1.0 - part) * p.aleatoric, p.aleatoric)
    epistemic = torch.where(far, (entropy(log_mean) - aleatoric).clamp_min(0.0), p.epistemic)
    samples = p.log_samples
    if samples is not None:
        samples = samples.clone()
        samples[:, far] = _made_certain(samples[:, far], added[far])
    return type(p)(log_mean, aleatoric, epistemic, samples)


def _made_certain(log_samples: Tensor, added: Tensor) -> Tensor:
    """Return samples (S, N, K) of which a share ``added``, (N, K), is certain of each class.

    A sample at the border of two shares is certain in part.
    """
    count = len(log_samples)
    generator = torch.Generator()
    generator.manual_seed(0)  # one order for all rows and calls, as rows may come in parts
    ranks = torch.randperm(count, generator=generator).to(added).reshape(-1, 1, 1)
    ends = count * added.cumsum(-1)
    starts = ends - count * added
    certain = (torch.minimum(ends, ranks + 1.0) - torch.maximum(starts, ranks)).clamp_min(0.0)
    rest = (1.0 - certain.sum(-1, keepdim=True)).clamp_min(0.0)
    return (rest * log_samples.exp() + certain).log()
