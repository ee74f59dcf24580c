"""Questions about a single operation of a traced network, and about where units lie in a tensor."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from bayesify.module.unit_roles import ELEMENTWISE

__all__ = [
    "edits_in_place",
    "keeps_working",
    "leaves_size_free",
    "reads_other_size",
    "sees_borders",
    "shared_or_edited",
    "split_by_unit",
    "unit_axis",
]


def shared_or_edited(graph: fx.GraphModule) -> set[nn.Module]:
    """Return modules whose parameters are used elsewhere, or that have hooks.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        >>> net[1].weight = net[0].weight
        >>> len(shared_or_edited(fx.symbolic_trace(net)))
        2
    """
    read = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    owners: dict[int, set[nn.Module]] = {}
    found = set()
    for name, module in graph.named_modules(remove_duplicate=False):
        for own, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(module)
            if f"{name}.{own}" in read:
                found.add(module)
        if module._forward_hooks or module._forward_pre_hooks:
            found.add(module)
    return found | {each for those in owners.values() if len(those) > 1 for each in those}


def edits_in_place(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether an operation writes to its operand.

    Example:
        >>> net = nn.Sequential(nn.ReLU(), nn.ReLU(inplace=True))
        >>> _, first, second, _ = fx.symbolic_trace(net).graph.nodes
        >>> [edits_in_place(node, dict(net.named_modules())) for node in (first, second)]
        [False, True]
    """
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    name = node.target if isinstance(node.target, str) else node.target.__name__
    return (
        name.endswith("_")
        or node.target in (operator.iadd, operator.isub, operator.imul, operator.itruediv)
        or bool(node.kwargs.get("inplace", False))
        or (node.target in ELEMENTWISE and any(each is True for each in node.args))
    )


def sees_borders(module: nn.Module) -> bool:
    """Return whether a constant input gives another output at the borders than inside.

    Example:
        >>> sees_borders(nn.Conv1d(3, 3, 3)), sees_borders(nn.Conv1d(3, 3, 3, padding=1))
        (False, True)
    """
    if type(module) is nn.Linear:
        return False
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return True
    padding = module.padding
    padded = any(padding) if isinstance(padding, tuple) else padding == "same"
    return bool(padded and module.padding_mode == "zeros")


def keeps_working(node: fx.Node) -> bool:
    """Return whether the arguments of a moving operation hold for fewer units, too.

    Example:
        >>> _, one, all_axes, _ = fx.symbolic_trace(lambda x: x.squeeze(1).squeeze()).graph.nodes
        >>> keeps_working(one), keeps_working(all_axes)
        (True, False)
    """
    if node.target in ("squeeze", torch.squeeze):  # may drop the axis of a single unit
        return len(node.args) + len(node.kwargs) > 1
    if node.target is F.pad:
        given = dict(zip(("mode", "value"), node.args[2:], strict=False)) | node.kwargs
        return given.get("mode", "constant") == "constant" and not given.get("value")
    if node.target is operator.getitem:
        index = node.args[1]
        return all(
            isinstance(each, slice | int) or each is None or each is Ellipsis
            for each in (index if isinstance(index, tuple | list) else (index,))
        )
    return True


def reads_other_size(node: fx.Node, dims: int, axis: int) -> bool:
    """Return whether a query of a tensor does not depend on its number of units, along an axis.

    Example:
        >>> _, size, dtype, _ = fx.symbolic_trace(lambda x: (x.size(1), x.dtype)).graph.nodes
        >>> [reads_other_size(node, dims=2, axis=1) for node in (size, dtype)]
        [False, True]
    """
    if node.op == "call_method" and node.target in ("dim", "ndimension"):
        return True
    if node.op == "call_method" and node.target == "size" and node.args[1:]:
        return isinstance(node.args[1], int) and node.args[1] % dims != axis
    is_shape = node.op == "call_method" and node.target == "size"
    if node.op == "call_function" and node.target is getattr:
        if node.args[1] in ("ndim", "dtype", "device"):
            return True
        is_shape = node.args[1] == "shape"
    return is_shape and all(
        user.target is operator.getitem
        and isinstance(user.args[1], int)
        and user.args[1] % dims != axis
        for user in node.users
    )


def leaves_size_free(node: fx.Node, axis: int) -> bool:
    """Return whether a reshape gives no fixed size for the axis of the units.

    Example:
        >>> _, free, fixed, _ = fx.symbolic_trace(lambda x: x.view(2, -1).view(2, 8)).graph.nodes
        >>> leaves_size_free(free, 1), leaves_size_free(fixed, 1)
        (True, False)
    """
    if node.target not in ("view", "reshape", torch.reshape):
        return True
    sizes = node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = tuple(sizes[0])
    return bool(axis < len(sizes) and sizes[axis] == -1)


def split_by_unit(tensor: Tensor, axis: int) -> Tensor:
    """Return what belongs to each unit along an axis, shape (units, ...).

    Example:
        >>> split_by_unit(torch.zeros(2, 5, 3), axis=1).shape
        torch.Size([5, 6])
    """
    return tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1)


def unit_axis(places: Tensor, count: int) -> int | None:
    """Return the axis along which all of 1, ..., count lie, each alone or with added zeros.

    Example:
        >>> unit_axis(torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 0.0]]), 3)
        1
    """
    rounded = places.round()
    if not torch.allclose(places, rounded, rtol=0.0, atol=1e-6):
        return None
    for axis in range(places.dim()):
        by_unit = split_by_unit(rounded, axis)
        largest = by_unit.amax(1, keepdim=True)
        if bool(((by_unit == largest) | (by_unit == 0)).all()):
            found = largest.flatten().unique()
            if torch.equal(found[found > 0], torch.arange(1, count + 1).to(found)):
                return axis
    return None
