"""Checks of the arguments of ``fit`` and of the parameters after each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from pathlib import Path

import numpy as np
import torch

from bayesify.distributions.likelihoods import CensoredGaussianLikelihood, Likelihood
from bayesify.noise.arguments import whole_number
from bayesify.noise.keys import process_count
from bayesify.training.backends import NonFiniteLossError
from bayesify.training.elbo import ELBO
from bayesify.training.minibatches import Loader, epoch_size_of, num_batches_of, num_data_of
from bayesify.training.pruning_schedule import PruningSchedule

__all__ = [
    "are_wrong",
    "check_arguments",
    "check_can_divide",
    "check_counts",
    "check_gradients_are_on",
    "check_objective",
    "check_one_process",
    "check_parameters",
    "diverged",
]


def check_objective(elbo: object, caller: str) -> None:
    """Raise TypeError where the first argument of a function is no objective.

    Example:
        >>> check_objective(torch.nn.Linear(3, 2), "fit")
        Traceback (most recent call last):
        TypeError: fit needs an ELBO, got Linear; write fit(ELBO(bnn, num_data=N), ...), ...
    """
    if not isinstance(elbo, ELBO):
        raise TypeError(
            f"{caller} needs an ELBO, got {type(elbo).__name__}; write "
            f"{caller}(ELBO(bnn, num_data=N), ...), and to compile it call elbo.compile()"
        )


def check_arguments(
    elbo: ELBO,
    loader: Loader,
    validation_loader: Loader | None,
    epochs: int,
    pruning: PruningSchedule | None = None,
) -> int:
    """Check that the arguments of ``fit`` fit together, and that gradients are switched on.

    Returns:
        The number of epochs, as an ``int``.

    Raises:
        RuntimeError, TypeError, ValueError: see ``fit``.
    """
    check_objective(elbo, "fit")
    check_gradients_are_on()
    for each in (loader, validation_loader):
        wrong = (tuple, Mapping, np.ndarray, torch.Tensor, torch.utils.data.Dataset)
        if isinstance(each, wrong):
            raise TypeError(
                f"a loader must bring minibatches (inputs, targets), got a {type(each).__name__}; "
                "use bayesify.datasets.TensorLoader or torch.utils.data.DataLoader"
            )
        if isinstance(each, Iterator):
            raise TypeError(
                "a loader is iterated once an epoch, and must begin anew each time, got a "
                f"{type(each).__name__}, which ends for good; make a list of its minibatches, or "
                "put what it reads into the __iter__ of a torch.utils.data.IterableDataset, and "
                "that into a DataLoader"
            )
    epochs = whole_number("epochs", epochs, 0)
    if epochs and not any(parameter.requires_grad for parameter in elbo.parameters()):
        raise ValueError(
            "there must be parameters to train, but all of the objective are frozen; call "
            "requires_grad_() on those that are to be trained"
        )
    if not isinstance(pruning, PruningSchedule | None):
        raise TypeError(
            f"pruning must be a PruningSchedule, got {pruning!r}; write "
            "pruning=PruningSchedule(0.9, from_epoch=2, until_epoch=8)"
        )
    count = num_batches_of(loader, elbo.num_data)
    if count < 1:
        raise ValueError("the training loader must bring at least one minibatch, got none")
    if isinstance(validation_loader, Sized) and num_batches_of(validation_loader, 1) < 1:
        raise ValueError("the validation loader must bring at least one minibatch, got none")
    check_counts(elbo, loader, count)
    return epochs


def check_counts(elbo: ELBO, loader: Loader, num_batches: int) -> None:
    """Raise ValueError where the objective counts other minibatches or examples than the loader.

    Args:
        elbo: the objective.
        loader: the training loader.
        num_batches: the number of its minibatches in an epoch.

    Example:
        >>> from bayesify import BayesianModule
        >>> from bayesify.datasets import TensorLoader
        >>> elbo = ELBO(BayesianModule(torch.nn.Linear(3, 2)), num_data=20)
        >>> check_counts(elbo, TensorLoader(torch.zeros(10, 3), torch.zeros(10), 5), 2)
        Traceback (most recent call last):
        ValueError: the objective's num_data must be the number of training examples, 10, got ...
    """
    if elbo.num_batches is not None and elbo.num_batches != num_batches:
        raise ValueError(
            f"the objective's num_batches must be the loader's {num_batches}, "
            f"got {elbo.num_batches}"
        )
    allowed = num_data_of(loader)
    if allowed and elbo.num_data not in allowed:
        raise ValueError(
            "the objective's num_data must be the number of training examples, "
            f"{' or '.join(map(str, sorted(allowed)))}, got {elbo.num_data}; the KL would be "
            "weighted wrongly"
        )
    size = epoch_size_of(loader)
    if elbo.kl_weighting == "geometric" and size not in (None, elbo.num_data):
        raise ValueError(
            "geometric weights divide one KL over an epoch, which must bring each of the "
            f"{elbo.num_data} examples once, got a loader of {size} examples an epoch; use "
            'kl_weighting="uniform"'
        )


def check_gradients_are_on() -> None:
    """Raise RuntimeError where PyTorch would compute no gradients.

    The posterior would go to the prior: the gradient of the KL is in closed form.

    Example:
        >>> with torch.no_grad():
        ...     check_gradients_are_on()
        Traceback (most recent call last):
        RuntimeError: training needs gradients, but they are switched off; leave ...
    """
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        raise RuntimeError(
            "training needs gradients, but they are switched off; leave torch.no_grad(), "
            "torch.set_grad_enabled(False) and torch.inference_mode() out around training, and end "
            "them where a loader or a callback begins them"
        )


def check_one_process() -> None:
    """Raise ValueError where several processes would each train all networks."""
    if (count := process_count()) > 1:
        raise ValueError(
            f"fit_replicas trains in one process, but torch.distributed has {count}: each would "
            "train alone, on all data; train each network by fit(elbo, ...), which divides the "
            "minibatches, see docs/several-processes.md"
        )


def check_can_divide(elbo: ELBO) -> None:
    """Raise ValueError where several processes cannot train an objective together."""
    if process_count() > 1 and elbo.running:
        raise ValueError(
            f"{type(elbo).__name__} carries values from minibatch to minibatch, which would differ "
            "between processes; train in one process"
        )
    sharded = [name for name, each in elbo.named_parameters() if hasattr(each, "device_mesh")]
    if sharded:
        raise ValueError(
            f"each process must hold whole parameters, but {sharded[0]} is sharded; leave "
            "fully_shard out, or use a loop of your own, where it works, see "
            "docs/several-processes.md"
        )


@torch.no_grad()
def check_parameters(elbo: ELBO, epoch: int, path: Path | None) -> None:
    """Raise NonFiniteLossError where a trained parameter is NaN or infinite."""
    trained = (each for each in elbo.parameters() if each.requires_grad)
    if not all(bool(parameter.isfinite().all()) for parameter in trained):
        where = f"step {elbo.step} (epoch {epoch + 1})"
        raise NonFiniteLossError(diverged(f"a parameter after {where}", path))


def are_wrong(likelihood: Likelihood, targets: object) -> bool:
    """Return whether a target is NaN, or infinite where it is no bound of a censored one.

    Example:
        >>> from bayesify import GaussianLikelihood
        >>> bounds = torch.tensor([[0.0, torch.inf]])
        >>> are_wrong(GaussianLikelihood(), bounds), are_wrong(CensoredGaussianLikelihood(), bounds)
        (True, False)
    """
    if not isinstance(targets, torch.Tensor):
        return False
    has_bounds = isinstance(likelihood, CensoredGaussianLikelihood)
    return bool((targets.isnan() if has_bounds else ~targets.isfinite()).any())


def diverged(what: str, path: Path | None, *, has_wrong_targets: bool = False) -> str:
    """The message of a NonFiniteLossError.

    Args:
        what: what is NaN or infinite, and where.
        path: the run's checkpoint.
        has_wrong_targets: whether targets of this minibatch are NaN or infinite.
    """
    kept = (
        f"the last good checkpoint is {path}"
        if path is not None and path.exists()
        else "no checkpoint had been written yet"
    )
    why = (
        "targets of this minibatch are NaN or infinite; mend them, or use "
        "CensoredGaussianLikelihood for targets of which only bounds are known; or, where the "
        "likelihood leaves such targets out, lower the learning rate, and begin anew"
        if has_wrong_targets
        else "most likely the learning rate is too high, or the inputs are not scaled or hold NaN; "
        "lower the rate or mend the inputs, and begin anew"
    )
    return f"{what} is NaN or infinite: {why}; {kept}"
