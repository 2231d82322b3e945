"""Metrics: equal to what an observer of the run counts, and readable by Prometheus."""

from __future__ import annotations

import collections
import time
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from resin import (
    BatchPlan,
    Engine,
    EngineFailed,
    FinishedEvent,
    Phase,
    PlanRejected,
    Request,
    RunnerConfig,
    SamplingParams,
    TokensEvent,
)
from resin.metrics import HOST_S, REQUEST_S, TOKEN_S, Histogram
from resin.plan import NOBODY
from tests.fakes import VOCAB, OverlapFake, PagedFake, fake_config, history_group, state_group, window_group

CONFIG = fake_config((history_group(), window_group(6), state_group(8, rows=20)), max_plan_tokens=16)


def scrape(engine: Engine) -> dict[str, float]:
    """Every sample of the registry's text, by name and labels."""
    assert engine.metrics is not None
    text = generate_latest(engine.metrics.registry).decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith("."), family.name
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert name not in samples
            samples[name] = sample.value
    return samples


def requests_in(state: str) -> str:
    """The sample of an engine with one replica."""
    return f"resin_requests{{replica={'' if state == 'waiting' else 0},state={state}}}"


class Observer:
    """Counts a run from the outside: its plans, events and clock."""

    def __init__(self, runner_class: type[PagedFake], config: RunnerConfig = CONFIG, **settings: Any) -> None:
        self.now_s = 100.0
        self.runner = runner_class(config)
        self.engine = Engine(self.runner, clock=lambda: self.now_s, **settings)
        self.requests: list[Request] = []
        self.ttft_s: list[float] = []
        self.gap_s: list[float] = []
        self.request_s: list[float] = []
        self.last_s: dict[Request, float] = {}
        self.tokens = 0
        self.cancelled: set[Request] = set()

    def submit(self, prompt: list[int], **settings: Any) -> Request:
        deadline_s = settings.pop("deadline_s", None)
        self.requests.append(
            self.engine.submit(prompt, sampling_params=SamplingParams(**settings), deadline_s=deadline_s)
        )
        return self.requests[-1]

    def cancel(self, request: Request) -> None:
        self.cancelled.add(request)
        self.request_s.append(self.now_s - request.submitted_s)
        self.engine.cancel(request)

    def step(self) -> None:
        self.now_s += 0.0071
        for event in self.engine.step():
            if isinstance(event, FinishedEvent):
                if event.request not in self.cancelled:
                    self.request_s.append(self.now_s - event.request.submitted_s)
                continue
            assert isinstance(event, TokensEvent)
            self.tokens += len(event.token_ids)
            for request in event.requests:
                last = self.last_s.get(request)
                if last is None:
                    self.ttft_s.append(self.now_s - request.submitted_s)
                else:
                    self.gap_s.append(self.now_s - last)
                self.last_s[request] = self.now_s


def check_histogram(samples: dict[str, float], name: str, values: list[float], bounds: tuple[float, ...]) -> None:
    assert samples[f"{name}_count"] == len(values)
    assert samples[f"{name}_sum"] == pytest.approx(sum(values))
    for bound in bounds:
        below = sum(value <= bound for value in values)
        assert samples[f"{name}_bucket{{le={bound:g}}}"] == below, (name, bound)
    assert samples[f"{name}_bucket{{le=+Inf}}"] == len(values)


