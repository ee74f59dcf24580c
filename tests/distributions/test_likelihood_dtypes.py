"""Likelihoods in other dtypes: their learned parameters, complex outputs, unsigned targets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bayesify import (
    BernoulliLikelihood,
    CategoricalLikelihood,
    CensoredGaussianLikelihood,
    GaussianLikelihood,
    Likelihood,
    NegativeBinomialLikelihood,
    OrdinalLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from bayesify.distributions.likelihoods.likelihood import log_probs_of


@pytest.mark.parametrize(
    "likelihood",
    [
        lambda: GaussianLikelihood(std=0.1, learn_std=True),
        lambda: StudentTLikelihood(),
        lambda: NegativeBinomialLikelihood(),
        lambda: OrdinalLikelihood(3),
    ],
)
def test_learned_parameters_are_in_float32_at_least(likelihood: Callable[[], nn.Module]) -> None:
    """In half precision a step of an optimiser would be rounded away."""
    expected = likelihood().state_dict()
    try:
        for dtype in (torch.bfloat16, torch.float16):
            torch.set_default_dtype(dtype)
            found = likelihood().state_dict()
            assert found
            torch.testing.assert_close(found, expected)
        torch.set_default_dtype(torch.float64)
        assert all(each.dtype == torch.float64 for each in likelihood().state_dict().values())
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("likelihood", "width", "targets"),
    [
        (GaussianLikelihood(), 1, torch.zeros(3, 1)),
        (StudentTLikelihood(), 1, torch.zeros(3, 1)),
        (CategoricalLikelihood(), 2, torch.zeros(3, dtype=torch.long)),
        (BernoulliLikelihood(), 1, torch.zeros(3, 1)),
        (PoissonLikelihood(), 1, torch.zeros(3, 1)),
        (NegativeBinomialLikelihood(), 1, torch.zeros(3, 1)),
        (OrdinalLikelihood(3), 1, torch.zeros(3, dtype=torch.long)),
        (CensoredGaussianLikelihood(std=1.0), 1, torch.zeros(3, 1, 2)),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Likelihood) else "",
)
def test_complex_outputs_are_named(likelihood: Likelihood, width: int, targets: Tensor) -> None:
    outputs = torch.zeros(2, 3, width, dtype=torch.complex64)
    name = type(likelihood).__name__
    with pytest.raises(ValueError, match=f"outputs must be real numbers, as {name} has no"):
        log_probs_of(likelihood, outputs, targets)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_targets_may_be_unsigned(dtype: torch.dtype) -> None:
    outputs, counts = torch.full((1, 2, 1), 0.5), torch.tensor([[1], [0]])
    bounds = torch.tensor([[[0, 2]], [[1, 1]]])
    cases: list[tuple[Likelihood, Tensor]] = [
        (PoissonLikelihood(), counts),
        (NegativeBinomialLikelihood(), counts),
        (CensoredGaussianLikelihood(std=1.0), bounds),
    ]
    for likelihood, targets in cases:
        expected = likelihood.log_prob(outputs, targets)
        torch.testing.assert_close(likelihood.log_prob(outputs, targets.to(dtype)), expected)
        error = likelihood.error(outputs[0], targets)
        torch.testing.assert_close(likelihood.error(outputs[0], targets.to(dtype)), error)
