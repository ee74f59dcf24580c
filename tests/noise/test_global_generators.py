"""The global generators: where they are kept, and that initial values leave them alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.loops import loop_over
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify as bf
from bayesify.module.networks import lenet5, resnet8, resnet20
from bayesify.noise.keys import Stream, kept_generators, seed_global_generators

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002
}


class Device:
    """PyTorch's module of an accelerator with one generator, as of Apple's, or with several."""

    def __init__(self) -> None:
        self.state = torch.tensor([7])

    def get_rng_state(self) -> Tensor:
        return self.state.clone()

    def set_rng_state(self, state: Tensor) -> None:
        self.state = state

    def manual_seed(self, seed: int) -> None:
        self.state = torch.tensor([seed])

    manual_seed_all = manual_seed


class Devices(Device):
    def get_rng_state_all(self) -> list[Tensor]:
        return [self.get_rng_state()]

    def set_rng_state_all(self, states: list[Tensor]) -> None:
        [self.state] = states


@pytest.fixture(params=[Device, Devices])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    made: Device = request.param()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: made)
    return made


def test_the_generator_of_any_accelerator_is_kept(device: Device) -> None:
    with kept_generators():
        seed_global_generators(0, Stream.DROPOUT, 1)
        assert int(device.state) != 7
    assert int(device.state) == 7


@loop_over("make", [lenet5, partial(resnet8, (3, 8, 8), 2), resnet20])
def test_initial_values_leave_the_generators_alone(
    make: Callable[[], nn.Module], device: Device
) -> None:
    before = torch.get_rng_state()
    values = [next(make().parameters()) for _ in range(2)]
    assert torch.equal(*values)
    assert torch.equal(before, torch.get_rng_state())
    assert int(device.state) == 7


class Drawn(nn.Module):
    """Scales its hidden units in training by a number drawn by a generator."""

    def __init__(self, draw: Callable[[], float], *, edits: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)
        self.draw, self.edits = draw, edits

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 + self.draw()
        if self.edits:
            self.first.weight.clamp_(-1.0, 1.0)
        hidden = self.first(x).relu()
        found: Tensor = self.last(scale * hidden if self.training else hidden)
        return found


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize(
    ("estimator", "edits", "backend"),
    [
        (bf.LocalReparameterization(), False, "auto"),
        (bf.Flipout(), False, "autograd"),
        (bf.WeightSampling(), True, "auto"),
    ],
    ids=["local", "flipout", "edits"],
)
def test_a_pass_that_draws_resumes_bit_for_bit(
    estimator: bf.Estimator, edits: bool, backend: Any, kind: str, tmp_path: Path
) -> None:
    """Passes that look at the network, or fail, take no draws from those of the training."""
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 8)

    def train(epochs: int, **more: Any) -> Tensor:
        torch.manual_seed(0)
        bnn = bf.BayesianModule(Drawn(DRAWS[kind], edits=edits), estimator=estimator, seed=1)
        elbo = bf.ELBO(bnn, num_data=32)
        bf.fit(elbo, loader, epochs=epochs, progress=False, backend=backend, **more)
        return bnn.posterior.mean.detach()

    whole = train(2)
    train(1, checkpoint_dir=tmp_path)
    assert torch.equal(train(2, checkpoint_dir=tmp_path, resume=True), whole)
