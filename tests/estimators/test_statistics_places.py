"""Noise drawn piece by piece: of its own at each place, in pairs, and the same when compiled."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy import stats
from tests import faults
from tests.faults import noise_without
from tests.loops import loop_over
from tests.noise.test_generator import (
    DTYPES,
    FALSE_ALARM,
    check_uncorrelated,
    key_without,
)
from torch import Tensor, nn

from bayesify.noise.keys import NoiseKey, NoiseSource, Stream


def places(size: int = 4000, *, antithetic: bool = False) -> Tensor:
    """Whole vectors, and normals and signs of the first places, of neighbouring samples."""
    found = []
    for key, sample in itertools.product((NoiseKey(0, Stream.CALL, s) for s in range(3)), range(4)):
        if antithetic and sample % 2:
            continue
        # One source asked for normals and one for signs at each place, and one for both in turn.
        normal, sign, mixed = (NoiseSource(key, sample, antithetic=antithetic) for _ in range(3))
        found += [normal.normals((size,), torch.float64, "cpu") for _ in range(4)]
        found += [sign.signs((size,), torch.float64, "cpu") for _ in range(4)]
        found.append(key.normals(range(sample, sample + 1), size, dtype=torch.float64)[0])
        assert torch.equal(mixed.normals((size,), torch.float64, "cpu"), found[-9])
        assert torch.equal(mixed.signs((size,), torch.float64, "cpu"), found[-4])
    return torch.stack(found)


@loop_over("antithetic", [False, True])
def test_places_and_samples_do_not_correlate(antithetic: bool) -> None:
    check_uncorrelated(places(antithetic=antithetic))


@loop_over("name", ["sample", "place"])
def test_correlated_places_and_samples_are_rejected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise_without(monkeypatch, key_without(name))
    with pytest.raises(AssertionError, match="beyond"):
        check_uncorrelated(places())


def check_signs(signs: Tensor) -> None:
    """Signs -1 and 1 are fair, and independent of their neighbours: five z-tests."""
    assert signs.unique().tolist() == [-1.0, 1.0]
    limit = stats.norm.isf(FALSE_ALARM / (2 * 5))
    for lag in range(5):
        products = signs if lag == 0 else signs[lag:] * signs[:-lag]
        z = products.sum().item() / math.sqrt(products.numel())
        assert abs(z) < limit, f"lag {lag}: z = {z:.2f}, beyond {limit:.2f}"


def signs_of(seed: int, dtype: torch.dtype) -> Tensor:
    source = NoiseSource(NoiseKey(seed, Stream.TRAINING, 1), 0)
    # As Flipout asks for them: short vectors at many places.
    parts = [source.signs((20, 5), dtype, "cpu").flatten() for _ in range(400)]
    return torch.cat(parts).double()


@loop_over("dtype", [*DTYPES, torch.bfloat16, torch.float16])
def test_signs_are_fair_and_independent(dtype: torch.dtype) -> None:
    check_signs(signs_of(0, dtype))


def test_unfair_and_dependent_signs_are_rejected() -> None:
    signs = signs_of(0, torch.float64)
    unfair = torch.where(torch.arange(len(signs)) % 16 == 0, 1.0, signs)
    repeated = torch.where(torch.arange(len(signs)) % 16 == 0, signs.roll(3), signs)
    for wrong in (unfair, repeated):
        with pytest.raises(AssertionError, match="beyond"):
            check_signs(wrong)


def check_antithetic_pairs() -> None:
    """Samples 2i and 2i + 1 have opposite normals and equal signs, and no other two samples."""
    key = NoiseKey(4, Stream.TRAINING, 7)
    sources = [NoiseSource(key, sample, antithetic=True) for sample in range(6)]
    plain = [NoiseSource(key, sample) for sample in range(6)]
    for _ in range(3):
        draws = torch.stack([s.normals((2, 50), torch.float64, "cpu") for s in sources])
        signs = torch.stack([s.signs((4, 25), torch.float64, "cpu") for s in sources])
        alone = [s.normals((2, 50), torch.float64, "cpu") for s in plain]
        assert torch.equal(draws[1::2], -draws[::2]), "normals are not opposite"
        assert torch.equal(signs[1::2], signs[::2]), "signs are not equal"
        assert torch.equal(draws[::2], torch.stack(alone)[::2]), "not the numbers of even samples"
        assert draws[::2].abs().unique().numel() == 300, "pairs share numbers"
        assert not torch.equal(signs[0], signs[2]), "pairs share signs"
        for source in plain:
            source.signs((4, 25), torch.float64, "cpu")


def test_antithetic_pairs() -> None:
    check_antithetic_pairs()


@loop_over("fault", ["same normals", "opposite signs", "ten pairs as one"])
def test_antithetic_noise_with_a_fault_is_caught(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = NoiseSource.__init__

    def one_pair(self: NoiseSource, key: NoiseKey, sample: int, **options: bool) -> None:
        right(self, key, sample % 2 if options.get("antithetic") else sample, **options)

    if fault == "same normals":
        faults.equal_normals_in_pairs(monkeypatch)
    elif fault == "ten pairs as one":
        monkeypatch.setattr(NoiseSource, "__init__", one_pair)
    else:
        monkeypatch.setattr(NoiseSource, "signs", NoiseSource.normals)
    with pytest.raises(AssertionError, match=r"not opposite|not equal|of even|share"):
        check_antithetic_pairs()


class Draws(nn.Module):
    """Noise of one seed, as a module whose forward can be compiled."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, step: int | Tensor) -> tuple[Tensor, ...]:
        key = NoiseKey(self.seed, Stream.CALL, step)
        source = NoiseSource(key, 3, antithetic=True)
        normals = source.normals((2, 20), torch.float64, "cpu")
        signs = source.signs((7,), torch.float32, "cpu")
        return normals, signs, key.normals(range(1, 3), 4)


def check_compiled(seed: int) -> None:
    """Compiled code draws the same numbers, and one compilation serves all steps."""
    draws = Draws(seed)
    compiled = torch.compile(draws, backend="aot_eager", fullgraph=True)
    for step in (0, 3, 2**40):
        for eager, got in zip(draws(step), compiled(torch.tensor(step)), strict=True):
            assert torch.equal(eager, got), f"seed {seed} differs in compiled code"


@loop_over("seed", [3, -4, 2**64 + 3, -(2**90), 2**127 - 1, -(2**127)])
def test_compiled_code_draws_the_same_numbers(seed: int) -> None:
    check_compiled(seed)


def test_a_seed_cut_to_64_bits_in_compiled_code_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = NoiseKey.numbers

    def wrong(self: NoiseKey, *args: object) -> Tensor:
        seed = self.seed % 2**64 if isinstance(self.step, Tensor) else self.seed
        return right(NoiseKey(seed, self.stream, self.step), *args)

    monkeypatch.setattr(NoiseKey, "numbers", wrong)
    with pytest.raises(AssertionError, match="differs in compiled code"):
        check_compiled(-(2**91))  # no other test compiles for this seed
