"""Counters and histograms of the service, for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

__all__ = ["CONTENT_TYPE", "Telemetry"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Telemetry:
    """What the service counts; each service has its own.

    Example:
        >>> telemetry = Telemetry()
        >>> telemetry.on_response(200, 0.01)
        >>> b'bayesify_requests_total{status="200"} 1.0' in telemetry.text()
        True
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        registry: Any = {"registry": self._registry}
        self._requests = Counter(
            "bayesify_requests", "Requests to /predict by HTTP status", ["status"], **registry
        )
        self._seconds = Histogram(
            "bayesify_request_seconds",
            "Time from a request to its response",
            buckets=_SECONDS,
            **registry,
        )
        self._examples = Counter("bayesify_examples", "Examples predicted", **registry)
        self._abstained = Counter(
            "bayesify_abstained", "Examples whose uncertainty is above the threshold", **registry
        )
        self._outside = Counter(
            "bayesify_outside", "Rows that lie outside the training data", **registry
        )
        self._pass_size = Histogram(
            "bayesify_pass_examples",
            "Examples in a pass of the network",
            buckets=_SIZES,
            **registry,
        )
        #: Requests that are being read, waiting or computed.
        self.in_progress = Gauge(
            "bayesify_requests_in_progress", "Requests that wait or are computed", **registry
        )

    def on_response(self, status: int, seconds: float) -> None:
        """Count a response of /predict."""
        self._requests.labels(str(status)).inc()
        self._seconds.observe(seconds)

    def on_answers(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Count the answers of a request."""
        self._examples.inc(len(answers))
        self._abstained.inc(sum(bool(each["abstain"]) for each in answers))
        self._outside.inc(sum(bool(each["outside"]) for each in answers))

    def on_pass(self, size: int) -> None:
        """Count a pass of the network."""
        self._pass_size.observe(size)

    def text(self) -> bytes:
        """Return all of it in Prometheus' text format."""
        return generate_latest(self._registry)
