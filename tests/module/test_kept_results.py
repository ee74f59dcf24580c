"""Networks that keep something of a pass, or edit the containers of their inputs."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.fx
from tests.module.test_predict import Stateful
from torch import Tensor, nn

from bayesify import (
    ELBO,
    BayesianModule,
    Flipout,
    GaussianLikelihood,
    LocalReparameterization,
    WeightSampling,
    certify,
    freeze,
)
from bayesify.bandits import ThompsonSampler
from bayesify.training.free_energy import untrained_free_energy


@dataclass
class Graph:
    """The nodes of a graph, and who is joined to whom."""

    x: Tensor
    edges: Tensor


class OnGraphs(nn.Module):
    """Writes what it computes back into the graph that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, graph: Any) -> Tensor:
        if isinstance(graph, dict):
            graph["x"] = torch.tanh(self.first(graph["x"]))
            features = graph.pop("x")
        else:
            graph.x = features = torch.tanh(self.first(graph.edges @ graph.x))
        outputs: Tensor = self.last(features)
        return outputs


@pytest.mark.parametrize(
    "make",
    [lambda x: {"x": x}, lambda x: Graph(x, torch.eye(6)), lambda x: OrderedDict(x=x, y=x)],
)
def test_containers_and_objects_that_a_pass_edits_stay_the_callers(
    make: Callable[[Tensor], Any],
) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    graph, bnn = make(x), BayesianModule(OnGraphs(), init_std=0.3)
    found = bnn.predict((graph,), 5, batch_size="all", keep_samples=True)
    assert found.samples is not None
    for s in range(5):
        expected = bnn.to_module(s)(make(x)).softmax(-1)
        torch.testing.assert_close(found.samples[s], expected)
    assert torch.equal(bnn.predict((graph,), 5, batch_size="all").mean, found.mean)
    bnn.predict_mean((graph,), batch_size="all")
    y = torch.arange(6) % 3
    losses = [ELBO(bnn, num_data=6, num_samples=4)((each,), y).nll for each in (graph, make(x))]
    torch.testing.assert_close(losses[0], losses[1])
    held = graph.x if isinstance(graph, Graph) else graph["x"]
    assert held is x


class Marking(OnGraphs):
    """Keeps a constant of each pass besides."""

    mask: Tensor | None = None

    def forward(self, graph: Any) -> Tensor:
        self.mask = torch.ones(1)
        return super().forward(graph)


def test_a_search_for_caches_leaves_the_callers_object() -> None:
    x = torch.randn(6, 4)
    graph, bnn = Graph(x, torch.eye(6)), BayesianModule(Marking(), init_std=0.3)
    found = [bnn.predict((graph,), 4, batch_size="all").mean for _ in range(2)]
    assert torch.equal(*found)
    assert graph.x is x


class Node:
    """An object that knows another one, which knows it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.edges, self.others = torch.eye(len(x)), [self]

    def __copy__(self) -> Node:
        return self


def test_objects_in_a_circle_that_are_not_copied_are_inputs() -> None:
    node = Node(torch.randn(6, 4))
    x = node.x
    BayesianModule(OnGraphs()).predict((node,), 1, batch_size="all")
    assert node.x is not x  # it was not copied, as its own code wants it


class Caching(nn.Linear):
    """Keeps its weight, in a container of some kind, for later passes in evaluation mode."""

    def __init__(self, cache: Any) -> None:
        super().__init__(3, 2, bias=False)
        self.cache = cache

    def forward(self, x: Tensor) -> Tensor:
        held = vars(self.cache) if isinstance(self.cache, SimpleNamespace) else self.cache
        if "weight" not in held:
            held["weight"] = self.weight.detach().clone()
        return nn.functional.linear(x, held["weight"])


@pytest.mark.parametrize("make", [OrderedDict, lambda: defaultdict(list), SimpleNamespace, dict])
def test_weights_in_containers_of_any_kind_are_those_of_each_sample(
    make: Callable[[], Any],
) -> None:
    x = torch.rand(5, 3)
    bnn = BayesianModule(Caching(make()), init_std=0.5)
    plain = BayesianModule(nn.Linear(3, 2, bias=False), init_std=0.5)
    plain.posterior.load_state_dict(bnn.posterior.state_dict())
    for options in ({}, {"batch_size": 2}, {"batch_size": "all"}):
        found = bnn.predict(x, 10, **options).mean  # type: ignore[arg-type]
        torch.testing.assert_close(found, plain.predict(x, 10, **options).mean)  # type: ignore[arg-type]


def test_the_weights_of_one_sample_are_not_those_of_the_next() -> None:
    bnn, x = BayesianModule(Caching({}), init_std=0.5), torch.ones(1, 3)
    for seed in range(3):
        found = bnn.predict(x, 1, seed=seed).mean
        alone = BayesianModule(nn.Linear(3, 2, bias=False), init_std=0.5)
        alone.posterior.load_state_dict(bnn.posterior.state_dict())
        torch.testing.assert_close(found, alone.predict(x, 1, seed=seed).mean)


class Counting(Stateful):
    """Resumes from the state of its last pass, and counts its passes."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x)


@pytest.mark.parametrize("estimator", [LocalReparameterization(), Flipout()])
def test_a_trace_leaves_no_state(estimator: Any) -> None:
    torch.manual_seed(0)
    net, x = Counting(), torch.randn(5, 4)
    bnn = BayesianModule(copy.deepcopy(net), init_std=1e-6, estimator=estimator)
    bnn.summary(x)
    assert bnn.net.state is None
    for passes in (1, 2):
        torch.testing.assert_close(bnn(x), net(x), rtol=1e-3, atol=1e-4)
        assert bnn.net.passes == passes


