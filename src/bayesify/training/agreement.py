"""The start of several processes: equal networks, and the same arguments in each."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

from bayesify.training.backends import Backend
from bayesify.training.checkpoint import objective_meta
from bayesify.training.elbo import ELBO
from bayesify.training.processes import Processes, digest

__all__ = ["begin_together", "check_alike"]

_PLACE = re.compile(" at 0x[0-9a-f]+")


def begin_together(elbo: ELBO, processes: Processes) -> None:
    """Give all processes the parameters and buffers of the first.

    Raises:
        ValueError: in all processes, if their networks differ.
    """
    if processes.is_alone:
        return
    held = {**dict(elbo.named_parameters()), **dict(elbo.named_buffers())}
    shapes = {name: (tuple(each.shape), str(each.dtype)) for name, each in held.items()}
    processes.check_equal(
        {"network": shapes, "shared_noise": processes.shared_noise},
        "build the same network in each, and call fit alike",
    )
    processes.copy_first(held.values())


def check_alike(
    elbo: ELBO,
    optimizer: Optimizer,
    backend: Backend,
    processes: Processes,
    arguments: Mapping[str, object],
) -> None:
    """Raise ValueError in all processes where they would not make the same updates.

    Args:
        elbo: the objective.
        optimizer: of its parameters.
        backend: makes the steps.
        processes: those that train together.
        arguments: others, by what they are called in the message.
    """
    if processes.is_alone:
        return
    bnn = elbo.bnn
    rates = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    processes.check_equal(
        {
            **objective_meta(elbo),
            "seed": bnn.seed,
            "estimator": _described(bnn.estimator),
            "prior": _described(bnn.prior),
            "likelihood": f"{_described(bnn.likelihood)} {bnn.likelihood.config()}",
            **arguments,
            "optimizer": type(optimizer).__name__,
            "settings of the optimizer": rates,
            "state of the optimizer": digest(
                part
                for index, entries in sorted(optimizer.state_dict()["state"].items())
                for name, value in sorted(entries.items())
                for part in (index, name, value)
            ),
            "backend": backend.description,
        },
        "call fit alike in each",
    )


def _described(part: object) -> str:
    """Return a component in words that are the same in every process."""
    if isinstance(part, Tensor):
        return digest([part.detach()])
    if isinstance(part, list | tuple):
        return str([_described(each) for each in part])
    # The repr of a function, and of an object that has none of its own, has its place in memory.
    if type(part).__repr__ is not object.__repr__:
        return _PLACE.sub("", repr(part))
    held = {name: _described(value) for name, value in getattr(part, "__dict__", {}).items()}
    return f"{type(part).__qualname__} {held}"
