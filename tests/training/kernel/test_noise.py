"""The counter-based noise: known answers, the same numbers from every code, and statistics."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import logging
import math
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import NormalDist
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from tests.backend_cases import each_compiled_kind, needs_compiler
from tests.gpu.device import COMPILER_WARNING
from torch import Tensor

from bayesify.distributions.priors import Gaussian
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.noise.threefry import BLOCK, counter_key, normals, signs, threefry
from bayesify.training.kernel import compiler
from bayesify.training.kernel.formulas import Rates, prior_blocks
from bayesify.training.kernel.interface import Kernel, Recipe, Vectors
from bayesify.training.kernel.native import NativeKernel
from bayesify.training.kernel.tensors import TensorKernel

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "noise_statistics.py"
DTYPES = {torch.float32: 3e-6, torch.float64: 4e-15}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("noise_statistics", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()

# --------------------------------------------------------------------------------- known answers

#: Of Random123's own tests of threefry2x32 with 20 rounds: counter, key, words.
KNOWN = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


def signed(word: int) -> int:
    return (word + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(
    counter: tuple[int, int], key: tuple[int, int], words: tuple[int, int]
) -> None:
    counters = [torch.tensor([signed(word)] * 3, dtype=torch.int32) for word in counter]
    keys = [signed(word) for word in key]
    for given in (keys, [torch.tensor(word, dtype=torch.int32) for word in keys]):
        found = threefry(*given, *counters)
        assert [[int(x) % 2**32 for x in part] for part in found] == [[w] * 3 for w in words]


@needs_compiler
def test_known_answers_of_the_compiled_generator(tmp_path: Path) -> None:
    source, library = tmp_path / "words.cpp", tmp_path / "words.so"
    source.write_text(
        '#define REAL double\n#include "noise.h"\n'
        'extern "C" int lanes() { return kLanes; }\n'
        'extern "C" void words(const uint32_t* k, uint32_t* c) {\n'
        "  threefry(k[0], k[1], c, c + kLanes);\n"
        "}"
    )
    real = compiler.find_compiler()
    assert real is not None
    include = Path(compiler.__file__).parent / "cpp"
    command = [real, "-std=c++17", "-fPIC", "-shared", "-w", f"-I{include}", str(source)]
    subprocess.run([*command, "-o", str(library)], check=True)
    kernel = ctypes.CDLL(str(library))
    lanes = kernel.lanes()
    for counter, key, expected in KNOWN:
        # The counter in one lane, and another next to it.
        first, second = ([word, *range(1, lanes)] for word in counter)
        found = (ctypes.c_uint32 * (2 * lanes))(*first, *second)
        kernel.words((ctypes.c_uint32 * 2)(*key), found)
        assert (found[0], found[lanes]) == expected
        others = [torch.arange(1, lanes, dtype=torch.int32)] * 2
        made = threefry(*map(signed, key), *others)
        assert [signed(word) for word in found[1:lanes]] == made[0].tolist()
        assert [signed(word) for word in found[lanes + 1 :]] == made[1].tolist()


@pytest.mark.parametrize("step", [0, 2**31 + 9])
def test_normals_are_box_and_mullers_of_the_words(step: int) -> None:
    found = normals(5, -6, step, 3 * BLOCK, dtype=torch.float64, device="cpu")
    for place in (0, 1, 127, 128, 300):
        counter = torch.tensor([place], dtype=torch.int32)
        word0, word1 = (int(word) % 2**32 for word in threefry(5, -6, counter, signed(step)))
        radius = math.sqrt(-2.0 * math.log((word0 >> 1) * 2.0**-31 + 2.0**-32))
        angle = 2.0 * math.pi * word1 / 2**32
        block, rest = divmod(place, BLOCK // 2)
        for offset, part in ((0, math.cos(angle)), (BLOCK // 2, math.sin(angle))):
            got = float(found[block * BLOCK + rest + offset])
            assert got == pytest.approx(radius * part, rel=1e-12)


def test_signs_are_the_first_bits_of_the_words() -> None:
    found = signs(5, -6, 4, 300, dtype=torch.float64, device="cpu")
    for place in (0, 1, 127, 128, 140):
        words = threefry(5, -6, torch.tensor([place], dtype=torch.int32), 4)
        block, rest = divmod(place, BLOCK // 2)
        for offset, word in zip((0, BLOCK // 2), words, strict=True):
            at = block * BLOCK + rest + offset
            if at < 300:
                assert float(found[at]) == (-1.0 if int(word) < 0 else 1.0)


# ------------------------------------------------------------------------------ the same numbers

SEEDS = (0, -1, 2**100)
STEPS = (0, 3, 2**31 - 1, 2**31, 2**32 - 1, 2**40 + 7)


@each_compiled_kind
@each_dtype
@pytest.mark.parametrize("size", [1, 255, 256, 257, 700])
def test_the_step_has_these_numbers(kind: str, dtype: torch.dtype, size: int) -> None:
    for seed in SEEDS:
        fused = script.fused_filler(seed, size, dtype, compiled=kind == "kernel")
        plain = script.plain_filler(seed, size, dtype)
        for step in STEPS:
            assert float((fused(step) - plain(step)).abs().max()) < DTYPES[dtype]


def kernel_of(kind: str, dtype: torch.dtype) -> Kernel:
    prior = prior_blocks(Gaussian(1.0), "auto")
    assert prior is not None
    mean, rho, leaf = (torch.zeros(2, dtype=dtype) for _ in range(3))
    vectors = Vectors(mean, rho, leaf, (), (), (0, 2), None, None)
    recipe = Recipe(prior, "sgd", "stds", dtype)
    if kind == "kernel":
        return NativeKernel(recipe, vectors, (1, 2))
    return TensorKernel(recipe, vectors, (1, 2), compiled=False)


@each_compiled_kind
@each_dtype
@pytest.mark.parametrize("size", [1, 255, 256, 257, 9000])
def test_every_kernel_has_these_signs(kind: str, dtype: torch.dtype, size: int) -> None:
    kernel = kernel_of(kind, dtype)
    for step in STEPS:
        found = kernel.signs((5, -6), step, size)
        assert found.dtype == dtype
        assert torch.equal(found, signs(5, -6, step, size, dtype=dtype, device="cpu"))


@pytest.fixture
def nothing_compiled_before(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    # Else pytest keeps the compiler's whole diary, and shows it where a test fails.
    caplog.set_level(logging.WARNING, logger="torch.__trace")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("nothing_compiled_before")
@each_dtype
def test_compiled_code_has_these_numbers(dtype: torch.dtype) -> None:
    # The script has it made by inductor, which takes half a minute.
    compiled = torch.compile(normals, backend="aot_eager", fullgraph=True)
    for step in (3, 2**31 + 3):
        words = torch.tensor(signed(step), dtype=torch.int32)
        found = compiled(1, -2, words, 700, dtype=dtype, device="cpu")
        assert torch.equal(found, normals(1, -2, step, 700, dtype=dtype, device="cpu"))


@pytest.mark.slow
@needs_compiler
@COMPILER_WARNING
@pytest.mark.usefixtures("nothing_compiled_before")
def test_the_compiled_kernel_of_a_gpu_draws_the_numbers_of_its_step() -> None:
    """Those of outputs, which a graph draws again and again: the step is the device's."""
    form = prior_blocks(Gaussian(0.1), "auto")
    assert form is not None
    mean, rho, leaf = (torch.zeros(700) for _ in range(3))
    vectors = Vectors(mean, rho, leaf, (), (), (0, 700), None, None)
    recipe = Recipe(form, "sgd", "weights", torch.float32)
    kernel = TensorKernel(recipe, vectors, (7, 8), compiled=True)
    # Vector instructions of the CPU and processes to compile in would take longer than all else.
    with torch._inductor.config.patch({"compile_threads": 1, "cpp.simdlen": 1}):
        for step in (3, 2**31 + 3):
            kernel.prepare(step, 1.0, (Rates(0.1, 0.0), Rates(0.1, 0.0)))
            for size in (700, 5000):
                found = kernel.normals((1, -2), 0, size)
                expected = normals(1, -2, step, size, dtype=torch.float32, device="cpu")
                assert float((found - expected).abs().max()) < DTYPES[torch.float32]


