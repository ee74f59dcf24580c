"""BayesianModule: any PyTorch network as a Bayesian neural network, without editing it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from bayesify.distributions.layout import Selector, abbreviate
from bayesify.distributions.likelihoods import CategoricalLikelihood, Likelihood
from bayesify.distributions.likelihoods.likelihood import log_probs_of, predictive_of
from bayesify.distributions.posteriors import Delta, MeanFieldGaussian, Posterior
from bayesify.distributions.precision import widely
from bayesify.distributions.priors import Gaussian, Prior
from bayesify.distributions.structured import PosteriorFamily
from bayesify.estimators import Estimator, stateless
from bayesify.estimators.module_attributes import kept_attributes
from bayesify.estimators.network_state import (
    edits_in_place,
    evaluation_mode,
    has_own_code,
    kept_tensors,
)
from bayesify.module.batching import Batching, PassMemoryCache, Reduction
from bayesify.module.edited_inputs import Repeated
from bayesify.module.inputs import Inputs, inputs_of, num_batches
from bayesify.module.kept_samples import KeptSamples, sampler_of
from bayesify.module.outputs import Output
from bayesify.module.pretrained import PriorMean, RelativeStd, prior_mean_of
from bayesify.module.random_network import RandomNetwork
from bayesify.module.sampling import SampledOutputs, run_in_batches
from bayesify.module.threads import one_thread_if_small, rows_in_pass
from bayesify.noise.arguments import whole_number
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.prediction import SizedIterable
from bayesify.prediction.checks import check_tensors
from bayesify.prediction.predictive import P_co, blocks_of

__all__ = ["BayesianModule"]

R = TypeVar("R")


class BayesianModule(RandomNetwork, Generic[P_co]):
    """A network whose parameters are random variables with a learned posterior.

    The network is copied; training does not change the caller's object. Frozen parameters share its
    memory, until other values are loaded into this module or they are trained: edit them in place
    in neither, and load other values by this module's ``load_state_dict``, not by that of a part of
    ``net``. The random parameters are removed from the copy, so that ``parameters()`` yields the
    parameters of the posterior, those of the likelihood and the deterministic parameters of the
    network. Any optimiser can train these. A parameter that the network shares between modules is
    one random variable.

    Args:
        net: an initialised module; its values are the initial means.
        likelihood: the distribution of the targets given the outputs, also copied; default
            ``CategoricalLikelihood()``.
        prior: the prior of each weight; default ``Gaussian(std=0.3)``.
        posterior: the family of q: a class, ``MeanFieldGaussian`` or ``Delta``, without
            parentheses, or an instance of a family under which weights depend on each other, such
            as ``LowRankGaussian(rank=4)``.
        init_std: initial standard deviation: a number, a vector of shape (D,), or ``RelativeStd``
            in proportion to each weight; default 0.02 for a Gaussian.
        prior_mean: None for a prior centred at 0, ``"initial"`` for one centred on the network's
            own values (MOPED, Krishnan et al. 2020), a vector of shape (D,), or a mapping from name
            patterns to ``"initial"`` or a number, of which the first that matches decides:
            ``{"head.*": 0.0, "*": "initial"}`` for a new head on a trained network.
        estimator: how noise enters the forward pass; default ``WeightSampling()``.
        include: name patterns and module types of the random parameters.
        exclude: name patterns and module types of deterministic parameters; None excludes the
            affine parameters of normalisation layers, and layer scales.
        output: what of the network's result the likelihood sees, where that is not one tensor: the
            name of a field, such as ``"logits"`` of Hugging Face's models, or a function.
        seed: the seed of all noise.

    Raises:
        ValueError: no parameter is left to make random, or a pattern matches none.
        TypeError: a parameter cannot be random (see ``ParameterLayout.of``), the network cannot be
            copied, or a component is not of the expected type.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> bnn = BayesianModule(net, seed=1)
        >>> bnn(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
        >>> sorted(name for name, _ in bnn.named_parameters())
        ['posterior.mean', 'posterior.rho']
        >>> bnn.predict(torch.zeros(5, 3), num_samples=10).mean.shape
        torch.Size([5, 2])
    """

    prior_mean: Tensor | None

    def __init__(
        self,
        net: nn.Module,
        *,
        likelihood: Likelihood[P_co] | None = None,
        prior: Prior | None = None,
        posterior: type[Posterior] | PosteriorFamily = MeanFieldGaussian,
        init_std: float | Tensor | RelativeStd | None = None,
        prior_mean: PriorMean = None,
        estimator: Estimator | None = None,
        include: Sequence[Selector] = ("*",),
        exclude: Sequence[Selector] | None = None,
        output: Output | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            net,
            posterior=posterior,
            init_std=init_std,
            estimator=estimator,
            include=include,
            exclude=exclude,
            output=output,
            seed=seed,
        )
        if not isinstance(likelihood, Likelihood | None):
            raise TypeError(
                f"likelihood must be a Likelihood such as CategoricalLikelihood(), got "
                f"{likelihood!r}"
            )
        initial = self.posterior.mean.detach()
        self.register_buffer("prior_mean", prior_mean_of(prior_mean, initial, self.layout))
        default: Any = CategoricalLikelihood()
        self.likelihood: Likelihood[P_co] = (
            default if likelihood is None else copy.deepcopy(likelihood)
        )
        self.prior = Gaussian(std=0.3) if prior is None else prior
        self._pass_memory: PassMemoryCache = {}
        self._checked_trunks: dict[object, bool] = {}
        self._kept_samples = KeptSamples()

    @property
    def prior(self) -> Prior:
        """The prior as it was given; ``weight_prior`` is the prior of the flat weight vector."""
        return self._prior

    @prior.setter
    def prior(self, prior: Prior) -> None:
        if not isinstance(prior, Prior):
            raise TypeError(f"prior must be a Prior such as Gaussian(0.3), got {prior!r}")
        weight_prior = prior.for_layout(self.layout)
        if isinstance(self.posterior, Delta):
            weight_prior.log_prob(self.posterior.mean)  # raises TypeError if it needs a spread
        self.weight_prior, self._prior = weight_prior, prior

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        prior_mean = self.prior_mean
        self._kept_samples.clear()
        super()._apply(fn, recurse)
        if prior_mean is not None:
            self.prior_mean = widely(fn)(prior_mean)
        return self

    def train(self, mode: bool = True) -> Self:
        """Set the mode, and in training free the weight samples that predictions have kept."""
        if mode:
            self._kept_samples.clear()
        return super().train(mode)

    @torch.no_grad()
    def predict(
        self,
        inputs: Inputs | Iterable[Any],
        num_samples: int = 100,
        *,
        keep_samples: bool = False,
        batch_size: int | Literal["all"] | None = None,
        max_memory: int | str | None = None,
        seed: int | None = None,
    ) -> P_co:
        """Predict with S weight samples from the posterior.

        Dropout and batch normalisation are in evaluation mode. Repeated calls give the same
        result, because the weight samples are a function of the seed, unless the network itself
        draws random numbers. From the second call with the same posterior on, up to 256 MB of
        weight samples are kept and not drawn again, until ``train()`` or a change of the posterior;
        not so with ``max_memory``.

        What does not depend on the random weights, such as a pretrained encoder under a random last
        layer, is run once for all weight samples. The outputs of all samples of several batches
        are then held at once, up to 500 MB, and up to 1 GB of weights; not so with
        ``max_memory``. See docs/prediction.md for the networks with which it is not.

        Args:
            inputs: the network's inputs with N examples on the first axis: one tensor, or a
                sequence or mapping of tensors that become positional or keyword arguments; or a
                loader that does not shuffle, whose inputs are joined in memory and whose targets
                are left out. A keyword argument may also be None, a number, a flag or text, the
                same for all examples. Tensors of the CPU are moved to a GPU of the network.
            num_samples: S, the number of weight samples, at least 1.
            keep_samples: whether the result holds the prediction of every sample, which takes S
                times the memory.
            batch_size: the number of examples in one forward pass; None chooses a fast one, or all
                where the network takes no few, such as some nodes of a dense graph. With ``"all"``
                the inputs are not divided, and need not have one length: the nodes and the edges of
                a graph.
            max_memory: the memory that the prediction may use, including its result: a number of
                bytes, or text such as ``"64 MB"``. None only bounds the memory of a single pass.
            seed: a seed for other weight samples; None stands for the seed of the module.

        Returns:
            A :class:`Predictive` over N examples.

        Raises:
            TypeError: ``num_samples`` is no whole number, the inputs are no tensors, or a mapping
                has a name that is no argument of the network.
            ValueError: ``num_samples`` or ``batch_size`` is below 1, there are no examples,
                ``max_memory`` is too small, or a pass of the network reads what an earlier one
                computed from other weights.
        """
        reduction = partial(predictive_of, self.likelihood, keep_samples=keep_samples)
        predicted: P_co = self._reduced(
            inputs, num_samples, reduction, batch_size, max_memory, seed
        )
        return predicted

    @torch.no_grad()
    def log_prob(
        self,
        inputs: Inputs | Iterable[Any],
        targets: Tensor,
        num_samples: int = 100,
        *,
        batch_size: int | Literal["all"] | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Return log p(y | x), averaged over S weight samples, in nats, shape (N,).

        All targets of an example belong together: log of 1/S sum_s p(y_1, ..., y_T | x, w_s). Of a
        text of T tokens this is the log probability of the text; the product of the tokens' own
        averaged probabilities, as ``predict`` has them, is another number, since under one weight
        sample the tokens are independent, and over all of them they are not. Targets that the
        likelihood ignores do not count.

        Args:
            inputs: as for :meth:`predict`.
            targets: the targets, as for training.
            num_samples: S, the number of weight samples, those of :meth:`predict`.
            batch_size: as for :meth:`predict`.
            seed: as for :meth:`predict`.

        Raises:
            TypeError: as for :meth:`predict`, or the targets are no tensor.
            ValueError: as for :meth:`predict`, or the targets do not suit the outputs.

        Example:
            >>> bnn = BayesianModule(nn.Linear(3, 2))
            >>> x, y = torch.randn(5, 3), torch.zeros(5, dtype=torch.long)
            >>> torch.allclose(bnn.log_prob(x, y), bnn.predict(x).log_prob(y), atol=1e-5)
            True
        """
        check_tensors(targets=targets)
        targets = targets.to(self.posterior.mean.device)

        def averaged(outputs: SizedIterable) -> Tensor:
            total: Tensor | None = None
            for block in blocks_of(outputs):
                found = log_probs_of(self.likelihood, block, targets).logsumexp(0)
                total = found if total is None else torch.logaddexp(total, found)
            assert total is not None
            return total - math.log(num_samples)

        return self._reduced(inputs, num_samples, averaged, batch_size, None, seed)

    def _reduced(
        self,
        inputs: Inputs | Iterable[Any],
        num_samples: int,
        reduction: Callable[[SizedIterable], R],
        batch_size: int | Literal["all"] | None,
        max_memory: int | str | None,
        seed: int | None,
    ) -> R:
        """Return the reduction of the outputs of S weight samples; see :meth:`predict`."""
        inputs = inputs_of(inputs, self.posterior.mean.device, self.net)
        num_samples = whole_number("num_samples", num_samples)
        key = NoiseKey(self.seed if seed is None else seed, Stream.PREDICTION, 0)
        with (
            self.in_turn(),
            torch.inference_mode(mode=False),  # whose tensors do not count their edits
            torch.no_grad(),
            evaluation_mode(self.net),
        ):
            batching = Batching.of(
                self,
                inputs,
                self._pass_memory,
                num_samples=num_samples,
                reduction=reduction,
                batch_size=batch_size,
                max_memory=max_memory,
            )
            if max_memory is None:
                draw = self._kept_samples.sampler(
                    self.posterior, key, num_samples, may_edit=batching.may_edit_weights
                )
            else:  # there is no room for samples that outlast the call
                draw = sampler_of(self.posterior, key)
            rows = batching.group * rows_in_pass(inputs, batching.batch_size)
            # What a pass keeps would decide the outputs of the next call's.
            carries = batching.caches_weights or any(m.carried for m in self._pass_memory.values())
            kept = kept_attributes(self.net) if carries else nullcontext()
            with one_thread_if_small(self, rows), kept:
                checked = self._checked_trunks if max_memory is None else None
                return reduction(
                    SampledOutputs(self, inputs, draw, num_samples, batching, checked=checked)
                )

    @torch.no_grad()
    def predict_mean(
        self,
        inputs: Inputs | Iterable[Any],
        *,
        batch_size: int | Literal["all"] | None = None,
        max_memory: int | str | None = None,
    ) -> P_co:
        """Predict with the mean weights, in one pass of a single network.

        For few examples the overhead of this method adds to the time of the pass; see
        docs/prediction.md.

        Args:
            inputs: as for :meth:`predict`.
            batch_size: as for :meth:`predict`.
            max_memory: as for :meth:`predict`.

        Returns:
            A :class:`Predictive` without epistemic uncertainty.

        Raises:
            ValueError: ``batch_size`` is below 1, there are no examples, or ``max_memory`` is too
                small.
        """
        reduction = partial(predictive_of, self.likelihood, keep_samples=False)
        return reduction([self._mean_outputs(inputs, reduction, batch_size, max_memory)])

    @torch.no_grad()
    def mean_outputs(
        self,
        inputs: Inputs | Iterable[Any],
        *,
        batch_size: int | Literal["all"] | None = None,
        max_memory: int | str | None = None,
    ) -> Tensor:
        """Return the network's outputs at the mean weights in evaluation mode, shape (N, ...)."""
        return self._mean_outputs(inputs, None, batch_size, max_memory)

    def _mean_outputs(
        self,
        inputs: Inputs | Iterable[Any],
        reduction: Reduction | None,
        batch_size: int | Literal["all"] | None,
        max_memory: int | str | None,
    ) -> Tensor:
        inputs = inputs_of(inputs, self.posterior.mean.device, self.net)
        with self.in_turn(), evaluation_mode(self.net):
            batching = Batching.of(
                self,
                inputs,
                self._pass_memory,
                reduction=reduction,
                batch_size=batch_size,
                max_memory=max_memory,
            )
            mean = self.posterior.masked_mean.detach()
            # What edits its weights for some inputs only would edit the posterior.
            has_code = batching.may_edit_weights or has_own_code(self.net)
            if has_code:
                mean = mean.clone()
            passes = None
            if has_code or edits_in_place(self.net):
                passes = Repeated(num_batches(inputs, batching.batch_size))
            rows = rows_in_pass(inputs, batching.batch_size)
            kept = kept_attributes(self.net) if batching.caches_weights else nullcontext()
            with one_thread_if_small(self, rows), kept:
                return run_in_batches(self, mean, inputs, batching.batch_size, passes)

    def to_module(self, sample: int | None = None, *, seed: int | None = None) -> nn.Module:
        """Return an ordinary network of the original class, with weights as its parameters.

        Args:
            sample: None for the mean weights, or the number of a weight sample of
                :meth:`predict`, from 0, under weight sampling: a single network drawn from the
                posterior, as Thompson sampling needs it, or the writing of a text.
            seed: as for :meth:`predict`; only together with ``sample``.

        Raises:
            TypeError: ``sample`` is no whole number.
            ValueError: ``sample`` is negative, or ``seed`` is given without it.

        Example:
            >>> bnn = BayesianModule(nn.Linear(3, 2))
            >>> type(bnn.to_module())
            <class 'torch.nn.modules.linear.Linear'>
            >>> x = torch.ones(5, 3)
            >>> samples = bnn.predict(x, num_samples=4, keep_samples=True).samples
            >>> torch.allclose(bnn.to_module(sample=3)(x).softmax(-1), samples[3])
            True
        """
        with self.in_turn():
            net = copy.deepcopy(self.net, kept_tensors(self.net))
        stateless.restore_parameters(net, self.layout, self._weights_of(sample, seed))
        return net

    @torch.no_grad()
    def _weights_of(self, sample: int | None, seed: int | None) -> dict[str, Tensor]:
        if sample is None:
            if seed is not None:
                raise ValueError(f"the mean weights have no seed, got {seed}; name a sample too")
            return self._means()
        sample = whole_number("sample", sample, 0)
        key = NoiseKey(self.seed if seed is None else seed, Stream.PREDICTION, 0)
        (weights,) = sampler_of(self.posterior, key)(range(sample, sample + 1))
        return self.layout.unflatten(weights.to(self.layout.dtype, copy=True))

    def extra_repr(self) -> str:
        """Describe the components that are not modules, and count the treatments."""
        counts = sorted(self.summary().counts.items())
        treated = ", ".join(f"{count} {kind}" for kind, count in counts)
        centred = "" if self.prior_mean is None else " about prior_mean"
        return (
            f"random={abbreviate(self.layout.names, 6)}; num_weights={self.layout.num_weights}, "
            f"prior={self.prior}{centred}, estimator={self.estimator} ({treated}), "
            f"seed={self.seed}"
        )
