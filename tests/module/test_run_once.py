"""``predict(once=...)``: a deterministic part runs once, and the answers are the same."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


@dataclass
class Hidden:
    """A result that PyTorch does not know, and an argument with attributes of its own."""

    h: Tensor


class Opaque:
    """An object that tells nothing about what it holds."""

    h: Tensor


class Part(nn.Module):
    """A layer, wrapped by a function that decides what the part takes and returns."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function, self.passes = nn.Linear(4, 4), function, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.passes += 1
        return self.function(self.layer, *args, **kwargs)


class Whole(nn.Module):
    """A part, and a function that calls it between random weights."""

    def __init__(self, part: Callable[..., Any], function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.part, self.head, self.function = Part(part), nn.Linear(4, 3), function
        self.w = nn.Parameter(torch.ones(4))
        self.state = Hidden(torch.zeros(1))
        self.opaque = Opaque()
        self.register_buffer("b", torch.zeros(10, 4))
        self.register_buffer("sparse", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def whole(part: Callable[..., Any], function: Callable[..., Tensor]) -> bf.BayesianModule:
    torch.manual_seed(0)
    net = Whole(part, function)
    return bf.BayesianModule(net, include=("w", "head.*"), init_std=0.3)


def ahead(s: Any, x: Tensor) -> Tensor:
    """Copy what depends on a random weight into the buffer that the part is given."""
    s.b.copy_(x * s.w)
    return s.head(s.part(s.b))


def within(attribute: str) -> Callable[..., Tensor]:
    """Put what depends on a random weight into an object that the part is given."""

    def function(s: Any, x: Tensor) -> Tensor:
        held = getattr(s, attribute)
        held.extra = x * s.w
        return s.head(s.part(held))

    return function


def opaque_by_name(s: Any, x: Tensor) -> Tensor:
    return s.head(s.part(x, context=[{"held": s.opaque}]))


def generated(layer: nn.Linear, x: Tensor) -> Iterator[Tensor]:
    return (layer(row) for row in x)


def appended(s: Any, x: Tensor) -> Tensor:
    found: list[Tensor] = []
    s.part(x, found)
    return s.head(found[0])


def signed_zero(s: Any, x: Tensor) -> Tensor:
    zero = torch.zeros(4).copysign(s.w - 1.0)
    return s.head(s.part(zero).clamp(-1.0, 1.0) + x)


REFUSED: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], str]] = {
    "buffer": (lambda layer, b: layer(b), ahead, "inputs differ between weight samples"),
    "attribute": (lambda layer, c: layer(c.extra), within("state"), "inputs differ between"),
    "opaque": (lambda layer, c: layer(c.extra), within("opaque"), "got Opaque in argument 0"),
    "opaque by name": (
        lambda layer, x, **_: layer(x),
        opaque_by_name,
        "got Opaque in argument 'context'; name a part that is not given one",
    ),
    "list": (
        lambda layer, x, found: found.append(layer(x)),
        appended,
        "must edit nothing of its inputs but the values of tensors",
    ),
    "shape": (
        lambda layer, x: layer(x.unsqueeze_(0))[0],
        lambda s, x: s.head(s.part(x.clone())),
        "must edit nothing of its inputs but the values of tensors",
    ),
    "generator": (
        generated,
        lambda s, x: s.head(torch.stack(list(s.part(x)))),
        "must be one that copy.deepcopy copies for each weight sample, got generator",
    ),
    "zero's sign": (
        lambda layer, zero: layer.bias / zero,
        signed_zero,
        "inputs differ between weight samples",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_checked_or_copied_is_refused(case: str) -> None:
    part, function, message = REFUSED[case]
    bnn = whole(part, function)
    bnn.predict(X, S, batch_size=10)
    with pytest.raises(ValueError, match=f"once names 'part', .*{message}"):
        bnn.predict(X, S, once="part", batch_size=10)
    assert "forward" not in vars(bnn.net.part)


def edited(field: Callable[[Any], Tensor]) -> Callable[..., Tensor]:
    """Edit a tensor of the result in place, in proportion to a random weight."""

    def function(s: Any, x: Tensor) -> Tensor:
        result = s.part(x)
        field(result).mul_(s.w)
        return s.head(field(result))

    return function


def opaque_result(layer: nn.Linear, x: Tensor) -> Opaque:
    result = Opaque()
    result.h = layer(x)
    return result


def views_of_one(s: Any, x: Tensor) -> Tensor:
    one, other = s.part(x)
    one.mul_(s.w[0])
    return s.head(other)


def argument_edited_later(s: Any, x: Tensor) -> Tensor:
    """Edit the part's result, which is a view of its argument, and use the argument."""
    hidden = x + 1.0
    s.part(hidden).mul_(s.w[0])
    return s.head(hidden)


def argument_edited_within(s: Any, x: Tensor) -> Tensor:
    hidden = x + 1.0
    return s.head(s.part(hidden) + s.w * hidden)


def attached(layer: nn.Linear, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return layer(x)


def sparse(s: Any, x: Tensor) -> Tensor:
    return s.head(s.part(x, s.sparse, kind=("relu", math.pi, torch.float32, x.shape)))


SAME: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "dataclass": (lambda layer, x: Hidden(layer(x)), edited(lambda o: o.h)),
    "object": (opaque_result, edited(lambda o: o.h)),
    "ordered": (lambda layer, x: OrderedDict(h=[layer(x)]), edited(lambda o: o["h"][0])),
    "with a graph": (attached, edited(lambda o: o)),
    "views of one": (lambda layer, x: layer(x).expand(2, -1, -1).unbind(), views_of_one),
    "conjugate": (lambda layer, x: torch.complex(layer(x), x).conj(), edited(lambda o: o.real)),
    "argument": (lambda _, x: x, argument_edited_later),
    "view of the argument": (lambda _, x: x.view(-1)[4:], argument_edited_later),
    "edits": (lambda layer, x: layer(x.mul_(2.0)), argument_edited_within),
    "edits data": (lambda layer, x: layer(x.data.mul_(2.0)), argument_edited_within),
    "edits and returns": (lambda _, x: x.relu_(), argument_edited_within),
    "edits the input": (
        lambda layer, x: layer(x.round_(decimals=1)),
        lambda s, x: s.head(s.part(x) + x),
    ),
    "sparse": (lambda layer, x, m, **_: layer(x @ m.to_dense()), sparse),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("batch_size", [10, 4])
@pytest.mark.parametrize("case", SAME)
def test_edits_in_place_act_as_they_do_without(case: str, batch_size: int, inference: bool) -> None:
    bnn = whole(*SAME[case])
    options: dict[str, Any] = {"keep_samples": True, "batch_size": batch_size}
    with torch.inference_mode(inference):
        expected = outputs(bnn.predict(X.clone(), S, **options))
        bnn.net.part.passes = 0
        found = outputs(bnn.predict(X.clone(), S, once="part", **options))
    assert all(map(torch.equal, found, expected))
    again = 2 if case == "edits the input" else 1  # the second pass sees other inputs
    assert bnn.net.part.passes == again * math.ceil(10 / batch_size) < S * 10 / batch_size


def test_an_input_that_is_not_a_number_is_the_same() -> None:
    bnn = whole(lambda layer, x: layer(x), lambda s, x: s.head(s.part(x).nan_to_num()))
    x = X.clone()
    x[0, 0] = torch.nan
    assert torch.equal(bnn.predict(x, S, once="part").mean, bnn.predict(x, S).mean)


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


def test_hooks_within_a_part_run_with_it() -> None:
    bnn = whole(lambda layer, x: layer(x), lambda s, x: s.head(s.part(x)))
    counts = {"within": 0, "on": 0}

    def count(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[name] += 1

        return hook

    bnn.net.part.layer.register_forward_hook(count("within"))
    bnn.net.part.register_forward_hook(count("on"))
    bnn.predict(X, S, once="part", batch_size=10)
    assert counts == {"within": 1, "on": S}


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
