"""The network for a table: a multilayer perceptron with a linear path beside it; its prior."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from bayesify.groups import ByGroup
from bayesify.networks import mlp
from bayesify.priors import Prior

__all__ = ["NOISE", "Noise", "TableNet", "prior_by_inputs"]

#: Of numbers: one standard deviation for each target, or one that the network says for each row.
Noise = Literal["learned", "input-dependent"]
NOISE = "noise"

# softplus of it is 1, the standard deviation of a standardised target.
_ONE = 0.5413248546129181
# How far, in the prior, the noise of a row departs from that of all, beside means from 0.
_NOISE_SCALE = 0.5


class TableNet(nn.Module):
    """Outputs of a multilayer perceptron plus a linear function of the inputs.

    What is linear in the data then costs few weights, hence few nats of KL, and the hidden units
    are left to what is not.

    For classes the outputs are logits (N, K). For numbers they are (N, K, 2): the mean with the
    inverse softplus of the noise's standard deviation, as
    ``GaussianLikelihood(input_dependent=True)`` takes them. The latter is a parameter of its own
    for each target, the same for every row; with ``noise="input-dependent"`` the network adds to
    it what is the row's own.

    Args:
        num_features: F, columns of the inputs.
        hidden: units of each hidden layer (ReLU).
        num_outputs: K, classes or targets.
        noise: of numbers, ``"learned"`` or ``"input-dependent"``; None for classes.
        seed: what the initial values are a function of.

    Example:
        >>> TableNet(3, (50,), 2)(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
        >>> TableNet(3, (50,), 2, noise="learned")(torch.zeros(5, 3)).shape
        torch.Size([5, 2, 2])
    """

    noise: Tensor | None

    def __init__(
        self,
        num_features: int,
        hidden: Sequence[int],
        num_outputs: int,
        *,
        noise: Noise | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if noise not in (None, "learned", "input-dependent"):
            raise ValueError(f'noise must be "learned", "input-dependent" or None, got {noise!r}')
        width = 2 * num_outputs if noise == "input-dependent" else num_outputs
        # Without initial values of its own, which would draw from the global generator.
        self.linear = nn.utils.skip_init(nn.Linear, num_features, width, bias=False)
        nn.init.zeros_(self.linear.weight)
        self.hidden: nn.Sequential = mlp(num_features, hidden, width, seed=seed)
        self.noise = None if noise is None else nn.Parameter(torch.full((num_outputs,), _ONE))
        self.input_dependent = noise == "input-dependent"
        if self.input_dependent:
            last = self.hidden[-1]
            assert isinstance(last, nn.Linear)
            with torch.no_grad():  # the same noise everywhere, at the start
                last.weight[1::2] = 0.0
                last.bias[1::2] = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of inputs (N, F)."""
        outputs: Tensor = self.linear(inputs) + self.hidden(inputs)
        if self.noise is None:
            return outputs
        if not self.input_dependent:
            return torch.stack([outputs, self.noise.expand_as(outputs)], dim=-1)
        means, departures = outputs.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([means, self.noise + _NOISE_SCALE * departures], dim=-1)


def prior_by_inputs(net: nn.Module, prior_of: Callable[[float], Prior]) -> ByGroup:
    """A prior under which a layer's outputs spread as much whatever the number of its inputs.

    The weights of a layer of F inputs are narrower by the root of F (Neal 1996, section 2.1). For
    standardised targets a function of the prior then varies about as much as they do; under
    N(0, 1) for every weight it would vary many times more, and where the data are few, so that the
    posterior stays near the prior, intervals would be wider than all the targets.

    Args:
        net: its linear layers count.
        prior_of: the prior of a relative width; of biases it is 1.

    Example:
        >>> from bayesify.priors import Gaussian
        >>> prior_by_inputs(TableNet(4, (25,), 1), Gaussian).groups[1:]
        (('hidden.0.weight', Gaussian(std=0.5)), ('hidden.2.weight', Gaussian(std=0.2)), \
('*', Gaussian(std=1.0)))
    """
    layers = {n: m.in_features for n, m in net.named_modules() if isinstance(m, nn.Linear)}
    widths = {f"{name}.weight": 1.0 / math.sqrt(inputs) for name, inputs in layers.items()}
    return ByGroup({name: prior_of(width) for name, width in {**widths, "*": 1.0}.items()})
