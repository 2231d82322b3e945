"""Is it right? Asked before anything is timed.

Short requests run through the engine in the buckets that are about to be timed, and every token is held against the
plain whole-sequence forward of the same weights, which knows no pages, plans or kernels of ours. Then the plan itself
must give finite numbers and, run twice, the same tokens; and the program that is timed, which reports no logprobs and
may attend by other kernels, must choose among the most likely of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np
from jax import lax

from bench.cases import PATIENT, Case, CaseRunner, random_prompts, with_flags
from resin import BatchPlan, Engine, Request, RowFlag, SamplingParams, StateGroup, TokenRow, TokensEvent
from resin.models.context import DenseContext
from resin.models.weights import AbstractModel
from resin.plan.sampling import MAX_TOP_LOGPROBS
from resin.runtime import ModelRunner

PROMPT_TOKENS = 160  # several pages and several blocks of every attention kernel
DISTINCT_PROMPTS = 4
OUTPUT_TOKENS = 3

# Difference of logprobs, in standard deviations of the logits: random weights can make logits of any scale. bfloat16
# keeps 8 bits: two orders of summation over a few dozen layers part by a few hundredths.
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.2}


class CheckFailed(RuntimeError):
    """A step that is wrong; its speed would mean nothing."""


@dataclass
class PlainForward:
    """Log probabilities by the model's forward over one whole sequence."""

    model: AbstractModel
    weights: tuple[jax.Array, ...]
    dtype: str
    fp8_scales: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._program = jax.jit(partial(_last_logprobs, self.model, self.fp8_scales))

    def logprobs(self, prompt: np.ndarray, outputs: Sequence[int]) -> np.ndarray:
        """float32 [outputs, V]: the distribution that each output token was drawn from."""
        ids = np.zeros(PROMPT_TOKENS + OUTPUT_TOKENS, np.int32)
        ids[: len(prompt)] = prompt
        ids[len(prompt) : len(prompt) + len(outputs)] = outputs
        with jax.default_matmul_precision("highest" if self.dtype == "float32" else "default"):
            return np.asarray(self._program(self.weights, ids, np.int32(len(prompt) - 1)))[: len(outputs)]


def _last_logprobs(
    abstract: AbstractModel,
    fp8_scales: Mapping[str, float],
    weights: Sequence[jax.Array],
    ids: jax.Array,
    first: jax.Array,
) -> jax.Array:
    model = abstract.merge(weights)
    context = DenseContext(ids, fp8_scales=fp8_scales)
    hidden = lax.dynamic_slice_in_dim(model(context), first, OUTPUT_TOKENS)
    return jax.nn.log_softmax(model.logits(context, hidden), axis=-1)


def check_tokens(case: Case, runner: ModelRunner, plain: PlainForward, num_pages: int) -> float:
    """Greedy requests in the case's buckets against the plain forward: the tokens, and the most likely ones' logprobs.

    Returns:
        The largest difference of logprobs (a chosen token's to the best one included), in standard deviations of the
        logits.

    Raises:
        CheckFailed: it exceeds the tolerance.
    """
    length = max(1, min(PROMPT_TOKENS, case.context_tokens - OUTPUT_TOKENS))
    kinds = min(case.sequences, DISTINCT_PROMPTS)
    lengths = [max(1, length * (kinds - kind) // kinds) for kind in range(kinds)]
    prompts = random_prompts(case, runner.config.vocab_size, lengths, seed=1)
    top = min(MAX_TOP_LOGPROBS, runner.config.vocab_size)
    params = SamplingParams(temperature=0, logprobs=top, max_output_tokens=OUTPUT_TOKENS, ignore_stop=True)
    reported: dict[Request, list[TokenRow]] = {}
    engine = Engine(
        CaseRunner(runner, case),
        context_length=case.max_context_tokens,
        cache_pages=num_pages,
        enable_metrics=False,
        policy=PATIENT,
    )
    with engine:
        for row in range(case.sequences):
            reported[engine.submit(prompts[row % kinds], sampling_params=params)] = []
        while engine.has_work():
            for event in engine.step():
                if isinstance(event, TokensEvent):
                    for tokens in event:
                        reported[tokens.request].append(tokens)
    expected: dict[tuple[int, ...], np.ndarray] = {}
    worst = 0.0
    for request, rows in reported.items():
        key = (request.id % kinds, *request.output_ids)
        if key not in expected:
            expected[key] = plain.logprobs(prompts[key[0]], request.output_ids)
        worst = max(worst, *(difference(*pair) for pair in zip(rows, expected[key], strict=True)))
    tolerance = TOLERANCE[plain.dtype]
    if not worst <= tolerance:  # also if it is no number
        raise CheckFailed(f"{case}: off by {worst:.4f} from the whole-sequence forward, {tolerance} allowed")
    return worst


def difference(row: TokenRow, expected: np.ndarray) -> float:
    """How far a reported token is from float32 [V] expected logprobs, in standard deviations of these; inf for NaN."""
    assert row.top_ids is not None and row.top_logprobs is not None
    apart = np.abs(row.top_logprobs[0] - expected[row.top_ids[0]])
    trailing = expected.max() - expected[row.token_ids[0]]
    worst = float(np.append(apart, trailing).max() / max(expected.std(), 1e-6))
    return worst if np.isfinite(worst) else math.inf


def check_repeatable(case: Case, runner: ModelRunner, plan: BatchPlan) -> None:
    """Runs a plan twice with logprobs, greedily and from fixed tokens and states, then as it is timed.

    Raises:
        CheckFailed: a logit is no finite number, or the tokens differ; those of the timed program may, by rounding, if
            they are among the most likely.
    """
    drop = RowFlag.FROM_SLOT | RowFlag.SAMPLE | RowFlag.TRUNCATE
    add = RowFlag(0)
    if any(isinstance(group, StateGroup) for group in runner.config.groups):
        # A state that is updated in place would differ the second time.
        add |= RowFlag.FRESH_STATE
    top = min(MAX_TOP_LOGPROBS, runner.config.vocab_size)
    fixed = with_flags(plan, runner.config, add=add | RowFlag.LOGPROBS, drop=drop, top_logprobs=top)
    first, second = runner.forward(fixed), runner.forward(fixed)
    timed = runner.forward(with_flags(plan, runner.config, add=add, drop=drop))
    assert first.logprobs is not None and first.top_ids is not None
    # The logprob of a row is its logit less the sum over all of them: one bad logit spoils it.
    if not np.isfinite(first.logprobs).all():
        raise CheckFailed(f"{case}: {np.isnan(first.logprobs).sum()} rows have logits that are no finite numbers")
    if not np.array_equal(first.token_ids, second.token_ids):
        raise CheckFailed(f"{case}: the same plan gave different tokens the second time")
    if not (first.top_ids == timed.token_ids[:, None]).any(axis=1).all():
        raise CheckFailed(f"{case}: the timed program chose a token that is not among the {top} most likely")
