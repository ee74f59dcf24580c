"""fit_replicas: what the forward pass of one network must not decide for the others."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bayesify as bf
from bayesify.datasets import TensorLoader
from bayesify.training import fit_replicas

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) + 3.0
Y = (2.0 * X[:, 0]).sin().gt(0.0).long()


class Net(nn.Module):
    """A network with attributes of all kinds."""

    def __init__(self, act: Any = torch.tanh, scale: Tensor | None = None, **settings: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        self.act = act
        self.register_buffer("scale", scale)
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.b(self.act(self.a(x - self.settings.get("mean", 0.0))))
        return outputs if self.scale is None else outputs * self.scale


def made(*nets: nn.Module) -> list[bf.ELBO]:
    bnns = [bf.BayesianModule(net, seed=k) for k, net in enumerate(nets)]
    return [bf.ELBO(bnn, num_data=len(X)) for bnn in bnns]


def trained(elbos: list[bf.ELBO]) -> list[bf.ELBO]:
    options: Any = {"epochs": 3, "lr": 0.02, "backend": "autograd", "progress": False}
    fit_replicas(elbos, TensorLoader(X, Y, 16), **options)
    return elbos


def alone(elbos: list[bf.ELBO]) -> list[bf.ELBO]:
    options: Any = {"epochs": 3, "lr": 0.02, "backend": "autograd", "progress": False}
    for elbo in elbos:
        bf.fit(elbo, TensorLoader(X, Y, 16), **options)
    return elbos


def with_hook(net: nn.Module, factor: float) -> nn.Module:
    net.a.register_forward_hook(lambda _, args, out: out * factor)  # noqa: ARG005
    return net


def with_keys(net: nn.Module) -> nn.Module:
    """Modules of one's own as keys."""
    net.names, net.some = {net.a: "a"}, {net.b}
    return net


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (lambda: Net(torch.sin), "the attribute 'act' of its Net"),
        (lambda: Net(functools.partial(nn.functional.leaky_relu, negative_slope=0.3)), "'act'"),
        (lambda: Net(mean=X.mean(0)), "the attribute 'settings'"),
        (lambda: Net(scale=torch.tensor(5.0)), "the buffer 'scale' of its Net"),
        (lambda: with_hook(Net(), 2.0), "the attribute '_forward_hooks' of its Linear"),
        (lambda: Net(generator=torch.Generator().manual_seed(1)), "the attribute 'settings'"),
    ],
)
def test_networks_that_compute_something_else_are_refused(
    other: Callable[[], nn.Module], name: str
) -> None:
    with pytest.raises(ValueError, match=rf"network 1 differs from network 0 in .*{name}.*by fit"):
        trained(made(Net(), other()))
    with pytest.raises(ValueError, match="network 1 differs"):
        trained(made(other(), Net()))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Net(lambda x: x.relu() + 1.0),
        lambda: Net(functools.partial(nn.functional.leaky_relu, negative_slope=0.3)),
        lambda: Net(mean=X.mean(0).clone(), weights=[1.0, float("nan")]),
        lambda: with_hook(Net(scale=torch.tensor(2.0)), 2.0),
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), nn.ReLU()),
        lambda: Net(generator=torch.Generator().manual_seed(0), random=np.random.default_rng(0)),
        lambda: Net(table=torch.tensor([1.0, float("nan")]), array=np.array([float("nan")])),
        lambda: with_keys(Net()),
        lambda: torch.fx.symbolic_trace(Net()),
    ],
)
def test_equal_attributes_of_networks_of_their_own_are_no_difference(
    make: Callable[[], nn.Module],
) -> None:
    nets = [make(), make()]
    if isinstance(nets[0], nn.Sequential):
        for net in nets:
            net.append(nn.Linear(8, 2))
    together, each = trained(made(*copy.deepcopy(nets))), alone(made(*nets))
    for one, other in zip(together, each, strict=True):
        torch.testing.assert_close(one.bnn.posterior.mean, other.bnn.posterior.mean)


class Running(nn.Module):
    """Centres its inputs by a running mean that a pass replaces, or that is no buffer."""

    def __init__(self, *, is_buffer: bool = True, starts: bool = True) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)
        start = torch.zeros(4) if starts else None
        if is_buffer:
            self.register_buffer("mean", start)
        else:
            self.mean = start

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            before = torch.zeros(4) if self.mean is None else self.mean
            self.mean = 0.9 * before + 0.1 * x.mean(0)
        outputs: Tensor = self.last(x - (0.0 if self.mean is None else self.mean))
        return outputs


