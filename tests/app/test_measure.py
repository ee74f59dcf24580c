"""The metrics of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases import mlp, normals
from torch import Tensor

import bayesify as bf
from bayesify.app.runs import RunError
from bayesify.app.runs.measure import evaluate
from bayesify.app.runs.predict import Predictions
from bayesify.prediction import CategoricalPredictive, PoissonPredictive, Predictive


class Data:
    """Twelve examples of four classes, as a run has them."""

    name = "examples"
    class_names = ("a", "b", "c", "d")
    image_shape = None

    def __init__(self) -> None:
        self.train_inputs = self.test_inputs = normals(12, 3, seed=1)
        self.train_targets: Tensor = torch.arange(12) % 4
        self.test_targets = self.train_targets


@pytest.mark.parametrize("prior", [bf.Gaussian(0.3), bf.Laplace(0.2)], ids=str)
def test_the_kl_is_from_the_prior_around_its_mean(prior: bf.Prior) -> None:
    bnn = bf.BayesianModule(mlp(), prior=prior, prior_mean="initial", init_std=0.1)
    data: Any = Data()
    metrics, _ = evaluate(bnn, data, num_samples=2)
    std = bnn.posterior.std.detach()
    # The means are the prior's, so that only the standard deviations cost anything.
    around_zero = bf.MeanFieldGaussian(torch.zeros_like(std), std)
    expected = float(bf.kl_divergence(around_zero, prior).detach())
    assert metrics["kl_nats"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("names", [(), ("a", "b")])
def test_predictions_that_are_nan_are_an_error_of_the_run(names: tuple[str, ...]) -> None:
    outputs = torch.tensor([[[0.0, 1.0]], [[0.0, torch.nan]]])
    found: Predictive = PoissonPredictive(outputs[..., 1:])
    if names:
        found = CategoricalPredictive.from_logits(list(outputs))

    class OfThese(Predictions):
        def _predictive(self, *_: Any) -> Predictive:
            return found

    nothing: Any = None
    predictions = OfThese(nothing, nothing, 0.9, 2, names, nothing)
    if names:
        predictions.conformal = bf.ConformalSets((torch.rand(20),), 2)
    with pytest.raises(RunError, match="predictions must be finite, got NaN or infinity"):
        list(predictions.parts(torch.zeros(1, 3)))
