"""How noise enters the forward pass: the estimator of the gradient of the expected likelihood."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from bayesify.noise import NoiseKey
from bayesify.posteriors import Posterior, WeightDraw

__all__ = ["Perturbation", "WeightSampling"]

T = TypeVar("T")


class Perturbation(ABC):
    """One way of running a network under weights drawn from a posterior.

    Example:
        >>> class WithoutNoise(Perturbation):
        ...     def run(self, forward, posterior, key, samples):
        ...         return [forward(posterior.mean) for _ in samples], None
        >>> from torch import nn
        >>> from bayesify.module import BayesianModule
        >>> net = nn.Linear(3, 2)
        >>> bnn = BayesianModule(net, perturbation=WithoutNoise())
        >>> bool((bnn(net.weight) == net(net.weight)).all())
        True
    """

    @abstractmethod
    def run(
        self,
        forward: Callable[[Tensor], T],
        posterior: Posterior,
        key: NoiseKey,
        samples: range,
    ) -> tuple[list[T], WeightDraw | None]:
        """Run ``forward`` once for each sample index.

        Args:
            forward: the network as a function of one flat weight vector, shape (D,).
            posterior: where the weights come from.
            key: the noise; the sample index completes it.
            samples: the indices of the S samples.

        Returns:
            The S outputs, and the draw behind them, or None if no weights were drawn.
        """


@dataclass(frozen=True)
class WeightSampling(Perturbation):
    """One weight vector for the whole minibatch (Blundell et al. 2015, section 3.2).

    Always right, for every network; its gradients have the largest variance, since all examples
    of a minibatch share the noise.

    Example:
        >>> import torch
        >>> from bayesify.noise import Stream
        >>> from bayesify.posteriors import Delta
        >>> outputs, draw = WeightSampling().run(
        ...     torch.sum, Delta(torch.ones(3)), NoiseKey(0, Stream.TRAINING, 0), range(2))
        >>> outputs
        [tensor(3., grad_fn=<SumBackward0>), tensor(3., grad_fn=<SumBackward0>)]
    """

    def run(
        self,
        forward: Callable[[Tensor], T],
        posterior: Posterior,
        key: NoiseKey,
        samples: range,
    ) -> tuple[list[T], WeightDraw | None]:
        """See :meth:`Perturbation.run`."""
        draw = posterior.draw(posterior.noise(key, samples))
        return [forward(weights) for weights in draw.weights.unbind(0)], draw
