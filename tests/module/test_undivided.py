"""Inputs that are not divided: of other lengths, such as the edges of a graph, or of no few."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases import normals
from tests.loops import loop_over
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from bayesify import ELBO, BayesianModule, Delta, Flipout, MCDropout, fit

NODES, EDGES = normals(7, 3, dtype=torch.float32), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 6]])


class Graph(nn.Module):
    """Adds to each node what its neighbours send."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.sent = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        return self.own(nodes).index_add(0, edges[1], self.sent(nodes)[edges[0]])


def bnn() -> BayesianModule:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BayesianModule(Graph(), init_std=0.1, estimator=Flipout())


@pytest.mark.parametrize("inputs", [(NODES, EDGES), {"nodes": NODES, "edges": EDGES}])
def test_a_graph_is_predicted_whole(inputs: object) -> None:
    model = bnn()
    predictive = model.predict(inputs, 5, batch_size="all", keep_samples=True)
    assert predictive.samples is not None
    assert predictive.samples.shape == (5, 7, 2)
    assert torch.equal(predictive.mean, model.predict(inputs, 5, batch_size="all").mean)
    mean = model.run_with(model.posterior.mean, NODES, EDGES).softmax(-1)
    assert torch.allclose(model.predict_mean(inputs, batch_size="all").mean, mean, atol=1e-6)
    assert torch.allclose(model.mean_outputs(inputs, batch_size="all").softmax(-1), mean, atol=1e-6)


def test_it_is_what_batches_give_where_all_are_examples() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    model = BayesianModule(net)
    whole, divided = (model.predict(NODES, 4, batch_size=size).mean for size in ("all", 3))
    assert torch.allclose(whole, divided, atol=1e-6)
    once = model.predict(NODES, 4, batch_size="all").mean
    assert torch.equal(whole, once)


def test_a_graph_is_trained() -> None:
    elbo = ELBO(bnn(), num_data=7)
    elbo((NODES, EDGES), torch.arange(7) % 2).loss.backward()
    assert elbo.bnn.posterior.mean.grad is not None


def test_without_it_the_error_names_it() -> None:
    with pytest.raises(ValueError, match=r'got lengths \[2, 7\].*with batch_size="all"'):
        bnn().predict((NODES, EDGES), 2)
    with pytest.raises(ValueError, match="max_memory divides the inputs, which cannot be with"):
        bnn().predict((NODES, EDGES), 2, batch_size="all", max_memory="1 MB")


class Words(nn.Module):
    """Logits of a row of counts, which may be sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normals(30, 2, dtype=torch.float32))

    def forward(self, counts: Tensor) -> Tensor:
        return torch.mm(counts, self.weight)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
@loop_over("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_inputs_are_validated_and_predicted_whole(layout: torch.layout) -> None:
    dense = (normals(6, 30, dtype=torch.float32) > 0.8).float()
    counts, y = dense.to_sparse(layout=layout), torch.arange(6) % 2
    model = BayesianModule(Words(), init_std=0.1)
    calls: list[Any] = [
        lambda x: model.predict(x, 5).mean,
        lambda x: model.predict(x, 5, batch_size=6).mean,
        lambda x: model.predict_mean(x).mean,
        lambda x: model.log_prob(x, y, 5),
        lambda x: fit(
            ELBO(BayesianModule(Words(), init_std=0.1), num_data=6),
            [(x, y)],
            [(x, y)],
            epochs=1,
            progress=False,
        )[-1]["validation_nll"],
    ]
    for call in calls:
        torch.testing.assert_close(call(counts), call(dense), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match='got a batch_size of 2; use batch_size="all"'):
        model.predict(counts, 5, batch_size=2)


class Reader(nn.Module):
    """The class of each sequence, from a packed one."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.head = nn.GRU(3, 4), nn.Linear(4, 2)

    def forward(self, packed: PackedSequence, scale: float = 1.0) -> Tensor:
        outputs: Tensor = self.head(self.read(packed)[1][0])
        return scale * outputs


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
@loop_over("backend", ["autograd", "closed-form", "auto"])
def test_a_packed_sequence_is_one_argument(backend: Any) -> None:
    rows = [normals(length, 3, seed=length, dtype=torch.float32) for length in (5, 4, 2)]
    packed, y = pack_sequence(rows), torch.tensor([0, 1, 1])
    model = BayesianModule(Reader(), init_std=0.1)
    named = model.predict({"packed": packed}, 5).mean
    assert torch.equal(model.predict((packed,), 5).mean, named)
    assert torch.equal(model.predict(packed, 5).mean, named)
    assert torch.equal(model.predict(packed, 5, batch_size="all").mean, named)
    mean = model.run_with(model.posterior.mean, packed).softmax(-1)
    assert torch.allclose(model.predict_mean(packed).mean, mean, atol=1e-6)
    elbo = ELBO(model, num_data=3)
    found = fit(elbo, [(packed, y)], [(packed, y)], epochs=1, progress=False, backend=backend)
    assert found[-1]["validation_nll"] is not None
    for inputs in (packed, {"packed": packed}):
        with pytest.raises(TypeError, match=r"got PackedSequence; .* and acquire take it"):
            model.predict(inputs, 5, batch_size=2)


