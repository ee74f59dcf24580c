"""Functions of scipy.special on tensors, where PyTorch has no such function."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["scipy_function"]


def scipy_function(name: str) -> Callable[..., Tensor]:
    """Return a function of scipy.special that takes tensors, without gradients.

    It computes on the CPU in float64, and returns the dtype and device of its last argument.

    Raises:
        ImportError: scipy is not installed.

    Example:
        >>> scipy_function("stdtr")(torch.tensor(3.0), torch.tensor([0.0, 1.0]))
        tensor([0.5000, 0.8045])
    """
    # On first use, as the import takes as long as all of bayesify's own modules.
    try:
        function = getattr(importlib.import_module("scipy.special"), name)
    except ImportError as error:
        raise ImportError(
            "quantiles and probabilities of this distribution need scipy; pip install scipy"
        ) from error

    def compute(*arguments: Tensor) -> Tensor:
        arrays = (value.detach().to("cpu", torch.float64).numpy() for value in arguments)
        return torch.as_tensor(function(*arrays), dtype=arguments[-1].dtype).to(arguments[-1])

    return compute
