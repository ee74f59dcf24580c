"""RandomNetwork: a network whose weights are drawn from a posterior at each forward pass."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor, nn

from bayesify.distributions.eligible import warn_of_closures
from bayesify.distributions.layout import ParameterLayout, Selector
from bayesify.distributions.posteriors import Delta, Posterior, WeightDraw
from bayesify.distributions.precision import at_least_float32
from bayesify.distributions.structured import PosteriorFamily
from bayesify.estimators import (
    ClosedFormLastLayer,
    Estimator,
    ForwardPass,
    WeightSampling,
    stateless,
)
from bayesify.estimators.network_state import copy_network, kept_tensors, snapshot
from bayesify.estimators.tracing import ParameterUses, TraceCache, minibatch_size
from bayesify.module.borrowed_memory import BorrowedMemory
from bayesify.module.edited_inputs import Repeated, Unedited
from bayesify.module.inputs import Inputs, arguments_of
from bayesify.module.outputs import Output, check_output, tensor_of, warn_of_own_loss
from bayesify.module.pretrained import RelativeStd, init_std_of
from bayesify.module.shared_noise import warn_of_shared_noise
from bayesify.module.summary import ModuleSummary
from bayesify.module.trunk import shared_part
from bayesify.module.turns import Turns
from bayesify.noise.arguments import whole_number
from bayesify.noise.keys import (
    NoiseKey,
    Stream,
    increment_counter,
    make_counter,
    process_rank,
    read_counter,
)

__all__ = ["RandomNetwork", "check_bayesian", "refuse_in_backward"]


def check_bayesian(bnn: object, what: str) -> None:
    """Raise TypeError where an object is no Bayesian network.

    Args:
        bnn: the object.
        what: what needs one, for the message.

    Example:
        >>> check_bayesian(nn.Linear(3, 2), "prune")
        Traceback (most recent call last):
        TypeError: prune needs a BayesianModule, got Linear; make one: BayesianModule(net)
    """
    if isinstance(getattr(bnn, "posterior", None), Posterior):  # compiled, it is of another class
        return
    held = isinstance(getattr(bnn, "bnn", None), RandomNetwork)
    fix = "pass its network, elbo.bnn" if held else "make one: BayesianModule(net)"
    raise TypeError(f"{what} needs a BayesianModule, got {type(bnn).__name__}; {fix}")


class RandomNetwork(nn.Module):
    """A copy of a network whose parameters are drawn from a posterior.

    ``BayesianModule`` adds a prior, a likelihood and predictions, and documents the arguments.

    Attributes:
        net: the copy of the network, without its random parameters.
        layout: the layout of the random parameters.
        posterior: the distribution of the random parameters.
        output: what of the network's result the likelihood sees, see :func:`tensor_of`.

    Example:
        >>> from bayesify.distributions.posteriors import Delta
        >>> net = nn.Linear(3, 2)
        >>> bool((RandomNetwork(net, posterior=Delta)(net.weight) == net(net.weight)).all())
        True
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        posterior: type[Posterior] | PosteriorFamily,
        init_std: float | Tensor | RelativeStd | None = None,
        estimator: Estimator | None = None,
        include: Sequence[Selector] = ("*",),
        exclude: Sequence[Selector] | None = None,
        output: Output | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_output(output)
        is_family = isinstance(posterior, PosteriorFamily)
        if not (is_family or (isinstance(posterior, type) and issubclass(posterior, Posterior))):
            raise TypeError(
                "posterior must be a class such as MeanFieldGaussian or Delta, or a family such as "
                f"LowRankGaussian(rank=4), got {posterior!r}"
            )
        self.layout = ParameterLayout.of(net, include, exclude)
        for path, module in net.named_modules():
            if isinstance(module, RandomNetwork):
                raise TypeError(
                    f"the network must not contain a {type(module).__name__}, but "
                    f"{repr(path) if path else 'it'} is one, whose KL would not be counted; pass "
                    "the plain network, and select the random parameters with include and exclude"
                )
        warn_of_closures(net)
        self.output = output
        self.net = copy_network(net)
        self._borrowed = BorrowedMemory(self.net)
        initial = self.layout.flatten(stateless.remove_parameters(self.net, self.layout))
        mean = at_least_float32(initial)
        self.seed = seed
        std = init_std_of(init_std, mean)
        self.posterior: Posterior = (
            posterior.centred_on(mean, std, self.layout, self.seed)
            if isinstance(posterior, PosteriorFamily)
            else posterior.centred_on(mean, std)
        )
        self.posterior.mask = stateless.non_padding_mask(self.net, self.layout, mean)
        self.estimator = WeightSampling() if estimator is None else estimator
        self._calls = make_counter()
        self._traces = TraceCache()
        self._paths = stateless.parameter_paths(self.net, self.layout)
        self._turns = Turns()

    @property
    def estimator(self) -> Estimator:
        """How noise enters the forward pass."""
        return self._estimator

    @estimator.setter
    def estimator(self, estimator: Estimator) -> None:
        if not isinstance(estimator, Estimator):
            raise TypeError(f"estimator must be an Estimator such as Flipout(), got {estimator!r}")
        self._estimator = estimator

    @property
    def seed(self) -> int:
        """The seed of all noise, a whole number of at most 128 bits with its sign."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        number = whole_number("seed", seed, None)
        if not -(2**127) <= number < 2**127:
            raise ValueError(f"seed must have at most 128 bits with its sign, got {number}")
        self._seed = number

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one pass with new weights; the result has the form of ``net(...)``, no extra axis.

        Warns:
            SharedNoiseWarning: two networks with one seed are run in turn.
            MissingKLWarning: the network is in training and returns a loss of its own.
        """
        with self.in_turn():
            self.own_trained_parameters()
            counter = read_counter(self._calls)
            if isinstance(counter, int) and not isinstance(self.posterior, Delta):
                warn_of_shared_noise(self, self.seed, counter)
            key = NoiseKey(self.seed, Stream.CALL, counter)
            increment_counter(self._calls)
            rank = process_rank()
            outputs, _ = self._run_samples(args, kwargs, key, range(rank, rank + 1), self.posterior)
        if self.training and not torch.compiler.is_compiling():
            warn_of_own_loss(outputs[0])
        return outputs[0]

    def in_turn(self) -> AbstractContextManager[object]:
        """Return a context in which no other thread runs this network.

        Example:
            >>> from bayesify.distributions.posteriors import Delta
            >>> network = RandomNetwork(nn.Linear(3, 2), posterior=Delta)
            >>> with network.in_turn():
            ...     network(torch.zeros(1, 3)).shape
            torch.Size([1, 2])
        """
        return self._turns.taken()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state, in this network's turn: a pass holds its weights in the modules."""
        with self.in_turn():
            return stateless.state_dict_of(self, self.layout, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the network, in its turn."""
        with self.in_turn():
            reduced: Any = self.__reduce_ex__(4)  # as copy.deepcopy does
            make, arguments, state = reduced[:3]
            new: Self = make(*arguments)
            memo[id(self)] = new
            memo |= kept_tensors(self.net)
            new.__setstate__(copy.deepcopy(state, memo))  # type: ignore[no-untyped-call]
            return new

    def run_with(self, weights: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        """Run the network with one flat weight vector, shape (D,)."""
        return self.run_with_named(self.layout.unflatten(weights), *args, **kwargs)

    def run_with_named(self, tensors: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        """Run the network with one tensor for each random parameter, by its first name."""
        with self.in_turn():
            return stateless.run_with(self.net, self.placed(tensors), args, kwargs)

    def placed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors at each path of their parameters, in the dtype of the network."""
        dtype = self.layout.dtype
        # No call where nothing changes: an estimator would take it for a use of the parameter.
        cast = {name: t if t.dtype == dtype else t.to(dtype) for name, t in tensors.items()}
        return {path: cast[name] for name in cast for path in self._paths[name]}

    def sample_outputs(
        self,
        inputs: Inputs,
        key: NoiseKey,
        samples: range,
        *,
        posterior: Posterior | None = None,
    ) -> tuple[Tensor, WeightDraw | None]:
        """Return outputs under the weight samples of a noise key, shape (S, N, ...), and the draw.

        Args:
            inputs: as for ``BayesianModule.predict``.
            key: the key of the noise; the sample index completes it.
            samples: the indices of the S samples.
            posterior: the distribution of the weights; None stands for ``self.posterior``.

        Raises:
            TypeError: the network does not return a single tensor.
        """
        args, kwargs = arguments_of(inputs)
        distribution = self.posterior if posterior is None else posterior
        with self.in_turn():
            results, draw = self._run_samples(args, kwargs, key, samples, distribution)
        outputs = [self.tensor_of(result) for result in results]
        return (outputs[0].unsqueeze(0) if len(outputs) == 1 else torch.stack(outputs)), draw

    @property
    def integrates_outputs(self) -> bool:
        """Whether the ELBO takes :meth:`output_moments`, as under ``ClosedFormLastLayer``."""
        return isinstance(self._effective_estimator(), ClosedFormLastLayer)

    def output_moments(
        self, inputs: Inputs, key: NoiseKey, samples: range
    ) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the outputs over the last layer's weights.

        Args:
            inputs: as for ``BayesianModule.predict``.
            key: the key of the noise of the layers below; the sample index completes it.
            samples: the indices of the S samples of the layers below.

        Returns:
            Two tensors of shape (S, N, ...), in units of the outputs and their square.

        Raises:
            TypeError: the estimator does not integrate the last layer out.
            ValueError: the outputs are not those of such a layer.

        Example:
            >>> from bayesify import BayesianModule, ClosedFormLastLayer
            >>> from bayesify.noise.keys import NoiseKey, Stream
            >>> net = nn.Linear(2, 1, bias=False)
            >>> bnn = BayesianModule(net, init_std=0.5, estimator=ClosedFormLastLayer())
            >>> key = NoiseKey(0, Stream.TRAINING, 0)
            >>> mean, variance = bnn.output_moments(torch.ones(3, 2), key, range(1))
            >>> variance.flatten().tolist()
            [0.5, 0.5, 0.5]
        """
        estimator = self._effective_estimator()
        if not isinstance(estimator, ClosedFormLastLayer):
            raise TypeError(
                "output_moments needs estimator=ClosedFormLastLayer() and a Gaussian posterior, "
                f"got {type(estimator).__name__}"
            )
        args, kwargs = arguments_of(inputs)
        forward_pass = self._forward_pass(args, kwargs, len(samples))
        with self.in_turn():
            found = estimator.run_moments(forward_pass, self.posterior, key, samples)
        means = [self.tensor_of(result) for result, _ in found]
        last = [each for _, each in found]
        variances = [each.variances_of(mean) for each, mean in zip(last, means, strict=True)]
        known = [each for each in variances if each is not None]
        if len(known) < len(means):
            rows = [f"{row.name}: {row.reason}" for row in self.summary()[-2:]]
            if callable(self.output):
                rows = ["output= made another tensor of it; make it in the network's forward"]
            raise ValueError(
                "ClosedFormLastLayer needs a network whose output is that of a linear layer with "
                "random parameters that it uses once, or a view of it, but the output is of "
                f"another kind ({'; '.join(rows)}); end the network with such a layer, or use "
                "another estimator such as LocalReparameterization()"
            )
        return torch.stack(means), torch.stack(known)

    def tensor_of(self, result: object) -> Tensor:
        """Return the tensor of the network's result that the likelihood sees.

        Raises:
            TypeError: it is not a tensor, or there is no such part.
        """
        return tensor_of(result, self.output)

    def summary(self, *args: Any, **kwargs: Any) -> ModuleSummary:
        """Summarise how noise is added to each random parameter, from one traced forward pass.

        Args:
            args: example inputs, in the form in which the network is called. Without any, the
                summary describes the last kind of pass, or is ``unknown`` before any pass.
            kwargs: keyword inputs.

        Returns:
            A row for each random parameter: name, shape, treatment, reason. With example inputs
            also the part of a pass that ``predict`` runs once for all weight samples.

        Example:
            >>> from bayesify import BayesianModule, LocalReparameterization
            >>> bnn = BayesianModule(nn.Linear(3, 2), estimator=LocalReparameterization())
            >>> [row.treatment for row in bnn.summary()]
            ['unknown', 'unknown']
            >>> [row.treatment for row in bnn.summary(torch.zeros(5, 3))]
            ['exact', 'exact']
        """
        if args or kwargs:
            with self.in_turn():
                self._uses(args, kwargs)
        mixing = [
            name
            for name, module in self.net.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
        ]
        note = (
            f"; but {mixing[0] or 'the network'} mixes the examples in training mode"
            if mixing
            else ""
        )
        estimator, uses = self._effective_estimator(), self._traces.last
        if not estimator.needs_trace:
            uses = dict.fromkeys(self.layout.names, ())
        treatments = None if uses is None else estimator.treatments(uses, self.posterior)
        shared = shared_part(self, args, kwargs) if args or kwargs else 0.0
        return ModuleSummary.of(self.layout, treatments, note, shared)

    def _run_samples(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: NoiseKey,
        samples: range,
        posterior: Posterior,
    ) -> tuple[list[Any], WeightDraw | None]:
        forward_pass = self._forward_pass(args, kwargs, len(samples))
        return self._effective_estimator().run(forward_pass, posterior, key, samples)

    def _forward_pass(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], num_samples: int
    ) -> ForwardPass:
        refuse_in_backward()
        passes: Repeated | Unedited | None = Repeated() if num_samples > 1 else None
        if passes is None and self._effective_estimator().needs_trace:
            passes = Unedited()  # a single pass may be run again, where the trace does not hold

        def forward(tensors: Mapping[str, Tensor]) -> Any:
            own = (args, kwargs) if passes is None else passes.take((args, kwargs))
            return self.run_with_named(tensors, *own[0], **own[1])

        def integrated() -> Sequence[str]:
            if not self.integrates_outputs:
                return ()
            return self._integrated_names(torch.compiler.is_compiling(), *args, **kwargs)

        return ForwardPass(
            layout=self.layout,
            forward=forward,
            batch_size=minibatch_size(args, kwargs),
            local_names=lambda: self._local_names(torch.compiler.is_compiling(), *args, **kwargs),
            snapshot=lambda: snapshot(self.net),
            on_unexpected_use=self._traces.add_use,
            integrated_names=integrated,
        )

    def _effective_estimator(self) -> Estimator:
        # A point estimate has no noise, so that the simplest estimator is exact.
        is_point = isinstance(self.posterior, Delta)
        return WeightSampling() if is_point else self.estimator

    def _local_names(self, compiled: bool, /, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        return self._names_of(("exact", "per-position"), args, kwargs, compiled)

    def _integrated_names(self, compiled: bool, /, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        return self._names_of(("integrated",), args, kwargs, compiled)

    def _names_of(
        self,
        kinds: Sequence[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compiled: bool,
    ) -> tuple[str, ...]:
        """Return the parameters whose treatment in a pass is one of these kinds."""
        uses = self._uses(args, kwargs, compiled=compiled)
        treatments = self.estimator.treatments(uses, self.posterior)
        return tuple(name for name in uses if treatments[name].kind in kinds)

    # This is what torch.compiler.assume_constant_result sets, without importing the compiler. In
    # compiled code the pass is traced once, when the code is compiled for inputs of these shapes.
    _local_names._dynamo_marked_constant = True  # type: ignore[attr-defined]
    _integrated_names._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _uses(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, compiled: bool = False
    ) -> ParameterUses:
        return self._traces.uses(
            self.net, self.run_with_named, self._means, args, kwargs, compiled=compiled
        )

    def _means(self) -> dict[str, Tensor]:
        # A copy, since a network may edit its weights in place, for instance by clamping them.
        mean = self.posterior.masked_mean.detach()
        return self.layout.unflatten(mean.to(self.layout.dtype, copy=True))

    def own_trained_parameters(self) -> None:
        """Give frozen parameters that are trained by now memory of their own.

        Until then they share that of the network that was passed, which must not change.

        Example:
            >>> from bayesify.distributions.posteriors import Delta
            >>> net = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 2))
            >>> network = RandomNetwork(net, posterior=Delta)
            >>> _ = network.net[0].requires_grad_(True)
            >>> network.own_trained_parameters()
            >>> network.net[0].weight.data_ptr() == net[0].weight.data_ptr()
            False
        """
        self._borrowed.own_trained(self.net)

    def __repr__(self) -> str:
        if "_turns" not in vars(self):  # while it is made
            return super().__repr__()
        # Without its random parameters a layer would say that it has no bias.
        with self.in_turn(), stateless.placeholders(self.net, self.layout):
            return super().__repr__()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *others: Any, **options: Any
    ) -> None:
        self._borrowed.own_loaded(self.net, state_dict, f"{prefix}net.")
        super()._load_from_state_dict(state_dict, prefix, *others, **options)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # The posterior keeps float32; the layout's dtype is that of the weights in the network.
        weights = fn(torch.empty(0, dtype=self.layout.dtype, device=self.posterior.mean.device))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.layout = dataclasses.replace(self.layout, dtype=weights.dtype)
        return self


def refuse_in_backward() -> None:
    """Raise RuntimeError where a network with noise is run within a backward pass.

    Example:
        >>> refuse_in_backward()
    """
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "a random network must not be run within a backward pass, as torch.utils.checkpoint "
            "does, since it would draw other noise; checkpoint parts of the network's own forward "
            "instead"
        )
