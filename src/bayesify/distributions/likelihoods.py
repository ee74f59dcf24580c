"""Likelihoods p(y | x, w): the density of the targets given a network's outputs."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.distributions.precision import WideModule
from bayesify.distributions.softplus import inverse_softplus, softplus
from bayesify.prediction import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    Predictive,
    SizedIterable,
    stack_samples,
)
from bayesify.prediction.bernoulli import check_labels

__all__ = ["BernoulliLikelihood", "CategoricalLikelihood", "GaussianLikelihood", "Likelihood"]


class Likelihood(WideModule, ABC):
    """The distribution of a target given the network's output.

    Its own parameters, such as a learned noise, are point estimates that are trained with the
    other parameters.

    Example:
        >>> from bayesify import CategoricalLikelihood, GaussianLikelihood
        >>> for likelihood in (CategoricalLikelihood(), GaussianLikelihood(std=0.5)):
        ...     print(likelihood.error_name, likelihood.config())
        error (%) {}
        mean squared error {'std': 0.5, 'learn_std': False}
    """

    #: Name of the quantity that ``error`` returns, with its unit.
    error_name: str

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return log p(y | output) of each example, in nats.

        Args:
            outputs: the network's outputs, shape (S, N, ...).
            targets: the targets, shape (N, ...), without the sample axis.

        Returns:
            Shape (S, N), summed over the components of each target.

        Raises:
            ValueError: shape, dtype or values of the targets do not fit the outputs.
        """

    @abstractmethod
    def predictive(self, outputs: SizedIterable, *, keep_samples: bool) -> Predictive:
        """Return the mixture over weight samples, from one output of shape (N, ...) at a time.

        Args:
            outputs: S tensors. They may be computed while iterating, so an implementation should
                hold only one of them at a time.
            keep_samples: whether the result holds the prediction of each weight sample.
        """

    @abstractmethod
    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the error of outputs (N, ...), averaged over N, a scalar; see ``error_name``.

        Raises:
            ValueError: shape, dtype or values of the targets do not fit the outputs.
        """

    @abstractmethod
    def config(self) -> dict[str, float | int | bool]:
        """Return the arguments of the constructor, from which a file restores the likelihood."""


class CategoricalLikelihood(Likelihood):
    """One of K classes, from logits of shape (S, N, K); targets are class indices, shape (N,).

    An example may have a class in each of several positions, such as the tokens of a text: logits
    (S, N, T, K) and targets (N, T). Given the weights the positions are independent, so that an
    example's log probability is their sum, and N counts examples, not positions.

    Args:
        ignore_index: a target that stands for a position without a class, such as the -100 of
            padding in Hugging Face's batches; it adds nothing. None allows none.

    Example:
        >>> outputs = torch.zeros(1, 2, 4)
        >>> CategoricalLikelihood().log_prob(outputs, torch.tensor([0, 3]))
        tensor([[-1.3863, -1.3863]])
        >>> tokens = torch.tensor([[0, 3, -100]])
        >>> CategoricalLikelihood(ignore_index=-100).log_prob(torch.zeros(1, 1, 3, 4), tokens)
        tensor([[-2.7726]])
    """

    error_name = "error (%)"

    def __init__(self, ignore_index: int | None = None) -> None:
        super().__init__()
        self.ignore_index = None if ignore_index is None else operator.index(ignore_index)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the log softmax of the target's class, in nats, shape (S, N).

        It is summed over the positions of an example.
        """
        self._check(outputs, targets)
        counted = self._counted(targets)
        classes = targets if counted is None else targets.where(counted, 0)
        index = classes.expand(outputs.shape[:-1]).unsqueeze(-1)
        if counted is not None:  # before the softmax, whose gradient may be NaN there
            outputs = outputs.where(counted.unsqueeze(-1), 0.0)
        log_probs = outputs.log_softmax(-1).gather(-1, index).squeeze(-1)
        if counted is not None:
            log_probs = log_probs.where(counted, 0.0)
        return log_probs.flatten(2).sum(-1) if log_probs.dim() > 2 else log_probs

    def predictive(self, outputs: SizedIterable, *, keep_samples: bool) -> Predictive:
        """Return the class probabilities averaged over the weight samples."""
        return CategoricalPredictive.from_logits(outputs, keep_samples=keep_samples)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of misclassified examples, or positions, in percent.

        NaN if no position has a class.
        """
        self._check(outputs.unsqueeze(0), targets)
        is_wrong, counted = outputs.argmax(-1) != targets, self._counted(targets)
        return 100.0 * (is_wrong if counted is None else is_wrong[counted]).to(torch.float64).mean()

    def config(self) -> dict[str, float | int | bool]:
        """Return ``ignore_index``, if there is one."""
        return {} if self.ignore_index is None else {"ignore_index": self.ignore_index}

    def _counted(self, targets: Tensor) -> Tensor | None:
        return None if self.ignore_index is None else targets != self.ignore_index

    def _check(self, outputs: Tensor, targets: Tensor) -> None:
        if outputs.dim() < 3:
            raise ValueError(
                "a categorical likelihood needs logits of shape (N, K) from the network, or "
                f"(N, ..., K), got {tuple(outputs.shape[1:])}"
            )
        expected = tuple(outputs.shape[1:-1])
        if tuple(targets.shape) != expected:
            raise ValueError(
                f"targets must be class indices of shape {expected}, got shape "
                f"{tuple(targets.shape)}; flatten them, or turn one-hot rows into indices with "
                "argmax(-1)"
            )
        if targets.dtype != torch.int64:
            raise ValueError(
                f"targets must be class indices of dtype torch.int64, got {targets.dtype}; "
                "convert them with .long()"
            )
        num_classes = outputs.shape[-1]
        on_cpu = targets.device.type == "cpu" and not torch.compiler.is_compiling()
        counted = self._counted(targets) if on_cpu else None
        classes = targets if counted is None else targets[counted]
        if on_cpu and classes.numel():
            low, high = int(classes.min()), int(classes.max())
            if low < 0 or high >= num_classes:
                got = low if low < 0 else high
                hint = (
                    f"; CategoricalLikelihood(ignore_index={got}) leaves such positions out"
                    if got == -100 and self.ignore_index is None
                    else ""
                )
                raise ValueError(
                    f"targets must lie from 0 to {num_classes - 1} (the network has {num_classes} "
                    f"outputs), got {got}{hint}"
                )


class BernoulliLikelihood(Likelihood):
    """Binary labels, from logits of shape (S, N) or (S, N, K).

    Targets have the shape of one sample's logits and hold 0 and 1 as booleans, integers or
    floating-point numbers. Several labels of an example are independent given the weights. For two
    exclusive classes this likelihood with one output is equivalent to ``CategoricalLikelihood``
    with two outputs.

    Example:
        >>> BernoulliLikelihood().log_prob(torch.zeros(1, 2), torch.tensor([True, False]))
        tensor([[-0.6931, -0.6931]])
    """

    error_name = "error (%)"

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the labels' log probability, in nats, summed over the labels, shape (S, N)."""
        self._check(outputs, targets)
        sign = 2.0 * targets.to(outputs.dtype) - 1.0
        log_probs = F.logsigmoid(sign * outputs)
        return log_probs.flatten(2).sum(-1) if log_probs.dim() > 2 else log_probs

    def predictive(self, outputs: SizedIterable, *, keep_samples: bool) -> Predictive:
        """Return the probability of 1 averaged over the weight samples."""
        return BernoulliPredictive.from_logits(outputs, keep_samples=keep_samples)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of wrong labels, in percent."""
        self._check(outputs.unsqueeze(0), targets)
        return 100.0 * ((outputs > 0.0) != targets.to(torch.bool)).to(torch.float64).mean()

    def config(self) -> dict[str, float | int | bool]:
        """Return an empty dict: there are no arguments."""
        return {}

    @staticmethod
    def _check(outputs: Tensor, targets: Tensor) -> None:
        if outputs.dim() < 2:
            raise ValueError(
                "a Bernoulli likelihood needs logits of shape (N,) or (N, K) from the network, "
                f"got {tuple(outputs.shape[1:])}"
            )
        check_labels(targets, tuple(outputs.shape[1:]))


class GaussianLikelihood(Likelihood):
    """y = mean + std * noise, independently over the components of the target.

    The noise std is one fixed number, one learned number, or predicted by the network for each
    component of each example (``input_dependent``). In the first two cases the network's outputs
    are the means and have the shape of the targets, (N, ...). In the third they have an additional
    last axis of length 2: (N, K, 2) for targets (N, K). ``outputs[..., 0]`` is the mean and
    ``outputs[..., 1]`` the inverse softplus of the std, to which ``min_std`` is added. A predicted
    std is at least 1e-6, so that nothing overflows: standardise targets whose scale is far from 1.
    The last layers of such a network are ``nn.Linear(..., 2 * K), nn.Unflatten(-1, (K, 2))``.

    Args:
        std: standard deviation of the noise, positive, in units of the target; the initial value
            if it is learned; default 1.
        learn_std: whether the std is trained, as a point estimate.
        input_dependent: whether the network predicts the std of each example.
        min_std: added to a std that the network predicts, in units of the target. Where some
            targets have no noise at all, the density is unbounded without it, and training gives
            them all weight.

    Raises:
        ValueError: std is not positive and finite; min_std is negative or not finite, or not 0
            without ``input_dependent``; or ``input_dependent`` is combined with std or
            ``learn_std``.

    Example:
        >>> GaussianLikelihood(std=1.0).log_prob(torch.zeros(1, 2, 1), torch.zeros(2, 1))
        tensor([[-0.9189, -0.9189]])
        >>> outputs = torch.tensor([[[[0.0, 0.5413]]]])  # softplus(0.5413) = 1
        >>> GaussianLikelihood(input_dependent=True).log_prob(outputs, torch.zeros(1, 1))
        tensor([[-0.9189]])
    """

    error_name = "mean squared error"

    def __init__(
        self,
        std: float | None = None,
        *,
        learn_std: bool = False,
        input_dependent: bool = False,
        min_std: float = 0.0,
    ) -> None:
        super().__init__()
        if input_dependent and (learn_std or std is not None):
            given = "learn_std=True" if learn_std else f"std={std}"
            raise ValueError(
                f"input-dependent noise is predicted by the network, but got {given} too; remove "
                "one of the two"
            )
        if not (0.0 <= min_std < math.inf):
            raise ValueError(f"min_std must be 0 or more and finite, got {min_std}")
        if min_std and not input_dependent:
            raise ValueError(
                f"min_std={min_std} is for a std that the network predicts; add "
                "input_dependent=True, or give std itself"
            )
        self.input_dependent, self._min_std = input_dependent, min_std
        value = 1.0 if std is None else std
        if not (value > 0.0 and math.isfinite(value)):
            raise ValueError(f"std must be positive and finite, got {std}")
        self._config: dict[str, float | int | bool] = (
            {"input_dependent": True} if input_dependent else {"std": value, "learn_std": learn_std}
        )
        if min_std:
            self._config["min_std"] = min_std
        self._fixed = torch.tensor(value, dtype=torch.float64)
        self.rho = (
            nn.Parameter(inverse_softplus(self._fixed).to(torch.get_default_dtype()))
            if learn_std
            else None
        )

    @property
    def std(self) -> Tensor:
        """Standard deviation of the noise, a scalar.

        Raises:
            ValueError: the noise is input-dependent.
        """
        if self.input_dependent:
            raise ValueError(
                "input-dependent noise has no single std; use bnn.predict(x).noise_std or aleatoric"
            )
        if self.rho is None:
            return self._fixed
        return softplus(self.rho)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return log N(y; mean, std^2), in nats, summed over the components, shape (S, N)."""
        means = self._means(outputs)
        self._check(means, targets)
        std = self._predicted_std(outputs) if self.input_dependent else self.std.to(outputs)
        log_probs = -0.5 * ((targets - means) / std).square() - std.log() - _HALF_LOG_2PI
        return log_probs.flatten(2).sum(-1) if log_probs.dim() > 2 else log_probs

    def predictive(
        self,
        outputs: SizedIterable,
        *,
        keep_samples: bool,  # noqa: ARG002
    ) -> Predictive:
        """Return the mixture of the Gaussians of all weight samples.

        It always keeps the samples, S x N numbers or twice as many with input-dependent noise,
        because its densities and quantiles depend on every component, not only on mean and
        variance.
        """
        if not self.input_dependent:
            return GaussianPredictive(stack_samples(outputs), self.std.detach())
        means: Tensor | None = None
        stds: Tensor | None = None
        for index, sample in enumerate(outputs):
            mean = self._means(sample.unsqueeze(0))[0]
            if means is None or stds is None:
                means = mean.new_empty((len(outputs), *mean.shape))
                stds = torch.empty_like(means)
            means[index] = mean
            stds[index] = self._predicted_std(sample)
        if means is None or stds is None:
            raise ValueError("at least one weight sample is needed, got none")
        return GaussianPredictive(means, stds)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error, in squared units of the target."""
        means = self._means(outputs.unsqueeze(0))
        self._check(means, targets)
        return (means[0] - targets).square().mean()

    def config(self) -> dict[str, float | int | bool]:
        """Return ``std`` as given and ``learn_std``, or ``input_dependent`` and ``min_std``."""
        return dict(self._config)

    def _predicted_std(self, outputs: Tensor) -> Tensor:
        std = softplus(outputs[..., 1]) + self._min_std
        # The correction has no gradient. A clamp would have gradient 0 below the minimum, so that
        # training could not increase the std again.
        return std + (_LEAST_STD - std).clamp_min(0.0).detach()

    def _means(self, outputs: Tensor) -> Tensor:
        if not self.input_dependent:
            return outputs
        if outputs.dim() < 3 or outputs.shape[-1] != 2:
            raise ValueError(
                "input-dependent noise needs outputs of shape (N, K, 2) from the network, mean "
                f"and inverse softplus of std last, got {tuple(outputs.shape[1:])}; end the "
                "network with nn.Linear(..., 2 * K), nn.Unflatten(-1, (K, 2))"
            )
        return outputs[..., 0]

    def _check(self, means: Tensor, targets: Tensor) -> None:
        if targets.shape != means.shape[1:]:
            name = "means" if self.input_dependent else "output"
            raise ValueError(
                f"targets must have the shape of the network's {name}, {tuple(means.shape[1:])}, "
                f"got {tuple(targets.shape)}; nothing is broadcast: use y.unsqueeze(-1) or "
                "y.squeeze(-1)"
            )


#: Smallest standard deviation that a network can predict, in units of the target.
_LEAST_STD = 1e-6
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
