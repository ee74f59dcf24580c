"""Per-example noise within linear operations, and weight samples for all other parameters."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesify.distributions.layout import ParameterLayout
from bayesify.distributions.posteriors import MeanFieldGaussian, Posterior, WeightDraw
from bayesify.distributions.structured import Group, ScaledGroup, StructuredGaussian
from bayesify.estimators.estimator import Estimator, ForwardPass, ParameterUse, Treatment
from bayesify.estimators.interception import WeightInterceptor
from bayesify.estimators.last_outputs import LastOutputs
from bayesify.estimators.moments import ParameterMoments, closed_form_moments
from bayesify.estimators.operations import LinearOperation
from bayesify.estimators.uncompiled import run_uncompiled
from bayesify.noise.keys import NoiseKey, NoiseSource

__all__ = ["ParameterMoments", "PassState", "PerExampleEstimator"]

#: The moments of each parameter, from a sample's noise and the names that have local noise.
_MomentsOf = Callable[[NoiseSource, Collection[str]], Mapping[str, ParameterMoments]]


@dataclass
class PassState:
    """The state of one forward pass.

    Args:
        noise: the source of the noise.
        batch_size: the number of examples in the minibatch, or None if it is not known.
        drawn: tensors that were drawn already, by name, for estimators that use them again.
    """

    noise: NoiseSource
    batch_size: int | None
    drawn: dict[str, Tensor] = field(default_factory=dict)

    def copy(self) -> PassState:
        """Return the state as it is now, which later noise does not change."""
        return PassState(copy.copy(self.noise), self.batch_size, dict(self.drawn))


@dataclass(frozen=True)
class PerExampleEstimator(Estimator):
    """The common part of local reparametrisation and Flipout: separate noise for each example.

    Traced passes tell which parameters are used by linear operations only; to these, noise is
    added within the operations. All other parameters are sampled once for the minibatch. If a pass
    uses a parameter differently than the traced ones, it is undone and run again with that
    parameter sampled. Weights that depend on each other are sampled together, unless the estimator
    can draw the outputs of their layer.
    """

    #: Whether ``noisy_output`` uses variances, so that a training step may provide these directly.
    uses_variances: ClassVar[bool] = False

    @abstractmethod
    def noisy_output(
        self,
        operation: LinearOperation,
        weight: ParameterMoments,
        bias: ParameterMoments | None,
        state: PassState,
    ) -> Tensor:
        """Compute a linear operation with noise for the parameters that have a spread."""

    def draws_outputs_of(self, group: Group) -> bool:  # noqa: ARG002
        """Whether ``noisy_output`` can draw the outputs of a layer with such weights."""
        return False

    def treatments(
        self, uses: Mapping[str, Sequence[ParameterUse]], posterior: Posterior
    ) -> dict[str, Treatment]:
        """See :meth:`Estimator.treatments`."""
        found = super().treatments(uses, posterior)
        if isinstance(posterior, StructuredGaussian):
            for group in posterior.joint_groups:
                reason = self._why_sampled(group, uses, found, posterior)
                for name in group.names if reason else ():
                    if found[name].kind != "sampled":
                        found[name] = Treatment("sampled", reason)
        return found

    def _why_sampled(
        self,
        group: Group,
        uses: Mapping[str, Sequence[ParameterUse]],
        found: Mapping[str, Treatment],
        posterior: StructuredGaussian,
    ) -> str:
        """Return why weights that depend on each other are sampled together, or nothing."""
        if not self.draws_outputs_of(group):
            return "depends on other weights, with which it is sampled"
        for name in group.names:
            if found[name].kind == "sampled":
                return f"sampled with {name}, on which it depends"
            if not set(group.names) <= set(uses[name][0].layer):
                function = uses[name][0].function
                return f"{function} is not a layer x W^T + b of all weights that it depends on"
        return "some weights of its layer are pruned" if posterior.is_pruned(group.names) else ""

    def run(
        self, forward_pass: ForwardPass, posterior: Posterior, key: NoiseKey, samples: range
    ) -> tuple[list[Any], WeightDraw | None]:
        """See :meth:`Estimator.run`.

        Raises:
            TypeError: the posterior is not Gaussian.
        """
        local = set(forward_pass.local_names())
        found = self._run_samples(forward_pass, posterior, key, samples, local, self.antithetic)
        return [outputs for outputs, _ in found], None

    def run_moments(
        self,
        forward_pass: ForwardPass,
        posterior: Posterior,
        key: NoiseKey,
        samples: range,
        *,
        antithetic: bool,
    ) -> list[tuple[Any, LastOutputs]]:
        """Run the network with the moments of the last layer; see ``ClosedFormLastLayer``."""
        local = {*forward_pass.local_names(), *forward_pass.integrated_names()}
        return self._run_samples(forward_pass, posterior, key, samples, local, antithetic)

    def _run_samples(
        self,
        forward_pass: ForwardPass,
        posterior: Posterior,
        key: NoiseKey,
        samples: range,
        local: set[str],
        antithetic: bool,
    ) -> list[tuple[Any, LastOutputs]]:
        moments_of = _moments(posterior, forward_pass.layout)
        found = []
        for sample in samples:
            noise = NoiseSource(key, sample, antithetic=antithetic)
            if torch.compiler.is_compiling():  # these shapes have just been traced
                outputs, injector = self._run_once(forward_pass, moments_of, local, noise)
            else:
                outputs, injector = self._run_sample(forward_pass, moments_of, local, noise)
            found.append((outputs, injector.last))
        return found

    def _run_sample(
        self,
        forward_pass: ForwardPass,
        moments_of: _MomentsOf,
        local: set[str],
        noise: NoiseSource,
    ) -> tuple[Any, _NoiseInjector]:
        """Run one sample, again after each unexpected use of a parameter."""
        undo = forward_pass.snapshot() if local else None
        while True:
            outputs, injector = self._run_once(forward_pass, moments_of, local, noise)
            if injector.unexpected is None or undo is None:
                return outputs, injector
            name, function = injector.unexpected
            forward_pass.on_unexpected_use(name, function)
            joint = moments_of(noise, local)[name].joint
            local -= {name} if joint is None else set(joint.names)
            noise.rewind()
            undo()

    def _run_once(
        self,
        forward_pass: ForwardPass,
        moments_of: _MomentsOf,
        local: Collection[str],
        noise: NoiseSource,
    ) -> tuple[Any, _NoiseInjector]:
        """Return the outputs, or None, and what intercepted the uses of the parameters."""
        tensors, intercepted = {}, {}
        moments = moments_of(noise, local)
        for name, parameter in moments.items():
            mean = parameter.mean
            if name in local:
                # NaN reveals any use that the interceptor does not see.
                intercepted[name] = mean.new_full((), torch.nan).expand(mean.shape)
                tensors[name] = intercepted[name]
            elif parameter.spread is None:  # drawn with the weights that it depends on
                tensors[name] = mean
            else:
                normals = noise.normals(mean.shape, mean.dtype, mean.device)
                tensors[name] = torch.addcmul(mean, _std(parameter), normals)
        state = PassState(noise, forward_pass.batch_size)
        integrated = tuple(n for n in forward_pass.integrated_names() if n in intercepted)
        injector = _NoiseInjector(self, intercepted, moments, state, integrated)
        if torch.compiler.is_compiling():
            with injector:
                return forward_pass.forward(tensors), injector
        outputs = None
        try:
            with run_uncompiled(), injector:
                outputs = forward_pass.forward(tensors)
        except (_UnexpectedUse, Exception):
            # The network may have raised another exception in response to _UnexpectedUse.
            if injector.unexpected is None:
                raise
        return outputs, injector


def _moments(posterior: Posterior, layout: ParameterLayout) -> _MomentsOf:
    """Return the function from a sample's noise to the moments of each parameter."""
    if isinstance(posterior, StructuredGaussian):
        mean = posterior.mean

        def given(noise: NoiseSource, local: Collection[str]) -> dict[str, ParameterMoments]:
            # One draw for the minibatch: its examples have what correlates the weights in common.
            size = (posterior.num_given(local),)
            shared = noise.normals(size, mean.dtype, mean.device)
            found = posterior.moments_given(shared, layout, local)
            return _by_name(found.means, found.stds, layout, joint=found.joint)

        return given
    if not isinstance(posterior, MeanFieldGaussian):
        raise TypeError(
            "noise for each example needs a Gaussian posterior such as MeanFieldGaussian, got "
            f"{type(posterior).__name__}; use estimator=WeightSampling()"
        )
    means, spreads, squared = posterior.moments_of(layout)
    moments = _by_name(means, spreads, layout, squared=squared)
    return lambda noise, local: moments  # noqa: ARG005


