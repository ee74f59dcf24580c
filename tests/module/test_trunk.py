"""What depends on no random weight runs once for all weight samples; the answers are the same."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import bayesify as bf

X, S = torch.linspace(-1.0, 1.0, 40).view(10, 4), 6


pytestmark = pytest.mark.usefixtures("trunks_of_small_networks")


class Products(TorchDispatchMode):
    """Counts the matrix products that are computed, by the shape of the second factor."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[tuple[int, ...], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.mm):
            shape = tuple(args[-1].shape)
            self.counts[shape] = self.counts.get(shape, 0) + 1
        return func(*args, **(kwargs or {}))


class Network(nn.Module):
    """An encoder, called once or twice, and a head."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.encoder, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.store: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
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
        if self.kind == "random numbers":
            hidden = hidden + torch.rand_like(hidden)
        if self.kind == "numpy":
            hidden.numpy()[:] += float(self.head.bias[0])
        if self.kind == "a value":
            hidden = hidden * float(self.head.bias[0])
        if self.kind == "counts":
            hidden = hidden * self.calls
        if self.kind == "branch" and float(self.head.bias[0]) > 0.0:
            hidden = hidden.tanh()
        if self.kind == "edits later" and float(self.head.bias[0]) > 0.0:
            hidden = hidden.mul_(2.0)
        if self.kind == "signs":
            zero = torch.zeros(5) * math.copysign(0.0, float(self.head.bias[0]))
            hidden = hidden + torch.ones(5).copysign(zero)
        if self.kind == "keeps":
            self.store = [self.encoder(x).exp()]
        if self.kind == "vmap":
            hidden = torch.vmap(self.encoder)(x)
        if self.kind == "autograd function":
            hidden = Doubled.apply(hidden)
        result: Tensor = self.head(hidden)
        return result + 1.0 if self.kind == "reads" and float(result.sum()) > 1e9 else result


class Doubled(torch.autograd.Function):
    """Uses a tensor where no function mode sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return 2.0 * x


def made(kind: str = "plain", **options: Any) -> bf.BayesianModule:
    torch.manual_seed(0)
    return bf.BayesianModule(Network(kind), include=("head.*",), init_std=0.3, **options)


def outputs(p: bf.Predictive) -> list[Tensor]:
    assert p.samples is not None
    return [p.mean, p.epistemic, p.samples]


def without(bnn: bf.BayesianModule, x: Any, num_samples: int, **options: Any) -> bf.Predictive:
    """Predict with a hook, which must see whole passes, one for each weight sample."""
    handle = bnn.net.register_forward_hook(lambda *_: None)
    try:
        return bnn.predict(x, num_samples, **options)
    finally:
        handle.remove()


def products(run: Callable[[], object]) -> dict[tuple[int, ...], int]:
    with Products() as counted:
        run()
    return counted.counts


#: Kinds whose encoder a later pass may leave out, and others.
LEFT_OUT = ("plain", "twice", "in place")
KEPT = ("data", "differentiated", "after", "random numbers", "numpy", "keeps", "vmap")
KEPT += ("branch", "reads", "edits later", "a value", "signs", "autograd function")


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("kind", [*LEFT_OUT, *KEPT])
@pytest.mark.usefixtures("compared")
def test_the_answers_are_the_same(kind: str, batch_size: int | None, inference: bool) -> None:
    bnn = made(kind)
    options: dict[str, Any] = {"keep_samples": True, "batch_size": batch_size}
    with torch.inference_mode(inference and kind != "differentiated"):
        torch.manual_seed(1)
        expected = outputs(without(bnn, X, S, **options))
        torch.manual_seed(1)
        for _ in range(1 if kind == "random numbers" else 3):
            found = outputs(bnn.predict(X, S, **options))
            if kind == "random numbers":  # those of the first pass of a batch come before others
                assert [each.shape for each in found] == [each.shape for each in expected]
            else:
                assert all(map(torch.equal, found, expected))
    if kind == "keeps":
        assert torch.equal(
            bnn.net.store[0], bnn.net.encoder(X if batch_size is None else X[8:]).exp()
        )


