"""What ``bayesify train`` trains with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bayesify.app.runs import RunConfig
from bayesify.app.runs.train import optimizer_factory


@pytest.mark.parametrize(("options", "shrunk"), [({}, 1.0), ({"weight_decay": 0.2}, 1.0 - 0.02)])
def test_weight_decay_shrinks_the_weights_of_a_baseline(
    options: dict[str, float], shrunk: float
) -> None:
    config = RunConfig.of("mnist", baseline="sgd", lr=0.1, **options)
    weights = nn.Parameter(torch.ones(3))
    optimizer = optimizer_factory(config)([{"params": [weights]}])
    weights.grad = torch.zeros(3)
    optimizer.step()
    assert weights.detach() == pytest.approx(torch.full((3,), shrunk).numpy())


def test_weight_decay_of_adam() -> None:
    options = {"baseline": "sgd", "optimizer": "adam", "lr": 1e-3}
    config = RunConfig.of("mnist", **options, weight_decay=0.5)
    optimizer = optimizer_factory(config)([{"params": [nn.Parameter(torch.ones(3))]}])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5]
