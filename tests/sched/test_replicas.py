"""Several replicas behind one scheduler: any order of operations, exact pages, the tokens of one replica."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resin import Bucket, CacheGroup, Engine, InvalidRequest, Phase, Policy
from resin.plan import RunnerConfig, StepTimes
from resin.sched.policy import Routing
from resin.sched.request import FinishReason
from tests.fakes import VOCAB, PagedFake, expected_tokens, fake_config, history_group, state_group, window_group
from tests.sched.replicas import Cluster

MIXES: dict[str, tuple[CacheGroup, ...]] = {
    "history": (history_group(),),
    "history+window": (history_group(), window_group(10)),
    "all three": (history_group(), window_group(6), state_group(16)),
}
CONTEXT_TOKENS = 96


def config_of(mix: str, **options: int) -> RunnerConfig:
    return fake_config(MIXES[mix], max_context_tokens=CONTEXT_TOKENS, **{"max_sequences": 3, **options})


def lone_pages(config: RunnerConfig, *, prefix_cache: bool) -> int:
    cache = Engine(PagedFake(config), prefix_cache=prefix_cache).scheduler.replicas[0].cache
    return 1 + cache.pages_needed(CONTEXT_TOKENS, 1)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(tokens)]


class ReplicasMachine(RuleBasedStateMachine):
    @initialize(
        mix=st.sampled_from(sorted(MIXES)),
        count=st.integers(2, 3),
        overlap=st.integers(0, 2),
        prefix_cache=st.booleans(),
        routing=st.sampled_from(Routing),
        spare_pages=st.integers(0, 30),
        drafts=st.sampled_from((0, 3)),
        seed=st.integers(0, 2**16),
    )
    def start(
        self,
        mix: str,
        count: int,
        overlap: int,
        prefix_cache: bool,
        routing: Routing,
        spare_pages: int,
        drafts: int,
        seed: int,
    ) -> None:
        self.random = random.Random(seed)
        self.config = config_of(mix, draft_tokens=drafts)
        pages = lone_pages(self.config, prefix_cache=prefix_cache) + spare_pages
        policy = Policy(routing=routing, prefill_streak_tokens=24)
        self.cluster = Cluster(
            self.config, count, pages=pages, prefix_cache=prefix_cache, overlap=overlap, policy=policy
        )
        for runner in self.cluster.runners:  # some guesses are wrong
            runner.guess = lambda truth: [token ^ (self.random.random() < 0.3) for token in truth]
        self.shared = prompt(60, seed)

    @rule(
        shared_tokens=st.integers(0, 50),
        own_tokens=st.integers(1, 12),
        outputs=st.integers(1, 20),
        priority=st.integers(0, 2),
        pin=st.one_of(st.none(), st.none(), st.integers(0, 2)),
        salt=st.sampled_from(("", "tenant")),
    )
    def submit(
        self, shared_tokens: int, own_tokens: int, outputs: int, priority: int, pin: int | None, salt: str
    ) -> None:
        own = [self.random.randrange(VOCAB) for _ in range(own_tokens)]
        replica = None if pin is None else pin % len(self.cluster.runners)
        self.cluster.submit(self.shared[:shared_tokens] + own, outputs, priority=priority, replica=replica, salt=salt)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.cluster.step()
            self.cluster.check()

    @precondition(lambda self: self.cluster.requests)
    @rule(index=st.integers(0, 100))
    def cancel(self, index: int) -> None:
        self.cluster.finish(self.cluster.requests[index % len(self.cluster.requests)], FinishReason.CANCELLED)

    @rule()
    def retract(self) -> None:
        for replica in self.cluster.scheduler.replicas:
            idle = [request for request in replica.running() if not replica.table.in_flight[request.slot]]
            if len(idle) > 1:
                replica.retract(self.random.choice(idle))

    @rule(index=st.integers(0, 2))
    def evict(self, index: int) -> None:
        replicas = self.cluster.scheduler.replicas
        replicas[index % len(replicas)].cache.prefixes.trie.evict_one()

    @rule()
    def refuse(self) -> None:
        """The runner refuses the step: every replica is as before."""
        computed = [replica.table.computed.tolist() for replica in self.cluster.scheduler.replicas]
        planned = self.cluster.plan()
        if planned is None:
            return
        self.cluster.scheduler.rollback(planned)
        requests = {request for part in planned.parts if part is not None for request in part.requests}
        for replica, before in zip(self.cluster.scheduler.replicas, computed, strict=True):
            for request in requests & set(replica.decode.requests):
                assert replica.table.computed[request.slot] == before[request.slot]

    @invariant()
    def all_adds_up(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.check()

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        self.cluster.run()
        for request in self.cluster.requests:
            want = expected_tokens(self.config, request.prompt_ids.tolist(), request.max_outputs)
            if request.finish_reason is FinishReason.CANCELLED:
                assert request.output_ids == want[: len(request.output_ids)]
            else:
                assert request.take_result() == want


TestReplicasMachine = ReplicasMachine.TestCase
TestReplicasMachine.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("routing", Routing)
def test_any_number_of_replicas_gives_the_tokens_of_one(routing: Routing) -> None:
    found = []
    for count in (1, 2, 3):
        cluster = Cluster(config_of("all three"), count, pages=80, policy=Policy(routing=routing))
        for number in range(9):
            cluster.submit(prompt(5 + 3 * number, number % 4), 6)
        cluster.run()
        found.append([request.take_result() for request in cluster.requests])
        assert {request.home for request in cluster.requests} == set(range(count))
    assert found[0] == found[1] == found[2]


def test_replicas_share_one_bucket_and_an_idle_one_has_an_empty_plan() -> None:
    cluster = Cluster(config_of("all three", max_plan_tokens=32), 3, pages=80)
    cluster.submit(prompt(30), 4, replica=0)  # the larger of two prefill buckets
    cluster.submit(prompt(5), 4, replica=1)  # fits the smaller
    cluster.run()
    for planned in cluster.planned:
        assert len({plan.bucket for plan in planned.plan.plans}) == 1
        idle = planned.plan.plans[2]
        assert planned.parts[2] is None and idle.num_sequences == idle.num_tokens == 0
        assert (idle.slots == cluster.config.max_sequences).all() and not idle.header.any_flags
    first = cluster.planned[0]
    assert first.plan.bucket.tokens == 32 and [part and part.bucket.tokens for part in first.parts] == [32, 8, None]
    assert {planned.plan.bucket.phase for planned in cluster.planned} == set(Phase)


def test_parts_that_no_bucket_holds_together_take_turns() -> None:
    """Many short rows and one long: each alone fits a bucket, both together none."""
    config = config_of("history", max_sequences=4)
    many, long = Bucket(Phase.DECODE, 4, 4, (12,)), Bucket(Phase.DECODE, 1, 1, (25,))
    table = (*config.of_phase(Phase.PREFILL), many, long)
    config = fake_config(MIXES["history"], max_context_tokens=CONTEXT_TOKENS, max_sequences=4, table=table)
    cluster = Cluster(config, 2, pages=80, prefix_cache=False)
    for number in range(4):
        cluster.submit(prompt(3, number), 6, replica=0)
    cluster.submit(prompt(70), 6, replica=1)
    cluster.run()
    for request in cluster.requests:
        assert request.take_result() == expected_tokens(config, request.prompt_ids.tolist(), 6)
    decodes = [planned for planned in cluster.planned if planned.plan.bucket.phase is Phase.DECODE]
    assert {planned.plan.bucket for planned in decodes} == {many, long}
    assert all(None in planned.parts for planned in decodes)


def test_prefill_is_cut_once_for_all_replicas() -> None:
    """Alone, the second replica's 9 tokens would fill the bucket of 8 and leave one for a step more."""
    config = config_of("history")
    rows = config.max_sequences, config.of_phase(Phase.PREFILL)[-1].row_pages
    sizes = [Bucket(Phase.PREFILL, rows[0], tokens, rows[1]) for tokens in (1, 8, 64)]
    table = (*sizes, *config.of_phase(Phase.DECODE))
    config = fake_config(MIXES["history"], max_context_tokens=CONTEXT_TOKENS, max_plan_tokens=64, table=table)

    def prefills(*prompts: int) -> list[list[int]]:
        cluster = Cluster(config, len(prompts), pages=200, prefix_cache=False)
        # A step of 8 and one of 1 together cost less than one of 64.
        cluster.scheduler.settle(1 << 30, StepTimes(((1, 1e-6), (8, 0.008), (64, 0.02)), 0.001, 0.0))
        for index, tokens in enumerate(prompts):
            cluster.submit(prompt(tokens, index), 2, replica=index)
        cluster.run()
        plans = [planned.plan.plans for planned in cluster.planned if planned.plan.bucket.phase is Phase.PREFILL]
        return [[plan.num_tokens for plan in step] for step in plans]

    assert prefills(9) == [[8], [1]]
    assert prefills(60, 9) == [[60, 9]] and prefills(9, 60) == [[9, 60]]
    assert prefills(9, 5) == [[8, 5], [1, 0]]


