"""The equality of drafts: requests get the same tokens where steps check guesses, right ones and wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from resin import Engine, Request
from resin.conformance.generation import Job, Trace
from resin.conformance.kit import DRAFT_ROOM, ConformanceKit
from resin.plan import InvalidRequest
from resin.runtime.drafting import NO_DRAFT, PromptLookup

WRONG_EVERY = 5  # tokens: rows keep runs of every length, and lose every draft but the first


@dataclass(frozen=True, slots=True)
class Script(PromptLookup):
    """Guesses what known sequences go on with; every fifth guess is made wrong."""

    sequences: tuple[tuple[int, ...], ...] = ()

    def propose(self, memory: jax.Array, slots: jax.Array, lengths: jax.Array, count: int) -> jax.Array:
        context = memory.shape[1]
        rows = [np.pad(np.array(row, np.int32), (0, context + count - len(row))) for row in self.sequences]
        scripts, last = jnp.asarray(np.stack(rows)), lengths[:, None]
        places = jnp.arange(context, dtype=jnp.int32)[None, :]
        held = memory[slots]
        same = (held[:, None, :] == scripts[None, :, :context]) | (places >= last)[:, None, :]
        follows = same.all(axis=2)  # [B, scripts]
        at = last + jnp.arange(count, dtype=jnp.int32)[None, :]
        guesses = jnp.take_along_axis(scripts[jnp.argmax(follows, axis=1)], at, axis=1)
        guesses = jnp.where(at % WRONG_EVERY == 0, jnp.maximum(guesses - 1, 0), guesses)
        return jnp.where(follows.any(axis=1, keepdims=True), guesses, NO_DRAFT)


def drafted(kit: ConformanceKit) -> tuple[bool | None, str]:
    """Drafts of three tokens, some of them wrong, with two plans in flight, from a cold prefix cache and a warm one."""
    expected = kit.baseline
    script = Script(tuple(tuple(map(int, trace.request.all_ids())) for trace in expected))
    try:
        runner = kit.build_drafting_runner(script)
        with Engine(runner, overlap=2, prefix_cache=True, cache_pages=DRAFT_ROOM * kit.pages) as engine:
            runner.compile()
            jobs = [Job(job.prompt, replace(job.params, logprobs=None)) for job in kit.jobs]
            fault = _run(engine, jobs, expected, kit.tolerance) or _run(engine, jobs, expected, kit.tolerance)
            drafts = engine.scheduler.drafts
            tried, agreed = int(drafts.tried.sum()), int(drafts.agreed.sum())
    except InvalidRequest as error:
        if error.field == "draft_tokens":
            return None, str(error)
        raise
    if fault is None and not 0 < agreed < tried:
        fault = f"{agreed} of {tried} drafts held, expected some and not all"
    return fault is None, fault or f"tokens equal, {agreed} of {tried} drafts held"


def _run(engine: Engine, jobs: Sequence[Job], expected: Sequence[Trace], tolerance: float) -> str | None:
    """The first difference that matters."""
    requests: list[Request] = [engine.submit(job.prompt, sampling_params=job.params) for job in jobs]
    while engine.has_work():
        engine.step()
    for index, (request, trace) in enumerate(zip(requests, expected, strict=True)):
        got = request.take_result()
        if len(got) != len(trace.token_ids):
            return f"job {index}: {len(got)} tokens, expected {len(trace.token_ids)}"
        for place, (token, wanted) in enumerate(zip(got, trace.token_ids, strict=True)):
            if token != wanted:
                gap = float(trace.top[place][0] - trace.top[place][1])
                if request.params.temperature > 0 or gap > 2 * tolerance:
                    return f"job {index}, token {place}: {token}, expected {wanted} by {gap:.1e}"
                break  # a near tie: what follows is another text
    return None
