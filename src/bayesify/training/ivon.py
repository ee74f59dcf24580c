"""IVON, a variational optimiser: Newton's method on the ELBO for a Gaussian posterior."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.distributions.softplus import inverse_softplus, softplus, softplus_ratio
from bayesify.noise.arguments import positive_number
from bayesify.training.elbo import ELBO
from bayesify.training.kernel.formulas import (
    PriorBlocks,
    Rates,
    centred_on,
    ivon_updated,
    prior_blocks,
    rho_of_precision,
)
from bayesify.training.kernel.interface import SampledPosterior
from bayesify.training.kernel.ivon_update import updated_by_kernel

__all__ = ["IVON"]

#: Weights that are updated at once on a CPU. Their temporary vectors stay in its caches; those of a
#: large network would be fresh memory in every operation.
_BLOCK = 65_536


class IVON(Optimizer):
    """Improved variational online Newton (Shen et al. 2024, arXiv 2402.17641, algorithm 1).

    The optimiser learns the posterior N(m, 1 / (ess (h + delta))) of each weight from the same
    gradients that Adam would get, where m is the mean and h a running average of the curvature of
    the mean nll. A step divides by the curvature, as Newton's method does, so that the learning
    rate has no unit, and the standard deviations need no learning rate of their own.

    The other numbers of the paper follow from the objective and cannot contradict it:

    * ess, the effective sample size (lambda in the paper), is ``num_data / temperature``; it is N
      for the ELBO. A cold posterior is ``ELBO(..., temperature=0.5)``, and is reported as such.
    * delta, the weight decay, is ``1 / (ess * prior_std**2)``, for which the prior must be
      Gaussian. Its mean may be anything, and its std may differ between parameters.
    * the weight samples of a step are ``ELBO(..., num_samples=S)``; any gradient estimator will do.

    The state is two vectors: the momentum, and h. Everything that takes a ``torch.optim.Optimizer``
    takes this one: schedulers, gradient accumulation, ``DistributedDataParallel``, checkpoints.

    Args:
        elbo: the objective that is trained.
        lr: alpha, the learning rate of the means; 1 would be a full Newton step.
        betas: the factors of the running averages of gradient and curvature. The second sets how
            fast the standard deviations move: over about 1 / (1 - beta2) steps.
        h0: the initial h, positive, in nats per example: the standard deviations are set to
            1 / sqrt(ess (h0 + delta)). None keeps those of the posterior, of a trained network
            or of ``init_std``, and takes h from them.
        deterministic_lr: learning rate of all other parameters, such as those of a layer that is
            not random or a learned noise, for which the rule is Adam's.

    Raises:
        TypeError: ``elbo`` is not an ELBO.
        ValueError: an argument is out of its range; or the objective has another posterior than
            ``MeanFieldGaussian``, another prior than Gaussian, ``kl="monte-carlo"``, geometric
            weights or temperature 0.

    Example:
        >>> import bayesify as bf
        >>> bnn = bf.BayesianModule(torch.nn.Linear(3, 2), prior=bf.Gaussian(0.5))
        >>> elbo = ELBO(bnn, num_data=100)
        >>> optimizer = IVON(elbo, lr=0.1)
        >>> optimizer.ess, round(optimizer.delta, 6)
        (100.0, 0.04)
        >>> x, y = torch.randn(8, 3), torch.randint(2, (8,))
        >>> for _ in range(5):
        ...     optimizer.zero_grad()
        ...     elbo(x, y).loss.backward()
        ...     _ = optimizer.step()
        >>> sorted(optimizer.state[bnn.posterior.mean]), sorted(optimizer.state[bnn.posterior.rho])
        (['momentum', 'step'], ['h'])
    """

    def __init__(
        self,
        elbo: ELBO,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        *,
        h0: float | None = 0.1,
        deterministic_lr: float = 1e-3,
    ) -> None:
        if not isinstance(elbo, ELBO):
            raise TypeError(
                f"IVON needs the objective, an ELBO, got {type(elbo).__name__}; write "
                "IVON(ELBO(bnn, num_data=N), lr=...)"
            )
        lr, deterministic_lr = (
            positive_number(name, value)
            for name, value in (("lr", lr), ("deterministic_lr", deterministic_lr))
        )
        h0 = None if h0 is None else positive_number("h0", h0)
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be two numbers of at least 0 and below 1, got {betas}")
        # Of Python, as JSON, and so a checkpoint, knows no numbers of NumPy.
        first, second = map(float, betas)
        self.elbo = elbo
        posterior, delta = _posterior_of(elbo), self.delta
        own = [posterior.mean, posterior.rho]
        groups: list[dict[str, Any]] = [{"params": own, "lr": lr, "betas": (first, second)}]
        others = [p for p in elbo.parameters() if p.requires_grad and all(p is not q for q in own)]
        if others:
            groups.append({"params": others})
        # Those of parameters that are not random; schedules and groups that come later read them.
        super().__init__(groups, {"lr": deterministic_lr, "betas": (0.9, 0.999)})
        if h0 is not None:
            with torch.no_grad():
                precision = torch.as_tensor(h0 + delta).to(posterior.rho)
                std = (self.ess * precision).rsqrt()
                posterior.rho.copy_(inverse_softplus(std).expand_as(posterior.rho))

    @property
    def ess(self) -> float:
        """The effective sample size, N / temperature."""
        return self.elbo.num_data / self.elbo.temperature

    @property
    def delta(self) -> float | Tensor:
        """The weight decay, 1 / (ess * prior_std^2); shape (D,) where it differs by weight.

        Raises:
            ValueError: the prior is not Gaussian any more.
        """
        blocks = _gaussian_blocks(self.elbo)
        precisions = [float(form.numbers[0]) / self.ess for form in blocks.forms]
        if len(set(precisions)) == 1:
            return precisions[0]
        mean = self.elbo.bnn.posterior.mean
        stops = torch.tensor([*blocks.starts[1:], mean.numel()])
        sizes = (stops - torch.tensor(blocks.starts)).to(mean.device)
        return mean.new_tensor(precisions).repeat_interleave(sizes)

    def check(self, elbo: ELBO) -> None:
        """Check that an objective is the one whose N and prior this optimiser has.

        Raises:
            ValueError: it is another one.
        """
        if elbo is not self.elbo:
            raise ValueError(
                "IVON must train the objective that it was made for, whose num_data and prior it "
                "has, but got another one; make the optimizer anew: IVON(elbo, lr=...)"
            )

    def state_of(self) -> tuple[Tensor, Tensor]:
        """Return momentum and h, each of shape (D,); before the first step they are created.

        h is then that of the posterior as it is, 1 / (ess std^2) - delta.

        Raises:
            ValueError: the objective is not one that IVON can train any more.
        """
        posterior = _posterior_of(self.elbo)
        of_mean, of_rho = self.state[posterior.mean], self.state[posterior.rho]
        if not of_mean:
            of_mean["step"] = torch.zeros(())
            of_mean["momentum"] = torch.zeros_like(posterior.mean)
        if not of_rho:
            precision = posterior.full_std.detach().square().mul_(self.ess).reciprocal_()
            of_rho["h"] = precision.sub_(self.delta)
        return of_mean["momentum"], of_rho["h"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state, and the standard deviations, which follow from h.

        The constructor sets them to those of ``h0``, also where the network was loaded before.

        Args:
            state_dict: of :meth:`state_dict`.
        """
        super().load_state_dict(state_dict)
        posterior = _posterior_of(self.elbo)
        h = self.state[posterior.rho].get("h")
        if h is None:
            return
        with torch.no_grad():
            rho = self._rho_of(h)
            # Those of a network that was loaded too differ by no more than rounding.
            if not torch.allclose(softplus(rho), posterior.full_std, rtol=1e-4, atol=0.0):
                posterior.rho.copy_(rho)

    def _rho_of(self, h: Tensor) -> Tensor:
        """Return rho as the update sets it for h, to the last bit."""
        rho, (mean, momentum, none) = torch.zeros_like(h), torch.zeros(3, len(h)).to(h).unbind()
        if self.elbo.fused and updated_by_kernel(
            _gaussian_blocks(self.elbo),
            SampledPosterior(mean, rho, None, None),
            (momentum, h.clone()),
            (none, none),
            Rates(lr=0.0, beta1=1.0, beta2=1.0, ess=self.ess),  # which leave h as it is
        ):
            return rho
        return rho_of_precision(h + self.delta, self.ess)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs, which is made with its objective."""
        return {**super().__getstate__(), "elbo": self.elbo}

    def next_rates(self) -> Rates:
        """Count one more step of the posterior and return its rates."""
        group, state = self.param_groups[0], self.state[self.elbo.bnn.posterior.mean]
        state["step"] += 1
        beta1, beta2 = map(float, group["betas"])
        correction = 1.0 - beta1 ** float(state["step"])
        return Rates(float(group["lr"]), beta1, beta2, correction1=correction, ess=self.ess)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss and its gradients; None where they are there.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_posterior()
        for group in self.param_groups[1:]:
            self._update_others(group)
        return loss

    def _update_posterior(self) -> None:
        posterior, prior_mean = _posterior_of(self.elbo), self.elbo.bnn.prior_mean
        mean, rho, mask = posterior.mean, posterior.rho, posterior.mask
        if mean.grad is None or rho.grad is None:
            return  # the kernel has updated them
        momentum, h = self.state_of()
        rates, size = self.next_rates(), mean.numel()
        if self.elbo.fused and updated_by_kernel(
            _gaussian_blocks(self.elbo),
            SampledPosterior(mean, rho, prior_mean, mask),
            (momentum, h),
            (mean.grad, rho.grad),
            rates,
        ):
            return
        delta = self.delta
        block = _BLOCK if mean.device.type == "cpu" else max(1, size)
        for start in range(0, size, block):
            part = slice(start, start + block)
            old_values = mean[part], rho[part], momentum[part], h[part]
            std = softplus(rho[part])
            ratio = softplus_ratio(std, out=std)
            new_values = ivon_updated(
                (mean[part], momentum[part], h[part]),
                in_mean=mean.grad[part],
                in_log_std=torch.div(rho.grad[part], ratio, out=ratio),
                centred=centred_on(
                    None if prior_mean is None else prior_mean[part],
                    mean[part],
                    None if mask is None else mask[part],
                ),
                delta=delta[part] if isinstance(delta, Tensor) else delta,
                rates=rates,
            )
            for old, new in zip(old_values, new_values, strict=True):
                old.copy_(new)

    def _update_others(self, group: dict[str, Any]) -> None:
        """Update the deterministic parameters by Adam."""
        posterior = _posterior_of(self.elbo)
        held = [
            parameter
            for parameter in group["params"]
            if parameter.grad is not None
            # Some code moves rho to a group of its own.
            and parameter is not posterior.mean
            and parameter is not posterior.rho
        ]
        if not held:
            return
        for parameter in held:
            if not (state := self.state[parameter]):
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        for dtype in {parameter.dtype for parameter in held}:
            alike = [parameter for parameter in held if parameter.dtype == dtype]
            states = [self.state[parameter] for parameter in alike]
            adam(
                alike,
                [parameter.grad for parameter in alike],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=0.0,
                eps=max(1e-8, torch.finfo(dtype).tiny),  # 1e-8 is 0 in float16
                maximize=False,
            )


def _gaussian_blocks(elbo: ELBO) -> PriorBlocks:
    """Return the prior of each block of weights; raise ValueError if one is not Gaussian."""
    blocks = prior_blocks(elbo.bnn.weight_prior, elbo.kl)
    if blocks is None or blocks.kind != "gaussian":
        raise ValueError(
            "IVON needs a Gaussian prior, whose precision is its weight decay; use "
            "prior=Gaussian(std), ByGroup of several, or another optimizer such as "
            f"torch.optim.Adam, got {elbo.bnn.prior!r}"
        )
    return blocks


def _posterior_of(elbo: ELBO) -> MeanFieldGaussian:
    """Return the posterior of an objective that IVON can train; see its errors."""
    posterior = elbo.bnn.posterior
    if type(posterior) is not MeanFieldGaussian:
        raise ValueError(
            "IVON needs a MeanFieldGaussian posterior, whose standard deviations it learns, got "
            f"{type(posterior).__name__}; use another optimizer such as torch.optim.Adam"
        )
    if not (posterior.mean.requires_grad and posterior.rho.requires_grad):
        raise ValueError("IVON trains mean and rho together, but one of them is frozen; thaw both")
    for name in ("complexity", "kl_factor"):
        if getattr(type(elbo), name) is not getattr(ELBO, name):
            raise ValueError(
                "IVON takes N and the prior from the ELBO, but "
                f"{type(elbo).__name__} has a {name} of its own; train it with another optimizer "
                "such as torch.optim.Adam"
            )
    if elbo.kl == "monte-carlo":
        raise ValueError(
            'IVON needs the closed form of the KL, got kl="monte-carlo"; leave out kl in ELBO'
        )
    if elbo.kl_weighting != "uniform":
        raise ValueError(
            "IVON has one effective sample size for all minibatches, so the KL must be weighted "
            f'alike in each, got kl_weighting="{elbo.kl_weighting}"; use "uniform"'
        )
    if elbo.temperature == 0.0:
        raise ValueError(
            "IVON needs a temperature above 0, got 0: the posterior would be a point; use "
            "posterior=Delta with another optimizer"
        )
    _gaussian_blocks(elbo)
    return posterior
