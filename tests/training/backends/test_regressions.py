"""Faults that the backends once had, each with the test that holds it down."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.backend_cases import needs_compiler
from torch import Tensor, nn

import bayesify as bf
from bayesify.datasets import TensorLoader
from bayesify.training import fit_replicas
from bayesify.training.backends import (
    CompiledBackend,
    NonFiniteLossError,
    StepOptions,
    make_backend,
)
from bayesify.training.kernel.posterior_update import OptimizerState
from bayesify.training.progress import Callback

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")

X, Y = torch.randn(40, 4), torch.randint(3, (40,))
each_backend = pytest.mark.parametrize(
    "backend", [pytest.param("compiled", marks=needs_compiler), "closed-form", "auto"]
)


class Net(nn.Module):
    """A linear layer with a pass of the test's own."""

    def __init__(self, run: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.run = nn.Linear(4, 3), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.linear, x)


def elbo(net: nn.Module | None = None, **options: Any) -> bf.ELBO:
    torch.manual_seed(0)
    return bf.ELBO(bf.BayesianModule(net or nn.Linear(4, 3), **options), num_data=40)


@needs_compiler
def test_moments_of_another_precision_are_refused() -> None:
    """The compiled code would read past their end."""
    each = elbo()
    adam = torch.optim.Adam(each.parameters())
    CompiledBackend(each, adam)
    each.double()
    with pytest.raises(ValueError, match="mean_first must be a contiguous vector of 15"):
        CompiledBackend(each, adam)


@needs_compiler
def test_a_mask_that_is_no_vector_is_refused() -> None:
    each = elbo()
    each.bnn.posterior.mask = torch.ones(1, dtype=torch.bool).expand(15)
    with pytest.raises(ValueError, match="mask must be a contiguous vector"):
        CompiledBackend(each, torch.optim.SGD(each.parameters(), lr=0.1))


@each_backend
def test_replaced_tensors_are_trained(backend: Any) -> None:
    """As by a network that moves to another device and back between epochs."""
    each, before = elbo(), []

    class Moving(Callback):
        def on_epoch(self, row: object) -> None:  # noqa: ARG002
            q = each.bnn.posterior
            q.mean.data, q.rho.data = q.mean.data.clone(), q.rho.data.clone()
            before.append(q.mean.detach().clone())

    bf.fit(each, TensorLoader(X, Y, 20), epochs=3, backend=backend, callback=Moving())
    assert (before[2] - before[1]).abs().min() > 0.0
    assert (before[1] - before[0]).abs().min() > 0.0


@each_backend
def test_a_loader_may_bring_less_than_it_says(backend: Any) -> None:
    class Short(TensorLoader):
        def __len__(self) -> int:
            return 5

    (row,) = bf.fit(elbo(), Short(X, Y, 20), epochs=1, backend=backend, progress=False)
    assert row["kl"] > 0.0
    assert row["loss"] == pytest.approx(row["nll"] + row["kl"] / 40, rel=0.02)


@each_backend
@pytest.mark.filterwarnings("ignore::bayesify.training.UnreadParameterWarning")
def test_a_pass_need_not_use_a_weight(backend: Any) -> None:
    """As where layers are dropped at random: the KL alone then moves the weights."""
    each = elbo(Net(lambda _, x: x[:, :3]))
    rho = each.bnn.posterior.rho.detach().clone()
    bf.fit(each, TensorLoader(X, Y, 20), epochs=1, backend=backend, progress=False)
    assert bool((each.bnn.posterior.rho > rho).all())


