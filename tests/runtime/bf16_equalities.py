"""The engine's equalities in bfloat16, on whatever device there is.

Within one bucket a request's tokens are the same alone or in company, in order or overlapped. Where another program or
another cut of the work may round differently (other buckets, chunks, cached prefixes, retraction), tokens are the same
up to the first place at which the two best logprobs lie within 0.1 nats of each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from resin import Engine, Policy, SamplingParams
from resin.conformance.generation import Job, Trace, generate
from resin.plan import ArenaSpec, BatchPlan, Bucket, Phase
from resin.runtime import ModelRunner
from resin.runtime.program_kind import ProgramKind, plan_kind
from resin.runtime.view import RunnerView
from resin.sched.cache import CacheManager

NEAR_TIE_NATS = 0.1
PAGES = 160


class KindRecorder(RunnerView):
    """Notes which program runs each plan."""

    def __init__(self, runner: ModelRunner, arena: ArenaSpec, **changes: Any) -> None:
        super().__init__(runner, arena, **changes)
        self._kinds = runner._programs.kinds
        self.seen: list[tuple[Phase, ProgramKind]] = []

    def dispatch(self, plan: BatchPlan) -> Any:
        self.seen.append((plan.phase, plan_kind(plan, self._kinds[plan.bucket])))
        return super().dispatch(plan)

    def prefills(self) -> list[ProgramKind]:
        """The programs of the prefill plans since the last call."""
        kinds = [kind for phase, kind in self.seen if phase is Phase.PREFILL]
        self.seen.clear()
        return kinds


class Bf16Equalities:
    """A warm runner and greedy jobs of several lengths; `page` is what prompts and chunks are measured in."""

    def __init__(self, runner: ModelRunner, *, outputs: int = 24, page: int = 16, seed: int = 0) -> None:
        self.runner, self.page, self._outputs = runner, page, outputs
        runner.bind(ArenaSpec(PAGES, runner.config.geometry.page_bytes, runner.config.arena_dtype))
        runner.warm_up()
        rng = np.random.default_rng(seed)
        # The last one shares its start with the one before.
        prompts = [rng.integers(3, runner.config.vocab_size, count).astype(np.int32) for count in (1, 13, 37, 3 * page)]
        prompts.append(np.concatenate([prompts[-1][: 2 * page], prompts[1]]))
        self._params = SamplingParams(max_output_tokens=outputs, temperature=0, logprobs=5, ignore_stop=True)
        self.jobs = [Job(prompt, self._params) for prompt in prompts]

    def run(
        self, *, alone: bool = False, overlap: bool = False, changes: Mapping[str, Any] | None = None, **options: Any
    ) -> list[Trace]:
        with self.engine(overlap=overlap, changes=changes, **options) as engine:
            return generate(engine, self.jobs, alone=alone)

    def engine(self, *, changes: Mapping[str, Any] | None = None, **options: Any) -> Engine:
        return Engine(self.runner.view(**(changes or {})), enable_metrics=False, **options)

    def pairs(self) -> list[tuple[Bucket, Bucket]]:
        """One prefill and one decode bucket each, the largest of both first."""
        prefill, decode = (
            [bucket for bucket in self.runner.config.buckets if bucket.phase is phase] for phase in Phase
        )
        return list(zip(prefill[::-1], decode[::-1], strict=False))

    def check_one_bucket(self) -> None:
        """Alone, together, overlapped, and a seeded sample."""
        for pair in self.pairs():
            fixed = {"buckets": pair}
            expected = self.run(alone=True, changes=fixed)
            for options in ({}, {"overlap": True}, {"prefix_cache": True}):
                for job, (one, other) in enumerate(zip(expected, self.run(changes=fixed, **options), strict=True)):
                    assert one.token_ids == other.token_ids, f"{pair}, {options}, job {job}"

    def check_seeds(self) -> None:
        """Sampled tokens do not depend on company."""
        jobs = self.jobs
        sampled = replace(self._params, temperature=0.8, top_p=0.9, top_k=50, seed=11)
        self.jobs = [Job(job.prompt, sampled) for job in jobs]
        try:
            fixed = {"buckets": self.pairs()[0]}
            alone, together = self.run(alone=True, changes=fixed), self.run(overlap=True, changes=fixed)
        finally:
            self.jobs = jobs
        assert [trace.token_ids for trace in alone] == [trace.token_ids for trace in together]
        assert len({tuple(trace.token_ids) for trace in alone}) == len(alone)

    def check_across_programs(self) -> int:
        """All buckets, chunks and cached prefixes: same tokens up to a near tie. Returns how many were the same."""
        expected = self.run(alone=True)
        compared = agreed_tokens(expected, self.run(overlap=True), "together")
        for pair in self.pairs():
            compared += agreed_tokens(expected, self.run(changes={"buckets": pair}), str(pair))
        compared += agreed_tokens(expected, self.run(policy=Policy(max_plan_tokens=7)), "chunks of 7")
        with self.engine(prefix_cache=True, overlap=True) as engine:
            generate(engine, self.jobs)
            again = generate(engine, self.jobs, alone=True)
        assert sum(trace.request.prefix_hit_tokens for trace in again) >= 2 * self.page
        compared += agreed_tokens(expected, again, "prefix hits")
        return compared

    def fresh_buckets(self) -> list[Bucket]:
        """Those with a program for prompts that read no pages."""
        return [bucket for bucket, kinds in self.runner._programs.kinds.items() if ProgramKind.FRESH in kinds]

    def check_fresh(self) -> int:
        """Prompts that read no pages against the same ones with logprobs, which do: same tokens up to a near tie.

        One fills its bucket, one leaves padding. Returns how many tokens were the same.
        """
        tokens = self.fresh_buckets()[-1].tokens
        rng = np.random.default_rng(1)
        prompts = [rng.integers(3, self.runner.config.vocab_size, count) for count in (tokens, tokens - tokens // 8)]
        jobs = [Job(prompt.astype(np.int32), self._params) for prompt in prompts]
        with self.engine() as engine:
            expected = generate(engine, jobs, alone=True)
        recorder, got = KindRecorder(self.runner, self.runner._bound_arena()), []
        with Engine(recorder, enable_metrics=False, overlap=True) as engine:
            for job in jobs:
                request = engine.submit(job.prompt, sampling_params=replace(job.params, logprobs=None))
                while engine.has_work():
                    engine.step()
                got.append(Trace(request, list(request.output_ids)))
        assert recorder.prefills() == [ProgramKind.FRESH] * len(jobs)
        return agreed_tokens(expected, got, "fresh prompts")

    def check_retraction(self) -> None:
        """Requests that outgrow the pool together and start over."""
        page = self.page
        params = replace(self._params, max_output_tokens=3 * page)
        jobs = [Job(self.jobs[2].prompt[: 3 + row], params) for row in range(4)]
        with self.engine(context_length=4 * page) as engine:
            expected = generate(engine, jobs, alone=True)
        config = self.runner.config
        sizing = CacheManager(config.groups, config.geometry, 0, prefix_cache=False)
        least = 1 + sizing.pages_needed(4 * page, config.max_plan_tokens)
        for extra in range(4):
            with self.engine(cache_pages=least + extra, context_length=4 * page, overlap=True) as engine:
                got = generate(engine, jobs)
                if engine.scheduler.replicas[0].retractions:
                    agreed_tokens(expected, got, "retraction")
                    return
        raise AssertionError("no arena size made the scheduler retract a request")


def agreed_tokens(expected: Sequence[Trace], got: Sequence[Trace], what: str) -> int:
    """Tokens that agree before the first near tie of each job; a difference anywhere else fails."""
    agreed = 0
    for job, (one, other) in enumerate(zip(expected, got, strict=True)):
        assert len(one.token_ids) == len(other.token_ids), f"{what}, job {job}"
        for place, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
            if a != b:
                gap = float(one.top[place][0] - one.top[place][1])
                assert gap <= NEAR_TIE_NATS, f"{what}, job {job}, token {place}: {b}, expected {a} by {gap:.3f} nats"
                break
            agreed += 1
    return agreed
