"""Distillation (Hinton et al. 2015): targets that a larger network gives, next to the labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesify.distributions.likelihoods import CategoricalLikelihood

if TYPE_CHECKING:
    from bayesify.datasets.loader import EpochLoader

__all__ = ["DistillationLikelihood", "TaughtImages"]


class TaughtImages:
    """Minibatches of images with labels and a teacher's probabilities as their targets.

    The teacher sees each image as the network that learns from it does.

    Args:
        loader: minibatches (images, labels).
        teacher: a network with an output of shape (N, K); it is run as it is.
        temperature: T > 0, by which the teacher's outputs are divided before the softmax.

    Example:
        >>> from bayesify.datasets import TensorLoader
        >>> once = TensorLoader(torch.zeros(5, 3), torch.zeros(5, dtype=torch.long), batch_size=2)
        >>> loader = TaughtImages(once, nn.Linear(3, 4), temperature=2.0)
        >>> [tuple(targets.shape) for _, targets in loader]
        [(2, 2, 4), (2, 2, 4), (1, 2, 4)]
    """

    def __init__(self, loader: EpochLoader, teacher: nn.Module, temperature: float) -> None:
        self._loader, self._teacher, self._temperature = loader, teacher, temperature

    @property
    def num_data(self) -> int:
        """N, the number of examples in an epoch."""
        return self._loader.num_data

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self._loader:
            with torch.no_grad():
                outputs = self._teacher(images).float()
            taught = (outputs / self._temperature).softmax(-1)
            own = F.one_hot(labels, taught.shape[-1]).to(taught)
            yield images, torch.stack([own, taught], dim=1)


class DistillationLikelihood(CategoricalLikelihood):
    """The labels' log probability and, at a temperature, what the teacher's probabilities expect.

    (1 - share) log p_y(f) + share T^2 sum_k q_k log p_k(f / T) in nats, for outputs f, softmax
    probabilities p, the label y and the teacher's probabilities q. T^2 keeps the gradient's size,
    as Hinton et al. 2015 have it. This is no likelihood of data; what is trained on it is no bound.

    Args:
        share: weight of the teacher, from 0 to 1.
        temperature: T > 0.

    Example:
        >>> targets = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])  # a label and a teacher's doubt
        >>> DistillationLikelihood(0.5, temperature=1.0).log_prob(torch.zeros(1, 1, 2), targets)
        tensor([[-0.6931]])
    """

    def __init__(self, share: float, temperature: float) -> None:
        super().__init__()
        self.share, self.temperature = share, temperature

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the weighted sum, in nats, shape (S, N); targets have shape (N, 2, K)."""
        own, taught = targets.unbind(1)
        labelled = (own * outputs.log_softmax(-1)).sum(-1)
        agreed = (taught * (outputs / self.temperature).log_softmax(-1)).sum(-1)
        return (1.0 - self.share) * labelled + self.share * self.temperature**2 * agreed

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of examples whose label is missed, in percent."""
        return super().error(outputs, targets[:, 0].argmax(-1))

    def error_count(self, targets: Tensor) -> int:
        """Return the number of examples."""
        return len(targets)

    def config(self) -> dict[str, float | int | bool]:
        """Return ``share`` and ``temperature``."""
        return {"share": self.share, "temperature": self.temperature}
