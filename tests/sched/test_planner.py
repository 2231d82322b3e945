"""Every column of every plan, recomputed from the requests and their leases alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from resin import (
    BatchPlan,
    CacheGroup,
    Engine,
    Phase,
    Policy,
    Request,
    RowFlag,
    SamplingParams,
    StateGroup,
    WindowGroup,
)
from resin.plan import NOBODY
from resin.plan.layout import SEQUENCE_FLOATS, Header
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
    "none": (),
    "history": (history_group(),),
    "state first": (state_group(16, rows=20), history_group(), window_group(6)),
    "compressed": (history_group(4, rows=8), history_group(2, "pairs", rows=3), window_group(9)),
    "state": (state_group(16),),
}
POLICIES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "top_k": 5, "seed": 2**40 + 7, "logprobs": 3},
    {"top_p": 0.9, "min_p": 0.1, "presence_penalty": 1.5, "stop_token_ids": (VOCAB - 1,), "min_output_tokens": 3},
    {"repetition_penalty": 1.2, "frequency_penalty": -0.5, "logit_bias": {3: 2.5, 9: -1.0}, "logprobs": 0},
    {"temperature": 0, "prompt_logprobs": 4},
    {"allowed_tokens": lambda output: np.arange(VOCAB) % 2 == len(output) % 2, "top_k": 1},
    {"min_output_tokens": 2, "stop_token_ids": (5, 6)},
]


class Oracle:
    """Knows what each request has computed, and checks each plan just before it runs."""

    def __init__(self, engine: Engine, runner: PagedFake) -> None:
        self.engine, self.config = engine, runner.config
        self.requests: dict[int, Request] = {}
        self.computed: dict[int, int] = {}
        self.state_pages: dict[tuple[int, str], list[int]] = {}
        self.kept: list[tuple[BatchPlan, bytes]] = []
        runner.check = self.check

    def check(self, plan: BatchPlan) -> None:
        count, tokens = len(plan.request_ids), plan.num_tokens
        live = [(row, self.requests[number]) for row, number in enumerate(plan.request_ids) if number != NOBODY]
        requests = [request for _, request in live]
        assert plan.num_sequences == count and len(set(requests)) == len(requests) and live[-1][0] == count - 1
        assert len(requests) == count or (plan.phase is Phase.DECODE and self.config.buckets)
        assert plan.step == len(self.kept)
        top, every_flag = 0, 0
        place = 0
        for row, request in live:
            place += row - place if plan.phase is Phase.DECODE else 0
            start = self.computed.setdefault(request.id, request.prefix_hit_tokens)
            stop = start + int(plan.query_indptr[row + 1] - plan.query_indptr[row])
            assert plan.query_indptr[row] == place and stop > start
            part = slice(place, place + stop - start)
            place = part.stop
            assert plan.positions[part].tolist() == list(range(start, stop)) and plan.seq_lens[row] == stop
            assert plan.slots[row] == request.slot
            flags, top_row = self.flags(plan, request, start, stop)
            assert RowFlag(int(plan.row_flags[row])) == flags
            every_flag, top = every_flag | flags, max(top, top_row)
            if flags & RowFlag.FROM_SLOT:
                assert plan.token_ids[part].tolist() == [0]
            else:
                assert plan.token_ids[part].tolist() == request.all_ids()[start:stop].tolist()
            known = request.all_ids()
            assert plan.next_token[row] == (known[stop] if plan.phase is Phase.PREFILL and stop < len(known) else -1)
            self.check_sampling(plan, row, request)
            self.check_groups(plan, row, request, start, stop)
            self.computed[request.id] = stop
        assert place == tokens
        assert plan.header == Header(count, tokens, int(every_flag), top)
        self.check_padding(plan)
        self.check_extras(plan, live)
        self.kept.append((plan, plan.buffer.tobytes()))

    def flags(self, plan: BatchPlan, request: Request, start: int, stop: int) -> tuple[RowFlag, int]:
        params, prompt = request.params, len(request.prompt_ids)
        flags, top = RowFlag(0), 0
        if plan.phase is Phase.DECODE or stop == request.num_tokens:
            flags |= RowFlag.EMIT
            top = params.logprobs or 0
            if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
                flags |= RowFlag.PENALTIES
            flags |= RowFlag.BIAS if params.logit_bias else RowFlag(0)
            flags |= RowFlag.MASK if params.allowed_tokens else RowFlag(0)
            flags |= RowFlag.LOGPROBS if params.logprobs is not None else RowFlag(0)
            if stop - prompt < params.min_output_tokens:
                flags |= RowFlag.SUPPRESS_STOP
        if start >= request.num_tokens:
            flags |= RowFlag.FROM_SLOT
        if plan.phase is Phase.PREFILL:
            flags |= RowFlag.FRESH_STATE if start == 0 else RowFlag(0)
            if params.prompt_logprobs is not None and start < prompt - 1:
                flags |= RowFlag.PROMPT_LOGPROBS
                top = max(top, params.prompt_logprobs)
        return flags, top

    @staticmethod
    def check_sampling(plan: BatchPlan, row: int, request: Request) -> None:
        columns, params = plan.sampling, request.params
        assert columns["top_k"][row] == params.top_k
        seed = (int(columns["seed_high"][row]) & 0xFFFFFFFF) << 32 | int(columns["seed_low"][row]) & 0xFFFFFFFF
        assert seed == request.seed % 2**64 and (params.seed is None or seed == params.seed)
        for name in SEQUENCE_FLOATS:
            assert columns[name].dtype == np.float32 and columns[name][row] == np.float32(getattr(params, name))

    def check_groups(self, plan: BatchPlan, row: int, request: Request, start: int, stop: int) -> None:
        lease = request.lease
        assert lease is not None
        rows, rings = iter(lease.rows), iter(lease.states)
        for spec, fill, group in zip(self.config.groups, self.config.geometry.groups, plan.groups, strict=True):
            if isinstance(spec, StateGroup):
                assert group.input_pages is not None and group.output_pages is not None
                source, target = group.input_pages[row].tolist(), group.output_pages[row].tolist()
                assert target == next(rings).current and len(target) == fill.pages_per_state
                assert source == self.state_pages.get((request.id, spec.name), source)
                self.state_pages[request.id, spec.name] = target
                continue
            assert group.page_indptr is not None and group.page_ids is not None and group.first_position is not None
            appended = plan.append_places(spec.name)
            held, span, ratio = next(rows), fill.span_tokens, spec.tokens_per_entry
            window = spec.window_tokens if isinstance(spec, WindowGroup) else 0
            first = max(start - window + 1, 0) // span if window else 0
            pages = group.page_ids[group.page_indptr[row] : group.page_indptr[row + 1]].tolist()
            origin = int(group.first_position[row])
            if plan.phase is Phase.PREFILL:
                assert origin == max(held.first, first) * span
            else:  # page rows are written again when they grow
                assert origin % span == 0 and held.first * span <= origin <= first * span
            assert pages == [held.at(logical) for logical in range(origin // span, -(-stop // span))]
            for i, position in enumerate(range(start, stop), int(plan.query_indptr[row])):
                complete = (position + 1) % ratio == 0
                place = (held.at(position // span), position % span // ratio) if complete else (0, 0)
                assert (appended[0][i], appended[1][i]) == place

    def check_padding(self, plan: BatchPlan) -> None:
        count, tokens = plan.num_sequences, plan.num_tokens
        empty = [row for row, number in enumerate(plan.request_ids) if number == NOBODY]
        assert (plan.slots[empty] == self.config.max_sequences).all() and (plan.next_token[empty] == -1).all()
        for name in ("computed", "row_flags", "top_k", "seed_low", "seed_high", *SEQUENCE_FLOATS):
            assert not plan.column(name)[empty].any(), name
        assert len(plan.token_ids) == plan.bucket.tokens and len(plan.slots) == plan.bucket.sequences
        assert not plan.token_ids[tokens:].any() and not plan.positions[tokens:].any()
        assert (plan.query_indptr[count:] == tokens).all()
        assert (plan.slots[count:] == self.config.max_sequences).all() and (plan.next_token[count:] == -1).all()
        for name in ("computed", "row_flags", "top_k", "seed_low", "seed_high", *SEQUENCE_FLOATS):
            assert not plan.column(name)[count:].any(), name
        for spec, fill, group in zip(self.config.groups, self.config.geometry.groups, plan.groups, strict=True):
            if group.page_indptr is None or group.page_ids is None:
                for name in ("input_pages", "output_pages"):
                    assert not plan.column(f"{name}:{spec.name}")[count * fill.pages_per_state :].any()
                continue
            assert (group.page_indptr[count:] == group.page_indptr[count]).all()
            pages, offsets = plan.append_places(spec.name)
            assert not pages[tokens:].any() and not offsets[tokens:].any()
            assert not pages[empty].any() and not offsets[empty].any() and not plan.seq_lens[empty].any()
            live = group.page_ids[: group.page_indptr[count]]
            assert (live > 0).all(), "scratch is nobody's page"

    def check_extras(self, plan: BatchPlan, requests: list[tuple[int, Request]]) -> None:
        loads = {load.slot: load for load in plan.slot_loads}
        masked = False
        for row, request in requests:
            flags, params = plan.row_flags[row], request.params
            load = loads.pop(request.slot, None)
            wanted = params.has_penalties or params.logit_bias or params.min_output_tokens
            assert (load is not None) == bool(plan.phase is Phase.PREFILL and flags & RowFlag.EMIT and wanted)
            if load is not None:
                assert load.token_ids.tolist() == request.all_ids().tolist()
                assert load.prompt_tokens == len(request.prompt_ids)
                assert (load.count_row == self.config.count_rows) == (not params.has_penalties)
                assert dict(zip(load.bias_ids.tolist(), load.bias_values.tolist(), strict=True)) == params.logit_bias
                assert tuple(load.stop_ids.tolist()) == params.stop_token_ids
            masked |= bool(flags & RowFlag.MASK)
            if flags & RowFlag.MASK:
                assert plan.allowed_masks is not None and params.allowed_tokens is not None
                mask = plan.allowed_masks[plan.masked_rows.tolist().index(row)]
                bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
                assert np.array_equal(bits, params.allowed_tokens(request.output_ids))
        assert not loads, "loads of slots that are not in the plan"
        assert (plan.allowed_masks is not None) == masked
        if plan.allowed_masks is not None:
            assert plan.allowed_masks.shape == (len(plan.masked_rows), -(-VOCAB // 32))


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["cold", "cache"])
@pytest.mark.parametrize("runner_class", [PagedFake, OverlapFake], ids=["sync", "overlap"])
@pytest.mark.parametrize("mix", sorted(MIXES))
@pytest.mark.parametrize("buckets", [True, False], ids=["table", "exact"])
def test_every_column(mix: str, runner_class: type[PagedFake], prefix_cache: bool, buckets: bool) -> None:
    class Scored(runner_class):  # type: ignore[valid-type, misc]
        def _execute(self, plan: BatchPlan) -> Any:
            output = super()._execute(plan)
            width = plan.top_logprobs
            zeros = {"prompt_logprobs": np.zeros(plan.num_tokens, np.float32)}
            zeros |= {f"prompt_top_{name}": np.zeros((plan.num_tokens, width)) for name in ("ids", "logprobs")}
            return type(output)(output.token_ids, output.token_indptr, **zeros)

    draw = random.Random(len(mix))
    config = fake_config(MIXES[mix], max_sequences=5, max_plan_tokens=24, max_context_tokens=128, buckets=buckets)
    runner = Scored(config)
    with Engine(runner, prefix_cache=prefix_cache) as engine:
        oracle = Oracle(engine, runner)
        for number in range(24):
            prompt = [(draw.randrange(2) + 11 * i) % VOCAB for i in range(draw.randrange(1, 50))]
            policy = POLICIES[number % len(POLICIES)]
            params = SamplingParams(max_output_tokens=draw.randrange(3, 25), **policy)
            request = engine.submit(prompt, sampling_params=params)
            oracle.requests[request.id] = request
            for _ in range(draw.randrange(6)):
                engine.step()
        while engine.has_work():
            engine.step()
        assert not engine.scheduler.replicas[0].retractions
        phases = {plan.phase for plan, _ in oracle.kept}
        assert phases == {Phase.PREFILL, Phase.DECODE}
        for plan, bytes_then in oracle.kept:
            assert plan.buffer.tobytes() == bytes_then, "a later plan changed an older one"
            assert not plan.buffer.flags.writeable


def test_consecutive_plans_own_their_buffers() -> None:
    runner = OverlapFake(fake_config((history_group(),)))
    with Engine(runner) as engine:
        for i in range(4):
            engine.submit([i, 1, 2], sampling_params=SamplingParams(max_output_tokens=20))
        while engine.has_work():
            engine.step()
    buffers = [plan.buffer for plan in runner.plans]
    assert len(buffers) >= 20
    for i, buffer in enumerate(buffers):
        assert not any(np.shares_memory(buffer, other) for other in buffers[i + 1 : i + 4])


@pytest.mark.parametrize("page_tokens", [4, 16])
def test_plans_read_the_shared_pages_as_soon_as_twins_share_them(page_tokens: int) -> None:
    """A long prompt takes the pages that a twin gave back, while the twins decode without growing."""
    config = fake_config((history_group(),), max_plan_tokens=64, page_tokens=page_tokens)
    runner = OverlapFake(config)
    with Engine(runner, prefix_cache=True, policy=Policy(prefill_streak_tokens=1)) as engine:
        oracle = Oracle(engine, runner)
        prompt = list(range(page_tokens + 1))
        params = SamplingParams(max_output_tokens=30, temperature=0)
        sent = [engine.submit(prompt, sampling_params=params) for _ in range(2)]
        oracle.requests = {request.id: request for request in sent}
        engine.step()
        engine.step()
        late = engine.submit([99] * 200, sampling_params=params)
        oracle.requests[late.id] = late
        while engine.has_work():
            engine.step()
        for request in sent:
            assert request.take_result() == expected_tokens(config, prompt, 30)
