"""Predict from the values of a table's columns in one module that can be exported."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bayesify.distributions.likelihoods import (
    CategoricalLikelihood,
    OrdinalLikelihood,
    StudentTLikelihood,
)
from bayesify.distributions.likelihoods.likelihood import predictive_of
from bayesify.distributions.likelihoods.location_scale import LocationScaleLikelihood
from bayesify.distributions.posteriors import Delta
from bayesify.export.table_inputs import TableInputs
from bayesify.module.bayesian import BayesianModule
from bayesify.module.kept_samples import sampler_of
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.prediction import (
    CategoricalPredictive,
    CountPredictive,
    GaussianPredictive,
    Predictive,
)
from bayesify.prediction.averaging import entropy
from bayesify.tabular.columns import Column, UnusedColumn
from bayesify.tabular.outside import COPIES, FEWEST_SAMPLES, shuffled_normal_quantiles, widen
from bayesify.tabular.schema import TableSchema

__all__ = ["TableNetwork", "mixture_quantiles", "used_columns"]

#: Steps of the search for a quantile: bisections, then Newton's.
_BISECTIONS, _NEWTON = 20, 4
#: Terms of a polynomial for erfc, at which its relative error is below 2e-14 up to 8 stds.
_ERFC_TERMS = 24


class TableNetwork(nn.Module):
    """Network of a table between the values of the columns and the predictions.

    It encodes the values, runs the network under every weight sample, widens the predictions of
    rows outside the training data, and returns them in the units of the target: what
    ``bayesify predict`` computes for a row.

    Args:
        bnn: the trained network.
        schema: schema of its table; it must have no columns of texts.
        num_samples: number of weight samples, those of ``bnn.predict``; 0 for the mean weights.
        quantiles: levels of the quantiles of a number, between 0 and 1. Only Gaussian and censored
            numbers have them: ONNX has no operator for the distribution functions of counts and of
            Student's t.

    Raises:
        ValueError: ``num_samples`` is negative, or a level is not strictly between 0 and 1.
        TypeError: a column is of texts.

    Example:
        >>> from bayesify.tabular.columns import NumberColumn
        >>> from bayesify.tabular.model import TableNet, table_baseline
        >>> from bayesify.tabular.schema import Target
        >>> target = Target("sold", "classification", classes=("no", "yes"))
        >>> schema = TableSchema((NumberColumn(name="age"),), target)
        >>> bnn = table_baseline(TableNet(1, (4,), 2), seed=0)
        >>> network = TableNetwork(bnn, schema, num_samples=0)
        >>> network(torch.tensor([[30.0], [float("nan")]], dtype=torch.float64))["outside_column"]
        tensor([0, 1])
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
            raise ValueError(
                f"num_samples must be 0, for the mean weights, or more, got {num_samples}"
            )
        for level in quantiles:
            if not 0.0 < level < 1.0:
                raise ValueError(f"a quantile's level must lie between 0 and 1, got {level}")
        target = schema.target
        self.inputs = TableInputs(used_columns(schema))
        self.has_classes, self.has_counts = bool(target.classes), target.has_counts
        # As tensors: the exporter rounds plain numbers to float32.
        shift, scale = (0.0, 1.0) if self.has_counts else (target.shift, target.scale)
        self.shift, self.scale = torch.tensor([shift, scale], dtype=torch.float64)
        self.marginal = torch.tensor(target.marginal).double() if target.marginal else None
        has_quantiles = target.likelihood in ("", "gaussian", "censored") and not target.classes
        self.quantiles = tuple(quantiles) if has_quantiles else ()
        self.net = bnn.to_module().requires_grad_(False)
        self.likelihood = copy.deepcopy(bnn.likelihood).requires_grad_(False)
        with torch.no_grad():
            if num_samples and not isinstance(bnn.posterior, Delta):
                key = NoiseKey(bnn.seed, Stream.PREDICTION, 0)
                weights = sampler_of(bnn.posterior, key)(range(num_samples))
            else:
                weights = bnn.posterior.masked_mean.clone().unsqueeze(0)
            self.weights = {n: each.clone() for n, each in bnn.layout.unflatten(weights).items()}
        self.num_samples = len(weights)
        self.log_samples = torch.tensor(math.log(self.num_samples), dtype=torch.float64)
        # Few counts are repeated, see outside.widen.
        self.copies = COPIES if self.has_counts and self.num_samples < FEWEST_SAMPLES else 1
        self.scores = shuffled_normal_quantiles(self.copies * self.num_samples)

    def forward(self, values: Tensor) -> dict[str, Tensor]:
        """Return the predictions for the values of the columns, shape (N, C), float64.

        Returns:
            For classes ``mean``, the probabilities (N, K), and ``total`` and ``epistemic``, in
            nats. For numbers ``mean``, ``std``, ``quantiles`` (N, Q) if there are any, and
            ``total`` and ``epistemic``, which are variances. For both ``outside_training``, whether
            a row lies outside, and ``outside_column``, the number from 1 of the column in which it
            lies farthest outside, or 0. Shapes are (N,) where no other is given.
        """
        inputs, distances = self.inputs(values)
        farthest = distances.amax(1)
        outputs = torch.vmap(lambda row: torch.func.functional_call(self.net, row, (inputs,)))(
            self.weights
        )
        predictive = self._predictive(outputs)
        if self.marginal is not None:
            predictive = widen(predictive, farthest, self.marginal, self.scores)
        is_outside = farthest > 0.0
        return {
            **self._in_units(predictive),
            "outside_training": is_outside,
            "outside_column": torch.where(is_outside, distances.argmax(1) + 1, 0),
        }

    def _predictive(self, outputs: Tensor) -> Predictive:
        """Return the mixture over the weight samples, of outputs (S, N, ...), in float64."""
        likelihood = self.likelihood
        if isinstance(likelihood, CategoricalLikelihood | OrdinalLikelihood):
            log_probs = likelihood.class_log_probs(outputs).double()
            log_mean = log_probs.logsumexp(0) - self.log_samples
            aleatoric = entropy(log_probs).mean(0)
            return CategoricalPredictive(log_mean, aleatoric)
        if isinstance(likelihood, LocationScaleLikelihood):
            means, scale = likelihood.location_and_scale(outputs)
            if isinstance(likelihood, StudentTLikelihood):
                # Only moments are computed, which are those of Gaussian noise of equal variance.
                df = likelihood.df
                scale = scale * (df / (df - 2.0)).sqrt()
            return GaussianPredictive(means.squeeze(-1).double(), scale.squeeze(-1).double())
        # All rows of all samples as rows of one sample.
        flat = predictive_of(likelihood, [outputs.flatten(0, 1)], keep_samples=False)
        assert isinstance(flat, CountPredictive)
        rates = flat.log_rates.double().flatten().unflatten(0, (self.num_samples, -1))
        if self.marginal is not None:
            rates = rates.repeat(self.copies, 1)
        found: CountPredictive = dataclasses.replace(flat, log_rates=rates)  # type: ignore[type-var]
        return found

    def _in_units(self, p: Predictive) -> dict[str, Tensor]:
        if self.has_classes:
            return {name: getattr(p, name).float() for name in ("mean", "total", "epistemic")}
        shift, scale = self.shift, self.scale
        found = {"mean": p.mean * scale + shift, "std": p.total.sqrt() * scale}
        if self.quantiles:
            assert isinstance(p, GaussianPredictive)
            noise = p.noise_std.expand_as(p.means)
            found["quantiles"] = mixture_quantiles(p.means, noise, self.quantiles).T * scale + shift
        square = scale * scale
        return {**found, "total": p.total * square, "epistemic": p.epistemic * square}


