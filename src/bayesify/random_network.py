"""Any network with weights drawn from a posterior: one forward pass, and what happens in it."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayesify import stateless
from bayesify.coverage import Coverage
from bayesify.inputs import Inputs, arguments_of
from bayesify.layout import ParameterLayout, Selector
from bayesify.noise import NoiseKey, Stream, count, counted, new_counter, process_rank
from bayesify.perturbations import Call, Perturbation, WeightSampling
from bayesify.perturbations.tracing import Traces, Uses, num_data_of
from bayesify.posteriors import Delta, Posterior, WeightDraw
from bayesify.pretrained import RelativeStd, init_std_of

__all__ = ["RandomNetwork", "as_tensor"]


class RandomNetwork(nn.Module):
    """A private copy of a network whose parameters come from a posterior.

    ``BayesianModule`` adds a prior, a likelihood and predictions; see there for the arguments.

    Attributes:
        net: the copy, without its random parameters.
        layout: which these are.
        posterior: where they come from.

    Example:
        >>> from bayesify.posteriors import Delta
        >>> net = nn.Linear(3, 2)
        >>> bool((RandomNetwork(net, posterior=Delta)(net.weight) == net(net.weight)).all())
        True
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        posterior: type[Posterior],
        init_std: float | Tensor | RelativeStd | None = None,
        perturbation: Perturbation | None = None,
        include: Sequence[Selector] = ("*",),
        exclude: Sequence[Selector] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not (isinstance(posterior, type) and issubclass(posterior, Posterior)):
            raise TypeError(
                f"posterior must be a class such as MeanFieldGaussian or Delta, got {posterior!r}"
            )
        self.layout = ParameterLayout.of(net, include, exclude)
        for path, module in net.named_modules():
            if isinstance(module, RandomNetwork):
                raise TypeError(
                    f"the network must not hold a {type(module).__name__}, but "
                    f"{repr(path) if path else 'it'} is one, whose KL would not be counted; pass "
                    "the plain network, and choose what is random with include and exclude"
                )
        self.net = copy.deepcopy(net)
        mean = self.layout.flatten(stateless.take_out(self.net, self.layout))
        self.posterior = posterior.centred_on(mean, init_std_of(init_std, mean))
        self.posterior.kept = stateless.without_padding(self.net, self.layout, mean)
        self.perturbation = WeightSampling() if perturbation is None else perturbation
        self.seed = operator.index(seed)
        if not -(2**127) <= self.seed < 2**127:
            raise ValueError(f"seed must have at most 128 bits with its sign, got {seed}")
        self._calls = new_counter()
        self._traces = Traces()
        self._places = stateless.places_of(self.net, self.layout)

    @property
    def perturbation(self) -> Perturbation:
        """How noise enters the forward pass."""
        return self._perturbation

    @perturbation.setter
    def perturbation(self, perturbation: Perturbation) -> None:
        if not isinstance(perturbation, Perturbation):
            raise TypeError(
                f"perturbation must be a Perturbation such as Flipout(), got {perturbation!r}"
            )
        self._perturbation = perturbation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One pass with fresh weights: just what ``net(...)`` would return, no extra axis."""
        key = NoiseKey(self.seed, Stream.CALL, counted(self._calls))
        count(self._calls)
        rank = process_rank()
        outputs, _ = self._perturbed(args, kwargs, key, range(rank, rank + 1), self.posterior)
        return outputs[0]

    def run_with(self, weights: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        """Run the network with one flat weight vector, shape (D,)."""
        return self.run_with_named(self.layout.unflatten(weights), *args, **kwargs)

    def run_with_named(self, tensors: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        """Run the network with one tensor for each random parameter, by its first name."""
        given = {place: tensors[name] for name in tensors for place in self._places[name]}
        return stateless.run_with(self.net, given, args, kwargs)

    def sample_outputs(
        self,
        inputs: Inputs,
        key: NoiseKey,
        samples: range,
        *,
        posterior: Posterior | None = None,
    ) -> tuple[Tensor, WeightDraw | None]:
        """Outputs under the weight samples of a noise key, shape (S, N, ...), and the draw.

        Args:
            inputs: as for ``BayesianModule.predict``.
            key: the noise; the sample index completes it.
            samples: the indices of the S samples.
            posterior: where the weights come from; None is the network's own.

        Raises:
            TypeError: the network returns something else than a tensor.
        """
        args, kwargs = arguments_of(inputs)
        source = self.posterior if posterior is None else posterior
        found, draw = self._perturbed(args, kwargs, key, samples, source)
        outputs = [as_tensor(output) for output in found]
        return (outputs[0].unsqueeze(0) if len(outputs) == 1 else torch.stack(outputs)), draw

    def coverage(self, *args: Any, **kwargs: Any) -> Coverage:
        """How each random parameter is perturbed, and why, from one traced forward pass.

        Args:
            args: example inputs, as the network takes them; without any, what is known
                of the last kind of pass, or ``unknown``.
            kwargs: those by name.

        Returns:
            A row for each random parameter: name, shape, treatment, reason.

        Example:
            >>> from bayesify import BayesianModule, LocalReparameterization
            >>> bnn = BayesianModule(nn.Linear(3, 2), perturbation=LocalReparameterization())
            >>> [row.treatment for row in bnn.coverage()]
            ['unknown', 'unknown']
            >>> [row.treatment for row in bnn.coverage(torch.zeros(5, 3))]
            ['exact', 'exact']
        """
        if args or kwargs:
            self._uses(args, kwargs)
        mixing = [
            name
            for name, module in self.net.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
        ]
        note = (
            f"; but {mixing[0] or 'the network'} mixes the data in training mode" if mixing else ""
        )
        return Coverage.of(self.layout, self._estimator(), self._traces.last, note)

    def _perturbed(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: NoiseKey,
        samples: range,
        posterior: Posterior,
    ) -> tuple[list[Any], WeightDraw | None]:
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "a random network must not be run within a backward pass, as "
                "torch.utils.checkpoint does: its noise would be another; checkpoint parts of the "
                "network's own forward instead, with include and exclude such that they hold no "
                "random parameter"
            )
        call = Call(
            layout=self.layout,
            forward=lambda tensors: self.run_with_named(tensors, *args, **kwargs),
            num_data=num_data_of(args, kwargs),
            local_names=lambda: self._local_names(*args, **kwargs),
            snapshot=lambda: stateless.snapshot(self.net),
            unforeseen=self._traces.note,
        )
        return self._estimator().run(call, posterior, key, samples)

    def _estimator(self) -> Perturbation:
        # Without noise one estimator is as good as another.
        point = isinstance(self.posterior, Delta)
        return WeightSampling() if point else self.perturbation

    def _local_names(self, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        uses = self._uses(args, kwargs)
        return tuple(n for n in uses if self.perturbation.treatment(uses[n]).kind != "sampled")

    # What torch.compiler.assume_constant_result sets, without its import of the whole compiler:
    # in compiled code the pass is traced once, when that code is made for inputs of these shapes.
    _local_names._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _uses(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Uses:
        return self._traces.uses(self.net, self.run_with_named, self._means, args, kwargs)

    def _means(self) -> dict[str, Tensor]:
        # A copy: a network may edit its weights in place, as by clamping them.
        return self.layout.unflatten(self.posterior.masked_mean.detach().clone())


def as_tensor(output: object) -> Tensor:
    """What a likelihood can read of a network's output.

    Raises:
        TypeError: it is no tensor.

    Example:
        >>> as_tensor([1.0])
        Traceback (most recent call last):
        TypeError: the network must return one tensor for a likelihood to read, got list; ...
    """
    if not isinstance(output, Tensor):
        raise TypeError(
            "the network must return one tensor for a likelihood to read, got "
            f"{type(output).__name__}; wrap it in a module that picks the tensor"
        )
    return output
