"""``predict(once=...)``: a deterministic part runs once, and the answers are the same."""

from __future__ import annotations

import math
from collections import OrderedDict
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


class CountingWhole(Network):
    """Counts the passes of the whole network, and may look at a weight's value."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__(kind)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        outputs = super().forward(x)
        if self.kind == "reads a value" and float(self.head.weight.sum()) > 1e9:
            return outputs + 1.0
        return outputs


@pytest.mark.parametrize("batch_size", [10, 4])
@pytest.mark.parametrize("kind", ["plain", "twice", "in place", "data", "reads a value"])
def test_many_samples_share_what_follows_the_part(kind: str, batch_size: int) -> None:
    torch.manual_seed(0)
    bnn = bf.BayesianModule(CountingWhole(kind), include=("head.*",), init_std=0.3)
    options: dict[str, Any] = {"keep_samples": True, "batch_size": batch_size}
    expected = outputs(bnn.predict(X, 40, **options))
    for _ in range(3):
        bnn.net.calls = bnn.net.encoder.passes = 0
        found = outputs(bnn.predict(X, 40, once="encoder", **options))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    batches = math.ceil(10 / batch_size)
    # The first sample runs the part, the second is measured, the others share a pass, unless vmap
    # has no rule for what the network does.
    assert bnn.net.calls == (40 if kind in ("data", "reads a value") else 3) * batches
    assert bnn.net.encoder.passes == batches * (2 if kind == "twice" else 1)


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


@pytest.mark.parametrize("once", ["encoder", "encoder.0"])
def test_a_random_layer_under_another_name_is_refused(once: str) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.encoder, self.head = nn.Sequential(self.first, nn.Tanh()), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.encoder(x))
            return result

    bnn = bf.BayesianModule(Shared(), include=("first.*",))
    with pytest.raises(ValueError, match=f"{once!r} has 'encoder.0.weight'"):
        bnn.predict(X, S, once=once)
    # A layer within a part may be named, too, by either of its names.
    bnn = bf.BayesianModule(Shared(), include=("head.*",))
    expected = bnn.predict(X, S)
    for names in (("first", "encoder"), "encoder.0"):
        assert torch.equal(bnn.predict(X, S, once=names).mean, expected.mean)


def test_a_residual_network_with_activations_in_place() -> None:
    """The parts of torchvision's ResNet, named one by one."""
    torch.manual_seed(0)
    named = {
        "conv1": nn.Conv2d(1, 3, 3),
        "bn1": nn.BatchNorm2d(3),
        "relu": nn.ReLU(inplace=True),
        "pool": nn.AdaptiveAvgPool2d(2),
        "flat": nn.Flatten(),
        "head": nn.Linear(12, 3),
    }
    bnn = bf.BayesianModule(nn.Sequential(OrderedDict(named)), include=("head.*",))
    x = torch.randn(10, 1, 6, 6)
    for batch_size in (10, 4):
        expected = bnn.predict(x, S, batch_size=batch_size)
        found = bnn.predict(x, S, once=tuple(named)[:-1], batch_size=batch_size)
        assert torch.equal(found.mean, expected.mean)
        assert torch.equal(found.epistemic, expected.epistemic)


@pytest.mark.parametrize(
    ("largest", "draws"), [(10**9, S), (2 * 18 * 4, 2 + 3 * (S - 2)), (0, 3 * S)]
)
def test_each_weight_sample_is_drawn_once(
    largest: int, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bayesify.module.sampling._LARGEST_KEPT", largest)
    bnn, drawn = made(), []
    noise = type(bnn.posterior).noise

    def counted(posterior: Any, key: Any, samples: range) -> Tensor:
        drawn.extend(samples)
        return noise(posterior, key, samples)

    expected = bnn.predict(X, S, seed=1, batch_size=4)
    monkeypatch.setattr(type(bnn.posterior), "noise", counted)
    found = bnn.predict(X, S, seed=2, batch_size=4, once="encoder")
    assert len(drawn) == draws
    found = bnn.predict(X, S, seed=1, batch_size=4, once="encoder")
    assert torch.equal(found.mean, expected.mean)


class EditsWeights(nn.Module):
    """Halves a weight at each pass, for good if the weight is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        with torch.no_grad():
            self.head.weight.mul_(0.5)
        return self.head(hidden)


@pytest.mark.parametrize("once", [(), "body"])
def test_a_network_that_edits_its_weights_has_its_own_in_each_batch(once: Any) -> None:
    bnn = bf.BayesianModule(EditsWeights(), include=("head.*",), init_std=0.5)
    x = torch.linspace(-1.0, 1.0, 60).view(20, 3)
    expected = bnn.predict(x, 5, batch_size=20)
    found = bnn.predict(x, 5, batch_size=7, once=once)
    torch.testing.assert_close(found.mean, expected.mean)
    alone = bnn.predict_mean(x, batch_size=7)
    torch.testing.assert_close(alone.mean, bnn.predict_mean(x, batch_size=20).mean)
