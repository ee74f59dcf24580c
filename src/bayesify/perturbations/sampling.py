"""Weight sampling: one weight vector for the whole minibatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesify.noise import NoiseKey
from bayesify.perturbations.base import Call, Perturbation, Treatment, Use
from bayesify.posteriors import Posterior, WeightDraw

__all__ = ["WeightSampling"]


@dataclass(frozen=True)
class WeightSampling(Perturbation):
    """One weight vector for the whole minibatch (Blundell et al. 2015, section 3.2).

    Always right, for every network; its gradients have the largest variance, since all examples
    of a minibatch share the noise.

    Args:
        antithetic: whether samples 2i and 2i + 1 have opposite noise, w = mean +- std * noise:
            what is odd in the noise cancels. It needs an even number of samples a step.

    Example:
        >>> from torch import nn
        >>> from bayesify.module import BayesianModule
        >>> bnn = BayesianModule(nn.Linear(3, 2), perturbation=WeightSampling(antithetic=True))
        >>> row = bnn.coverage()[0]
        >>> row.name, row.treatment, row.reason
        ('weight', 'sampled', 'weight sampling: one sample for the minibatch')
    """

    antithetic: bool = False
    needs_trace: ClassVar[bool] = False

    def treatment(self, uses: Sequence[Use]) -> Treatment:  # noqa: ARG002
        """See :meth:`Perturbation.treatment`."""
        return Treatment("sampled", "weight sampling: one sample for the minibatch")

    def run(
        self, call: Call, posterior: Posterior, key: NoiseKey, samples: range
    ) -> tuple[list[Any], WeightDraw | None]:
        """See :meth:`Perturbation.run`."""
        draw = posterior.draw(self._noise(posterior, key, samples))
        rows = draw.weights.unbind(0)
        return [call.forward(call.layout.unflatten(weights)) for weights in rows], draw

    def _noise(self, posterior: Posterior, key: NoiseKey, samples: range) -> Tensor:
        if not self.antithetic:
            return posterior.noise(key, samples)
        firsts = {sample - sample % 2: None for sample in samples}
        noise = {first: posterior.noise(key, range(first, first + 1)) for first in firsts}
        return torch.cat(
            [-noise[sample - 1] if sample % 2 else noise[sample] for sample in samples]
        )
