"""Backends compared with their specification: the objective by autograd, on the same noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from tests.cases import normals as numbers
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from bayesify import ELBO, IVON, BayesianModule, Gaussian, Laplace, Prior, ScaleMixture, prune
from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.noise.keys import NoiseKey
from bayesify.noise.threefry import counter_key, normals, signs
from bayesify.training.backends import (
    Backend,
    ClosedFormBackend,
    CompiledBackend,
    StepOptions,
    why_no_closed_forms,
    why_not_compiled,
)
from bayesify.training.convergence import std_residual
from bayesify.training.kernel.compiler import find_compiler

STEPS, BATCH, BATCHES, INPUTS, CLASSES = 50, 16, 5, 20, 5

has_compiler = find_compiler() is not None
needs_compiler = pytest.mark.skipif(not has_compiler, reason="there is no C++ compiler here")
#: The C++ kernel, the same in PyTorch's operations, and the closed forms.
KINDS = (pytest.param("kernel", marks=needs_compiler), "tensors", "closed-form")
each_kind = pytest.mark.parametrize("kind", KINDS)
each_compiled_kind = pytest.mark.parametrize("kind", KINDS[:2])

#: By name: the prior, how its KL is found, and N.
#: The default spike has a precision of 9e6. Where rate x precision / N nears 1 a weight near it
#: jumps about chaotically, in any implementation: rounding then grows to the size of the weights.
#: N is such that fifty steps are stable, and the KL still matters.
PRIORS: dict[str, tuple[Prior, str, int]] = {
    "gaussian": (Gaussian(0.3), "auto", 1000),
    "gaussian-monte-carlo": (Gaussian(0.3), "monte-carlo", 1000),
    "laplace": (Laplace(0.2), "auto", 1000),
    "laplace-monte-carlo": (Laplace(0.2), "monte-carlo", 1000),
    "scale-mixture": (ScaleMixture(), "auto", 1_000_000),
    "scale-mixture-wide": (ScaleMixture(pi=0.4, std1=0.7, std2=0.05), "auto", 1000),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": partial(Adam, lr=1e-2),
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.05, momentum=0.9),
}


def mlp() -> nn.Module:
    """863 weights: three blocks of the kernel, and a part of a fourth."""
    return nn.Sequential(nn.Linear(INPUTS, 33), nn.ReLU(), nn.Linear(33, CLASSES))


def vectors(dtype: torch.dtype) -> Tensor:
    return numbers(STEPS * BATCH, INPUTS, seed=1).to(dtype)


def classes() -> Tensor:
    return torch.arange(STEPS * BATCH) * 7 % CLASSES


@dataclass(frozen=True)
class Task:
    """A training that can be begun again and again."""

    prior: str = "gaussian"
    optimizer: str | Callable[..., Optimizer] = "adam"
    dtype: torch.dtype = torch.float64
    net: Callable[[], nn.Module] = mlp
    inputs: Callable[[torch.dtype], Tensor] = vectors
    targets: Callable[[], Tensor] = classes
    pruned: float | None = None
    #: Name and value of options of the network and of the objective.
    bnn: tuple[tuple[str, Any], ...] = ()
    elbo: tuple[tuple[str, Any], ...] = ()
    #: Learning rate of rho, as a multiple of the others'.
    rho: float = 2.0
    kl_scale: Callable[[int], float] = lambda _: 1.0
    steps: int = STEPS

    def objective(self) -> ELBO:
        prior, kl, num_data = PRIORS[self.prior]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = self.net().to(self.dtype)
        bnn = BayesianModule(net, **{"prior": prior, "init_std": 0.05, "seed": 3, **dict(self.bnn)})
        bnn = bnn if self.pruned is None else prune(bnn, self.pruned)
        return ELBO(bnn, **{"num_data": num_data, "kl": kl, **dict(self.elbo)})

    def optimizer_of(self, elbo: ELBO) -> Optimizer:
        if self.optimizer == "ivon":
            h0 = None if "init_std" in dict(self.bnn) else 0.1
            return IVON(elbo, lr=0.02, betas=(0.9, 0.99), h0=h0)
        rho = elbo.bnn.posterior.get_parameter("rho")
        others = [p for p in elbo.parameters() if p is not rho]
        make = self.optimizer if callable(self.optimizer) else OPTIMIZERS[self.optimizer]
        made = make([{"params": others}, {"params": [rho]}])
        made.param_groups[1]["lr"] *= self.rho
        return made

    def minibatches(self) -> list[tuple[Tensor, Tensor, dict[str, Any]]]:
        """Inputs, targets, and what else a step is told."""
        inputs, targets = self.inputs(self.dtype).split(BATCH), self.targets().split(BATCH)
        options = [{"batch_index": i % BATCHES, "kl_scale": self.kl_scale(i)} for i in range(STEPS)]
        return list(zip(inputs, targets, options, strict=True))[: self.steps]


@dataclass
class Outcome:
    """What a training left behind, and what it said of each step; the KL of every tenth."""

    state: Mapping[str, Tensor] = field(default_factory=dict)
    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    residual: list[tuple[float, ...]] = field(default_factory=list)

    def keep(self, elbo: ELBO) -> Outcome:
        state = elbo.bnn.state_dict()
        self.state = {name: t.clone() for name, t in state.items() if t.is_floating_point()}
        return self


class CounterKey(NoiseKey):
    """Draws the noise of outputs, and the signs, by the counter-based generator."""

    def numbers(
        self, kind: Any, sample: int, place: int, size: int, dtype: torch.dtype, device: Any
    ) -> Tensor:
        words, step = counter_key(self, sample, place), int(self.step)
        draw = normals if kind == "normal" else signs
        return draw(*words, step, size, dtype=dtype, device=device)


def use_counter_noise(elbo: ELBO) -> ELBO:
    """Let the objective draw weights and outputs by the counter-based generator."""
    posterior, sample_outputs = elbo.bnn.posterior, elbo.bnn.sample_outputs

    def outputs(inputs: Any, key: NoiseKey, *args: Any, **kwargs: Any) -> Any:
        counter = CounterKey(key.seed, key.stream, key.step)
        return sample_outputs(inputs, counter, *args, **kwargs)

    elbo.bnn.sample_outputs = outputs  # type: ignore[method-assign]

    def noise(key: NoiseKey, samples: range) -> Tensor:
        mean, start = posterior.mean, NoiseKey(key.seed, key.stream, 0)
        keys = [counter_key(start, sample) for sample in samples]
        options: Any = {"dtype": mean.dtype, "device": mean.device}
        return torch.stack([normals(*each, key.step, mean.numel(), **options) for each in keys])

    posterior.noise = noise  # type: ignore[method-assign]
    return elbo


def backend_of(kind: str, elbo: ELBO, optimizer: Optimizer) -> Backend:
    if kind == "closed-form":
        assert why_no_closed_forms(elbo) is None
        return ClosedFormBackend(elbo, optimizer)
    assert why_not_compiled(elbo, optimizer) is None
    return CompiledBackend(elbo, optimizer, compiled=kind == "kernel")


def trained(kind: str, task: Task) -> Outcome:
    """A training by one backend."""
    elbo, said = task.objective(), Outcome()
    backend = backend_of(kind, elbo, task.optimizer_of(elbo))
    for number, (x, y, options) in enumerate(task.minibatches()):
        terms = backend.step(
            x, y, StepOptions(**options, with_kl=number % 10 == 0, with_residual=True)
        )
        said.nll.append(float(terms.nll))
        assert terms.has_kl == (number % 10 == 0)
        if terms.has_kl:
            said.kl.append(float(terms.kl))
        assert terms.std_residual is not None
        said.residual.append(terms.std_residual.sums)
    return said.keep(elbo)


@cache
def specified(task: Task, *, counter: bool) -> Outcome:
    """The same by autograd, with the noise of the counter or of torch's generator."""
    elbo, said = task.objective(), Outcome()
    elbo.fused = False
    if counter:
        use_counter_noise(elbo)
    optimizer = task.optimizer_of(elbo)
    for number, (x, y, options) in enumerate(task.minibatches()):
        terms = elbo(x, y, **options)
        # Not before: a network may leave gradients of its own.
        optimizer.zero_grad()
        terms.loss.backward()
        said.nll.append(float(terms.nll.detach()))
        if number % 10 == 0:
            said.kl.append(float(terms.kl.detach()))
        assert isinstance(elbo.bnn.posterior, MeanFieldGaussian)
        residual = std_residual(elbo.bnn.posterior)
        assert residual is not None
        said.residual.append(residual.sums)
        optimizer.step()
    return said.keep(elbo)


def distance(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    """The largest relative L2 norm of the difference, over the tensors."""
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).norm() / two[name].norm()) for name in two)