@pytest.mark.parametrize("runner_class", [PagedFake, OverlapFake], ids=["sync", "overlap"])
def test_numbers_equal_an_independent_count(runner_class: type[PagedFake]) -> None:
    watch = Observer(runner_class, prefix_cache=True, context_length=128)
    shared = [(5 * i) % VOCAB for i in range(40)]
    watch.submit(shared, max_output_tokens=9)
    for _ in range(14):
        watch.step()
    for i in range(7):
        watch.submit([*shared[: 5 * i], i, i], max_output_tokens=3 + 4 * i, stop_token_ids=(i,))
    late = watch.submit([1, 2], max_output_tokens=90, deadline_s=0.2)
    for _ in range(3):
        watch.step()
    watch.cancel(watch.requests[6])
    while watch.engine.has_work():
        watch.step()
    samples = scrape(watch.engine)
    assert samples["resin_requests_submitted_total"] == len(watch.requests) == 9
    reasons = collections.Counter(request.finish_reason for request in watch.requests)
    assert late.finish_reason == "deadline" and reasons["cancelled"] == 1  # type: ignore[index]
    for reason in ("stop", "length", "cancelled", "deadline", "error"):
        assert samples[f"resin_requests_finished_total{{reason={reason}}}"] == reasons[reason]  # type: ignore[index]
    assert samples["resin_generated_tokens_total"] == watch.tokens == sum(len(r.output_ids) for r in watch.requests)
    plans = watch.runner.plans

    def live_tokens(plan: BatchPlan) -> int:
        return plan.num_tokens - plan.request_ids.count(NOBODY)

    for phase in Phase:
        mine, label = [plan for plan in plans if plan.phase is phase], f"{{phase={phase.name.lower()}}}"
        assert samples[f"resin_plans_total{label}"] == len(mine) > 0
        assert samples[f"resin_plan_live_tokens_total{label}"] == sum(live_tokens(plan) for plan in mine)
        assert samples[f"resin_plan_padded_tokens_total{label}"] == sum(plan.bucket.tokens for plan in mine)
    prefill = [plan.num_tokens for plan in plans if plan.phase is Phase.PREFILL]
    assert samples["resin_prompt_tokens_total"] == sum(prefill)
    audits = [request.prefix_audit for request in watch.requests if request.prefix_audit is not None]
    assert samples["resin_prefix_hit_tokens_total"] == sum(audit.hit_tokens for audit in audits) > 0
    assert samples["resin_prefix_ceiling_tokens_total"] == sum(audit.ceiling_tokens for audit in audits)
    losses: collections.Counter[str] = collections.Counter()
    for audit in audits:
        losses.update(audit.losses)
    assert losses
    for reason, lost in losses.items():
        assert samples[f"resin_prefix_lost_tokens_total{{reason={reason}}}"] == lost
    check_histogram(samples, "resin_ttft_seconds", watch.ttft_s, REQUEST_S)
    check_histogram(samples, "resin_inter_token_seconds", watch.gap_s, TOKEN_S)
    check_histogram(samples, "resin_request_seconds", watch.request_s, REQUEST_S)
    for stage, times in (("dispatch", len(plans)), ("commit", len(plans))):
        assert samples[f"resin_host_seconds_count{{stage={stage}}}"] == times
    assert samples["resin_host_seconds_count{stage=plan}"] >= len(plans)
    assert {f"resin_host_seconds_bucket{{le={bound:g},stage=plan}}" for bound in HOST_S} <= samples.keys()


@pytest.mark.parametrize("runner_class", [PagedFake, OverlapFake], ids=["sync", "overlap"])
def test_gauges_follow_the_run(runner_class: type[PagedFake]) -> None:
    watch = Observer(runner_class, prefix_cache=True)
    for i in range(7):
        watch.submit([i] * 30, max_output_tokens=20)
    while watch.engine.has_work():
        watch.step()
        scheduler, samples = watch.engine.scheduler, scrape(watch.engine)
        live = [request for request in watch.requests if not request.is_finished]
        assert sum(samples[requests_in(state)] for state in ("waiting", "prefill", "decode")) == len(live)
        assert samples[requests_in("waiting")] == sum(request.slot < 0 for request in live)
        pages = {
            state: samples[f"resin_pool_pages{{replica=0,state={state}}}"] for state in ("free", "leased", "cached")
        }
        assert sum(pages.values()) == scheduler.replicas[0].cache.pool.total
        held = {page for request in live if request.lease for page in request.lease.pages()}
        held |= {page for request in scheduler.replicas[0].closing if request.lease for page in request.lease.pages()}
        assert pages["leased"] == len(held)
    assert scrape(watch.engine)["resin_pool_pages{replica=0,state=leased}"] == 0


def test_retractions_and_evictions() -> None:
    watch = Observer(OverlapFake, fake_config((history_group(),), max_sequences=3), prefix_cache=True,
                     context_length=64, cache_pages=1 + 24)  # fmt: skip
    for i in range(6):
        watch.submit([i] * 20, max_output_tokens=40)
    while watch.engine.has_work():
        watch.step()
    samples = scrape(watch.engine)
    assert samples["resin_retractions_total{replica=0}"] == sum(request.retractions for request in watch.requests) > 0
    assert samples["resin_evictions_total{replica=0}"] == watch.engine.scheduler.replicas[0].cache.evictions > 0
    # A resumed request has no second first token, and its longest wait is one between tokens.
    check_histogram(samples, "resin_ttft_seconds", watch.ttft_s, REQUEST_S)
    check_histogram(samples, "resin_inter_token_seconds", watch.gap_s, TOKEN_S)
    assert max(watch.gap_s) > 0.1


def test_a_plan_that_the_runner_refused_is_not_counted() -> None:
    watch = Observer(PagedFake)
    watch.submit([1, 2], max_output_tokens=3)
    watch.runner.fail["accept"] = PlanRejected("busy")
    with pytest.raises(PlanRejected):
        watch.step()
    while watch.engine.has_work():
        watch.step()
    samples = scrape(watch.engine)
    total = sum(samples[f"resin_plans_total{{phase={phase}}}"] for phase in ("prefill", "decode"))
    assert total == len(watch.runner.plans) == 3