def test_limits_hold_for_each_replica() -> None:
    cluster = Cluster(config_of("history"), 2, pages=80)
    for number in range(8):
        cluster.submit(prompt(5, number), 20)
    cluster.step()
    assert [replica.num_running for replica in cluster.scheduler.replicas] == [3, 3]
    assert len(cluster.scheduler.queue) == 2
    cluster.run()


def test_a_replica_short_of_pages_holds_up_no_other() -> None:
    """The others decode on while one waits for its plans in flight to retract a request."""
    config = config_of("history")
    cluster = Cluster(config, 2, pages=lone_pages(config, prefix_cache=False) + 2, prefix_cache=False, overlap=2)
    for number in range(3):
        cluster.submit(prompt(30, number), 40, replica=0)
    free = cluster.submit(prompt(4), 80, replica=1)
    while not free.is_finished:
        cluster.step()
        cluster.check()
    assert cluster.scheduler.replicas[0].retractions and not cluster.scheduler.replicas[1].retractions
    decodes = [planned for planned in cluster.planned if planned.plan.bucket.phase is Phase.DECODE]
    served = sum(planned.parts[1] is not None for planned in decodes)
    assert served == 79, "it decodes in every step until its last token"
    cluster.run()


def test_the_least_loaded_replica_gets_the_next_request() -> None:
    cluster = Cluster(config_of("history"), 3, pages=80, prefix_cache=False)
    for _ in range(2):
        cluster.submit(prompt(4), 30, replica=1)
    cluster.submit(prompt(4), 30, replica=2)
    cluster.step()
    homes = []
    for number in range(3):
        homes.append(cluster.submit(prompt(5, number), 30))
        cluster.step()
    assert [request.home for request in homes] == [0, 0, 2] or [request.home for request in homes] == [0, 2, 0]
    cluster.run()


