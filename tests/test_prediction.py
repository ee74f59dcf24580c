"""Predictions in pieces: the same answers however they are cut, and within the memory asked for."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import normals
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify import (
    BayesianModule,
    BernoulliLikelihood,
    CategoricalLikelihood,
    Delta,
    GaussianLikelihood,
    stateless,
)
from bayesify.footprint import _VECTORISED, MemoryTracker, SlowPath
from bayesify.inputs import Inputs, arguments_of
from bayesify.networks import lenet5, mlp
from bayesify.noise import NoiseKey, Stream
from bayesify.pieces import Pieces, bytes_of
from bayesify.prediction import SampledOutputs
from bayesify.random_network import RandomNetwork

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
        self.kept = super().forward(x)
        return self.kept


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


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize("name", NETWORKS)
def test_answers_do_not_depend_on_the_pieces(name: str, likelihood: str) -> None:
    bnn, inputs = made(name, likelihood)
    outputs = explicit(bnn, inputs)
    # What doubles its weights at each pass is another network in pieces.
    for cut in CUTS if name != "late-failure" else [{}, {"batch_size": N}, {"max_memory": "64 MB"}]:
        p = bnn.predict(inputs, S, keep_samples=True, **cut)
        samples = outputs.softmax(-1) if likelihood == "categorical" else outputs
        assert torch.allclose(p.samples, samples, rtol=1e-12, atol=1e-13), cut
        assert torch.allclose(p.mean, samples.mean(0), rtol=1e-12, atol=1e-13), cut
        whole = bnn.mean_outputs(inputs, batch_size=N)
        assert torch.allclose(bnn.mean_outputs(inputs, **cut), whole, rtol=1e-12, atol=1e-13)
        found = bnn.predict_mean(inputs, **cut).mean
        expected = whole.softmax(-1) if likelihood == "categorical" else whole
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", NETWORKS)
def test_weight_samples_share_passes_where_they_can(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bnn, inputs = made(name)
    bnn.predict(inputs, 1)  # which measures
    count = passes(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bnn.predict(inputs, S)
    assert len(count) == NETWORKS[name][2]
    count.clear()
    bnn.predict(inputs, S, batch_size=8)
    assert len(count) == 3 * S


def test_the_mean_network_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bnn, x = made("mlp")
    count = passes(monkeypatch)
    for expected in (3, 1, 1):  # at first over one datum and over eight, to measure
        count.clear()
        bnn.predict_mean(x)
        assert len(count) == expected


def test_a_pass_is_of_few_megabytes() -> None:
    bnn, few = BayesianModule(lenet5()), torch.zeros(9, 784)
    many = few[:1].expand(4000, 784)
    with torch.no_grad(), stateless.evaluating(bnn.net):
        size, group = Pieces.of(bnn, many, {}, num_samples=S)
        with MemoryTracker() as tracker:
            bnn.run_with(bnn.posterior.mean, many[:size])
        assert group == 1
        assert 4e6 < tracker.peak < 9e6
        assert Pieces.of(bnn, few, {}, num_samples=S) == (9, 1)
        assert Pieces.of(bnn, few[:2], {}, num_samples=7) == (2, 1)


def peak(call: Callable[[], object]) -> int:
    """The most bytes that torch's allocator had given out at a time."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        call()
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    assert most > 0
    return most


class First(nn.Module):
    def forward(self, x: tuple[Tensor, Any]) -> Tensor:
        return x[0][:, -1]


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


BIG: dict[str, tuple[Callable[[], BayesianModule], Callable[[], Tensor]]] = {
    "mlp": (lambda: BayesianModule(mlp(50, (200, 200), 10)), lambda: torch.rand(300, 50)),
    "weights": (lambda: BayesianModule(mlp(50, (1000, 1000), 10)), lambda: torch.rand(9, 50)),
    "conv": (lambda: BayesianModule(images()), lambda: torch.rand(20, 3, 20, 20)),
    "float64": (
        lambda: BayesianModule(images().double()),
        lambda: torch.rand(20, 3, 20, 20).double(),
    ),
    "regression": (
        lambda: BayesianModule(mlp(8, (50,), 1), likelihood=GaussianLikelihood()),
        lambda: torch.rand(300, 8),
    ),
    "input-dependent": (
        lambda: BayesianModule(
            nn.Sequential(mlp(8, (50,), 6), nn.Unflatten(-1, (3, 2))),
            likelihood=GaussianLikelihood(input_dependent=True),
        ),
        lambda: torch.rand(300, 8),
    ),
    "labels": (
        lambda: BayesianModule(mlp(8, (50,), 20), likelihood=BernoulliLikelihood()),
        lambda: torch.rand(300, 8),
    ),
    "enlarging": (
        lambda: BayesianModule(
            nn.Sequential(
                nn.Conv2d(1, 3, 1),
                nn.Upsample(scale_factor=2, mode="bilinear"),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
            )
        ),
        lambda: torch.rand(5, 1, 256, 256),
    ),
    "recurrent": (
        lambda: BayesianModule(nn.Sequential(nn.LSTM(28, 64, batch_first=True), First())),
        lambda: torch.rand(200, 28, 28),
    ),
    "transformer": (
        lambda: BayesianModule(
            nn.Sequential(
                nn.Unflatten(-1, (64, 16)),
                nn.TransformerEncoderLayer(16, 2, 512, batch_first=True),
                nn.Flatten(),
                nn.Linear(1024, 3),
            )
        ),
        lambda: torch.rand(20, 1024),
    ),
    "transposed": (
        lambda: BayesianModule(
            nn.Sequential(
                nn.ConvTranspose2d(4, 32, 4, stride=2, padding=1),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
            )
        ),
        lambda: torch.rand(2, 4, 128, 128),
    ),
    "few": (lambda: BayesianModule(mlp(8, (100, 100), 3)), lambda: torch.rand(100, 8)),
    "many": (lambda: BayesianModule(mlp(8, (9,), 2000)), lambda: torch.rand(400, 8)),
}


