"""Checks of the arguments of ``fit`` and of the parameters after each epoch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence, Sized
from pathlib import Path

import numpy as np
import torch

from bayesify.distributions.likelihoods import (
    CategoricalLikelihood,
    CensoredGaussianLikelihood,
    GaussianLikelihood,
    Likelihood,
)
from bayesify.noise.keys import process_count
from bayesify.noise.whole_numbers import whole_number
from bayesify.training.backends import NonFiniteLossError
from bayesify.training.elbo import ELBO
from bayesify.training.history import is_finite
from bayesify.training.minibatches import Loader, num_batches_of, num_data_of
from bayesify.training.pruning_schedule import PruningSchedule

__all__ = [
    "RowCountWarning",
    "ShortStreamWarning",
    "SoftmaxOutputWarning",
    "TargetScaleWarning",
    "UnreadParameterWarning",
    "are_wrong",
    "check_arguments",
    "check_can_divide",
    "check_counts",
    "check_gradients_are_on",
    "check_objective",
    "check_one_process",
    "check_parameters",
    "diverged",
    "warn_of_row_count",
    "warn_of_short_stream",
    "warn_of_softmax_outputs",
    "warn_of_target_scale",
    "warn_of_unread",
]

#: Targets of a Gaussian likelihood are far from unit scale if they are so many times larger than 1,
#: or so many times narrower than the noise.
_FAR = 10.0
_MOST_NAMED = 4


class TargetScaleWarning(UserWarning):
    """The targets of a regression are far from unit scale, for which defaults are made.

    Example:
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     prices = torch.tensor([210_000.0, 480_000.0])
        ...     warn_of_target_scale(GaussianLikelihood(), prices, stacklevel=1)
        >>> caught[0].category.__name__
        'TargetScaleWarning'
    """


class SoftmaxOutputWarning(UserWarning):
    """The outputs of a network of classes are probabilities, where logits are needed.

    Example:
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     outputs = torch.tensor([[[0.25, 0.75]]])
        ...     warn_of_softmax_outputs(CategoricalLikelihood(), outputs, stacklevel=1)
        >>> caught[0].category.__name__
        'SoftmaxOutputWarning'
    """


class RowCountWarning(UserWarning):
    """The network returns more rows than the objective's num_data counts.

    Example:
        >>> from bayesify import BayesianModule
        >>> elbo = ELBO(BayesianModule(torch.nn.Linear(3, 2)), num_data=2)
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     loader = [(torch.zeros(40, 3), torch.zeros(40))] * 2
        ...     warn_of_row_count(elbo, loader, rows=80, brought=2)
        >>> caught[0].category.__name__
        'RowCountWarning'
    """


class ShortStreamWarning(UserWarning):
    """A loader without a length brought fewer examples in an epoch than the objective's num_data.

    Example:
        >>> class Short:
        ...     batch_size = 10
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     warn_of_short_stream(Short(), num_data=100, brought=8)
        >>> caught[0].category.__name__
        'ShortStreamWarning'
    """


class UnreadParameterWarning(UserWarning):
    """Random parameters had no gradient of the likelihood in any step.

    Example:
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     warn_of_unread(["head.weight"])
        >>> caught[0].category.__name__
        'UnreadParameterWarning'
    """


def warn_of_short_stream(loader: object, num_data: int, brought: int) -> None:
    """Warn where a stream ended before it had brought all data.

    Args:
        loader: one with a length is what it says, and gets no warning.
        num_data: N of the objective.
        brought: the number of minibatches of an epoch that has ended.
    """
    size = getattr(loader, "batch_size", None)
    if not size or (isinstance(loader, Sized) and _has_length(loader)):
        return
    if brought < -(-num_data // int(size)):
        warnings.warn(
            f"the loader ended after {brought} minibatches of up to {size} examples, fewer than "
            f"the objective's num_data of {num_data}: the KL has the weight for {num_data}; give "
            "ELBO the number of examples that the stream has",
            ShortStreamWarning,
            stacklevel=2,
        )


def warn_of_unread(names: Sequence[str]) -> None:
    """Warn of random parameters that had no gradient of the likelihood in any step."""
    if not names:
        return
    some = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
    warnings.warn(
        f"the network's outputs do not depend on the random parameters {some}, which the data do "
        "not train and which add no uncertainty: leave them out with exclude=..., or, if forward "
        "takes them from a closure, a nested list or another object, read them from the modules "
        "that hold them",
        UnreadParameterWarning,
        stacklevel=2,
    )


def _has_length(loader: Sized) -> bool:
    try:
        len(loader)
    except TypeError:  # a DataLoader of an IterableDataset
        return False
    return True


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
) -> None:
    """Check that the arguments of ``fit`` fit together, and that gradients are switched on.

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
    whole_number("epochs", epochs, 0)
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