def test_a_quarantined_engine_has_no_waiting_or_running_requests() -> None:
    watch = Observer(PagedFake)
    for i in range(7):
        watch.submit([i], max_output_tokens=9)
    watch.step()
    watch.runner.fail["forward"] = OSError("boom")
    with pytest.raises(EngineFailed):
        watch.step()
    samples = scrape(watch.engine)
    assert all(samples[requests_in(state)] == 0 for state in ("waiting", "prefill", "decode"))
    assert samples["resin_requests_finished_total{reason=error}"] == 7


def test_runner_observations_are_exported() -> None:
    class Observed(PagedFake):
        def observations(self) -> dict[str, float]:
            return {"compilations_after_ready": 2, "arena_bytes": 1e9}

    samples = scrape(Engine(Observed(CONFIG)))
    assert samples["resin_runner_compilations_after_ready"] == 2 and samples["resin_runner_arena_bytes"] == 1e9


def test_metrics_can_be_left_out() -> None:
    with Engine(PagedFake(CONFIG), enable_metrics=False) as engine:
        assert engine.metrics is None
        request = engine.submit([1], sampling_params=SamplingParams(max_output_tokens=3))
        while engine.has_work():
            engine.step()
        assert len(request.take_result()) == 3


def test_two_engines_have_registries_of_their_own() -> None:
    first, second = Engine(PagedFake(CONFIG)), Engine(PagedFake(CONFIG))
    first.submit([1])
    assert scrape(first)["resin_requests_submitted_total"] == 1
    assert scrape(second)["resin_requests_submitted_total"] == 0
    assert first.metrics is not None and first.metrics.registry is first.metrics.registry


def test_a_clock_that_starts_at_zero_counts_like_any_other() -> None:
    now_s = [0.0]
    with Engine(PagedFake(CONFIG), clock=lambda: now_s[0]) as engine:
        engine.submit([1, 2], sampling_params=SamplingParams(max_output_tokens=5))
        while engine.has_work():
            engine.step()
            now_s[0] += 0.003
        samples = scrape(engine)
    assert samples["resin_ttft_seconds_count"] == 1 and samples["resin_inter_token_seconds_count"] == 4
    assert samples["resin_inter_token_seconds_sum"] == pytest.approx(0.012)


def test_a_histogram_against_plain_counting() -> None:
    bounds = (0.1, 0.5, 2.0)
    values = [0.0, 0.1, 0.1000001, 0.5, 1.9, 2.0, 2.1, 1e9]
    one, many = Histogram(bounds), Histogram(bounds)
    for value in values:
        one.observe(value)
    for value in values:
        many.observe(value, 3)
    assert one.buckets() == [("0.1", 2), ("0.5", 4), ("2", 6), ("+Inf", 8)]
    assert many.buckets() == [("0.1", 6), ("0.5", 12), ("2", 18), ("+Inf", 24)]
    assert one.total == sum(values) and many.total == pytest.approx(3 * sum(values))


def test_a_slow_plan_is_seen_in_the_host_time() -> None:
    class Slow(PagedFake):
        def forward(self, plan: BatchPlan) -> Any:
            time.sleep(0.02)
            return super().forward(plan)

    with Engine(Slow(CONFIG)) as engine:
        engine.submit([1], sampling_params=SamplingParams(max_output_tokens=3))
        while engine.has_work():
            engine.step()
        samples = scrape(engine)
    assert samples["resin_host_seconds_sum{stage=dispatch}"] >= 0.06
    assert samples["resin_host_seconds_bucket{le=0.01,stage=dispatch}"] == 0


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_gaps_of_rows_beside_one_that_decodes_at_every_second_step(overlap: int) -> None:
    """A row with a mask pauses while its token is in flight; the others' gaps are one step all the same."""
    watch = Observer(OverlapFake, overlap=overlap)
    for number in range(3):
        watch.submit([number, 5], max_output_tokens=20)
    watch.submit([9, 9], max_output_tokens=6, allowed_tokens=lambda output: None)
    while watch.engine.has_work():
        watch.step()
    check_histogram(scrape(watch.engine), "resin_inter_token_seconds", watch.gap_s, TOKEN_S)


def test_drafts_by_place_and_the_gaps_of_tokens_that_come_together() -> None:
    config = fake_config((history_group(),), draft_tokens=3)
    now_s = 10.0
    with Engine(PagedFake(config), clock=lambda: now_s) as engine:
        engine.submit([1, 2], sampling_params=SamplingParams(max_output_tokens=9))
        while engine.has_work():
            now_s += 0.01
            engine.step()
        found = scrape(engine)
        assert engine.metrics is not None
        gaps = engine.metrics.inter_token_s
    # One token comes with the prompt, then twice four.
    for name in ("tried", "agreed"):
        assert [found[f"resin_drafts_{name}_total{{place={place}}}"] for place in (1, 2, 3)] == [2, 2, 2]
    assert found["resin_generated_tokens_total"] == 9
    assert sum(gaps.counts) == 8 and gaps.total == pytest.approx(0.02)
