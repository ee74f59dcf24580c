"""Temperature scaling: the temperature that minimises the nll, or a reason why there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.cases import normals
from torch import Tensor

from bayesify.training.temperature_scaling import logit_temperature

LOGITS, TARGETS = 3.0 * normals(200, 4, seed=1), torch.arange(200) % 4


def test_the_temperature_minimises_the_nll() -> None:
    shifted = LOGITS + 2.0 * F.one_hot(TARGETS)
    found = logit_temperature(shifted, TARGETS)
    better = logit_temperature(LOGITS + 4.0 * F.one_hot(TARGETS), TARGETS)
    assert better < found, "fewer errors allow more confidence"
    for factor in (0.99, 1.01):
        near = F.cross_entropy(shifted / (factor * found), TARGETS)
        assert float(near) > float(F.cross_entropy(shifted / found, TARGETS))
    for scale in (1e-9, 7.0, 1e9):
        scaled = logit_temperature(scale * shifted.double(), TARGETS)
        assert scaled == pytest.approx(scale * found, rel=1e-9)
    assert logit_temperature(shifted + 5.0, TARGETS) == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize(
    ("logits", "targets", "words"),
    [
        (torch.zeros(2, 3), [0, 1], "targets must be a tensor, got list"),
        (torch.zeros(2, 3).numpy(), torch.tensor([0, 1]), "logits must be a tensor, got ndarray"),
        (torch.zeros(2, 3, dtype=torch.complex64), torch.tensor([0, 1]), "floating-point numbers"),
    ],
)
def test_other_kinds_are_named(logits: Any, targets: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        logit_temperature(logits, targets)


def test_scaling_recovers_the_temperature_of_the_targets() -> None:
    """Targets drawn from softmax(logits / 2.5): within 4.5 standard errors of 2.5."""
    generator = torch.Generator().manual_seed(3)
    logits = 5.0 * torch.randn(20_000, 3, generator=generator, dtype=torch.float64)
    probs = (logits / 2.5).softmax(-1)
    targets = torch.multinomial(probs, 1, generator=generator).squeeze(-1)
    variance = (probs * logits.square()).sum(-1) - (probs * logits).sum(-1).square()
    error = 2.5**2 / float(variance.sum().sqrt())  # from the Fisher information of 1 / T
    assert abs(logit_temperature(logits, targets) - 2.5) < 4.5 * error
    assert abs(logit_temperature(1.1 * logits, targets) - 2.5) > 4.5 * error, "a fault is seen"


@pytest.mark.parametrize(
    ("logits", "targets", "words"),
    [
        (torch.eye(3), torch.arange(3), "largest logit of each example is that of its target"),
        (torch.eye(3), torch.tensor([1, 2, 0]), "no better than chance"),
        (torch.zeros(3), torch.arange(3), r"shape \(N, K\) and targets \(N,\), got \(3,\)"),
        (torch.zeros(3, 2), torch.arange(2), r"got \(3, 2\) and \(2,\)"),
        (torch.zeros(0, 2), torch.arange(0), r"got \(0, 2\) and \(0,\)"),
        (torch.eye(3), torch.tensor([0, 1, 3]), "from 0 to 2 .* got torch.int64 from 0 to 3"),
        (torch.eye(3), torch.tensor([0, -100, 1]), "got torch.int64 from -100 to 1"),
        (torch.eye(3), torch.tensor([0.0, 1.0, 1.0]), "got torch.float32 from 0.0 to 1.0"),
        (torch.full((2, 2), torch.nan), torch.arange(2), "logits must be finite"),
    ],
)
def test_no_temperature(logits: Tensor, targets: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        logit_temperature(logits, targets)
