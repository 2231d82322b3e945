"""Rows from which nothing can be chosen: they say so, never give a token outside their mask, and harm no other row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resin import ArenaSpec, Engine, FinishReason, Request, RowFault, SamplingParams
from resin.models.testing import TINY_CONFIGS, MemoryCheckpoint, random_checkpoint
from resin.pallas_kernels.draw import MOST, sample_tokens_ref
from resin.pallas_kernels.sampling import sample_tokens
from resin.pallas_kernels.table import Backend, pick_kernels
from resin.plan import RunnerConfig
from resin.runtime import ModelRunner, build_runner
from resin.runtime.sampling import Sampled, draw_tokens, sample
from tests.full.pallas_kernels.test_sampling import build_draw, build_logits
from tests.plan_builder import PlannedSequence
from tests.runtime.test_sampling import LOGITS, ROWS, VOCAB, blocks_of, empty_columns, empty_slots, fill_row, load
from tests.runtime.tiny_runner import tiny_options

KERNELS = {
    name: pick_kernels("cpu", backend=backend)
    for name, backend in (("reference", Backend.REFERENCE), ("interpret", Backend.INTERPRET))
}
POLICIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1, "seed": 3},
    "cold": {"temperature": 1e-6, "seed": 3},
    "top_k": {"temperature": 0.7, "seed": 3, "top_k": 5},
    "wide top_k": {"temperature": 0.7, "seed": 3, "top_k": 180},
    "top_p": {"temperature": 0.7, "seed": 3, "top_p": 0.9},
    "min_p": {"temperature": 0.7, "seed": 3, "min_p": 0.1},
    "penalties": {"temperature": 1, "seed": 3, "repetition_penalty": 1e-20, "presence_penalty": 1},
}
STOP, OTHER = 17, 40
NONE: tuple[int, ...] = ()


def rows_of(policy: dict[str, Any]) -> list[tuple[SamplingParams, Sequence[int] | None, set[int]]]:
    """(policy, mask, what may come out) of each row of a batch; only the stop tokens end anything."""

    def params(**changes: Any) -> SamplingParams:
        return SamplingParams(**(policy | {"stop_token_ids": (STOP,)} | changes))

    return [
        (params(min_output_tokens=9), (STOP,), {STOP}),
        (params(min_output_tokens=9), (STOP, OTHER), {OTHER}),
        (params(logit_bias={OTHER: -float("inf")}), (OTHER,), {RowFault.NO_TOKEN}),
        (params(logit_bias={OTHER: -float("inf")}, min_output_tokens=9), (OTHER, STOP), {STOP}),
        (params(logit_bias={OTHER: -3e38}), (OTHER,), {OTHER}),
        (params(), NONE, {RowFault.NO_TOKEN}),
    ]


def draw_rows(
    kernels: str, logits: np.ndarray, rows: Sequence[tuple[SamplingParams, Sequence[int] | None]]
) -> tuple[list[int], list[int]]:
    """Tokens of a decode plan of (policy, mask) rows, and those of the plain program."""
    count = len(rows)
    columns = empty_columns(count)
    slots = empty_slots(RunnerConfig(vocab_size=VOCAB, max_sequences=count))
    for row, (params, allowed) in enumerate(rows):
        sequence = PlannedSequence(row, [1, 2, 3, 4], 3, params)
        fill_row(columns, row, sequence, is_masked=allowed is not None)
        if params.needs_slot_load:
            slots = load(slots, sequence)
    masks = [np.isin(np.arange(VOCAB), list(allowed)) for _, allowed in rows if allowed is not None]
    sampled = SAMPLERS[kernels](jnp.asarray(logits), columns, slots, blocks_of(masks, count))
    return np.asarray(sampled.tokens)[:, 0].tolist(), np.asarray(PLAIN(jnp.asarray(logits), columns)).tolist()


SAMPLERS: dict[str, Callable[..., Sampled]] = {
    name: jax.jit(lambda logits, *args, kernels=kernels: sample(logits, *args, kernels, (len(logits),)))
    for name, kernels in KERNELS.items()
}
PLAIN = jax.jit(lambda logits, columns: draw_tokens(logits, columns, KERNELS["interpret"]))


@pytest.mark.parametrize("kernels", sorted(KERNELS))
def test_masks_biases_and_minimum_together(kernels: str) -> None:
    rows = [row for policy in POLICIES.values() for row in rows_of(policy)]
    logits = np.tile(LOGITS, (len(POLICIES), 1))
    tokens, _ = draw_rows(kernels, logits, [(params, allowed) for params, allowed, _ in rows])
    for token, (params, allowed, expected) in zip(tokens, rows, strict=True):
        assert token in expected, (params, allowed)


@pytest.mark.parametrize("kernels", sorted(KERNELS))
def test_logits_that_are_no_numbers(kernels: str) -> None:
    rows = [(SamplingParams(**policy), None) for policy in POLICIES.values() for _ in range(ROWS)]
    logits = np.tile(LOGITS, (len(POLICIES), 1))
    clean, _ = draw_rows(kernels, logits, rows)
    bad = logits.copy()
    bad[0::ROWS, 200], bad[2::ROWS, 0], bad[3::ROWS], bad[4::ROWS, ::2] = np.nan, np.inf, np.nan, -np.inf
    tokens, plain = draw_rows(kernels, bad, rows)
    for first, name in zip(range(0, len(rows), ROWS), POLICIES, strict=True):
        mine = tokens[first : first + ROWS]
        assert {mine[0], mine[2], mine[3]} == {RowFault.NOT_FINITE}, name
        assert mine[4] % 2 == 1, "minus infinity alone is no fault"
        assert [mine[1], mine[5]] == [clean[first + 1], clean[first + 5]], "the neighbours go on"
        if name != "penalties":
            assert plain[first : first + ROWS] == mine, "the plain program agrees"


@pytest.mark.parametrize("vocab", [300, pytest.param(20_011, marks=pytest.mark.slow)])
def test_kernels_agree_about_rows_without_a_token(vocab: int) -> None:
    logits, draw = build_logits(16, vocab, ties=False), build_draw(16, vocab)
    logits[8:, vocab - 1] = np.nan
    logits[0:8:2] = -np.inf
    logits[1] = MOST
    logits[3, 5:] = -MOST
    draw = draw._replace(temperature=np.where(draw.temperature > 0, 1e-3, 0).astype(np.float32))
    got = sample_tokens(jnp.asarray(logits), draw, interpret=True)
    want = np.asarray(sample_tokens_ref(jnp.asarray(logits), draw))
    np.testing.assert_array_equal(got, want)
    assert (want[8:] == RowFault.NOT_FINITE).all() and (want[0:8:2] == RowFault.NO_TOKEN).all()
    assert (want[1:8:2] >= 0).all()


# -- whole requests -------------------------------------------------------------------------------------------------

POISON = 200  # a token whose embedding is no number
ENGINES = [
    pytest.param({}, id="reference"),
    pytest.param(
        {"kernels": "interpret", "dtype": "bfloat16", "cache_dtype": "bfloat16"},
        id="interpret",
        marks=pytest.mark.slow,
    ),
]


@cache
def poisoned_runner(**options: Any) -> ModelRunner:
    checkpoint = random_checkpoint({**TINY_CONFIGS["llama"], "tie_word_embeddings": False}, seed=5)
    arrays = {name: np.array(array) for name, array in checkpoint.arrays.items()}
    arrays["model.embed_tokens.weight"][POISON] = np.nan
    one_each = {"decode_sequences": (4,), "prefill_tokens": (32,), "max_context_tokens": 64}
    runner = build_runner(MemoryCheckpoint(checkpoint.config, arrays), tiny_options(**one_each, **options))
    runner.bind(ArenaSpec(17, runner.config.geometry.page_bytes, runner.config.arena_dtype))
    return runner


def poisoned_engine(options: dict[str, Any], overlap: int) -> Engine:
    return Engine(poisoned_runner(**options).view(), overlap=overlap, cache_pages=17, prefix_cache=True)


def only(*ids: int) -> Callable[[Sequence[int]], np.ndarray]:
    return lambda output: np.isin(np.arange(256), ids)


def run(engine: Engine, prompts: Sequence[tuple[list[int], SamplingParams]]) -> list[Request]:
    sent = [engine.submit(prompt, sampling_params=params) for prompt, params in prompts]
    while engine.has_work():
        engine.step()
        engine.scheduler.check_integrity()
    return sent


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("options", ENGINES)
def test_a_request_without_a_token_ends_alone(options: dict[str, Any], overlap: int) -> None:
    """In prefill and in decode; later requests reuse its pages, slots and prefixes."""
    greedy = SamplingParams(max_output_tokens=6, temperature=0, logprobs=2)
    with poisoned_engine(options, overlap) as engine:
        good = [([9, 8, 7], greedy), ([5, 4] * 10, replace(greedy, temperature=0.8, top_p=0.9, seed=4))]
        want = [request.take_result() for request in run(engine, good)]
        forced = replace(greedy, allowed_tokens=only(POISON))  # its second token is computed from the poison
        closed = replace(greedy, allowed_tokens=only(POISON), logit_bias={POISON: -float("inf")})
        for prompt, params, outputs, why in (
            ([1, POISON, 3], greedy, [], "finite"),
            ([1, 2], forced, [POISON], "finite"),
            ([1, 2], closed, [], "no token"),
            ([1] * 20 + [POISON] * 20, replace(greedy, temperature=1, top_k=9), [], "finite"),
        ):
            bad, *others = run(engine, [(prompt, params), *good])
            assert bad.finish_reason is FinishReason.ERROR and bad.output_ids == outputs
            assert why in str(bad.error) and "Error" not in str(bad.error)
            assert [request.take_result() for request in others] == want
        assert [request.take_result() for request in run(engine, good)] == want


@pytest.mark.parametrize("options", ENGINES)
def test_the_grammar_wins_over_the_minimum(options: dict[str, Any]) -> None:
    with poisoned_engine(options, 1) as engine:
        base = SamplingParams(max_output_tokens=5, stop_token_ids=(7,), min_output_tokens=3)
        cases = []
        for policy in ("greedy", "sampled", "top_k", "top_p", "min_p"):
            changed = replace(base, **POLICIES[policy])
            cases += [
                (replace(changed, allowed_tokens=only(7)), [7]),
                (replace(changed, allowed_tokens=lambda output: only(*([7] if output else [30]))(output)), [30, 7]),
                (replace(changed, allowed_tokens=only(7, 30)), None),
            ]
        sent = run(engine, [([1, 2, 3], params) for params, _ in cases])
        for request, (_, expected) in zip(sent, cases, strict=True):
            result = request.take_result()
            assert result == expected if expected else result[:3] == [30] * 3 and set(result) <= {7, 30}
            assert request.finish_reason is FinishReason.STOP or not expected
