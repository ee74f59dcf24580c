"""Optimisers over the posterior's parameters, with a learning rate of its own for rho."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesify.module.random_network import RandomNetwork
from bayesify.noise.arguments import positive_number
from bayesify.training.elbo import ELBO

__all__ = [
    "OptimizerFactory",
    "check_decay",
    "check_holds",
    "check_lr",
    "check_rho_lr_scale",
    "check_takes_steps",
    "group_of",
    "make_optimizer",
    "parameter_groups",
    "separate_rho",
]

#: A function of parameter groups that builds an optimiser, such as torch's optimiser classes.
OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]

#: PyTorch's optimisers that cannot train mean and rho, and why not.
_UNFIT = {
    "Muon": "which only takes matrices, and mean and rho are vectors of all random weights",
    "SparseAdam": "which needs sparse gradients, and those of mean and rho are dense",
}


def parameter_groups(elbo: ELBO) -> list[dict[str, Any]]:
    """Return the trainable parameters for an optimiser, in groups: rho comes last.

    Rho, from which the standard deviations are computed, is a group of its own, so that it can have
    its own learning rate, and has no weight decay. Decay would pull it to 0, and with it each
    standard deviation to log 2 = 0.69, whatever the data. Nor have the learned numbers of a
    likelihood, such as the std of its noise, which are a group before it.

    Args:
        elbo: the objective. A posterior without standard deviations has the first group only.

    Raises:
        TypeError: ``elbo`` is no objective, such as a network.

    Example:
        >>> import bayesify as bf
        >>> elbo = ELBO(bf.BayesianModule(torch.nn.Linear(2, 1)), num_data=1)
        >>> optimizer = torch.optim.AdamW(parameter_groups(elbo), lr=1e-3)
        >>> [group["weight_decay"] for group in optimizer.param_groups]
        [0.01, 0.0]
    """
    if not isinstance(getattr(elbo, "bnn", None), RandomNetwork):
        raise TypeError(
            f"parameter_groups needs an objective such as ELBO(bnn, num_data=N), got "
            f"{type(elbo).__name__}; pass it, since it may hold parameters besides the network's"
        )
    elbo.bnn.own_trained_parameters()
    rho = getattr(elbo.bnn.posterior, "rho", None)
    rest = [p for p in elbo.parameters() if p.requires_grad and p is not rho]
    learned = _of_likelihood(elbo)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p not in learned]},
        {"params": [p for p in rest if p in learned], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return groups if rho is None else [*groups, {"params": [rho], "weight_decay": 0.0}]


def _of_likelihood(elbo: ELBO) -> set[nn.Parameter]:
    """Return the parameters of the likelihood, which have no weight decay."""
    return set(elbo.bnn.likelihood.parameters())


def group_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any] | None:
    """The parameter group of an optimiser that holds a parameter, or None.

    Example:
        >>> parameter = torch.nn.Parameter(torch.zeros(2))
        >>> group_of(torch.optim.SGD([parameter], lr=0.1), parameter)["lr"]
        0.1
    """
    for group in optimizer.param_groups:
        if any(held is parameter for held in group["params"]):
            return group
    return None


def make_optimizer(
    elbo: ELBO,
    optimizer: Optimizer | OptimizerFactory | None,
    rho_lr_scale: float,
    lr: float | None = None,
    *,
    fused: bool = True,
) -> Optimizer:
    """Build the optimiser that ``fit`` was asked for, with rho's rate scaled.

    The default is a fused Adam, where the parameters allow it and ``fused`` is true.

    Raises:
        ValueError: ``rho_lr_scale`` or ``lr`` is not positive, or cannot be applied; or the
            optimiser holds no parameter of the objective, has weight decay for rho, or is
            differentiable.
        TypeError: ``optimizer`` is neither an optimiser nor a function of one, needs a closure, or
            cannot train mean and rho; or a rate is no number.
    """
    check_rho_lr_scale(rho_lr_scale)
    if not (optimizer is None or isinstance(optimizer, Optimizer) or callable(optimizer)):
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer or a function of parameter groups such as "
            f"functools.partial(torch.optim.Adam, lr=1e-3), got {optimizer!r}"
        )
    check_lr(lr, optimizer)
    if isinstance(optimizer, Optimizer):
        check_holds(elbo, optimizer)
        if rho_lr_scale != 1.0:
            raise ValueError(
                "rho_lr_scale needs fit to make the optimiser: pass a function of parameter "
                "groups, such as functools.partial(torch.optim.Adam, lr=1e-3), not an optimiser"
            )
        check_decay(elbo, optimizer)
        check_takes_steps(optimizer)
        return optimizer
    groups = parameter_groups(elbo)
    if optimizer is None:
        # Fused: one pass over the flat vectors a step. PyTorch has it for real numbers only.
        fused &= all(each.is_floating_point() for group in groups for each in group["params"])
        optimizer = partial(torch.optim.Adam, lr=1e-3 if lr is None else float(lr), fused=fused)
    _check_fits(getattr(optimizer, "func", optimizer))
    made = optimizer(groups)
    check_takes_steps(made)
    check_decay(elbo, made)
    if rho_lr_scale != 1.0:
        rho = getattr(elbo.bnn.posterior, "rho", None)
        group = [g for g in made.param_groups if len(g["params"]) == 1 and g["params"][0] is rho]
        if not group:
            raise ValueError(
                "rho_lr_scale needs a posterior with a rho, and an optimiser that keeps it in a "
                "parameter group of its own"
            )
        # Not in place: a rate that is a tensor may be that of all groups.
        group[0]["lr"] = group[0]["lr"] * float(rho_lr_scale)
    return made


def check_lr(lr: Any, optimizer: object = None) -> None:
    """Raise TypeError or ValueError unless a rate of the default optimiser is positive and finite.

    Args:
        lr: the rate; None leaves it to the optimiser.
        optimizer: one that was given besides, which has a rate of its own.

    Example:
        >>> check_lr(-0.1)
        Traceback (most recent call last):
        ValueError: lr must be positive and finite, got -0.1
    """
    if lr is None:
        return
    if optimizer is not None:
        raise ValueError(
            "lr is the rate of the default optimiser; leave it out, or give the rate to the "
            "optimizer, as in functools.partial(torch.optim.SGD, lr=0.1)"
        )
    positive_number("lr", lr)


def check_rho_lr_scale(scale: Any) -> None:
    """Raise TypeError or ValueError unless a multiple of the learning rate is positive and finite.

    Example:
        >>> check_rho_lr_scale(float("nan"))
        Traceback (most recent call last):
        ValueError: rho_lr_scale must be positive and finite, got nan
    """
    positive_number("rho_lr_scale", scale)


def separate_rho(optimizer: Optimizer, elbo: ELBO, lr_scale: float = 1.0) -> None:
    """Move rho to a parameter group of its own, the last one, without weight decay.

    The parameters of the likelihood are moved to one before it, without weight decay either.

    Args:
        optimizer: holds the parameters of the objective; its schedule does not exist yet.
        elbo: the objective. Without standard deviations there is no rho to move.
        lr_scale: learning rate of rho as a multiple of its group's.

    Example:
        >>> from bayesify import BayesianModule
        >>> elbo = ELBO(BayesianModule(torch.nn.Linear(3, 2)), num_data=1)
        >>> adam = torch.optim.AdamW(elbo.parameters(), lr=0.5)
        >>> separate_rho(adam, elbo, lr_scale=2.0)
        >>> [(len(g["params"]), g["lr"], g["weight_decay"]) for g in adam.param_groups]
        [(1, 0.5, 0.01), (1, 1.0, 0.0)]
    """
    rho = getattr(elbo.bnn.posterior, "rho", None)
    learned = _of_likelihood(elbo)
    for group in list(optimizer.param_groups):
        moved = [each for each in group["params"] if each in learned]
        if moved and group.get("weight_decay"):
            group["params"] = [each for each in group["params"] if each not in learned]
            optimizer.add_param_group({**group, "params": moved, "weight_decay": 0.0})
    held = None if rho is None else group_of(optimizer, rho)
    if held is None:
        return
    held["params"] = [each for each in held["params"] if each is not rho]
    own = {**held, "params": [rho], "weight_decay": 0.0, "lr": held["lr"] * lr_scale}
    optimizer.add_param_group(own)


def check_holds(elbo: ELBO, optimizer: Optimizer) -> None:
    """Check that an optimiser holds parameters of the objective.

    Raises:
        ValueError: it holds none.

    Example:
        >>> from bayesify import BayesianModule
        >>> net = torch.nn.Linear(3, 2)
        >>> elbo = ELBO(BayesianModule(net), num_data=1)
        >>> check_holds(elbo, torch.optim.Adam(net.parameters()))
        Traceback (most recent call last):
        ValueError: the optimizer must hold parameters of the objective, but it holds none of ...
    """
    elbo.bnn.own_trained_parameters()
    own = set(elbo.parameters())
    if any(p in own for group in optimizer.param_groups for p in group["params"]):
        return
    if hasattr(optimizer, "elbo"):
        raise ValueError(
            "IVON must hold parameters of the objective, but it is of another one; make it by "
            "IVON(elbo, lr=...)"
        )
    raise ValueError(
        "the optimizer must hold parameters of the objective, but it holds none of them: the "
        "network was copied when it was made Bayesian; make it from "
        "bayesify.parameter_groups(elbo)"
    )


def check_takes_steps(optimizer: object) -> None:
    """Check that something is an optimiser whose step needs no closure.

    Raises:
        TypeError: it is not, or it does, as that of L-BFGS; or it cannot train mean and rho.
        ValueError: its steps are to be differentiable.

    Example:
        >>> check_takes_steps(torch.optim.LBFGS([torch.zeros(1, requires_grad=True)]))
        Traceback (most recent call last):
        TypeError: the optimizer must step by the gradients of one pass, got LBFGS, whose step ...
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer or a function that returns one, got "
            f"{optimizer!r}"
        )
    _check_fits(optimizer)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            "the optimizer must not be differentiable, got differentiable=True: PyTorch cannot "
            "record its steps where they update the parameters in place; leave it out"
        )


