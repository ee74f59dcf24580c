"""Networks that edit their weights in place, or keep them, under the kernel of a loop."""

from __future__ import annotations

import gc

import pytest
import torch
from tests.backend_cases import CLASSES, INPUTS, needs_compiler
from tests.training.kernel.test_drawn_weights import X, Y, check_same, pair
from torch import Tensor, nn

pytestmark = needs_compiler


class Halved(nn.Linear):
    """With half of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, 0.5 * self.weight, self.bias)


class Halving(nn.Linear):
    """The same, by an edit of its weights, which PyTorch does not allow of parts of one vector."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.mul_(0.5)
        return super().forward(x)


class Clipping(nn.Linear):
    """Edits its weights unseen by autograd."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Partly(nn.Linear):
    """Uses one of its weights only."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Keeping(nn.Linear):
    """Holds the weights of its last pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.weight
        return super().forward(x)


def test_a_network_may_edit_its_weights_in_place() -> None:
    elbo, expected = pair(Halving(INPUTS, CLASSES))[0], pair(Halved(INPUTS, CLASSES))[0]
    expected.bnn.load_state_dict(elbo.bnn.state_dict())
    check_same(elbo, expected, lambda elbo: elbo(X, Y).loss.backward())


class Flipping(nn.Linear):
    """Exchanges its weights unseen by autograd."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.copy_(self.weight.data.flip(0))
        return super().forward(x)


class Negating(nn.Linear):
    """Changes only the signs of its weights, unseen by autograd."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.neg_()
        return super().forward(x)


class Conjugated(nn.Linear):
    """Has a gradient with PyTorch's negative bit, contiguous since it is one number."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs)
        self.angle = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.complex(torch.ones(1), self.angle).conj()
        return (super().forward(x) * factor).imag


@pytest.mark.parametrize("kind", [Clipping, Partly, Flipping, Negating, Conjugated])
def test_what_a_network_does_to_its_weights_is_differentiated(kind: type[nn.Linear]) -> None:
    check_same(*pair(kind(INPUTS, CLASSES)), lambda elbo: elbo(X, Y).loss.backward())


def test_weights_that_a_network_holds_stay_as_they_are() -> None:
    elbo, _ = pair(Keeping(INPUTS, CLASSES))
    elbo(X, Y).loss.backward()
    held = elbo.bnn.net.last
    before = held.detach().clone()
    for _ in range(3):
        elbo(X, Y).loss.backward()
    assert torch.equal(held.detach(), before)


def test_no_graph_outlives_its_loss() -> None:
    elbo, _ = pair(Keeping(INPUTS, CLASSES))
    places = set()
    gc.disable()
    try:
        for _ in range(6):
            terms = elbo(X, Y)
            places.add(elbo.bnn.net.last.data_ptr())
            elbo.bnn.net.last = None
            terms.loss.backward()
        for _ in range(6):  # never backward
            terms = elbo(X, Y)
            places.add(elbo.bnn.net.last.data_ptr())
            elbo.bnn.net.last = None
    finally:
        gc.enable()
    assert len(places) <= 3