class Settings(dict[str, Any]):
    """A dictionary that is not changed once it is made."""

    def update(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("settings are not changed")


def test_a_trace_leaves_containers_with_code_of_their_own() -> None:
    net = nn.Linear(4, 3)
    net.counts, net.settings = Counter(a=3), Settings(size=4)
    net.layers = torch.fx.immutable_collections.immutable_list([1, 2])
    bnn = BayesianModule(net, estimator=LocalReparameterization())
    bnn(torch.randn(5, 4))
    bnn.predict(torch.randn(5, 4), 3, batch_size="all")
    assert bnn.net.counts == Counter(a=3)
    assert bnn.net.settings == {"size": 4}
    assert bnn.net.layers == [1, 2]


class WithOwnModes(nn.Linear):
    """Has noise in training mode, which its own ``train`` sets."""

    noise = 0.1

    def train(self, mode: bool = True) -> WithOwnModes:
        self.noise = 0.1 if mode else 0.0
        return super().train(mode)


@pytest.mark.parametrize("is_training", [False, True])
def test_a_prediction_restores_what_a_mode_sets(is_training: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 3), WithOwnModes(3, 2)).train()
    bnn = BayesianModule(net)
    bnn.net[1].train(is_training)
    for predict in (bnn.predict, bnn.predict_mean):
        predict(torch.ones(4, 3))
        assert bnn.net[1].noise == (0.1 if is_training else 0.0)
        modes = [each.training for each in (bnn.net, bnn.net[0], bnn.net[1])]
        assert modes == [True, True, is_training]


class Keeping(nn.Module):
    """Keeps its features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.features: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.features = torch.tanh(self.first(x))
        outputs: Tensor = self.last(self.features)
        return outputs


def test_a_frozen_network_that_keeps_results_can_be_copied() -> None:
    frozen = freeze(BayesianModule(Keeping()), 8)
    first = frozen(torch.ones(2, 4))
    for each in (frozen, copy.deepcopy(frozen)):
        assert torch.equal(each(torch.ones(2, 4)).mean, first.mean)
        copy.deepcopy(each)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_frozen_encoder_treats_padding_as_a_prediction_does() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.body, self.last = nn.TransformerEncoder(layer, 1), nn.Linear(8, 3)

        def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
            outputs: Tensor = self.last(self.body(x, src_key_padding_mask=padding).mean(1))
            return outputs

    torch.manual_seed(0)
    bnn = BayesianModule(Pooled(), init_std=0.2, include=("last.*",))
    padding = torch.zeros(6, 5, dtype=torch.bool)
    padding[:, 3:] = True
    frozen, x = freeze(bnn, 10), torch.randn(6, 5, 8)
    for mask in (padding, None):
        found = frozen(x, mask).mean
        inputs = {"x": x, "padding": mask}
        torch.testing.assert_close(found, bnn.predict(inputs, 10).mean)


class CachingInALoop(Caching):
    """Looks at its inputs, so that no pass holds several samples."""

    def forward(self, x: Tensor) -> Tensor:
        assert not bool(x.isnan().any())
        return super().forward(x)


@pytest.mark.parametrize("kind", [Caching, CachingInALoop])
def test_a_frozen_network_computes_what_it_keeps_for_each_sample(kind: type[Caching]) -> None:
    bnn, x = BayesianModule(kind({}), init_std=0.5), torch.rand(5, 3)
    frozen = freeze(bnn, 6, estimator=WeightSampling())
    expected = bnn.predict(x, 6).mean
    torch.testing.assert_close(frozen(x).mean, expected)
    assert not any(each.cache for each in frozen.modules() if isinstance(each, Caching))
    if kind is Caching:
        exported = torch.export.export(frozen, (x,)).module()
        torch.testing.assert_close(exported(x).mean, expected)


def caching_and_plain(inputs: int, outputs: int, **options: Any) -> list[BayesianModule[Any]]:
    """Two networks of the same posterior, of which the first caches its weights."""
    layers = Caching({}), nn.Linear(3, 2, bias=False)
    bnns: list[BayesianModule[Any]] = []
    for layer in layers:
        layer.weight = nn.Parameter(torch.linspace(-1.0, 1.0, inputs * outputs).view(outputs, -1))
        bnns.append(BayesianModule(layer, **options))
    return bnns


def test_a_certificate_is_of_new_weights_for_each_prediction() -> None:
    x = torch.randn(50, 4)
    y = (x[:, 0] > 0.0).long() + (x[:, 1] > 1.0).long()
    caching, plain = (
        certify(bnn, x, y, prior_indices=(), num_samples=400, seed=2).error
        for bnn in caching_and_plain(4, 3, init_std=1.0)
    )
    assert caching == pytest.approx(plain, abs=14.0)  # percent, four standard errors


def test_thompson_sampling_draws_a_network_for_each_act() -> None:
    acts = []
    for bnn in caching_and_plain(1 + 2, 1, init_std=1.0, likelihood=GaussianLikelihood()):
        agent = ThompsonSampler(bnn, 2)
        acts.append([agent.act([0.5]) for _ in range(30)])
    assert acts[0] == acts[1]
    assert len(set(acts[0])) == 2


def test_the_free_energy_of_untrained_means_is_of_several_samples() -> None:
    x = torch.randn(40, 3)
    caching, plain = (
        untrained_free_energy(ELBO(bnn, num_data=40), [(x, torch.arange(40) % 2)])
        for bnn in caching_and_plain(3, 2, init_std=0.5)
    )
    assert caching == plain
