"""Draws of a network's weights from its posterior: predictions and convergence diagnostics."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from torch import Tensor

from bayesify.distributions.likelihoods.likelihood import predictive_of
from bayesify.estimators.network_state import evaluation_mode
from bayesify.module.batching import Batching
from bayesify.module.bayesian import BayesianModule
from bayesify.module.inputs import Inputs
from bayesify.module.sampling import SampledOutputs
from bayesify.noise.arguments import whole_number
from bayesify.prediction import NumericPredictive, Predictive, stack_samples
from bayesify.referee.density import as_float64
from bayesify.referee.to_jax import import_optional

__all__ = ["PosteriorDraws"]


@dataclass(frozen=True, eq=False)
class PosteriorDraws:
    """Draws from the posterior of a network's random weights, by chain; made by ``hmc``.

    Args:
        bnn: the model, in float64; its variational posterior is not used.
        weights: the flat weight vectors, shape (chains, draws, D), float64.
        acceptance: mean acceptance probability of each chain after warm-up, shape (chains,).
        divergences: number of draws of each chain whose trajectory diverged, shape (chains,).
        step_size: the step size of each chain, shape (chains,).
        num_steps: mean number of steps (gradients) of a draw in each chain, shape (chains,).

    Example:
        >>> import bayesify as bf
        >>> likelihood = bf.GaussianLikelihood(1.0)
        >>> bnn = bf.BayesianModule(torch.nn.Linear(1, 1), likelihood=likelihood).double()
        >>> weights, one = torch.randn(2, 100, 2).double(), torch.ones(2)
        >>> draws = PosteriorDraws(bnn, weights, one, one, one, one)
        >>> x = torch.zeros(5, 1)
        >>> draws.predict(x).mean.shape, draws.r_hat(x).shape
        (torch.Size([5, 1]), torch.Size([5, 1]))
    """

    bnn: BayesianModule
    weights: Tensor
    acceptance: Tensor
    divergences: Tensor
    step_size: Tensor
    num_steps: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the chains of several draws from one posterior, such as those of other seeds.

        Raises:
            ValueError: there is none, or their numbers of draws or of weights differ.
        """
        if len({part.weights.shape[1:] for part in parts}) != 1:
            raise ValueError(
                "parts must be at least one, all with the same numbers of draws and weights, got "
                f"{[tuple(part.weights.shape) for part in parts]}"
            )
        states = [part.state() for part in parts]
        return cls.of_state(
            parts[0].bnn, {name: torch.cat([each[name] for each in states]) for name in states[0]}
        )

    @classmethod
    def of_state(cls, bnn: BayesianModule, state: Mapping[str, Tensor]) -> Self:
        """Return the draws that :meth:`state` describes, of the same model."""
        return cls(copy.deepcopy(bnn).double(), **state)

    def state(self) -> dict[str, Tensor]:
        """Return all tensors but those of the model, by name, for a safetensors file."""
        names = (field.name for field in fields(self) if field.name != "bnn")
        return {name: getattr(self, name) for name in names}

    def halves(self) -> tuple[Self, Self]:
        """Return the first and the second half of the chains, whose distance is Monte Carlo error.

        Raises:
            ValueError: there is a single chain.
        """
        count = len(self.weights) // 2
        if not count:
            raise ValueError("halves need at least two chains, got one")
        first, second = (
            {name: value[part] for name, value in self.state().items()}
            for part in (slice(None, count), slice(count, None))
        )
        return type(self)(self.bnn, **first), type(self)(self.bnn, **second)

    @torch.no_grad()
    def predict(
        self,
        inputs: Inputs,
        num_samples: int | None = None,
        *,
        keep_samples: bool = False,
        batch_size: int | None = None,
    ) -> Predictive:
        """Predict with the mixture over the draws of all chains.

        Args:
            inputs: as for ``BayesianModule.predict``, no loader; floating tensors are converted to
                float64.
            num_samples: the number of draws, evenly spaced over the chains; None stands for all.
            keep_samples: whether the result holds the prediction of every draw.
            batch_size: the number of examples in one forward pass; None chooses a fast one.

        Returns:
            A :class:`Predictive` over N examples, in float64.

        Raises:
            TypeError: ``num_samples`` is no whole number.
            ValueError: ``num_samples`` is not from 1 to the number of draws, ``batch_size`` is
                below 1, or there are no examples.
        """
        draws = self.weights.flatten(0, 1)
        num_samples = len(draws) if num_samples is None else num_samples
        count = whole_number("num_samples", num_samples, None)
        if not 1 <= count <= len(draws):
            raise ValueError(
                f"num_samples must lie from 1 to {len(draws)}, the number of draws, got {count}"
            )
        chosen = draws[torch.arange(count, device=draws.device) * len(draws) // count]
        with evaluation_mode(self.bnn.net):
            outputs = self._outputs(chosen, inputs, batch_size)
            return predictive_of(self.bnn.likelihood, outputs, keep_samples=keep_samples)

    def r_hat(self, inputs: Inputs) -> Tensor:
        """Return the split R-hat of each prediction, which tends to 1 as the chains agree.

        The predictions of numbers are the network's outputs, those of classes the probabilities.
        The weights themselves have many equivalent modes, such as permutations of hidden units,
        and chains need not agree on them. Where R-hat is above 1.05, take more draws or a longer
        warm-up. Gelman et al., Bayesian Data Analysis (2013), eq. 11.4, with split chains.

        Args:
            inputs: as for :meth:`predict`.

        Returns:
            The shape of one draw's prediction, (N, ...); 1 where all draws are equal, and infinite
            where one is no number.
        """
        return self._diagnostic("split_gelman_rubin", inputs, equal=1.0, undefined=torch.inf)

    def effective_sample_size(self, inputs: Inputs) -> Tensor:
        """Return the number of independent draws that estimate each prediction as well.

        Gelman et al., Bayesian Data Analysis (2013), section 11.5.

        Args:
            inputs: as for :meth:`predict`.

        Returns:
            The shape of :meth:`r_hat`; the number of draws where all draws are equal, and 0 where
            one is no number.
        """
        count = float(self.weights[..., 0].numel())
        return self._diagnostic("effective_sample_size", inputs, equal=count, undefined=0.0)

    def _diagnostic(self, name: str, inputs: Inputs, *, equal: float, undefined: float) -> Tensor:
        function = getattr(import_optional("numpyro.diagnostics"), name)
        predictions = self._predictions(inputs)
        with np.errstate(divide="ignore", invalid="ignore"):  # where all draws are equal
            found = torch.as_tensor(function(predictions.numpy()))
        is_equal = (predictions == predictions[0, 0]).all(0).all(0)
        found = found.where(~found.isnan(), undefined)
        return found.masked_fill(is_equal, equal)

    @torch.no_grad()
    def _predictions(self, inputs: Inputs) -> Tensor:
        """Return the predictions of every draw, shape (chains, draws, N, ...)."""
        with evaluation_mode(self.bnn.net):
            outputs = stack_samples(self._outputs(self.weights.flatten(0, 1), inputs, None))
        predictive = predictive_of(self.bnn.likelihood, outputs, keep_samples=True)
        samples: Tensor | None = predictive.samples
        if samples is None or isinstance(predictive, NumericPredictive):
            samples = outputs
        chains, draws, _ = self.weights.shape
        return samples.reshape(chains, draws, *samples.shape[1:])

    def _outputs(self, weights: Tensor, inputs: Inputs, batch_size: int | None) -> SampledOutputs:
        wide, count = as_float64(inputs), len(weights)
        batching = Batching.of(self.bnn, wide, {}, num_samples=count, batch_size=batch_size)
        # Cloned, as the network may edit its weights in place.
        return SampledOutputs(
            self.bnn, wide, lambda rows: weights[rows.start : rows.stop].clone(), count, batching
        )
