"""One pass of a network for many weight samples, where it can run under ``torch.vmap``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.estimators.network_state import snapshot
from bayesify.estimators.out_of_memory import is_out_of_memory
from bayesify.module.pass_memory import UnfusedAttention

__all__ = ["in_one_pass"]


def in_one_pass(net: nn.Module, run: Callable[..., Tensor], *stacked: Any) -> Tensor | None:
    """Return what a function gives for each row of stacked tensors, or None if vmap fails.

    Args:
        net: the network that the function runs. What a failed pass has changed of its buffers and
            of the states of random generators is restored; so are buffers that the pass replaced,
            which would have a value for each row.
        run: a function of one row of each argument.
        stacked: tensors, or nested containers of such, whose first dimension is the rows.

    Raises:
        RuntimeError: memory is exhausted.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> rows = torch.zeros(3, 1, 2)
        >>> in_one_pass(layer, lambda w: nn.functional.linear(torch.ones(4, 2), w), rows).shape
        torch.Size([3, 4, 1])
        >>> in_one_pass(layer, lambda w: w if float(w.sum()) > 0 else -w, rows)
    """
    undo = snapshot(net)
    buffers = [(module, dict(module._buffers)) for module in net.modules()]  # None among them
    try:
        with UnfusedAttention():
            outputs: Tensor = torch.vmap(run)(*stacked)
    except Exception as error:
        # The network may fail under vmap with any error. The caller then runs it row by row, and
        # errors that are not due to vmap are raised again.
        undo()
        if is_out_of_memory(error):
            raise
        return None
    if any(
        each is not before.get(name)
        for module, before in buffers
        for name, each in module._buffers.items()
    ):
        undo()
    return outputs
