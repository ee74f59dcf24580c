"""Examples whose outputs depend on each other: predicted, and validated, in one pass."""

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


class Attending(Counted):
    def mixed(self, hidden: Tensor) -> Tensor:
        return torch.softmax(hidden @ hidden.T, -1) @ hidden


class Normalised(Counted):
    def mixed(self, hidden: Tensor) -> Tensor:
        return F.batch_norm(hidden, None, None, training=True)


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


class Dropping(Counted):
    def mixed(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, 0.5, training=True)


def bnn_of(kind: type[Counted]) -> bf.BayesianModule:
    torch.manual_seed(0)
    return bf.BayesianModule(kind(), init_std=0.3).eval()


@pytest.mark.parametrize("kind", [Attending, Normalised, Neighbours])
def test_examples_that_depend_on_each_other_are_not_divided(kind: type[Counted]) -> None:
    whole = bnn_of(kind).predict(X, 3, batch_size="all")
    assert torch.equal(bnn_of(kind).predict(X, 3).mean, whole.mean)
    mean = bnn_of(kind).predict_mean(X, batch_size="all").mean
    bnn = bnn_of(kind)
    assert torch.equal(bnn.predict_mean(X).mean, mean)
    assert bnn.net.counts[-1] == N
    assert not torch.allclose(bnn.predict(X, 3, batch_size=100).mean, whole.mean, atol=1e-4)


@pytest.mark.parametrize("count", [N, 1025, 600])
def test_the_nodes_of_a_dense_graph_are_not_divided(count: int) -> None:
    x, adjacency = X[:count], torch.eye(count).roll(1, 0)
    p = bnn_of(Adjacent).predict((x, adjacency), 3)
    assert torch.equal(p.mean, bnn_of(Adjacent).predict((x, adjacency), 3, batch_size="all").mean)


@pytest.mark.parametrize("kind", [Attending, Adjacent])
def test_a_validation_minibatch_is_one_pass(kind: type[Counted]) -> None:
    inputs = (X, torch.eye(N)) if kind is Adjacent else X
    bnn = bnn_of(kind)
    (found,) = bf.fit(
        bf.ELBO(bnn, num_data=N), [(inputs, Y)], [(inputs, Y)], epochs=1, progress=False
    )
    outputs = bnn.mean_outputs(inputs, batch_size="all")
    expected = F.cross_entropy(outputs, Y).item()
    assert found["validation_nll"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", [Counted, Several, Dropping])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_independent_examples_are_divided(kind: type[Counted], dtype: torch.dtype) -> None:
    bnn = bnn_of(kind).to(dtype)
    bnn.predict_mean(X.to(dtype))
    assert max(bnn.net.counts) < N


def test_no_less_memory_is_promised_for_examples_that_belong_together() -> None:
    with pytest.raises(ValueError, match="divides the inputs, but the output of an example depend"):
        bnn_of(Attending).predict(X, 3, max_memory="20 MB")
    few = bnn_of(Attending).predict(X[:50], 3, max_memory="20 MB")
    assert torch.allclose(few.mean, bnn_of(Attending).predict(X[:50], 3).mean)
