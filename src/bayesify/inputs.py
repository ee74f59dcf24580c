"""What a network is called with: one tensor, several, or several by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

__all__ = ["Inputs", "arguments_of", "batches_of", "check_rows", "count_data"]

#: One tensor, or the network's positional or keyword arguments, each with the N data first.
Inputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]


def arguments_of(inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """The network's positional and keyword arguments."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs), {}


def count_data(inputs: Inputs) -> int:
    """N, the number of data.

    Raises:
        TypeError: something is no tensor.
        ValueError: there are no data, or not equally many.

    Example:
        >>> import torch
        >>> count_data({"image": torch.zeros(5, 28, 28), "age": torch.zeros(5)})
        5
    """
    args, kwargs = arguments_of(inputs)
    for value in (*args, *kwargs.values()):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"inputs must be tensors with N data first, got {type(value).__name__}; use "
                "torch.as_tensor(x)"
            )
    lengths = {len(tensor) for tensor in (*args, *kwargs.values())}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"inputs must be tensors with the same number of data N > 0 first, got lengths "
            f"{sorted(lengths)}"
        )
    return lengths.pop()


def batches_of(
    inputs: Inputs, batch_size: int
) -> Iterator[tuple[tuple[Tensor, ...], dict[str, Tensor]]]:
    """The arguments of at most ``batch_size`` data at a time, for inputs that were counted.

    Example:
        >>> import torch
        >>> [len(args[0]) for args, _ in batches_of(torch.zeros(5, 3), 2)]
        [2, 2, 1]
    """
    args, kwargs = arguments_of(inputs)
    for start in range(0, count_data(inputs), batch_size):
        part = slice(start, start + batch_size)
        yield tuple(a[part] for a in args), {name: k[part] for name, k in kwargs.items()}


def check_rows(outputs: Tensor, num_data: int) -> None:
    """Whether the outputs of part of the data are a part of the outputs of all.

    Raises:
        ValueError: they have another number of rows.

    Example:
        >>> import torch
        >>> check_rows(torch.zeros(5, 10), num_data=5)
    """
    if outputs.dim() == 0 or len(outputs) != num_data:
        raise ValueError(
            "the network must return a row for each datum if not all data go through it at once, "
            f"got shape {tuple(outputs.shape)} for {num_data} data; pass batch_size=len(x) and no "
            "max_memory"
        )
