"""``predict(once=...)``: a deterministic part runs once, and the answers are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesify as bf

X, S = torch.linspace(-1.0, 1.0, 40).view(10, 4), 6


class Counting(nn.Linear):
    """Counts its passes."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x)


class Network(nn.Module):
    """An encoder, called once or twice, and a head."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.encoder, self.head = Counting(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "after":
            return self.encoder(x * self.head.weight.sum())[:, :3]
        if self.kind == "differentiated":
            with torch.enable_grad():
                inputs = x.clone().requires_grad_()
                (slope,) = torch.autograd.grad(self.encoder(inputs).square().sum(), inputs)
            return self.head(self.encoder(x) + slope[:, :1])
        hidden = self.encoder(x)
        if self.kind == "twice":
            hidden = hidden + self.encoder(-2.0 * x)
        if self.kind == "in place":
            hidden = hidden.relu_()
        if self.kind == "data":
            hidden.data.mul_(0.5)
        result: Tensor = self.head(hidden)
        return result


def made(kind: str = "plain", **options: Any) -> bf.BayesianModule:
    torch.manual_seed(0)
    return bf.BayesianModule(Network(kind), include=("head.*",), **options)


def outputs(p: bf.Predictive) -> list[Tensor]:
    assert p.samples is not None
    return [p.mean, p.epistemic, p.samples]


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("kind", ["plain", "twice", "in place", "data", "differentiated"])
def test_the_answers_are_the_same(kind: str, batch_size: int | None) -> None:
    bnn = made(kind)
    options: dict[str, Any] = {"keep_samples": True, "batch_size": batch_size}
    expected = outputs(bnn.predict(X, S, **options))
    for _ in range(3):
        found = outputs(bnn.predict(X, S, once="encoder", **options))
        assert all(map(torch.equal, found, expected))
    if kind != "differentiated":
        with torch.inference_mode():
            found = outputs(bnn.predict(X, S, once="encoder", **options))
        assert all(map(torch.equal, found, expected))
    assert "forward" not in vars(bnn.net.encoder)


def test_the_part_runs_once_for_each_batch() -> None:
    bnn = made()
    bnn.predict(X, S, batch_size=4)
    bnn.net.encoder.passes = 0
    bnn.predict(X, S, batch_size=4)
    assert bnn.net.encoder.passes == 3 * S
    bnn.net.encoder.passes = 0
    bnn.predict(X, S, batch_size=4, once=["enc*"])
    assert bnn.net.encoder.passes == 3


def test_numbers_and_a_seed() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    bnn = bf.BayesianModule(net, include=("2.*",), likelihood=bf.GaussianLikelihood())
    expected = bnn.predict(X, S, seed=4)
    found = bnn.predict(X, S, seed=4, once=("0", "1"))
    assert torch.equal(found.mean, expected.mean)
    assert torch.equal(found.total, expected.total)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("plain", {"once": "decoder"}, "such as 'encoder', and 'decoder' matches none"),
        ("plain", {"once": "head"}, "without random parameters, and 'head' has 'head.weight'"),
        ("plain", {"once": "*"}, "without random parameters, and 'head'"),
        ("after", {"once": "encoder"}, "'encoder', whose inputs differ between weight samples"),
        ("plain", {"once": "encoder", "max_memory": "1 GB"}, "leave out max_memory, or once"),
    ],
)
def test_wrong_parts_are_refused(kind: str, options: dict[str, Any], message: str) -> None:
    bnn = made(kind)
    with pytest.raises(ValueError, match=message):
        bnn.predict(X, S, **options)
    assert "forward" not in vars(bnn.net.encoder)


def test_a_forward_of_its_own_is_put_back() -> None:
    bnn = made()
    own = bnn.net.encoder.forward
    bnn.net.encoder.forward = own
    bnn.predict(X, S, once="encoder")
    assert vars(bnn.net.encoder)["forward"] is own