@pytest.mark.parametrize("batch_size", [10, 4])
@pytest.mark.parametrize("kind", LEFT_OUT)
def test_the_encoder_runs_once_for_each_batch(kind: str, batch_size: int) -> None:
    bnn = made(kind)
    bnn.predict(X, S, batch_size=batch_size)  # measures a pass
    batches = -(-10 // batch_size)
    encoders = (2 if kind == "twice" else 1) * batches
    whole = products(lambda: without(bnn, X, S, batch_size=batch_size))
    assert whole[4, 5] == encoders * S
    found = products(lambda: bnn.predict(X, S, batch_size=batch_size))
    assert found == {(4, 5): encoders, (5, 3): S * batches}


@pytest.mark.parametrize("batch_size", [10, 4])
@pytest.mark.parametrize("kind", LEFT_OUT)
def test_many_samples_share_what_is_left(kind: str, batch_size: int) -> None:
    bnn = made(kind)
    options: dict[str, Any] = {"keep_samples": True, "batch_size": batch_size}
    expected = outputs(without(bnn, X, 40, **options))
    for _ in range(3):
        bnn.net.calls = 0
        found = outputs(bnn.predict(X, 40, **options))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    # All share one pass where there is one batch. Else the first runs the encoder, the second is
    # measured, and the others share a pass, unless they have branches.
    batches = -(-10 // batch_size)
    loops = kind in ("branch", "reads")
    assert bnn.net.calls == (40 if loops else 1 if batches == 1 else 3) * batches


def test_numbers_and_a_seed() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    bnn = bf.BayesianModule(net, include=("2.*",), likelihood=bf.GaussianLikelihood())
    expected = without(bnn, X, S, seed=4)
    found = bnn.predict(X, S, seed=4)
    assert torch.equal(found.mean, expected.mean)
    assert torch.equal(found.total, expected.total)
    y = torch.zeros(10, 1)
    torch.testing.assert_close(bnn.log_prob(X, y, S, seed=4), expected.log_prob(y))


def test_a_random_layer_under_another_name() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.encoder, self.head = nn.Sequential(self.first, nn.Tanh()), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.encoder(x))
            return result

    for include in ("first.*", "head.*"):
        bnn = bf.BayesianModule(Shared(), include=(include,), init_std=0.3)
        assert torch.equal(bnn.predict(X, S).mean, without(bnn, X, S).mean)


def test_a_residual_network_with_activations_in_place() -> None:
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
        expected = without(bnn, x, S, batch_size=batch_size)
        found = bnn.predict(x, S, batch_size=batch_size)
        assert torch.equal(found.mean, expected.mean)
        assert torch.equal(found.epistemic, expected.epistemic)


def test_attention_and_recurrent_layers() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 8)
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.lstm, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            hidden = self.encoder(self.embed(ids), src_key_padding_mask=mask)
            result: Tensor = self.head(self.lstm(hidden)[1][0][-1])
            return result

    torch.manual_seed(0)
    bnn = bf.BayesianModule(Mixed(), include=("head.*",), init_std=0.3)
    ids, mask = torch.randint(0, 7, (5, 4)), torch.zeros(5, 4, dtype=torch.bool)
    mask[2, 3] = True
    inputs = {"ids": ids, "mask": mask}
    expected = without(bnn, inputs, 40, keep_samples=True)
    found = bnn.predict(inputs, 40, keep_samples=True)
    for one, other in zip(outputs(found), outputs(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    found = products(lambda: bnn.predict(inputs, 40))
    assert found.pop((6, 3)) == 2  # the others share a pass
    assert set(found.values()) == {2}  # the layers of the encoder


@pytest.mark.parametrize("place", ["list", "object"])
def test_what_a_network_keeps_of_its_passes_is_whole(place: str) -> None:
    class Store:
        """Holds tensors where no module shows them."""

        def __init__(self) -> None:
            self.kept: list[Tensor] = []

    class Keeps(Network):
        def __init__(self) -> None:
            super().__init__()
            self.other: Any = Store() if place == "object" else []

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.encoder(x).tanh()
            (self.other.kept if place == "object" else self.other).append(hidden.exp())
            result: Tensor = self.head(hidden)
            return result

    bnn = bf.BayesianModule(Keeps(), include=("head.*",))
    bnn.predict(X, 1, batch_size=10)
    kept = bnn.net.other.kept if place == "object" else bnn.net.other
    kept.clear()
    bnn.predict(X, S, batch_size=10)
    expected = bnn.net.encoder(X).tanh().exp()
    assert len(kept) == S
    for each in kept:
        assert torch.equal(each, expected)


def test_a_larger_batch_may_pay_where_a_smaller_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bayesify.module.trunk._LEAST_SAVING", 0.2)
    net = nn.Sequential(nn.Linear(4, 60), nn.Tanh(), nn.Linear(60, 3))
    bnn, x = bf.BayesianModule(net, include=("2.*",)), X.repeat(40, 1)
    few = products(lambda: bnn.predict(x[:9], S, batch_size=5))
    assert few[4, 60] >= 2 * S
    many = products(lambda: bnn.predict(x, S, batch_size=200))
    assert many[4, 60] <= 2 + 1  # a batch, and a whole pass to compare


def test_few_samples_have_whole_passes() -> None:
    bnn = made()
    bnn.predict(X, 4, batch_size=4)
    assert products(lambda: bnn.predict(X, 4, batch_size=4)) == {(4, 5): 12, (5, 3): 12}


def test_no_more_than_the_limit_is_kept_for_random_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = 4 * 5 * 10  # bytes of what the head reads
    for most, passes in ((hidden - 1, S), (hidden, 1)):
        bnn = made()
        monkeypatch.setattr("bayesify.module.recorded_pass._MOST_KEPT", most)
        bnn.predict(X, S, batch_size=10)
        assert products(lambda: bnn.predict(X, S, batch_size=10))[4, 5] == passes  # noqa: B023


@pytest.mark.parametrize("kind", ["plain", "data", "branch"])
def test_the_summary_tells_how_much_runs_once(kind: str) -> None:
    bnn = made(kind).train()
    summary = bnn.summary(X)
    if kind == "plain":
        assert 0.4 < summary.shared < 0.6
        assert repr(summary).endswith("% of a pass's work once for all weight samples")
    else:
        assert summary.shared == 0.0
        assert "once for all" not in repr(summary)
    assert bnn.net.training
    assert made(kind).summary().shared == 0.0


def test_hooks_run_at_every_pass() -> None:
    bnn, seen = made(), []
    bnn.net.encoder.register_forward_hook(lambda *_: seen.append(None))
    bnn.predict(X, S, batch_size=10)
    assert len(seen) == S


def test_no_more_than_the_limit_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    bnn = made()
    expected = without(bnn, X, S, batch_size=4)
    bnn.predict(X, S, batch_size=4)  # compares a pass with a whole one
    monkeypatch.setattr("bayesify.module.sampling._LARGEST_HELD", 4 * 3 * 10 * S - 1)
    assert torch.equal(bnn.predict(X, S, batch_size=4).mean, expected.mean)
    assert products(lambda: bnn.predict(X, S, batch_size=4))[4, 5] >= 3 * S
    monkeypatch.setattr("bayesify.module.sampling._LARGEST_HELD", 4 * 3 * 10 * S)
    assert products(lambda: bnn.predict(X, S, batch_size=4))[4, 5] == 3


def test_an_error_of_the_network_is_raised() -> None:
    class Fails(Network):
        def forward(self, x: Tensor) -> Tensor:
            if self.calls == 3:
                raise KeyError("of the network")
            return super().forward(x)

    net = Fails()
    bnn = bf.BayesianModule(net, include=("head.*",))
    bnn.predict(X[:1], 1)
    bnn.net.calls = 0
    with pytest.raises(KeyError, match="of the network"):
        bnn.predict(X, S, batch_size=10)


@pytest.mark.parametrize(
    ("largest", "draws"), [(10**9, 1 + S), (2 * 18 * 4, 1 + 2 + 3 * (S - 2)), (0, 3 * S)]
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

    expected = without(bnn, X, S, seed=1, batch_size=4)
    monkeypatch.setattr(type(bnn.posterior), "noise", counted)
    found = bnn.predict(X, S, seed=2, batch_size=4)
    assert len(drawn) == draws
    found = bnn.predict(X, S, seed=1, batch_size=4)
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


def test_a_network_that_edits_its_weights_has_its_own_in_each_batch() -> None:
    bnn = bf.BayesianModule(EditsWeights(), include=("head.*",), init_std=0.5)
    x = torch.linspace(-1.0, 1.0, 60).view(20, 3)
    expected = without(bnn, x, 5, batch_size=20)
    for batch_size in (7, 20):
        found = bnn.predict(x, 5, batch_size=batch_size)
        torch.testing.assert_close(found.mean, expected.mean)
    alone = bnn.predict_mean(x, batch_size=7)
    torch.testing.assert_close(alone.mean, bnn.predict_mean(x, batch_size=20).mean)
