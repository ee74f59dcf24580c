"""Passes in which linear operations get noise of their own, and all else a weight sample."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bayesify.noise import NoiseKey, NoiseSource
from bayesify.perturbations.base import Call, Perturbation, Use
from bayesify.perturbations.operations import LinearCall
from bayesify.perturbations.sampling import WeightSampling
from bayesify.perturbations.watching import WeightWatch
from bayesify.posteriors import Delta, MeanFieldGaussian, Posterior, WeightDraw

__all__ = ["Part", "Pass", "PerExample"]


@dataclass(frozen=True)
class Part:
    """The weight or the bias of one linear operation.

    Args:
        mean: its mean, or the tensor itself where it is not perturbed within the operation.
        std: its standard deviation, or None where it is not.
        name: its name in the layout, or empty where it is not.
    """

    mean: Tensor
    std: Tensor | None = None
    name: str = ""


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

    @abstractmethod
    def perturbed(self, call: LinearCall, weight: Part, bias: Part | None, this: Pass) -> Tensor:
        """The output of one linear operation with noise in the parts that have a std."""

    @property
    def is_antithetic(self) -> bool:
        """Whether samples come in pairs of opposite noise."""
        return bool(getattr(self, "antithetic", False))

    def run(
        self, call: Call, posterior: Posterior, key: NoiseKey, samples: range
    ) -> tuple[list[Any], WeightDraw | None]:
        """See :meth:`Perturbation.run`.

        Raises:
            TypeError: the posterior's weights are not independent Gaussians.
        """
        if isinstance(posterior, Delta):  # no noise: one way of running it is as good as another
            return WeightSampling().run(call, posterior, key, samples)
        if not isinstance(posterior, MeanFieldGaussian):
            raise TypeError(
                f"{type(self).__name__} needs a MeanFieldGaussian posterior, got "
                f"{type(posterior).__name__}; use WeightSampling()"
            )
        return [self._pass(call, posterior, key, sample) for sample in samples], None

    def _pass(self, call: Call, posterior: Posterior, key: NoiseKey, sample: int) -> Any:
        names = set(call.local_names())
        if torch.compiler.is_compiling():  # traced for these very shapes just now
            return self._run_once(call, posterior, key, sample, names)
        undo = call.snapshot()
        while True:
            try:
                return self._run_once(call, posterior, key, sample, names)
            except _Unforeseen as use:
                call.unforeseen(use.name, use.function)
                names.remove(use.name)
                undo()

    def _run_once(
        self, call: Call, posterior: Posterior, key: NoiseKey, sample: int, names: Collection[str]
    ) -> Any:
        this = Pass(NoiseSource(key, sample, antithetic=self.is_antithetic), call.num_data)
        means = call.layout.unflatten(posterior.masked_mean)
        stds = call.layout.unflatten(posterior.std)
        tensors, local, parts = {}, {}, {}
        for name, mean in means.items():
            if name in names:
                # NaN: a use that escaped the watch would show at once.
                local[name] = mean.new_full((), torch.nan).expand(mean.shape)
                parts[name] = Part(mean, stds[name], name)
                tensors[name] = local[name]
            else:
                noise = this.noise.normals(mean.shape, mean.dtype, mean.device)
                tensors[name] = torch.addcmul(mean, stds[name], noise)
        with _Perturber(self, local, parts, this):
            return call.forward(tensors)


class _Unforeseen(Exception):  # noqa: N818
    """A pass used a parameter as the traced ones did not."""

    def __init__(self, name: str, function: str) -> None:
        super().__init__(f"{function} uses {name} as no traced pass did")
        self.name = name
        self.function = function


class _Perturber(WeightWatch):
    def __init__(
        self,
        perturbation: PerExample,
        local: Mapping[str, Tensor],
        parts: Mapping[str, Part],
        this: Pass,
    ) -> None:
        super().__init__(local, grad_mode=torch.is_grad_enabled())
        self._perturbation = perturbation
        self._parts = parts
        self._this = this
        self._uses: dict[str, list[Use]] = {name: [] for name in parts}

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
        self._uses[name].append(use)
        if self._perturbation.treatment(self._uses[name]).kind == "sampled":
            raise _Unforeseen(name, use.function)
