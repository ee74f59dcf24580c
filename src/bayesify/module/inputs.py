"""Inputs of a network: one tensor, a sequence or a mapping of tensors, or a loader of these."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

__all__ = [
    "PLAIN",
    "WHOLE",
    "Inputs",
    "are_divisible",
    "arguments_of",
    "batch_size_of",
    "batches_of",
    "check_names",
    "check_not_copied",
    "check_output_rows",
    "count_examples",
    "inputs_of",
    "num_batches",
    "without_targets",
]

#: The batch size of inputs that are not divided, and whose lengths may differ.
WHOLE = sys.maxsize

#: One tensor, or the network's positional or keyword arguments; the first axis is N examples. A
#: keyword argument may also be None, a number, a flag or text, the same for all examples.
Inputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]

_T = TypeVar("_T")

#: What a keyword argument may be besides a tensor.
PLAIN = (bool, int, float, str, type(None))

#: Samplers that bring the examples in another order than the data set's, or not all of them.
_REORDERING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


def inputs_of(
    source: Inputs | Iterable[Any],
    device: torch.device | None = None,
    net: nn.Module | None = None,
) -> Inputs:
    """Return inputs, or those of all minibatches of a loader, joined.

    Args:
        source: inputs, or a loader, which has a ``batch_size`` and is iterable, such as torch's
            ``DataLoader``. Its minibatches are inputs alone, pairs (inputs, targets), or mappings;
            targets and "labels" are left out.
        device: where a loader's tensors are moved, and other tensors of the CPU; None leaves them
            where they are.
        net: the network that they are for, by which the names of a mapping are checked.

    Raises:
        TypeError: a mapping has a name that is no argument of the network.
        ValueError: the loader shuffles, may drop the last examples, brings nothing, or minibatches
            of different shapes or with different arguments that are no tensors.

    Example:
        >>> x, y = torch.arange(6.0).reshape(3, 2), torch.zeros(3)
        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2)
        >>> inputs_of(loader).shape
        torch.Size([3, 2])
    """
    if isinstance(source, Tensor | Sequence | Mapping) or not hasattr(source, "batch_size"):
        if net is not None:
            check_names(net, source)
        moved: Inputs = _moved(source, device)  # arguments_of reports what is neither
        return moved
    batch_sampler = getattr(source, "batch_sampler", None)
    owners = (source, batch_sampler)
    samplers = (getattr(owner, "sampler", None) for owner in owners)
    if getattr(source, "shuffle", False) or any(isinstance(s, _REORDERING) for s in samplers):
        raise ValueError(
            "a loader of what is predicted must keep the order of the examples, got one that "
            "shuffles; make it with shuffle=False"
        )
    if not getattr(source, "in_order", True) and getattr(source, "num_workers", 0) > 1:
        raise ValueError(
            "a loader of what is predicted must keep the order of the examples, got one whose "
            "workers bring them as they are ready; make it with in_order=True"
        )
    if any(getattr(owner, "drop_last", False) and _drops(owner) for owner in owners):
        raise ValueError(
            "a loader of what is predicted must bring every example, got one that drops the last "
            "ones, or may drop them; make it with drop_last=False"
        )
    parts = [without_targets(minibatch) for minibatch in source]
    if not parts:
        raise ValueError("a loader of what is predicted must bring a minibatch, got none")
    if net is not None:
        check_names(net, parts[0])

    def join(*tensors: Any) -> Any:
        if isinstance(tensors[0], np.ndarray):
            raise _wrong_type(tensors[0])
        if not isinstance(tensors[0], Tensor):
            if any(each != tensors[0] for each in tensors):
                raise ValueError(
                    "an argument that is no tensor must be the same in all minibatches of a loader "
                    f"of what is predicted, got {tensors[0]!r} and others; predict each by itself"
                )
            return tensors[0]
        shapes = {tuple(each.shape[1:]): None for each in tensors}
        if len(shapes) > 1:
            raise ValueError(
                "the minibatches of a loader of what is predicted must have one shape but for "
                f"their sizes, got {' and '.join(map(str, list(shapes)[:2]))}; pad all to the same "
                "length, or predict each minibatch by itself"
            )
        joined = torch.cat(tensors)
        return joined if device is None else joined.to(device)

    joined: Inputs = tree_map(join, parts[0], *parts[1:])
    return joined


def _drops(loader: Any) -> bool:
    """Return whether a loader with ``drop_last`` drops examples, or their number is unknown."""
    try:
        return bool(len(loader.sampler) % loader.batch_size)
    except (AttributeError, TypeError):
        return True


def _moved(source: Any, device: torch.device | None) -> Any:
    """Return inputs with the CPU's on the device; others stay, for a network of several GPUs."""
    if device is None or device.type == "cpu":
        return source
    return tree_map_only(
        Tensor, lambda each: each.to(device) if each.device.type == "cpu" else each, source
    )


