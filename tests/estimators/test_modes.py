"""Predictions in evaluation mode: every module's mode is set, and restored."""

from __future__ import annotations

from typing import Self

import pytest
import torch
from torch import nn

import bayesify as bf


class AlwaysOn(nn.Dropout):
    """Dropout that stays on, as in MC dropout."""

    def train(self, mode: bool = True) -> Self:
        """Stay in training."""
        return super().train(mode=mode or True)


def network(dropout: nn.Module) -> bf.BayesianModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 40), dropout, nn.Linear(40, 2))
    return bf.BayesianModule(net, posterior=bf.Delta)


def is_random(bnn: bf.BayesianModule) -> bool:
    one, other = (bnn.predict_mean(torch.ones(5, 3)).mean for _ in range(2))
    return not torch.equal(one, other)


def test_dropout_is_off_in_a_prediction_and_on_again_after_it() -> None:
    bnn = network(nn.Dropout(0.5))
    assert not is_random(bnn)
    assert all(module.training for module in bnn.net.modules())


def test_a_module_with_its_own_idea_of_a_mode_keeps_it() -> None:
    assert is_random(network(AlwaysOn(0.5)))
    bnn = network(nn.Dropout(0.5))
    bnn.net[1].train = lambda *_: bnn.net[1]  # type: ignore[method-assign]
    assert is_random(bnn)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_part_is_set_too() -> None:
    bnn = network(torch.jit.script(nn.Dropout(0.5)))
    bnn.train()
    assert not is_random(bnn)
    assert bnn.net[1].training
