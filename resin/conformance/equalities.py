"""The equalities: a request's result is the same however the Engine gets there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from resin import Engine, Phase
from resin.conformance.generation import TOP, Comparison, Job, Trace, compare, difference_of, generate
from resin.conformance.kit import ConformanceKit

Found = tuple[bool | None, str]
NO_PREFIX = "no token needs an earlier one's cache"


def _found(comparison: Comparison, note: str = "") -> Found:
    return comparison.fault is None, f"{comparison}{note}"


def _run(kit: ConformanceKit, *, alone: bool = False, **options: Any) -> list[Trace]:
    with kit.engine(**options) as engine:
        return generate(engine, kit.jobs, alone=alone)


def plain_forward(kit: ConformanceKit) -> Found:
    """Logprobs of prompts and outputs equal those of one jitted forward over the whole sequence."""
    jobs = [Job(job.prompt, replace(job.params, prompt_logprobs=TOP)) for job in kit.jobs]
    with kit.engine() as engine:
        traces = generate(engine, jobs)
    largest = 0.0
    for trace in traces:
        prompt = len(trace.request.prompt_ids)
        scored = kit.plain.score(trace.request.all_ids())
        parts = [(np.asarray(trace.logprobs), scored.following[prompt - 1 :])]
        parts.append((np.stack(trace.top), scored.top[prompt - 1 :, :TOP]))
        if trace.request.prompt_logprobs is not None:
            held = trace.request.prompt_logprobs
            parts.append((held.logprobs, scored.following[: prompt - 1]))
            parts.append((held.top_logprobs, scored.top[: prompt - 1, :TOP]))
        largest = float(np.max([largest, *(difference_of(got, expected) for got, expected in parts)]))
    return largest <= kit.tolerance, f"largest logprob difference {largest:.1e}, allowed {kit.tolerance:.1e}"


def batched(kit: ConformanceKit) -> Found:
    """All at once instead of one after another."""
    return _found(kit.compare(_run(kit)))


def chunked(kit: ConformanceKit) -> Found:
    """Prompts in chunks of 7 tokens, which no page or checkpoint is a multiple of."""
    return _found(kit.compare(_run(kit, policy=kit.policy(7))))


def overlapped(kit: ConformanceKit) -> Found:
    """The next step planned while two are in flight."""
    return _found(kit.compare(_run(kit, overlap=2)))


def buckets(kit: ConformanceKit) -> Found:
    """Every prefill and every decode bucket, each as the only one of its phase."""
    config = kit.runner.config
    prefill, decode = config.of_phase(Phase.PREFILL), config.of_phase(Phase.DECODE)
    if len(config.buckets) == 2:
        return None, "one bucket a phase"
    rounds = max(len(prefill), len(decode))
    worst = Comparison(None, 0.0, 0)
    for index in range(rounds):
        pair = (prefill[index % len(prefill)], decode[-1 - index % len(decode)])
        comparison = kit.compare(_run(kit, changes={"buckets": pair}))
        if comparison.fault is not None:
            return False, f"{pair[0]} with {pair[1]}: {comparison.fault}"
        worst = max(worst, comparison, key=lambda found: found.largest)
    return _found(worst, f" over {len(prefill)} prefill and {len(decode)} decode buckets")


def prefix_cold(kit: ConformanceKit) -> Found:
    """With a prefix cache that has nothing yet: State checkpoints are kept and pages published."""
    return _found(kit.compare(_run(kit, prefix_cache=True, overlap=1)))


def prefix_hit(kit: ConformanceKit) -> Found:
    """The same prompts again, resumed from what the first run left; every hit and every loss is accounted for."""
    if not kit.keeps_prefixes:
        return None, NO_PREFIX
    with kit.engine(prefix_cache=True, overlap=1) as engine:
        generate(engine, kit.jobs)
        traces = generate(engine, kit.jobs, alone=True)
        fault = _audit_fault(kit, engine, traces)
    comparison = kit.compare(traces)
    hits = sum(trace.request.prefix_hit_tokens for trace in traces)
    total = sum(len(trace.request.prompt_ids) for trace in traces)
    passed = comparison.fault is None and fault is None
    return passed, fault or f"{comparison}, {hits} of {total} prompt tokens hit"


def _audit_fault(kit: ConformanceKit, engine: Engine, traces: list[Trace]) -> str | None:
    geometry = kit.runner.config.geometry
    step = max(geometry.align_tokens, geometry.checkpoint_tokens)
    for index, trace in enumerate(traces):
        audit, prompt = trace.request.prefix_audit, len(trace.request.prompt_ids)
        if audit is None:
            return f"job {index} has no audit"
        if audit.hit_tokens + sum(audit.losses.values()) != audit.ceiling_tokens:
            return f"job {index}: {audit} does not add up"
        expected = (prompt - 1) // step * step
        if audit.hit_tokens != expected:
            return f"job {index}: {audit.hit_tokens} tokens hit, expected {expected} ({audit})"
    return None


def conversation(kit: ConformanceKit) -> Found:
    """A second turn that starts with the first one's prompt and output equals the same prompt without a cache."""
    if not kit.keeps_prefixes:
        return None, NO_PREFIX
    first = kit.jobs[2]
    with kit.engine(prefix_cache=True) as engine:
        answer = generate(engine, [first])[0]
        prompt = np.concatenate([answer.request.all_ids(), first.prompt[:5]])
        second = generate(engine, [Job(prompt, first.params)])
    with kit.engine() as engine:
        cold = generate(engine, [Job(prompt, first.params)])
    comparison, hit = compare(cold, second, kit.tolerance), second[0].request.prefix_hit_tokens
    if not hit:
        return False, f"no prefix hit ({second[0].request.prefix_audit})"
    return _found(comparison, f", {hit} of {len(prompt)} prompt tokens hit")


def retracted(kit: ConformanceKit) -> Found:
    """Requests that lost their pages under memory pressure and started over."""
    if not kit.grows:
        return None, "no request outgrows the pages that it starts with"
    page = kit.settings.page_tokens
    # Short prompts and long outputs: all are admitted, and then they outgrow the pool.
    jobs = [Job(kit.jobs[1].prompt[: 3 + i], replace(kit.jobs[0].params, max_output_tokens=3 * page)) for i in range(4)]
    context = 4 * page
    with kit.engine(context_length=context) as engine:
        expected = generate(engine, jobs, alone=True)
        cache, chunk = engine.scheduler.replicas[0].cache, engine.scheduler.max_plan_tokens
        least = 1 + cache.pages_needed(context, chunk)
    for extra in range(4):
        with kit.engine(cache_pages=least + extra, context_length=context, overlap=1) as engine:
            traces = generate(engine, jobs)
            if engine.scheduler.replicas[0].retractions:
                found = compare(expected, traces, kit.tolerance)
                return _found(found, f", {engine.scheduler.replicas[0].retractions} retractions")
    return False, "no arena size made the scheduler retract a request"


def stale_pages(kit: ConformanceKit) -> Found:
    """Whatever earlier requests left in the arena is never read."""
    kit.runner.replace_arena(lambda arena: arena * np.nan)
    return _found(kit.compare(_run(kit)), ", arena filled with NaN before")


EQUALITIES: Mapping[str, Callable[[ConformanceKit], Found]] = {
    "plain forward": plain_forward,
    "batched": batched,
    "chunked": chunked,
    "overlapped": overlapped,
    "buckets": buckets,
    "prefix cold": prefix_cold,
    "prefix hit": prefix_hit,
    "conversation": conversation,
    "retracted": retracted,
    "stale pages": stale_pages,
}
