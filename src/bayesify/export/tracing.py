"""Trace a network for any number of examples, and compare its exported form with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import UserError, UserErrorType
from torch.export import Dim, ExportedProgram

from bayesify.estimators.network_state import evaluation_mode
from bayesify.export.report import ExportError, largest_difference
from bayesify.module.edited_inputs import copied
from bayesify.module.inputs import Inputs, arguments_of, count_examples
from bayesify.module.random_network import RandomNetwork

__all__ = ["TracedNetwork", "first_line"]

#: Examples of the traced pass: 0 and 1 would be taken for constants.
_TRACED_ROWS = 3
#: The largest difference from PyTorch's outputs, as :func:`largest_difference` measures it.
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class TracedNetwork:
    """A network in evaluation mode and the program that was traced from it.

    Args:
        named: the network, whose outputs have names.
        program: the program.
        example: tensors of N examples, one for each input.
        inputs: names of the inputs, positional ones first.
        outputs: names of the outputs.

    Example:
        >>> traced = TracedNetwork.of(nn.Linear(3, 2), torch.zeros(5, 3))
        >>> traced.inputs, traced.outputs
        (('input',), ('output',))
        >>> traced.compare(lambda x: list(traced.program.module()(x).values())) < 1e-6
        True
    """

    named: _NamedOutputs
    program: ExportedProgram
    example: tuple[Tensor, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, net: nn.Module, example: Inputs) -> TracedNetwork:
        """Trace a network, or its copy on the CPU where it is on a GPU.

        Raises:
            ExportError: it cannot be traced, or does not return tensors.
            TypeError: the network is random, or the example does not consist of tensors.
            ValueError: there is no example, or their numbers differ between inputs.
        """
        if not isinstance(net, nn.Module):
            raise TypeError(
                f"only an nn.Module can be exported, got {type(net).__name__}; of an ensemble "
                "export each member, of MC dropout the network without it"
            )
        if isinstance(net, RandomNetwork):
            raise TypeError(
                f"a {type(net).__name__} draws new weights at each call; export bf.freeze(bnn), or "
                "bnn.to_module() for the mean weights"
            )
        count = count_examples(example)
        args, kwargs = arguments_of(example)
        plain = {name: each for name, each in kwargs.items() if not isinstance(each, Tensor)}
        names = tuple(name for name in kwargs if name not in plain)
        named = _NamedOutputs(_on_cpu(net), names, plain)
        tensors = tuple(each.cpu() for each in (*args, *(kwargs[name] for name in names)))
        rows = [row % count for row in range(_TRACED_ROWS)]
        some = tuple(tensor[rows] for tensor in tensors)
        shapes = ({0: Dim.DYNAMIC},) * len(some)
        try:
            with evaluation_mode(named), torch.no_grad():
                outputs = tuple(named(*copied(some)))
        except ExportError:
            raise
        except Exception as error:  # of the user's network
            what = "the example"
            if _runs(named, tensors):
                what = f"{_TRACED_ROWS} of the examples, and an exported one takes any number"
            raise ExportError(f"the network fails on {what}: {first_line(error)}") from error
        try:
            with evaluation_mode(named), torch.no_grad():
                program = torch.export.export(named, some, dynamic_shapes=(shapes,), strict=False)
        except UserError as error:
            if error.error_type is not UserErrorType.CONSTRAINT_VIOLATION:
                raise ExportError(f"the network cannot be traced: {first_line(error)}") from error
            raise ExportError(
                "the network cannot be traced: its forward pass fixes the number of examples, as "
                "len(x), int(x.size(0)) and a loop over them do; use x.shape[0] as it is"
            ) from error
        except Exception as error:  # PyTorch raises errors of many kinds
            raise ExportError(f"the network cannot be traced: {first_line(error)}") from error
        inputs = ("input",) if len(args) == 1 else tuple(f"input_{i}" for i in range(len(args)))
        return cls(named, program, tensors, (*inputs, *names), outputs)

    @property
    def max_examples(self) -> int | None:
        """The largest number of examples for which the program holds; None for any."""
        names = self.program.graph_signature.user_inputs
        limits = []
        for node in self.program.graph.nodes:
            if node.op == "placeholder" and node.name in names:
                count = node.meta["val"].shape[0]
                symbol = count.node.expr if isinstance(count, torch.SymInt) else None
                if symbol in self.program.range_constraints:
                    limits.append(self.program.range_constraints[symbol].upper)
        return min((int(limit) for limit in limits if limit.is_Integer), default=None)

    def compare(self, run: Callable[..., Sequence[Tensor]]) -> float:
        """Run an exported form on all examples, on the first alone, and on more, and compare.

        More are 2 N + 1, so that a branch on the number of examples is noticed.

        Args:
            run: runs it on tensors in the order of the inputs.

        Returns:
            The largest difference, see :func:`largest_difference`.

        Raises:
            ExportError: it fails, or an output has another shape.
        """
        differences = []
        count = len(self.example[0])
        for size in (count, 1, 2 * count + 1):
            rows = torch.arange(size) % count
            tensors = [tensor[rows] for tensor in self.example]
            with evaluation_mode(self.named), torch.no_grad():
                try:
                    expected = self.named(*copied(tensors))
                except Exception:  # a network may have a limit, such as a table of positions
                    if size > count:
                        continue
                    raise
            try:
                with torch.no_grad():
                    found = run(*copied(tensors))
            except Exception as error:  # PyTorch and ONNX Runtime raise errors of many kinds
                raise ExportError(
                    f"the exported network fails on {len(tensors[0])} examples: {first_line(error)}"
                ) from error
            differences.append(largest_difference(found, expected))
        return max(differences)

    def check(self, run: Callable[..., Sequence[Tensor]]) -> float:
        """Return what :meth:`compare` returns.

        Raises:
            ExportError: as :meth:`compare`; or the outputs differ by more than 1e-5.
        """
        difference = self.compare(run)
        if difference > _TOLERANCE:
            half = {torch.float16, torch.bfloat16} & {each.dtype for each in self.example}
            hint = f"; export the network after .float(), not in {half.pop()}" if half else ""
            raise ExportError(
                f"the exported network's outputs must be within {_TOLERANCE:g} of PyTorch's, got a "
                f"difference of {difference:.2g}; nothing is written{hint}"
            )
        return difference


class _NamedOutputs(nn.Module):
    """A network whose inputs are positional, and whose outputs are tensors by name.

    Its arguments that are no tensors have one value.
    """

    def __init__(self, net: nn.Module, keywords: tuple[str, ...], plain: Mapping[str, Any]) -> None:
        super().__init__()
        self.net, self.keywords, self.plain = net, keywords, plain

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        first = len(tensors) - len(self.keywords)
        kwargs = dict(zip(self.keywords, tensors[first:], strict=True))
        result = self.net(*tensors[:first], **kwargs, **self.plain)
        if isinstance(result, Tensor):
            return {"output": result}
        if hasattr(result, "_asdict"):
            result = result._asdict()
        if isinstance(result, Mapping) and all(isinstance(v, Tensor) for v in result.values()):
            return dict(result)
        raise ExportError(
            "a network to export must return a tensor, or tensors by name, got "
            f"{type(result).__name__}"
        )


def _runs(net: nn.Module, tensors: tuple[Tensor, ...]) -> bool:
    try:
        with evaluation_mode(net), torch.no_grad():
            net(*copied(tensors))
    except Exception:  # of the user's network
        return False
    return True


def _on_cpu(net: nn.Module) -> nn.Module:
    held = (*net.parameters(), *net.buffers())
    return net if all(each.is_cpu for each in held) else copy.deepcopy(net).to("cpu")


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its kind if there is none.

    Example:
        >>> first_line(RuntimeError(chr(10) + " the reason" + chr(10) + "and a call stack"))
        'the reason'
    """
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)
