"""Engine metrics: aggregated while stepping, turned into Prometheus families only when scraped."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from resin.plan import Phase
from resin.plan.extras import require
from resin.sched.commit import Committed
from resin.sched.request import FinishReason, Request
from resin.sched.scheduler import Scheduler
from resin.sched.step import DecodePart, PlannedStep

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


HOST_S = (2e-5, 5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3e-3, 1e-2, 5e-2, 0.5)
TOKEN_S = (1e-3, 2e-3, 4e-3, 6e-3, 8e-3, 0.012, 0.016, 0.025, 0.04, 0.06, 0.1, 0.2, 0.4, 1.0, 4.0)
REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
FEW_GAPS = 8  # that are faster counted one by one


class Histogram:
    """Counts by upper bound (the last one infinite), and their sum."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, int]]:
        """Cumulative counts as Prometheus wants them."""
        edges = [*(f"{edge:g}" for edge in self.bounds), "+Inf"]
        return list(zip(edges, accumulate(self.counts), strict=True))


class EngineMetrics:
    """What one engine did. `registry` serves it to prometheus_client.

    Args:
        scheduler: read, when a step ends and when scraped; never written.
        observations: the runner's own numbers.
    """

    def __init__(self, scheduler: Scheduler, observations: Callable[[], Mapping[str, float]]) -> None:
        self._scheduler = scheduler
        self._observations = observations
        self._registry: CollectorRegistry | None = None
        self.submitted = 0
        self.finished = dict.fromkeys(FinishReason, 0)
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.plans = dict.fromkeys(Phase, 0)
        self.live_tokens = dict.fromkeys(Phase, 0)
        self.padded_tokens = dict.fromkeys(Phase, 0)
        self.prefix_hit_tokens = 0
        self.prefix_ceiling_tokens = 0
        self.prefix_losses: dict[str, int] = {}
        self.ttft_s = Histogram(REQUEST_S)
        self.inter_token_s = Histogram(TOKEN_S)
        self.request_s = Histogram(REQUEST_S)
        self.host_s = {stage: Histogram(HOST_S) for stage in ("plan", "dispatch", "commit")}

    @property
    def registry(self) -> CollectorRegistry:
        """A prometheus_client registry that reads these numbers when scraped.

        Raises:
            MissingPackage: prometheus_client is not installed.
        """
        if self._registry is None:
            require("serve", "prometheus_client")
            from prometheus_client import CollectorRegistry

            self._registry = CollectorRegistry(auto_describe=False)
            self._registry.register(self)  # type: ignore[arg-type]
        return self._registry

    def on_submit(self, request: Request) -> None:
        self.submitted += 1

    def on_plan(self, seconds: float) -> None:
        self.host_s["plan"].observe(seconds)

    def on_dispatch(self, planned: PlannedStep, seconds: float) -> None:
        bucket = planned.plan.bucket
        self.host_s["dispatch"].observe(seconds)
        for plan, part in zip(planned.plan.plans, planned.parts, strict=True):
            self.plans[bucket.phase] += 1
            self.live_tokens[bucket.phase] += len(part.rows) if isinstance(part, DecodePart) else plan.num_tokens
            self.padded_tokens[bucket.phase] += bucket.tokens

    def on_commit(self, seconds: float) -> None:
        self.host_s["commit"].observe(seconds)

    def on_tokens(self, committed: Committed, now: float) -> None:
        """Before the scheduler notes that the tokens came now."""
        plan, table, slots, last_s = committed.plan, committed.table, committed.slots, committed.last_together_s
        self.generated_tokens += len(committed.token_ids)
        if plan.phase is Phase.PREFILL:
            self.prompt_tokens += plan.num_tokens
            for request, before_s in zip(committed.requests, table.last_token_s[slots].tolist(), strict=True):
                if len(request.output_ids) == 1:
                    self.ttft_s.observe(now - request.submitted_s)
                else:  # resumed after a retraction
                    self.inter_token_s.observe(now - before_s)
        elif committed.indptr is not None:
            counts = np.diff(committed.indptr)
            self._observe_gaps(table.last_token_s[slots], now)
            self.inter_token_s.observe(0.0, int(counts.sum()) - len(counts))  # those that came with another
        elif last_s is not None:
            self.inter_token_s.observe(now - last_s, len(committed.requests))
        else:
            self._observe_gaps(table.last_token_s[slots], now)

    def _observe_gaps(self, last_s: np.ndarray, now: float) -> None:
        """One sample a row; most rows had their latest token at the same time."""
        while last_s.size > FEW_GAPS:
            same = last_s == last_s[0]
            self.inter_token_s.observe(now - float(last_s[0]), int(np.count_nonzero(same)))
            last_s = last_s[~same]
        for before_s in last_s.tolist():
            self.inter_token_s.observe(now - before_s)

    def on_finish(self, request: Request) -> None:
        assert request.finish_reason is not None and request.finished_s is not None
        self.finished[request.finish_reason] += 1
        self.request_s.observe(request.finished_s - request.submitted_s)
        audit = request.prefix_audit
        if audit is not None:
            self.prefix_hit_tokens += audit.hit_tokens
            self.prefix_ceiling_tokens += audit.ceiling_tokens
            for reason, tokens in audit.losses.items():
                self.prefix_losses[reason] = self.prefix_losses.get(reason, 0) + tokens

    def collect(self) -> Iterable[Any]:
        """Prometheus families (called by the registry)."""
        yield from _gauges(self._scheduler)
        yield from _counters(self, self._scheduler)
        yield from _histograms(self)
        yield from _runner_gauges(self._observations())

    def describe(self) -> Iterable[Any]:
        return ()


