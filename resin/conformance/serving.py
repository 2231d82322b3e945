"""The path that a GPU serves with: bfloat16, and the bodies of the kernels, which a CPU interprets."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from resin import ArenaSpec, Engine
from resin.conformance.equalities import Found
from resin.conformance.generation import Job, Trace, generate
from resin.conformance.kit import ConformanceKit
from resin.conformance.plain import PlainForward
from resin.conformance.tolerance import SERVING_SPREADS
from resin.runtime import ModelRunner

OUTPUT_TOKENS = 5


def serving_kernels(kit: ConformanceKit) -> Found:
    """Logprobs of kernels stray from those of the same weights in float32 as far as a plain bfloat16 forward's do.

    The median over the tokens is compared: where two experts score alike, rounding picks either, and that token is off
    by much more in one way of the two.
    """
    runner = kit.build_serving_runner()
    groups, weights = runner.config.groups, runner.weights
    wide = tuple(leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf for leaf in weights)
    exact = PlainForward(kit.runner.model, wide, groups, kit.context)
    rounded = PlainForward(runner.model, weights, groups, kit.context)
    strayed: list[float] = []
    spread: list[float] = []
    for trace in _serve(kit, runner):
        ids, first = trace.request.all_ids(), len(trace.request.prompt_ids) - 1
        expected, plain = exact.score(ids), rounded.score(ids)
        count = np.stack(trace.top).shape[1]
        for row, (chosen, top) in enumerate(zip(trace.logprobs, trace.top, strict=True), start=first):
            wanted = np.append(expected.top[row, :count], expected.following[row])
            strayed.append(_rms(np.append(top, chosen) - wanted))
            spread.append(_rms(np.append(plain.top[row, :count], plain.following[row]) - wanted))
    found, allowed = float(np.median(strayed)), SERVING_SPREADS * float(np.median(spread))
    return found <= allowed, f"median difference {found:.1e} from float32, plain bfloat16 allows {allowed:.1e}"


def _serve(kit: ConformanceKit, runner: ModelRunner) -> list[Trace]:
    """A prompt within a page and one past a page or window, together, in chunks."""
    jobs = [Job(job.prompt, replace(job.params, max_output_tokens=OUTPUT_TOKENS)) for job in kit.jobs[1:3]]
    pages = runner.free_pages()
    runner.bind(ArenaSpec(pages, runner.config.geometry.page_bytes, runner.config.arena_dtype))
    with Engine(runner.view(), enable_metrics=False) as engine:
        return generate(engine, jobs)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