def test_round_robin_gives_each_replica_its_turn() -> None:
    cluster = Cluster(config_of("history"), 3, pages=80, policy=Policy(routing=Routing.ROUND_ROBIN))
    for number in range(6):
        cluster.submit(prompt(5, number), 30)
    cluster.step()
    assert [request.home for request in cluster.requests] == [0, 1, 2, 0, 1, 2]
    cluster.run()


def test_a_request_goes_where_its_prefix_is_cached_unless_much_more_runs_there() -> None:
    cluster = Cluster(config_of("history", max_sequences=8), 2, pages=300)
    first = cluster.submit(prompt(40), 2, replica=1)
    cluster.run()
    assert cluster.scheduler.replicas[1].cache.prefixes.peek(first) == 40
    second = cluster.submit(prompt(45), 2)
    cluster.run()
    assert second.home == 1 and second.prefix_hit_tokens == 40
    for number in range(2):
        cluster.submit(prompt(5, 10 + number), 40, replica=1)
    cluster.step()
    near = cluster.submit(prompt(45), 40)
    cluster.step()
    assert near.home == 1, "two more rows are not much of eight slots"
    far = cluster.submit(prompt(45), 40)
    cluster.step()
    assert far.home == 0, "three are"
    cluster.run()


def test_a_full_replica_holds_up_only_requests_bound_to_it() -> None:
    cluster = Cluster(config_of("history"), 2, pages=80)
    for number in range(3):
        cluster.submit(prompt(5, number), 30, replica=0)
    bound = cluster.submit(prompt(5, 8), 4, replica=0)
    other = cluster.submit(prompt(5, 9), 4)
    cluster.step()
    assert other.home == 1 and bound.slot == -1
    cluster.run()
    assert bound.home == 0


@pytest.mark.parametrize("replica", [-1, 2, 1.5, "0"])
def test_an_unknown_replica_is_refused(replica: object) -> None:
    cluster = Cluster(config_of("history"), 2, pages=80)
    with pytest.raises(InvalidRequest, match="0 to 1, or None"):
        cluster.submit(prompt(5), 4, replica=replica)  # type: ignore[arg-type]
    assert not len(cluster.scheduler.queue)


def test_an_engine_of_one_replica_knows_one() -> None:
    with Engine(PagedFake(config_of("history"))) as engine:
        with pytest.raises(InvalidRequest, match="replica"):
            engine.submit(prompt(5), replica=1)
        assert not engine.has_work()
        request = engine.submit(prompt(5), replica=0)
        while engine.has_work():
            engine.step()
        assert request.is_finished


def test_routing_is_one_of_the_ways() -> None:
    with pytest.raises(InvalidRequest, match="least loaded"):
        Policy(routing="random")  # type: ignore[arg-type]
