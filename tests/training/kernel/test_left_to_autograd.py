"""Loops of one's own that the kernel leaves to autograd."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.backend_cases import Task, needs_compiler
from tests.loops import loop_over
from tests.training.kernel.test_drawn_weights import X, Y, pair
from torch import Tensor

import bayesify as bf
from bayesify.training.kernel import compiler

pytestmark = needs_compiler


def generator_loss(task: Task) -> float:
    elbo = task.objective()
    elbo.fused = False
    x, y, told = task.minibatches()[0]
    return float(elbo(x, y, **told).loss.detach())


class OwnModule(bf.BayesianModule):
    """Perhaps another network."""


def own_module(elbo: bf.ELBO) -> None:
    elbo.bnn.__class__ = OwnModule


def own_noise(elbo: bf.ELBO) -> None:
    elbo.bnn.posterior.noise = type(elbo.bnn.posterior).noise.__get__(elbo.bnn.posterior)  # type: ignore[method-assign]


def own_complexity(elbo: bf.ELBO) -> None:
    elbo.complexity = type(elbo).complexity.__get__(elbo)  # type: ignore[method-assign]


def strided_mean(elbo: bf.ELBO) -> None:
    mean = elbo.bnn.posterior.mean
    mean.data = torch.stack([mean.data, mean.data], dim=1)[:, 0]


def unfused(elbo: bf.ELBO) -> None:
    elbo.fused = False


@pytest.mark.parametrize("change", [own_module, own_noise, own_complexity, strided_mean, unfused])
def test_what_the_kernel_does_not_know_is_left_to_autograd(
    change: Callable[[bf.ELBO], object],
) -> None:
    task = replace(Task(), dtype=torch.float32)
    elbo = task.objective()
    x, y, told = task.minibatches()[0]
    assert float(elbo(x, y, **told).loss.detach()) != generator_loss(task)
    elbo.step = 0
    change(elbo)
    assert float(elbo(x, y, **told).loss.detach()) == generator_loss(task)


def test_rho_of_another_dtype_is_left_to_autograd() -> None:
    elbo, _ = pair()
    rho = elbo.bnn.posterior.get_parameter("rho")
    rho.data = rho.data.double()
    elbo(X, Y).kl.backward()
    assert rho.grad is not None
    assert rho.grad.dtype == torch.float64


def test_a_network_made_in_inference_mode_is_left_to_autograd() -> None:
    with torch.inference_mode():
        elbo, _ = pair()
    with torch.no_grad():
        assert bool(elbo(X, Y).loss.isfinite())


@loop_over("change", [own_module, own_complexity, unfused])
def test_memory_is_freed_once_autograd_samples_the_weights(
    change: Callable[[bf.ELBO], object],
) -> None:
    elbo, _ = pair()
    elbo(X, Y).loss.backward()
    buffers = [weakref.ref(each) for each in elbo._drawn_weights._memory._buffers]
    assert len(buffers) == 3
    change(elbo)
    elbo.zero_grad()
    elbo(X, Y)
    gc.collect()
    assert not any(each() is not None for each in buffers)


def test_transforms_of_torch_func_are_left_to_autograd() -> None:
    elbo, _ = pair()
    parameters = dict(elbo.named_parameters())

    def loss(values: dict[str, Tensor]) -> Tensor:
        terms: bf.ELBOTerms = torch.func.functional_call(elbo, values, (X, Y))
        return terms.loss

    found = torch.func.grad(loss)(parameters)
    elbo.step, elbo.fused = 0, False
    elbo(X, Y).loss.backward()
    for name, parameter in elbo.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(found[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_without_a_compiler_a_loop_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise compiler.CompilerError("none")

    monkeypatch.setattr("bayesify.training.kernel.native.compiled_library", fail)
    task = Task(dtype=torch.float32)
    x, y, told = task.minibatches()[0]
    assert float(task.objective()(x, y, **told).loss.detach()) == generator_loss(task)
