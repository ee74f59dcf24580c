"""shrink: a smaller network of ordinary layers with the same outputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.cases import normals
from tests.loops import loop_over
from tests.networks_to_shrink import NETS, Net, check_same_outputs, make, size, sparse
from tests.zoo import ZOO, Specimen
from torch import Tensor, nn

from bayesify import BayesianModule, Delta, RankOne, WeightSampling, prune, rank_one, shrink
from bayesify.module import networks, shrinking, unit_flow

each_net = pytest.mark.parametrize("name", NETS)
#: Those of which nothing can be removed, and why not.
KEPT = {
    "fixed view": "it is used by view()",
    "scaled by a parameter": "it is used by mul()",
}


# ------------------------------------------------------------------------------------ the outputs


@each_net
def test_outputs_stay_the_same(name: str) -> None:
    smaller = []
    for seed, (rows, columns, single) in enumerate(
        [(0.5, 0.0, 0.0), (0.0, 0.5, 0.0), (0.3, 0.3, 0.3), (0.5, 0.5, 0.7), (0, 0, 0.9), (1, 0, 0)]
    ):
        net, x = make(name)
        sparse(net, seed=seed, rows=rows, columns=columns, single=single)
        before = copy.deepcopy(net)
        small = shrink(net, x)
        for other in (x, normals(*x.shape, seed=2), normals(2 * len(x), *x.shape[1:], seed=3)):
            check_same_outputs(net, small, 3.0 * other)
        smaller.append(size(small) < size(net))
        assert not small.training
        for one, two in zip(net.parameters(), before.parameters(), strict=True):
            assert torch.equal(one, two), "the network given is not changed"
    assert any(smaller) == (name not in KEPT)


@each_net
def test_outputs_in_single_precision_differ_by_rounding_alone(name: str) -> None:
    net, x = make(name, torch.float32)
    sparse(net, seed=2, rows=0.3, columns=0.3, single=0.3)
    check_same_outputs(net, shrink(net, x), x, tolerance=1e-6)


@each_net
def test_a_network_without_zeros_keeps_its_size(name: str) -> None:
    net, x = make(name)
    small = shrink(net, x)
    # The magnitudes of weight norm are within the weights.
    magnitudes = len(net[0].parametrizations.weight.original0) if name == "weight norm" else 0
    assert size(small) == size(net) - magnitudes
    check_same_outputs(net, small, x, tolerance=0.0)


@pytest.mark.parametrize("kind", ["rank one", "weight norm", "frozen weight norm"])
def test_layers_that_compute_their_weights_become_plain_and_smaller(kind: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 2))
    x = normals(5, 4).float()
    before: nn.Module
    if kind == "frozen weight norm":
        nn.utils.parametrizations.weight_norm(net[0]).requires_grad_(False)
        with torch.no_grad():
            net[2].weight[:, :20] = 0.0
        before, small = net, shrink(net, x)
        assert nn.utils.parametrize.is_parametrized(net[0])
    else:
        if kind == "rank one":
            net, include = rank_one(net), (RankOne,)
        else:
            nn.utils.parametrizations.weight_norm(net[0])
            include = ("*",)
        bnn = prune(BayesianModule(net, include=include), 0.8)
        before, small = bnn.to_module().eval(), shrink(bnn, x)
    first, last = small.shrinkage
    assert (first.name, first.outputs[0], last.name) == ("0", 30, "2")
    assert first.outputs[1] == last.inputs[1] == small[0].out_features < 20
    assert type(small[0]) is type(small[2]) is nn.Linear
    check_same_outputs(before, small, x, tolerance=1e-6)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2.0 * weight


def test_a_weight_that_is_computed_from_one_of_another_layer_is_stored_once() -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    net[2].weight = net[0].weight
    nn.utils.parametrize.register_parametrization(net[2], "weight", Doubled())
    x = normals(5, 6).float()
    small = shrink(net, x)
    assert size(small) == size(net)
    check_same_outputs(net, small, x, tolerance=0.0)


def no_borders(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(unit_flow, "sees_borders", lambda _: False)


def constants_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = shrinking._shrink_layer

    def wrong(use: Any, alive: Tensor) -> None:
        use.constants = torch.zeros_like(use.constants)
        original(use, alive)

    patch.setattr(shrinking, "_shrink_layer", wrong)


def all_inputs_are_constant(patch: pytest.MonkeyPatch) -> None:
    original = shrinking._alive

    def wrong(layers: Any, *args: Any) -> Tensor:
        layers = list(layers)
        for use in layers:
            use.absorbed = torch.ones_like(use.absorbed)
        return original(layers, *args)

    patch.setattr(shrinking, "_alive", wrong)


@loop_over(
    "fault, name",
    [
        (no_borders, "average pooling, padded"),
        (no_borders, "resnet8"),
        (constants_are_forgotten, "relu"),
        (constants_are_forgotten, "max pooling"),
        (constants_are_forgotten, "batch normalisation"),
        (all_inputs_are_constant, "relu"),
    ],
)
def test_a_planted_fault_changes_the_outputs(
    fault: Callable[..., None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = make(name)
    sparse(net, seed=0, rows=0.5, columns=0.0, single=0.0)
    fault(monkeypatch)
    with pytest.raises(RuntimeError, match="shrink must not change the outputs"):
        shrink(net, x)
    monkeypatch.setattr(shrinking, "_check_same", lambda *_: None)
    with pytest.raises(AssertionError):
        check_same_outputs(net, shrink(net, x), x)


@pytest.mark.parametrize("value", [-math.inf, -1e9])
def test_a_masked_output_hides_no_fault(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference of the other outputs is small compared with the masked one."""

    def run(net: Any, x: Tensor) -> Tensor:
        out: Tensor = net.inner(x)
        return out.masked_fill(torch.arange(4) == 1, value)

    inner, x = make("relu", torch.float32)
    sparse(inner, seed=0, rows=0.5, columns=0.0, single=0.0)
    net = Net(run, inner=inner)
    small = shrink(net, x)
    assert size(small) < size(net)
    torch.testing.assert_close(small(x), net(x))
    constants_are_forgotten(monkeypatch)
    with pytest.raises(RuntimeError, match="shrink must not change the outputs"):
        shrink(net, x)


