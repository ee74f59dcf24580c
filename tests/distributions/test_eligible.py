"""What cannot be made Bayesian: an error that names it and says what to do."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized
import torch.ao.nn.quantized.dynamic
from tests.cases import mlp, normals
from tests.loops import loop_over
from torch import Tensor, distributed, nn
from torch.nn.utils import parametrizations, prune

from bayesify import ELBO, BayesianModule, ParameterLayout

QUANTIZED, DYNAMIC = torch.ao.nn.quantized, torch.ao.nn.quantized.dynamic
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm:FutureWarning"),
]


class WithParameter(nn.Module):
    """A linear layer next to one parameter, which it does not use."""

    def __init__(self, values: Tensor, **options: object) -> None:
        super().__init__()
        self.register_parameter("odd[0]", nn.Parameter(values, **options))
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Keeps(nn.Module):
    """Keeps its last output, as an attribute or as a buffer."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        if buffer:
            self.register_buffer("last", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.linear(x)
        return self.last


class OwnQuantized(QUANTIZED.Conv2d):
    """A quantised layer of a type of the user's own."""


def both(prefix: str) -> tuple[str, str]:
    return f"{prefix}.weight", f"{prefix}.bias"


def next_to(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Linear(3, 3))


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(3, 3)))


def traced() -> nn.Module:
    return torch.jit.trace(nn.Linear(3, 3), torch.zeros(1, 3))


