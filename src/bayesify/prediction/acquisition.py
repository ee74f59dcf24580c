"""Acquisition functions: the information that labels of unlabelled examples would give.

All work on the kept weight samples of classifiers, ``predict(x, keep_samples=True)``. A weight
sample must stand for the same weights at every example, as in the predictions of a
``BayesianModule`` or a ``DeepEnsemble``; passes with dropout draw new masks for each example. BALD
(Houlsby et al. 2011, eq. 2) needs no function here: it is ``predictive.epistemic``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bayesify.noise.arguments import whole_number
from bayesify.noise.keys import generator_of
from bayesify.prediction.averaging import accumulation_dtype
from bayesify.prediction.bernoulli import BernoulliPredictive
from bayesify.prediction.categorical import CategoricalPredictive
from bayesify.prediction.predictive import KEEP_SAMPLES_HINT, Predictive

__all__ = ["batch_bald", "epig", "joint_information"]

#: Numbers in one working tensor, 32 MB in float64.
_LARGEST = 2**22


def batch_bald(
    predictive: Predictive, num_examples: int, *, num_configurations: int = 1000, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Choose a batch of examples whose labels together are most informative about the weights.

    BatchBALD (Kirsch, van Amersfoort and Gal 2019): the batch is built greedily (algorithm 1), each
    time by the example with the largest mutual information of its label and the weights, given the
    labels of those chosen before. By the chain rule the gains sum to the joint mutual information
    of the batch (section 3). Two examples that would teach the same are not both chosen, as they
    are where each is ranked alone.

    The labels of the batch so far have K^(b-1) configurations. Up to ``num_configurations`` they
    are enumerated, and the gain is exact for these weight samples; beyond, as many are drawn from
    the predictive distribution, in equal shares from each weight sample (section 3.2). S weight
    samples can tell apart log S nats at most: use S far above the exponential of the sum of gains.

    Args:
        predictive: of N candidates with S kept weight samples and K classes.
        num_examples: the number of examples to choose, from 1 to N.
        num_configurations: configurations of labels to enumerate or to draw.
        seed: determines the drawn configurations.

    Returns:
        The indices of the examples in the order of choice, int64, shape (num_examples,), and the
        gain of each, in nats, shape (num_examples,). The time is about num_examples *
        num_configurations * S * N * K multiplications, the working memory 100 MB next to the
        samples.

    Raises:
        TypeError: the prediction is not of classes or binary labels, or ``num_examples`` or
            ``num_configurations`` no whole number.
        ValueError: the samples were not kept, an example has several labels, a prediction is no
            number, or ``num_examples`` or ``num_configurations`` is out of range.

    Example:
        >>> a, b = [3.0, -3.0], [-3.0, 3.0]  # examples 0 and 1 are copies; 2 is independent
        >>> logits = torch.tensor([[a, a, b], [a, a, a], [b, b, b], [b, b, a]])
        >>> p = CategoricalPredictive.from_logits(logits, keep_samples=True)
        >>> batch_bald(p, 2)[0].tolist(), p.epistemic.topk(2).indices.sort().values.tolist()
        ([0, 2], [0, 1])
    """
    log_probs = _log_probs_of(predictive, "the predictive distribution")
    num_examples = whole_number("num_examples", num_examples, None)
    if not 1 <= num_examples <= log_probs.shape[1]:
        raise ValueError(
            f"num_examples must lie from 1 to {log_probs.shape[1]}, the number of examples, got "
            f"{num_examples}"
        )
    labels = _ChosenLabels(log_probs, num_configurations, seed)
    indices: list[int] = []
    gains: list[Tensor] = []
    for _ in range(num_examples):
        information = labels.information(log_probs)
        information[indices] = -math.inf
        best = int(information.argmax())
        gains.append(information[best])
        indices.append(best)
        labels.add(best)
    return torch.tensor(indices, device=log_probs.device), torch.stack(gains)


