"""The objectives and optimisers that each backend supports, with the reasons against it."""

from __future__ import annotations

from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from bayesify.distributions.posteriors import MeanFieldGaussian, Posterior
from bayesify.distributions.priors import BlockPrior
from bayesify.estimators.per_example import PerExampleEstimator
from bayesify.estimators.weight_sampling import WeightSampling
from bayesify.module.bayesian import BayesianModule
from bayesify.training.elbo import ELBO
from bayesify.training.ivon import IVON
from bayesify.training.kernel.formulas import leaf_kind, prior_blocks, prior_form
from bayesify.training.optimizers import group_of
from bayesify.training.pac_bayes import PACBayesObjective

__all__ = [
    "UnsupportedRunError",
    "require",
    "signature",
    "why_no_closed_forms",
    "why_not_compiled",
    "why_own_code",
]


class UnsupportedRunError(ValueError):
    """A backend does not support an objective or its optimiser."""


def why_own_code(
    elbo: ELBO, posteriors: tuple[type[Posterior], ...] = (MeanFieldGaussian,)
) -> str | None:
    """The reason why only ``ELBO.forward`` computes an objective, or None.

    Own classes, hooks and estimators may change it in a way that no other code knows.

    Args:
        elbo: the objective.
        posteriors: the classes of posteriors that the other code knows.

    Example:
        >>> class Own(BayesianModule): pass
        >>> why_own_code(ELBO(Own(torch.nn.Linear(3, 2)), num_data=1))
        'the network is a Own'
    """
    bnn = elbo.bnn
    q = bnn.posterior
    owners = (
        ("objective", elbo, (ELBO, PACBayesObjective)),  # which only has its own nll and factor
        ("network", bnn, (BayesianModule,)),
        ("posterior", q, posteriors),
    )
    for role, owner, kinds in owners:
        if type(owner) not in kinds:
            return f"the {role} is a {type(owner).__name__}"
        if _has_hooks(owner):
            return f"the {role} has hooks"
        if "forward" in vars(owner):
            return f"the {role} has a forward of its own"
    if elbo._compiled_call_impl is not None:
        return "the objective was compiled"
    if (
        not isinstance(bnn.estimator, PerExampleEstimator)
        and type(bnn.estimator) is not WeightSampling
    ):
        return f"the estimator is {type(bnn.estimator).__name__}"
    return None


def why_no_closed_forms(elbo: ELBO) -> str | None:
    """The reason why an objective's gradients need autograd, or None where closed forms hold.

    Example:
        >>> from bayesify.distributions.priors import StudentT
        >>> bnn = BayesianModule(torch.nn.Linear(3, 2), prior=StudentT())
        >>> why_no_closed_forms(ELBO(bnn, num_data=1))
        'the prior is StudentT'
    """
    reason = why_own_code(elbo)
    if reason is not None:
        return reason
    bnn = elbo.bnn
    q = bnn.posterior
    assert isinstance(q, MeanFieldGaussian)
    prior = prior_blocks(bnn.weight_prior, elbo.kl)
    if prior is None:
        return _why_no_prior(bnn, elbo.kl)
    if not (q.mean.requires_grad and q.rho.requires_grad):
        return "mean or rho is not trained"
    for name in ("mean", "rho"):
        parameter = getattr(q, name)
        if _has_gradient_hooks(parameter):
            return f"{name} has hooks"
    if q.mean.dtype not in (torch.float32, torch.float64):
        return f"the weights are {str(q.mean.dtype).removeprefix('torch.')}"
    if q.rho.dtype is not q.mean.dtype:
        return "mean and rho have two dtypes"
    if leaf_kind(bnn.estimator) != "weights":
        if q.mask is not None:
            return "weights are pruned, or are an embedding's padding row"
        if elbo.num_samples > 1 and not prior.exact:
            return "the KL of a step is averaged over several samples"
    return None


