"""Number of threads for a block, and one thread for small passes, which more make no faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bayesify.module.inputs import WHOLE, Inputs, arguments_of, count_examples
from bayesify.module.random_network import RandomNetwork

__all__ = ["num_threads", "one_thread_if_small", "rows_in_pass", "rows_of"]

# Multiply-adds of a pass; docs/benchmarks.md has the measurements. Below, two threads save a fifth
# of the time of a step on an idle machine; where another program uses a core they wait for each
# other in every operation, and take two to five times as long.
_SMALL = 2**25


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Use this number of threads within the block; restore the number afterwards.

    The number is the process's: another thread of Python that uses PyTorch for the first time
    meanwhile keeps it, as PyTorch has no number of threads for one of them alone.

    Example:
        >>> with num_threads(1):
        ...     torch.get_num_threads()
        1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_thread_if_small(network: RandomNetwork, num_rows: float) -> Iterator[None]:
    """Use one thread within the block if each pass is small; restore the number afterwards.

    Passes are small by the multiply-adds of a multilayer perceptron. Of other networks these are
    not known, so that nothing is changed. Nor does the machine's load matter: the number of threads
    can change the last bit of a result, and must be the same in every run.

    Args:
        network: the network.
        num_rows: see :func:`rows_of`, times weight samples, times networks.

    Example:
        >>> from bayesify.distributions.posteriors import Delta
        >>> network = RandomNetwork(nn.Linear(3, 2), posterior=Delta)
        >>> with one_thread_if_small(network, num_rows=100):
        ...     torch.get_num_threads()
        1
    """
    if (
        torch.get_num_threads() == 1
        or num_rows * network.layout.num_weights >= _SMALL
        or num_rows * _num_weights(network) >= _SMALL
        or not _is_perceptron(network)
    ):
        yield
        return
    with num_threads(1):
        yield


def rows_of(inputs: Inputs) -> int:
    """Return the number of rows that a linear layer sees: examples, times positions or tokens.

    Example:
        >>> rows_of(torch.zeros(8, 3)), rows_of({"ids": torch.zeros(8, 5, dtype=torch.long)})
        (8, 40)
    """
    args, kwargs = arguments_of(inputs)
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    return max((_rows(each) for each in tensors), default=0)


def rows_in_pass(inputs: Inputs, batch_size: int) -> float:
    """Return the rows of a pass with some of the examples, or with all.

    Example:
        >>> rows_in_pass(torch.zeros(8, 3), 2), rows_in_pass(torch.zeros(8, 3), WHOLE)
        (2.0, 8)
    """
    if batch_size == WHOLE:
        return rows_of(inputs)
    return batch_size * rows_of(inputs) / count_examples(inputs)


def _rows(tensor: Tensor) -> int:
    has_features = tensor.is_floating_point() and tensor.dim() > 1
    return tensor.numel() // max(1, tensor.shape[-1]) if has_features else tensor.numel()


def _num_weights(network: RandomNetwork) -> int:
    return network.layout.num_weights + sum(each.numel() for each in network.net.parameters())


def _is_perceptron(network: RandomNetwork) -> bool:
    """Whether all weights are on the CPU, and each matrix belongs to a linear layer."""
    layout, net = network.layout, network.net
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    shapes |= {name: parameter.shape for name, parameter in net.named_parameters()}
    return network.posterior.mean.device.type == "cpu" and all(
        isinstance(net.get_submodule(name.rpartition(".")[0]), nn.Linear)
        for name, shape in shapes.items()
        if prod(shape) > max(shape, default=1)
    )
