"""The evidence lower bound, per example."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from bayesify.distributions.kl import (
    KLMethod,
    KLWeighting,
    has_closed_form,
    kl_divergence,
    minibatch_weight,
    of_each_weight,
)
from bayesify.distributions.likelihoods.likelihood import check_for_each_example, log_probs_of
from bayesify.distributions.posteriors import Delta, WeightDraw
from bayesify.module.bayesian import BayesianModule
from bayesify.module.inputs import Inputs, check_not_copied
from bayesify.noise.arguments import number_from_0, whole_number
from bayesify.noise.keys import (
    NoiseKey,
    Stream,
    increment_counter,
    make_counter,
    process_count,
    process_rank,
    read_counter,
)
from bayesify.prediction.checks import check_tensors
from bayesify.training.convergence import StdResidual
from bayesify.training.kernel.drawn_weights import DrawnWeights

__all__ = ["ELBO", "ELBOTerms", "check_examples", "check_place", "detached", "fused_as"]


class ELBOTerms(NamedTuple):
    """The terms of the objective for one minibatch, and the network's outputs.

    ``loss = nll + kl_factor * (kl + penalty)`` is to be minimised, where ``kl_factor`` is
    ``kl_scale * temperature * weight_i / N``.

    A training step of ``fit`` needs the gradient of the KL but not its value. Where the value was
    not asked for, ``has_kl`` is False, and ``loss``, ``kl`` and ``penalty`` are NaN.

    Example:
        >>> elbo = ELBO(BayesianModule(nn.Linear(3, 2)), num_data=100, num_samples=5)
        >>> terms = elbo(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long))
        >>> terms.loss.shape, terms.outputs.shape, terms.kl_factor
        (torch.Size([]), torch.Size([5, 8, 2]), 0.01)
    """

    #: The objective, in nats per example.
    loss: Tensor
    #: -log p(y | x, w), averaged over the minibatch and the weight samples, in nats; under
    #: ``ClosedFormLastLayer`` its expectation over the last layer's weights, or a bound above it.
    nll: Tensor
    #: KL(q || p), summed over the weights, in nats; 0 for a point estimate.
    kl: Tensor
    #: -log p(mean) of a point estimate, summed over the weights, in nats; else 0.
    penalty: Tensor
    #: The network's outputs, shape (S, B_i, ...), without a graph, for metrics; under
    #: ``ClosedFormLastLayer`` their means over the last layer's weights.
    outputs: Tensor
    #: Factor on KL and penalty in the loss; NaN from a compiled objective.
    kl_factor: float = math.nan
    #: The loss's derivative in log std; None where a training step did not measure it.
    std_residual: StdResidual | None = None
    #: Whether ``loss``, ``kl`` and ``penalty`` were computed.
    has_kl: bool = True

    @classmethod
    def without_kl(cls, nll: Tensor, outputs: Tensor, kl_factor: float, unknown: Tensor) -> Self:
        """Return the terms of a step that knows the gradient of the KL only.

        Args:
            nll: see above, as the other two.
            outputs: see above.
            kl_factor: see above.
            unknown: NaN, for the values that were not computed.
        """
        return cls(unknown, nll, unknown, unknown, outputs, kl_factor, has_kl=False)


class ELBO(nn.Module):
    """The negative evidence lower bound of a Bayesian network, per example.

    For minibatch i with B_i of N examples (Blundell et al. 2015, eqs 2 and 8)::

        loss_i = mean over the batch of -log p(y | x, w) + temperature * weight_i * KL(q || p) / N

    At fixed noise, temperature 1 and the whole weight of the KL, the sum over an epoch of
    ``B_i * loss_i`` is the free energy of all N examples.
    The paper's learning rate eta on the summed minibatch loss is eta * B here.

    Args:
        bnn: the network.
        num_data: N, the number of training examples; it cannot be inferred from a minibatch.
        kl: ``"auto"`` uses the closed form of the KL where there is one, else Monte Carlo on the
            weights of the likelihood; ``"closed"`` and ``"monte-carlo"`` require one of them.
        kl_weighting: ``"uniform"``, or ``"geometric"`` for the paper's eq. 9.
        temperature: factor on the KL; 1 is the ELBO, anything else is a tempered objective.
        num_samples: S, weight samples per step.
        num_batches: M, needed for geometric weights.
        fused: whether ``forward`` may use the kernel of the compiled backend, on CPUs, for weight
            sampling and the priors that it knows; its noise then is that of this backend. So may
            the update of :class:`IVON`. False for PyTorch's operations and generators.

    Raises:
        TypeError: ``bnn`` is no :class:`BayesianModule`, or ``temperature`` is no number.
        ValueError: an argument is out of its range, or no closed form exists.

    Example:
        >>> bnn = BayesianModule(nn.Linear(3, 2))
        >>> elbo = ELBO(bnn, num_data=100)
        >>> terms = elbo(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long))
        >>> bool(torch.isclose(terms.loss, terms.nll + terms.kl / 100))
        True
    """

    #: Whether nll + KL / N is a free energy: the nll is -log of a probability.
    has_free_energy = True

    def __init__(
        self,
        bnn: BayesianModule,
        *,
        num_data: int,
        kl: KLMethod = "auto",
        kl_weighting: KLWeighting = "uniform",
        temperature: float = 1.0,
        num_samples: int = 1,
        num_batches: int | None = None,
        fused: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(bnn, BayesianModule):
            raise TypeError(
                f"bnn must be a BayesianModule, got {type(bnn).__name__}; wrap the network: "
                "ELBO(BayesianModule(net), num_data=N)"
            )
        num_data, num_samples = (
            whole_number(name, value)
            for name, value in (("num_data", num_data), ("num_samples", num_samples))
        )
        temperature = number_from_0("temperature", temperature)
        # Raises where the weighting, or what it needs, is wrong.
        minibatch_weight(
            kl_weighting, batch_index=0, num_batches=num_batches, batch_size=1, num_data=1
        )
        bnn.estimator.check_num_samples(num_samples)
        if kl not in ("auto", "closed", "monte-carlo") or (
            kl == "closed" and not has_closed_form(bnn.posterior, bnn.weight_prior)
        ):
            kl_divergence(bnn.posterior, bnn.weight_prior, method=kl)  # raises, and says why
        self.bnn = bnn
        self.num_data = num_data
        self.kl = kl
        self.kl_weighting = kl_weighting
        self.temperature = float(temperature)
        self.num_samples = num_samples
        self.num_batches = None if num_batches is None else whole_number("num_batches", num_batches)
        self.fused = fused
        self._step = make_counter()
        self._drawn_weights = DrawnWeights()

    def forward(
        self,
        inputs: Inputs,
        targets: Tensor,
        *,
        batch_index: int | None = None,
        kl_scale: float = 1.0,
        batch_size: int | None = None,
    ) -> ELBOTerms:
        """Compute the objective of one minibatch, with fresh noise.

        Args:
            inputs: as for ``BayesianModule.predict``, B_i examples.
            targets: shape (B_i, ...).
            batch_index: i - 1, the minibatch's place in the epoch, for geometric weights.
            kl_scale: a further factor on the KL, for its warm-up.
            batch_size: of several processes, the number of examples of all, for geometric weights;
                None is the number of these in each process.

        Returns:
            Loss and nll in nats per example; kl and penalty in nats, summed over the weights.

        Raises:
            TypeError: targets are no tensor.
            ValueError: targets do not fit, ``batch_index`` or ``kl_scale`` is out of its range, or
                a geometric weight lacks its index.
        """
        check_tensors(targets=targets)
        bnn = self.bnn
        bnn.estimator.check_num_samples(self.num_samples)
        bnn.own_trained_parameters()
        if not torch.compiler.is_compiling() and self.step == 0:
            check_not_copied(inputs, targets)
        # Each process of a distributed run has its own samples.
        first = process_rank() * self.num_samples
        samples = range(first, first + self.num_samples)
        if self.uses_kernel():
            outputs, kl = self._drawn_weights.sample_outputs(
                bnn, inputs, step=self.step, samples=samples
            )
            nll, penalty = self.nll(outputs, targets), torch.zeros_like(kl)
            size = outputs.shape[1] * process_count() if batch_size is None else batch_size
            factor = self.kl_factor(size, batch_index=batch_index, kl_scale=kl_scale)
        else:
            step = read_counter(self._step)
            key = NoiseKey(bnn.seed, Stream.TRAINING, step)
            nll, outputs, draw = self._run(inputs, targets, key, samples)
            size = outputs.shape[1] * process_count() if batch_size is None else batch_size
            factor = self.kl_factor(size, batch_index=batch_index, kl_scale=kl_scale)
            # With factor 0 the value is still reported, but needs no backward pass. A branch
            # decides, because in compiled code the factor is symbolic and cannot be an argument.
            with_grad = torch.is_grad_enabled()
            if not factor > 0.0:
                with_grad = False
            with torch.set_grad_enabled(with_grad):
                kl, penalty = self.complexity(draw, step, samples)
        self.count_step()
        loss = nll + factor * (kl + penalty)
        # As an output of compiled code a number would have it compiled anew for each value.
        reported = math.nan if torch.compiler.is_compiling() else factor
        return ELBOTerms(loss, nll, kl, penalty, detached(outputs), reported)

    def _run(
        self, inputs: Inputs, targets: Tensor, key: NoiseKey, samples: range
    ) -> tuple[Tensor, Tensor, WeightDraw | None]:
        """Return the nll, the outputs (S, B_i, ...), and the weights that were drawn."""
        bnn = self.bnn
        if not bnn.integrates_outputs:
            outputs, draw = bnn.sample_outputs(inputs, key, samples)
            return self.nll(outputs, targets), outputs, draw
        if type(self).nll is not ELBO.nll:
            raise TypeError(
                f"{type(self).__name__} has an nll of its own, which ClosedFormLastLayer cannot "
                "integrate; use ELBO, or estimator=LocalReparameterization()"
            )
        mean, variance = bnn.output_moments(inputs, key, samples)
        return self.expected_nll(mean, variance, targets), mean, None

    def expected_nll(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """Compute -E[log p(y | x, w)] over Gaussian outputs, averaged as by :meth:`nll`, in nats.

        Args:
            mean: their means, shape (S, B_i, ...).
            variance: their variances, of the same shape.
            targets: shape (B_i, ...).

        Raises:
            TypeError: the likelihood has no closed form.
        """
        dtype = torch.promote_types(mean.dtype, torch.float32)
        wide = mean.to(dtype), variance.to(dtype)
        likelihood = self.bnn.likelihood
        expected = likelihood.expected_log_prob(*wide, targets)
        check_for_each_example(expected, mean, f"{type(likelihood).__name__}.expected_log_prob")
        return -expected.mean()

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute -log p(y | x, w) of outputs (S, B_i, ...), averaged over both axes, in nats."""
        return -log_probs_of(self.bnn.likelihood, outputs, targets).mean()

    def kl_factor(
        self, batch_size: int, *, batch_index: int | None = None, kl_scale: float = 1.0
    ) -> float:
        """The factor on KL and penalty in the loss of a minibatch of B_i examples.

        Raises:
            ValueError: the minibatch is empty, ``batch_index`` or ``kl_scale`` is out of its range,
                or a geometric weight lacks its index.
        """
        check_examples(batch_size)
        check_place(batch_index, kl_scale)
        weight = minibatch_weight(
            self.kl_weighting,
            batch_index=batch_index,
            num_batches=self.num_batches,
            batch_size=batch_size,
            num_data=self.num_data,
        )
        return kl_scale * self.temperature * weight / self.num_data

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of an objective other than the ELBO, as JSON.

        It is not called ``config``, which Hugging Face's Trainer takes for that of its models.
        """
        return {}

    @property
    def running(self) -> dict[str, float]:
        """What an objective other than the ELBO carries from step to step, as JSON."""
        return {}

    @running.setter
    def running(self, values: dict[str, float]) -> None:
        """Restore it from a checkpoint; the ELBO has nothing."""

    @property
    def step(self) -> int:
        """The number of minibatches so far; with the seed it determines the noise of the next."""
        return int(self._step)

    @step.setter
    def step(self, step: int) -> None:
        self._step = make_counter(step)

    def count_step(self) -> None:
        """Count one minibatch."""
        increment_counter(self._step)

    def complexity(
        self, draw: WeightDraw | None, step: int | Tensor, samples: range
    ) -> tuple[Tensor, Tensor]:
        """Compute KL(q || p) and the penalty of a point estimate, in nats, summed over the weights.

        Args:
            draw: the weights of the likelihood, or None where the estimator draws no weight vector.
            step: the step, whose noise is drawn where a Monte Carlo KL has no ``draw``.
            samples: the indices of its weight samples.
        """
        bnn = self.bnn
        q, p, mean = bnn.posterior, bnn.weight_prior, bnn.posterior.mean
        # Sums over all weights overflow half precision.
        dtype = torch.promote_types(mean.dtype, torch.float32)
        zero = torch.zeros((), dtype=dtype, device=mean.device)
        if isinstance(q, Delta):
            centred = mean if bnn.prior_mean is None else mean - bnn.prior_mean
            log_prior = of_each_weight(p.log_prob(centred.to(dtype)), centred)
            if q.mask is not None:
                log_prior = torch.where(q.mask, log_prior, 0.0)
            return zero, -log_prior.sum(dtype=zero.dtype)
        if draw is None and (self.kl == "monte-carlo" or not has_closed_form(q, p)):
            # A draw of the KL's own, because the estimator has no weight vector.
            draw = q.draw(q.noise(NoiseKey(bnn.seed, Stream.DIVERGENCE, step), samples))
        return kl_divergence(q, p, draw, method=self.kl, prior_mean=bnn.prior_mean), zero

    def uses_kernel(self) -> bool:
        """Return whether :meth:`forward` samples by the kernel, as everything is now."""
        if torch.compiler.is_compiling():
            return False
        if (
            self.fused
            and type(self).complexity is ELBO.complexity
            and "complexity" not in vars(self)
        ):
            return self._drawn_weights.prepare(self.bnn, self.kl)
        self._drawn_weights.free()
        return False

    def get_extra_state(self) -> Tensor:
        """The step counter, so that ``state_dict`` resumes the noise."""
        return self._step.clone()

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the step counter."""
        self.step = int(state)


