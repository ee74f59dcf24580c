"""What must hold before training begins, and at every step of it."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from bayesify.elbo import ELBO
from bayesify.fused import StepValues
from bayesify.training.history import is_finite
from bayesify.training.minibatches import Loader, num_data_of

__all__ = ["NonFiniteLossError", "check_arguments", "check_finite", "check_parameters"]


class NonFiniteLossError(ArithmeticError):
    """The loss, or a parameter, became NaN or infinite; the last checkpoint is untouched."""


def check_arguments(
    elbo: ELBO,
    loader: Loader,
    validation_loader: Loader | None,
    epochs: int,
) -> None:
    """Raise TypeError or ValueError where ``fit`` was given what cannot be."""
    if not isinstance(elbo, ELBO):
        raise TypeError(
            f"fit needs an ELBO, got {type(elbo).__name__}; write fit(ELBO(bnn, num_data=N), ...), "
            "and to compile it call elbo.compile()"
        )
    for each in (loader, validation_loader):
        if isinstance(each, (tuple, torch.Tensor, torch.utils.data.Dataset)):
            raise TypeError(
                f"a loader must bring minibatches (inputs, targets), got a {type(each).__name__}; "
                "use bayesify.datasets.TensorLoader or torch.utils.data.DataLoader"
            )
    if not (epochs >= 0 and math.isfinite(epochs)):
        raise ValueError(f"epochs must be at least 0, got {epochs}")
    if len(loader) < 1:
        raise ValueError("the training loader must bring at least one minibatch, got none")
    if validation_loader is not None and len(validation_loader) < 1:
        raise ValueError("the validation loader must bring at least one minibatch, got none")
    if elbo.num_batches is not None and elbo.num_batches != len(loader):
        raise ValueError(
            f"the objective's num_batches must be the loader's {len(loader)}, got "
            f"{elbo.num_batches}"
        )
    allowed = num_data_of(loader)
    if allowed and elbo.num_data not in allowed:
        raise ValueError(
            "the objective's num_data must be the number of training data, "
            f"{' or '.join(map(str, sorted(allowed)))}, got {elbo.num_data}; the KL would be "
            "weighted wrongly"
        )


def check_finite(elbo: ELBO, values: StepValues, epoch: int, batch: int, path: Path | None) -> None:
    """Raise NonFiniteLossError where a step's values are not finite; ``path`` is its checkpoint."""
    known = [values.nll, *(values.complexity or ())]
    if all(bool(value.isfinite()) for value in known):
        return
    where = f"step {elbo.step} (epoch {epoch + 1}, minibatch {batch + 1})"
    if not bool(values.outputs.isfinite().all()):
        what = f"the network's output at {where}"
    elif not bool(values.nll.isfinite()):
        what = f"the nll at {where}"
    else:
        what = f"the KL or penalty at {where}"
    raise NonFiniteLossError(_diverged(what, path))


def check_parameters(elbo: ELBO, epoch: int, path: Path | None) -> None:
    """Raise NonFiniteLossError where a parameter is NaN or infinite."""
    if not is_finite(elbo):
        where = f"step {elbo.step} (epoch {epoch + 1})"
        raise NonFiniteLossError(_diverged(f"a parameter after {where}", path))


def _diverged(what: str, path: Path | None) -> str:
    kept = (
        f"the last good checkpoint is {path}"
        if path is not None and path.exists()
        else "no checkpoint had been written yet"
    )
    return (
        f"{what} is NaN or infinite: most likely the learning rate is too high, or the inputs are "
        f"not scaled or hold NaN; lower the rate or mend the inputs, and begin anew; {kept}"
    )
