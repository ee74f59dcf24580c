"""Every network of the zoo on a GPU: the outputs of a CPU, training, prediction, saving."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.device import COMPILER_WARNING, DEVICE, needs_gpu
from tests.zoo import CLASSES, ESTIMATORS, ZOO, N, Specimen
from torch import Tensor
from torch.utils._pytree import tree_map_only

import bayesify as bf
from bayesify.training.backends import why_no_closed_forms

pytestmark = [
    needs_gpu,
    COMPILER_WARNING,
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported"),
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous"),
]

TARGETS = torch.arange(N) % CLASSES


def moved(inputs: Any) -> Any:
    return tree_map_only(Tensor, lambda each: each.to(DEVICE), inputs)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO)
def test_without_noise_the_outputs_are_those_of_a_cpu(specimen: Specimen, name: str) -> None:
    bnn = specimen.bnn(ESTIMATORS[name], std=None).eval()
    expected = specimen.run(copy.deepcopy(bnn))
    found = specimen.run(bnn.to(DEVICE), moved(specimen.inputs))
    assert found.device.type == DEVICE
    # PyTorch's weight norm rounds there to float32.
    assert torch.allclose(found.cpu(), expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO)
def test_trains_and_predicts(specimen: Specimen, name: str, tmp_path: Path) -> None:
    if not specimen.is_tensor:
        pytest.skip("an objective needs one tensor")
    bnn = specimen.bnn(ESTIMATORS[name], seed=4).to(DEVICE)
    inputs, targets = moved(specimen.inputs), TARGETS.to(DEVICE)
    elbo = bf.ELBO(bnn, num_data=N, num_samples=2)
    optimizer = torch.optim.Adam(bf.parameter_groups(elbo), lr=1e-2)
    before = bnn.posterior.mean.detach().clone()
    if why_no_closed_forms(elbo) is None:
        step = bf.make_step(elbo, optimizer, backend="closed-form")
        for _ in range(2):
            assert torch.isfinite(step(inputs, targets).nll)
    optimizer.zero_grad()
    terms = elbo(inputs, targets)
    terms.loss.backward()
    optimizer.step()
    assert not torch.equal(bnn.posterior.mean, before)
    found = bnn.eval().predict(inputs, num_samples=4)
    assert found.mean.device.type == DEVICE
    assert torch.isfinite(found.mean).all()
    mean = bnn.predict_mean(inputs).mean
    bf.save(bnn, tmp_path / "net.safetensors")
    again = bf.load(tmp_path / "net.safetensors", specimen.plain().eval()).eval()
    same = again.predict_mean(specimen.inputs).mean
    # So do its fused layers of transformers, to 1e-4.
    assert torch.allclose(mean.cpu(), same, rtol=0.0, atol=1e-3)