def least(call: Callable[[int], object]) -> int:
    """What the error of a cap of one byte says that is needed."""
    with pytest.raises(ValueError, match="max_memory must be at least") as error:
        call(1)
    return int(re.findall(r"at least (\d+) bytes", str(error.value))[0])


def check_cap(call: Callable[[int], object]) -> None:
    """A prediction keeps to its cap, from the least that it says it needs."""
    needed = least(call)
    with pytest.raises(ValueError, match=f"at least {needed} bytes"):
        call(needed - 1)
    for cap in (needed, needed + needed // 10, 3 * needed):
        assert peak(lambda cap=cap: call(cap)) <= cap


@pytest.mark.parametrize("name", BIG)
def test_memory_stays_below_the_cap(name: str) -> None:
    make, data = BIG[name]
    bnn, x = make(), data()
    bnn.predict(x[:2], 2)
    num_samples = 32 if name == "few" else 3
    check_cap(lambda cap: bnn.predict(x, num_samples, max_memory=cap))
    check_cap(lambda cap: bnn.predict(x, 2, max_memory=cap, batch_size=len(x)))
    check_cap(lambda cap: bnn.predict_mean(x, max_memory=cap))
    check_cap(lambda cap: bnn.mean_outputs(x, max_memory=cap))


@pytest.mark.parametrize("name", ["mlp", "regression", "input-dependent", "labels", "few", "many"])
def test_memory_stays_below_the_cap_with_the_samples_in_it(name: str) -> None:
    bnn, x = BIG[name][0](), BIG[name][1]()
    bnn.predict(x[:2], 2)
    check_cap(lambda cap: bnn.predict(x, S, keep_samples=True, max_memory=cap))


def test_a_cap_that_is_not_kept_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    bnn, x = BIG["conv"][0](), BIG["conv"][1]()
    right = Pieces.of

    def all_at_once(*args: Any, **kwargs: Any) -> Pieces:
        return right(*args, **kwargs)._replace(batch_size=len(x))

    monkeypatch.setattr(Pieces, "of", all_at_once)
    with pytest.raises(AssertionError):
        check_cap(lambda cap: bnn.predict(x, 10, max_memory=cap))


@pytest.mark.parametrize("cap", [None, "10 MB"])
def test_memory_does_not_grow_with_the_samples(cap: str | None) -> None:
    x = torch.rand(2000, 50)
    bnn = BayesianModule(mlp(50, (40,), 10))
    bnn.predict(x[:2], 2)
    few = peak(lambda: bnn.predict(x, 3, max_memory=cap))
    many = peak(lambda: bnn.predict(x, 30, max_memory=cap))
    assert many == few
    samples = 4 * 2000 * 10 * 30
    with_samples = peak(lambda: bnn.predict(x, 30, max_memory=cap, keep_samples=True))
    assert samples <= with_samples - many < 1.2 * samples, "kept once"
    regression = BayesianModule(mlp(50, (40,), 10), likelihood=GaussianLikelihood())
    regression.predict(x[:2], 2)
    few = peak(lambda: regression.predict(x, 3, max_memory=cap))
    many = peak(lambda: regression.predict(x, 30, max_memory=cap))
    assert many - few == samples * 27 // 30, "held once"


def test_batch_size_outdoes_the_choice_and_not_the_cap() -> None:
    bnn, x = made("mlp")
    with torch.no_grad(), stateless.evaluating(bnn.net):
        assert Pieces.of(bnn, x, {}, batch_size=2).batch_size == 2
        assert Pieces.of(bnn, x, {}, batch_size=2, max_memory="1 GB").batch_size == 2
        assert Pieces.of(bnn, x, {}, num_samples=S, batch_size=50).group == S
    with pytest.raises(ValueError, match=r"a pass over 20 of them; .* or leave batch_size"):
        bnn.predict(
            x, S, batch_size=20, max_memory=least(lambda cap: bnn.predict(x, S, max_memory=cap))
        )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1), ("64 MB", 64_000_000), ("1GB", 10**9), ("1 GiB", 2**30), ("1.5 kb", 1500),
        (" 2 MiB ", 2**21), ("10 B", 10), ("3 KiB", 3072),
    ],
)  # fmt: skip
def test_memory_is_read(text: int | str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ("64", ValueError), ("MB", ValueError), ("-1 MB", ValueError), ("1 TB", ValueError),
        ("1 Mb/s", ValueError), ("", ValueError), ("1e3 MB", ValueError), (0, ValueError),
        (-5, ValueError), ("0 MB", ValueError), (1e6, TypeError), (True, TypeError),
        ([1], TypeError),
    ],
)  # fmt: skip
def test_memory_that_is_none_is_rejected(wrong: Any, kind: type[Exception]) -> None:
    bnn, x = made("mlp")
    for call in (bnn.predict, bnn.predict_mean, bnn.mean_outputs):
        with pytest.raises(kind, match=r'max_memory must be .* such as "64 MB".*, got'):
            call(x, max_memory=wrong)


