"""Removal of the units of a network that a pruned network does not use."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from bayesify.estimators.network_state import kept_tensors
from bayesify.module.bayesian import BayesianModule
from bayesify.module.edited_inputs import copied
from bayesify.module.inputs import PLAIN, Inputs, arguments_of
from bayesify.module.unit_flow import UnitFlow, Use
from bayesify.module.unit_roles import LAYERS, PER_UNIT, unit_weights

__all__ = ["SelectUnits", "ShrunkLayer", "shrink"]

#: The greatest relative difference that is taken for rounding, of outputs and of weights.
_ROUNDING = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
}
#: How often all weights are changed to see how much the outputs move.
_TRIALS = 3


class _Pass(NamedTuple):
    """Inputs of the network and its outputs."""

    args: tuple[Tensor, ...]
    kwargs: dict[str, Any]
    outputs: Any


class ShrunkLayer(NamedTuple):
    """The size of a linear layer or convolution before and after :func:`shrink`.

    Attributes:
        name: of the layer in the network.
        inputs: input features or channels, before and after.
        outputs: output features or channels, before and after.
        why_kept: why its outputs cannot be removed, or None where they can.
    """

    name: str
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    why_kept: str | None


class SelectUnits(nn.Module):
    """Pass on some units of a tensor, for the layer that follows; see :func:`shrink`.

    Args:
        index: the places of the units, shape (units,).
        axis: their axis, from the last, which is -1.

    Example:
        >>> SelectUnits(torch.tensor([0, 2]), axis=-1)(torch.tensor([[5.0, 6.0, 7.0]]))
        tensor([[5., 7.]])
    """

    index: Tensor

    def __init__(self, index: Tensor, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.register_buffer("index", index)

    def forward(self, inputs: Tensor) -> Tensor:
        """Select the units."""
        return inputs.index_select(self.axis, self.index)

    def extra_repr(self) -> str:
        """Describe how many units are passed on."""
        return f"units={len(self.index)}, axis={self.axis}"


def shrink(
    bnn: BayesianModule | nn.Module, example_input: Inputs, *, select_inputs: bool = False
) -> nn.Module:
    """Return a smaller ordinary network with the same outputs, without the units that are not used.

    A unit, which is a feature of a linear layer or a channel of a convolution, is removed if no
    weight reads it, or if it is constant: all weights that lead to it are zero, and the biases of
    the layers that read it can take over its constant. Where that leaves other units unused, these
    are removed too. Units that a residual connection joins are removed together or not at all.

    The network is traced with ``torch.fx``. Units are followed through linear layers,
    convolutions, batch normalisation, activations, arithmetic, pooling, flattening and
    concatenation; units that another operation uses are kept. The classes of layers and the names
    of parameters stay as they are, but for layers with parametrizations, which become plain ones
    with the weights that they compute, unless another module holds what these are computed from.

    Args:
        bnn: a pruned network, whose mean weights are used, or an ordinary network with weights
            that are zero. It is not changed.
        example_input: inputs as for ``predict``, of at least one example. The sizes of images and
            sequences must be those that the smaller network is for. Arguments that are no tensors,
            and optional ones that are left out, must have the same values in each later call.
        select_inputs: also divide off inputs that a layer does not read, although others need them
            or they cannot be removed, such as pixels: the layer becomes an ``nn.Sequential`` of a
            :class:`SelectUnits` and a smaller layer, and its parameters get a name with ``1.``.

    Returns:
        The smaller network, for prediction: it is in evaluation mode. Its attribute ``shrinkage``
        has a :class:`ShrunkLayer` for each linear layer and convolution that was followed, and for
        those within modules that ``torch.fx`` does not look into, which are kept whole.

    Raises:
        TypeError: ``bnn`` is no module, or the example is neither tensors nor a container.
        ValueError: the network cannot be traced or run on the example, as on one without tensors.
        RuntimeError: the smaller network has other outputs than the network, on the example or on
            it with noise, or does not run.

    Example:
        >>> import bayesify as bf
        >>> net = nn.Sequential(nn.Linear(8, 50), nn.ReLU(), nn.Linear(50, 3))
        >>> pruned = bf.prune(bf.BayesianModule(net), fraction=0.9)
        >>> small = shrink(pruned, torch.zeros(1, 8))
        >>> small[2].in_features < 50, small[2].out_features
        (True, 3)
        >>> small.shrinkage[1].why_kept
        'it is an output of the network'
    """
    if not isinstance(bnn, nn.Module):
        raise TypeError(
            f"shrink needs a BayesianModule or a torch.nn.Module, got {type(bnn).__name__}"
        )
    if isinstance(bnn, BayesianModule):
        net = bnn.to_module()
    else:
        net = copy.deepcopy(bnn, kept_tensors(bnn))
    net.eval()
    with torch.no_grad():
        _bake_parametrizations(net)
        flow, expected = _follow(net, example_input)
        args, kwargs = arguments_of(example_input)
        passes = [_Pass(args, kwargs, expected), *_on_noise(net, args, kwargs)]
        inexact = _inexact(net, passes)
    groups, pinned = flow.groups()
    alive = _alive(flow.layers.values(), groups, pinned)
    for use in flow.layers.values():
        _shrink_layer(use, alive)
    for use in flow.per_unit.values():
        _shrink_per_unit(use, alive)
    if select_inputs:
        for use in flow.layers.values():
            _select_inputs(net, use)
    net.shrinkage = (*_shrinkage(flow, groups, pinned), *_unseen(flow))  # type: ignore[assignment]
    with torch.no_grad():
        for each in passes:
            _check_same(each.outputs, _run(net, each.args, each.kwargs), inexact)
    return net


def _bake_parametrizations(net: nn.Module) -> None:
    """Give layers the weights themselves that they compute, as by weight norm or a rank one.

    Not where another module holds what they compute it from, which would be stored twice.
    """
    holders = Counter(
        id(each) for module in net.modules() for each in module.parameters(recurse=False)
    )
    for module in net.modules():
        if not parametrize.is_parametrized(module):
            continue
        kind = parametrize.type_before_parametrizations(module)
        computed = module.parametrizations
        assert isinstance(computed, nn.ModuleDict)
        if kind not in LAYERS or any(holders[id(each)] > 1 for each in computed.parameters()):
            continue
        trained = any(each.requires_grad for each in computed.parameters())
        # Not remove_parametrizations, which edits parameters that another network may share.
        values = {name: getattr(module, name).detach().clone() for name in computed}
        del module.parametrizations
        module.__class__ = kind
        for name, value in values.items():
            module.register_parameter(name, nn.Parameter(value, requires_grad=trained))


def _run(net: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = copied((args, kwargs))
    try:
        return net(*args, **kwargs)
    except Exception as error:  # any of the network's own
        raise RuntimeError(
            "shrink must leave a network that runs, but its forward pass depends on the sizes of "
            f"layers, or reads their attributes: {_first_line(error)}; leave out select_inputs, or "
            "the layers that it reads"
        ) from error


def _on_noise(net: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> list[_Pass]:
    """Return a pass on other inputs; nothing if the network does not run on them.

    An example can be blind: on zeros units that are not constant may look alike.
    """
    generator = torch.Generator().manual_seed(0)

    def noisy(value: Any) -> Any:
        if not _is_continuous(value):
            return value
        dtype = torch.complex128 if value.is_complex() else torch.float64
        noise = torch.randn(value.shape, generator=generator, dtype=dtype)
        return value + noise.to(value)

    inputs = tuple(map(noisy, args)), {name: noisy(value) for name, value in kwargs.items()}
    try:
        own_args, own_kwargs = copied(inputs)
        return [_Pass(*inputs, net(*own_args, **own_kwargs))]
    except Exception:  # such as a network that checks its inputs
        return []


def _follow(net: nn.Module, example_input: Inputs) -> tuple[UnitFlow, Any]:
    """Trace a network, run it on the example, and return its units and outputs."""
    args, kwargs = arguments_of(example_input)
    try:
        own_args, own_kwargs = copied((args, kwargs))
        expected = net(*own_args, **own_kwargs)
    except Exception as error:  # any of the network's own
        raise ValueError(
            f"shrink needs an example that the network runs on, got {_first_line(error)}"
        ) from error
    parameters = inspect.signature(net.forward).parameters
    given = copied(inspect.signature(net.forward).bind(*args, **kwargs).arguments)
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if name not in given and parameter.default is not parameter.empty
    }
    fixed = defaults | {name: value for name, value in given.items() if isinstance(value, PLAIN)}
    try:
        graph = fx.Tracer().trace(net, concrete_args=fixed or None)
        flow = UnitFlow(
            fx.GraphModule(net, graph), {module: name for name, module in net.named_modules()}
        )
        flow.run(*_spread({**defaults, **given}, parameters))
    except Exception as error:  # the network's own code runs on stand-ins for tensors
        raise ValueError(
            "shrink needs a network that torch.fx can trace, whose forward pass does not depend on "
            f"the values of tensors; tracing failed: {_first_line(error)}"
        ) from error
    return flow, expected


def _spread(
    values: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> Iterator[Any]:
    """Yield the values of a function's parameters as its positional arguments."""
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            yield from values.get(name, ())
        elif parameter.kind is not parameter.VAR_KEYWORD:
            yield values[name]
        elif values.get(name):
            raise TypeError(f"torch.fx takes no arguments by **{name}; name them in forward")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _alive(layers: Iterable[Use], groups: Tensor, pinned: Mapping[int, str]) -> Tensor:
    """Return whether each unit is kept, shape (units,)."""
    layers = list(layers)
    used = [(unit_weights(use.module, LAYERS[type(use.module)]) != 0).any(2) for use in layers]
    kept = torch.zeros(len(groups), dtype=torch.bool)
    kept[list(pinned)] = True
    alive = torch.ones(len(groups), dtype=torch.bool)
    while True:
        needed = kept.clone()
        for use, weights in zip(layers, used, strict=True):
            if use.reads is not None:
                read = weights[alive[use.writes]].any(0) & ~use.absorbed
                needed[groups[use.reads[read]]] = True
        now = needed[groups]
        empty = [use for use in layers if len(use.writes) and not now[use.writes].any()]
        if empty:  # a layer must have a unit: of those that are left one that needs no inputs
            for use in empty:
                rank = 2 * alive[use.writes].int() + use.known.int()
                kept[groups[use.writes[rank.argmax()]]] = True
        elif torch.equal(now, alive):
            return alive
        else:
            alive = now