def _check_fits(given: Any) -> None:
    """Raise TypeError for an optimiser, or a class of them, that cannot train mean and rho.

    A function of parameter groups may be anything: what it makes is checked.
    """
    kind = type(given) if isinstance(given, Optimizer) else given
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        return
    closure = inspect.signature(given.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            "the optimizer must step by the gradients of one pass, got "
            f"{kind.__name__}, whose step needs a closure; use it in a loop of your own"
        )
    for name, reason in _UNFIT.items():
        if kind is getattr(torch.optim, name, ...):  # older versions have no Muon
            raise TypeError(
                f"the optimizer must train the posterior's mean and rho, got {name}, {reason}; use "
                "one such as torch.optim.Adam"
            )


def check_decay(elbo: ELBO, optimizer: Optimizer) -> None:
    """Check that an optimiser has no weight decay for rho and the likelihood's parameters.

    Raises:
        ValueError: it has.

    Example:
        >>> from bayesify import BayesianModule
        >>> elbo = ELBO(BayesianModule(torch.nn.Linear(3, 2)), num_data=1)
        >>> check_decay(elbo, torch.optim.AdamW(elbo.parameters()))
        Traceback (most recent call last):
        ValueError: weight decay of rho must be 0, got 0.01: it would pull each standard ...
    """
    rho = getattr(elbo.bnn.posterior, "rho", None)
    if rho is not None and (decay := _decay_of(rho, optimizer)):
        raise ValueError(
            f"weight decay of rho must be 0, got {decay:g}: it would pull each standard deviation "
            "to 0.69, whatever the data; build the optimizer from bayesify.parameter_groups(elbo)"
        )
    for name, parameter in elbo.bnn.likelihood.named_parameters():
        if decay := _decay_of(parameter, optimizer):
            raise ValueError(
                f"weight decay of the likelihood's {name} must be 0, got {decay:g}: it would pull "
                "what is learned of the noise to a fixed value; build the optimizer from "
                "bayesify.parameter_groups(elbo)"
            )


def _decay_of(parameter: Tensor, optimizer: Optimizer) -> float:
    group = group_of(optimizer, parameter)
    return 0.0 if group is None else float(group.get("weight_decay", 0.0))
