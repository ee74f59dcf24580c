"""The entropy code: every matrix comes back, in hardly more bits than its entropy."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from bayesify.io import entropy_coding
from bayesify.io.entropy_coding import CodingError, Scan, decode_tensors, encode_tensors

IntArray = npt.NDArray[np.int64]


def sparse(shape: tuple[int, int], density: float, seed: int = 0) -> IntArray:
    """Nonzero integers at independent places, with geometric magnitudes."""
    rng = np.random.default_rng(seed)
    values = rng.geometric(0.4, shape) * rng.choice([-1, 1], shape)
    return np.where(rng.random(shape) < density, values, 0).astype(np.int64)


def structured(seed: int = 0) -> IntArray:
    """A matrix with dead rows, and with few columns that hold most of its nonzero integers."""
    rng = np.random.default_rng(seed)
    rows, columns = rng.random(100) < 0.3, 0.4 * rng.random(400) ** 4
    alive = rng.random((100, 400)) < np.outer(rows, columns)
    return np.where(alive, sparse((100, 400), 1.0, seed), 0)


MATRICES = [
    np.zeros((7, 5), np.int64),
    np.zeros((3, 0), np.int64),
    np.array([[5]]),
    np.arange(-40, 40).reshape(1, 80),
    np.arange(-40, 40).reshape(80, 1),
    np.array([[2**31 - 1, -(2**31) + 1, 1, 0]]),
    sparse((30, 49), 0.1),
    sparse((20, 60), 1.0),
    sparse((60, 120), 1.0),
    structured(),
    sparse((8, 45), 0.3).reshape(8, 5, 3, 3),
    np.array(-7),
]


def check_round_trip(matrices: list[IntArray]) -> None:
    payload, scans = encode_tensors(matrices)
    found = decode_tensors(payload, [each.shape for each in matrices], scans)
    for one, other in zip(matrices, found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("matrix", MATRICES, ids=lambda each: str(each.shape))
def test_each_matrix_comes_back(matrix: IntArray) -> None:
    check_round_trip([matrix])


def test_all_matrices_come_back_from_one_code() -> None:
    check_round_trip(MATRICES)


def test_a_decoder_with_other_chances_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    payload, scans = encode_tensors([structured()])
    own = entropy_coding._density
    monkeypatch.setattr(entropy_coding, "_density", lambda *given: own(*given) + 1)
    try:
        found = decode_tensors(payload, [(100, 400)], scans)
    except CodingError:
        return
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(found[0], structured())


def entropy_bits(matrix: IntArray) -> float:
    """The empirical entropy of all integers, as if their places were independent."""
    _, counts = np.unique(matrix, return_counts=True)
    return float(-(counts * np.log2(counts / counts.sum())).sum())


@pytest.mark.parametrize("density", [0.01, 0.1, 0.5, 1.0])
def test_independent_integers_take_their_entropy(density: float) -> None:
    matrix = sparse((200, 300), density)
    payload, _ = encode_tensors([matrix])
    # The chances of each column and neighbourhood are learned although they are all equal.
    assert 0.99 * entropy_bits(matrix) < 8 * len(payload) < 1.05 * entropy_bits(matrix) + 64


def test_structure_takes_less_than_the_entropy_of_independent_places() -> None:
    matrix = structured()
    payload, _ = encode_tensors([matrix])
    shuffled = np.random.default_rng(0).permuted(matrix.reshape(-1)).reshape(matrix.shape)
    assert 8 * len(payload) < 0.85 * entropy_bits(matrix)
    assert 8 * len(encode_tensors([shuffled])[0]) > 0.99 * entropy_bits(matrix)


def test_the_width_of_images_is_found() -> None:
    rng = np.random.default_rng(0)
    images = rng.random((60, 12, 12)) < 0.02
    for shift in (1, 2, 3):  # vertical strokes
        images |= np.roll(images, shift, axis=1)
    matrix = images.reshape(60, 144).astype(np.int64)
    payload, scans = encode_tensors([matrix])
    assert scans == [Scan(width=12)]
    model, counter = entropy_coding._Model(), entropy_coding._Counter()
    model.code(counter, matrix.shape, Scan(), matrix)
    assert 8 * len(payload) < 0.8 * counter.bits


def test_the_count_of_bits_is_the_size() -> None:
    payload, scans = encode_tensors([structured()])
    counted = entropy_coding._bits(entropy_coding._Model(), structured(), scans[0])
    assert math.isclose(8 * len(payload), counted, abs_tol=64)


def test_a_large_integer_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"below 2\^31, got 2147483648"):
        encode_tensors([np.array([[2**31]])])


def test_bytes_of_other_matrices_are_an_error() -> None:
    payload, scans = encode_tensors([structured()])
    with pytest.raises(CodingError, match="more bytes"):
        decode_tensors(payload, [(10, 10)], scans)


def test_dead_units_are_dead_inputs_of_the_next_tensor() -> None:
    rng = np.random.default_rng(0)
    alive = rng.random(60) < 0.3
    first = np.where(alive[:, None], sparse((60, 50), 0.4), 0)
    later = np.where(alive, sparse((40, 60), 0.3, seed=1), 0)
    model = entropy_coding._Model()
    alone = entropy_coding._bits(model, later, Scan(by_rows=True))
    model.code(entropy_coding._Counter(), first.shape, Scan(), first)
    assert entropy_coding._bits(model, later, Scan(by_rows=True)) < alone - 30
    check_round_trip([first, later, np.repeat(later, 4, axis=1)])
