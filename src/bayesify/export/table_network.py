"""Predict from the values of a table's columns in one module that can be exported."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor, nn

from bayesify.distributions.posteriors import Delta
from bayesify.export.table_inputs import TableInputs
from bayesify.module.bayesian import BayesianModule
from bayesify.module.kept_samples import sampler_of
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.prediction import (
    CategoricalPredictive,
    CountPredictive,
    GaussianPredictive,
    NumericPredictive,
    StudentTPredictive,
)
from bayesify.prediction.averaging import entropy
from bayesify.tabular.outside import normal_scores, widen
from bayesify.tabular.schema import TableSchema

__all__ = ["TableNetwork", "mixture_quantiles"]

#: Steps of the search for a quantile.
_STEPS = 14
#: Mixtures of fewer counts cannot be widened.
_COUNT_SAMPLES = 32


class TableNetwork(nn.Module):
    """Network of a table between the values of the columns and the predictions.

    It encodes the values, runs the network under every weight sample, widens the predictions of
    rows outside the training data, and returns them in the units of the target: what
    ``bayesify predict`` computes for a row.

    The forward pass maps values (N, C) as of :class:`TableInputs` to a tuple of tensors, named by
    ``names``. For classes: ``mean``, the probabilities (N, K), and ``total`` and ``epistemic``, in
    nats. For numbers: ``mean``, ``std``, ``quantiles`` (N, Q) if there are any, ``total`` and
    ``epistemic``, which are variances. For both: ``distances`` (N, C), how far a row lies outside
    in each column. Shapes are (N,) where no other is given.

    Args:
        bnn: the trained network.
        schema: schema of its table.
        num_samples: number of weight samples, those of ``bnn.predict``; 0 for the mean weights.
        quantiles: levels of the quantiles of a number, between 0 and 1. Only Gaussian and censored
            numbers have them: ONNX has no operator for the distribution functions of counts and of
            Student's t.

    Raises:
        ValueError: ``num_samples`` is negative, or a level is not strictly between 0 and 1.
        TypeError: a column is of texts.
    """

    def __init__(
        self,
        bnn: BayesianModule,
        schema: TableSchema,
        *,
        num_samples: int,
        quantiles: Sequence[float] = (),
    ) -> None:
        super().__init__()
        if num_samples < 0:
            raise ValueError(f"num_samples must be at least 0, got {num_samples}")
        for level in quantiles:
            if not 0.0 < level < 1.0:
                raise ValueError(f"a quantile's level must lie between 0 and 1, got {level}")
        target = schema.target
        self.inputs = TableInputs(schema.columns)
        self.has_classes = bool(target.classes)
        self.shift, self.scale = target.shift, target.scale
        self.marginal = torch.tensor(target.marginal) if target.marginal else None
        has_quantiles = target.likelihood in ("", "gaussian", "censored") and not self.has_classes
        self.quantiles = tuple(quantiles) if has_quantiles else ()
        self.net = bnn.to_module().requires_grad_(False)
        self.likelihood = bnn.likelihood
        with torch.no_grad():
            if num_samples and not isinstance(bnn.posterior, Delta):
                key = NoiseKey(bnn.seed, Stream.PREDICTION, 0)
                weights = sampler_of(bnn.posterior, key)(range(num_samples))
            else:
                weights = bnn.posterior.masked_mean.clone().unsqueeze(0)
            rows = [bnn.layout.unflatten(row) for row in weights]
        self.num_samples = len(rows)
        self.weights = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        counts = _COUNT_SAMPLES * self.num_samples if target.has_counts else 0
        self.scores = normal_scores(max(self.num_samples, counts))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the outputs."""
        if self.has_classes:
            return ("mean", "total", "epistemic", "distances")
        quantiles = ("quantiles",) if self.quantiles else ()
        return ("mean", "std", *quantiles, "total", "epistemic", "distances")

    def forward(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs for the values of the columns, shape (N, C), float64."""
        inputs, distances = self.inputs(values)
        outputs = torch.vmap(lambda row: torch.func.functional_call(self.net, row, (inputs,)))(
            self.weights
        )
        # All samples of all rows as rows of one sample.
        flat = self.likelihood.predictive([outputs.flatten(0, 1)], keep_samples=False)
        farthest = distances.amax(1)
        if isinstance(flat, CategoricalPredictive):
            found = self._classes(flat, farthest)
        else:
            assert isinstance(flat, NumericPredictive)
            found = self._numbers(flat, farthest)
        return (*found, distances)

    def _classes(self, flat: CategoricalPredictive, farthest: Tensor) -> tuple[Tensor, ...]:
        log_probs = flat.log_mean.double().unflatten(0, (self.num_samples, -1))
        log_mean = log_probs.logsumexp(0) - math.log(self.num_samples)
        aleatoric = entropy(log_probs).mean(0)
        information = (entropy(log_mean) - aleatoric).clamp(min=0.0)
        p = CategoricalPredictive(log_mean, aleatoric, information)
        if self.marginal is not None:
            wide = widen(p, farthest, self.marginal.double(), self.scores)
            assert isinstance(wide, CategoricalPredictive)
            p = wide
        return tuple(part.float() for part in (p.mean, p.total, p.epistemic))

    def _numbers(self, flat: NumericPredictive, farthest: Tensor) -> tuple[Tensor, ...]:
        p = self._mixture(flat)
        if self.marginal is not None:
            wide = widen(p, farthest, self.marginal.double(), self.scores)
            assert isinstance(wide, NumericPredictive)
            p = wide
        square = self.scale**2
        found = [p.mean * self.scale + self.shift, p.total.sqrt() * self.scale]
        if self.quantiles:
            assert isinstance(p, GaussianPredictive)
            quantiles = mixture_quantiles(p.means, p.noise_std.expand_as(p.means), self.quantiles)
            found.append(quantiles.T * self.scale + self.shift)
        return (*found, p.total * square, p.epistemic * square)

    def _mixture(self, flat: NumericPredictive) -> NumericPredictive:
        """Return the mixture over the weight samples, of shape (S, N)."""
        shape = (self.num_samples, -1)
        if isinstance(flat, CountPredictive):
            rates = flat.log_rates.double().flatten().unflatten(0, shape)
            if self.marginal is not None and self.num_samples < len(self.scores):
                rates = rates.repeat(len(self.scores) // self.num_samples, 1)
            return dataclasses.replace(flat, log_rates=rates)  # type: ignore[type-var]
        assert isinstance(flat, GaussianPredictive | StudentTPredictive)
        if isinstance(flat, StudentTPredictive):
            # Only moments are computed, which are those of Gaussian noise of the same variance.
            std = flat.scale * (flat.df / (flat.df - 2.0)).sqrt()
        else:
            std = flat.noise_std
        means, stds = (
            part.double().flatten().unflatten(0, shape)
            for part in (flat.means, std.expand_as(flat.means))
        )
        return GaussianPredictive(means, stds)


def mixture_quantiles(means: Tensor, stds: Tensor, levels: Sequence[float]) -> Tensor:
    """Return quantiles of mixtures of Gaussians, by a fixed number of steps.

    The steps are those of ``GaussianPredictive.quantile``, which stops where nothing changes any
    more. The distribution function is computed in float32, as ONNX Runtime has erf in no other
    type; its rounding moves a quantile by about 1e-6 standard deviations at a level of 2.5 %.

    Args:
        means: shape (S, N), float64.
        stds: shape (S, N), positive.
        levels: Q levels between 0 and 1.

    Returns:
        Shape (Q, N).

    Example:
        >>> means = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
        >>> mixture_quantiles(means, torch.full_like(means, 0.5), (0.05, 0.95)).flatten()
        tensor([-1.6408,  1.6408], dtype=torch.float64)
    """
    # A quantile of the upper half is one of the lower half of the mirrored mixture.
    tails = [min(level, 1.0 - level) for level in levels]
    sign, tail, standard = (
        torch.tensor(each, dtype=torch.float64).unsqueeze(-1)
        for each in (
            [1.0 if level <= 0.5 else -1.0 for level in levels],
            tails,
            [NormalDist().inv_cdf(each) for each in tails],
        )
    )
    places = sign.unsqueeze(-1) * means
    components = places + stds * standard.unsqueeze(-1)
    low, high = components.amin(1), components.amax(1)
    total = (stds.square() + (means - means.mean(0)).square()).mean(0).sqrt()
    value = (places.mean(1) + standard * total).maximum(low).minimum(high)
    for _ in range(_STEPS):
        distance = (places - value.unsqueeze(1)) / stds
        below = 0.5 * torch.erfc((distance * math.sqrt(0.5)).float()).double().mean(1)
        density = ((-0.5 * distance.square()).exp() / stds).mean(1) / math.sqrt(2.0 * math.pi)
        is_low = below < tail
        low, high = torch.where(is_low, value, low), torch.where(is_low, high, value)
        newton = value - torch.log(below / tail) * below / density
        inside = (low <= newton) & (newton <= high)
        value = torch.where(inside, newton, 0.5 * (low + high))
    return sign * value