@torch.no_grad()
def _shrink_layer(use: Use, alive: Tensor) -> None:
    """Remove a layer's dead inputs and outputs; its bias takes over the constants among them."""
    module, layer = use.module, LAYERS[type(use.module)]
    weights = unit_weights(module, layer)
    keep_out = alive[use.writes]
    keep_in = torch.ones(weights.shape[1], dtype=torch.bool)
    if use.reads is not None:
        keep_in = alive[use.reads]
    if bool(keep_in.all()) and bool(keep_out.all()):
        return
    constants = torch.where(use.absorbed & ~keep_in, use.constants, 0.0)
    if bool(constants.any()):
        weight, bias = module.get_parameter("weight"), module.bias
        added = weights.sum(2, dtype=torch.float64) @ constants
        if isinstance(bias, Tensor):
            added += bias.cpu()
        module.bias = nn.Parameter(added.to(weight), requires_grad=weight.requires_grad)
    _keep_rows(module, "weight", keep_out, layer.out_axis)
    _keep_rows(module, "weight", keep_in, layer.in_axis)
    if module.bias is not None:
        _keep_rows(module, "bias", keep_out)
    setattr(module, layer.inputs, int(keep_in.sum()))
    setattr(module, layer.outputs, int(keep_out.sum()))


@torch.no_grad()
def _shrink_per_unit(use: Use, alive: Tensor) -> None:
    """Remove the parameters and averages of dead units."""
    module, keep = use.module, alive[use.writes]
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    for name, value in tensors:
        if value.dim() and len(value) == len(keep):
            _keep_rows(module, name, keep)
    for attribute in PER_UNIT.get(type(module), ("out_channels",)):
        setattr(module, attribute, int(keep.sum()))
    if type(module) in LAYERS:
        assert use.reads is not None
        for attribute in ("in_channels", "groups"):
            setattr(module, attribute, int(alive[use.reads].sum()))


