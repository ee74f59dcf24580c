"""The likelihood of classes without an order."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.distributions.likelihoods.likelihood import Likelihood, check_target_rows
from bayesify.noise.arguments import whole_number
from bayesify.prediction import CategoricalPredictive, SizedIterable
from bayesify.prediction.predictive import sum_components

__all__ = ["CategoricalLikelihood"]


class CategoricalLikelihood(Likelihood[CategoricalPredictive]):
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
        self.ignore_index = ignore_index
        if ignore_index is not None:
            self.ignore_index = whole_number("ignore_index", ignore_index, None)

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
        return sum_components(log_probs)

    def expected_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """Return a lower bound on E[log softmax(f)] over outputs f of these means and variances.

        By Jensen's inequality log sum_k E[exp(f_k)] is at least E[log sum_k exp(f_k)], so that the
        bound is mean_y - log sum_k exp(mean_k + variance_k / 2), in nats, summed over the
        positions of an example. It is exact where the variances are 0.

        Raises:
            ValueError: the targets do not fit the outputs.

        Example:
            >>> mean, variance = torch.zeros(1, 1, 2), torch.tensor([[[0.0, 2.0]]])
            >>> CategoricalLikelihood().expected_log_prob(mean, variance, torch.tensor([0]))
            tensor([[-1.3133]])
        """
        log_probs, counted = self.log_prob(mean, targets), self._counted(targets)
        if counted is not None:  # before the softmax, whose gradient may be NaN there
            place = counted.unsqueeze(-1)
            mean, variance = mean.where(place, 0.0), variance.where(place, 0.0)
        # Not as a difference of two sums of the size of the outputs.
        excess = (mean.log_softmax(-1) + 0.5 * variance).logsumexp(-1)
        return log_probs - sum_components(excess if counted is None else excess.where(counted, 0.0))

    def predictive(self, outputs: SizedIterable, *, keep_samples: bool) -> CategoricalPredictive:
        """Return the class probabilities averaged over the weight samples."""
        return CategoricalPredictive.from_logits(outputs, keep_samples=keep_samples)

    def class_log_probs(self, outputs: Tensor) -> Tensor:
        """Return the log probabilities of all classes, in nats, shape (..., K)."""
        return outputs.log_softmax(-1)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of misclassified examples, or positions, in percent.

        NaN if no position has a class.
        """
        self._check(outputs.unsqueeze(0), targets)
        is_wrong, counted = outputs.argmax(-1) != targets, self._counted(targets)
        return 100.0 * (is_wrong if counted is None else is_wrong[counted]).to(torch.float64).mean()

    def error_count(self, targets: Tensor) -> int:
        """Return the number of positions that have a class.

        Example:
            >>> CategoricalLikelihood(ignore_index=-100).error_count(torch.tensor([[0, 3, -100]]))
            2
        """
        counted = self._counted(targets)
        return targets.numel() if counted is None else int(counted.sum())

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
        others = (
            "; for numbers pass likelihood=GaussianLikelihood() to BayesianModule, for yes and no "
            "BernoulliLikelihood()"
            if outputs.shape[-1] == 1 or targets.is_floating_point()
            else ""
        )
        if tuple(targets.shape) != expected:
            if targets.dim() > 1 and targets.shape == outputs.shape[1:2] + outputs.shape[3:]:
                raise ValueError(
                    f"logits must have the classes last, shape (N, ..., K), got "
                    f"{tuple(outputs.shape[1:])} for targets of shape {tuple(targets.shape)}; "
                    "return logits.movedim(1, -1) from the network"
                )
            check_target_rows(targets, expected)
            raise ValueError(
                f"targets must be class indices of shape {expected}, got shape "
                f"{tuple(targets.shape)}; flatten them, or turn one-hot rows into indices with "
                f"argmax(-1){others}"
            )
        if targets.dtype != torch.int64:
            raise ValueError(
                f"targets must be class indices of dtype torch.int64, got {targets.dtype}; "
                f"convert them with .long(){others}"
            )
        num_classes = outputs.shape[-1]
        on_cpu = targets.device.type == "cpu" and not torch.compiler.is_compiling()
        counted = self._counted(targets) if on_cpu else None
        classes = targets if counted is None else targets[counted]
        if on_cpu and classes.numel():
            low, high = map(int, classes.aminmax())
            if low < 0 or high >= num_classes:
                got = low if low < 0 else high
                hint = (
                    f"; CategoricalLikelihood(ignore_index={got}) leaves such positions out"
                    if got == -100 and self.ignore_index is None
                    else ""
                )
                raise ValueError(
                    f"targets must lie from 0 to {num_classes - 1} (the network has {num_classes} "
                    f"outputs), got {got}{hint}{others}"
                )
