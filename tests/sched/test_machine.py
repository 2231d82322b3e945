"""State machine over the engine with an arena-level oracle: any order of operations, exact pages, exact tokens."""

from __future__ import annotations

import random
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resin import BatchPlan, CacheGroup, Engine, FinishReason, PlanRejected, Policy, Request, RowFault, SamplingParams
from resin.plan import NOBODY
from resin.sched.outputs import NoToken
from resin.sched.request import RequestState
from tests.fakes import (
    VOCAB,
    OverlapFake,
    PagedFake,
    expected_tokens,
    fake_config,
    history_group,
    state_group,
    window_group,
)
from tests.leased_places import leased_places

MIXES: dict[str, tuple[CacheGroup, ...]] = {
    "history": (history_group(),),
    "window": (window_group(9),),
    "state": (state_group(16),),
    "history+window": (history_group(), window_group(10)),
    "history+state": (history_group(), state_group(8, rows=20)),
    "all three": (history_group(), window_group(6), state_group(16)),
    "two windows": (window_group(5, "near"), window_group(17, "far", rows=4)),
    "window 1": (window_group(1),),
    "window+state": (window_group(3), state_group(8)),
    "compressed": (history_group(4, rows=8), history_group(1, "index", rows=1), state_group(8)),
}
SPANS = {"5 and 2": (5, 2), "15, 7 and state": (15, 7, 0)}  # page spans that do not divide one another
MIXES["5 and 2"] = (history_group(), window_group(7))
MIXES["15, 7 and state"] = (history_group(), window_group(20), state_group(16))
CONTEXT_TOKENS = 96
MAX_PREFILL_STREAK = 3
SMALLEST_BUCKET = 8


