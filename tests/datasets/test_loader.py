"""Minibatches of tensors, in an order that seed and epoch determine."""

from typing import Any

import pytest
import torch

from bayesify.datasets import (
    TensorLoader,
)


def seen_by(loader: TensorLoader) -> list[int]:
    """Return the targets in the order of a pass; each must come with its input."""
    order: list[int] = []
    for inputs, targets in loader:
        assert torch.equal(inputs[:, 0], targets.float())
        order += targets.tolist()
    return order


def make_loader(num_data: int = 103, batch_size: int = 10, **options: int) -> TensorLoader:
    inputs = torch.arange(num_data, dtype=torch.float32).unsqueeze(1).expand(-1, 3)
    return TensorLoader(inputs, torch.arange(num_data), batch_size, **options)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    loader = make_loader(seed=7)
    epochs = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        epochs.append(seen_by(loader))
    assert len({tuple(order) for order in epochs}) == 3
    # Another loader starts at the last epoch, with the global generator in another state.
    torch.manual_seed(123)
    state = torch.get_rng_state()
    again = make_loader(seed=7)
    again.set_epoch(2)
    assert seen_by(again) == epochs[2]
    assert seen_by(again) == epochs[2]
    assert torch.equal(torch.get_rng_state(), state)
    again.set_epoch(0)
    assert seen_by(again) == epochs[0]
    assert seen_by(make_loader(seed=8)) != epochs[0]
    # The order does not depend on the batch size.
    assert seen_by(make_loader(seed=7, batch_size=50)) == epochs[0]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("num_data", "batch_size", "sizes"),
    [(103, 50, [50, 50, 3]), (100, 50, [50, 50]), (3, 50, [3]), (1, 1, [1])],
)
def test_a_pass_covers_each_example_once(
    shuffle: bool, num_data: int, batch_size: int, sizes: list[int]
) -> None:
    loader = make_loader(num_data, batch_size, shuffle=shuffle)
    assert [len(targets) for _, targets in loader] == sizes
    assert len(loader) == len(sizes)
    assert loader.num_data == num_data
    order = seen_by(loader)
    assert sorted(order) == list(range(num_data))
    if num_data >= 100:
        assert (order != list(range(num_data))) is shuffle


def test_values_that_are_not_finite_are_counted_and_located() -> None:
    inputs = torch.zeros(4, 2, 3)
    targets = torch.zeros(4)
    TensorLoader(inputs, targets, 2)
    inputs[1, 0, 2] = torch.nan
    inputs[3, 1, 1] = -torch.inf
    with pytest.raises(ValueError, match=r"inputs must be finite, got 2 .* index \(1, 0, 2\)"):
        TensorLoader(inputs, targets, 2)
    with pytest.raises(ValueError, match=r"targets must be finite, got 1 .* index \(2,\)"):
        TensorLoader(torch.zeros(4, 1), torch.tensor([0.0, 1.0, torch.inf, 0.0]), 2)


def test_infinite_targets_may_be_bounds() -> None:
    x, y = torch.zeros(2, 1), torch.tensor([[[0.0, torch.inf]], [[-torch.inf, 1.0]]])
    with pytest.raises(
        ValueError, match=r"got 2 .* has_bounds=True where these are bounds .* mend"
    ):
        TensorLoader(x, y, 2)
    assert len(TensorLoader(x, y, 2, has_bounds=True)) == 1
    y[0, 0, 0] = torch.nan
    for has_bounds in (False, True):
        with pytest.raises(ValueError, match=r"index \(0, 0, 0\); mend or drop these examples"):
            TensorLoader(x, y, 2, has_bounds=has_bounds)
    with pytest.raises(ValueError, match=r"inputs must .* index \(0, 0\); mend or drop these"):
        TensorLoader(torch.full((2, 1), torch.inf), torch.zeros(2), 2)


@pytest.mark.parametrize(
    ("num_inputs", "num_targets", "batch_size", "message"),
    [
        (3, 4, 1, "same length, got 3 and 4"),
        (0, 0, 1, "at least 1 example, got 0"),
        (3, 3, 0, "batch_size must be at least 1, got 0"),
        (3, 3, -2, "batch_size must be at least 1, got -2"),
    ],
)
def test_loader_arguments_are_checked(
    num_inputs: int, num_targets: int, batch_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TensorLoader(torch.zeros(num_inputs, 2), torch.zeros(num_targets), batch_size)


@pytest.mark.parametrize("options", [{"batch_size": "2"}, {"batch_size": 2.0}, {"seed": "2"}])
def test_sizes_and_seeds_are_whole_numbers(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(TypeError, match=f"{name} must be a whole number, got {value!r}"):
        TensorLoader(torch.zeros(3, 2), torch.zeros(3), **{"batch_size": 1, **options})


def test_scalars_and_negative_epochs_raise() -> None:
    with pytest.raises(ValueError, match="targets must have a first axis"):
        TensorLoader(torch.zeros(1), torch.tensor(0), 1)
    with pytest.raises(ValueError, match="epoch must be at least 0, got -1"):
        make_loader().set_epoch(-1)


@pytest.mark.parametrize("shuffle", [True, False])
def test_several_inputs_keep_their_rows_together(shuffle: bool) -> None:
    x, z = torch.arange(12.0).view(6, 2), torch.arange(6)
    loader = TensorLoader((x, z), z, 4, shuffle=shuffle, seed=3)
    assert (loader.num_data, len(loader)) == (6, 2)
    rows = [inputs for inputs, targets in loader if torch.equal(inputs[1], targets)]
    assert [len(first) for first, _ in rows] == [4, 2]
    assert all(torch.equal(first, x[second]) for first, second in rows)
    alone = [targets for _, targets in TensorLoader(x, z, 4, shuffle=shuffle, seed=3)]
    assert all(torch.equal(one, other) for (_, one), other in zip(rows, alone, strict=True))


def test_each_of_several_inputs_is_checked() -> None:
    x, y = torch.zeros(3, 2), torch.zeros(3)
    with pytest.raises(ValueError, match="inputs must have at least 1 tensor, got 0"):
        TensorLoader((), y, 1)
    with pytest.raises(ValueError, match="same length, got 2 and 3"):
        TensorLoader((x, x[:2]), y, 1)
    with pytest.raises(TypeError, match="inputs must be tensors, got ndarray; use"):
        TensorLoader(x.numpy(), y, 1)
    with pytest.raises(ValueError, match="inputs must be finite"):
        TensorLoader((x, x.clone().fill_(torch.nan)), y, 1)