@contextmanager
def fused_as(elbo: ELBO, fused: bool) -> Iterator[None]:
    """Let an objective, and IVON, use the kernel within, or not.

    Example:
        >>> elbo = ELBO(BayesianModule(nn.Linear(3, 2)), num_data=10)
        >>> with fused_as(elbo, False):
        ...     within = elbo.fused
        >>> within, elbo.fused
        (False, True)
    """
    before, elbo.fused = elbo.fused, fused
    try:
        yield
    finally:
        elbo.fused = before


def check_examples(batch_size: int) -> None:
    """Raise ValueError where a minibatch is empty.

    Example:
        >>> check_examples(0)
        Traceback (most recent call last):
        ValueError: a minibatch must hold at least one example, got none
    """
    if batch_size < 1:
        raise ValueError("a minibatch must hold at least one example, got none")


def check_place(batch_index: Any, kl_scale: Any) -> None:
    """Raise ValueError where a minibatch's index or the factor on its KL is out of its range.

    Example:
        >>> check_place(0, float("nan"))
        Traceback (most recent call last):
        ValueError: kl_scale must be a finite number of at least 0, got nan
    """
    if torch.compiler.is_compiling():  # numbers may be symbols there
        return
    if not (isinstance(kl_scale, Real) and 0.0 <= float(kl_scale) < math.inf):
        raise ValueError(f"kl_scale must be a finite number of at least 0, got {kl_scale!r}")
    is_index = isinstance(batch_index, Integral) and not isinstance(batch_index, bool)
    if batch_index is not None and not (is_index and batch_index >= 0):
        raise ValueError(f"batch_index must be a whole number of at least 0, got {batch_index!r}")


def detached(outputs: Tensor) -> Tensor:
    """Outputs without their graph; copied where they are views of parameters.

    A training step changes the parameters before its outputs are measured.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> outputs = detached(weight.expand(3, 2))
        >>> _ = nn.init.ones_(weight)
        >>> float(outputs.sum())
        0.0
    """
    if torch.compiler.is_compiling():
        return outputs.detach()
    base = outputs._base if outputs._is_view() else outputs
    shared = base is None or base.is_leaf
    return outputs.detach().clone() if shared else outputs.detach()