class Noisy(nn.Linear):
    """Draws from torch's generator and counts its passes, in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) + torch.rand(len(x), 3, dtype=x.dtype)


@pytest.mark.parametrize("cap", [None, "64 MB"])
def test_measuring_leaves_nothing_behind(cap: str | None) -> None:
    bnn, x = BayesianModule(Noisy().double()), X.clone()
    before, modes = torch.get_rng_state(), [module.training for module in bnn.modules()]
    first = bnn.predict(x, S, max_memory=cap).mean
    assert bnn.net.count == S
    torch.set_rng_state(before)
    assert torch.equal(bnn.predict(x, S, max_memory=cap).mean, first)
    torch.set_rng_state(before)
    with torch.no_grad(), stateless.evaluating(bnn.net):
        list(SampledOutputs(bnn, x, KEY, S, Pieces(N, 1)))
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    bnn.predict(x, S, max_memory=cap)
    assert torch.equal(torch.get_rng_state(), after)
    assert [module.training for module in bnn.modules()] == modes
    assert torch.equal(x, X)


def test_inputs_that_a_network_edits_are_edited_once() -> None:
    class Halving(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(0.5))

    bnn, x = BayesianModule(Halving(4, 3).double()), X.clone()
    bnn.mean_outputs(x)
    assert torch.equal(x, 0.5 * X)


def test_what_a_network_keeps_stays_a_tensor() -> None:
    bnn, x = made("keeping")
    expected = explicit(bnn, x)[-1]
    bnn.predict(x, S)
    assert torch.allclose(bnn.net.kept, expected)


def test_a_failed_attempt_leaves_nothing_behind() -> None:
    bnn, x = made("late-failure")
    bnn.predict(x, S)
    assert bnn.net.count == S


@pytest.mark.parametrize("name", ["keeping", "recurrent"])
def test_outputs_hold_no_more_than_themselves(name: str) -> None:
    bnn, x = made(name)
    outputs = bnn.mean_outputs(x)
    assert outputs.untyped_storage().nbytes() == outputs.nbytes
    if name == "keeping":
        assert outputs.data_ptr() != bnn.net.kept.data_ptr()


@pytest.mark.parametrize("cap", [None, "64 MB"])
def test_a_hook_sees_every_pass_and_no_shared_one(cap: str | None) -> None:
    bnn, x = made("mlp")
    seen = []
    bnn.net[0].register_forward_hook(lambda *args: seen.append(args[-1].shape))
    bnn.predict(x, S, max_memory=cap)
    assert seen[-S:] == [(N, 6)] * S
    assert len(seen) == S + (0 if cap is None else 2)


def test_data_that_belong_together_go_together() -> None:
    class Graph(nn.Linear):
        def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
            return super().forward(neighbours @ x)

    torch.manual_seed(0)
    bnn, inputs = BayesianModule(Graph(4, 3).double()), (X, torch.eye(N, dtype=X.dtype).flip(0))
    assert torch.allclose(
        bnn.mean_outputs(inputs), bnn.mean_outputs((X.flip(0), inputs[1].flip(0)))
    )
    assert bnn.predict(inputs, S).mean.shape == (N, 3)
    with pytest.raises(RuntimeError) as error:
        bnn.predict(inputs, S, max_memory="1 GB")
    assert "max_memory measures a pass over one datum" in error.value.__notes__[0]


def test_outputs_that_are_no_rows_of_data_are_not_put_together() -> None:
    class TimeFirst(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).transpose(0, 1)

    bnn = BayesianModule(TimeFirst(4, 3).double(), likelihood=GaussianLikelihood())
    x = X.unsqueeze(1).expand(N, 2, 4)
    assert bnn.predict(x, 2).mean.shape == (2, N, 3)
    for cut in ({"batch_size": 20}, {"max_memory": "1 GB"}):
        with pytest.raises(ValueError, match=r"a row for each datum .* got shape \(2, "):
            bnn.predict(x, 2, **cut)


def test_a_point_estimate_has_one_answer() -> None:
    bnn = BayesianModule(mlp(4, (6,), 3).double(), posterior=Delta)
    samples = bnn.predict(X, S, keep_samples=True).samples
    expected = bnn.predict_mean(X).mean.expand(S, N, 3)
    assert torch.allclose(samples, expected, rtol=1e-12)


IMAGE, ROW = normals(1, 2, 4, 4, seed=5), normals(3, 4, seed=6)
OPERATIONS: list[Callable[[Tensor], Tensor]] = [
    lambda w: F.linear(ROW, w, w[:, 0]),
    lambda w: F.linear(ROW[:, None], w),
    lambda w: F.linear(ROW, w).log_softmax(-1) + F.linear(ROW, w).softmax(-1),
    lambda w: F.conv2d(IMAGE, w.view(4, 2, 1, 2)),
    lambda w: F.max_pool2d(F.conv2d(IMAGE, w.view(4, 2, 1, 2)), 2),
    lambda w: F.avg_pool2d(F.conv2d(IMAGE, w.view(4, 2, 1, 2)), 2),
    lambda w: F.adaptive_avg_pool2d(F.conv2d(IMAGE, w.view(4, 2, 1, 2)), 2),
    lambda w: F.batch_norm(ROW @ w, torch.zeros(4).double(), torch.ones(4).double()),
    lambda w: F.group_norm(ROW @ w, 2),
    lambda w: F.layer_norm(ROW @ w, (4,)),
    lambda w: F.prelu(ROW @ w, w[0, :1]),
    lambda w: F.embedding(torch.tensor([2, 0]), w),
    lambda w: torch.baddbmm(ROW @ w[None], ROW[None], w[None]) + torch.bmm(ROW[None], w[None]),
    lambda w: F.elu(w) + F.gelu(w) + F.hardtanh(w) + F.leaky_relu(w) + F.silu(w) + F.softplus(w),
    lambda w: F.relu(w.clone(), inplace=True) + w.relu() + w.sigmoid() + w.tanh() + w.sin(),
    lambda w: w.cos() + w.exp() + w.abs().log() + w.abs().sqrt() + w.pow(2) + w.clamp(-1, 1) - w,
    lambda w: 1.0 - w.neg() / 3.0 + w.masked_fill(torch.eye(4) > 0, 2.0) * w + w.float().double(),
    lambda w: w.clone().add_(1.0).mul_(w).sub_(2.0).div_(3.0),
    lambda w: torch.cat([w.sum(0, keepdim=True), w.mean(0, keepdim=True), w[1:2]]),
    lambda w: torch.stack([part.squeeze(0) for part in w.split(1)]).permute(1, 0).transpose(0, 1),
    lambda w: torch.cat(w.split([1, 3])).unsqueeze(0).expand(2, 4, 4).contiguous().view(-1).t(),
]


def seen_in_operations() -> set[str]:
    """What a pass through each runs, having compared vmap with a loop over weights."""
    weights, seen = normals(5, 4, 4, seed=7), set()
    for operation in OPERATIONS:
        looped = torch.stack([operation(w.clone()) for w in weights])
        with MemoryTracker() as tracker, SlowPath():
            operation(weights[0].clone())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shared = torch.vmap(operation)(weights.clone())
        assert torch.allclose(shared, looped, rtol=1e-12, atol=1e-13)
        seen |= tracker.operations
    return seen


def test_every_operation_that_is_said_to_vectorise_does() -> None:
    names = _VECTORISED | {"detach", "arange", "ones", "eye", "zeros", "gt", "lift_fresh"}
    assert seen_in_operations() >= _VECTORISED
    assert seen_in_operations() <= names


def test_a_tracker_counts_what_is_alive() -> None:
    with MemoryTracker() as tracker:
        x = torch.ones(100)
        view, y = x[:50], x.double()
        assert (tracker.live, tracker.peak) == (1200, 1200)
        del x
        assert tracker.live == 1200, "the view holds it"
        del view
        assert tracker.live == 800
        y += 1.0
        torch.mul(y, y, out=y)
    assert (tracker.live, tracker.peak) == (800, 1200)
    del y
    assert tracker.live == 0