class Driver:
    """The operations of the machine, and what must hold after each of them."""

    def __init__(self, mix: str, *, overlap: int, prefix_cache: bool, spare_pages: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.config = fake_config(
            MIXES[mix], spans=SPANS.get(mix, ()), max_context_tokens=CONTEXT_TOKENS, max_sequences=4
        )
        self.runner = (OverlapFake if overlap else PagedFake)(self.config)
        self.runner.check = self.check_rows
        self.clock_s = 0.0
        sizing = Engine(PagedFake(self.config), prefix_cache=prefix_cache)
        lone = sizing.scheduler.replicas[0].cache.pages_needed(CONTEXT_TOKENS, 1)
        self.engine = Engine(
            self.runner,
            prefix_cache=prefix_cache,
            overlap=overlap,
            cache_pages=1 + lone + spare_pages,
            policy=Policy(aging_s=10, prefill_streak_tokens=SMALLEST_BUCKET * MAX_PREFILL_STREAK),
            clock=self.clock,
        )
        self.shared = [self.random.randrange(VOCAB) for _ in range(CONTEXT_TOKENS)]
        self.requests: list[Request] = []
        self.cancelled: set[Request] = set()
        self.faulty: dict[Request, int] = {}  # requests that are to fail, and after how many outputs
        self.finished: list[Request] = []
        self.oldest: Request | None = None  # the best-ranked running request
        self.gap = 0  # plans in a row without it

    def clock(self) -> float:
        self.clock_s += 0.01
        return self.clock_s

    def submit(self, shared_tokens: int, own_tokens: int, outputs: int, priority: int, salt: str) -> None:
        prompt = self.shared[:shared_tokens] + [self.random.randrange(VOCAB) for _ in range(own_tokens)]
        stops = (self.random.randrange(VOCAB),) if outputs % 3 == 0 else ()
        params = SamplingParams(max_output_tokens=outputs, stop_token_ids=stops, temperature=0)
        self.requests.append(self.engine.submit(prompt, sampling_params=params, priority=priority, cache_salt=salt))

    def submit_faulty(self, own_tokens: int, outputs: int) -> None:
        """A request of which no token can be chosen after some."""
        prompt = self.shared[:20] + [self.random.randrange(VOCAB) for _ in range(own_tokens)]
        params = SamplingParams(max_output_tokens=outputs + 5, temperature=0)
        request = self.engine.submit(prompt, sampling_params=params)
        fault = self.random.choice((RowFault.NO_TOKEN, RowFault.NOT_FINITE))
        self.runner.faults[request.id] = (len(prompt) + outputs, fault)
        self.faulty[request] = outputs
        self.requests.append(request)

    def follow_up(self) -> None:
        """A next turn: an earlier conversation, its answer and some new tokens."""
        done = [request for request in self.finished if request.num_tokens < CONTEXT_TOKENS - 10]
        if done:
            prompt = [*self.random.choice(done).all_ids().tolist(), 1, 2, 3]
            self.requests.append(
                self.engine.submit(prompt, sampling_params=SamplingParams(max_output_tokens=5, temperature=0))
            )

    def twins(self) -> None:
        """Equal requests side by side: each publishes what the other has just computed."""
        prompt = self.shared[: self.random.randrange(1, 30)]
        params = SamplingParams(max_output_tokens=self.random.randrange(1, 50), temperature=0)
        for _ in range(2):
            self.requests.append(self.engine.submit(prompt, sampling_params=params))

    def step(self) -> None:
        plans = len(self.runner.plans)
        for event in self.engine.step():
            if hasattr(event, "reason"):
                self.finished.append(event.request)
        self.watch_gaps(plans)

    def check_rows(self, plan: BatchPlan) -> None:
        """The plan's page rows and destinations, derived, are exactly what the requests lease at this moment."""
        rows = {request.id: request for request in self.engine.scheduler.running()}
        for row, request_id in enumerate(plan.request_ids):
            if request_id == NOBODY:
                continue
            lease = rows[request_id].lease
            assert lease is not None
            paged, rings = iter(lease.rows), iter(lease.states)
            for group in plan.groups:
                if group.output_pages is not None and group.input_pages is not None:
                    ring = next(rings)
                    assert group.output_pages[row].tolist() == ring.current
                    previous = ring.held[-1][1] if ring.held else ring.current
                    assert group.input_pages[row].tolist() in (ring.current, previous)
                    continue
                assert group.page_indptr is not None and group.page_ids is not None
                pages = group.page_ids[group.page_indptr[row] : group.page_indptr[row + 1]].tolist()
                held = next(paged).view().tolist()
                assert pages and pages == held[-len(pages) :], f"{group.name}: stale page row"
        places = leased_places(self.engine, plan)
        assert plan.positions.tolist() == places.positions and plan.seq_lens.tolist() == places.lengths
        is_writable = self.engine.scheduler.replicas[0].cache.pool.is_writable
        for name, (pages, offsets) in places.destinations.items():
            assert [column.tolist() for column in plan.append_places(name)] == [pages, offsets], name
            assert all(page == 0 or is_writable(page) for page in pages)

    def watch_gaps(self, plans: int) -> None:
        """The best-ranked running request waits no longer than the stated bound for a plan that holds it."""
        oldest = min(self.engine.scheduler.running(), key=lambda request: (request.rank, request.id), default=None)
        if oldest is not self.oldest:
            self.oldest, self.gap = oldest, 0
            return
        for plan in self.runner.plans[plans:]:
            self.gap = 0 if oldest is None or oldest.id in plan.request_ids else self.gap + 1
            assert self.gap <= MAX_PREFILL_STREAK + 1

    def cancel(self, index: int) -> None:
        request = self.requests[index % len(self.requests)]
        if not request.is_finished:
            self.cancelled.add(request)
        self.engine.cancel(request)

    def retract(self) -> None:
        scheduler = self.engine.scheduler
        idle = [request for request in scheduler.running() if not scheduler.replicas[0].table.in_flight[request.slot]]
        if len(idle) > 1:
            scheduler.replicas[0].retract(self.random.choice(idle))

    def evict(self) -> None:
        self.engine.scheduler.replicas[0].cache.prefixes.trie.evict_one()

    def reject(self) -> None:
        """The runner refuses the next plan: no token, position or page of it may remain (admissions may)."""
        tokens, positions = self.snapshot()
        self.runner.fail["accept"] = PlanRejected("busy")
        try:
            self.step()
        except PlanRejected:
            after_tokens, after_positions = self.snapshot()
            assert after_tokens == tokens
            for request in positions.keys() & after_positions.keys():
                assert positions[request] == after_positions[request]
        self.runner.fail.clear()

    def snapshot(self) -> tuple[list[int], dict[Request, tuple[int, str]]]:
        """Output lengths of all requests; computed tokens and leased pages of the running ones."""
        scheduler = self.engine.scheduler
        positions = {}
        for request in scheduler.running():
            assert request.lease is not None
            kept = [row.end for row in request.lease.rows], [len(ring.held) for ring in request.lease.states]
            positions[request] = (int(scheduler.replicas[0].table.computed[request.slot]), str(kept))
        return [len(request.output_ids) for request in self.requests], positions

    def check(self) -> None:
        scheduler = self.engine.scheduler
        scheduler.check_integrity()
        for request in scheduler.queue.waiting():
            assert request.lease is None and request.slot == -1

    def finish(self) -> None:
        """Everything ends within a bound, with exactly its tokens, and nothing stays leased."""
        steps = 0
        live = sum(not request.is_finished for request in self.requests)
        while self.engine.has_work():
            self.step()
            self.check()
            steps += 1
            assert steps < 100 + 4 * live * CONTEXT_TOKENS, "starvation"
        for request in self.requests:
            assert request.state is RequestState.FINISHED
            self.check_tokens(request)
        assert self.engine.scheduler.replicas[0].cache.pool.leased == 0
        self.engine.close()

    def check_tokens(self, request: Request) -> None:
        want = expected_tokens(self.config, request.prompt_ids.tolist(), request.max_outputs)
        stops = [i for i, token in enumerate(want) if token in request.params.stop_token_ids]
        if stops:
            want = want[: stops[0] + 1]
        if request in self.faulty and request not in self.cancelled:
            assert request.output_ids == want[: self.faulty[request]]
            assert request.finish_reason is FinishReason.ERROR and isinstance(request.error, NoToken)
        elif request in self.cancelled:
            assert request.output_ids == want[: len(request.output_ids)]
            assert request.finish_reason is FinishReason.CANCELLED
        else:
            assert request.take_result() == want
            assert request.finish_reason is (FinishReason.STOP if stops else FinishReason.LENGTH)


def random_operation(driver: Driver) -> Callable[[], None]:
    """One operation, weighted like a busy engine."""
    draw = driver.random
    choice = draw.random()
    if choice < 0.22 and len(driver.engine.scheduler.queue) < 12:
        sizes = draw.randrange(60), draw.randrange(1, 15), draw.randrange(1, 21)
        return lambda: driver.submit(*sizes, draw.choice((0, 0, 0, 1, 3)), draw.choice(("", "", "tenant")))
    if choice < 0.23:
        return lambda: driver.submit_faulty(draw.randrange(1, 15), draw.randrange(8))
    if choice < 0.25:
        return driver.follow_up
    if choice < 0.26:
        return driver.twins
    if choice < 0.28 and driver.requests:
        return lambda: driver.cancel(draw.randrange(len(driver.requests)))
    if choice < 0.31:
        return driver.retract
    if choice < 0.34:
        return driver.evict
    if choice < 0.37:
        return driver.reject
    return driver.step


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        mix=st.sampled_from(sorted(MIXES)),
        overlap=st.integers(0, 3),
        prefix_cache=st.booleans(),
        spare_pages=st.integers(0, 60),
        seed=st.integers(0, 2**16),
    )
    def start(self, mix: str, overlap: int, prefix_cache: bool, spare_pages: int, seed: int) -> None:
        self.driver = Driver(mix, overlap=overlap, prefix_cache=prefix_cache, spare_pages=spare_pages, seed=seed)

    @rule(
        shared_tokens=st.integers(0, 60),
        own_tokens=st.integers(1, 15),
        outputs=st.integers(1, 20),
        priority=st.integers(0, 3),
        salt=st.sampled_from(("", "tenant")),
    )
    def submit(self, shared_tokens: int, own_tokens: int, outputs: int, priority: int, salt: str) -> None:
        self.driver.submit(shared_tokens, own_tokens, outputs, priority, salt)

    @rule()
    def follow_up(self) -> None:
        self.driver.follow_up()

    @rule()
    def twins(self) -> None:
        self.driver.twins()

    @rule(own_tokens=st.integers(1, 15), outputs=st.integers(0, 8))
    def submit_faulty(self, own_tokens: int, outputs: int) -> None:
        self.driver.submit_faulty(own_tokens, outputs)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.driver.step()
            self.driver.check()

    @precondition(lambda self: self.driver.requests)
    @rule(index=st.integers(0, 100))
    def cancel(self, index: int) -> None:
        self.driver.cancel(index)

    @rule()
    def retract(self) -> None:
        self.driver.retract()

    @rule()
    def evict(self) -> None:
        self.driver.evict()

    @rule()
    def reject(self) -> None:
        self.driver.reject()

    @invariant()
    def pages_add_up(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.finish()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("mix", sorted(MIXES))
@pytest.mark.parametrize("overlap", [0, 1, 2], ids=["sync", "overlap", "deep"])
def test_random_operations(mix: str, overlap: int) -> None:
    for seed, prefix_cache, spare_pages in ((1, True, 3), (2, True, 40), (3, False, 10)):
        run_random(mix, overlap, prefix_cache, spare_pages, seed, operations=120)


def run_random(mix: str, overlap: int, prefix_cache: bool, spare_pages: int, seed: int, operations: int) -> None:
    driver = Driver(mix, overlap=overlap, prefix_cache=prefix_cache, spare_pages=spare_pages, seed=seed)
    for _ in range(operations):
        random_operation(driver)()
        driver.check()
    driver.finish()


@pytest.mark.slow
def test_a_million_random_operations() -> None:
    draw = random.Random(0)
    done = 0
    while done < 1_000_000:
        settings_of_run = (
            draw.choice(sorted(MIXES)),
            draw.random() < 0.5,
            draw.random() < 0.7,
            draw.choice((0, 5, 20, 60)),
        )
        run_random(*settings_of_run, seed=done, operations=1000)
        done += 1000
