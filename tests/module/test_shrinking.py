"""shrink: a smaller network of ordinary layers with the same outputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.cases import normals
from tests.loops import loop_over
from tests.networks_to_shrink import (
    NETS,
    Net,
    check_same_outputs,
    make,
    mlp,
    size,
    sparse,
)
from tests.zoo import ZOO, Specimen
from torch import Tensor, nn

from bayesify import BayesianModule, Delta, WeightSampling, prune, shrink
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
    assert any(smaller) == (name not in KEPT and name != "weight norm")


@each_net
def test_outputs_in_single_precision_differ_by_rounding_alone(name: str) -> None:
    net, x = make(name, torch.float32)
    sparse(net, seed=2, rows=0.3, columns=0.3, single=0.3)
    check_same_outputs(net, shrink(net, x), x, tolerance=1e-6)


@each_net
def test_a_network_without_zeros_keeps_its_size(name: str) -> None:
    net, x = make(name)
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
            *(nn.Linear(6, 9, bias=False), nn.ReLU(), nn.Linear(9, 8, bias=False), nn.ReLU()),
            *(nn.Linear(8, 7, bias=False), nn.ReLU(), nn.Linear(7, 4, bias=False)),
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


def test_inputs_by_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)

        def forward(self, image: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Any:
            hidden = self.a(image).relu()
            return self.b(hidden if mask is None else hidden * mask) * scale

    net = sparse(Named().double(), seed=1, rows=0.5, columns=0, single=0)
    small = shrink(net, {"image": normals(4, 3)})
    check_same_outputs(net, small, {"image": normals(4, 3, seed=1)})
    assert size(small) < size(net)
    masked = {"mask": normals(4, 1), "image": normals(4, 3)}
    check_same_outputs(net, shrink(net, masked), masked)


class Starred(nn.Module):
    """A network whose forward pass takes any number of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, *xs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.first(xs[0] + xs[1]).relu())
        return outputs


class WithOptions(Starred):
    """A network whose forward pass takes options by name too."""

    def forward(self, x: Tensor, **options: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x) * options["scale"]


def test_inputs_by_a_star() -> None:
    net, x = Starred(), torch.randn(5, 3)
    with torch.no_grad():
        net.first.weight[2:] = 0.0
        net.first.bias[2:] = 0.0
    small = shrink(net, (x, x))
    assert isinstance(small, Starred)
    assert small.first.out_features == 2
    torch.testing.assert_close(small(x, x), net(x, x))
    with pytest.raises(ValueError, match=r"no arguments by \*\*options; name them in forward"):
        shrink(WithOptions(), {"x": x, "scale": x[:, :1]})


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


# ----------------------------------------------------------------------------------------- errors


def branches(_: Any, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def test_a_network_that_cannot_be_traced_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"torch\.fx can trace.*TraceError"):
        shrink(Net(branches), torch.zeros(1, 2))


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, *, flag: bool = True, times: int = 1) -> Tensor:
        for _ in range(times):
            x = self.b(self.a(x.div_(2.0)).relu())
        return x.exp() if flag else x


def test_arguments_that_are_no_tensors_may_be_branched_on() -> None:
    net = sparse(Flagged().double(), seed=1, rows=0.5, columns=0, single=0)
    small = shrink(net, {"x": normals(4, 3), "flag": False, "times": 1})
    torch.testing.assert_close(small(normals(9, 3), flag=False), net(normals(9, 3), flag=False))
    assert size(small) < size(net)


def test_a_network_may_edit_its_inputs() -> None:
    net = sparse(Flagged().double(), seed=1, rows=0.5, columns=0, single=0)
    example = normals(4, 3)
    small = shrink(net, example)
    assert torch.equal(example, normals(4, 3)), "the caller's example is changed"
    torch.testing.assert_close(small(example.clone()), net(example.clone()))
    assert size(small) < size(net)