def used_columns(schema: TableSchema) -> list[Column]:
    """Return the columns of a table that have inputs, or in which a row may lie outside.

    Example:
        >>> from bayesify.tabular.schema import Target
        >>> schema = TableSchema((UnusedColumn(name="id"),), Target("y", "regression"))
        >>> used_columns(schema)
        []
    """
    return [column for column in schema.columns if not isinstance(column, UnusedColumn)]


def mixture_quantiles(means: Tensor, stds: Tensor, levels: Sequence[float]) -> Tensor:
    """Return quantiles of mixtures of Gaussians, by a fixed number of steps.

    Bisection bounds the quantile; Newton's method on the logarithm of the distribution function
    then finds it, as in ``GaussianPredictive.quantile``. The distribution function is computed in
    float64 by arithmetic alone, as ONNX Runtime has erf in float32 only: between separate modes,
    where the mixture is flat, its rounding would move a quantile visibly.

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
    # What keeps a step finite where a tail or the density underflows.
    least, smallest = torch.tensor([-1.0 + 1e-15, 1e-300], dtype=torch.float64)
    for step in range(_BISECTIONS + _NEWTON):
        if step < _BISECTIONS + 1:
            value = 0.5 * (low + high)
        distance = (places - value.unsqueeze(1)) / stds
        is_below = distance < 0.0
        nearer = _upper_tail(distance.abs())
        # The distribution function less the level. From the nearer tail of each component it is
        # exact where the mixture is flat, between samples that lie apart.
        excess = torch.where(is_below, -nearer, nearer).mean(1) + (is_below.double().mean(1) - tail)
        if step < _BISECTIONS:
            is_low = excess < 0.0
            low, high = torch.where(is_low, value, low), torch.where(is_low, high, value)
        else:
            density = ((-0.5 * distance.square()).exp() / stds).mean(1) / math.sqrt(2.0 * math.pi)
            ratio = torch.log1p((excess / tail).maximum(least))
            newton = value - ratio * (excess + tail) / density.maximum(smallest)
            value = newton.maximum(low).minimum(high)
    return sign * value


def _upper_tail(z: Tensor) -> Tensor:
    """Return the probability of a standard normal number above z >= 0, in float64.

    With x = z / sqrt(2) and t = 2 / (2 + x), erfc(x) = t exp(-x^2 + P(2 t - 1)), where P is a
    polynomial. Four of its terms are summed at once: the time of an export is that of its nodes.
    """
    t = 1.0 / (1.0 + z * torch.tensor(math.sqrt(0.125), dtype=torch.float64))
    place = 2.0 * t - 1.0
    square = place.square()
    # P(u) = sum_j u^(4 j) (c_4j + c_4j+1 u + c_4j+2 u^2 + c_4j+3 u^3), shape (4, *z.shape).
    terms = torch.tensor(_erfc_polynomial(), dtype=torch.float64).view(-1, 4, *[1] * z.ndim)
    series, *rest = terms.flip(0)
    for row in rest:
        series = series * square.square() + row
    for power in (square, place):
        low, high = series.chunk(2)
        series = low + high * power
    series = series.squeeze(0)
    return 0.5 * t * torch.exp(series - 0.5 * z.square())


@cache
def _erfc_polynomial() -> list[float]:
    """Interpolate log(erfc(x) exp(x^2) / t), t = 2 / (2 + x), at Chebyshev points of 2 t - 1."""

    def exact(place: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        t = torch.from_numpy(0.5 * (place + 1.0))
        values = torch.log(torch.special.erfcx(2.0 / t - 2.0) / t)
        return np.asarray(values.numpy(), dtype=np.float64)

    series = np.polynomial.Chebyshev.interpolate(exact, _ERFC_TERMS - 1)
    coefficients: list[float] = series.convert(kind=np.polynomial.Polynomial).coef.tolist()
    return coefficients