@each_dtype
def test_a_number_depends_on_its_place_alone(dtype: torch.dtype) -> None:
    whole = normals(1, 2, 5, 1000, dtype=dtype, device="cpu")
    for size in (0, 1, 128, 129, 256, 511):
        assert torch.equal(normals(1, 2, 5, size, dtype=dtype, device="cpu"), whole[:size])


def test_steps_are_counted_modulo_two_to_the_32() -> None:
    def at(step: int) -> Tensor:
        return normals(1, 2, step, 50, dtype=torch.float64, device="cpu")

    assert torch.equal(at(2**32 + 5), at(5))
    assert not bool(torch.isin(at(2**31 + 5), at(5)).any())


def check_no_overlap(key_of: Callable[..., tuple[int, int]] = counter_key) -> None:
    """No two seeds, streams, samples, places or steps share a number."""
    keys = itertools.product((0, 1, -1, 2**32, -(2**100)), Stream)
    vectors = [
        normals(
            *key_of(NoiseKey(seed, stream, 0), sample, place),
            step,
            40,
            dtype=torch.float64,
            device="cpu",
        )
        for seed, stream in keys
        for sample, place in ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2))
        for step in (0, 1, 2**31)
    ]
    values = torch.cat(vectors)
    assert values.unique().numel() == values.numel(), "two draws are equal"


def test_no_two_keys_share_a_number() -> None:
    check_no_overlap()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda key, _, place: counter_key(key, 0, place),
        lambda key, sample, _: counter_key(key, sample),
        lambda key, *rest: counter_key(NoiseKey(key.seed % 2**32, key.stream, 0), *rest),
        lambda key, *rest: counter_key(NoiseKey(key.seed, Stream.TRAINING, 0), *rest),
    ],
    ids=["sample", "place", "seed to 32 bits", "stream"],
)
def test_a_key_that_ignores_a_part_is_caught(wrong: Callable[..., tuple[int, int]]) -> None:
    with pytest.raises(AssertionError, match="equal"):
        check_no_overlap(wrong)


