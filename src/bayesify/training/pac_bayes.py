"""PAC-Bayes objectives: train a posterior on a bound on its risk instead of the ELBO."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from bayesify.distributions.kl import kl_divergence
from bayesify.distributions.likelihoods.likelihood import log_probs_of
from bayesify.module.bayesian import BayesianModule
from bayesify.noise.arguments import one_number, whole_number
from bayesify.training.certifiable import check_certifiable
from bayesify.training.elbo import ELBO, check_examples, check_place

__all__ = ["MIN_BOUND_EXAMPLES", "PACBayesForm", "PACBayesObjective", "best_lambda", "risk_bound"]

PACBayesForm = Literal["f-quad", "f-classic", "f-lambda"]

#: The fewest examples for which the bound is proven (Maurer 2004, A Note on the PAC Bayesian
#: Theorem).
MIN_BOUND_EXAMPLES = 8
#: Steps between two computations of the KL, which costs as much as a weight sample.
_KL_EVERY = 20
#: Weight of the newest minibatch in the running loss.
_NEWEST = 0.02


class PACBayesObjective(ELBO):
    """A PAC-Bayes bound on the risk, as an objective for ``fit``.

    With the bounded cross-entropy L of the minibatch, in [0, 1], r = (KL + log(2 sqrt(n) / delta))
    / (2 n) and n = ``num_bound`` (Perez-Ortiz et al. 2021, Tighter Risk Certificates for Neural
    Networks)::

        f-quad    = (sqrt(L + r) + sqrt(r))^2
        f-classic = L + sqrt(r)
        f-lambda  = L / (1 - lambda / 2) + 2 r / (lambda (1 - lambda / 2))

    The least f-lambda over lambda is f-quad (``best_lambda``). In training, lambda is 1 in the
    first N / B_i steps, and then chosen anew after as many (Thiemann et al. 2017).

    A step follows the gradient of f divided by its derivative in L, which is the gradient of an
    ELBO whose KL has another factor. All backends therefore support it. The factor needs the values
    of L and KL: a running mean over some 50 minibatches, and the KL of every 20th step. In the
    terms and in the history, ``nll`` is the bounded cross-entropy in nats, L log(1 / p_min), and
    ``loss`` is nll + kl_factor * KL; ``bound`` returns f itself.

    Args:
        bnn: a network whose prior was fixed before the examples of the bound were seen. All that
            is not random must be frozen, see ``certify``.
        num_data: N, the number of training examples, at least 8.
        form: ``"f-quad"``, ``"f-classic"`` or ``"f-lambda"``.
        num_bound: n, the number of examples that the prior has not seen, at least 8; None stands
            for N.
        delta: the probability with which the bound may fail.
        p_min: the least probability that the cross-entropy distinguishes from 0.
        num_samples: S, weight samples per step.
        fused: see ``ELBO``.

    Raises:
        ValueError: an argument is out of its range, or the network cannot be certified.
        TypeError: ``num_data`` or ``num_bound`` is no whole number.

    Example:
        >>> from bayesify.distributions.priors import Gaussian
        >>> net = torch.nn.Linear(3, 2)
        >>> bnn = BayesianModule(net, prior=Gaussian(0.1), prior_mean="initial", init_std=0.1)
        >>> objective = PACBayesObjective(bnn, num_data=100)
        >>> terms = objective(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long))
        >>> terms.loss.shape, 0.0 < objective.bound() < 1.0
        (torch.Size([]), True)
    """

    #: The shares max(p, p_min) of the classes add up to more than 1.
    has_free_energy = False

    def __init__(
        self,
        bnn: BayesianModule,
        *,
        num_data: int,
        form: PACBayesForm = "f-quad",
        num_bound: int | None = None,
        delta: float = 0.025,
        p_min: float = 1e-5,
        num_samples: int = 1,
        fused: bool = True,
    ) -> None:
        super().__init__(bnn, num_data=num_data, num_samples=num_samples, fused=fused)
        if form not in get_args(PACBayesForm):
            known = ", ".join(f'"{name}"' for name in get_args(PACBayesForm))
            raise ValueError(f"form must be one of {known}, got {form!r}")
        if self.num_data < MIN_BOUND_EXAMPLES:
            raise ValueError(f"num_data must be at least {MIN_BOUND_EXAMPLES}, got {num_data}")
        num_bound = self.num_data if num_bound is None else whole_number("num_bound", num_bound)
        if not MIN_BOUND_EXAMPLES <= num_bound <= num_data:
            raise ValueError(
                f"num_bound must be from {MIN_BOUND_EXAMPLES} to num_data {num_data}, got "
                f"{num_bound}"
            )
        for name, value in (("delta", delta), ("p_min", p_min)):
            if not 0.0 < one_number(name, value) < 1.0:
                raise ValueError(f"{name} must be above 0 and below 1, got {value}")
        check_certifiable(bnn)
        self.form = form
        self.num_bound = num_bound
        self.delta, self.p_min = float(delta), float(p_min)
        self._lambda = 1.0
        self._kl = 0.0
        # A tensor, so that a step on a GPU need not wait for it; NaN before the first minibatch.
        self._loss = torch.full((), math.nan, dtype=torch.float64)
        self._newest = self._loss
        # The loss before this step, and of the step's weight samples so far the sum and the number:
        # they may come one after the other, and a captured graph runs no Python between them.
        self._before = self._loss.clone()
        self._in_step = torch.zeros(2, dtype=torch.float64)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute -log max(p(y | x, w), p_min) of outputs (S, B_i, K), averaged, in nats."""
        log_probs = log_probs_of(self.bnn.likelihood, outputs, targets)
        nll = -log_probs.clamp(min=math.log(self.p_min)).mean()
        newest = nll.detach().to(torch.float64) / -math.log(self.p_min)
        self._newest = newest
        if nll.requires_grad:  # a training step
            self._average(newest)
        return nll

    def _average(self, newest: Tensor) -> None:
        """Update the running loss by that of a weight sample, or of all samples of a step."""
        if self._loss.device != newest.device:
            held = (self._loss, self._before, self._in_step)
            self._loss, self._before, self._in_step = (each.to(newest.device) for each in held)
        self._in_step.add_(torch.stack([newest, torch.ones_like(newest)]))
        total, count = self._in_step.unbind()
        mean = total / count
        started = torch.where(self._before.isnan(), mean, self._before)
        self._loss.copy_(started.lerp(mean, _NEWEST))

    def count_step(self) -> None:
        """Count one minibatch, and begin with the running loss of the next."""
        super().count_step()
        self._before.copy_(self._loss)
        self._in_step.zero_()

    def kl_factor(
        self,
        batch_size: int,
        *,
        batch_index: int | None = None,
        kl_scale: float = 1.0,
    ) -> float:
        """The derivative of f in the KL, divided by that in the nll."""
        check_examples(batch_size)
        check_place(batch_index, kl_scale)
        if self.step % _KL_EVERY == 0:
            self._kl = self._current_kl()
        loss, r = float(self._loss), self._complexity_of(self._kl)
        if math.isnan(loss):  # before the first training step
            loss = float(self._newest)
        if self.form == "f-quad":
            ratio = math.sqrt(r / (loss + r))
            slope = (1.0 + ratio) / (2.0 * ratio)
        elif self.form == "f-classic":
            slope = 1.0 / (4.0 * math.sqrt(r))
        else:
            steps = -(-self.num_data // batch_size)
            if self.step > 0 and self.step % steps == 0:
                self._lambda = best_lambda(loss, r)
            slope = 1.0 / self._lambda
        return kl_scale * -math.log(self.p_min) * slope / self.num_bound

    def bound(self) -> float:
        """Return f, a share from 0, at the running loss and the network's KL; NaN before a step."""
        r = self._complexity_of(self._current_kl())
        return risk_bound(float(self._loss), r, self.form, self._lambda)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by which it differs from the ELBO, as JSON."""
        names = ("form", "num_bound", "delta", "p_min")
        return {name: getattr(self, name) for name in names}

    @property
    def running(self) -> dict[str, float]:
        """The running values, as JSON, so that a resumed run equals an uninterrupted one."""
        return {"loss": float(self._loss), "kl": self._kl, "lambda": self._lambda}

    @running.setter
    def running(self, values: dict[str, float]) -> None:
        self._loss.fill_(values["loss"])
        self._before.fill_(values["loss"])
        self._kl, self._lambda = values["kl"], values["lambda"]

    def get_extra_state(self) -> Tensor:
        """The step counter and the running values, so that ``state_dict`` resumes both."""
        numbers = [float(super().get_extra_state()), *self.running.values()]
        return torch.tensor(numbers, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the step counter and the running values."""
        step, *values = state.flatten().tolist()
        self.step = int(step)
        if values:  # earlier versions stored the step alone
            self.running = dict(zip(("loss", "kl", "lambda"), values, strict=True))

    def _complexity_of(self, kl: float) -> float:
        n = self.num_bound
        return (kl + math.log(2.0 * math.sqrt(n) / self.delta)) / (2.0 * n)

    @torch.no_grad()
    def _current_kl(self) -> float:
        bnn = self.bnn
        return float(kl_divergence(bnn.posterior, bnn.weight_prior, prior_mean=bnn.prior_mean))


def risk_bound(loss: float, r: float, form: PACBayesForm, lambda_: float = 1.0) -> float:
    """Return f-quad, f-classic or f-lambda, of a loss in [0, 1] and the complexity r.

    Example:
        >>> round(risk_bound(0.02, 0.001, "f-quad"), 5), round(risk_bound(0.02, 0.0, "f-quad"), 5)
        (0.03117, 0.02)
    """
    if form == "f-quad":
        return (math.sqrt(loss + r) + math.sqrt(r)) ** 2
    if form == "f-classic":
        return loss + math.sqrt(r)
    return (loss + 2.0 * r / lambda_) / (1.0 - lambda_ / 2.0)


def best_lambda(loss: float, r: float) -> float:
    """Return the lambda in (0, 1] of the least f-lambda, which is then f-quad.

    Example:
        >>> found = best_lambda(0.02, 0.001)
        >>> round(risk_bound(0.02, 0.001, "f-lambda", found), 5)
        0.03117
    """
    return 2.0 / (math.sqrt(loss / r + 1.0) + 1.0)
