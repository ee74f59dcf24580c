"""Laws that every network obeys under every estimator, over the zoo of ``tests/zoo.py``.

Batch normalisation in training mode couples the data of a minibatch: laws that look at single
data (``tests/estimators/test_zoo_summary.py``) are then held in evaluation mode.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases import normals
from tests.loops import noted
from tests.zoo import (
    CLASSES,
    ESTIMATORS,
    N,
    Specimen,
    each_specimen,
    seeded,
)
from torch import Tensor, nn

from bayesify import (
    ELBO,
    BayesianModule,
    Estimator,
    Gaussian,
    kl_divergence,
    load,
    save,
)
from bayesify.distributions.normalization import NORMALIZATION_LAYERS
from bayesify.noise.keys import NoiseKey, Stream

# Said once by the library of CPU kernels; the outputs are the same.
pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported"),
    # The laws compare networks of one seed.
    pytest.mark.filterwarnings("ignore::bayesify.module.shared_noise.SharedNoiseWarning"),
]

TARGETS = torch.arange(N) % CLASSES
#: float64 sums of fewer than a hundred terms of size 1, in another order.
ROUNDING = 1e-10
#: Less than any effect of a weight that has one, in these networks.
EFFECT = 1e-7
#: Between rounding, 1e-17, and the least gradient here.
LEAST_GRADIENT = 1e-13


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs differ by more than rounding; NaN differs from nothing."""
    return bool((one - other).abs().max() > EFFECT)


def nll(specimen: Specimen, bnn: BayesianModule) -> Tensor:
    """The objective without the KL."""
    outputs = specimen.run(bnn)
    return -bnn.likelihood.log_prob(outputs.unsqueeze(0), TARGETS).mean()


def train(specimen: Specimen, bnn: BayesianModule, steps: int = 1) -> None:
    optimizer = torch.optim.Adam(bnn.parameters(), lr=0.05)
    elbo = ELBO(bnn, num_data=N, num_samples=2) if specimen.is_tensor else None
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nll(specimen, bnn) if elbo is None else elbo(specimen.inputs, TARGETS).loss
        loss.backward()
        optimizer.step()


def predicted(specimen: Specimen, bnn: BayesianModule) -> Tensor:
    if specimen.is_tensor:
        return bnn.predict(specimen.inputs, num_samples=3).mean
    return specimen.run(bnn.to_module().eval())


def check_without_noise(specimen: Specimen, estimator: Estimator) -> None:
    """At std 0 the outputs, and what a pass leaves in the buffers, are the plain network's."""
    plain, bnn = specimen.plain(), specimen.bnn(estimator, std=None)
    for _ in range(2):
        expected = specimen.run(plain)
        assert torch.allclose(specimen.run(bnn), expected, rtol=0.0, atol=ROUNDING)
    buffers = dict(bnn.net.named_buffers())
    for name, buffer in plain.named_buffers():
        assert torch.allclose(buffers[name], buffer, rtol=0.0, atol=ROUNDING), name


def check_samples(specimen: Specimen, estimator: Estimator) -> None:
    """Samples differ, without gradients too; the same key gives the same."""
    one, other = specimen.bnn(estimator), specimen.bnn(estimator)
    first, second = specimen.run(one), specimen.run(one)
    assert differ(first, second)
    assert torch.equal(specimen.run(other), first)
    assert torch.equal(specimen.run(other), second)
    with torch.no_grad():
        assert differ(specimen.run(one), specimen.run(one))
    if specimen.is_tensor:
        key = NoiseKey(5, Stream.TRAINING, 2)
        pair, _ = one.eval().sample_outputs(specimen.inputs, key, range(2))
        assert differ(pair[0], pair[1])
        alone, _ = one.sample_outputs(specimen.inputs, key, range(1, 2))
        assert torch.allclose(alone[0], pair[1], rtol=0.0, atol=ROUNDING)


def check_each_parameter_counts(specimen: Specimen, estimator: Estimator) -> None:
    """Each mean moves the outputs and each std makes them noisy; what is inert does neither."""
    bnn = specimen.bnn(estimator, std=None)
    state = [bnn._calls, bnn.posterior.mean.detach(), bnn.posterior.rho.detach(), *bnn.buffers()]
    start = [tensor.clone() for tensor in state]
    calls, mean, rho = state[:3]
    shift = normals(mean.numel(), seed=7)

    @torch.no_grad()
    def outputs() -> Tensor:
        result = specimen.run(bnn)
        for tensor, value in zip(state, start, strict=True):
            tensor.copy_(value)
        return result

    def moved(where: Tensor) -> Tensor:
        mean[where] += shift[where]
        return outputs()

    def noisy(where: Tensor, call: int) -> Tensor:
        rho[where] = 0.0
        calls.fill_(call)
        return outputs()

    before = outputs()
    inert = specimen.mask(bnn, specimen.inert)
    for name in bnn.layout.names:
        where = torch.zeros_like(inert)
        where[bnn.layout.slice_of(name)] = True
        where &= ~inert
        if where.any():
            assert differ(moved(where), before), name
            first = noisy(where, 0)
            assert differ(first, before), name
            assert differ(first, noisy(where, 1)), name
    if inert.any():
        assert torch.allclose(moved(inert), before, rtol=0.0, atol=ROUNDING)
        quiet = specimen.mask(bnn, specimen.inert_noise(bnn))
        assert torch.allclose(noisy(quiet, 0), before, rtol=0.0, atol=ROUNDING)