def _gauges(scheduler: Scheduler) -> Iterable[Any]:
    from prometheus_client.core import GaugeMetricFamily

    replicas = scheduler.replicas
    labels = ["state", "replica"]
    requests = GaugeMetricFamily("resin_requests", "Requests by state.", labels=labels)
    requests.add_metric(["waiting", ""], len(scheduler.queue))
    pages = GaugeMetricFamily("resin_pool_pages", "Pages of the cache pool by state.", labels=labels)
    for replica in replicas:
        index = str(replica.index)
        requests.add_metric(["prefill", index], len(replica.prefill.requests))
        requests.add_metric(["decode", index], len(replica.decode.requests))
        for state in ("free", "leased", "cached"):
            pages.add_metric([state, index], getattr(replica.cache.pool, state))
    yield requests
    yield pages


def _counters(metrics: EngineMetrics, scheduler: Scheduler) -> Iterable[Any]:
    from prometheus_client.core import CounterMetricFamily

    def counter(name: str, text: str, values: Mapping[str, float], label: str = "") -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=[label] if label else None)
        for key, value in values.items():
            family.add_metric([key] if label else [], value)
        return family

    yield counter("resin_requests_submitted", "Requests submitted.", {"": metrics.submitted})
    finished = {reason.value: count for reason, count in metrics.finished.items()}
    yield counter("resin_requests_finished", "Requests ended, by reason.", finished, "reason")
    yield counter("resin_prompt_tokens", "Tokens computed by prefill plans.", {"": metrics.prompt_tokens})
    yield counter("resin_generated_tokens", "Tokens generated.", {"": metrics.generated_tokens})
    retractions = {str(replica.index): replica.retractions for replica in scheduler.replicas}
    evictions = {str(replica.index): replica.cache.evictions for replica in scheduler.replicas}
    for name, text, drafts in (
        ("resin_drafts_tried", "Drafts that decode plans checked, by place behind the row's latest token.", "tried"),
        ("resin_drafts_agreed", "Drafts that held, likewise.", "agreed"),
    ):
        places = {str(place + 1): count for place, count in enumerate(getattr(scheduler.drafts, drafts).tolist())}
        yield counter(name, text, places, "place")
    yield counter("resin_retractions", "Running requests sent back to the queue.", retractions, "replica")
    yield counter("resin_evictions", "Prefix nodes evicted.", evictions, "replica")
    yield counter("resin_prefix_hit_tokens", "Prompt tokens reused.", {"": metrics.prefix_hit_tokens})
    yield counter(
        "resin_prefix_ceiling_tokens",
        "Prompt tokens an unbounded cache would reuse.",
        {"": metrics.prefix_ceiling_tokens},
    )
    yield counter("resin_prefix_lost_tokens", "Reusable prompt tokens lost.", dict(metrics.prefix_losses), "reason")
    for name, text, values in (
        ("resin_plans", "Plans dispatched, by phase.", metrics.plans),
        ("resin_plan_live_tokens", "Live tokens of plans.", metrics.live_tokens),
        ("resin_plan_padded_tokens", "Bucket tokens of plans.", metrics.padded_tokens),
    ):
        yield counter(name, text, {phase.name.lower(): value for phase, value in values.items()}, "phase")


def _histograms(metrics: EngineMetrics) -> Iterable[Any]:
    from prometheus_client.core import HistogramMetricFamily

    for name, text, histogram in (
        ("resin_ttft_seconds", "Submission to first token.", metrics.ttft_s),
        ("resin_inter_token_seconds", "Token to next token.", metrics.inter_token_s),
        ("resin_request_seconds", "Submission to end.", metrics.request_s),
    ):
        yield HistogramMetricFamily(name, text, buckets=histogram.buckets(), sum_value=histogram.total)
    host = HistogramMetricFamily("resin_host_seconds", "Host time of a step's stages.", labels=["stage"])
    for stage, histogram in metrics.host_s.items():
        host.add_metric([stage], histogram.buckets(), histogram.total)
    yield host


def _runner_gauges(observations: Mapping[str, float]) -> Iterable[Any]:
    from prometheus_client.core import GaugeMetricFamily

    for name, value in observations.items():
        yield GaugeMetricFamily(f"resin_runner_{name}", "Reported by the runner.", value=value)
