"""Warning of targets that are far from unit scale."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import bayesify as bf
from bayesify.training import ConvergenceWarning, TargetScaleWarning


def train(targets: torch.Tensor, likelihood: bf.Likelihood) -> None:
    inputs = torch.linspace(-1.0, 1.0, len(targets)).unsqueeze(-1)
    net: nn.Module = nn.Linear(1, 1)
    if getattr(likelihood, "input_dependent", False):
        net = nn.Sequential(nn.Linear(1, 2), nn.Unflatten(-1, (1, 2)))
    has_bounds = isinstance(likelihood, bf.CensoredGaussianLikelihood)
    y = targets.unsqueeze(1)
    loader = bf.datasets.TensorLoader(inputs, y, 16, has_bounds=has_bounds)
    elbo = bf.ELBO(bf.BayesianModule(net, likelihood=likelihood), num_data=len(targets))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        bf.fit(elbo, loader, epochs=1, progress=False)


UNIT = torch.randn(32, generator=torch.Generator().manual_seed(0))
ABOVE, BELOW = torch.full((32,), torch.inf), torch.full((32,), -torch.inf)


def bounds(lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    return torch.stack([lower, upper], dim=-1)


@pytest.mark.parametrize(
    ("targets", "likelihood"),
    [
        (250_000.0 + 60_000.0 * UNIT, bf.GaussianLikelihood(learn_std=True)),
        (250_000.0 + 60_000.0 * UNIT, bf.GaussianLikelihood(input_dependent=True)),
        (30.0 + UNIT, bf.GaussianLikelihood()),
        (0.001 * UNIT, bf.GaussianLikelihood()),
        (bounds(30.0 + UNIT, ABOVE), bf.CensoredGaussianLikelihood()),
        (bounds(BELOW, 30.0 + UNIT), bf.CensoredGaussianLikelihood()),
    ],
    ids=["far", "far, input-dependent", "mean only", "narrow", "right-censored", "left-censored"],
)
def test_targets_far_from_unit_scale_are_reported(
    targets: torch.Tensor, likelihood: bf.Likelihood
) -> None:
    with pytest.warns(TargetScaleWarning, match=r"\(y - y\.mean\(\)\) / y\.std\(\).*rescaled"):
        train(targets, likelihood)


@pytest.mark.parametrize(
    ("targets", "likelihood"),
    [
        (UNIT, bf.GaussianLikelihood()),
        (2.0 + 5.0 * UNIT, bf.GaussianLikelihood(std=0.1)),
        (0.001 * UNIT, bf.GaussianLikelihood(std=0.001)),
        (torch.full((32,), 1.0), bf.GaussianLikelihood()),
        (bounds(UNIT, ABOVE), bf.CensoredGaussianLikelihood()),
        (bounds(BELOW, ABOVE), bf.CensoredGaussianLikelihood()),
    ],
    ids=[
        "unit",
        "wider than the noise",
        "narrow with narrow noise",
        "constant",
        "censored",
        "unknown",
    ],
)
def test_other_targets_are_not(targets: torch.Tensor, likelihood: bf.Likelihood) -> None:
    train(targets, likelihood)


@pytest.mark.parametrize("train", ["fit", "fit_replicas"])
def test_warnings_name_the_line_that_trains(train: str) -> None:
    likelihood = bf.GaussianLikelihood()
    elbo = bf.ELBO(bf.BayesianModule(nn.Linear(1, 1), likelihood=likelihood), num_data=64)
    x = torch.linspace(-1.0, 1.0, 64).unsqueeze(-1)
    loader = bf.datasets.TensorLoader(x, 1e5 * x, 16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if train == "fit":
            bf.fit(elbo, loader, epochs=2, progress=False)
        else:
            bf.fit_replicas([elbo], loader, epochs=2, progress=False)
    kinds = [each.category for each in caught]
    assert kinds == [bf.training.TargetScaleWarning, bf.training.ConvergenceWarning]
    assert {each.filename for each in caught} == {__file__}
