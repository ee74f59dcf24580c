"""What a closed-form last layer refuses, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import mlp, normals
from torch import Tensor, nn

from bayesify import (
    ELBO,
    BayesianModule,
    CensoredGaussianLikelihood,
    ClosedFormLastLayer,
    FullGaussian,
    Gaussian,
    GaussianLikelihood,
    Likelihood,
    MeanFieldGaussian,
    PACBayesObjective,
    StudentTLikelihood,
)
from bayesify.noise.keys import NoiseKey, Stream


class Tied(nn.Module):
    """A network whose last weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


def test_networks_without_such_a_last_layer_are_told_why() -> None:
    x, y = normals(4, 3), normals(4, 3, seed=1)
    for net, family, reason in (
        (nn.Sequential(nn.Linear(3, 3), nn.Tanh()), MeanFieldGaussian, "0.weight: weight sampling"),
        (Tied(), MeanFieldGaussian, "layer.weight: weight sampling"),
        (mlp(num_outputs=3), FullGaussian(), "2.weight: depends on weights"),
    ):
        bnn = BayesianModule(
            net.double(),
            posterior=family,
            likelihood=GaussianLikelihood(1.0),
            estimator=ClosedFormLastLayer(),
        )
        with pytest.raises(ValueError, match="output is that of a linear layer") as e:
            ELBO(bnn, num_data=4)(x, y)
        assert reason in str(e.value)
        assert bnn(x).shape == (4, 3)  # by the estimator of the layers below


def test_likelihoods_and_objectives_without_a_closed_form_are_refused() -> None:
    x, y = normals(4, 3), normals(4, 2, seed=1)
    cases: list[tuple[Likelihood, Tensor, str]] = [
        (StudentTLikelihood(), y, "such as GaussianLikelihood"),
        (CensoredGaussianLikelihood(), torch.stack([y, y], -1), "got CensoredGaussianLikelihood"),
        (GaussianLikelihood(input_dependent=True), y[:, :1], "got input-dependent noise"),
    ]
    for likelihood, targets, message in cases:
        net: nn.Module = mlp(num_outputs=2)
        if likelihood.config().get("input_dependent"):
            net = nn.Sequential(net, nn.Unflatten(1, (1, 2)))
        bnn = BayesianModule(net, likelihood=likelihood, estimator=ClosedFormLastLayer())
        with pytest.raises(TypeError, match=message):
            ELBO(bnn, num_data=4)(x, targets)
    bnn = BayesianModule(
        mlp(), prior=Gaussian(0.1), prior_mean="initial", estimator=ClosedFormLastLayer()
    )
    with pytest.raises(TypeError, match="PACBayesObjective has an nll of its own"):
        PACBayesObjective(bnn, num_data=8)(x, torch.zeros(4, dtype=torch.long))
    with pytest.raises(TypeError, match="below a ClosedFormLastLayer must be WeightSampling"):
        ClosedFormLastLayer(ClosedFormLastLayer())
    with pytest.raises(TypeError, match="needs estimator=ClosedFormLastLayer"):
        BayesianModule(mlp()).output_moments(x, NoiseKey(0, Stream.TRAINING, 0), range(1))


class _InPlace(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(2, 1), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.layer(x))


def _through_a_view(outputs: Tensor) -> Tensor:
    view = outputs.squeeze(-1)
    outputs.mul_(10.0)
    return view


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o.mul_(10.0),
        torch.relu_,
        lambda o: nn.functional.relu(o, inplace=True),
        lambda o: o.squeeze(-1).mul_(10.0),
        _through_a_view,
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_outputs_that_are_changed_in_place_are_no_outputs_of_the_layer(
    change: Callable[[Tensor], Tensor], mode: Callable[[], Any]
) -> None:
    bnn = BayesianModule(
        _InPlace(change), likelihood=GaussianLikelihood(1.0), estimator=ClosedFormLastLayer()
    )
    x = torch.ones(4, 2)
    with mode():
        if change is _through_a_view and torch.is_inference_mode_enabled():
            pytest.skip("inference tensors count no changes")
        assert {row.treatment for row in bnn.summary(x)} == {"sampled"}
        with pytest.raises(ValueError, match="output is that of a linear layer"):
            ELBO(bnn, num_data=4)(x, torch.zeros_like(bnn(x)))


def test_a_bias_before_its_weight_is_not_integrated_under_full_covariance() -> None:
    class BiasFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(normals(2, seed=1))
            self.weight = nn.Parameter(normals(2, 3, seed=2))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight, self.bias)

    bnn = BayesianModule(
        BiasFirst(),
        likelihood=GaussianLikelihood(std=1.0),
        posterior=FullGaussian(),
        estimator=ClosedFormLastLayer(),
    )
    rows = bnn.summary(normals(4, 3))
    assert [(row.treatment, row.reason) for row in rows] == [
        ("sampled", "has its bias before its weight")
    ] * 2


def test_a_tensor_that_output_makes_is_told_of() -> None:
    bnn = BayesianModule(
        nn.Linear(3, 1),
        likelihood=GaussianLikelihood(),
        estimator=ClosedFormLastLayer(),
        output=lambda outputs: outputs.squeeze(-1),
    )
    with pytest.raises(ValueError, match=r"output= made another tensor of it; make it in the net"):
        ELBO(bnn, num_data=5)(torch.zeros(5, 3), torch.zeros(5))
