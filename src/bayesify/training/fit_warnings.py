"""Warnings of ``fit``: of data, outputs and parameters with which it learns little or wrongly."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence, Sized

import torch
from torch import nn

from bayesify.distributions.likelihoods import (
    BernoulliLikelihood,
    CategoricalLikelihood,
    GaussianLikelihood,
    Likelihood,
)
from bayesify.training.elbo import ELBO
from bayesify.training.minibatches import Loader, num_data_of

__all__ = [
    "RowCountWarning",
    "ShortStreamWarning",
    "SigmoidOutputWarning",
    "SoftmaxOutputWarning",
    "TargetScaleWarning",
    "UnreadParameterWarning",
    "warn_of_row_count",
    "warn_of_short_stream",
    "warn_of_sigmoid_outputs",
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
        ...     warn_of_target_scale(GaussianLikelihood(), prices)
        >>> caught[0].category.__name__
        'TargetScaleWarning'
    """


class SoftmaxOutputWarning(UserWarning):
    """The outputs of a network of classes are probabilities, where logits are needed.

    Example:
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     outputs = torch.tensor([[[0.25, 0.75]]])
        ...     warn_of_softmax_outputs(CategoricalLikelihood(), outputs)
        >>> caught[0].category.__name__
        'SoftmaxOutputWarning'
    """


class SigmoidOutputWarning(UserWarning):
    """The outputs of a network of labels are probabilities, where logits are needed.

    Example:
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     net, outputs = nn.Sequential(nn.Sigmoid()), torch.tensor([[[0.25, 0.75]]])
        ...     warn_of_sigmoid_outputs(BernoulliLikelihood(), net, outputs)
        >>> caught[0].category.__name__
        'SigmoidOutputWarning'
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
        loader: one with a length gets no warning.
        num_data: N of the objective.
        brought: the number of minibatches of an epoch that has ended.
    """
    size = getattr(loader, "batch_size", None)
    if not size or (isinstance(loader, Sized) and _has_length(loader)):
        return
    counted = num_data
    if getattr(loader, "drop_last", False):  # each worker leaves out at most so many
        counted -= max(1, getattr(loader, "num_workers", 0)) * (int(size) - 1)
    if brought < -(-counted // int(size)):
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


def warn_of_target_scale(likelihood: Likelihood, targets: object) -> None:
    """Warn if the targets of a Gaussian likelihood are far from unit scale.

    Args:
        likelihood: another than a ``GaussianLikelihood`` has no scale.
        targets: those of a minibatch; infinite bounds of censored ones are left out.
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
        stacklevel=5,
    )


def warn_of_softmax_outputs(likelihood: Likelihood, outputs: torch.Tensor) -> None:
    """Warn if the outputs of a network of classes are probabilities instead of logits.

    Args:
        likelihood: another than a ``CategoricalLikelihood`` has no softmax.
        outputs: those of a minibatch, shape (S, N, ..., K).
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
        stacklevel=5,
    )


def warn_of_sigmoid_outputs(likelihood: Likelihood, net: nn.Module, outputs: torch.Tensor) -> None:
    """Warn if the outputs of a network of labels are probabilities instead of logits.

    Only of a ``nn.Sequential`` it is known that it ends in a ``nn.Sigmoid``: logits of a minibatch
    may all lie from 0 to 1 too.

    Args:
        likelihood: another than a ``BernoulliLikelihood`` has no sigmoid.
        net: the network.
        outputs: those of a minibatch, shape (S, N, ...).
    """
    if not isinstance(likelihood, BernoulliLikelihood) or not outputs.numel():
        return
    last = net
    # A subclass may have a forward pass of its own.
    while isinstance(last, nn.Sequential) and type(last).forward is nn.Sequential.forward and last:
        last = last[-1]
    low, high = map(float, outputs.detach().aminmax())
    if not (isinstance(last, nn.Sigmoid) and low >= 0.0 and high <= 1.0):
        return
    warnings.warn(
        "the network's outputs must be logits, but it ends in nn.Sigmoid; leave it out, since the "
        "likelihood applies it: with both, all probabilities lie from 0.5 to 0.731",
        SigmoidOutputWarning,
        stacklevel=5,
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