#: A network, the name of the parameter that cannot be random, why, and what to do about it.
REFUSED: list[tuple[Callable[[], nn.Module], str, str, str]] = [
    (lambda: WithParameter(torch.ones(2).int(), requires_grad=False), "odd[0]", "torch.int32",
     "store it as real floating-point numbers"),
    (lambda: WithParameter(torch.ones(2).bool(), requires_grad=False), "odd[0]", "torch.bool",
     "store it as real floating-point numbers"),
    (lambda: WithParameter(torch.ones(2).cfloat()), "odd[0]", "torch.complex64",
     "store it as real floating-point numbers"),
    (lambda: next_to(nn.LazyLinear(3)), "0.weight", "lazy", "pass one batch through"),
    (lambda: next_to(nn.Linear(3, 3, device="meta")), "0.weight", "on the meta device, which holds",
     "load its values first"),
    (lambda: next_to(scripted()), "0.0.weight", "scripted", "script the result of to_module()"),
    (lambda: next_to(traced()), "0.weight", "scripted", "script the result of to_module()"),
    *(
        (lambda dtype=dtype: next_to(nn.Linear(3, 3).to(dtype)), "0.weight", str(dtype),
         "convert the network with net.to(torch.float32)")
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    ),
    *(
        (lambda make=make: next_to(make()), name, "quantised",
         "quantise the result of to_module()")
        for make, name in (
            (lambda: DYNAMIC.Linear(3, 3), "0._packed_params._packed_params"),
            (lambda: DYNAMIC.LSTM(3, 3), "0._all_weight_values.0.param"),
            (lambda: DYNAMIC.GRUCell(3, 3), "0._packed_weight_ih"),
            (lambda: QUANTIZED.Linear(3, 3), "0._packed_params._packed_params"),
            (lambda: QUANTIZED.Conv2d(3, 3, 1), "0._packed_params"),
            (lambda: QUANTIZED.Embedding(3, 3), "0._packed_params._packed_weight"),
            (lambda: OwnQuantized(3, 3, 1), "0._packed_params"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "name", "reason", "mend"),
    [pytest.param(*row, id=f"{number}-{row[2]}") for number, row in enumerate(REFUSED)],
)
def test_what_cannot_be_random_is_named_and_can_be_left_out(
    make: Callable[[], nn.Module], name: str, reason: str, mend: str
) -> None:
    net = make()
    exclude: tuple[str, ...] = ()
    refused = []
    for _ in range(4):  # A layer may hold two such parameters: the advice is followed for each.
        try:
            bnn = BayesianModule(net, exclude=exclude)
            break
        except TypeError as error:
            refused.append(str(error))
            exclude += ast.literal_eval(refused[-1].rpartition("exclude=")[2])
    assert f"but {name!r} is {reason}" in refused[0]
    assert mend in refused[0].partition("; ")[2]
    assert bnn.layout.names == both("linear" if isinstance(net, WithParameter) else "1")


@loop_over("make", [scripted, traced, lambda: DYNAMIC.Linear(3, 3)])
def test_a_network_that_is_wholly_of_that_kind_is_refused_alike(
    make: Callable[[], nn.Module],
) -> None:
    with pytest.raises(TypeError, match=r"is (scripted|quantised); pass the network before"):
        BayesianModule(make())


def test_a_quantised_body_under_a_bayesian_head_runs() -> None:
    net = nn.Sequential(DYNAMIC.Linear(3, 3), nn.Linear(3, 2))
    for options in ({"include": ("1.*",)}, {"exclude": (DYNAMIC.Linear,)}):
        bnn = BayesianModule(net, init_std=1e-9, **options)
        assert bnn.layout.names == both("1")
        x = normals(4, 3, dtype=torch.float32)
        assert torch.allclose(bnn(x), net(x), atol=1e-6)


def test_a_float_helper_of_quantised_networks_is_no_obstacle() -> None:
    assert ParameterLayout.of(next_to(QUANTIZED.FloatFunctional())).names == both("1")


def test_the_advice_for_scripting_works() -> None:
    bnn = BayesianModule(mlp())
    x = normals(4, 3)
    assert torch.allclose(torch.jit.script(bnn.to_module())(x), bnn.mean_outputs(x))


@loop_over("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_ordinary_dtype_is_taken(dtype: torch.dtype) -> None:
    bnn = BayesianModule(nn.Linear(3, 2).to(dtype))
    assert bnn.layout.dtype is dtype
    assert bnn(torch.ones(1, 3, dtype=dtype)).dtype is dtype


class Elsewhere(nn.Parameter):
    """A parameter that says to be on another device."""

    device = torch.device("cuda", 1)


def test_several_devices_are_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    net[1].weight = Elsewhere(torch.zeros(3, 3))
    message = r"share one device, but 0.bias is cpu, 1.weight is cuda:1; move .*net.to\(device\)"
    with pytest.raises(TypeError, match=message):
        ParameterLayout.of(net)
    assert ParameterLayout.of(net, exclude=("1.*",)).names == both("0")


def after_a_batch(net: nn.Module) -> nn.Module:
    net(torch.ones(2, 3))
    return net


HOOKED = {
    "WeightNorm": nn.utils.weight_norm,
    "SpectralNorm": nn.utils.spectral_norm,
    "L1Unstructured": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
}


@loop_over("kind", HOOKED)
@loop_over("used", [False, True])
def test_parameters_that_a_hook_recomputes_are_refused(kind: str, used: bool) -> None:
    layer = HOOKED[kind](nn.Linear(3, 3))
    net = after_a_batch(next_to(layer)) if used else next_to(layer)
    message = f"but the module '0' has a {kind}; use torch.nn.utils.parametrizations"
    with pytest.raises(TypeError, match=message):
        BayesianModule(net)
    with pytest.raises(TypeError, match=f"but the network has a {kind};"):
        BayesianModule(layer, exclude=("weight*",))


@loop_over(
    ("kind", "remove"),
    [
        ("WeightNorm", nn.utils.remove_weight_norm),
        ("SpectralNorm", nn.utils.remove_spectral_norm),
        ("L1Unstructured", lambda layer: prune.remove(layer, "weight")),
    ],
)
def test_removing_the_hook_helps(kind: str, remove: Callable[[nn.Module], object]) -> None:
    layer = HOOKED[kind](nn.Linear(3, 3))
    remove(layer)
    assert set(BayesianModule(layer).layout.names) == {"weight", "bias"}


def test_a_frozen_layer_with_a_hook_works() -> None:
    net = next_to(nn.utils.weight_norm(nn.Linear(3, 3)).requires_grad_(requires_grad=False))
    bnn = BayesianModule(after_a_batch(net))
    copy.deepcopy(after_a_batch(bnn))
    assert bnn.layout.names == both("1")


@loop_over("buffer", [False, True])
def test_a_kept_graph_is_refused_until_it_is_detached(buffer: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 3), Keeps(buffer=buffer))
    assert BayesianModule(net).layout.num_weights == 20
    after_a_batch(net)
    with pytest.raises(TypeError, match=r"'last' of the module '1' is the result .*detach or del"):
        BayesianModule(net)
    net[1].last = net[1].last.detach()
    assert BayesianModule(net).layout.num_weights == 20


def test_a_sparse_parameter_is_refused_and_a_sparse_buffer_is_not() -> None:
    net = WithParameter(torch.eye(3).to_sparse())
    message = r"'odd\[0\]' of the network is torch.sparse_coo; convert it with .* as a buffer"
    with pytest.raises(TypeError, match=message):
        BayesianModule(net, include=("linear.*",))
    net = nn.Linear(3, 2)
    net.register_buffer("mask", torch.eye(3).to_sparse())
    assert BayesianModule(net).net.mask.is_sparse


def test_a_lazy_buffer_is_refused_until_it_is_initialised() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.LazyBatchNorm1d())
    with pytest.raises(TypeError, match="but 'running_mean' of the module '1' is lazy; pass one"):
        BayesianModule(net)
    assert BayesianModule(after_a_batch(net)).layout.names == both("0")


def check_wrapped(net: nn.Module) -> None:
    message = rf"got a {type(net).__name__}; pass the network inside, net\.module"
    with pytest.raises(TypeError, match=message):
        BayesianModule(net)
    assert BayesianModule(net.module).layout.num_weights == 8


@pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this torch has no gloo",
)
def test_a_sharded_network_is_refused() -> None:
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        net = mlp()
        fully_shard(net[0])
        for include in (("*",), ("2.*",)):
            with pytest.raises(TypeError, match=r"its part '0' was sharded .*Module first, then"):
                BayesianModule(net, include=include)
        tensor_parallel = WithParameter(net[0].weight)
        with pytest.raises(TypeError, match=r"but 'odd\[0\]' is sharded; make the BayesianModule"):
            ParameterLayout.of(tensor_parallel)
    finally:
        distributed.destroy_process_group()


