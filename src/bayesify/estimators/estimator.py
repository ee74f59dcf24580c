"""The estimator interface: run a network under weights drawn from a posterior."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from bayesify.distributions.layout import ParameterLayout
from bayesify.distributions.posteriors import Posterior, WeightDraw
from bayesify.noise.keys import NoiseKey

__all__ = ["Estimator", "ForwardPass", "ParameterUse", "Treatment"]

TreatmentKind = Literal["exact", "integrated", "per-position", "sampled", "unknown"]


class ParameterUse(NamedTuple):
    """One use of a random parameter in a forward pass.

    Args:
        function: the name of the PyTorch function that used the parameter.
        rows: how many rows of the operation's input belong to one example; None if the use is not
            a linear operation on rows of examples.
        positions: how often one example uses each weight in this operation; None if unknown.
        why: the reason if ``rows`` or ``positions`` is None.
        layer: the random parameters of the linear layer x W^T + b that the use belongs to; empty
            for any other operation.
        is_output: whether the operation's result is the network's, or a part of it.
    """

    function: str
    rows: int | None = None
    positions: int | None = None
    why: str = "not as weight on rows of examples"
    layer: tuple[str, ...] = ()
    is_output: bool = False


class Treatment(NamedTuple):
    """The way in which an estimator adds noise to a random parameter, and the reason.

    Args:
        kind: ``exact``: each example has its own weight sample. ``integrated``: the expectation
            over it is in closed form, so that it needs no noise. ``per-position``: fresh noise
            wherever an example uses the weight, which is another model than a shared weight.
            ``sampled``: one weight sample for the whole minibatch. ``unknown``: no forward pass
            has been traced yet.
        reason: the reason, in words.
    """

    kind: TreatmentKind
    reason: str


@dataclass(frozen=True)
class ForwardPass:
    """A network's forward pass as a function of its random parameters.

    Args:
        layout: the layout of the random parameters.
        forward: computes the outputs from one tensor per first name.
        batch_size: the number of examples in the minibatch, or None if the inputs do not tell.
        local_names: returns the parameters to which noise can be added within the operations.
        snapshot: saves the state that a pass may change, and returns a function that restores it.
        on_unexpected_use: called with the names of a parameter and of a function that used it
            differently than in the traced pass.
        integrated_names: returns the parameters of a last layer that is integrated out.
    """

    layout: ParameterLayout
    forward: Callable[[Mapping[str, Tensor]], Any]
    batch_size: int | None
    local_names: Callable[[], Sequence[str]]
    snapshot: Callable[[], Callable[[], None]]
    on_unexpected_use: Callable[[str, str], None]
    integrated_names: Callable[[], Sequence[str]] = tuple


class Estimator(ABC):
    """A gradient estimator: the way in which noise enters the forward pass.

    Estimators differ in the variance of the gradient and in the operations that they support. All
    target the gradient of the expected log likelihood, but for ``ClosedFormLastLayer``, which may
    take a bound on it, and ``LocalReparameterization(per_position=True)``, which is another model.

    To add an estimator, write a frozen dataclass in its own file in ``estimators/``, add its name
    to ``estimators/__init__.py``, from which files restore it, and a row to ``tests/zoo.py``.

    Example:
        >>> class WithoutNoise(Estimator):
        ...     def treatment(self, uses):
        ...         return Treatment("sampled", "at its mean")
        ...     def run(self, forward_pass, posterior, key, samples):
        ...         means = forward_pass.layout.unflatten(posterior.masked_mean)
        ...         return [forward_pass.forward(means) for _ in samples], None
        >>> from torch import nn
        >>> from bayesify.module.bayesian import BayesianModule
        >>> net = nn.Linear(3, 2)
        >>> bnn = BayesianModule(net, estimator=WithoutNoise())
        >>> bool((bnn(net.weight) == net(net.weight)).all())
        True
    """

    #: Whether samples 2i and 2i + 1 have opposite noise; a subclass may make it an argument.
    antithetic: bool = False
    #: Whether treatments depend on the uses found by tracing a forward pass.
    needs_trace: ClassVar[bool] = True

    @abstractmethod
    def treatment(self, uses: Sequence[ParameterUse]) -> Treatment:
        """Return how noise is added to a parameter with these uses in one forward pass, and why."""

    def treatments(
        self,
        uses: Mapping[str, Sequence[ParameterUse]],
        posterior: Posterior,  # noqa: ARG002
    ) -> dict[str, Treatment]:
        """Return the treatment of each parameter, by its first name.

        Args:
            uses: the uses of each parameter in one forward pass.
            posterior: the distribution of the weights.
        """
        return {name: self.treatment(found) for name, found in uses.items()}

    @abstractmethod
    def run(
        self, forward_pass: ForwardPass, posterior: Posterior, key: NoiseKey, samples: range
    ) -> tuple[list[Any], WeightDraw | None]:
        """Run the network once for each weight sample.

        Args:
            forward_pass: the network's forward pass.
            posterior: the distribution of the weights.
            key: the key of the noise; the sample index completes it.
            samples: the indices of the S samples.

        Returns:
            The S outputs, and the weights that were drawn, or None if some weights were not drawn.
        """

    def check_num_samples(self, num_samples: int) -> None:
        """Raise ValueError if a step cannot have this number of weight samples."""
        if self.antithetic and num_samples % 2:
            raise ValueError(
                "antithetic samples come in pairs, so their number a step must be even, got "
                f"{num_samples}; write ELBO(..., num_samples=2)"
            )