def without_targets(minibatch: Any) -> Any:
    """Return the inputs of a minibatch: itself, the first of a pair, or a mapping less its labels.

    Raises:
        ValueError: it is none of these.

    Example:
        >>> without_targets((torch.ones(2), ["a", "b"]))
        tensor([1., 1.])
    """
    if isinstance(minibatch, Tensor):
        return minibatch
    if isinstance(minibatch, Mapping):
        return {name: each for name, each in minibatch.items() if name != "labels"}
    if isinstance(minibatch, Sequence) and 1 <= len(minibatch) <= 2:
        return minibatch[0]
    raise ValueError(
        "a minibatch must be inputs, a pair (inputs, targets) or a mapping, got "
        f"{type(minibatch).__name__} of {len(minibatch) if isinstance(minibatch, Sequence) else 1}"
        "; several inputs are one tuple: ((x, z), y)"
    )


def check_names(net: nn.Module, inputs: object) -> None:
    """Check that the names of a mapping of inputs are arguments of a network's ``forward``.

    A sequence of inputs must not be the rows of one argument.

    Raises:
        TypeError: a name is not, or a sequence has tensors of one shape for more arguments than
            there are.

    Example:
        >>> check_names(nn.Linear(3, 2), {"x": torch.zeros(5, 3)})
        Traceback (most recent call last):
        TypeError: a mapping of inputs must have names that are arguments of Linear.forward, ...
    """
    if isinstance(inputs, Tensor) or net._forward_pre_hooks:  # a hook may rename them
        return
    if isinstance(inputs, Sequence):
        _check_not_rows(net, inputs)
    if not isinstance(inputs, Mapping):
        return
    taken = inspect.signature(net.forward).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values()):
        return
    unknown = [str(name) for name in inputs if name not in taken]
    if unknown:
        raise TypeError(
            f"a mapping of inputs must have names that are arguments of {type(net).__name__}."
            f"forward, {', '.join(taken)}, got {', '.join(unknown)}; rename or drop them in the "
            'loader\'s collate_fn (the targets are under "labels"), or let it return pairs '
            "(inputs, targets)"
        )


def _check_not_rows(net: nn.Module, inputs: Sequence[Any]) -> None:
    if len(inputs) < 2 or not all(isinstance(each, Tensor) for each in inputs):
        return
    taken = [each.kind for each in inspect.signature(net.forward).parameters.values()]
    kinds = inspect.Parameter
    most = sum(each in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD) for each in taken)
    if kinds.VAR_POSITIONAL in taken or len(inputs) <= most:
        return
    if len({each.shape for each in inputs}) == 1:
        raise TypeError(
            f"a sequence of inputs must be the arguments of {type(net).__name__}.forward, which "
            f"takes {most}, got {len(inputs)} tensors; for rows of examples use torch.stack(x)"
        )


def check_not_copied(inputs: object, targets: Tensor) -> None:
    """Check that the targets of a language model are not the tokens that it reads.

    The collators of Hugging Face give such labels, since its models shift them themselves.

    Raises:
        ValueError: every target that counts is the input token of its own position.

    Example:
        >>> ids = torch.tensor([[4, 7, 9]])
        >>> check_not_copied({"input_ids": ids}, ids)
        Traceback (most recent call last):
        ValueError: labels must be the tokens that follow, got those of input_ids themselves, ...
    """
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if not isinstance(ids, Tensor) or ids.shape != targets.shape or targets.is_floating_point():
        return
    counts = targets >= 0  # others are ignored
    if bool(counts.any()) and torch.equal(ids[counts], targets[counts]):
        raise ValueError(
            "labels must be the tokens that follow, got those of input_ids themselves, which a "
            "network learns to copy; shift them in the collate_fn of the loader: "
            'labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)'
        )