def check_one_process(what: str) -> None:
    """Raise ValueError where several processes would each train alone.

    Example:
        >>> check_one_process("fit_replicas trains")
    """
    if (count := process_count()) > 1:
        raise ValueError(
            f"{what} in one process, but torch.distributed has {count}: each would train "
            "alone, on all data; train each network by fit(elbo, ...), which divides the "
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


def check_parameters(elbo: ELBO, epoch: int, path: Path | None) -> None:
    """Raise NonFiniteLossError where a parameter is NaN or infinite."""
    if not is_finite(elbo):
        where = f"step {elbo.step} (epoch {epoch + 1})"
        raise NonFiniteLossError(diverged(f"a parameter after {where}", path))


def warn_of_target_scale(likelihood: Likelihood, targets: object, *, stacklevel: int) -> None:
    """Warn if the targets of a Gaussian likelihood are far from unit scale.

    Args:
        likelihood: another than a ``GaussianLikelihood`` has no scale.
        targets: those of a minibatch; infinite bounds of censored ones are left out.
        stacklevel: as for ``warnings.warn``.
    """
    if not isinstance(likelihood, GaussianLikelihood) or not isinstance(targets, torch.Tensor):
        return
    values = targets.detach().double()
    values = values[values.isfinite()]
    if values.numel() < 2:
        return
    mean, std = float(values.mean()), float(values.std(correction=0))
    noise = 1.0 if likelihood.input_dependent else float(likelihood.std.detach())
    if max(abs(mean), std) <= _FAR and not 0.0 < _FAR * std < noise:
        return
    warnings.warn(
        f"the targets have mean {mean:.4g} and standard deviation {std:.4g}, but the prior, the "
        f"noise (standard deviation {noise:.3g} at the start) and the learning rate are for "
        "targets of about mean 0 and standard deviation 1, and training may learn nothing; train "
        "on (y - y.mean()) / y.std(), and bring predictions back by bnn.predict(x).rescaled("
        "y.mean(), y.std())",
        TargetScaleWarning,
        stacklevel=stacklevel + 1,
    )


def warn_of_softmax_outputs(
    likelihood: Likelihood, outputs: torch.Tensor, *, stacklevel: int
) -> None:
    """Warn if the outputs of a network of classes are probabilities instead of logits.

    Args:
        likelihood: another than a ``CategoricalLikelihood`` has no softmax.
        outputs: those of a minibatch, shape (S, N, ..., K).
        stacklevel: as for ``warnings.warn``.
    """
    classes = outputs.shape[-1]
    if not isinstance(likelihood, CategoricalLikelihood) or classes < 2 or not outputs.numel():
        return
    values = outputs.detach().double()
    low, high = map(float, values.aminmax())
    rounding = max(1e-4, 4.0 * torch.finfo(outputs.dtype).eps)
    if not (low >= 0.0 and high <= 1.0 and (values.sum(-1) - 1.0).abs().max() <= rounding):
        return
    warnings.warn(
        "the network's outputs must be logits, but all lie from 0 to 1 and sum to 1 over the "
        f"{classes} classes, as after a softmax; leave nn.Softmax out, since the likelihood "
        f"applies it: with both, no probability is above {math.e / (math.e + classes - 1):.3g}",
        SoftmaxOutputWarning,
        stacklevel=stacklevel + 1,
    )


def warn_of_row_count(elbo: ELBO, loader: Loader, *, rows: int, brought: int) -> None:
    """Warn if the rows of outputs are other examples than those that num_data counts.

    The nll is the mean over rows, so that the KL, divided by num_data, would weigh too much.

    Args:
        elbo: the objective.
        loader: of its minibatches.
        rows: the rows of outputs in the first epoch.
        brought: the minibatches of that epoch.
    """
    size = getattr(loader, "batch_size", None)
    if elbo.num_data in num_data_of(loader):
        if not isinstance(size, int) or rows <= size * brought:
            return
        counted = f"for minibatches of {size} examples the network returned {rows} rows in an epoch"
    elif isinstance(loader, Sequence) and rows > 2 * elbo.num_data:
        counted = f"the network returned {rows} rows in an epoch"
    else:
        return
    warnings.warn(
        f"num_data must count the rows of the network's outputs, but it is {elbo.num_data}, and "
        f"{counted}: the KL weighs too much, unless several rows are views of one example. Return "
        "outputs of shape (N, ..., K) for N examples; where each row is an example, as each node "
        "of joined graphs, let num_data be the number of rows, and pass a list of minibatches",
        RowCountWarning,
        stacklevel=2,
    )


def are_wrong(likelihood: Likelihood, targets: object) -> bool:
    """Return whether a target is NaN, or infinite where it is no bound of a censored one.

    Example:
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
