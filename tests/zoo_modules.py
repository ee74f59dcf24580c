"""The modules of the zoo that a user would write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 2, 3, padding=1)
        self.second = nn.Conv2d(2, 2, 3, padding=1)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(torch.tanh(self.first(x)))
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """A recurrent net of two layers both ways, and a layer that it goes through at each step."""

    def __init__(self, kind: type[nn.RNNBase], *, batch_first: bool, **options: Any) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.cells = kind(
            4, 3, num_layers=2, bidirectional=True, batch_first=batch_first, **options
        )
        self.head = nn.Linear(2 * options.get("proj_size", 3), 3)

    def forward(self, x: Tensor) -> Tensor:
        states = self.cells(x if self.batch_first else x.transpose(0, 1))[0]
        return self.head(states).mean(1 if self.batch_first else 0)


def recurrent(kind: type[nn.RNNBase], **options: Any) -> Callable[[], nn.Module]:
    """What makes a recurrent net."""
    return lambda: Recurrent(kind, **options)


class Cell(nn.Module):
    """A cell in a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        assert state is not None
        return state[0]


class Attention(nn.Module):
    """Self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].square().mean(1))


class CrossAttention(nn.Module):
    """Attention to a memory of another width, time first inside, with biases as a key more."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, kdim=2, vdim=2, add_bias_kv=True, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        memory = memory.transpose(0, 1)
        found, weights = self.attention(query.transpose(0, 1), memory, memory)
        return self.head(found.square().mean(0)) + weights.square().sum((1, 2))[:, None]


class TiedEmbedding(nn.Module):
    """An embedding whose matrix is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.out(torch.tanh(self.inner(self.embed(tokens))).mean(1))
        return torch.stack([logits[:, :3].sum(1), logits[:, 3:5].sum(1), logits[:, 5:].sum(1)], 1)


class Twice(nn.Module):
    """One layer under two names, used twice, and a third time as a plain matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.again = self.inner
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.again(torch.tanh(self.inner(x)))))


class Siamese(nn.Module):
    """The same branch for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        self.head = nn.Linear(5, 3)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return self.head(self.branch(one) * self.branch(two))


class Bare(nn.Module):
    """Parameters without a layer: a matrix, a scale without axes, a shift, one that is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(4, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.zeros(3))
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.matrix + self.shift)
        return self.layer(hidden) + (1.0 + self.scale) * hidden


class Functional(nn.Module):
    """Convolution and linear layer called as functions, by name and by position."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(2, 1, 3, 3))
        self.offset = nn.Parameter(torch.zeros(2))
        self.weight = nn.Parameter(torch.zeros(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, bias=self.offset, weight=self.kernel)
        return F.linear(torch.tanh(x).flatten(1), self.weight)


def frozen() -> nn.Module:
    """A net whose first layer is frozen, and of its last the bias."""
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    net[0].requires_grad_(requires_grad=False)
    net[4].bias.requires_grad_(requires_grad=False)
    return net


class DictOutput(nn.Module):
    """Logits and what lies before them, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.inner(x))
        return {"hidden": hidden, "logits": self.head(hidden)}


class ByName(nn.Module):
    """Inputs by name only, one of them a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, *, x: Tensor, mask: Tensor, power: float = 2.0) -> Tensor:
        return self.head(self.inner(x).masked_fill(~mask, 1.0).abs().pow(power))


class BranchAndLoop(nn.Module):
    """What it does, and how often, depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.rare = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + int(x.abs().mean().round())):
            x = torch.tanh(self.inner(x))
        x = self.rare(x) if x[0, 0] < 2.0 else x
        return self.head(torch.tanh(x))


class Bilinear(nn.Module):
    """A form that is linear in each of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(2, 3, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return self.head(torch.tanh(self.form(one, two)))


class _OwnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class OwnFunction(nn.Module):
    """A linear operation with a backward of the user's own, which reads the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.weight = nn.Parameter(torch.zeros(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return _OwnLinear.apply(torch.tanh(self.first(x)), self.weight)


class Containers(nn.Module):
    """Layers and parameters in dicts and lists, some within others."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {"a.b".replace(".", "-"): nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 3)])}
        )
        self.lists = nn.ParameterList([torch.zeros(3), torch.ones(3, 3)])
        self.dicts = nn.ParameterDict({"scale": torch.ones(3)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.parts["a-b"]:
            x = torch.tanh(layer(x))
        return (x + self.lists[0]) @ self.lists[1] * self.dicts["scale"]


class Einsum(nn.Module):
    """Sums over named axes, and a parameter with a view of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cube = nn.Parameter(torch.zeros(4, 2, 3))
        self.matrix = nn.Parameter(torch.zeros(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(torch.einsum("ni,iho->nho", x, self.cube)).sum(1)
        return torch.einsum("no,op->np", hidden, self.matrix) + F.linear(hidden, self.matrix.T)


class Products(nn.Module):
    """A weight in both orientations, heads, and a layer on folded rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.heads = nn.Parameter(torch.zeros(4, 2, 3))
        self.folded = nn.Parameter(torch.zeros(3, 3))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.weight) @ self.weight.T
        heads = torch.tanh(torch.einsum("nti,ihd->nhtd", hidden, self.heads)).transpose(1, 2)
        rows = torch.addmm(self.bias, heads.reshape(-1, 3), self.folded)
        return rows.view(*heads.shape).mean((1, 2))


class FoldedTime(nn.Module):
    """Time steps in the place of data: folded into the first axis, and first by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.folded = nn.Linear(4, 3)
        self.first = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.folded(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        hidden = self.first(torch.tanh(hidden).transpose(0, 1).contiguous())
        return self.head(torch.tanh(hidden).mean(0))
