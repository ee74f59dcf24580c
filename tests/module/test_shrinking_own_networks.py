"""shrink: networks with a forward pass of their own, and examples that do not fit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.cases import normals
from tests.loops import loop_over
from tests.networks_to_shrink import Net, check_same_outputs, mlp, size, sparse
from torch import Tensor, nn

from bayesify import BayesianModule, prune, shrink


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
        nn.MaxPool1d(2, stride=1, padding=1),
        nn.MaxPool1d(3, 1, 1),
        nn.AvgPool1d(3, 1, 1),
        nn.ReflectionPad1d(1),
        nn.ReplicationPad1d(2),
        nn.Upsample(scale_factor=2),
        nn.ZeroPad1d(1),
        nn.Identity(),
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
