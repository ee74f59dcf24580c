"""fit() and the modes of a network's parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.loops import loop_over
from torch import Tensor, nn

from bayesify import ELBO, BayesianModule, fit, fit_replicas
from bayesify.datasets import TensorLoader

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")


def body() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.9))


def data() -> TensorLoader:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 3, generator=generator)
    return TensorLoader(x, (x[:, 0] > 0).long(), 8, seed=1)


class Spoiling:
    """A callback that measures in evaluation mode, or sets all to training mode."""

    def __init__(self, bnn: BayesianModule, *, mode: bool) -> None:
        self.bnn, self.mode = bnn, mode

    def on_start(self, **_: Any) -> None: ...

    def on_step(self, **_: Any) -> None: ...

    def on_epoch(self, row: Any) -> None:  # noqa: ARG002
        self.bnn.train(self.mode)


def train(bnn: BayesianModule, *, replicas: bool, mode: bool = False) -> None:
    elbo = ELBO(bnn, num_data=40)
    options: dict[str, Any] = {"epochs": 2, "lr": 0.05, "callback": Spoiling(bnn, mode=mode)}
    if replicas:
        fit_replicas([elbo], [data()], **options)
    else:
        fit(elbo, data(), **options)


@loop_over("replicas", [False, True])
@loop_over("mode", [False, True])
def test_a_frozen_body_in_evaluation_mode_stays_as_it_is(replicas: bool, mode: bool) -> None:
    frozen = body().requires_grad_(requires_grad=False).eval()
    bnn = BayesianModule(nn.Sequential(frozen, nn.Linear(4, 2)), include=("1.*",))
    before = bnn.net[0](torch.ones(2, 3))
    train(bnn, replicas=replicas, mode=mode)
    statistics: Any = bnn.net[0][1].running_mean
    assert bool((statistics == 0.0).all()), "the statistics of the frozen body have moved"
    assert torch.equal(bnn.net[0].eval()(torch.ones(2, 3)), before)


@loop_over("net", ["trained", "whole"])
def test_everything_else_is_trained_in_training_mode(net: str) -> None:
    made = nn.Sequential(body(), nn.Linear(4, 2))
    if net == "whole":  # as a pretrained network comes from a hub
        made[0].requires_grad_(requires_grad=False)
        made.eval()
        bnn = BayesianModule(made, include=("1.*",))
    else:  # its weights are random
        made[0].eval()
        bnn = BayesianModule(made)
    seen: list[bool] = []

    def look(module: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        seen.append(module.training)

    bnn.net[0][3].register_forward_hook(look)
    fit(ELBO(bnn, num_data=40), data(), epochs=1, progress=False)
    assert True in seen[:5]
    assert bool((bnn.net[0][1].running_mean != 0.0).any())  # type: ignore[union-attr]