class Complex(nn.Module):
    """Real layers around complex ones, whose dead units have a constant with an imaginary part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(6, 2)
        self.a = nn.Linear(8, 6, dtype=torch.complex64)
        self.b = nn.Linear(6, 6, dtype=torch.complex64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).relu()
        outputs: Tensor = self.b(self.a(hidden * 1j))
        return torch.view_as_real(outputs), self.last(outputs.abs())


def test_complex_layers_are_kept_as_they_are() -> None:
    torch.manual_seed(0)
    net = Complex()
    with torch.no_grad():
        for layer, dead in ((net.first, slice(2, 5)), (net.a, slice(3)), (net.b, slice(2))):
            layer.weight[dead] = 0.0
    small = shrink(net, torch.randn(4, 3))
    x = torch.randn(9, 3)
    torch.testing.assert_close(small(x), net(x))
    plain = nn.Sequential(net.a, net.b)
    signal = torch.randn(9, 8, dtype=torch.complex64)
    torch.testing.assert_close(shrink(plain, signal[:2])(signal), plain(signal))


@loop_over(
    "example, error, message",
    [
        (torch.zeros(1, 7), ValueError, "shapes cannot be multiplied"),
        ("images", ValueError, "an example that the network runs on, got TypeError"),
        (3, TypeError, "inputs must be tensors"),
        ((torch.zeros(1, 6), torch.zeros(1, 6)), ValueError, "positional arguments"),
        ({"pixels": torch.zeros(1, 6)}, ValueError, "unexpected keyword argument"),
    ],
)
def test_an_example_that_does_not_fit_is_an_error(
    example: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        shrink(mlp(nn.ReLU()), example)


def test_something_else_than_a_network_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"needs a BayesianModule or a torch\.nn\.Module, got dict"):
        shrink({}, torch.zeros(1))  # type: ignore[arg-type]


def test_an_edit_of_a_tensor_that_is_used_again_is_not_lost() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        F.relu(h, inplace=True)
        return net.b(h)

    net = Net(run, a=nn.Linear(3, 8), b=nn.Linear(8, 2)).double()
    sparse(net, seed=0, rows=0.6, columns=0, single=0)
    x = normals(4, 3)
    check_same_outputs(net, shrink(net, x), x)
    assert math.isfinite(float(shrink(net, x)(x).detach().sum()))


@pytest.mark.parametrize("alias", [nn.Dropout(), nn.Identity(), nn.Flatten()])
def test_an_edit_of_an_alias_of_a_tensor_that_is_used_again_is_not_lost(alias: nn.Module) -> None:
    """In evaluation mode these layers return their input, or a view of it."""

    def run(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        edited = F.relu(net.alias(h), inplace=True)
        return net.b(edited) + net.c(h)

    layers = {"a": nn.Linear(3, 8), "b": nn.Linear(8, 2), "c": nn.Linear(8, 2)}
    net = Net(run, alias=alias, **layers).double().eval()
    with torch.no_grad():
        net.a.weight[:5] = 0.0
        net.a.bias[:5] = -1.0
    x = normals(4, 3)
    check_same_outputs(net, shrink(net, x), x)


class MeanAndScale(nn.Module):
    """Takes its two outputs apart, which leaves one axis of each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        with torch.no_grad():
            self.body[0].weight[:5] = 0.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs = self.body(x)
        return outputs[:, 0], outputs[:, 1].exp(), outputs.flatten()


def test_outputs_that_are_taken_apart() -> None:
    net, x = MeanAndScale().double(), normals(3, 4)
    small = shrink(net, x)
    assert small.body[0].out_features == 3
    for found, expected in zip(small(x), net(x), strict=True):
        torch.testing.assert_close(found, expected)


class Shared(nn.Module):
    """Divides its hidden units by the number of examples."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        with torch.no_grad():
            self.body.weight[:6] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.body(x).sigmoid() / x.size(0))
        return result


def test_a_constant_of_the_number_of_examples_is_kept() -> None:
    net, x = Shared().double(), normals(8, 4)
    small = shrink(net, x[:1])
    torch.testing.assert_close(small(x), net(x))


def test_units_that_a_hook_mixes_are_kept() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    net[1].register_forward_hook(lambda _, args, output: output.softmax(-1))  # noqa: ARG005
    with torch.no_grad():
        net[0].weight[:4] = 0.0
        net[0].bias[:4] = 0.5
    x = normals(3, 4)
    small = shrink(net, x)
    assert small[0].out_features == 8
    torch.testing.assert_close(small(x), net(x))


class Between(nn.Module):
    """A perceptron with an operation on its hidden units, and examples of several rows."""

    def __init__(self, operation: nn.Module) -> None:
        super().__init__()
        self.first, self.operation = nn.Linear(4, 6), operation
        self.last = nn.Linear(operation(torch.zeros(1, 1, 6)).shape[-1], 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.operation(torch.relu(self.first(x))))
        return result


@pytest.mark.parametrize("example", [torch.zeros(1, 5, 4), torch.ones(1, 5, 4)])
@pytest.mark.parametrize(
    "operation",
    [
        *(nn.MaxPool1d(2, stride=1, padding=1), nn.MaxPool1d(3, 1, 1), nn.AvgPool1d(3, 1, 1)),
        *(nn.ReflectionPad1d(1), nn.ReplicationPad1d(2), nn.Upsample(scale_factor=2)),
        *(nn.ZeroPad1d(1), nn.Identity()),
    ],
    ids=str,
)
def test_operations_among_units_keep_the_outputs(operation: nn.Module, example: Tensor) -> None:
    torch.manual_seed(0)
    bnn = prune(BayesianModule(Between(operation)), 0.7)
    small, x = shrink(bnn, example), torch.randn(2, 5, 4)
    torch.testing.assert_close(small(x), bnn.to_module()(x), rtol=1e-5, atol=1e-6)


def test_a_forward_that_reads_a_layer_cannot_have_its_inputs_selected() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(1, 4, 3), nn.Linear(144, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.conv(x))
            result: Tensor = self.last(hidden.view(-1, self.last.in_features))
            return result

    torch.manual_seed(0)
    bnn, x = prune(BayesianModule(Reads()), 0.9), torch.randn(1, 1, 8, 8)
    torch.testing.assert_close(shrink(bnn, x)(x), bnn.to_module()(x))
    with pytest.raises(RuntimeError, match="reads their attributes: AttributeError"):
        shrink(bnn, x, select_inputs=True)
