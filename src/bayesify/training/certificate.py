"""Risk certificates: a bound on the error of a randomised classifier on new examples."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bayesify.distributions.kl import kl_divergence
from bayesify.distributions.likelihoods import CategoricalLikelihood
from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.estimators import LocalReparameterization
from bayesify.estimators.module_attributes import ModuleAttributes, kept_attributes
from bayesify.estimators.network_state import evaluation_mode
from bayesify.module.bayesian import BayesianModule
from bayesify.module.inputs import Inputs, arguments_of, count_examples, inputs_of
from bayesify.module.random_network import check_bayesian
from bayesify.module.shared_pass import in_one_pass
from bayesify.noise.arguments import one_number, whole_number
from bayesify.noise.keys import NoiseKey, Stream, derived_seed
from bayesify.prediction.checks import check_tensors
from bayesify.training.backends.leaves import LeafPosterior
from bayesify.training.binary_kl import binary_kl_inverse
from bayesify.training.certifiable import check_certifiable
from bayesify.training.pac_bayes import MIN_BOUND_EXAMPLES

__all__ = ["Certificate", "certify", "sampled_error"]

#: Examples of one forward pass, where each has weights of its own.
_ROWS = 2048
#: Weights that are drawn at once, where each example has a whole vector of them.
_WEIGHTS = 2**20
#: The greatest difference of logits that counts as rounding, relative to the class's largest.
_ROUNDING = 1e-2
#: Pairs of examples whose logits are compared with those in a larger batch.
_PAIRS = 16


@dataclass(frozen=True)
class Certificate:
    """A bound on the error of a randomised classifier, which draws weights for each prediction.

    With probability ``confidence`` over the draw of the ``num_examples`` examples of the bound and
    of the ``num_samples`` weight samples, at most ``error_bound`` percent of new examples are
    misclassified. Print it for the guarantee in words.

    Attributes:
        error_bound: the certified error, in percent.
        error: the error on the examples of the bound, in percent, estimated by weight samples.
        error_sampling_bound: the upper bound on that error's expectation over the weights.
        kl: KL(q || p) of posterior and prior, in nats.
        num_examples: n, the examples of the bound.
        num_samples: m, the weight samples.
        delta: the probability with which the PAC-Bayes bound may fail.
        delta_sampling: the probability with which the bound on the sampling error may fail.
        num_candidates: the certificates among which this one was chosen.

    Example:
        >>> found = Certificate(2.471, 1.9, 2.0, 0.1, 30_000, 200_000, 0.025, 0.01)
        >>> str(found)[:55]
        'With probability 0.965 over the data, at most 2.48 % of'
        >>> found.confidence
        0.965
    """

    error_bound: float
    error: float
    error_sampling_bound: float
    kl: float
    num_examples: int
    num_samples: int
    delta: float
    delta_sampling: float
    num_candidates: int = 1

    @property
    def confidence(self) -> float:
        """1 - delta - delta_sampling."""
        return 1.0 - self.delta - self.delta_sampling

    def __str__(self) -> str:
        shown = math.ceil(100.0 * self.error_bound) / 100.0  # a bound is not rounded down
        confidence = math.floor(1e4 * self.confidence + 1e-6) / 1e4  # nor this up
        chosen = (
            f" It holds for all {self.num_candidates} candidates at once."
            if self.num_candidates > 1
            else ""
        )
        return (
            f"With probability {confidence:g} over the data, at most {shown:.2f} "
            "% of new examples like these are misclassified by the randomised classifier, which "
            f"draws new weights for each prediction (n = {self.num_examples:,}, KL = {self.kl:.1f} "
            f"nats, {self.error:.2f} % observed).{chosen} It does not cover the mean weights, "
            "averaged predictions, or examples of another distribution."
        )


@torch.no_grad()
def certify(
    bnn: BayesianModule,
    inputs: Inputs,
    targets: Tensor,
    *,
    prior_indices: Tensor | Sequence[int],
    delta: float = 0.025,
    delta_sampling: float = 0.01,
    num_samples: int = 100_000,
    num_candidates: int = 1,
    seed: int | None = None,
) -> Certificate:
    """Certify the error of the randomised classifier on new examples.

    The bound inverts the binary KL twice (Perez-Ortiz et al. 2021, Tighter Risk Certificates for
    Neural Networks; Langford and Caruana 2001 for the sampling)::

        sampled = kl^-1(error | log(2 / delta_sampling) / m)
        bound   = kl^-1(sampled | (KL(q || p) + log(2 sqrt(n) / delta)) / n)

    It is evaluated on the examples that the prior has not seen. The posterior may be trained on
    all of them. A sample draws weights and one of the n examples, so that the m samples are
    independent. Where local reparametrisation is exact, as in fully connected networks, a pass over
    2048 examples draws as many; other networks draw whole weight vectors, one for each example.

    The guarantee covers the randomised classifier only, on new examples that are drawn
    independently from the distribution of the given ones. It holds if the prior, its centre and
    all that is frozen in the network were chosen without the n examples, and if the settings of
    prior and network were not chosen by certificates. If they were, say among how many by
    ``num_candidates``: delta and delta_sampling are then divided by their number (union bound).

    Args:
        bnn: the network. Its prior is fixed, and all that is not random is frozen.
        inputs: as for ``BayesianModule.predict``, all N examples, those of the prior included.
        targets: class indices, shape (N,).
        prior_indices: the examples that prior, its centre or the choice of settings depend on, as
            integers or as a mask of shape (N,); () for a prior that has seen no data.
        delta: the probability with which the PAC-Bayes bound may fail.
        delta_sampling: the probability with which the bound on the sampling error may fail.
        num_samples: m; its error falls as 1 / sqrt(m).
        num_candidates: the number of certificates among which this one is, or will be, chosen.
        seed: a seed for other weight samples; None stands for the seed of the network.

    Raises:
        TypeError: ``prior_indices`` are neither integers nor a mask, a number of samples or
            candidates is no integer, or ``targets`` is no tensor.
        ValueError: an argument is out of its range, fewer than 8 examples are left for the bound
            (Maurer 2004), or the network cannot be certified.

    Example:
        >>> from bayesify.distributions.priors import Gaussian
        >>> net = torch.nn.Linear(3, 2)
        >>> bnn = BayesianModule(net, prior=Gaussian(0.1), prior_mean="initial", init_std=0.1)
        >>> x = torch.randn(400, 3)
        >>> found = certify(bnn, x, bnn.mean_outputs(x).argmax(-1), prior_indices=range(200))
        >>> found.num_examples, round(found.kl, 9), found.confidence
        (200, 0.0, 0.965)
        >>> found.error < found.error_bound < 50.0
        True
    """
    delta, delta_sampling = (
        one_number(name, value)
        for name, value in (("delta", delta), ("delta_sampling", delta_sampling))
    )
    if not (min(delta, delta_sampling) > 0.0 and delta + delta_sampling < 1.0):
        raise ValueError(
            f"delta and delta_sampling must be above 0 and sum to less than 1, got {delta} and "
            f"{delta_sampling}"
        )
    inputs = inputs_of(inputs, bnn.posterior.mean.device, bnn.net)
    num_samples = whole_number("num_samples", num_samples)
    num_candidates = whole_number("num_candidates", num_candidates)
    count = _count_checked(inputs, targets)
    check_certifiable(bnn, tree_map_only(Tensor, lambda each: each[:_ROWS], inputs))
    rest = _without(prior_indices, count)
    wrong = _count_wrong(bnn, inputs, targets, rest, num_samples, seed)
    n, kl = len(rest), _exact_kl(bnn)
    error = wrong / num_samples
    sampled = binary_kl_inverse(
        error, math.log(2.0 * num_candidates / delta_sampling) / num_samples
    )
    bound = binary_kl_inverse(
        sampled, (kl + math.log(2.0 * math.sqrt(n) * num_candidates / delta)) / n
    )
    return Certificate(
        error_bound=100.0 * bound,
        error=100.0 * error,
        error_sampling_bound=100.0 * sampled,
        kl=kl,
        num_examples=n,
        num_samples=num_samples,
        delta=delta,
        delta_sampling=delta_sampling,
        num_candidates=num_candidates,
    )


@torch.no_grad()
def sampled_error(
    bnn: BayesianModule,
    inputs: Inputs,
    targets: Tensor,
    *,
    num_samples: int = 100_000,
    seed: int | None = None,
) -> float:
    """Estimate the error of the randomised classifier on these examples, in percent.

    It is the error that a certificate bounds, without any guarantee: of ``num_samples`` independent
    pairs of weights and example.

    Args:
        bnn: the network.
        inputs: as for ``BayesianModule.predict``, N examples.
        targets: class indices, shape (N,).
        num_samples: number of pairs.
        seed: see :func:`certify`.

    Raises:
        TypeError: ``bnn`` is no ``BayesianModule``, ``num_samples`` is no integer, or the targets
            are no tensor.
        ValueError: ``num_samples`` is below 1, the targets are not class indices of shape (N,), the
            likelihood is not a ``CategoricalLikelihood``, the posterior not a
            ``MeanFieldGaussian``, or the network mixes the examples of a batch.

    Example:
        >>> x = torch.zeros(10, 3)
        >>> bnn = BayesianModule(torch.nn.Linear(3, 2))
        >>> 0.0 <= sampled_error(bnn, x, torch.zeros(10, dtype=torch.long)) <= 100.0
        True
    """
    check_bayesian(bnn, "sampled_error")
    inputs = inputs_of(inputs, bnn.posterior.mean.device, bnn.net)
    num_samples = whole_number("num_samples", num_samples)
    count = _count_checked(inputs, targets)
    if not isinstance(bnn.likelihood, CategoricalLikelihood):
        raise ValueError(
            "sampled_error is the error of a classifier, got the likelihood "
            f"{type(bnn.likelihood).__name__}; use bnn.predict and bayesify.metrics"
        )
    if not isinstance(bnn.posterior, MeanFieldGaussian):
        raise ValueError(
            "sampled_error is written for a mean field, got the posterior "
            f"{type(bnn.posterior).__name__}; use bnn.predict and bayesify.metrics.error_percent"
        )
    picks = torch.arange(count)
    return 100.0 * _count_wrong(bnn, inputs, targets, picks, num_samples, seed) / num_samples


def _count_checked(inputs: Inputs, targets: Tensor) -> int:
    """Return N, the number of examples, after a check of their targets.

    Raises:
        TypeError: the targets are no tensor.
        ValueError: they are not class indices of shape (N,).
    """
    check_tensors(targets=targets)
    count = count_examples(inputs)
    if targets.shape != (count,) or targets.dtype != torch.int64:
        raise ValueError(
            f"targets must be class indices of shape ({count},) and dtype torch.int64, got shape "
            f"{tuple(targets.shape)} and {targets.dtype}"
        )
    return count


def _without(prior_indices: Tensor | Sequence[int], count: int) -> Tensor:
    """The indices of the examples of the bound, shape (n,).

    Raises:
        TypeError: the indices are neither integers nor a mask.
        ValueError: an index is out of range, or too few are left.
    """
    try:
        seen = torch.as_tensor(prior_indices)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            "prior_indices must be a sequence or a tensor of integers, or a mask, got "
            f"{prior_indices!r:.60}; pass () for a prior that has seen no data"
        ) from error
    if seen.dtype == torch.bool:
        if seen.shape != (count,):
            raise ValueError(
                f"a mask of prior_indices must have shape ({count},), got {tuple(seen.shape)}"
            )
        seen = seen.nonzero().squeeze(-1)
    elif seen.numel() and seen.dtype not in (torch.int64, torch.int32, torch.int16):
        # In one byte each it may be a mask, which would be read as the indices 0 and 1.
        raise TypeError(
            f"prior_indices must be integers or a mask, got {seen.dtype}; write .long() for "
            "indices and .bool() for a mask"
        )
    seen = seen.to("cpu", torch.int64)
    if seen.numel() and bool(((seen < 0) | (seen >= count)).any()):
        raise ValueError(
            f"prior_indices must lie from 0 to {count - 1}, got {int(seen.min())} to "
            f"{int(seen.max())}"
        )
    is_left = torch.ones(count, dtype=torch.bool)
    is_left[seen] = False
    left = is_left.nonzero().squeeze(-1)
    if len(left) < MIN_BOUND_EXAMPLES:
        raise ValueError(
            f"a certificate needs at least {MIN_BOUND_EXAMPLES} examples that the prior has not "
            f"seen, got {len(left)}: on the examples of the prior the network has no bound; train "
            "the prior on a part of the data, and pass its indices"
        )
    return left


def _count_wrong(
    bnn: BayesianModule,
    inputs: Inputs,
    targets: Tensor,
    rest: Tensor,
    num_samples: int,
    seed: int | None,
) -> int:
    """Count misclassified examples among ``num_samples`` draws of (weights, example)."""
    seed = bnn.seed if seed is None else seed
    generator = torch.Generator().manual_seed(derived_seed(seed, Stream.CERTIFICATE, 0))
    picks = rest[torch.randint(len(rest), (num_samples,), generator=generator)]
    device = bnn.posterior.mean.device
    picks, targets = picks.to(device), targets.to(device)
    with bnn.in_turn(), evaluation_mode(bnn.net):
        before = bnn.estimator
        bnn.estimator = LocalReparameterization()
        try:
            _check_mixes_no_examples(bnn, inputs, rest[:_ROWS].to(device), seed)
            wrong = _wrong_in_passes(bnn, inputs, targets, picks, seed, rows=_ROWS)
            group = _WEIGHTS // bnn.layout.num_weights
            if wrong is None and group > 1:
                wrong = _wrong_in_groups(bnn, inputs, targets, picks, seed, group)
            if wrong is None:
                wrong = _wrong_in_passes(bnn, inputs, targets, picks, seed, rows=1)
        finally:
            bnn.estimator = before
    assert wrong is not None
    return wrong


def _check_mixes_no_examples(bnn: BayesianModule, inputs: Inputs, rows: Tensor, seed: int) -> None:
    """Raise ValueError where an example's logits depend on the others of its batch."""
    noise = bnn.posterior.noise(NoiseKey(seed, Stream.CERTIFICATE, 0), range(1))
    weights = bnn.posterior.draw(noise).weights[0]

    def logits(some: Tensor) -> Tensor:
        args, kwargs = arguments_of(tree_map_only(Tensor, lambda each: each[some], inputs))
        with kept_attributes(bnn.net):
            return bnn.tensor_of(bnn.run_with(weights, *args, **kwargs))

    def logits_in_pairs() -> Tensor:
        # Of two, since a network may fail on a batch of one, as for a standard deviation.
        even = rows[: min(2 * _PAIRS, max(2, len(rows) // 2 * 2))]
        return torch.cat([logits(pair) for pair in even.split(2)])

    together = logits(rows)
    _check_logits(together.unsqueeze(0), None)
    in_pairs = logits_in_pairs()
    # By class, as the logits of a class that is masked are far from the others.
    share = max(_ROUNDING, 16.0 * torch.finfo(together.dtype).eps)
    limit = share * in_pairs.nan_to_num(0.0, 0.0, 0.0).abs().amax(0)

    def differ(others: Tensor) -> Tensor:
        equal = (others == in_pairs) | (others.isnan() & in_pairs.isnan())
        return ~(equal | ((others - in_pairs).abs() <= limit)).all(-1)

    wrong = differ(together[: len(in_pairs)])
    # A network with noise of its own differs from itself, and the noise is no other example.
    if bool(wrong.any()) and not bool(differ(logits_in_pairs()).any()):
        first = int(wrong.nonzero()[0])
        raise ValueError(
            "a certificate is of predictions for one example, but the network's logits of an "
            f"example depend on the others of its batch: they are {in_pairs[first].tolist()} in a "
            f"batch of 2 and {together[first].tolist()} in one of {len(rows)}; compute them from "
            "the example alone, as with softmax over the classes, GroupNorm or LayerNorm"
        )


def _wrong_in_passes(
    bnn: BayesianModule, inputs: Inputs, targets: Tensor, picks: Tensor, seed: int, *, rows: int
) -> int | None:
    """Count in passes of ``rows`` examples; None where these would share weights."""
    q = bnn.posterior
    assert isinstance(q, MeanFieldGaussian)
    posterior, wrong = LeafPosterior(q.mean, q.moments_of(bnn.layout)), 0  # once, not at each pass
    attributes = ModuleAttributes(bnn.net)
    for step, some in enumerate(picks.split(rows), start=1):
        part = tree_map_only(Tensor, lambda each, some=some: each[some], inputs)
        key = NoiseKey(seed, Stream.CERTIFICATE, step)
        outputs, _ = bnn.sample_outputs(part, key, range(1), posterior=posterior)
        attributes.restore()  # a cache would be of these weights
        # Asked after each pass, because a network may use its weights differently in some.
        if rows > 1 and any(row.treatment != "exact" for row in bnn.summary()):
            return None
        _check_logits(outputs, targets if step == 1 else None)
        wrong += int((outputs[0].argmax(-1) != targets[some]).sum())
    return wrong


def _wrong_in_groups(
    bnn: BayesianModule, inputs: Inputs, targets: Tensor, picks: Tensor, seed: int, group: int
) -> int | None:
    """Count with a weight vector for each example, ``group`` at a time; None where vmap fails."""

    def logits(weights: Tensor, example: Inputs) -> Tensor:
        one = tree_map_only(Tensor, lambda each: each.unsqueeze(0), example)
        args, kwargs = arguments_of(one)
        return bnn.tensor_of(bnn.run_with(weights, *args, **kwargs)).squeeze(0)

    q, wrong, attributes = bnn.posterior, 0, ModuleAttributes(bnn.net)
    for step, some in enumerate(picks.split(group), start=1):
        part = tree_map_only(Tensor, lambda each, some=some: each[some], inputs)
        noise = q.noise(NoiseKey(seed, Stream.CERTIFICATE, step), range(len(some)))
        weights = q.draw(noise).weights
        outputs = in_one_pass(bnn.net, logits, weights, part)
        attributes.restore()
        if outputs is None:
            return None
        _check_logits(outputs.unsqueeze(0), targets if step == 1 else None)
        wrong += int((outputs.argmax(-1) != targets[some]).sum())
    return wrong


def _check_logits(outputs: Tensor, targets: Tensor | None) -> None:
    """Raise ValueError where outputs are no logits, or targets none of their classes."""
    if outputs.dim() != 3:
        raise ValueError(
            "a certificate needs logits of shape (N, K) from the network, got "
            f"{tuple(outputs.shape[1:])}"
        )
    classes = outputs.shape[-1]
    if bool(outputs.isnan().any()):
        raise ValueError(
            "a certificate needs logits that are numbers, got NaN for "
            f"{int(outputs.isnan().any(-1).sum())} of {outputs.shape[1]} examples; correct the "
            "inputs, or train the network anew if its weights are NaN"
        )
    if targets is not None and not 0 <= int(targets.min()) <= int(targets.max()) < classes:
        raise ValueError(
            f"targets must be class indices from 0 to {classes - 1}, got {int(targets.min())} to "
            f"{int(targets.max())}"
        )


def _exact_kl(bnn: BayesianModule) -> float:
    """KL(q || p) in float64, whose sum over millions of weights does not round."""
    q = bnn.posterior
    assert isinstance(q, MeanFieldGaussian)
    wide = copy.deepcopy(q).double()
    centre = None if bnn.prior_mean is None else bnn.prior_mean.double()
    return float(kl_divergence(wide, bnn.weight_prior, prior_mean=centre))
