"""Passes in which linear operations get noise of their own, and all else a weight sample."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesify.noise import NoiseKey, NoiseSource
from bayesify.perturbations.base import Call, Perturbation, Use
from bayesify.perturbations.operations import LinearCall
from bayesify.perturbations.watching import WeightWatch
from bayesify.posteriors import MeanFieldGaussian, Posterior, WeightDraw

__all__ = ["LEAST_VARIANCE", "Part", "Pass", "PerExample"]

#: Below it the gradient of the square root would overflow; its root is nothing beside any output.
LEAST_VARIANCE = 1e-36


@dataclass(frozen=True)
class Part:
    """The weight or the bias of one linear operation.

    Args:
        mean: its mean, or the tensor itself where it is not perturbed within the operation.
        spread: its standard deviation, or None where it is not.
        name: its name in the layout, or empty where it is not.
        squared: whether ``spread`` is the variance instead.
    """

    mean: Tensor
    spread: Tensor | None = None
    name: str = ""
    squared: bool = False

    @property
    def std(self) -> Tensor | None:
        """The standard deviation, or None."""
        if self.spread is None or not self.squared:
            return self.spread
        return (self.spread + LEAST_VARIANCE).sqrt()

    def variance(self, dtype: torch.dtype) -> Tensor | None:
        """The variance in a wider dtype, or None."""
        if self.spread is None or self.squared:
            return self.spread
        return self.spread.to(dtype).square()


@dataclass
class Pass:
    """What one forward pass remembers: the source of its noise, and what was drawn already."""

    noise: NoiseSource
    num_data: int | None
    drawn: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PerExample(Perturbation):
    """What local reparametrisation and Flipout share: noise of its own for each datum.

    Which parameters can be perturbed within the linear operations that use them is known from
    traced passes. All others are sampled once for the minibatch. A pass that comes to use a
    parameter otherwise than foreseen is undone, and run again with that parameter sampled.
    """

    #: Whether ``perturbed`` reads variances, so that a training step may hand over these.
    takes_variances: ClassVar[bool] = False

    @abstractmethod
    def perturbed(self, call: LinearCall, weight: Part, bias: Part | None, this: Pass) -> Tensor:
        """The output of one linear operation with noise in the parts that have a std."""

    def run(
        self, call: Call, posterior: Posterior, key: NoiseKey, samples: range
    ) -> tuple[list[Any], WeightDraw | None]:
        """See :meth:`Perturbation.run`.

        Raises:
            TypeError: the posterior's weights are not independent Gaussians.
        """
        if not isinstance(posterior, MeanFieldGaussian):
            raise TypeError(
                f"{type(self).__name__} needs a MeanFieldGaussian posterior, got "
                f"{type(posterior).__name__}; use WeightSampling()"
            )
        means, spreads = posterior.moments_of(call.layout)
        squared = posterior.gives_variances
        parts = {name: Part(means[name], spreads[name], name, squared) for name in means}
        local = set(call.local_names())
        outputs = []
        for sample in samples:
            noise = NoiseSource(key, sample, antithetic=self.antithetic)
            if torch.compiler.is_compiling():  # traced for these very shapes just now
                outputs.append(self._run_once(call, parts, local, noise)[0])
            else:
                outputs.append(self._run(call, parts, local, noise))
        return outputs, None

    def _run(
        self, call: Call, parts: Mapping[str, Part], local: set[str], noise: NoiseSource
    ) -> Any:
        undo = call.snapshot() if local else None
        while True:
            outputs, use = self._run_once(call, parts, local, noise)
            if use is None or undo is None:
                return outputs
            name, function = use
            call.unforeseen(name, function)
            local.remove(name)
            noise.rewind()
            undo()

    def _run_once(
        self, call: Call, parts: Mapping[str, Part], local: Collection[str], noise: NoiseSource
    ) -> tuple[Any, tuple[str, str] | None]:
        """The outputs, or the name and the function of a use that was not foreseen."""
        tensors, watched = {}, {}
        for name, part in parts.items():
            mean = part.mean
            if name in local:
                # NaN: a use that escaped the watch would show at once.
                watched[name] = mean.new_full((), torch.nan).expand(mean.shape)
                tensors[name] = watched[name]
            else:
                normals = noise.normals(mean.shape, mean.dtype, mean.device)
                tensors[name] = torch.addcmul(mean, _std(part), normals)
        watch = _Perturber(self, watched, parts, Pass(noise, call.num_data))
        if torch.compiler.is_compiling():
            with watch:
                return call.forward(tensors), None
        outputs = None
        try:
            with watch:
                outputs = call.forward(tensors)
        except (_Unforeseen, Exception):
            # Also where the network made another exception of it.
            if watch.unforeseen is None:
                raise
        return outputs, watch.unforeseen


def _std(part: Part) -> Tensor:
    assert part.std is not None
    return part.std


class _Unforeseen(BaseException):
    """A pass used a parameter as the traced ones did not; not for the network to catch."""


class _Perturber(WeightWatch):
    def __init__(
        self,
        perturbation: PerExample,
        watched: Mapping[str, Tensor],
        parts: Mapping[str, Part],
        this: Pass,
    ) -> None:
        super().__init__(watched, grad_mode=torch.is_grad_enabled())
        self._perturbation = perturbation
        self._parts = parts
        self._this = this
        self._uses: dict[str, list[Use]] = {name: [] for name in watched}
        self.unforeseen: tuple[str, str] | None = None

    def on_linear(self, call: LinearCall, weight: str | None, bias: str | None) -> Tensor:
        weight_part = Part(call.weight) if weight is None else self._parts[weight]
        bias_part = None
        if call.bias is not None:
            bias_part = Part(call.bias) if bias is None else self._parts[bias]
        outputs = self._perturbation.perturbed(call, weight_part, bias_part, self._this)
        for name, of_bias in ((weight, False), (bias, True)):
            if name is not None:
                self._note(name, call.use(outputs, self._this.num_data, of_bias=of_bias))
        return outputs

    def on_other(self, name: str, function: str) -> None:
        self._note(name, Use(function))

    def _note(self, name: str, use: Use) -> None:
        uses = self._uses[name]
        if uses[-2:] == [use, use]:
            return  # a third like use changes no treatment
        uses.append(use)
        if self._perturbation.treatment(uses).kind == "sampled":
            self.unforeseen = name, use.function
            raise _Unforeseen
