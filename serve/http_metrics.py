"""Prometheus metrics of the HTTP side, and the text of both sides together."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class HttpMetrics:
    """Counters, histograms and gauges named `resin_http_*`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("path", "method", "status")
        self.requests = Counter("resin_http_requests", "Requests answered.", labels, registry=self.registry)
        self.seconds = Histogram(
            "resin_http_request_seconds",
            "Time from a request's first byte to its answer's last.",
            ("path",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.in_progress = Gauge("resin_http_requests_in_progress", "Requests being answered.", registry=self.registry)
        self.slow_clients = Counter(
            "resin_http_slow_clients", "Clients cancelled because their socket did not drain.", registry=self.registry
        )
        self.disconnects = Counter(
            "resin_http_disconnects", "Clients that left before their answer was complete.", registry=self.registry
        )
        self._limits = Gauge("resin_http_limit", "Configured limits.", ("name",), registry=self.registry)

    def set_limits(self, limits: dict[str, float]) -> None:
        for name, value in limits.items():
            self._limits.labels(name).set(value)

    def watch(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        """A gauge whose value is read when somebody looks."""
        Gauge(name, meaning, registry=self.registry).set_function(read)

    def exposition(self, engine_registry: CollectorRegistry | None) -> bytes:
        """The text that Prometheus scrapes."""
        engine = generate_latest(engine_registry) if engine_registry is not None else b""
        return engine + generate_latest(self.registry)