class Tagger(nn.Module):
    """Trims a batch of padded texts to the longest of it, then tags each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop, self.out = nn.Embedding(9, 3), nn.Dropout(0.1), nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        longest = int((tokens > 0).sum(1).max())
        return self.out(self.drop(self.embed(tokens[:, :longest])))


@loop_over("seen", [{"include": ("out.*",)}, {}])
@loop_over("length", [1, 2])
def test_batches_of_other_lengths_are_refused(seen: dict[str, Any], length: int) -> None:
    """A tag of the only token would otherwise be repeated for all tokens."""
    tokens = torch.ones(8, 4, dtype=torch.long)
    tokens[4:, length:] = 0
    net = BayesianModule(Tagger(), **seen)
    whole = net.predict(tokens, 6, batch_size="all")
    assert whole.mean.shape == net.predict(tokens, 6).mean.shape == (8, 4, 2)
    message = rf"one shape .* got \(4, 2\) and \({length}, 2\); let it pad .*batch_size=.all."
    with pytest.raises(ValueError, match=message):
        net.predict(tokens, 6, batch_size=4)
    with pytest.raises(ValueError, match=message):
        MCDropout(BayesianModule(Tagger(), posterior=Delta)).predict(tokens, 2, batch_size=4)


class Cell(nn.Module):
    """A recurrent cell whose state is a tuple of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        outputs: Tensor = self.out(self.cell(x, state)[0])
        return outputs


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
@loop_over("inputs", [(NODES, EDGES), (NODES, (torch.zeros(7, 4), torch.ones(7, 4)))])
def test_what_is_trained_is_validated(inputs: Any) -> None:
    net = Cell() if isinstance(inputs[1], tuple) else Graph()
    minibatch, targets = (inputs, torch.arange(7) % 2), torch.arange(7) % 2
    model = BayesianModule(net, init_std=0.1)
    history = fit(ELBO(model, num_data=7), [minibatch], [minibatch], epochs=1, progress=False)
    outputs = model.run_with(model.posterior.mean, *inputs)
    expected = nn.functional.cross_entropy(outputs, targets).item()
    assert history[-1]["validation_nll"] == pytest.approx(expected, rel=1e-5)


# Networks that take no few of their examples.

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


def bnn_of(kind: type[Counted]) -> BayesianModule:
    torch.manual_seed(0)
    return BayesianModule(kind(), init_std=0.3).eval()


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


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
@pytest.mark.parametrize("kind", [Neighbours, Adjacent])
def test_a_validation_minibatch_is_one_pass(kind: type[Counted]) -> None:
    inputs = (X, torch.eye(N)) if kind is Adjacent else X
    bnn = bnn_of(kind)
    (found,) = fit(ELBO(bnn, num_data=N), [(inputs, Y)], [(inputs, Y)], epochs=1, progress=False)
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
    bnn = BayesianModule(net).eval()
    ids = torch.arange(N) % 9
    with pytest.raises(IndexError):
        bnn.predict_mean(torch.full((N,), 9))
    bnn.predict_mean(ids)
    assert max(bnn.net[1].counts) < N


def test_a_batch_size_of_ones_own_bounds_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []  # no attribute of the network, which is restored after a measurement
    mixed = Neighbours.mixed

    def noted(self: Neighbours, hidden: Tensor) -> Tensor:
        seen.append(len(hidden))
        return mixed(self, hidden)

    monkeypatch.setattr(Neighbours, "mixed", noted)
    bnn_of(Neighbours).predict(X, 3, batch_size=100)
    assert max(seen) == 100