def test_a_network_wrapped_for_parallel_training_is_refused() -> None:
    check_wrapped(nn.DataParallel(nn.Linear(3, 2)))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        check_wrapped(nn.parallel.DistributedDataParallel(nn.Linear(3, 2)))
    finally:
        distributed.destroy_process_group()


@loop_over(
    ("parametrize", "names"),
    [
        (parametrizations.weight_norm, ("original0", "original1")),
        (parametrizations.spectral_norm, ("original",)),
        (parametrizations.orthogonal, ("original",)),
    ],
)
def test_parametrized_layers_are_ordinary(
    parametrize: Callable[[nn.Module], nn.Module], names: tuple[str, ...]
) -> None:
    net = next_to(parametrize(nn.Linear(3, 3)))
    bnn = BayesianModule(after_a_batch(net), include=(nn.Linear,), exclude=("1.*",))
    originals = (f"0.parametrizations.weight.{name}" for name in names)
    assert bnn.layout.names == ("0.bias", *originals)
    x = normals(4, 3, dtype=torch.float32)
    elbo = ELBO(bnn, num_data=4)
    elbo(x, torch.arange(4) % 3).loss.backward()
    assert (bnn.posterior.mean.grad != 0).any()
    twin = copy.deepcopy(bnn)
    assert torch.equal(twin.predict(x, 2).mean, bnn.predict(x, 2).mean)
    assert torch.allclose(bnn.to_module().eval()(x), bnn.mean_outputs(x))
    narrow = BayesianModule(net, init_std=1e-9).eval()
    assert torch.allclose(narrow(x), net.eval()(x), atol=1e-5)


@loop_over("hold", [lambda w: [w], lambda w: (w, 3), lambda w: {"w": w}])
def test_parameters_that_a_network_also_keeps_in_a_list_are_refused(hold: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 2))
            self.other = nn.Parameter(torch.ones(2))
            self.held = hold(self.weight)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.other

    wanted = "'held' of the network holds 'weight' too; read the module's own attribute in forward"
    with pytest.raises(TypeError, match=wanted):
        BayesianModule(Net())
    bnn = BayesianModule(Net(), exclude=("weight",))  # it is deterministic
    assert bnn.layout.names == ("other",)


def test_recurrent_layers_keep_their_own_list() -> None:
    assert BayesianModule(nn.LSTM(3, 2), output=lambda found: found[0]).layout.num_weights


class Kept(nn.Module):
    """A head on features that a hook of the body keeps."""

    def __init__(self, *, by_closure: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        if by_closure:
            self.body.register_forward_hook(lambda _module, _inputs, out: self.keep(out))
        else:
            self.body.register_forward_hook(keep_on_module)

    def keep(self, features: Tensor) -> None:
        self.body.kept = features

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        found: Tensor = self.head(self.body.kept)
        return found


#: A variable with the name of an attribute that a hook below sets.
kept = nn.Linear(4, 8)


def keep_on_module(module: nn.Module, _inputs: object, features: Tensor) -> None:
    module.kept = features


def doubled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: 2.0 * function(x)


def test_a_hook_that_holds_the_network_is_reported() -> None:
    """It would keep the features of the network that was passed, whose input is another."""
    with pytest.warns(UserWarning, match="function in '_forward_hooks' of the module 'body' holds"):
        BayesianModule(Kept(by_closure=True))
    bnn = BayesianModule(Kept(by_closure=False))  # a warning is an error here
    x = torch.randn(5, 4)
    assert not torch.equal(bnn.predict(x).mean, bnn.predict(2.0 * x).mean)


def test_an_attribute_that_is_such_a_function_is_reported() -> None:
    net = nn.Sequential(nn.Linear(4, 3))
    net.double = lambda x: net(x) * 2.0
    with pytest.warns(UserWarning, match="function in 'double' of the network holds a module"):
        BayesianModule(net)
    wrapped = nn.Linear(4, 3)
    wrapped.forward = doubled(wrapped.forward)  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="function in 'forward' of the network holds a module"):
        BayesianModule(wrapped)


def test_a_hook_may_name_an_attribute_as_a_variable_of_its_file() -> None:
    net = Kept(by_closure=False)
    net.body = kept
    net.body.register_forward_hook(keep_on_module)
    BayesianModule(net)
