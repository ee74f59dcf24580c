"""Predictions stay within the memory that they are given."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.loops import loop_over, noted
from tests.memory_cases import S, made
from torch import Tensor, nn

from bayesify import BayesianModule, BernoulliLikelihood, GaussianLikelihood
from bayesify.estimators.network_state import evaluation_mode
from bayesify.module.batching import Batching, parse_bytes
from bayesify.module.networks import mlp


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

SOME = ["mlp", "conv", "recurrent"]


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


@pytest.mark.parametrize(
    "names",
    [SOME, pytest.param([name for name in BIG if name not in SOME], marks=pytest.mark.slow)],
    ids=["some", "the others"],
)
def test_memory_stays_below_the_cap(names: list[str]) -> None:
    for name in names:
        with noted(name=name):
            check_network_keeps_to_its_cap(name)


def check_network_keeps_to_its_cap(name: str) -> None:
    make, data = BIG[name]
    bnn, x = make(), data()
    bnn.predict(x[:2], 2)
    num_samples = 32 if name == "few" else 3
    check_cap(lambda cap: bnn.predict(x, num_samples, max_memory=cap))
    check_cap(lambda cap: bnn.predict(x, 2, max_memory=cap, batch_size=len(x)))
    check_cap(lambda cap: bnn.predict_mean(x, max_memory=cap))
    check_cap(lambda cap: bnn.mean_outputs(x, max_memory=cap))


@pytest.mark.slow
@loop_over("name", ["mlp", "regression", "input-dependent", "labels", "few", "many"])
def test_memory_stays_below_the_cap_with_the_samples_in_it(name: str) -> None:
    bnn, x = BIG[name][0](), BIG[name][1]()
    bnn.predict(x[:2], 2)
    check_cap(lambda cap: bnn.predict(x, S, keep_samples=True, max_memory=cap))


def test_a_cap_that_is_not_kept_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    bnn, x = BIG["conv"][0](), BIG["conv"][1]()
    right = Batching.of

    def all_at_once(*args: Any, **kwargs: Any) -> Batching:
        return right(*args, **kwargs)._replace(batch_size=len(x))

    monkeypatch.setattr(Batching, "of", all_at_once)
    with pytest.raises(AssertionError):
        check_cap(lambda cap: bnn.predict(x, 10, max_memory=cap))


def test_the_least_memory_holds_the_samples_that_are_kept() -> None:
    bnn, x = BayesianModule(mlp(8, (9,), 500)), torch.rand(40, 8)
    samples = 4 * 40 * 500 * 100
    without = least(lambda cap: bnn.predict(x, 100, max_memory=cap))
    needed = least(lambda cap: bnn.predict(x, 100, keep_samples=True, max_memory=cap))
    assert without < samples < needed


@loop_over("cap", [None, "10 MB"])
def test_memory_does_not_grow_with_the_samples(cap: str | None) -> None:
    x = torch.rand(2000, 50)

    def taken(network: BayesianModule, num_samples: int, *, keep_samples: bool = False) -> int:
        network.train()  # which frees what the last prediction has kept
        return peak(
            lambda: network.predict(x, num_samples, max_memory=cap, keep_samples=keep_samples)
        )

    bnn = BayesianModule(mlp(50, (40,), 10))
    bnn.predict(x[:2], 2)
    few = taken(bnn, 3)
    many = taken(bnn, 30)
    assert many == few
    samples = 4 * 2000 * 10 * 30
    with_samples = taken(bnn, 30, keep_samples=True)
    assert samples <= with_samples - many < 1.2 * samples, "kept once"
    regression = BayesianModule(mlp(50, (40,), 10), likelihood=GaussianLikelihood())
    regression.predict(x[:2], 2)
    few = taken(regression, 3)
    many = taken(regression, 30)
    assert many - few == samples * 27 // 30, "held once"


def test_batch_size_outdoes_the_choice_and_not_the_cap() -> None:
    bnn, x = made("mlp")
    with torch.no_grad(), evaluation_mode(bnn.net):
        assert Batching.of(bnn, x, {}, batch_size=2).batch_size == 2
        assert Batching.of(bnn, x, {}, batch_size=2, max_memory="1 GB").batch_size == 2
        assert Batching.of(bnn, x, {}, num_samples=S, batch_size=50).group == S
    with pytest.raises(ValueError, match=r"a pass over 20 of them; .* or omit batch_size"):
        bnn.predict(
            x, S, batch_size=20, max_memory=least(lambda cap: bnn.predict(x, S, max_memory=cap))
        )


@loop_over(("text", "size"), [
        (1, 1), ("64 MB", 64_000_000), ("1GB", 10**9), ("1 GiB", 2**30), ("1.5 kb", 1500),
        (" 2 MiB ", 2**21), ("10 B", 10), ("3 KiB", 3072), (np.int64(7), 7),
    ])  # fmt: skip
def test_memory_is_read(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@loop_over(("wrong", "kind"), [
        ("64", ValueError), ("MB", ValueError), ("-1 MB", ValueError), ("1 TB", ValueError),
        ("1 Mb/s", ValueError), ("", ValueError), ("1e3 MB", ValueError), (0, ValueError),
        (-5, ValueError), ("0 MB", ValueError), (1e6, TypeError), (True, TypeError),
        ([1], TypeError),
    ])  # fmt: skip
def test_memory_that_is_none_is_rejected(wrong: Any, kind: type[Exception]) -> None:
    bnn, x = made("mlp")
    for call in (bnn.predict, bnn.predict_mean, bnn.mean_outputs):
        with pytest.raises(kind, match=r'max_memory must be .* such as "64 MB".*, got'):
            call(x, max_memory=wrong)
