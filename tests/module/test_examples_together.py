"""Examples of which a network takes no few: predicted, and validated, in one pass."""

from __future__ import annotations

import pytest
import torch
from tests.cases import normals
from torch import Tensor, nn
from torch.nn import functional as F

import bayesify as bf

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")

N = 1500  # more than are in one pass by default
X, Y = normals(N, 4, seed=1).float(), torch.arange(N) % 3


class Counted(nn.Module):
    """A network that notes the number of examples of each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.counts: list[int] = []

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        self.counts.append(len(x))
        outputs: Tensor = self.last(self.mixed(self.first(x), *others))
        return outputs

    def mixed(self, hidden: Tensor) -> Tensor:
        return hidden.relu()


class Neighbours(Counted):
    """Each example and the mean of those that are nearest to it, of which it needs 20."""

    def mixed(self, hidden: Tensor) -> Tensor:
        nearest = torch.cdist(hidden, hidden).topk(20, largest=False).indices
        return hidden + hidden[nearest].mean(1)


class Adjacent(Counted):
    def mixed(self, hidden: Tensor, adjacency: Tensor) -> Tensor:  # type: ignore[override]
        return adjacency @ hidden


class Several(Counted):
    """A network that does not take a single example."""

    def mixed(self, hidden: Tensor) -> Tensor:
        return hidden.squeeze().relu()[:, :5]


def bnn_of(kind: type[Counted]) -> bf.BayesianModule:
    torch.manual_seed(0)
    return bf.BayesianModule(kind(), init_std=0.3).eval()


def test_examples_of_which_the_network_takes_no_few_are_not_divided() -> None:
    whole = bnn_of(Neighbours).predict(X, 3, batch_size="all")
    bnn = bnn_of(Neighbours)
    assert torch.equal(bnn.predict(X, 3).mean, whole.mean)
    assert bnn.net.counts[-1] == N
    assert not torch.allclose(bnn.predict(X, 3, batch_size=100).mean, whole.mean, atol=1e-4)


@pytest.mark.parametrize("count", [N, 1025, 600])
def test_the_nodes_of_a_dense_graph_are_not_divided(count: int) -> None:
    x, adjacency = X[:count], torch.eye(count).roll(1, 0)
    p = bnn_of(Adjacent).predict((x, adjacency), 3)
    assert torch.equal(p.mean, bnn_of(Adjacent).predict((x, adjacency), 3, batch_size="all").mean)


@pytest.mark.parametrize("kind", [Neighbours, Adjacent])
def test_a_validation_minibatch_is_one_pass(kind: type[Counted]) -> None:
    inputs = (X, torch.eye(N)) if kind is Adjacent else X
    bnn = bnn_of(kind)
    (found,) = bf.fit(
        bf.ELBO(bnn, num_data=N), [(inputs, Y)], [(inputs, Y)], epochs=1, progress=False
    )
    outputs = bnn.mean_outputs(inputs, batch_size="all")
    expected = F.cross_entropy(outputs, Y).item()
    assert found["validation_nll"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", [Counted, Several])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_independent_examples_are_divided(kind: type[Counted], dtype: torch.dtype) -> None:
    bnn = bnn_of(kind).to(dtype)
    bnn.predict_mean(X.to(dtype))
    assert max(bnn.net.counts) < N


def test_a_fault_of_some_values_is_forgotten() -> None:
    net = nn.Sequential(nn.Embedding(9, 4), Counted())
    bnn = bf.BayesianModule(net).eval()
    ids = torch.arange(N) % 9
    with pytest.raises(IndexError):
        bnn.predict_mean(torch.full((N,), 9))
    bnn.predict_mean(ids)
    assert max(bnn.net[1].counts) < N