def _by_name(
    means: Mapping[str, Tensor],
    spreads: Mapping[str, Tensor],
    layout: ParameterLayout,
    *,
    squared: bool = False,
    joint: Mapping[str, ScaledGroup] | None = None,
) -> dict[str, ParameterMoments]:
    joint = {} if joint is None else joint
    return {
        # Spreads stay in the posterior's dtype, since half precision holds no small variance.
        name: ParameterMoments(
            means[name].to(layout.dtype), spreads.get(name), name, squared, joint.get(name)
        )
        for name in means
    }


def _std(parameter: ParameterMoments) -> Tensor:
    assert parameter.std is not None
    return parameter.std


class _UnexpectedUse(BaseException):
    """A pass used a parameter differently than the traced ones.

    It derives from BaseException so that ``except Exception`` in a network does not catch it.
    """


class _NoiseInjector(WeightInterceptor):
    """Adds an estimator's noise to the linear operations of a pass."""

    def __init__(
        self,
        estimator: PerExampleEstimator,
        intercepted: Mapping[str, Tensor],
        moments: Mapping[str, ParameterMoments],
        state: PassState,
        integrated: Sequence[str] = (),
    ) -> None:
        super().__init__(intercepted, grad_mode=torch.is_grad_enabled())
        self._estimator = estimator
        self._intercepted = intercepted
        self._moments = moments
        self._state = state
        self._integrated = integrated
        self._uses: dict[str, list[ParameterUse]] = {name: [] for name in intercepted}
        self.unexpected: tuple[str, str] | None = None

    def resumable(self) -> Callable[[], _NoiseInjector]:
        begin, views = self._state.copy(), self._views.copy()

        def again() -> _NoiseInjector:
            state = begin.copy()
            injector = _NoiseInjector(
                self._estimator, self._intercepted, self._moments, state, self._integrated
            )
            injector._views = views.copy()
            return injector

        return again

    def on_linear(self, operation: LinearOperation, weight: str | None, bias: str | None) -> Tensor:
        weight_moments = (
            ParameterMoments(operation.weight) if weight is None else self._moments[weight]
        )
        bias_moments = None
        if operation.bias is not None:
            bias_moments = ParameterMoments(operation.bias) if bias is None else self._moments[bias]
        layer = operation.layer_of(weight, bias)
        for name in (weight, bias):
            joint = None if name is None else self._moments[name].joint
            if name is not None and joint is not None and not set(joint.names) <= set(layer):
                self.unexpected = name, operation.name
                raise _UnexpectedUse
        names = tuple(name for name in (weight, bias) if name is not None)
        variances = None
        if any(name in self._integrated for name in names):
            outputs, variances = closed_form_moments(operation, weight_moments, bias_moments)
        else:
            outputs = self._estimator.noisy_output(
                operation, weight_moments, bias_moments, self._state
            )
        self.last.record(outputs, names, variances)
        for name, of_bias in ((weight, False), (bias, True)):
            if name is not None:
                size = self._state.batch_size
                self._add_use(name, operation.use(outputs, size, of_bias=of_bias, layer=layer))
        return outputs

    def on_other(self, name: str, function: str) -> None:
        self._add_use(name, ParameterUse(function))

    def _add_use(self, name: str, use: ParameterUse) -> None:
        uses = self._uses[name]
        if uses[-2:] == [use, use]:
            return  # a third equal use does not change the treatment
        uses.append(use)
        if name in self._integrated:
            is_expected = len(uses) == 1 and use.positions is not None
        else:
            is_expected = self._estimator.treatment(uses).kind != "sampled"
        if not is_expected:
            self.unexpected = name, use.function
            raise _UnexpectedUse
