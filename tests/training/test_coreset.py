"""The choice of the examples that are set aside."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

import bayesify as bf


def radius(x: Tensor, chosen: Tensor) -> float:
    """The largest distance of an example to the nearest chosen one."""
    return float(torch.cdist(x, x[chosen]).min(1).values.max())


def points(count: int = 12) -> Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(3))


def test_k_center_is_within_twice_the_smallest_radius() -> None:
    x = torch.cat([points(4), points(8) * 0.1 + 5.0, torch.tensor([[-9.0, 4.0]])])
    best = min(radius(x, torch.tensor(each)) for each in combinations(range(len(x)), 3))
    found = [radius(x, bf.choose_coreset(x, 3, "k-center", seed=s)) for s in range(20)]
    assert max(found) <= 2.0 * best + 1e-6  # Gonzalez 1985, theorem 2.2
    at_random = [radius(x, bf.choose_coreset(x, 3, seed=s)) for s in range(20)]
    assert max(at_random) > 2.0 * best  # random choice is caught


def test_each_choice_is_the_farthest_from_those_before() -> None:
    x = points(40)
    chosen = bf.choose_coreset(x, 10, "k-center")
    for place in range(1, 10):
        nearest = torch.cdist(x, x[chosen[:place]]).min(1).values
        assert float(nearest[chosen[place]]) == pytest.approx(float(nearest.max()), rel=1e-4)


@pytest.mark.parametrize("method", ["random", "k-center"])
def test_no_example_is_chosen_twice(method: str) -> None:
    same = torch.ones(7, 3)
    for x in (points(7), same):
        chosen = bf.choose_coreset(x, 7, method)  # type: ignore[arg-type]
        assert chosen.dtype == torch.int64
        assert sorted(chosen.tolist()) == list(range(7))


@pytest.mark.parametrize("method", ["random", "k-center"])
def test_the_seed_determines_the_choice(method: str) -> None:
    x = points(60)
    first, again, other = (
        bf.choose_coreset(x, 5, method, seed=seed).tolist()  # type: ignore[arg-type]
        for seed in (0, 0, 1)
    )
    assert first == again != other


def test_a_random_coreset_is_not_what_is_acquired_at_random() -> None:
    bnn, x = bf.BayesianModule(torch.nn.Linear(2, 2)), torch.zeros(40, 2)
    chosen = bf.choose_coreset(x, 8, "random", seed=3)
    assert not torch.equal(chosen, bf.acquire(bnn, x, 8, "random", seed=3))


def test_images_and_integers_are_measured_by_all_their_numbers() -> None:
    x = points(30)
    images = x.view(30, 1, 2)
    chosen = bf.choose_coreset(x, 6, "k-center")
    assert torch.equal(bf.choose_coreset(images, 6, "k-center"), chosen)
    whole = (x * 100).round().to(torch.int64)
    assert len(bf.choose_coreset(whole, 6, "k-center")) == 6
    times = 1_700_000_000 + torch.tensor([[0], [10], [20], [50], [30]])
    expected = bf.choose_coreset(times.double(), 3, "k-center")
    assert torch.equal(bf.choose_coreset(times, 3, "k-center"), expected)


def test_wrong_arguments_are_errors() -> None:
    x = points()
    with pytest.raises(ValueError, match='method must be one of "random", "k-center", got \'k\''):
        bf.choose_coreset(x, 3, "k")  # type: ignore[arg-type]
    for size in (0, 13):
        with pytest.raises(ValueError, match=f"size must lie from 1 to 12.*got {size}"):
            bf.choose_coreset(x, size)
    with pytest.raises(TypeError, match=r"size must be a whole number, got 2\.5"):
        bf.choose_coreset(x, 2.5)  # type: ignore[arg-type]
    for wrong in ([[0.0], [1.0]], torch.tensor(1.0)):
        with pytest.raises(TypeError, match="inputs must be a tensor whose first axis"):
            bf.choose_coreset(wrong, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="inputs must be finite"):
        bf.choose_coreset(x.clone().fill_(torch.nan), 2, "k-center")
    with pytest.raises(
        TypeError, match=r"real numbers, got torch\.complex64; use torch\.view_as_r"
    ):
        bf.choose_coreset(x.to(torch.complex64), 2, "k-center")


def test_k_center_does_not_depend_on_where_the_inputs_lie() -> None:
    x = torch.tensor([[0.0], [0.125], [5.0], [5.125], [9.0]])
    for offset in (1e4, -1e5):
        for seed in range(5):
            near, far = (
                bf.choose_coreset(each, 3, "k-center", seed=seed) for each in (x, x + offset)
            )
            assert near.tolist() == far.tolist()


@pytest.mark.parametrize("size", [2.0**-122, 2.0**-100, 2.0**100, 2.0**123])
def test_k_center_does_not_depend_on_the_unit(size: float) -> None:
    x = points()
    usual, other = (bf.choose_coreset(each, 8, "k-center") for each in (x, x * size))
    assert usual.tolist() == other.tolist()


def test_k_center_sees_what_differs_next_to_great_numbers() -> None:
    x = torch.tensor([[0.0], [1.0], [2.0], [1.0]])
    with_great = torch.cat([x * 1e-30, torch.full_like(x, 1e30)], 1)  # the same in all examples
    for inputs in (x * 1e-44, x * 1e38, with_great):
        chosen = bf.choose_coreset(inputs, 3, "k-center")
        assert sorted(x[chosen].flatten().tolist()) == [0.0, 1.0, 2.0]


def test_k_center_of_single_numbers() -> None:
    x = torch.tensor([0.0, 0.1, 5.0, 5.1, 9.0])
    chosen = bf.choose_coreset(x, 3, "k-center")
    assert torch.equal(chosen, bf.choose_coreset(x[:, None], 3, "k-center"))
    assert len(bf.choose_coreset(torch.zeros(3, 0), 2, "k-center")) == 2
    with pytest.raises(ValueError, match=r"differences within the range of torch\.float32"):
        bf.choose_coreset(torch.tensor([-3e38, 3e38]), 2, "k-center")
