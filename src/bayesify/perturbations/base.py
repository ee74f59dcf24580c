"""What a perturbation is: a way of running a network under weights drawn from a posterior."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from bayesify.layout import ParameterLayout
from bayesify.noise import NoiseKey
from bayesify.posteriors import Posterior, WeightDraw

__all__ = ["Call", "Perturbation", "Treatment", "Use"]

Kind = Literal["exact", "per-position", "sampled", "unknown"]


class Use(NamedTuple):
    """One use of a random parameter in a forward pass.

    ``rows`` is how many rows the operation's input has for each datum, and ``positions`` how often
    a datum meets each weight there; both None where the use is no linear operation on rows of
    data, and ``why`` then says so.
    """

    function: str
    rows: int | None = None
    positions: int | None = None
    why: str = "not as weight on rows of data"


class Treatment(NamedTuple):
    """How a random parameter is perturbed, and why.

    ``exact``: each datum meets a weight sample of its own. ``per-position``: fresh noise wherever
    a datum meets the weight, another model than a shared weight. ``sampled``: one weight sample
    for the whole minibatch. ``unknown``: no forward pass was seen yet.
    """

    kind: Kind
    reason: str


@dataclass(frozen=True)
class Call:
    """A network's forward pass as a function of its random parameters.

    Args:
        layout: which they are.
        forward: the outputs for one tensor per first name.
        num_data: the size of the minibatch, or None if the inputs do not tell.
        local_names: the parameters whose uses let the perturbation work within the operations.
        snapshot: notes what a pass will change, and returns what puts it back.
        unforeseen: told of a parameter and of a function that used it other than foreseen.
    """

    layout: ParameterLayout
    forward: Callable[[Mapping[str, Tensor]], Any]
    num_data: int | None
    local_names: Callable[[], Sequence[str]]
    snapshot: Callable[[], Callable[[], None]]
    unforeseen: Callable[[str, str], None]


class Perturbation(ABC):
    """One way of running a network under weights drawn from a posterior.

    To add one: a frozen dataclass in a file of its own in ``perturbations``, and a row in the
    tests' list of cases.

    Example:
        >>> class WithoutNoise(Perturbation):
        ...     def treatment(self, uses):
        ...         return Treatment("sampled", "at its mean")
        ...     def run(self, call, posterior, key, samples):
        ...         means = call.layout.unflatten(posterior.masked_mean)
        ...         return [call.forward(means) for _ in samples], None
        >>> from torch import nn
        >>> from bayesify.module import BayesianModule
        >>> net = nn.Linear(3, 2)
        >>> bnn = BayesianModule(net, perturbation=WithoutNoise())
        >>> bool((bnn(net.weight) == net(net.weight)).all())
        True
    """

    #: Whether samples 2i and 2i + 1 have opposite noise; a subclass may make it an argument.
    antithetic: bool = False
    #: Whether a treatment depends on what traced passes find.
    needs_trace: ClassVar[bool] = True

    @abstractmethod
    def treatment(self, uses: Sequence[Use]) -> Treatment:
        """How a parameter with these uses in one forward pass is perturbed, and why."""

    @abstractmethod
    def run(
        self, call: Call, posterior: Posterior, key: NoiseKey, samples: range
    ) -> tuple[list[Any], WeightDraw | None]:
        """Run the network once for each sample index.

        Args:
            call: the network.
            posterior: where the weights come from.
            key: the noise; the sample index completes it.
            samples: the indices of the S samples.

        Returns:
            The S outputs, and the draw behind them, or None where not all weights were drawn.
        """

    def check_num_samples(self, num_samples: int) -> None:
        """Raise ValueError where a step cannot have so many samples."""
        if self.antithetic and num_samples % 2:
            raise ValueError(
                "antithetic samples come in pairs, so their number a step must be even, got "
                f"{num_samples}; write ELBO(..., num_samples=2)"
            )