def test_a_buffer_that_a_pass_replaces_is_kept() -> None:
    torch.manual_seed(0)
    nets = [Running(), Running()]
    together, each = trained(made(*copy.deepcopy(nets))), alone(made(*nets))
    for one, other in zip(together, each, strict=True):
        assert float(one.bnn.net.mean[0]) > 2.0
        torch.testing.assert_close(one.bnn.net.mean, other.bnn.net.mean)
        torch.testing.assert_close(one.bnn.posterior.mean, other.bnn.posterior.mean)


@pytest.mark.parametrize("options", [{"is_buffer": False}, {"starts": False}])
def test_what_a_pass_would_set_in_one_network_only_is_refused(options: dict[str, bool]) -> None:
    elbos = made(Running(**options), Running(**options))
    before = elbos[0].bnn.net.mean
    with pytest.raises(ValueError, match=r"a forward pass sets 'mean' of its Running, .* by fit"):
        trained(elbos)
    assert elbos[0].bnn.net.mean is before


class ScaledByItself(nn.Linear):
    """Keeps a scale, and branches on it."""

    scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        self.scale = outputs.detach().abs().max()
        return outputs if self.scale < 1e3 else outputs / self.scale


def test_a_network_that_is_refused_is_trained_alone() -> None:
    elbos = made(ScaledByItself(4, 2), ScaledByItself(4, 2))
    with pytest.raises(ValueError, match=r"cannot be run at once.* by fit"):
        trained(elbos)
    alone(elbos)
    assert float(elbos[0].bnn.net.scale) > 0.0


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        return outputs if outputs.abs().max() < 1e3 else outputs.clamp(-1e3, 1e3)


class Recomputed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class LastOfLSTM(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        outputs: Tensor = super().forward(x[:, None])[0][:, -1]
        return outputs


@pytest.mark.parametrize("make", [Branching, Recomputed, LastOfLSTM])
def test_a_pass_that_cannot_be_run_for_several_is_one_clear_error(make: type[nn.Module]) -> None:
    elbos = made(make(4, 2), make(4, 2))
    with pytest.raises(ValueError, match=r"cannot be run at once, .*torch\.vmap .* each by fit"):
        trained(elbos)
    for elbo in elbos:  # which are whole
        for tensor in elbo.bnn.state_dict().values():
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        alone([elbo])


def test_a_frozen_body_stays_in_one_memory() -> None:
    torch.manual_seed(0)
    body = nn.Linear(4, 8).requires_grad_(False)
    nets = [nn.Sequential(body, nn.Tanh(), nn.Linear(8, 2)) for _ in range(3)]
    together, each = trained(made(*nets)), alone(made(*nets))
    assert len({elbo.bnn.net[0].weight.data_ptr() for elbo in together}) == 1
    assert together[0].bnn.net[0].weight.data_ptr() == body.weight.data_ptr()
    for one, other in zip(together, each, strict=True):
        torch.testing.assert_close(one.bnn.posterior.mean, other.bnn.posterior.mean)


class Logging(nn.Module):
    """Notes what it sees, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return x + 1e-3 * torch.rand((), generator=self.generator)


def with_activation(kind: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), kind(), nn.Linear(8, 2))


class OnEpoch(bf.Callback):
    """Makes a change after each epoch."""

    def __init__(self, change: Callable[[], object]) -> None:
        self.change = change

    def on_epoch(self, row: Any) -> None:  # noqa: ARG002
        self.change()


@pytest.mark.parametrize("changed", [0, 1])
def test_a_module_that_a_callback_replaces_in_one_network_is_noticed(changed: int) -> None:
    """One pass of the first network's modules is that of all."""
    elbos = made(*(with_activation(nn.ReLU) for _ in range(2)))
    change = OnEpoch(lambda: setattr(elbos[changed].bnn.net, "1", nn.Tanh()))
    with pytest.raises(ValueError, match="the module '1' of network 1 is no longer of the class"):
        fit_replicas(elbos, TensorLoader(X, Y, 16), epochs=3, callback=change)


def test_what_a_pass_and_a_hook_note_in_one_network_is_no_difference() -> None:
    elbos = made(*(with_activation(Logging) for _ in range(2)))
    seen: list[int] = []
    hook = OnEpoch(
        lambda: elbos[0].bnn.net[0].register_forward_hook(lambda *_: seen.append(1))  # type: ignore[union-attr]
    )
    fit_replicas(elbos, TensorLoader(X, Y, 16), epochs=3, callback=hook)
    assert seen