@torch.no_grad()
def _select_inputs(net: nn.Module, use: Use) -> None:
    """Replace a layer that does not read some of its inputs by a selection and a smaller layer."""
    module, layer = use.module, LAYERS[type(use.module)]
    read = (unit_weights(module, layer) != 0).any(2).any(0)
    names = [name for name, each in net.named_modules(remove_duplicate=False) if each is module]
    if bool(read.all()) or len(names) > 1:
        return
    if not bool(read.any()):
        read[0] = True  # a layer must have an input
    index = read.nonzero().flatten().to(module.get_parameter("weight").device)
    _keep_rows(module, "weight", read, layer.in_axis)
    setattr(module, layer.inputs, len(index))
    selection = SelectUnits(index, axis=-1 - layer.positions)
    net.set_submodule(names[0], nn.Sequential(selection, module).eval())


def _keep_rows(module: nn.Module, name: str, keep: Tensor, axis: int = 0) -> None:
    old: Tensor = getattr(module, name)
    new = old.detach().index_select(axis, keep.nonzero().flatten().to(old.device))
    if isinstance(old, nn.Parameter):
        setattr(module, name, nn.Parameter(new, requires_grad=old.requires_grad))
    else:
        setattr(module, name, new)


def _shrinkage(
    flow: UnitFlow, groups: Tensor, pinned: Mapping[int, str]
) -> tuple[ShrunkLayer, ...]:
    rows = []
    for use in flow.layers.values():
        layer = LAYERS[type(use.module)]
        left = unit_weights(use.module, layer).shape
        why = {pinned[unit] for unit in groups[use.writes].tolist() if unit in pinned}
        rows.append(
            ShrunkLayer(
                use.name,
                (len(use.absorbed), left[1]),
                (len(use.writes), left[0]),
                min(why, default=None),
            )
        )
    return tuple(rows)


