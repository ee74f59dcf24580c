"""Edits in place, views and odd objects around what runs once: the same answers."""

from __future__ import annotations

import copy
import gc
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.module.test_trunk import S, X, outputs, without
from torch import Tensor, nn

import bayesify as bf
from bayesify.module.trunk import Trunk

pytestmark = pytest.mark.usefixtures("trunks_of_small_networks")


@dataclass
class Hidden:
    """A result that PyTorch does not know, and an argument with attributes of its own."""

    h: Tensor


class Opaque:
    """An object that tells nothing about what it holds."""

    h: Tensor


class Part(nn.Module):
    """A layer, wrapped by a function that decides what the part takes and returns."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function, self.passes = nn.Linear(4, 4), function, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.passes += 1
        return self.function(self.layer, *args, **kwargs)


class Whole(nn.Module):
    """A part, and a function that calls it between random weights."""

    def __init__(self, part: Callable[..., Any], function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.part, self.head, self.function = Part(part), nn.Linear(4, 3), function
        self.w = nn.Parameter(torch.ones(4))
        self.state = Hidden(torch.zeros(1))
        self.opaque = Opaque()
        self.register_buffer("b", torch.zeros(10, 4))
        self.register_buffer("sparse", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def whole(part: Callable[..., Any], function: Callable[..., Tensor]) -> bf.BayesianModule:
    torch.manual_seed(0)
    net = Whole(part, function)
    return bf.BayesianModule(net, include=("w", "head.*"), init_std=0.3)


def ahead(s: Any, x: Tensor) -> Tensor:
    """Copy what depends on a random weight into the buffer that the part is given."""
    s.b.copy_(x * s.w)
    return s.head(s.part(s.b))


def within(attribute: str) -> Callable[..., Tensor]:
    """Put what depends on a random weight into an object that the part is given."""

    def function(s: Any, x: Tensor) -> Tensor:
        held = getattr(s, attribute)
        held.extra = x * s.w
        return s.head(s.part(held))

    return function


def opaque_by_name(s: Any, x: Tensor) -> Tensor:
    return s.head(s.part(x, context=[{"held": s.opaque}]))


def generated(layer: nn.Linear, x: Tensor) -> Iterator[Tensor]:
    return (layer(row) for row in x)


def appended(s: Any, x: Tensor) -> Tensor:
    found: list[Tensor] = []
    s.part(x, found)
    return s.head(found[0])


def signed_zero(s: Any, x: Tensor) -> Tensor:
    zero = torch.zeros(4).copysign(s.w - 1.0)
    return s.head(s.part(zero).clamp(-1.0, 1.0) + x)


def plain(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(x)


def by_gradients(s: Any, x: Tensor) -> Tensor:
    """Use a derivative, whose block of gradients ends before the head."""
    inputs = x.clone()
    with torch.enable_grad():
        inputs.requires_grad_()
        (slope,) = torch.autograd.grad((s.part(inputs) * s.w).sum(), inputs)
    assert not torch.is_grad_enabled()
    return s.head(s.part(x) + slope)


def by_backward(s: Any, x: Tensor) -> Tensor:
    inputs = x.clone()
    with torch.enable_grad():
        inputs.requires_grad_()
        (s.part(inputs) * s.w).sum().backward()
    slope, inputs.grad = inputs.grad, None
    return s.head(s.part(x) + slope)


def assigned_data(s: Any, x: Tensor) -> Tensor:
    inputs = torch.zeros_like(x)
    inputs.data = x * s.w
    return s.head(s.part(inputs))


def within_inference(s: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        inputs = x + 1.0
        inputs.mul_(s.w)
        hidden = s.part(inputs) + 0.0
    return s.head(hidden.clone())


def forked(s: Any, x: Tensor) -> Tensor:
    """Draw random numbers from a seed that depends on a weight, and restore the generator."""
    with torch.random.fork_rng():
        torch.manual_seed(int(1e4 * s.w[0].abs()))
        noise = torch.randn(4)
    return s.head(s.part(x) + noise)


def branch(s: Any, x: Tensor) -> Tensor:
    """Use what is edited in place before the edit, or something else, by a random weight."""
    hidden = s.part(x)
    skip = s.head(hidden if float(s.w[0]) > 1.0 else x)
    return s.head(hidden.relu_()) + skip


def kept_by_branch(s: Any, x: Tensor) -> Tensor:
    hidden = s.part(x)
    if float(s.w[0]) > 1.0:
        s.opaque.h = hidden * 2.0
    return s.head(hidden + getattr(s.opaque, "h", x)[: len(x)].mean())


def by_tangents(s: Any, x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(s.part(dual) * s.w).tangent
    return s.head(s.part(x) + tangent)


def by_another_view(s: Any, x: Tensor) -> Tensor:
    """Edit memory through a tensor of which PyTorch does not know that it shares it."""
    hidden = s.part(x)
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(hidden)).mul_(s.w)
    return s.head(hidden)


def by_identity(s: Any, x: Tensor) -> Tensor:
    """Mark the input, which is another object in each pass."""
    seen = hasattr(x, "seen")
    x.seen = True
    return s.head(s.part(x) + float(seen))


COMPUTED: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "buffer": (lambda layer, b: layer(b), ahead),
    "attribute": (lambda layer, c: layer(c.extra), within("state")),
    "opaque": (lambda layer, c: layer(c.extra), within("opaque")),
    "opaque by name": (lambda layer, x, **_: layer(x), opaque_by_name),
    "list": (lambda layer, x, found: found.append(layer(x)), appended),
    "shape": (
        lambda layer, x: layer(x.unsqueeze_(0))[0],
        lambda s, x: s.head(s.part(x.clone())),
    ),
    "generator": (generated, lambda s, x: s.head(torch.stack(list(s.part(x))))),
    "gradients": (plain, by_gradients),
    "backward": (plain, by_backward),
    "assigned data": (plain, assigned_data),
    "inference": (plain, within_inference),
    "forked generator": (plain, forked),
    "branch": (plain, branch),
    "tangents": (plain, by_tangents),
    "identity": (plain, by_identity),
    "another view": (plain, by_another_view),
    "zero's sign": (lambda layer, zero: layer.bias / zero, signed_zero),
}


def edited(field: Callable[[Any], Tensor]) -> Callable[..., Tensor]:
    """Edit a tensor of the result in place, in proportion to a random weight."""

    def function(s: Any, x: Tensor) -> Tensor:
        result = s.part(x)
        field(result).mul_(s.w)
        return s.head(field(result))

    return function


def opaque_result(layer: nn.Linear, x: Tensor) -> Opaque:
    result = Opaque()
    result.h = layer(x)
    return result


def views_of_one(s: Any, x: Tensor) -> Tensor:
    one, other = s.part(x)
    one.mul_(s.w[0])
    return s.head(other)


def argument_edited_later(s: Any, x: Tensor) -> Tensor:
    """Edit the part's result, which is a view of its argument, and use the argument."""
    hidden = x + 1.0
    s.part(hidden).mul_(s.w[0])
    return s.head(hidden)


