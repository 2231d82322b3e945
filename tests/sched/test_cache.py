"""The cache manager: what a prefix gives back for every mix of groups, why not more, and whose pages are whose."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from resin import BatchPlan, CacheGroup, Engine, ForwardOutput, PrefixAudit, Request, SamplingParams
from resin.sched.cache import CacheManager, Reservation
from resin.sched.keys import KEY_BYTES, KEY_DTYPE
from resin.sched.lease import PagedGroup
from resin.sched.prefix import PrefixNode
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

MIXES: dict[str, tuple[CacheGroup, ...]] = {
    "history": (history_group(),),
    "two histories": (history_group(4, rows=8), history_group(1, "index", rows=1)),
    "window": (window_group(9),),
    "wide window": (history_group(), window_group(31)),
    "state": (state_group(16),),
    "two states": (state_group(16), state_group(8, rows=3, name="small")),
    "history+state": (history_group(), state_group(16, rows=20)),
    "window+state": (window_group(6), state_group(8)),
    "all": (history_group(), window_group(6), window_group(20, "far", rows=4), state_group(16)),
}
RUNNERS = pytest.mark.parametrize("runner_class", [PagedFake, OverlapFake], ids=["sync", "overlap"])


def tokens(count: int, first: int = 0) -> list[int]:
    return [(first + 11 * i) % VOCAB for i in range(count)]


def serve(engine: Engine, prompt: list[int], count: int = 1, **settings: Any) -> Request:
    salt = settings.pop("cache_salt", "")
    params = SamplingParams(max_output_tokens=count, temperature=0, **settings)
    request = engine.submit(prompt, sampling_params=params, cache_salt=salt)
    while engine.has_work():
        engine.step()
        engine.scheduler.check_integrity()
    assert request.take_result() == expected_tokens(engine.config, prompt, count)
    return request


def audit(request: Request) -> PrefixAudit:
    found = request.prefix_audit
    assert found is not None
    assert sum(found.losses.values()) + found.hit_tokens == found.ceiling_tokens, "every lost token has a reason"
    assert all(lost > 0 for lost in found.losses.values())
    return found


def resume_step(engine: Engine) -> int:
    """Prefixes resume at multiples of this: the page alignment, or the checkpoints."""
    cache = engine.scheduler.replicas[0].cache
    return cache.checkpoint_tokens if cache.state_pages else cache.prefixes.align_tokens


# -- hits -----------------------------------------------------------------------------------------------------------


@RUNNERS
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_a_prefix_is_reused_up_to_the_last_place_where_every_group_resumes(
    mix: str, runner_class: type[PagedFake]
) -> None:
    config = fake_config(MIXES[mix], max_context_tokens=256, max_plan_tokens=24)
    for first_tokens, second_tokens in ((40, 60), (63, 63), (64, 64), (65, 65), (65, 33), (65, 16), (17, 90)):
        with Engine(runner_class(config), prefix_cache=True) as engine:
            prompt = tokens(90)
            serve(engine, prompt[:first_tokens])
            second = serve(engine, prompt[:second_tokens], 3)
            step = resume_step(engine)
            # The last token of a prompt is always computed, and the answer's last token never was.
            want = min(first_tokens, second_tokens - 1) // step * step
            assert audit(second).hit_tokens == second.prefix_hit_tokens == want
            other = serve(engine, tokens(second_tokens, 5), 3)
            assert audit(other) == PrefixAudit(0, 0, {})


@RUNNERS
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_the_next_turn_reuses_what_was_generated(mix: str, runner_class: type[PagedFake]) -> None:
    config = fake_config(MIXES[mix], max_context_tokens=256, max_plan_tokens=24)
    with Engine(runner_class(config), prefix_cache=True) as engine:
        history = tokens(21)
        for turn in range(4):
            request = serve(engine, history, 27)
            step = resume_step(engine)
            previous = len(history) - 5 if turn else 0
            assert audit(request).hit_tokens == max(previous - 1, 0) // step * step
            history = [*request.all_ids().tolist(), 7, 8, 9, 10, 11]


def test_without_the_cache_nothing_is_kept() -> None:
    with Engine(PagedFake(fake_config(MIXES["all"]))) as engine:
        for _ in range(2):
            request = serve(engine, tokens(40))
            assert request.prefix_audit is None and request.prefix_hit_tokens == 0
            assert engine.scheduler.replicas[0].cache.pool.cached == 0


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_salts_keep_tenants_apart(mix: str) -> None:
    with Engine(PagedFake(fake_config(MIXES[mix])), prefix_cache=True) as engine:
        hits = [audit(serve(engine, tokens(50), cache_salt=salt)) for salt in ("a", "b", "a", "")]
        step = resume_step(engine)
        assert [found.hit_tokens for found in hits] == [0, 0, 49 // step * step, 0]
        assert [found.ceiling_tokens > 0 for found in hits] == [False, False, True, False], "nor does the ceiling tell"


def test_tenants_of_whom_nothing_is_cached_are_forgotten() -> None:
    with Engine(PagedFake(fake_config(MIXES["history"])), prefix_cache=True) as engine:
        for tenant in range(30):
            serve(engine, [1, 2], cache_salt=f"tenant {tenant}")
        assert not engine.scheduler.replicas[0].cache.prefixes.trie._roots
        serve(engine, tokens(9), cache_salt="stays")
        assert len(engine.scheduler.replicas[0].cache.prefixes.trie._roots) == 1


def test_a_prefix_in_use_is_a_candidate_again_when_its_reader_ends() -> None:
    """Passed over while it was read; afterwards it goes in its turn, before what is newer."""
    with Engine(PagedFake(fake_config(MIXES["history"])), prefix_cache=True) as engine:
        serve(engine, tokens(9))
        reader = engine.submit(tokens(9), sampling_params=SamplingParams(max_output_tokens=2))
        engine.step()
        serve_later = [tokens(9, first) for first in (50, 60, 70)]
        trie, node = engine.scheduler.replicas[0].cache.prefixes.trie, path_of(engine, tokens(9))[-1]
        tick = node.tick
        while trie.evict_one():
            pass
        assert node.alive, "in use"
        while engine.has_work():
            engine.step()
        for prompt in serve_later:
            serve(engine, prompt)
        assert reader.is_finished and node.tick == tick
        assert trie.evict_one() and not node.alive


@RUNNERS
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_two_that_compute_the_same_prefix_at_once_end_up_sharing(mix: str, runner_class: type[PagedFake]) -> None:
    config = fake_config(MIXES[mix], max_context_tokens=256)
    with Engine(runner_class(config), prefix_cache=True) as engine:
        params = SamplingParams(max_output_tokens=40, temperature=0)
        twins = [engine.submit(tokens(33), sampling_params=params) for _ in range(3)]
        while not all(len(request.output_ids) >= 30 for request in twins):
            engine.step()
            engine.scheduler.check_integrity()
        cache = engine.scheduler.replicas[0].cache
        # Prompts are shared at once; what is generated at checkpoints, with Windows at every boundary, else at the end.
        generated = 56 if cache.prefixes._windows else 48 if cache.state_pages else 32
        for index in cache.prefixes._history:
            rows = [request.lease.rows[index].view().tolist() for request in twins if request.lease]
            shared = generated // cache.paged[index].span_tokens
            assert rows[0][:shared] == rows[1][:shared] == rows[2][:shared]
            assert len({row[-1] for row in rows}) == 3, "what is written is nobody else's"
        while engine.has_work():
            engine.step()
            engine.scheduler.check_integrity()
        for request in twins:
            assert request.take_result() == expected_tokens(config, tokens(33), 40)
        step = resume_step(engine)
        turn = [*tokens(33), *twins[0].output_ids[:-1]]
        assert audit(serve(engine, [*turn, 1])).hit_tokens == len(turn) // step * step, "at the end all of it"


# -- losses ---------------------------------------------------------------------------------------------------------


def path_of(engine: Engine, prompt: list[int]) -> list[PrefixNode]:
    cache = engine.scheduler.replicas[0].cache
    raw = np.asarray(prompt, KEY_DTYPE).tobytes()
    return cache.prefixes.trie.walk(
        "", raw, KEY_BYTES * cache.prefixes.align_tokens, len(prompt) // cache.prefixes.align_tokens
    )


def test_lost_by_eviction() -> None:
    with Engine(PagedFake(fake_config(MIXES["history"])), prefix_cache=True) as engine:
        serve(engine, tokens(40))
        for _ in range(4):
            engine.scheduler.replicas[0].cache.prefixes.trie.evict_one()
        assert audit(serve(engine, tokens(40))) == PrefixAudit(24, 36, {"evicted": 12})
        while engine.scheduler.replicas[0].cache.prefixes.trie.evict_one():
            pass
        assert audit(serve(engine, tokens(40))) == PrefixAudit(0, 36, {"evicted": 36})


def test_lost_because_no_checkpoint_lies_there() -> None:
    with Engine(PagedFake(fake_config(MIXES["history+state"])), prefix_cache=True) as engine:
        serve(engine, tokens(46))
        assert audit(serve(engine, tokens(46))) == PrefixAudit(32, 44, {"unaligned": 12})


def test_lost_with_a_checkpoint() -> None:
    with Engine(PagedFake(fake_config(MIXES["history+state"])), prefix_cache=True) as engine:
        serve(engine, tokens(46))
        engine.scheduler.replicas[0].cache.prefixes.trie._drop_resume(path_of(engine, tokens(46))[32 // 4 - 1])
        lost = {"unaligned": 12 + 12, "no checkpoint": 4}
        assert audit(serve(engine, tokens(46))) == PrefixAudit(16, 44, lost)
        assert audit(serve(engine, tokens(46))).hit_tokens == 32, "computed again, kept again"


def test_lost_with_a_window() -> None:
    with Engine(PagedFake(fake_config((history_group(), window_group(6)))), prefix_cache=True) as engine:
        serve(engine, tokens(46))
        nodes = path_of(engine, tokens(46))
        for node in nodes[-2:]:
            engine.scheduler.replicas[0].cache.prefixes.trie._drop_resume(node)
        assert audit(serve(engine, tokens(46))) == PrefixAudit(36, 44, {"window gone": 8})
        assert audit(serve(engine, tokens(46))).hit_tokens == 44


def test_lost_between_the_alignments_of_unequal_groups() -> None:
    """Pages of 4 and 8 tokens: the ceiling counts pages of 4, a hit ends on 8."""
    groups = (history_group(rows=4), history_group(1, "thin", rows=2))
    config = fake_config(groups)
    assert [fill.span_tokens for fill in config.geometry.groups] == [4, 8]
    with Engine(PagedFake(config), prefix_cache=True) as engine:
        serve(engine, tokens(64))
        assert audit(serve(engine, tokens(39))) == PrefixAudit(32, 36, {"unaligned": 4})


def test_bypassed_by_prompt_logprobs() -> None:
    class Scored(PagedFake):
        def _execute(self, plan: BatchPlan) -> ForwardOutput:
            return replace(super()._execute(plan), prompt_logprobs=np.zeros(plan.num_tokens, np.float32))

    with Engine(Scored(fake_config(MIXES["all"])), prefix_cache=True) as engine:
        serve(engine, tokens(46))
        found = audit(serve(engine, tokens(46), prompt_logprobs=0))
        assert found.hit_tokens == 0 and found.losses.keys() <= {"bypassed", "unaligned"}
        assert found.losses["bypassed"] == found.ceiling_tokens - found.losses.get("unaligned", 0) > 0
        assert audit(serve(engine, tokens(46))).hit_tokens == 32


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_the_audit_adds_up_under_pressure(mix: str) -> None:
    """Small pools, shared prefixes, everything evicted at some time: hits and losses always make the ceiling."""
    draw = random.Random(4)
    config = fake_config(MIXES[mix], max_context_tokens=128, max_plan_tokens=24, max_sequences=3)
    sizing = Engine(PagedFake(config), prefix_cache=True).scheduler.replicas[0].cache.pages_needed(128, 1)
    with Engine(OverlapFake(config), prefix_cache=True, cache_pages=1 + sizing + 12) as engine:
        sent = []
        reasons: set[str] = set()
        for _ in range(60):
            shared = tokens(draw.randrange(80), draw.randrange(2))
            prompt = [*shared, *(draw.randrange(VOCAB) for _ in range(draw.randrange(1, 5)))]
            params = SamplingParams(max_output_tokens=draw.randrange(1, 20), temperature=0)
            sent.append(engine.submit(prompt, sampling_params=params))
            for _ in range(draw.randrange(12)):
                engine.step()
                engine.scheduler.check_integrity()
        while engine.has_work():
            engine.step()
        for request in sent:
            reasons |= audit(request).losses.keys()
            want = expected_tokens(config, request.prompt_ids.tolist(), request.max_outputs)
            assert request.take_result() == want
        assert "evicted" in reasons and engine.scheduler.replicas[0].cache.evictions > 0


@pytest.mark.parametrize("mix", ["history", "window", "state", "all"])
def test_what_was_hit_last_stays_longest(mix: str) -> None:
    with Engine(PagedFake(fake_config(MIXES[mix])), prefix_cache=True) as engine:
        old, new = tokens(33), tokens(33, 100)
        for prompt in (old, new, old):
            serve(engine, prompt)
        trie = engine.scheduler.replicas[0].cache.prefixes.trie
        last = {"old": path_of(engine, old)[-1], "new": path_of(engine, new)[-1]}
        assert last["old"].tick > last["new"].tick
        while last["new"].alive:
            assert last["old"].alive, "the one that was used since went first"
            assert trie.evict_one()


# -- whose pages ----------------------------------------------------------------------------------------------------


class Watched(OverlapFake):
    """Notes which arena pages a plan changed."""

    engine: Engine

    def _execute(self, plan: BatchPlan) -> ForwardOutput:
        before = self.arena.copy()
        shared = sorted(
            {page for node in self.engine.scheduler.replicas[0].cache.prefixes.trie.nodes() for page in node.pages()}
        )
        output = super()._execute(plan)
        changed = (self.arena != before).any(axis=(1, 2))
        assert not changed[shared].any(), "a shared page was written"
        pool = self.engine.scheduler.replicas[0].cache.pool
        assert all(pool._readers[page] == 1 for page in np.flatnonzero(changed) if page)
        return output


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_no_shared_page_is_ever_written(mix: str, overlap: bool) -> None:
    draw = random.Random(9)
    config = fake_config(MIXES[mix], max_context_tokens=96, max_plan_tokens=24)
    runner = Watched(config)
    with Engine(runner, prefix_cache=True, overlap=overlap) as engine:
        runner.engine = engine
        for _ in range(25):
            prompt = tokens(draw.randrange(1, 50), draw.randrange(2))
            engine.submit(prompt, sampling_params=SamplingParams(max_output_tokens=draw.randrange(1, 30)))
            for _ in range(draw.randrange(10)):
                engine.step()
        while engine.has_work():
            engine.step()


@RUNNERS
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["cold", "cache"])
def test_states_move_to_new_pages_at_checkpoints_alone(prefix_cache: bool, runner_class: type[PagedFake]) -> None:
    config = fake_config((history_group(), state_group(16, rows=20)), max_plan_tokens=24, max_context_tokens=128)
    runner = runner_class(config)
    with Engine(runner, prefix_cache=prefix_cache) as engine:
        serve(engine, tokens(40), 30)
        serve(engine, tokens(40), 30)
    moved, kept = [], []
    for plan in runner.plans:
        state = plan.groups[1]
        assert state.input_pages is not None and state.output_pages is not None
        start = int(plan.positions[0])
        if start:
            (kept if (state.input_pages[0] == state.output_pages[0]).all() else moved).append(start)
    assert all(start % 16 == 0 for start in moved) and len(moved) == (2 * 4 - 1 if prefix_cache else 0)
    assert not any(start % 16 == 0 for start in kept) or not prefix_cache


def plans_of(mix: str, runner: PagedFake, prefix_cache: bool) -> Iterator[tuple[CacheManager, list[Request]]]:
    with Engine(runner, prefix_cache=prefix_cache) as engine:
        draw = random.Random(1)
        for _ in range(8):
            prompt = tokens(draw.randrange(1, 60), draw.randrange(3))
            engine.submit(prompt, sampling_params=SamplingParams(max_output_tokens=draw.randrange(1, 40)))
        while engine.has_work():
            engine.step()
            yield engine.scheduler.replicas[0].cache, list(engine.scheduler.running())


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["cold", "cache"])
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_no_request_leases_more_than_was_foreseen(mix: str, prefix_cache: bool) -> None:
    config = fake_config(MIXES[mix], max_context_tokens=128, max_plan_tokens=24)
    most: dict[int, int] = {}
    for cache, running in plans_of(mix, PagedFake(config), prefix_cache):
        for request in running:
            if request.lease is None:
                continue
            most[request.id] = max(most.get(request.id, 0), len(request.lease.pages()))
            total = len(request.prompt_ids) + request.max_outputs
            assert most[request.id] <= cache.pages_needed(total, 24)
            foreseen = cache.row_pages_needed(total, 24)
            assert all(len(row) <= most_row for row, most_row in zip(request.lease.rows, foreseen, strict=True))
    assert most


# -- the manager alone ----------------------------------------------------------------------------------------------


def manager(
    num_pages: int,
    *,
    prefix_cache: bool = True,
    groups: tuple[CacheGroup, ...] = (history_group(), window_group(6), state_group(16)),
) -> CacheManager:
    config = fake_config(groups)
    return CacheManager(config.groups, config.geometry, num_pages, prefix_cache=prefix_cache)


def new_request(prompt: list[int]) -> Request:
    array = np.asarray(prompt, np.int32)
    return Request(0, array, SamplingParams(), seed=0, max_outputs=10)


def test_an_extension_takes_all_it_needs_or_nothing() -> None:
    cache = manager(1 + 9)
    request = new_request(tokens(30))
    lease = request.lease = cache.prefixes.lease(request)
    reservation = Reservation()
    assert not cache.try_extend(lease, 0, 0, 20, reservation), "5 + 5 + 1 pages of 9"
    assert cache.pool.free == 9 and not lease.pages() and not reservation.taken
    assert cache.try_extend(lease, 0, 0, 16, reservation)
    assert cache.pool.free == 0 and len(lease.pages()) == 9 and sorted(reservation.taken) == sorted(lease.pages())


def test_a_rollback_gives_back_what_was_taken_and_nothing_else() -> None:
    cache = manager(1 + 40)
    request = new_request(tokens(60))
    lease = request.lease = cache.prefixes.lease(request)
    cache.try_extend(lease, 0, 0, 16, Reservation())
    cache.commit(request, 16, 16)
    before = sorted(lease.pages()), [row.end for row in lease.rows], [ring.current for ring in lease.states]
    reservation = Reservation()
    assert cache.try_extend(lease, 16, 16, 32, reservation)
    assert lease.states[0].held and lease.states[0].current != before[2][0], "the checkpoint moved aside"
    cache.rollback(reservation)
    dropped = lease.rows[1].first  # Window pages behind the window stay gone
    assert [row.end for row in lease.rows] == before[1] and [ring.current for ring in lease.states] == before[2]
    assert not lease.states[0].held and len(lease.pages()) == len(before[0]) - dropped
    cache.check_integrity([(lease, 16)])
    cache.release(request)
    assert cache.pool.leased == 0 and request.lease is None
    cache.release(request)


def test_live_work_evicts_what_is_cached() -> None:
    cache = manager(1 + 12)
    first = new_request(tokens(16))
    first.lease = cache.prefixes.lease(first)
    assert cache.try_extend(first.lease, 0, 0, 16, Reservation())
    cache.commit(first, 16, 16)
    cache.release(first)
    assert cache.pool.cached > 0 and cache.available == 12
    second = new_request(tokens(20, 100))
    second.lease = cache.prefixes.lease(second)
    assert cache.try_extend(second.lease, 0, 0, 20, Reservation())
    assert cache.evictions > 0 and len(second.lease.pages()) == 11
    cache.check_integrity([(second.lease, 20)])


@pytest.mark.parametrize(
    ("span", "window", "next_position", "first"),
    [
        (4, 0, 100, 0),
        (4, 1, 7, 1),
        (4, 1, 8, 2),
        (4, 9, 8, 0),
        (4, 9, 11, 0),
        (4, 9, 12, 1),
        (4, 9, 15, 1),
        (4, 9, 16, 2),
    ],
)
def test_first_page_that_a_query_sees(span: int, window: int, next_position: int, first: int) -> None:
    """The query at 11 sees 3..11 through a window of 9, the one at 12 sees 4..12."""
    assert PagedGroup("g", span, window).first_needed(next_position) == first


def test_positions_with_something_to_commit() -> None:
    cache = manager(10)
    assert (cache.prefixes.align_tokens, cache.checkpoint_tokens) == (4, 16)
    due = cache.prefixes.due(np.arange(1, 34), 1)
    assert [position + 1 for position in due] == [1, 16, 17, 32, 33], "nobody can resume between checkpoints"
    windows = manager(10, groups=(history_group(), window_group(6)))
    due = windows.prefixes.due(np.arange(1, 34), 1)
    assert [position + 1 for position in due] == [4, 8, 12, 16, 20, 24, 28, 32]
    assert [position for position in range(40) if cache.is_sealed(position)] == [16, 32]
    assert not any(manager(10, prefix_cache=False).is_sealed(position) for position in range(40))


def test_rows_and_pages_foreseen() -> None:
    cache = manager(10)
    # History: ceil(tokens / 4). Window of 6 and chunks of 8: 13 tokens, pages cut at both ends, one not yet let go.
    assert cache.row_pages_needed(40, 8) == [10, (6 + 8 - 2) // 4 + 3]
    assert cache.row_pages_needed(4, 8) == [1, 1], "never more than the whole sequence"
    assert cache.pages_needed(40, 8) == 10 + 6 + 2
    assert manager(10, prefix_cache=False).pages_needed(40, 8) == 10 + 6 + 1


@pytest.mark.parametrize(
    "groups", [(window_group(1),), (window_group(1), state_group(64)), (window_group(3), state_group(64))], ids=str
)
def test_nodes_that_lead_to_no_page_go_with_their_request(groups: tuple[CacheGroup, ...]) -> None:
    """Where no group keeps anything at a boundary, prompts without end must not leave nodes without end."""
    with Engine(PagedFake(fake_config(groups)), prefix_cache=True) as engine:
        prefixes = engine.scheduler.replicas[0].cache.prefixes
        for first in range(40):
            serve(engine, tokens(30, first))
        assert prefixes.trie.num_nodes <= 8 * engine.scheduler.replicas[0].cache.pool.cached
        while prefixes.trie.evict_one():
            pass
        assert prefixes.trie.num_nodes == 0 and engine.scheduler.replicas[0].cache.pool.cached == 0


class Roomy(PagedFake):
    """A runner with more memory than its slots fill."""

    def free_pages(self) -> int:
        return 2000


def test_prompts_that_all_slots_together_could_not_hold_are_hit_again() -> None:
    config = fake_config((history_group(),), max_sequences=1, max_context_tokens=64)
    with Engine(Roomy(config), prefix_cache=True) as engine:
        prompts = [tokens(50, first) for first in range(30)]
        for prompt in prompts:
            serve(engine, prompt)
        assert all(audit(serve(engine, prompt)).hit_tokens == 48 for prompt in prompts)
    with Engine(Roomy(config)) as engine:
        assert engine.arena.num_pages < 30, "nothing else could use more"
