"""Noise: standard normal, a pure function of its key, and never the same twice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from tests.faults import noise_without
from tests.loops import loop_over
from torch import Tensor

from bayesify.noise import keys as noise
from bayesify.noise.keys import NoiseKey, NoiseSource, Stream, derived_seed

FALSE_ALARM = 1e-3
# As of version 0.1, before there were places: place 0 has kept them.
KNOWN_SEEDS = (500728257574314361, 4199603870102200700, 3273234263597489165)
KNOWN_LAST_OF_700 = (0.20558722518835304, 0.35421095226685595, 0.23997431059938035)
KNOWN_NORMALS = (
    (0.02800467153498977, 0.050021279946526144, -2.156317242491026),
    (-1.5032367988020792, -0.40649845328772066, 1.0550361621228264),
)
LENGTHS = {3: 8000, 15: 2000, 16: 2000, 20_000: 4}  # number of rows for each length
DTYPES = (torch.float32, torch.float64)


def rows(size: int, count: int, dtype: torch.dtype) -> Tensor:
    """Rows of several seeds, streams, steps and samples, shape (count, size)."""
    per_key = min(count, 25)
    keys = itertools.cycle(itertools.product((0, 1, -7), Stream))
    parts = [
        NoiseKey(seed, stream, step).normals(range(per_key), size, dtype=dtype)
        for step, (seed, stream) in zip(range(count // per_key), keys, strict=False)
    ]
    return torch.cat(parts)


def check_standard_normal(
    dtype: torch.dtype, size: int, scale: float = 1.0, rounded: bool = False
) -> None:
    """Four moments and Kolmogorov-Smirnov: five tests for each length and dtype."""
    values = scale * rows(size, LENGTHS[size], dtype).double().flatten()
    if rounded:
        values = (4.0 * values).round() / 4.0
    family = 5 * len(LENGTHS) * len(DTYPES)
    limit = stats.norm.isf(FALSE_ALARM / (2 * family))
    # Var(z^k) = E z^2k - (E z^k)^2, with E z^2, z^4, z^6, z^8 = 1, 3, 15, 105.
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        z = (values.pow(power).mean().item() - mean) / math.sqrt(variance / values.numel())
        assert abs(z) < limit, f"moment {power}: z = {z:.2f}, beyond {limit:.2f}"
    p_value = stats.kstest(values.numpy(), "norm").pvalue
    assert p_value > FALSE_ALARM / family, f"Kolmogorov-Smirnov p = {p_value:.2g}"


@loop_over("size", LENGTHS)
@loop_over("dtype", DTYPES)
def test_noise_is_standard_normal(dtype: torch.dtype, size: int) -> None:
    check_standard_normal(dtype, size)


@loop_over("size", LENGTHS)
@loop_over("scale", [1.05, 0.95])
def test_noise_of_another_std_is_rejected(size: int, scale: float) -> None:
    with pytest.raises(AssertionError, match="moment 2"):
        check_standard_normal(torch.float64, size, scale=scale)


def test_noise_within_a_pass_is_the_same_in_float64() -> None:
    key = NoiseKey(0, Stream.TRAINING, 3)
    for size in (3, 100):  # PyTorch fills vectors of less than 16 numbers in another way
        single, double = (
            NoiseSource(key, 0).normals((size,), dtype, "cpu")
            for dtype in (torch.float32, torch.float64)
        )
        assert double.dtype == torch.float64
        assert torch.equal(double, single.double())


def test_noise_on_a_grid_is_rejected() -> None:
    with pytest.raises(AssertionError):
        check_standard_normal(torch.float64, 16, rounded=True)


KEYS = [
    NoiseKey(seed, stream, step)
    for seed in (0, 1, 2, -1, 2**32, 2**64, 2**100, -(2**100))
    for stream in Stream
    for step in (0, 1, 2, 2**31, 2**32, 2**32 + 1, 2**40, 2**62)
]


def check_no_overlap(count: int = 12) -> None:
    """No two keys, samples or places share neighbours, wherever they stand in their vectors."""
    whole = [key.normals(range(3), count, dtype=torch.float64) for key in KEYS]
    vectors = [
        torch.stack([source.normals((count,), torch.float64, "cpu") for _ in range(2)])
        for source in (NoiseSource(key, sample) for key in KEYS for sample in range(2))
    ]
    values = torch.cat([*whole, *vectors])
    weights = torch.cat(whole)
    assert weights.unique().numel() == weights.numel(), "two draws are equal"
    assert weights.abs().unique().numel() == weights.numel(), "two draws are mirrored"
    # Of so many numbers with the steps of float32 some are equal by chance, but no two neighbours.
    pairs = values.unfold(1, 2, 1).flatten(0, 1)
    assert len(pairs.unique(dim=0)) == len(pairs), "two draws are equal"
    assert len(pairs.abs().unique(dim=0)) == len(pairs), "two draws are mirrored"


def test_no_two_keys_share_a_number() -> None:
    check_no_overlap()


KEY_PARTS = ("seed", "stream", "step", "sample", "place")


def key_without(name: str) -> Callable[..., tuple[object, ...]]:
    def change(*key: object) -> tuple[object, ...]:
        parts = dict(zip(KEY_PARTS, key, strict=True))
        parts[name] = Stream.TRAINING if name == "stream" else 0
        return tuple(parts.values())

    return change


@loop_over("name", KEY_PARTS)
def test_noise_that_ignores_part_of_its_key_is_rejected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise_without(monkeypatch, key_without(name))
    with pytest.raises(AssertionError, match="two draws are equal"):
        check_no_overlap()


def test_steps_kept_to_32_bits_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    noise_without(monkeypatch, lambda *key: (*key[:2], key[2] % 2**32, *key[3:]))
    with pytest.raises(AssertionError, match="two draws are equal"):
        check_no_overlap()


def check_uncorrelated(values: Tensor) -> None:
    """No pair of rows correlates, at lag 0 or 1."""
    count, size = values.shape
    pairs = count * (count - 1) // 2 + count * count
    limit = stats.norm.isf(FALSE_ALARM / (2 * pairs))
    same = values @ values.T / math.sqrt(size)
    lagged = values[:, 1:] @ values[:, :-1].T / math.sqrt(size - 1)
    worst = max(same.triu(1).abs().max().item(), lagged.abs().max().item())
    assert worst < limit, f"z = {worst:.2f}, beyond {limit:.2f}"


def neighbours(size: int = 4000) -> Tensor:
    keys = [NoiseKey(s, stream, step) for s in (0, 1) for stream in Stream for step in range(3)]
    return torch.cat([key.normals(range(3), size, dtype=torch.float64) for key in keys])


def test_neighbouring_keys_do_not_correlate() -> None:
    check_uncorrelated(neighbours())


def test_a_weak_correlation_is_rejected() -> None:
    values = neighbours()
    values[7] = 0.15 * values[3] + math.sqrt(1.0 - 0.15**2) * values[7]
    with pytest.raises(AssertionError, match="beyond"):
        check_uncorrelated(values)


@loop_over("size", [5, 40])
def test_a_row_depends_on_nothing_but_its_key(size: int) -> None:
    key = NoiseKey(3, Stream.TRAINING, 5)
    expected = key.normals(range(5), size)
    torch.manual_seed(123)
    torch.randn(7)
    for other in KEYS[:9]:
        other.normals(range(2), 11)
    assert torch.equal(key.normals(range(5), size), expected)
    assert torch.equal(key.normals(range(2), size), expected[:2])
    assert torch.equal(key.normals(range(3, 5), size), expected[3:])
    assert torch.equal(key.normals(range(4, -1, -1), size), expected.flip(0))
    assert torch.equal(NoiseKey(3, Stream.TRAINING, 5).normals(range(5), size), expected)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    numpy_before = np.random.get_state()[1].copy()  # noqa: NPY002
    NoiseKey(0, Stream.CALL, 0).normals(range(3), 100)
    derived_seed(0, Stream.SHUFFLE, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()  # noqa: NPY002


def check_mersenne_twister(key: tuple[int, Stream, int, int, int]) -> None:
    """torch's generator in our state goes on as numpy's Mersenne Twister of the same words."""
    words = np.frombuffer(noise._digest(4 * 624, key), dtype="<u4").copy()
    reference = np.random.MT19937()
    state = reference.state
    state["state"] = {"key": words, "pos": 624}
    reference.state = state
    raw = torch.empty(2000, dtype=torch.int32)
    raw.random_(generator=noise._generator(torch.device("cpu"), key))
    expected = reference.random_raw(2000) & 0x7FFFFFFF
    assert (raw.numpy() == expected).all(), "torch does not hold the words that were given to it"


@loop_over("key", [(0, Stream.TRAINING, 0, 0, 0), (-(2**90), Stream.CALL, 2**50, 9, 4)])
def test_the_state_of_the_mersenne_twister_is_filled(
    key: tuple[int, Stream, int, int, int],
) -> None:
    check_mersenne_twister(key)


@loop_over("header", [16, 32])
def test_another_layout_of_the_generators_state_is_caught(
    header: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "_MT_HEADER_BYTES", header)
    with pytest.raises((AssertionError, RuntimeError)):
        check_mersenne_twister((0, Stream.TRAINING, 0, 0, 0))


def test_known_answers() -> None:
    """What old checkpoints resume with: a change here breaks them."""
    assert derived_seed(0, Stream.SHUFFLE, 1) == KNOWN_SEEDS[0]
    assert derived_seed(-5, Stream.INITIALIZATION, 2**40, 3) == KNOWN_SEEDS[1]
    assert derived_seed(2**100, Stream.CALL, 2**33, 7) == KNOWN_SEEDS[2]
    key = NoiseKey(-(2**70), Stream.PREDICTION, 2**33)
    for row in (
        key.normals(range(4, 5), 700, dtype=torch.float64)[0],
        key.numbers("normal", 4, 0, 700, torch.float64, "cpu"),
    ):
        assert row[-3:].tolist() == pytest.approx(KNOWN_LAST_OF_700, rel=1e-12)
    got = NoiseKey(1, Stream.TRAINING, 2).normals(range(2), 3, dtype=torch.float64)
    assert torch.allclose(got, torch.tensor(KNOWN_NORMALS, dtype=torch.float64), atol=1e-12)
    assert [int(stream) for stream in Stream][:5] == [0, 1, 2, 3, 4]


@loop_over(("step", "sample"), [(-1, 0), (0, -1)])
def test_a_negative_index_raises(step: int, sample: int) -> None:
    with pytest.raises(ValueError, match=f"at least 0, got {step} and {sample}"):
        NoiseKey(0, Stream.TRAINING, step).normals(range(sample, sample + 1), 2)
    with pytest.raises(ValueError, match="at least 0"):
        derived_seed(0, Stream.SHUFFLE, step, sample)


def test_seeds_of_any_sign_and_up_to_128_bits() -> None:
    seeds = [0, -1, 2**63, 2**64, -(2**64), 2**127 - 1, -(2**127)]
    values = [NoiseKey(seed, Stream.CALL, 0).normals(range(1), 4).tolist() for seed in seeds]
    assert len({str(value) for value in values}) == len(seeds)
    assert all(0 <= derived_seed(seed, Stream.CALL, 0) < 2**63 for seed in seeds)
    with pytest.raises(OverflowError):
        NoiseKey(2**127, Stream.CALL, 0).normals(range(1), 4)


@loop_over("dtype", DTYPES)
def test_no_samples_and_no_weights(dtype: torch.dtype) -> None:
    key = NoiseKey(0, Stream.TRAINING, 0)
    assert key.normals(range(0), 3, dtype=dtype).shape == (0, 3)
    assert key.normals(range(2), 3, dtype=dtype).dtype is dtype