def argument_edited_within(s: Any, x: Tensor) -> Tensor:
    hidden = x + 1.0
    return s.head(s.part(hidden) + s.w * hidden)


def attached(layer: nn.Linear, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return layer(x)


def sparse(s: Any, x: Tensor) -> Tensor:
    return s.head(s.part(x, s.sparse, kind=("relu", math.pi, torch.float32, x.shape)))


SAME: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "dataclass": (lambda layer, x: Hidden(layer(x)), edited(lambda o: o.h)),
    "object": (opaque_result, edited(lambda o: o.h)),
    "ordered": (lambda layer, x: OrderedDict(h=[layer(x)]), edited(lambda o: o["h"][0])),
    "with a graph": (attached, edited(lambda o: o)),
    "views of one": (lambda layer, x: layer(x).expand(2, -1, -1).unbind(), views_of_one),
    "conjugate": (lambda layer, x: torch.complex(layer(x), x).conj(), edited(lambda o: o.real)),
    "argument": (lambda _, x: x, argument_edited_later),
    "view of the argument": (lambda _, x: x.view(-1)[4:], argument_edited_later),
    "edits": (lambda layer, x: layer(x.mul_(2.0)), argument_edited_within),
    "edits data": (lambda layer, x: layer(x.data.mul_(2.0)), argument_edited_within),
    "edits and returns": (lambda _, x: x.relu_(), argument_edited_within),
    "edits the input": (
        lambda layer, x: layer(x.round_(decimals=1)),
        lambda s, x: s.head(s.part(x) + x),
    ),
    "sparse": (lambda layer, x, m, **_: layer(x @ m.to_dense()), sparse),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, with dual tensors
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("batch_size", [10, 4])
@pytest.mark.parametrize("case", [*SAME, *COMPUTED])
def test_the_answers_are_those_of_whole_passes(
    case: str, batch_size: int, inference: bool, compared: bool
) -> None:
    if case == "buffer" and batch_size == 4:
        pytest.skip("the buffer has the size of ten rows")
    if case == "another view" and not compared:
        pytest.skip("only a comparison tells")
    bnn = whole(*{**SAME, **COMPUTED}[case])
    options: dict[str, Any] = {"keep_samples": True, "batch_size": batch_size}
    with torch.inference_mode(inference):
        expected = outputs(without(bnn, X.clone(), S, **options))
        found = outputs(bnn.predict(X.clone(), S, **options))
    assert all(map(torch.equal, found, expected))


def test_what_a_branch_keeps_is_whole() -> None:
    bnn = whole(plain, kept_by_branch)
    bnn.predict(X, 1, batch_size=10)
    bnn.predict(X, 20, batch_size=10)
    copied = copy.deepcopy(bnn)
    assert bool(copied.net.opaque.h.isfinite().all())


def test_nothing_of_a_prediction_outlives_it() -> None:
    bnn = whole(plain, lambda s, x: s.head(s.part(x).tanh()))
    bnn.predict(X, S, batch_size=4)
    gc.collect()
    gc.disable()
    try:
        before = sum(type(each) is Trunk for each in gc.get_objects())
        bnn.predict(X, S, batch_size=4)
        assert sum(type(each) is Trunk for each in gc.get_objects()) == before
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_that_a_fused_encoder_sets_to_zero() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(4, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            hidden = self.encoder(x, src_key_padding_mask=mask)
            result: Tensor = self.head(hidden.mean(1))
            return result

    bnn = bf.BayesianModule(Pooled(), include=("head.*",))
    mask = torch.zeros(10, 5, dtype=torch.bool)
    mask[3:, 2:] = True
    inputs = {"x": torch.randn(10, 5, 4), "mask": mask}
    for batch_size in (10, 4):
        expected = without(bnn, inputs, S, batch_size=batch_size)
        torch.testing.assert_close(
            bnn.predict(inputs, S, batch_size=batch_size).mean, expected.mean
        )


def test_an_input_that_is_not_a_number_is_the_same() -> None:
    bnn = whole(lambda layer, x: layer(x), lambda s, x: s.head(s.part(x).nan_to_num()))
    x = X.clone()
    x[0, 0] = torch.nan
    assert torch.equal(bnn.predict(x, S).mean, without(bnn, x, S).mean)
