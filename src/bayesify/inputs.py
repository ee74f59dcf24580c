"""What a network is called with: one tensor, several, or several by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

__all__ = ["Inputs", "arguments_of", "batches_of"]

#: One tensor, or the network's positional or keyword arguments, each with the N data first.
Inputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]


def arguments_of(inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """The network's positional and keyword arguments."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs), {}


def batches_of(
    inputs: Inputs, batch_size: int
) -> Iterator[tuple[tuple[Tensor, ...], dict[str, Tensor]]]:
    """The arguments of at most ``batch_size`` data at a time.

    Raises:
        TypeError: something is no tensor.
        ValueError: ``batch_size`` is below 1, or there are no data, or not equally many.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
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
    for start in range(0, lengths.pop(), batch_size):
        part = slice(start, start + batch_size)
        yield tuple(a[part] for a in args), {name: k[part] for name, k in kwargs.items()}
