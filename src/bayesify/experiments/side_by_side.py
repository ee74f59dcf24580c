"""Many small networks in one module: what a step costs beside arithmetic is paid once for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["SideBySide"]


class SideBySide(nn.Module):
    """K multilayer perceptrons of one shape, each with inputs and outputs of its own.

    Datum n holds one row of features for each network. Every weight belongs to one network, so
    that with targets of K parts, a prior that treats weights apart and an optimiser that does, as
    Adam, each becomes what it would have become alone: the objective is the sum of theirs.

    Args:
        nets: K networks of ``nn.Linear`` and ReLU in turn, as ``bayesify.networks.mlp`` makes
            them; their values are copied.

    Raises:
        ValueError: there is none, or their shapes differ.

    Example:
        >>> from bayesify.networks import mlp
        >>> nets = [mlp(3, (4,), 2, seed=k) for k in range(5)]
        >>> together = SideBySide(nets)
        >>> together(torch.zeros(7, 5, 3)).shape
        torch.Size([7, 5, 2])
        >>> x = torch.ones(7, 5, 3)
        >>> torch.allclose(together(x)[:, 1], nets[1](x[:, 1]))
        True
    """

    def __init__(self, nets: Sequence[nn.Sequential]) -> None:
        super().__init__()
        layers = [[part for part in net if isinstance(part, nn.Linear)] for net in nets]
        shapes = [[tuple(layer.weight.shape) for layer in each] for each in layers]
        if not shapes or any(shape != shapes[0] for shape in shapes):
            raise ValueError(f"networks side by side must have one shape, got {shapes}")
        self.num_layers = len(shapes[0])
        for number, same in enumerate(zip(*layers, strict=True)):
            weights = torch.stack([layer.weight.detach().T for layer in same])
            biases = torch.stack([layer.bias.detach().unsqueeze(0) for layer in same])
            self.register_parameter(f"weight_{number}", nn.Parameter(weights))
            self.register_parameter(f"bias_{number}", nn.Parameter(biases))

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs (N, K, o) of inputs (N, K, d)."""
        hidden = inputs.transpose(0, 1)
        for number in range(self.num_layers):
            hidden = hidden.relu() if number else hidden
            weight, bias = getattr(self, f"weight_{number}"), getattr(self, f"bias_{number}")
            # One product for each network; which bayesify's estimators know for what it is.
            hidden = torch.baddbmm(bias, hidden, weight)
        return hidden.transpose(0, 1)