def test_outputs_near_zero_may_differ_by_the_rounding_of_their_terms() -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 1))
        sparse(net, seed=seed, rows=0.5, columns=0.5, single=0.5)
        x = torch.randn(1, 8)
        with torch.no_grad():
            net[2].bias -= net(x)[0]
        assert shrink(net, x)[2].in_features < 300


def test_residual_units_that_are_not_joined_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = make("residual")
    sparse(net, seed=0, rows=0.0, columns=0.6, single=0.0)
    monkeypatch.setattr(unit_flow._Groups, "join", lambda *_: None)
    with pytest.raises(RuntimeError):
        shrink(net, x)


#: Specimens that branch on values, or whose code torch.fx does not follow.
NOT_TRACED = ("lstm-cell", "branch-and-loop", "products")


@pytest.mark.parametrize("name", ZOO)
def test_networks_of_the_zoo_stay_the_same_or_cannot_be_traced(name: str) -> None:
    specimen: Specimen = ZOO[name]
    bnn = prune(specimen.bnn(WeightSampling()), 0.7)
    net = bnn.to_module().eval()
    if name in NOT_TRACED:
        with pytest.raises(ValueError, match=r"torch\.fx can trace"):
            shrink(bnn, specimen.inputs)
    else:
        check_same_outputs(net, shrink(bnn, specimen.inputs), specimen.inputs)


# --------------------------------------------------------------------------------------- the size


def by_loops(weights: list[Tensor]) -> list[int]:
    """The widths of a ReLU network without biases, from repeated removal of one unit at a time."""
    weights = [weight.clone() for weight in weights]
    while True:
        for k in range(len(weights) - 1):
            into, out = weights[k], weights[k + 1]
            dead = [i for i in range(len(into)) if not (into[i].any() and out[:, i].any())]
            if dead and len(into) > 1:
                keep = [i for i in range(len(into)) if i != dead[0]]
                weights[k], weights[k + 1] = into[keep], out[:, keep]
                break
        else:
            return [len(weight) for weight in weights]


def check_widths(shrink: Callable[..., nn.Module] = shrink) -> None:
    for seed in range(8):
        net = nn.Sequential(
            nn.Linear(6, 9, bias=False),
            nn.ReLU(),
            nn.Linear(9, 8, bias=False),
            nn.ReLU(),
            nn.Linear(8, 7, bias=False),
            nn.ReLU(),
            nn.Linear(7, 4, bias=False),
        )
        sparse(net, seed=seed, rows=0.2, columns=0.1, single=0.7)
        small = shrink(net, torch.ones(1, 6))
        layers = [layer for layer in small if isinstance(layer, nn.Linear)]
        expected = by_loops([layer.weight.detach() for layer in net if hasattr(layer, "weight")])
        assert [layer.out_features for layer in layers] == expected
        assert [len(layer.weight) for layer in layers] == expected
        assert [layer.in_features for layer in layers] == [6, *expected[:-1]]


def test_everything_that_is_dead_goes() -> None:
    check_widths()


def test_one_round_of_removal_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(layers: Any, groups: Tensor, pinned: Mapping[int, str]) -> Tensor:
        alive = torch.zeros(len(groups), dtype=torch.bool)
        alive[list(pinned)] = True
        for use in layers:
            if use.reads is not None:
                alive[use.reads[use.module.weight.any(0) & ~use.absorbed]] = True
        return alive

    monkeypatch.setattr(shrinking, "_alive", once)
    with pytest.raises(AssertionError):
        check_widths()


