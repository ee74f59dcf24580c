"""Weight sampling: one weight vector for the whole minibatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesify.distributions.posteriors import Posterior, WeightDraw
from bayesify.estimators.estimator import Estimator, ForwardPass, ParameterUse, Treatment
from bayesify.noise.keys import NoiseKey

__all__ = ["WeightSampling"]


@dataclass(frozen=True)
class WeightSampling(Estimator):
    """Sample one weight vector for the whole minibatch (Blundell et al. 2015, section 3.2).

    Exact for every network. Its gradients have the largest variance of all estimators, since
    all examples of a minibatch share the noise.

    Args:
        antithetic: whether samples 2i and 2i + 1 have opposite noise, w = mean +- std * noise, so
            that terms odd in the noise cancel. It needs an even number of samples a step.

    Example:
        >>> from torch import nn
        >>> from bayesify.module.bayesian import BayesianModule
        >>> bnn = BayesianModule(nn.Linear(3, 2), estimator=WeightSampling(antithetic=True))
        >>> row = bnn.summary()[0]
        >>> row.name, row.treatment, row.reason
        ('weight', 'sampled', 'weight sampling: one sample for the minibatch')
    """

    antithetic: bool = False
    needs_trace: ClassVar[bool] = False

    def treatment(self, uses: Sequence[ParameterUse]) -> Treatment:  # noqa: ARG002
        """See :meth:`Estimator.treatment`."""
        return Treatment("sampled", "weight sampling: one sample for the minibatch")

    def run(
        self, forward_pass: ForwardPass, posterior: Posterior, key: NoiseKey, samples: range
    ) -> tuple[list[Any], WeightDraw | None]:
        """See :meth:`Estimator.run`."""
        draw = posterior.draw(self._noise(posterior, key, samples))
        forward, layout = forward_pass.forward, forward_pass.layout
        return [forward(layout.unflatten(weights)) for weights in draw.weights.unbind(0)], draw

    def _noise(self, posterior: Posterior, key: NoiseKey, samples: range) -> Tensor:
        if not self.antithetic:
            return posterior.noise(key, samples)
        firsts = {sample - sample % 2: None for sample in samples}
        noise = {first: posterior.noise(key, range(first, first + 1)) for first in firsts}
        return torch.cat(
            [-noise[sample - 1] if sample % 2 else noise[sample] for sample in samples]
        )