def joint_information(
    predictive: Predictive,
    indices: Sequence[int] | Tensor,
    *,
    num_configurations: int = 1000,
    seed: int = 0,
) -> Tensor:
    """Compute the mutual information of the weights and the labels of several examples together.

    I(y_1, ..., y_b; w) = H(y_1, ..., y_b) - sum of the averaged entropies H(y_i | w), the objective
    of BatchBALD (Kirsch et al. 2019, section 3).

    Args:
        predictive: of N examples with S kept weight samples.
        indices: the examples of the batch, b of 0 to N - 1. One that occurs twice stands for two
            labels of it, independent given the weights.
        num_configurations: as for :func:`batch_bald`; exact if K^(b-1) is at most this.
        seed: as for :func:`batch_bald`.

    Returns:
        The information in nats, a tensor without axes.

    Raises:
        TypeError: as for :func:`batch_bald`.
        ValueError: as for :func:`batch_bald`, or ``indices`` is no sequence, is empty or has
            another index.

    Example:
        >>> logits = torch.tensor([[[50.0, 0.0]] * 2, [[0.0, 50.0]] * 2])  # two weight samples
        >>> p = CategoricalPredictive.from_logits(logits, keep_samples=True)
        >>> round(joint_information(p, [0, 1]).item(), 4), round(p.epistemic.sum().item(), 4)
        (0.6931, 1.3863)
    """
    log_probs = _log_probs_of(predictive, "the predictive distribution")
    chosen = torch.as_tensor(indices).tolist()
    count = log_probs.shape[1]
    if type(chosen) is not list:
        raise ValueError(f"indices must be a sequence, got {chosen}; write [{chosen}]")
    if not chosen or not all(type(i) is int and 0 <= i < count for i in chosen):
        raise ValueError(
            f"indices must be at least one integer from 0 to {count - 1}, got {chosen}"
        )
    labels = _ChosenLabels(log_probs, num_configurations, seed)
    total = torch.zeros((), dtype=accumulation_dtype(log_probs), device=log_probs.device)
    for index in chosen:
        total = total + labels.information(log_probs[:, index : index + 1])[0]
        labels.add(index)
    return total


