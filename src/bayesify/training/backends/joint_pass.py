"""Guards of a forward pass that computes the outputs of several networks at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from bayesify.estimators.network_state import modules_of
from bayesify.estimators.out_of_memory import is_out_of_memory
from bayesify.training.backends.alike import computed_names

__all__ = ["explained_errors", "unchanged_attributes"]

#: What errors of networks that cannot be run over a leading axis have in common.
_OF_VMAP = re.compile(r"vmap|atching rule|escaped")
_MISSING = object()


@contextmanager
def explained_errors() -> Iterator[None]:
    """Turn errors of torch.vmap, which ask for reports to PyTorch, into a ValueError.

    Example:
        >>> import torch
        >>> with explained_errors():
        ...     torch.vmap(lambda x: x if x > 0 else -x)(torch.zeros(2))
        Traceback (most recent call last):
        ValueError: the networks cannot be run at once, as a pass has an operation, or a branch ...
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error) or not _OF_VMAP.search(str(error)):
            raise
        raise ValueError(
            "the networks cannot be run at once, as a pass has an operation, or a branch that "
            "depends on numbers, that torch.vmap does not support; train each by fit "
            f"({str(error).splitlines()[0]})"
        ) from error


@contextmanager
def unchanged_attributes(net: nn.Module) -> Iterator[None]:
    """Raise ValueError where the block sets an attribute, which would be that of one network.

    Attributes are restored, as they may hold tensors of all networks at once.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> with unchanged_attributes(net):
        ...     net.calls = 1
        Traceback (most recent call last):
        ValueError: the networks cannot be run at once: a forward pass sets 'calls' of its Linear...
    """
    modules = modules_of(net)
    before = [(dict(vars(module)), dict(module._buffers)) for module in modules]
    changed: list[tuple[nn.Module, str]] = []
    try:
        yield
    finally:
        for module, held in zip(modules, before, strict=True):
            computed = computed_names(module)
            for now, then in zip((vars(module), module._buffers), held, strict=True):
                names = [name for name in now if now[name] is not then.get(name, _MISSING)]
                if names:
                    now.clear()
                    now.update(then)
                changed += [(module, name) for name in names if name not in computed]
    for module, name in changed:
        raise ValueError(
            f"the networks cannot be run at once: a forward pass sets {name!r} of its "
            f"{type(module).__name__}, which is no buffer with a value; register one, or train "
            "each network by fit"
        )
