"""Units of a network: the layers that write and read them, and those that are constant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from bayesify.module.unit_operations import (
    edits_in_place,
    keeps_working,
    leaves_size_free,
    reads_other_size,
    sees_borders,
    shared_or_edited,
    split_by_unit,
    unit_axis,
)
from bayesify.module.unit_roles import (
    ELEMENTWISE,
    ELEMENTWISE_METHODS,
    LAYERS,
    MOVING,
    MOVING_METHODS,
    PER_UNIT,
    WITHIN_UNITS,
    is_depthwise,
    unit_weights,
)

__all__ = ["UnitFlow", "Units", "Use"]


@dataclass
class Units:
    """The units along one axis of a tensor.

    Attributes:
        axis: the axis, from 0; all else of the tensor belongs to the unit of its place there.
        ids: the number of the unit at each place, shape (C,).
        known: whether the tensor has one value there, whatever the network's input, shape (C,).
        constants: that value, float64, shape (C,); 0 where there is none.
    """

    axis: int
    ids: Tensor
    known: Tensor
    constants: Tensor


@dataclass
class Use:
    """A module's use of units, over all of its calls.

    Attributes:
        name: of the module.
        module: it.
        reads: the unit of each of its inputs; None where they cannot be removed.
        writes: the unit of each of its outputs.
        absorbed: the inputs whose constant may be added to the bias instead, shape (inputs,).
        constants: of these inputs, float64, shape (inputs,).
        known: which of its outputs are constant, shape (outputs,).
    """

    name: str
    module: nn.Module
    reads: Tensor | None
    writes: Tensor
    absorbed: Tensor
    constants: Tensor
    known: Tensor


@dataclass
class _Groups:
    """Units that are one, because an operation joins them; a forest of numbers."""

    parents: list[int] = field(default_factory=list)

    def new(self, count: int) -> Tensor:
        start = len(self.parents)
        self.parents += range(start, start + count)
        return torch.arange(start, start + count)

    def find(self, unit: int) -> int:
        while self.parents[unit] != unit:
            self.parents[unit] = unit = self.parents[self.parents[unit]]
        return unit

    def join(self, one: Tensor, two: Tensor) -> None:
        for first, second in zip(one.tolist(), two.tolist(), strict=True):
            self.parents[self.find(second)] = self.find(first)


class UnitFlow(fx.Interpreter):
    """Run a traced network on an example and follow its units from layer to layer.

    Attributes:
        layers: the uses of layers that read and write units, by module.
        per_unit: those of layers with parameters of each unit.
        pinned: why a unit cannot be removed, by its number.

    Args:
        graph: the traced network, in evaluation mode.
        names: the name of each of its modules.
    """

    def __init__(self, graph: fx.GraphModule, names: Mapping[nn.Module, str]) -> None:
        super().__init__(graph)
        self.layers: dict[nn.Module, Use] = {}
        self.per_unit: dict[nn.Module, Use] = {}
        self.pinned: dict[int, str] = {}
        self._names = names
        self._groups = _Groups()
        self._units: dict[fx.Node, Units] = {}
        self._edited = shared_or_edited(graph)

    def groups(self) -> tuple[Tensor, dict[int, str]]:
        """Return the group of each unit, shape (units,), and why a group cannot be removed."""
        groups = [self._groups.find(unit) for unit in range(len(self._groups.parents))]
        return torch.tensor(groups, dtype=torch.long), {
            groups[unit]: why for unit, why in reversed(self.pinned.items())
        }

    def run_node(self, node: fx.Node) -> Any:
        """Run one operation, and find the units of its result."""
        result = super().run_node(node)
        found = self._follow(node, result)
        if found is not None:
            self._units[node] = found
        return result

    def _follow(self, node: fx.Node, result: Any) -> Units | None:
        if node.op == "output":
            self._pin(node, "it is an output of the network")
            return None
        # Constants are real numbers.
        is_complex = isinstance(result, Tensor) and result.is_complex()
        role = "" if is_complex else self._role(node)
        if role == "layer" and isinstance(result, Tensor):
            return self._layer(node, result)
        operands = [each for each in node.all_input_nodes if each in self._units]
        if not operands:
            if role == "per unit":
                self._keep(self._module(node))
            return None
        if not isinstance(result, Tensor) and reads_other_size(
            node, self.env[operands[0]].dim(), self._units[operands[0]].axis
        ):
            return None
        found = None
        edits_shared = edits_in_place(node, self.submodules) and (
            any(len(each.users) > 1 for each in operands)
            or len(self._in_memory_of(node)) > len(operands)
        )
        if isinstance(result, Tensor) and not edits_shared:
            if role == "per unit":
                found = self._per_unit(node, operands, result)
            elif role == "elementwise":
                found = self._elementwise(node, operands, result)
            elif role == "moving":
                found = self._moved(node, operands)
        if found is None:
            self._pin(node, f"it is used by {self._described(node)}")
            if role == "per unit":
                self._keep(self._module(node))
        return found

    def _role(self, node: fx.Node) -> str:
        if node.op == "call_method":
            if node.target in ELEMENTWISE_METHODS:
                return "elementwise"
            return "moving" if node.target in MOVING_METHODS else ""
        if node.op == "call_function":
            if node.target in ELEMENTWISE:
                return "elementwise"
            return "moving" if node.target in MOVING else ""
        if node.op != "call_module":
            return ""
        module = self._module(node)
        kind = type(module)
        if module in self._edited:
            return ""
        if kind in ELEMENTWISE or (kind is nn.PReLU and module.num_parameters == 1):
            return "elementwise"
        if kind in MOVING:
            return "moving"
        if kind in PER_UNIT or (kind in LAYERS and is_depthwise(module)):
            return "per unit"
        return "layer" if kind in LAYERS and getattr(module, "groups", 1) == 1 else ""

    # ------------------------------------------------------------------------------ the roles

    def _layer(self, node: fx.Node, result: Tensor) -> Units:
        module = self._module(node)
        layer = LAYERS[type(module)]
        source = node.all_input_nodes[0]
        units = self._units.get(source)
        axis = result.dim() - 1 - layer.positions
        if units is not None and units.axis != axis:
            self._pin(node, f"it is not what {self._described(node)} multiplies by its weights")
            units = None
        weights = unit_weights(module, layer).double()
        used, sums = (weights != 0).any(2), weights.sum(2)
        absorbed, constants = torch.zeros(used.shape[1], dtype=torch.bool), sums.new_zeros(1)
        if units is not None:
            absorbed, constants = units.known, units.constants
            if sees_borders(module):
                absorbed = absorbed & (constants == 0.0)
        known = ~(used & ~absorbed).any(1)
        values = sums @ torch.where(absorbed, constants, 0.0)
        if isinstance(module.bias, Tensor):
            values = values + module.bias.detach().to(values)
        known &= values.isfinite()
        reads = None if units is None else units.ids
        use = self.layers.get(module)
        if use is None:
            ids = self._groups.new(len(used))
            constants = constants.expand(len(absorbed))
            use = Use(self._names[module], module, reads, ids, absorbed, constants, known)
            self.layers[module] = use
        else:  # another call
            if use.reads is not None and reads is not None:
                self._groups.join(use.reads, reads)
            else:
                self._pin_ids([each for each in (use.reads, reads) if each is not None], _INPUT)
                use.reads = None
            use.absorbed = use.absorbed & absorbed & (use.constants == constants)
            use.known = use.known & known
        return Units(axis, use.writes, known, torch.where(known, values, 0.0))

    def _per_unit(self, node: fx.Node, operands: Sequence[fx.Node], result: Tensor) -> Units | None:
        module, [source, *others] = self._module(node), operands
        units = self._units[source]
        layer = LAYERS.get(type(module))
        if others or units.axis != (result.dim() - 1 - layer.positions if layer else 1):
            return None
        example = self.env[source]
        shape = [-1 if axis == units.axis else 1 for axis in range(example.dim())]
        filled = units.constants.to(example).view(shape).expand_as(example).contiguous()
        by_unit = split_by_unit(module(filled), units.axis).cpu()
        first = by_unit[:, :1]
        uniform = torch.isclose(by_unit, first, rtol=1e-6, atol=1e-9).all(1)
        repeats = len(by_unit) // len(units.ids)
        ids = units.ids.repeat_interleave(repeats)
        known = units.known.repeat_interleave(repeats) & uniform & first[:, 0].isfinite()
        use = self.per_unit.get(module)
        if use is None:
            self.per_unit[module] = Use(
                self._names[module], module, units.ids, ids, units.known, units.constants, known
            )
        else:
            self._groups.join(use.writes, ids)
        return Units(
            units.axis, ids, known, torch.where(known, first[:, 0].to(units.constants), 0.0)
        )

    def _elementwise(
        self, node: fx.Node, operands: Sequence[fx.Node], result: Tensor
    ) -> Units | None:
        units = [self._units[each] for each in operands]
        # Axes from the end, as broadcasting aligns them.
        axes = {u.axis - self.env[each].dim() for u, each in zip(units, operands, strict=True)}
        sizes = {len(u.ids) for u in units}
        axis = result.dim() + min(axes)
        if len(axes) > 1 or len(sizes) > 1 or result.shape[axis] not in sizes:
            return None
        others = [
            self.env[each]
            for each in node.all_input_nodes
            if each not in operands and isinstance(self.env[each], Tensor)
        ]
        for other in others:
            place = other.dim() + min(axes)
            if place >= 0 and other.shape[place] != 1:
                return None
        for each in units[1:]:
            self._groups.join(units[0].ids, each.ids)
        # What else enters may differ in the next pass: a tensor, or a number such as x.size(0).
        alone = all(each in operands for each in node.all_input_nodes)
        known = torch.stack([u.known for u in units]).all(0) & alone
        constants = torch.zeros(len(known), dtype=torch.float64)
        if bool(known.any()):
            shape = [-1, *[1] * (-1 - min(axes))]
            filled = {
                each: u.constants.to(self.env[each]).view(shape)
                for each, u in zip(operands, units, strict=True)
            }
            values = self._again(node, filled).flatten().to(constants)
            known &= values.isfinite()
            constants = torch.where(known, values, 0.0)
        return Units(axis, units[0].ids, known, constants)

    def _moved(self, node: fx.Node, operands: Sequence[fx.Node]) -> Units | None:
        if not keeps_working(node):
            return None
        axis, dims = self._units[operands[0]].axis, self.env[operands[0]].dim()
        parts, sources, count = [], [], 0
        for each in node.all_input_nodes:
            tensor, units = self.env[each], self._units.get(each)
            if not isinstance(tensor, Tensor):
                continue
            if tensor.dim() != dims or (units is not None and units.axis != axis):
                return None
            if units is None:
                units = self._new_pinned(tensor.shape[axis], axis, _INPUT)
            count += len(units.ids)
            parts.append(units)
            sources.append(each)

        def numbered(numbers: Tensor) -> Tensor:
            """Return the result of the operation on the numbers of the units."""
            shape = [-1 if a == axis else 1 for a in range(dims)]
            split = numbers.split([len(units.ids) for units in parts])
            return self._again(
                node,
                {
                    each: own.view(shape).expand(self.env[each].shape).clone()
                    for each, own in zip(sources, split, strict=True)
                },
            )

        moved = numbered(torch.arange(1.0, count + 1, dtype=torch.float64))
        place = unit_axis(moved, count) if count > 1 else None
        if place is None or not leaves_size_free(node, place):
            return None
        if self._kind(node) in WITHIN_UNITS and (place != axis or moved.shape[axis] != count):
            return None
        # In another order, so that a result that mixes neighbours is seen.
        other = torch.zeros(count + 1, dtype=torch.float64)
        other[1:] = torch.randperm(count, generator=torch.Generator().manual_seed(0)) + 1.0
        if not torch.equal(numbered(other[1:]).round(), other[moved.round().long()]):
            return None
        by_unit = split_by_unit(moved, place)
        places = by_unit.amax(1).round().long()
        new = self._new_pinned(int((places == 0).sum()), axis, "it is padding")
        new.known[:] = True
        ids, known, constants = (
            torch.cat([getattr(u, name) for u in (new, *parts)])
            for name in ("ids", "known", "constants")
        )
        # Zeros that are added come first; the units of the operands follow.
        rows = places + len(new.ids) - 1
        rows[places == 0] = torch.arange(len(new.ids))
        has_border = (by_unit.round().long() != places[:, None]).any(1)
        known = known[rows] & (~has_border | (constants[rows] == 0.0))
        return Units(place, ids[rows], known, torch.where(known, constants[rows], 0.0))

    # ------------------------------------------------------------------------------ the rest

    def _again(self, node: fx.Node, filled: Mapping[fx.Node, Tensor]) -> Tensor:
        """Run an operation again, on other values of some operands."""

        def value(each: fx.Node) -> Any:
            return filled[each] if each in filled else self.env[each]

        args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
        result = getattr(self, node.op)(node.target, args, kwargs)
        assert isinstance(result, Tensor)
        return result

    def _new_pinned(self, count: int, axis: int, why: str) -> Units:
        ids = self._groups.new(count)
        self._pin_ids([ids], why)
        return Units(axis, ids, torch.zeros(count, dtype=torch.bool), torch.zeros(count).double())

    def _pin(self, node: fx.Node, why: str) -> None:
        """Keep all units that an operation uses; it may also edit their values."""
        for each in self._in_memory_of(node):
            units = self._units[each]
            self._pin_ids([units.ids], why)
            units.known = torch.zeros_like(units.known)

    def _in_memory_of(self, node: fx.Node) -> list[fx.Node]:
        """Return what shares memory with an operand and is used now or later, operands included."""
        alive = [each for each in self._units if each in self.env]
        memory = {each: self.env[each].untyped_storage().data_ptr() for each in alive}
        operands = {memory[each] for each in node.all_input_nodes if each in memory}
        return [each for each in alive if memory[each] in operands]

    def _keep(self, module: nn.Module) -> None:
        """Keep a module with parameters of each unit as it is, in its other calls too."""
        self._edited.add(module)
        if module in self.per_unit:
            self._pin_ids([self.per_unit[module].writes], _INPUT)

    def _pin_ids(self, ids: Sequence[Tensor], why: str) -> None:
        for unit in (unit for each in ids for unit in each.tolist()):
            self.pinned.setdefault(unit, why)

    def _kind(self, node: fx.Node) -> Any:
        return type(self._module(node)) if node.op == "call_module" else node.target

    def _module(self, node: fx.Node) -> nn.Module:
        found = self.submodules[str(node.target)]
        assert isinstance(found, nn.Module)
        return found

    def _described(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return f"{node.target} ({type(self._module(node)).__name__})"
        name = node.target if isinstance(node.target, str) else node.target.__name__
        return f"{name}()"


_INPUT = "it is an input of the network"
