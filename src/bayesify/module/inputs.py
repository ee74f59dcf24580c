"""Inputs of a network: one tensor, a sequence of tensors, or a mapping of tensors by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

__all__ = ["WHOLE", "Inputs", "arguments_of", "batches_of", "check_rows", "count_examples"]

#: The batch size of inputs that are not divided, and whose lengths may differ.
WHOLE = sys.maxsize

#: One tensor, or the network's positional or keyword arguments; the first axis is N examples.
Inputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]


def arguments_of(inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the network's positional and keyword arguments.

    Raises:
        TypeError: the inputs are something else, such as a loader.
    """
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if not isinstance(inputs, Sequence):
        kind = type(inputs).__name__
        hint = (
            "pass the tensors themselves, which predict splits into batches, or predict batch by "
            "batch"
            if kind.endswith("Loader")
            else "use torch.as_tensor(x)"
        )
        raise TypeError(
            f"inputs must be tensors whose first axis is N examples, got {kind}; {hint}"
        )
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
    """
    args, kwargs = arguments_of(inputs)
    for value in (*args, *kwargs.values()):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"inputs must be tensors whose first axis is N examples, got "
                f"{type(value).__name__}; use torch.as_tensor(x)"
            )
    lengths = {len(tensor) for tensor in (*args, *kwargs.values())}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"inputs must be tensors with the same number of examples N > 0 first, got lengths "
            f"{sorted(lengths)}; where they are not rows of examples, as the edges of a graph, use "
            'batch_size="all"'
        )
    return lengths.pop()


def batches_of(
    inputs: Inputs, batch_size: int
) -> Iterator[tuple[tuple[Tensor, ...], dict[str, Tensor]]]:
    """Yield the arguments of at most ``batch_size`` examples at a time.

    Example:
        >>> import torch
        >>> [len(args[0]) for args, _ in batches_of(torch.zeros(5, 3), 2)]
        [2, 2, 1]
    """
    args, kwargs = arguments_of(inputs)
    if batch_size == WHOLE:
        yield args, kwargs
        return
    for start in range(0, count_examples(inputs), batch_size):
        part = slice(start, start + batch_size)
        yield tuple(a[part] for a in args), {name: k[part] for name, k in kwargs.items()}


def check_rows(outputs: Tensor, num_examples: int) -> None:
    """Check that a network returned one row for each example, so that batches can be joined.

    Raises:
        ValueError: the outputs have another number of rows.

    Example:
        >>> import torch
        >>> check_rows(torch.zeros(5, 10), num_examples=5)
    """
    if outputs.dim() == 0 or len(outputs) != num_examples:
        raise ValueError(
            "the network must return a row for each example if the inputs are split into batches, "
            f"got shape {tuple(outputs.shape)} for {num_examples} examples; pass "
            "batch_size=len(x) and no max_memory"
        )
