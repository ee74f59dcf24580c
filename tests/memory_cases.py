"""Networks of every kind, and what counts their passes, for the tests of predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import normals
from torch import Tensor, nn

from bayesify import BayesianModule, CategoricalLikelihood, GaussianLikelihood
from bayesify.module.inputs import Inputs, arguments_of
from bayesify.module.networks import mlp
from bayesify.module.random_network import RandomNetwork
from bayesify.noise.keys import NoiseKey, Stream

KEY = NoiseKey(0, Stream.PREDICTION, 0)
N, S = 21, 12


class Branching(nn.Linear):
    """What torch.vmap cannot run: a branch on a value."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        return hidden if float(self.weight.sum()) > 0.0 else hidden.neg()


class Editing(nn.Linear):
    """Edits what is not random by what is, in place, and its own weights."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.clamp_(-0.1, 0.1)
        base = torch.zeros(len(x), 3, dtype=x.dtype)
        return base.add_(super().forward(x))


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return 2.0 * x


class LateFailure(nn.Linear):
    """What torch.vmap begins, having edited weights and a buffer, and cannot end."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.weight.mul_(2.0)
        return Doubling.apply(super().forward(x))


class Keeping(nn.Linear):
    """Keeps a tensor of its last pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.mask = super().forward(x)
        return self.mask


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.unflatten(-1, (2, 2)))[0][:, -1])


class Attending(nn.Module):
    """Attention that is asked for its weights, which torch has a fused kernel for too."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(2, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (2, 2))
        return self.head(self.attention(parts, parts, parts)[0].flatten(1))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(self.left(a)) + self.right(b)


def conv() -> nn.Module:
    norm = nn.BatchNorm2d(5)
    norm.running_mean.copy_(normals(5, seed=2))
    return nn.Sequential(
        nn.Unflatten(-1, (1, 2, 2)), nn.Conv2d(1, 5, 3, padding=1), norm, nn.ReLU(inplace=True),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(5, 3),
    )  # fmt: skip


X, PAIR = normals(N, 4), (normals(N, 4), normals(N, 2, seed=1))
#: A network, its inputs, and how many passes 12 weight samples of all data are.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Inputs, int]] = {
    "mlp": (lambda: mlp(4, (6,), 3), X, 1),
    "conv": (conv, X, 1),
    "attention": (Attending, X, 1),
    "transformer": (lambda: nn.Sequential(
        nn.Unflatten(-1, (2, 2)), nn.TransformerEncoderLayer(2, 2, 3, batch_first=True),
        nn.Flatten(), nn.Linear(4, 3)), X, S),
    "recurrent": (Recurrent, X, S),
    "branching": (lambda: Branching(4, 3), X, S),
    "editing": (lambda: Editing(4, 3), X, S),
    "late-failure": (LateFailure, X, S + 1),
    "keeping": (lambda: Keeping(4, 3), X, S),
    "tuple": (TwoInputs, PAIR, 1),
    "dict": (TwoInputs, {"b": PAIR[1], "a": PAIR[0]}, 1),
}  # fmt: skip
CUTS: list[dict[str, Any]] = [
    {},
    {"batch_size": 1},
    {"batch_size": 8},
    {"batch_size": 1000},
    {"max_memory": 2_016_000},
    {"max_memory": "2.03 MB"},
    {"max_memory": "64 MB"},
    {"max_memory": "1 GB", "batch_size": 5},
]


def made(name: str, likelihood: str = "categorical") -> tuple[BayesianModule, Inputs]:
    torch.manual_seed(3)
    net, inputs, _ = NETWORKS[name]
    kind = CategoricalLikelihood() if likelihood == "categorical" else GaussianLikelihood(std=0.8)
    return BayesianModule(net().double(), likelihood=kind, init_std=0.3), inputs


def explicit(bnn: BayesianModule, inputs: Inputs) -> Tensor:
    """The plain network's outputs (S, N, 3), its weights made by hand, all data at once."""
    mean, std = bnn.posterior.mean.detach(), bnn.posterior.std.detach()
    args, kwargs = arguments_of(inputs)
    outputs = []
    for sample in range(S):
        noise = KEY.normals(range(sample, sample + 1), len(mean), dtype=mean.dtype)[0]
        plain = bnn.to_module().eval()
        random = [plain.get_parameter(name) for name in bnn.layout.names]
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(mean + std * noise, random)
            outputs.append(plain(*args, **kwargs).clone())
    return torch.stack(outputs)


def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one at every pass."""
    count: list[int] = []
    right = RandomNetwork.run_with

    def counted(self: RandomNetwork, *args: Any, **kwargs: Any) -> Any:
        count.append(len(count))
        return right(self, *args, **kwargs)

    monkeypatch.setattr(RandomNetwork, "run_with", counted)
    return count