def arguments_of(inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the network's positional and keyword arguments.

    Raises:
        TypeError: the inputs are something else.
    """
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, PackedSequence):  # a tuple of tensors, but one argument
        packed: tuple[Any, ...] = (inputs,)
        return packed, {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if not isinstance(inputs, Sequence):
        raise _wrong_type(inputs)
    return tuple(inputs), {}


def count_examples(inputs: Inputs) -> int:
    """Return N, the number of examples.

    Raises:
        TypeError: an input is not a tensor.
        ValueError: there are no examples, or the tensors have different lengths.

    Example:
        >>> import torch
        >>> count_examples({"image": torch.zeros(5, 28, 28), "age": torch.zeros(5)})
        5
        >>> count_examples({"image": torch.zeros(5, 28, 28), "return_dict": False})
        5
    """
    if isinstance(inputs, Tensor) and inputs.dim() and len(inputs):  # the usual case, at once
        return len(inputs)
    args, kwargs = arguments_of(inputs)
    tensors = [*args, *(value for value in kwargs.values() if not isinstance(value, PLAIN))]
    if kwargs and not tensors:
        raise _wrong_type(next(iter(kwargs.values())))
    for value in tensors:
        if len(args) > 1 and isinstance(value, PLAIN):
            by_name = "{'x': x, 'mask': None}"
            raise _wrong_type(value, f"give all by the names of forward's arguments: {by_name}")
        if isinstance(value, PackedSequence):
            raise _wrong_type(value, 'bnn.predict and acquire take it with batch_size="all"')
        if not isinstance(value, Tensor):
            raise _wrong_type(value)
        if not value.dim():
            raise ValueError(
                "inputs must be tensors whose first axis is N examples, got a single number; make "
                "it a row, x.reshape(1, -1)"
            )
    lengths = {len(tensor) for tensor in tensors}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"inputs must be tensors with the same number of examples N > 0 first, got lengths "
            f"{sorted(lengths)}; where they are not rows of examples, as the edges of a graph, "
            'bnn.predict and acquire take them with batch_size="all"'
        )
    return lengths.pop()


def batch_size_of(inputs: Inputs) -> Literal["all"] | None:
    """Return the ``batch_size`` that inputs of training need: "all" where they are not divided.

    Example:
        >>> nodes, edges = torch.zeros(5, 4), torch.zeros(9, 2)
        >>> batch_size_of((nodes, edges)), batch_size_of(nodes)
        ('all', None)
    """
    try:
        count_examples(inputs)
    except (TypeError, ValueError):
        return "all"
    return None if are_divisible(inputs) else "all"


def are_divisible(inputs: Inputs) -> bool:
    """Return whether some rows can be taken out: not of sparse, jagged or packed inputs.

    Example:
        >>> import torch
        >>> are_divisible(torch.zeros(5, 3)), are_divisible(torch.zeros(5, 3).to_sparse())
        (True, False)
    """
    args, kwargs = arguments_of(inputs)
    values = (*args, *kwargs.values())
    tensors = [each for each in values if isinstance(each, Tensor)]
    return not (
        any(isinstance(each, PackedSequence) for each in values)
        or any(each.is_nested or each.layout is not torch.strided for each in tensors)
    )


def _wrong_type(value: object, mend: str = "use torch.as_tensor(x), or a DataLoader") -> TypeError:
    return TypeError(
        "inputs must be tensors whose first axis is N examples, or a loader with a batch_size, got "
        f"{type(value).__name__}; {mend}"
    )


def batches_of(
    inputs: Inputs, batch_size: int
) -> Iterator[tuple[tuple[Tensor, ...], dict[str, Tensor]]]:
    """Yield the arguments of at most ``batch_size`` examples at a time.

    Raises:
        ValueError: there are more examples, and an input is sparse or jagged.

    Example:
        >>> import torch
        >>> [len(args[0]) for args, _ in batches_of(torch.zeros(5, 3), 2)]
        [2, 2, 1]
    """
    args, kwargs = arguments_of(inputs)
    if batch_size == WHOLE:
        yield args, kwargs
        return
    if not are_divisible(inputs):
        if batch_size < count_examples(inputs):
            raise ValueError(
                "sparse and jagged inputs cannot be divided into batches, got a batch_size of "
                f'{batch_size}; use batch_size="all"'
            )
        yield args, kwargs
        return
    for start in range(0, count_examples(inputs), batch_size):
        part = slice(start, start + batch_size)
        named = {n: k[part] if isinstance(k, Tensor) else k for n, k in kwargs.items()}
        yield tuple(a[part] for a in args), named


def num_batches(inputs: Inputs, batch_size: int) -> int:
    """Return the number of batches of :func:`batches_of`.

    Example:
        >>> import torch
        >>> num_batches(torch.zeros(5, 3), 2), num_batches(torch.zeros(5, 3), WHOLE)
        (3, 1)
    """
    return 1 if batch_size == WHOLE else ceil(count_examples(inputs) / batch_size)


def check_output_rows(outputs: Tensor, num_examples: int, first: Tensor | None = None) -> None:
    """Check that a network returned one row for each example, so that batches can be joined.

    Args:
        outputs: of a batch.
        num_examples: in the batch.
        first: the outputs of the first batch, whose rows must have the same shape.

    Raises:
        ValueError: the outputs have another number of rows, or rows of another shape.

    Example:
        >>> import torch
        >>> check_output_rows(torch.zeros(5, 10), num_examples=5)
    """
    if outputs.dim() == 0 or len(outputs) != num_examples:
        raise ValueError(
            "the network must return a row for each example if the inputs are split into batches, "
            f"got shape {tuple(outputs.shape)} for {num_examples} examples; pass "
            "batch_size=len(x) and no max_memory"
        )
    if first is not None and outputs.shape[1:] != first.shape[1:]:
        raise ValueError(
            "the network must return rows of one shape if the inputs are split into batches, got "
            f"{tuple(first.shape[1:])} and {tuple(outputs.shape[1:])}; let it pad its outputs to "
            'one length, or pass batch_size="all"'
        )
