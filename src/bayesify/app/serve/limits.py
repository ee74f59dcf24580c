"""The limits of a service on its requests."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["ServiceLimits"]


@dataclass(frozen=True)
class ServiceLimits:
    """Limits of a service.

    Args:
        max_batch: examples in one pass of the network; a request with more has a pass of its own.
        batch_wait_ms: time that a request waits for others, in milliseconds.
        max_examples: examples in one request.
        max_body_mb: size of a request's body, in megabytes of 10^6 bytes.
        queue: requests that are read, wait or are computed at a time.
        timeout_s: seconds from a request to its response.

    Raises:
        ValueError: one is not positive; ``batch_wait_ms`` may be 0.

    Example:
        >>> ServiceLimits(queue=0)
        Traceback (most recent call last):
        ValueError: queue must be at least 1 and finite, got 0
    """

    max_batch: int = 64
    batch_wait_ms: float = 2.0
    max_examples: int = 1_000
    max_body_mb: float = 4.0
    queue: int = 64
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = 0.0 if each.name == "batch_wait_ms" else 1.0 if each.type == "int" else 1e-6
            if not least <= value < 1e9:
                name = each.name.replace("_", "-")
                raise ValueError(f"{name} must be at least {least:g} and finite, got {value:g}")

    @property
    def max_body(self) -> int:
        """Size of a request's body in bytes."""
        return int(self.max_body_mb * 1e6)