def edits(linear: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        linear.weight.clamp_(-0.01, 0.01)
    return linear(x)


@needs_compiler
def test_a_network_that_edits_its_weights_is_left_to_the_fused_objective() -> None:
    each = elbo(Net(edits))
    backend = make_backend(each, torch.optim.SGD(each.parameters(), lr=0.1))
    backend.step(X, Y, StepOptions(batch_index=0))
    assert backend.description == "fused objective (the network edits its weights in place)"
    assert backend.noise == "counter"


@needs_compiler
def test_a_network_that_edits_its_weights_has_no_compiled_backend() -> None:
    each = elbo(Net(edits))
    with pytest.raises(RuntimeError, match="must not edit its weights"):
        bf.fit(each, TensorLoader(X, Y, 20), epochs=1, backend="compiled", progress=False)


@each_backend
@pytest.mark.filterwarnings("ignore::bayesify.training.UnreadParameterWarning")
def test_outputs_that_are_weights_are_judged_before_they_move(backend: Any) -> None:
    """The error of an epoch is that of the weights that the step had."""
    errors: list[float] = []
    right = bf.CategoricalLikelihood.error

    class Watching(bf.CategoricalLikelihood):
        def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
            errors.append(float(outputs.detach().square().sum()))
            return right(self, outputs, targets)

    said: list[float] = []

    def run(linear: nn.Linear, x: Tensor) -> Tensor:
        outputs = linear.bias.expand(len(x), 3)
        if torch.is_grad_enabled():
            said.append(float(outputs.detach().square().sum()))
        return outputs

    each = elbo(Net(run), likelihood=Watching(), init_std=1.0)
    optimizer = partial(torch.optim.SGD, lr=5.0)
    loader = TensorLoader(X, Y, 20)
    bf.fit(each, loader, epochs=1, optimizer=optimizer, backend=backend, progress=False)
    assert errors == pytest.approx(said[-len(errors) :])


@each_backend
def test_antithetic_samples_come_in_pairs(backend: Any) -> None:
    estimator = bf.LocalReparameterization(antithetic=True)
    with pytest.raises(ValueError, match="antithetic samples come in pairs"):
        bf.fit(elbo(), TensorLoader(X, Y, 20), estimator=estimator, backend=backend)


class Scaled(nn.Module):
    """What its text does not show decides what it does; two names of one deterministic weight."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 3), scale
        self.gain = nn.Parameter(torch.ones(3))
        self.same = self.gain

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale * self.gain * self.same


def scaled(scale: float, seed: int) -> bf.ELBO:
    torch.manual_seed(seed)
    net = Scaled(scale)
    with torch.no_grad():
        net.gain.add_(seed)
    return bf.ELBO(bf.BayesianModule(net, exclude=("gain",), seed=seed), num_data=40)


@needs_compiler
def test_replicas_must_be_of_the_same_settings() -> None:
    with pytest.raises(ValueError, match="network 1 differs from network 0"):
        fit_replicas([scaled(1.0, 0), scaled(5.0, 1)], TensorLoader(X, Y, 20))


@needs_compiler
def test_replicas_with_a_tied_deterministic_weight() -> None:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    joint = [scaled(1.0, seed) for seed in range(3)]
    loader = TensorLoader(X, Y, 20)
    fit_replicas(joint, loader, epochs=2, optimizer=optimizer, progress=False)
    for seed, each in enumerate(joint):
        alone = scaled(1.0, seed)
        bf.fit(alone, loader, epochs=2, optimizer=optimizer, backend="compiled", progress=False)
        for name, tensor in alone.bnn.state_dict().items():
            torch.testing.assert_close(each.bnn.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)
        gain = each.bnn.net.gain
        assert gain.untyped_storage().nbytes() == gain.nbytes, "a tensor of its own again"


@needs_compiler
def test_a_replica_that_diverges_leaves_the_checkpoints_of_all(tmp_path: Any) -> None:
    rates = [partial(torch.optim.SGD, lr=lr) for lr in (0.1, 0.1)]
    made = [scaled(1.0, seed) for seed in range(2)]

    class Poison(Callback):
        epochs = 0

        def on_step(self, *, epoch: int, batch: int) -> None:
            if epoch == 1 and batch == 1:
                made[1].bnn.posterior.mean.data[0] = torch.nan

    loader = TensorLoader(X, Y, 20)
    with pytest.raises(ArithmeticError):
        fit_replicas(
            made, loader, epochs=3, optimizer=rates, checkpoint_dir=tmp_path, callback=Poison()
        )
    again = [scaled(1.0, seed) for seed in range(2)]
    histories = fit_replicas(
        again, loader, epochs=3, optimizer=rates, checkpoint_dir=tmp_path, resume=True,
        progress=False,
    )  # fmt: skip
    assert [len(history) for history in histories] == [3, 3]


@each_backend
@pytest.mark.parametrize("name", ["adam", "momentum", "sgd", "ivon"])
def test_a_gradient_that_is_no_number_ends_the_training(backend: Any, name: str) -> None:
    """The loss of a row of zeros is finite, and the slope of its root is not."""

    def with_norm(linear: nn.Linear, x: Tensor) -> Tensor:
        outputs: Tensor = linear(x)
        return outputs + x.mul(linear.weight[0]).square().sum(-1, keepdim=True).sqrt()

    each = elbo(Net(with_norm))
    inputs = X.clone()
    inputs[25] = 0.0
    optimizers: dict[str, Any] = {
        "adam": torch.optim.Adam,
        "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        "sgd": partial(torch.optim.SGD, lr=1e-3),
        "ivon": bf.IVON(each),
    }
    with pytest.raises(NonFiniteLossError, match="NaN or infinite"):
        bf.fit(
            each, TensorLoader(inputs, Y, 20), epochs=2, optimizer=optimizers[name],
            backend=backend, progress=False,
        )  # fmt: skip


def test_the_optimizer_makes_no_backend_of_its_own() -> None:
    """Gradients that were left from before are not applied."""
    each = elbo()
    adam = torch.optim.Adam(each.parameters(), lr=0.1)
    each(X, Y).loss.backward()
    backend = CompiledBackend(each, adam, compiled=False)
    backend.step(X, Y, StepOptions(batch_index=0))
    assert float(adam.state[each.bnn.posterior.mean]["step"]) == 1.0
    assert OptimizerState(adam, each.bnn.posterior.mean).rule == "adam"
