"""Noise of an estimator that one pass records, so that several networks can share a later pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bayesify.noise.keys import NoiseKey, NoiseKind

__all__ = ["DrawnKey", "NoiseRequest", "RecordingKey", "raise_unforeseen_use"]

#: Kind, place, size, dtype and device of the numbers that an operation needs.
NoiseRequest = tuple[NoiseKind, int, int, torch.dtype, "torch.device | str"]


@dataclass(frozen=True)
class RecordingKey(NoiseKey):
    """A key that lists what is asked of it."""

    requests: list[NoiseRequest] = field(default_factory=list)

    def numbers(
        self,
        kind: NoiseKind,
        sample: int,  # noqa: ARG002
        place: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Tensor:
        """List the request and return zeros."""
        self.requests.append((kind, place, size, dtype, device))
        return torch.zeros(size, dtype=dtype, device=device)


@dataclass(frozen=True)
class DrawnKey(NoiseKey):
    """A key whose numbers were drawn before, in the order of their places."""

    drawn: list[Tensor] = field(default_factory=list)

    def numbers(
        self,
        kind: NoiseKind,  # noqa: ARG002
        sample: int,  # noqa: ARG002
        place: int,
        size: int,
        dtype: torch.dtype,  # noqa: ARG002
        device: torch.device | str,  # noqa: ARG002
    ) -> Tensor:
        """Return the numbers of a place; raise ValueError where other ones were recorded there."""
        if place > len(self.drawn) or self.drawn[place - 1].numel() != size:
            raise_unforeseen_use("a parameter", "an operation")
        return self.drawn[place - 1]


def raise_unforeseen_use(name: str, function: str) -> None:
    """Raise ValueError: a pass asks for other noise than the one that was recorded.

    Args:
        name: the parameter.
        function: the operation that used it.
    """
    raise ValueError(
        "networks that are trained at once must use each parameter in the same way in each "
        f"forward pass, but {function} used {name} differently; train each by fit"
    )