# ------------------------------------------------------------------------------------ statistics

#: Four seeds, four steps: a million numbers. All tests of the script at its error rate, 1e-3.
SIZE, TIMES = 2**16, 4
Fill = Callable[[int], Tensor]


def check_statistics(make: Callable[[int], Fill]) -> None:
    fillers, statistics = [make(seed) for seed in range(script.SEEDS)], script.Statistics()
    for step in range(TIMES):
        statistics.add(fill(step) for fill in fillers)
    p_values = statistics.p_values()
    assert len(p_values) == 25
    failed = script.rejected(p_values)
    assert not failed, f"rejected: {failed}"


@each_dtype
def test_the_noise_is_standard_normal_and_independent(dtype: torch.dtype) -> None:
    check_statistics(lambda seed: script.plain_filler(seed, SIZE, dtype))


@needs_compiler
def test_so_is_the_compiled_noise() -> None:
    check_statistics(lambda seed: script.fused_filler(seed, SIZE))


def clipped(x: Tensor) -> Tensor:
    return x.clamp(-4.0, 4.0)


def sines_of_cosines(x: Tensor) -> Tensor:
    pairs = x.view(-1, 2, BLOCK // 2)
    return torch.stack([pairs[:, 0], pairs[:, 0].abs() * pairs[:, 1].sign()], dim=1).view(-1)


def blocks_leak(x: Tensor) -> Tensor:
    return 0.02 * x.roll(BLOCK) + math.sqrt(1.0 - 0.02**2) * x


FAULTS: dict[str, tuple[Callable[[Callable[..., Fill]], Callable[[int], Fill]], str]] = {
    "std x 1.01": (lambda make: lambda seed: lambda t: 1.01 * make(seed)(t), "variance"),
    "shifted": (lambda make: lambda seed: lambda t: make(seed)(t) + 0.01, "mean"),
    "clipped": (lambda make: lambda seed: lambda t: clipped(make(seed)(t)), "beyond 4 above"),
    "on a grid": (
        lambda make: lambda seed: lambda t: (64.0 * make(seed)(t)).round() / 64.0,
        "Kolmogorov-Smirnov",
    ),
    "one step": (lambda make: lambda seed: lambda _: make(seed)(0), "consecutive steps"),
    "one seed": (lambda make: lambda _: make(0), "neighbouring seeds"),
    "mirrored seeds": (
        lambda make: lambda seed: lambda t: (-1) ** seed * make(0)(t),
        "squares of neighbouring seeds",
    ),
    "sines of cosines": (
        lambda make: lambda seed: lambda t: sines_of_cosines(make(seed)(t)),
        "squares of cosines and sines",
    ),
    "blocks leak": (lambda make: lambda seed: lambda t: blocks_leak(make(seed)(t)), "lag 256"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    wrong, test = FAULTS[name]
    with pytest.raises(AssertionError, match=f"rejected.*'{test}'"):
        check_statistics(wrong(lambda seed: script.plain_filler(seed, SIZE)))


def check_signs(draw: Callable[[tuple[int, int], int], Tensor]) -> None:
    """Tests of a mean of 0; the chance that a right generator fails one of all is 1e-3."""
    keys = [(1, 2), (1, 3), (2, 2), (-7, 9)]
    drawn = torch.stack([torch.stack([draw(key, step) for step in range(4)]) for key in keys])
    halves = drawn.unflatten(2, (-1, 2, BLOCK // 2))
    products = {
        "mean": drawn,
        "neighbours": drawn[..., 1:] * drawn[..., :-1],
        "halves of a block": halves[..., 0, :] * halves[..., 1, :],
        "blocks": halves[..., 1:, :, :] * halves[..., :-1, :, :],
        "steps": drawn[:, 1:] * drawn[:, :-1],
        "keys": drawn[1:] * drawn[:-1],
    }
    limit = NormalDist().inv_cdf(1.0 - 1e-3 / (2 * len(products)))
    assert bool((drawn.abs() == 1.0).all())
    z = {name: float(each.mean()) * math.sqrt(each.numel()) for name, each in products.items()}
    failed = [name for name, value in z.items() if abs(value) > limit]
    assert not failed, f"rejected: {failed}"


def signs_of(key: tuple[int, int], step: int) -> Tensor:
    return signs(*key, step, SIZE, dtype=torch.float64, device="cpu")


def test_signs_are_fair_and_independent() -> None:
    check_signs(signs_of)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (lambda key, step: signs_of(key, step).abs(), "mean"),
        (lambda key, _: signs_of(key, 0), "steps"),
        (lambda _, step: signs_of((1, 2), step), "keys"),
        (lambda key, step: signs_of(key, step)[:BLOCK].repeat(SIZE // BLOCK), "blocks"),
        (lambda key, step: signs_of(key, step)[: SIZE // 2].repeat_interleave(2), "neighbours"),
    ],
)
def test_a_planted_fault_of_the_signs_is_caught(wrong: Any, name: str) -> None:
    with pytest.raises(AssertionError, match=f"rejected.*'{name}'"):
        check_signs(wrong)