def why_not_compiled(elbo: ELBO, optimizer: Optimizer) -> str | None:
    """The reason why there is no kernel for an objective and optimiser, or None where there is one.

    Example:
        >>> elbo = ELBO(BayesianModule(torch.nn.Linear(3, 2)), num_data=1)
        >>> why_not_compiled(elbo, torch.optim.AdamW(elbo.parameters()))
        'the optimizer is AdamW'
        >>> why_not_compiled(elbo, torch.optim.Adam(elbo.parameters(), fused=True)) is None
        True
    """
    reason = why_no_closed_forms(elbo)
    if reason is not None:
        return reason
    if type(optimizer) not in _PLAIN_SETTINGS:
        return f"the optimizer is {type(optimizer).__name__}"
    if _has_step_hooks(optimizer):
        return "the optimizer has hooks"
    if _has_own_step(optimizer):
        return "the optimizer has a step of its own"
    posterior = elbo.bnn.posterior
    if posterior.mean.device.type not in ("cpu", "cuda"):
        return f"there is no kernel for {posterior.mean.device.type}"
    if len({bool(group.get("momentum")) for group in _groups(elbo, optimizer)}) > 1:
        return "the optimizer has momentum for only one of mean and rho"
    for name in ("mean", "rho"):
        parameter = getattr(posterior, name)
        if not parameter.is_contiguous():
            return f"{name} is not contiguous"
        group = group_of(optimizer, parameter)
        if group is None:
            return f"the optimizer does not hold {name}"
        for setting in _PLAIN_SETTINGS[type(optimizer)]:
            if group.get(setting):
                return f"the optimizer has {setting} {group[setting]}"
        eps = group.get("eps")
        divides_once = parameter.device.type == "cpu" and parameter.dtype == torch.float32
        # Less a rounding, since a tensor of float32 may hold the limit itself.
        if eps is not None and divides_once and float(eps) < 0.999 * _LEAST_EPS:
            return f"the optimizer has eps {float(eps):g}, below {_LEAST_EPS}"
    return None


def signature(elbo: ELBO, optimizer: Optimizer | None = None) -> tuple[object, ...]:
    """Everything that a backend was prepared for; when it changes, the backend prepares anew.

    Edits of ``mean.data`` or ``rho.data`` do not change it: PyTorch does not count them.
    """
    bnn = elbo.bnn
    q = bnn.posterior
    parameters = [each for each in q._parameters.values() if each is not None]
    tensors = (*parameters, q.mask, bnn.prior_mean)
    held: list[object] = []
    if optimizer is not None:
        held += [_has_step_hooks(optimizer), _has_own_step(optimizer)]
        names = ("momentum", *_PLAIN_SETTINGS.get(type(optimizer), ()))
        for group in optimizer.param_groups:
            held += [id(group), len(group["params"]), *(bool(group.get(name)) for name in names)]
            held.append(None if group.get("eps") is None else float(group["eps"]))
        held += [id(each) for p in parameters for each in optimizer.state.get(p, {}).values()]
    return (
        *((t.data_ptr(), t.dtype, t.requires_grad) for t in tensors if t is not None),
        # A bound method holds its object, and equals that of the same object only: an id alone
        # passes to another prior once the first is gone.
        bnn.weight_prior.log_prob,
        bnn.estimator,
        bnn.seed,
        elbo.kl,
        elbo.num_samples,
        bnn.layout.dtype,
        _has_hooks(elbo) or _has_hooks(bnn) or _has_hooks(q),
        any(map(_has_gradient_hooks, parameters)),
        *held,
    )


def require(backend: str, reason: str | None) -> None:
    """Raise UnsupportedRunError where there is a reason against a backend."""
    if reason is not None:
        raise UnsupportedRunError(
            f'backend="{backend}" does not support this run: {reason}; use backend="auto"'
        )


def _why_no_prior(bnn: BayesianModule, kl: str) -> str:
    name = type(bnn.prior).__name__
    if type(bnn.weight_prior) is BlockPrior:
        priors = bnn.weight_prior.priors
        unknown = [type(each).__name__ for each in priors if prior_form(each, kl) is None]
        own = [each.removesuffix("Block") for each in unknown]
        if own and own[0] != name:
            return f"the prior is {name} with {own[0]}"
        if not own:
            return f"the prior is {name} with priors of several kinds"
    return f"the prior is {name}"


def _has_hooks(owner: nn.Module) -> bool:
    return bool(
        owner._forward_hooks
        or owner._forward_pre_hooks
        or owner._backward_hooks
        or owner._backward_pre_hooks
    )


def _has_gradient_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _has_own_step(optimizer: Optimizer) -> bool:
    """Tell whether ``step`` was replaced, other than by the wrapper of a scheduler."""
    own = vars(optimizer).get("step")
    return own is not None and unwrap(own) is not unwrap(type(optimizer).step)


def _has_step_hooks(optimizer: Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def _groups(elbo: ELBO, optimizer: Optimizer) -> list[dict[str, Any]]:
    posterior = elbo.bnn.posterior
    found = [group_of(optimizer, getattr(posterior, name)) for name in ("mean", "rho")]
    return [group for group in found if group is not None]


#: In float32 on a CPU the kernel divides by the product of two denominators of Adam's.
_LEAST_EPS = 1e-12
#: Settings of the optimiser that the kernel does not implement: they must be off.
_PLAIN_SETTINGS: dict[type[Optimizer], tuple[str, ...]] = {
    Adam: ("weight_decay", "amsgrad", "maximize", "differentiable"),
    SGD: ("weight_decay", "dampening", "nesterov", "maximize", "differentiable"),
    IVON: (),
}