def test_layers_are_ordinary_and_keep_their_names() -> None:
    net, x = make("batch normalisation")
    sparse(net, seed=0, rows=0.5, columns=0.0, single=0.0)
    small = shrink(net, x)
    assert [type(layer) for layer in small.modules()] == [type(layer) for layer in net.modules()]
    assert small.state_dict().keys() == net.state_dict().keys()
    first, norm, second = small[0], small[1], small[4]
    assert first.out_channels == norm.num_features == second.in_channels < 8
    assert norm.running_mean.shape == norm.weight.shape == (norm.num_features,)


def test_constants_move_into_a_bias_that_was_not_there() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2, bias=False)).double()
    with torch.no_grad():
        net[0].weight[1] = 0.0
        net[0].bias[1] = 2.0
    small = shrink(net, torch.zeros(1, 2).double())
    assert small[0].out_features == 2
    assert torch.equal(small[2].bias, 2.0 * net[2].weight[:, 1])
    check_same_outputs(net, small, normals(4, 2))


def test_the_summary_tells_what_was_kept_and_why() -> None:
    net, x = make("tokens")
    sparse(net, seed=0, rows=0.5, columns=0.0, single=0.0)
    rows = {row.name: row for row in shrink(net, x).shrinkage}
    assert rows["embed"].why_kept == "it is used by norm (LayerNorm)"
    assert rows["embed"].outputs == (8, 8)
    assert rows["up"].why_kept is None
    assert rows["up"].inputs == (8, 8)
    before, after = rows["up"].outputs
    assert before == 16
    assert after == rows["down"].inputs[1] < 16
    assert rows["out"].why_kept == "it is an output of the network"


def test_the_layers_of_a_transformer_of_torch_are_listed_as_kept() -> None:
    """torch.fx looks into no module of torch.nn, so their hidden units stay."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)
    net = nn.Sequential(encoder, nn.Linear(4, 3)).double().eval()
    sparse(net, seed=0, rows=0.5, columns=0, single=0)
    x = normals(2, 5, 4)
    small = shrink(net, x)
    check_same_outputs(net, small, x)
    found = {row.name: (row.inputs, row.outputs, row.why_kept) for row in small.shrinkage}
    assert set(found) == {"1", *(f"0.layers.{i}.linear{k}" for i in (0, 1) for k in (1, 2))}
    why = "it is within 0 (TransformerEncoder), which is kept whole"
    assert found["0.layers.1.linear2"] == ((8, 8), (4, 4), why)


@loop_over("name, why", list(KEPT.items()))
def test_units_of_unknown_operations_are_kept(name: str, why: str) -> None:
    net, x = make(name)
    sparse(net, seed=0, rows=0.5, columns=0.5, single=0.0)
    small = shrink(net, x)
    assert size(small) == size(net)
    assert small.shrinkage[0].why_kept == why


@each_net
def test_inputs_that_a_layer_does_not_read_are_divided_off(name: str) -> None:
    for seed in range(3):
        net, x = make(name)
        sparse(net, seed=seed, rows=0.3, columns=0.3, single=0.7)
        small = shrink(net, x, select_inputs=True)
        check_same_outputs(net, small, normals(*x.shape, seed=2))
        assert size(small) <= size(shrink(net, x))


def test_pixels_that_no_weight_reads_are_not_multiplied() -> None:
    net = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        net[0].weight[:, [0, 3]] = 0.0
    small = shrink(net, torch.zeros(1, 5), select_inputs=True)
    selection, layer = small[0]
    assert selection.index.tolist() == [1, 2, 4]
    assert torch.equal(layer.weight, net[0].weight[:, [1, 2, 4]])
    assert small.shrinkage[0].inputs == (5, 3)
    assert shrink(net, torch.zeros(1, 5)).shrinkage[0].inputs == (5, 5)


# -------------------------------------------------------------------------------- Bayesian networks


def test_a_pruned_bayesian_network_shrinks_to_its_mean_weights() -> None:
    net = networks.mlp(20, (50, 30), 3).double()
    bnn = prune(BayesianModule(net, seed=1), 0.97)
    x = normals(4, 20)
    small = shrink(bnn, x)
    check_same_outputs(bnn.to_module(), small, x)
    assert size(small) < 0.5 * size(net)


def test_a_point_estimate_shrinks() -> None:
    bnn = prune(BayesianModule(networks.mlp(5, (9,), 3), posterior=Delta), 0.8, "magnitude")
    x = torch.randn(2, 5)
    check_same_outputs(bnn.to_module(), shrink(bnn, x), x, tolerance=1e-6)


def test_an_infinite_constant_stays_where_it_is() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.Sigmoid(), nn.Linear(8, 2)).double()
    with torch.no_grad():
        net[0].weight[:4] = 0.0
        net[0].bias[0] = -math.inf  # whose sigmoid is 0
        net[0].bias[1] = math.nan
    x = normals(2, 3)
    small = shrink(net, x)
    assert small[0].out_features == 6
    check_same_outputs(net, small, x)