def check_gradients_reach(specimen: Specimen, estimator: Estimator) -> None:
    """The nll alone has a gradient in mean and rho of every weight that counts."""
    bnn = specimen.bnn(estimator)
    nll(specimen, bnn).backward()
    assert bnn.posterior.mean.grad is not None
    assert bnn.posterior.rho.grad is not None
    cut = specimen.mask(bnn, specimen.cut)
    reached = bnn.posterior.mean.grad.abs() > LEAST_GRADIENT
    assert torch.equal(reached, ~(cut | specimen.mask(bnn, specimen.inert)))
    reached = bnn.posterior.rho.grad.abs() > LEAST_GRADIENT
    assert torch.equal(reached, ~(cut | specimen.mask(bnn, specimen.inert_noise(bnn))))
    rest = [p for name, p in bnn.named_parameters() if not name.startswith("posterior.")]
    assert all((p.grad is not None) == p.requires_grad for p in rest)


def check_kl(specimen: Specimen, estimator: Estimator) -> None:
    """The KL is the sum over the random parameters, each once however often it is used."""
    std, prior_std = 0.2, 0.7
    bnn = specimen.bnn(estimator, std, prior=Gaussian(std=prior_std))
    net = specimen.plain()
    fixed = {
        id(parameter)
        for module in net.modules()
        if isinstance(module, NORMALIZATION_LAYERS) and "exclude" not in specimen.options
        for parameter in module.parameters()
    }
    by_hand = torch.zeros((), dtype=torch.float64)
    for _, parameter in net.named_parameters():
        if parameter.requires_grad and id(parameter) not in fixed:
            ratio = (std**2 + parameter.detach().square()) / (2.0 * prior_std**2)
            by_hand += (math.log(prior_std / std) + ratio - 0.5).sum()
    if specimen.is_tensor:
        kl = ELBO(bnn, num_data=N, num_samples=2)(specimen.inputs, TARGETS).kl
    else:
        kl = kl_divergence(bnn.posterior, bnn.prior)
    assert torch.allclose(kl, by_hand, rtol=1e-12)


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Attribute by attribute the same, bit for bit."""
    assert type(one) is type(other), where
    if isinstance(one, Tensor):
        assert torch.equal(one, other), where
        assert one.grad is other.grad is None, where
        assert one.requires_grad == other.requires_grad, where
    elif isinstance(one, nn.Module):
        assert_same(vars(one), vars(other), where)
    elif isinstance(one, dict):
        assert set(one) == set(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for a, b in zip(one, other, strict=True):
            assert_same(a, b, where)
    elif isinstance(one, str | int | float | set):  # not hooks, nor weak references
        assert one == other, where


def check_users_module(specimen: Specimen, estimator: Estimator) -> None:
    """Whatever is done with the Bayesian network, the user's own stays as it is."""
    net = specimen.plain()
    before = copy.deepcopy(net)
    identities = [id(parameter) for parameter in net.parameters()]
    bnn = BayesianModule(net, estimator=estimator, **specimen.options)
    train(specimen, bnn)
    predicted(specimen, bnn)
    specimen.summary(bnn)
    bnn.eval()
    assert_same(net, before)
    assert [id(parameter) for parameter in net.parameters()] == identities


def check_saving(specimen: Specimen, estimator: Estimator, path: Path) -> None:
    """A saved network that is loaded onto another of its architecture predicts the same."""
    bnn = specimen.bnn(estimator)
    specimen.run(bnn)
    save(bnn, path)
    with seeded(9):
        other = specimen.net().double()
    for parameter, original in zip(other.parameters(), specimen.plain().parameters(), strict=True):
        parameter.requires_grad_(original.requires_grad)
    again = load(path, other)
    assert again.estimator == estimator
    assert again.layout == bnn.layout
    assert torch.equal(predicted(specimen, again), predicted(specimen, bnn))


def check_copies(specimen: Specimen, estimator: Estimator) -> None:
    """After a pass the network can be copied, and its copy goes on like it; so in float32."""
    bnn = specimen.bnn(estimator)
    specimen.run(bnn).sum().backward()
    twin = copy.deepcopy(bnn)
    for _ in range(2):
        assert torch.equal(specimen.run(twin), specimen.run(bnn))
    single = specimen.bnn(estimator, std=None).eval()
    expected = specimen.run(single)
    single.to(torch.float32)
    inputs = specimen.changed(lambda x: x.float() if x.is_floating_point() else x)
    outputs = specimen.run(single, inputs)
    assert outputs.dtype is torch.float32
    assert torch.allclose(outputs.double(), expected, rtol=1e-4, atol=1e-4)
    specimen.run(single, inputs).sum().backward()
    assert single.posterior.mean.grad.dtype is torch.float32


LAWS = (
    check_without_noise,
    check_samples,
    check_each_parameter_counts,
    check_gradients_reach,
    check_kl,
    check_users_module,
    check_copies,
)


@each_specimen
def test_laws(specimen: Specimen, names: list[str], tmp_path: Path) -> None:
    for name in names:
        with noted(estimator=name):
            for law in LAWS:
                law(specimen, ESTIMATORS[name])
            check_saving(specimen, ESTIMATORS[name], tmp_path / f"{name}.safetensors")
