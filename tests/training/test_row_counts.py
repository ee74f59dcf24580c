"""The rows of a network's outputs are the examples that num_data counts, or fit warns."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

import bayesify as bf
from bayesify.datasets import Passes, TensorLoader
from bayesify.training import ConvergenceWarning, RowCountWarning


class Pixels(nn.Module):
    """Logits of three classes for each pixel, of shape (N, H, W, 3) or flattened."""

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.layer, self.flat = nn.Conv2d(1, 3, 3, padding=1), flat

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x).movedim(1, -1)
        return logits.reshape(-1, 3) if self.flat else logits


X, Y = torch.randn(24, 1, 4, 4), torch.randint(3, (24, 4, 4))


def found(loader: Any, num_data: int, *, flat: bool) -> list[str]:
    """Train for two epochs, and return what was said of rows."""
    elbo = bf.ELBO(bf.BayesianModule(Pixels(flat=flat)), num_data=num_data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RowCountWarning)
        warnings.simplefilter("ignore", ConvergenceWarning)
        bf.fit(elbo, loader, epochs=2, progress=False)
    return [str(each.message) for each in caught if each.category is RowCountWarning]


def flattened(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return x, y.flatten()


def test_flattened_pixels_of_a_data_set_are_reported_once() -> None:
    loader: Any = DataLoader(list(zip(X, Y, strict=True)), 8, collate_fn=flattened)
    [message] = found(loader, 24, flat=True)
    assert (
        "it is 24, and for minibatches of 8 examples the network returned 384 rows in an epoch"
        in message
    )
    assert "Return outputs of shape (N, ..., K)" in message


def test_minibatches_in_a_list_are_no_examples() -> None:
    batches = [(X[i : i + 8], Y[i : i + 8]) for i in (0, 8, 16)]
    [message] = found(batches, 3, flat=False)
    assert (
        "num_data must count the rows of the network's outputs, but it is 3, and the network"
        in message
    )
    assert found([(x, y.flatten()) for x, y in batches], 24 * 16, flat=True) == []
    assert found(batches, 24, flat=False) == []
    unequal = [(X[:20], Y[:20]), (X[20:22], Y[20:22]), (X[22:], Y[22:])]
    assert found(unequal, 24, flat=False) == []


@pytest.mark.parametrize("size", [8, 24, 100])
def test_rows_that_are_examples_are_not_reported(size: int) -> None:
    assert found(DataLoader(list(zip(X, Y, strict=True)), size), 24, flat=False) == []
    assert found(Passes(TensorLoader(X, Y, size), 3), 24, flat=False) == []


def test_classes_that_are_not_the_last_axis_are_named() -> None:
    elbo = bf.ELBO(bf.BayesianModule(nn.Conv2d(1, 3, 3, padding=1)), num_data=24)
    with pytest.raises(ValueError, match=r"classes last, .* got \(8, 3, 4, 4\) .*movedim\(1, -1\)"):
        elbo(X[:8], Y[:8])


def test_what_is_no_tensor_goes_by_name() -> None:
    bnn = bf.BayesianModule(nn.Linear(4, 3))
    with pytest.raises(TypeError, match="got NoneType; give all by the names of forward"):
        bnn.predict((torch.zeros(2, 4), None))
