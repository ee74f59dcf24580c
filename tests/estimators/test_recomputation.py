"""Activation checkpointing: the same weights and noise where a part runs again, so equal gradients.

Checkpointing must change memory only. Each network is run with and without it.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from tests.cases import normals
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from bayesify import (
    ELBO,
    BayesianModule,
    Estimator,
    Flipout,
    LocalReparameterization,
    WeightSampling,
)


class Blocks(nn.Module):
    """Residual blocks that run again where ``checkpoints`` says so; one block is used twice."""

    def __init__(self, *, dropout: float = 0.0, nested: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 4))
            for _ in range(3)
        )
        self.head = nn.Linear(4, 3)
        self.checkpoints = False
        self.nested = nested
        self.reentrant = False
        self.runs = 0

    def block(self, number: int, x: Tensor) -> Tensor:
        self.runs += 1
        first, *others = self.blocks[number]
        # A part within the part.
        hidden = self.maybe_again(first, x) if self.nested else first(x)
        return x + nn.Sequential(*others)(hidden)

    def maybe_again(self, part: Any, *args: Any) -> Tensor:
        if not self.checkpoints:
            return part(*args)
        return checkpoint(part, *args, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 2, 1):
            x = self.maybe_again(self.block, number, x)
        return self.head(x)


class Recurrent(nn.Module):
    """A GRU whose whole pass runs again, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.head = nn.Linear(4, 3)
        self.checkpoints, self.runs = False, 0

    def part(self, x: Tensor) -> Tensor:
        self.runs += 1
        states, _ = self.rnn(x)
        return scaled_dot_product_attention(states, states, states).sum(1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1).repeat(1, 3, 1)
        again = self.checkpoints
        return self.head(checkpoint(self.part, x, use_reentrant=False) if again else self.part(x))


class Views(nn.Module):
    """A transposed weight and folded rows that are made before the part that runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.zeros(4))
        self.head = nn.Linear(4, 3)
        self.checkpoints, self.runs = False, 0

    def forward(self, x: Tensor) -> Tensor:
        transposed, rows = self.weight.T, x.unsqueeze(1).repeat(1, 3, 1).view(-1, 4)

        def part(rows: Tensor) -> Tensor:
            self.runs += 1
            return torch.tanh(torch.addmm(self.bias, rows, transposed))

        hidden = checkpoint(part, rows, use_reentrant=False) if self.checkpoints else part(rows)
        return self.head(hidden.view(len(x), 3, 4).mean(1))


ESTIMATORS: list[Estimator] = [
    WeightSampling(),
    WeightSampling(antithetic=True),
    Flipout(),
    LocalReparameterization(),
    LocalReparameterization(per_position=True),
]
NETS = {
    "blocks": Blocks,
    "nested": lambda: Blocks(nested=True),
    "dropout": lambda: Blocks(dropout=0.5),
    "recurrent": Recurrent,
    "views": Views,
}
INPUTS, TARGETS = normals(5, 4, dtype=torch.float32), torch.arange(5) % 3


def gradients(elbo: ELBO, *, checkpoints: bool, passes: int = 1) -> list[Tensor]:
    """Of several passes in one backward pass, whose parts run again in another order."""
    elbo = copy.deepcopy(elbo)
    elbo.bnn.net.checkpoints = checkpoints
    torch.manual_seed(0)
    loss = torch.stack([elbo(INPUTS * (n + 1), TARGETS).loss for n in range(passes)]).sum()
    before = elbo.bnn.net.runs
    loss.backward()
    assert (elbo.bnn.net.runs > before) == checkpoints  # else nothing has been tested
    assert not list(elbo.bnn.net.parameters())
    return [loss.detach(), *(p.grad for p in elbo.parameters() if p.grad is not None)]


def new_elbo(name: str, estimator: Estimator, **options: Any) -> ELBO:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = NETS[name]()
    bnn = BayesianModule(net, estimator=estimator, init_std=0.3)
    return ELBO(bnn, num_data=5, num_samples=2, **options)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
def test_gradients_are_those_without_it(name: str, estimator: Estimator, fused: bool) -> None:
    elbo = new_elbo(name, estimator, fused=fused)
    for passes in (1, 2):
        expected = gradients(elbo, checkpoints=False, passes=passes)
        found = gradients(elbo, checkpoints=True, passes=passes)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_graph_that_is_kept_runs_again_twice() -> None:
    elbo = new_elbo("blocks", Flipout())
    elbo.bnn.net.checkpoints = True
    loss = elbo(INPUTS, TARGETS).loss
    parameters = list(elbo.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    elbo(INPUTS, TARGETS).loss.backward()  # another pass between
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), first)


def test_pytorch_is_as_before_and_other_threads_do_as_ever() -> None:
    from torch.utils import checkpoint as module

    names = "_checkpoint_without_reentrant_generator", "CheckpointFunction"
    before = [getattr(module, name) for name in names]
    elbo = new_elbo("blocks", WeightSampling())
    elbo.bnn.net.checkpoints = True
    seen: list[Tensor] = []

    def elsewhere() -> None:
        x = torch.ones(2, requires_grad=True)
        checkpoint(torch.exp, x, use_reentrant=False).sum().backward()
        checkpoint(torch.exp, x, use_reentrant=True).sum().backward()
        assert x.grad is not None
        seen.append(x.grad)

    def hook(*_: Any) -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    elbo.bnn.net.head.register_forward_hook(hook)
    elbo(INPUTS, TARGETS).loss.backward()
    torch.testing.assert_close(seen, [torch.full((2,), 2 * torch.e)] * 2)
    assert [getattr(module, name) for name in names] == before
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        elbo(INPUTS[:, :2], TARGETS)
    assert [getattr(module, name) for name in names] == before


def test_the_reentrant_kind_is_refused_where_it_would_lack_weights() -> None:
    elbo = new_elbo("blocks", WeightSampling())
    net = elbo.bnn.net
    net.checkpoints = net.reentrant = True
    loss = elbo(INPUTS.clone().requires_grad_(), TARGETS).loss
    with pytest.raises(RuntimeError, match=r"reentrant .* pass use_reentrant=False"):
        loss.backward()
    # It may run again what has no random parameters.
    net = Blocks()
    net.checkpoints = net.reentrant = True
    bnn = BayesianModule(net, include=("head.*",))
    inputs = INPUTS.clone().requires_grad_()
    ELBO(bnn, num_data=5)(inputs, TARGETS).loss.backward()
    assert bnn.net.runs == 8
    assert inputs.grad is not None


def test_predictions_need_nothing_of_it() -> None:
    bnn = new_elbo("blocks", Flipout()).bnn
    expected = bnn.predict(INPUTS, 4).mean
    bnn.net.checkpoints = True
    assert torch.equal(bnn.predict(INPUTS, 4).mean, expected)