def _unseen(flow: UnitFlow) -> list[ShrunkLayer]:
    """Return rows of the layers within modules that are one operation of the traced network."""
    rows = {}
    for node in flow.graph.nodes:
        leaf = flow.submodules[node.target] if node.op == "call_module" else nn.Module()
        for name, module in leaf.named_modules(prefix=str(node.target)):
            layer = LAYERS.get(type(module))
            if layer is not None and module is not leaf:
                outputs, inputs = unit_weights(module, layer).shape[:2]
                why = f"it is within {node.target} ({type(leaf).__name__}), which is kept whole"
                rows[name] = ShrunkLayer(name, (inputs, inputs), (outputs, outputs), why)
    return list(rows.values())


def _inexact(net: nn.Module, passes: Sequence[_Pass]) -> list[float]:
    """Return how far each output may move by rounding, beyond what its own size allows.

    An output near zero, whose terms cancel, is as inexact as these. So it is the most that an entry
    moves, less its own rounding, where each weight changes by its rounding.
    """
    generator = torch.Generator().manual_seed(1)
    found = [0.0] * len(_tensors(passes[0].outputs))
    for _ in range(_TRIALS):
        moved = copy.deepcopy(net)
        for weight in filter(_is_continuous, moved.parameters()):
            signs = torch.randint(0, 2, weight.shape, generator=generator).mul(2).sub(1)
            weight.mul_(1.0 + _rounding(weight) * signs.to(weight))
        for each in passes:
            others = _tensors(_run(moved, each.args, each.kwargs))
            for place, (one, two) in enumerate(zip(_tensors(each.outputs), others, strict=True)):
                if one.numel() and one.shape == two.shape:
                    beyond = (one - two).abs() - _rounding(one) * one.abs()
                    found[place] = max(found[place], float(beyond.nan_to_num(0.0, 0.0).max()))
    return found


def _check_same(expected: Any, found: Any, inexact: Iterable[float]) -> None:
    """Raise RuntimeError where outputs differ by more than rounding."""
    for one, two, limit in zip(_tensors(expected), _tensors(found), inexact, strict=True):
        if not _is_same(one, two, limit):
            raise RuntimeError(
                "shrink must not change the outputs, but they differ: the forward pass depends on "
                "a unit in a way that torch.fx does not show, such as by an edit in place of a "
                "tensor that is used again; write that operation without an edit in place"
            )


def _is_same(one: Tensor, two: Tensor, inexact: float) -> bool:
    if one.shape != two.shape:
        return False
    # Entries that are not finite have no rounding: they are equal.
    limit = inexact + _rounding(one) * one.abs().nan_to_num(0.0, 0.0)
    same = (one == two) | (one.isnan() & two.isnan()) | ((one - two).abs() <= limit)
    return bool(same.all())


def _rounding(tensor: Tensor) -> float:
    return _ROUNDING.get(tensor.dtype, 2e-2)


def _tensors(outputs: Any) -> list[Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(outputs)
    return [each for each in leaves if _is_continuous(each)]


def _is_continuous(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