def epig(predictive: Predictive, targets: Predictive) -> Tensor:
    """Compute the information that each label would give about the labels of target inputs.

    EPIG, the expected predictive information gain (Bickford Smith et al. 2023, section 4): the
    mutual information I(y; y* | x, x*) = KL(p(y, y*) || p(y) p(y*)), averaged over the target
    inputs x*. BALD asks what would teach most about the weights; EPIG asks what would teach most
    about the predictions that are needed, and leaves out what is irrelevant to them.

    Args:
        predictive: of N candidates with S kept weight samples.
        targets: of M inputs such as those that will be predicted, by the same S weight samples, so
            from the same network with the same ``num_samples`` and ``seed``.

    Returns:
        The information in nats, shape (N,), from 0 to log K. The time is about S * N * M * K^2
        multiplications: some hundred targets, drawn at random, are enough.

    Raises:
        TypeError: a prediction is not of classes or binary labels.
        ValueError: the samples were not kept, their numbers differ, an example has several
            labels, or there are no targets.

    Example:
        >>> a, b = [9.0, -9.0], [-9.0, 9.0]  # example 0 is as the target, 1 is independent of it
        >>> logits = torch.tensor([[a, b], [a, a], [b, b], [b, a]])
        >>> p = CategoricalPredictive.from_logits(logits, keep_samples=True)
        >>> target = CategoricalPredictive.from_logits(logits[:, :1], keep_samples=True)
        >>> epig(p, target).round(decimals=4), p.epistemic.round(decimals=4)
        (tensor([0.6931, 0.0000], dtype=torch.float64), tensor([0.6931, 0.6931]))
    """
    log_probs = _log_probs_of(predictive, "the predictive distribution")
    log_targets = _log_probs_of(targets, "the targets")
    if len(log_probs) != len(log_targets):
        raise ValueError(
            "candidates and targets must be predicted by the same weight samples, got "
            f"{len(log_probs)} and {len(log_targets)} samples; use the same num_samples and seed"
        )
    if not log_targets.shape[1]:
        raise ValueError("the targets must be at least one example, got 0; predict some inputs")
    count, dtype = len(log_probs), accumulation_dtype(log_probs)
    information = []
    for part in _parts(log_probs, per_example=log_probs.shape[-1] * log_targets.shape[-1]):
        probs = part.to(dtype).exp()
        log_mean = _log_mean(probs)
        total = torch.zeros(probs.shape[1], dtype=dtype, device=probs.device)
        # The joint table of a target and all candidates of the part.
        size = max(1, _LARGEST // (probs[0].numel() * log_targets.shape[-1]))
        for log_target in log_targets.split(size, 1):
            target = log_target.to(dtype).exp()
            joint = torch.einsum("snk,smc->nkmc", probs, target) / count
            # Not the logarithm of their product, which underflows before the joint probability.
            apart = log_mean[:, :, None, None] + _log_mean(target)
            # Both terms vanish where the joint probability does.
            total += (torch.special.xlogy(joint, joint) - joint * apart).sum((1, 2, 3))
        information.append(total / log_targets.shape[1])
    return torch.cat(information).clamp_min(0.0)


def _log_mean(probs: Tensor) -> Tensor:
    """Return the logarithm of the mean over the samples, finite also where the mean is 0."""
    return probs.mean(0).log().clamp_min(torch.finfo(probs.dtype).min / 4.0)


class _ChosenLabels:
    """The joint distribution of the labels of the chosen examples, one row a configuration.

    Args:
        log_probs: log probabilities of all candidates, shape (S, N, K).
        limit: the most configurations that are enumerated, and the number that is drawn beyond.
        seed: determines what is drawn.
    """

    def __init__(self, log_probs: Tensor, limit: int, seed: int) -> None:
        limit = whole_number("num_configurations", limit)
        count, dtype = len(log_probs), accumulation_dtype(log_probs)
        self._log_probs, self._limit = log_probs, limit
        self._chosen: list[int] = []
        #: For each drawn configuration its weight sample, or None while all are enumerated.
        self._origins: Tensor | None = None
        self._generator = generator_of(seed)
        # log p(configuration | w_s), (C, S): one configuration, of no labels.
        self._log_given = torch.zeros(1, count, dtype=dtype, device=log_probs.device)

    def information(self, log_probs: Tensor) -> Tensor:
        """Return I(y; w | labels of the chosen examples) of candidates (S, n, K), nats, (n,).

        It is the mean over the configurations of the information under the posterior of the weight
        samples given the configuration, so that it is not negative also where they were drawn.
        """
        log_given = self._log_given
        posterior = log_given.softmax(1)  # of the weight samples, (C, S)
        if self._origins is None:
            share = (log_given.logsumexp(1) - math.log(log_given.shape[1])).exp()
        else:
            share = log_given.new_full((len(log_given),), 1.0 / len(log_given))
        of_samples = share @ posterior  # (S,)
        found = []
        for part in _parts(log_probs, per_example=len(log_given) * log_probs.shape[-1]):
            probs = part.to(log_given.dtype).exp()
            mixed = (posterior @ probs.flatten(1)).unflatten(1, probs.shape[1:])  # (C, n, K)
            found.append(
                share @ torch.special.entr(mixed).sum(-1)
                - of_samples @ torch.special.entr(probs).sum(-1)
            )
        return torch.cat(found).clamp_min_(0.0)

    def add(self, index: int) -> None:
        """Add the label of one more example."""
        log_given, added = self._log_given, self._of(index)  # (C, S), (S, K)
        self._chosen.append(index)
        if self._origins is None and len(log_given) * added.shape[1] <= self._limit:
            extended = (log_given.unsqueeze(1) + added.T).flatten(0, 1)
            self._log_given = extended[extended.isfinite().any(1)]  # p = 0 has no posterior
            return
        if self._origins is None:
            self._draw()
        else:
            self._log_given = log_given + self._drawn(index)

    def _draw(self) -> None:
        """Draw configurations in place of all of them, the same number from each weight sample."""
        count = self._log_given.shape[1]
        rounds = -(-self._limit // count)
        self._origins = torch.arange(count).repeat(rounds)
        self._log_given = torch.stack([self._drawn(index) for index in self._chosen]).sum(0)

    def _drawn(self, index: int) -> Tensor:
        """Draw a label of an example for each configuration; return log p(label | w_s), (C, S)."""
        assert self._origins is not None
        log_probs = self._of(index)
        by_sample = log_probs.exp().cpu()[self._origins]
        labels = torch.multinomial(by_sample, 1, generator=self._generator).squeeze(1)
        return log_probs.T[labels.to(log_probs.device)]

    def _of(self, index: int) -> Tensor:
        return self._log_probs[:, index].to(self._log_given.dtype)


def _log_probs_of(predictive: Predictive, name: str) -> Tensor:
    """Return the log probabilities of each weight sample, shape (S, N, K)."""
    if not isinstance(predictive, CategoricalPredictive | BernoulliPredictive):
        raise TypeError(
            f"{name} must be of classes or binary labels, got {type(predictive).__name__}"
        )
    log_probs = predictive.log_samples
    if log_probs is None:
        raise ValueError(f"{name} must have its weight samples; {KEEP_SAMPLES_HINT}")
    if log_probs.dim() == 4 and log_probs.shape[2] == 1:
        log_probs = log_probs.squeeze(2)  # binary labels of shape (N, 1)
    if log_probs.dim() != 3:
        raise ValueError(
            f"{name} must have one label an example, got samples of shape "
            f"{tuple(log_probs.shape)} where (S, N, K) is needed"
        )
    undefined = log_probs.isnan().any(-1).any(0)
    if bool(undefined.any()):
        raise ValueError(
            f"{name} must be numbers, got NaN of example {int(undefined.nonzero()[0])}; leave such "
            "examples out"
        )
    return log_probs


def _parts(log_probs: Tensor, *, per_example: int) -> Iterator[Tensor]:
    """Split (S, n, K) so that a part and ``per_example`` numbers for each of it are not large."""
    needed = max(per_example, len(log_probs) * log_probs.shape[-1])
    return iter(log_probs.split(max(1, _LARGEST // needed), 1))
