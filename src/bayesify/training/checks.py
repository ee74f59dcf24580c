"""Checks of the arguments of ``fit`` and of the parameters after each epoch."""

from __future__ import annotations

from collections.abc import Sized
from numbers import Integral
from pathlib import Path

import torch

from bayesify.noise.keys import process_count
from bayesify.training.backends import NonFiniteLossError
from bayesify.training.elbo import ELBO
from bayesify.training.history import is_finite
from bayesify.training.minibatches import Loader, num_batches_of, num_data_of

__all__ = ["check_arguments", "check_one_process", "check_parameters", "diverged"]


def check_arguments(
    elbo: ELBO,
    loader: Loader,
    validation_loader: Loader | None,
    epochs: int,
) -> None:
    """Raise TypeError or ValueError where the arguments of ``fit`` do not fit together."""
    if not isinstance(elbo, ELBO):
        raise TypeError(
            f"fit needs an ELBO, got {type(elbo).__name__}; write fit(ELBO(bnn, num_data=N), ...), "
            "and to compile it call elbo.compile()"
        )
    check_one_process("fit trains")
    for each in (loader, validation_loader):
        if isinstance(each, (tuple, torch.Tensor, torch.utils.data.Dataset)):
            raise TypeError(
                f"a loader must bring minibatches (inputs, targets), got a {type(each).__name__}; "
                "use bayesify.datasets.TensorLoader or torch.utils.data.DataLoader"
            )
    if not isinstance(epochs, Integral) or epochs < 0:
        raise ValueError(f"epochs must be a whole number of at least 0, got {epochs!r}")
    count = num_batches_of(loader, elbo.num_data)
    if count < 1:
        raise ValueError("the training loader must bring at least one minibatch, got none")
    if isinstance(validation_loader, Sized) and num_batches_of(validation_loader, 1) < 1:
        raise ValueError("the validation loader must bring at least one minibatch, got none")
    if elbo.num_batches is not None and elbo.num_batches != count:
        raise ValueError(
            f"the objective's num_batches must be the loader's {count}, got {elbo.num_batches}"
        )
    allowed = num_data_of(loader)
    if allowed and elbo.num_data not in allowed:
        raise ValueError(
            "the objective's num_data must be the number of training data, "
            f"{' or '.join(map(str, sorted(allowed)))}, got {elbo.num_data}; the KL would be "
            "weighted wrongly"
        )


def check_one_process(what: str) -> None:
    """Raise ValueError where several processes would each train alone.

    Example:
        >>> check_one_process("fit trains")
    """
    if (count := process_count()) > 1:
        raise ValueError(
            f"{what} in one process, but torch.distributed has {count}: each would train "
            "alone, on all data; loop over DistributedDataParallel(elbo) instead, see "
            "docs/any-network.md"
        )


def check_parameters(elbo: ELBO, epoch: int, path: Path | None) -> None:
    """Raise NonFiniteLossError where a parameter is NaN or infinite."""
    if not is_finite(elbo):
        where = f"step {elbo.step} (epoch {epoch + 1})"
        raise NonFiniteLossError(diverged(f"a parameter after {where}", path))


def diverged(what: str, path: Path | None) -> str:
    """The message of a NonFiniteLossError; ``path`` is the run's checkpoint."""
    kept = (
        f"the last good checkpoint is {path}"
        if path is not None and path.exists()
        else "no checkpoint had been written yet"
    )
    return (
        f"{what} is NaN or infinite: most likely the learning rate is too high, or the inputs are "
        f"not scaled or hold NaN; lower the rate or mend the inputs, and begin anew; {kept}"
    )
