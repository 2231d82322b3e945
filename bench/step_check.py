"""Is it right? Asked before anything is timed.

Short requests run through the engine in the buckets that are about to be timed, and every token is held against the
plain whole-sequence forward of the same weights in float32, which knows no pages, plans or kernels of ours. How far it
may be off follows from the model: the same forward in the model's own dtype is off as well. Then the plan itself
must give finite numbers and, run twice, the same tokens; and the program that is timed, which reports no logprobs and
may attend by other kernels, must choose among the most likely of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.cases import PATIENT, Case, random_prompts, with_flags
from resin import BatchPlan, Engine, Request, RowFlag, SamplingParams, StateGroup, TokenRow, TokensEvent
from resin.models.forward import dense_pass
from resin.models.weights import AbstractModel
from resin.plan.sampling import MAX_TOP_LOGPROBS
from resin.runtime import ModelRunner

PROMPT_TOKENS = 160  # several pages and several blocks of every attention kernel
DISTINCT_PROMPTS = 4
OUTPUT_TOKENS = 16

# Differences of logprobs are in standard deviations of the logits: random weights can make logits of any scale.
# Allowed at the median, at nine of ten tokens and at the worst, whatever the model: bfloat16 keeps 8 bits, and two
# orders of summation over a few dozen layers part by a few hundredths.
SHARES = (0.5, 0.9, 1.0)
ALLOWED = {"float32": (1e-3, 1.5e-3, 2e-3), "bfloat16": (0.05, 0.1, 0.2)}
# Or so many times what the plain forward in the same dtype is off by. Where a router's scores nearly tie, rounding
# chooses other experts: every right implementation is far off at a few tokens, each at others; the worst says nothing.
SPREADS = 3.0


class CheckFailed(RuntimeError):
    """A step that is wrong; its speed would mean nothing."""


class Known(NamedTuple):
    """What is to be expected of one prompt and the tokens that followed.

    Attributes:
        exact: float32 [outputs, V] log probabilities in float32: the distributions that the outputs were drawn from.
        plain: [tokens] differences of the plain forward in the model's dtype, prompt and outputs.
    """

    exact: np.ndarray
    plain: np.ndarray


@dataclass
class PlainForward:
    """Log probabilities by the model's forward over one whole sequence, in float32 and in the model's dtype."""

    model: AbstractModel
    weights: tuple[jax.Array, ...]
    dtype: str
    fp8_scales: Mapping[str, float] = field(default_factory=dict)
    context_tokens: int | None = None

    def __post_init__(self) -> None:
        self._program = jax.jit(partial(_exact_and_plain, self.model, self.fp8_scales, self.context_tokens))

    @property
    def chooses_experts(self) -> bool:
        """True if a token's products take a part of the weights."""
        return any(leaf.token_share < 1 and leaf.flops_per_token for leaf in self.model.declarations)

    def look_up(self, prompt: np.ndarray, outputs: Sequence[int]) -> Known:
        """The distributions behind these tokens, and how far off the model's own dtype is."""
        ids = np.zeros(PROMPT_TOKENS + OUTPUT_TOKENS, np.int32)
        known = np.concatenate([prompt, outputs])
        ids[: len(known)] = known
        exact, plain = map(np.asarray, self._program(self.weights, ids, np.int32(len(prompt) - 1)))
        return Known(exact[: len(outputs)], plain[: len(known)])


def _exact_and_plain(
    abstract: AbstractModel,
    fp8_scales: Mapping[str, float],
    context_tokens: int | None,
    weights: Sequence[jax.Array],
    ids: jax.Array,
    first: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """float32 logprobs [OUTPUT_TOKENS, V] from place `first` on, and the rounded forward's differences [T]."""

    def forward(weights: Sequence[jax.Array], precision: str) -> jax.Array:
        with jax.default_matmul_precision(precision):
            model, run = abstract.merge(weights), dense_pass(ids, fp8_scales=fp8_scales, context_tokens=context_tokens)
            return jax.nn.log_softmax(model.logits(run, model(run)), axis=-1)

    is_float = [jnp.issubdtype(each.dtype, jnp.floating) for each in weights]
    wide = [each.astype(jnp.float32) if cast else each for each, cast in zip(weights, is_float, strict=True)]
    exact = forward(wide, "highest")
    is_wide = all(each.dtype == jnp.float32 for each, cast in zip(weights, is_float, strict=True) if cast)
    rounded = forward(weights, "highest" if is_wide else "default")
    top, ids_of_top = lax.top_k(rounded, min(MAX_TOP_LOGPROBS, rounded.shape[-1]))
    plain = differences(top, ids_of_top, ids_of_top[:, 0], exact)
    return lax.dynamic_slice_in_dim(exact, first, OUTPUT_TOKENS), plain


class TokenCheck(NamedTuple):
    """Differences from float32 at SHARES of the tokens, in standard deviations of the logits.

    Attributes:
        engine: the median of the request that is off most; the others over all tokens of all requests.
        plain: those of the plain forward in the model's dtype, over all tokens of all prompts.
    """

    engine: np.ndarray
    plain: np.ndarray


def check_tokens(case: Case, runner: ModelRunner, plain: PlainForward, num_pages: int) -> TokenCheck:
    """Greedy requests in the case's buckets against the plain forward: the tokens, and the most likely ones' logprobs.

    Raises:
        CheckFailed: a request is further off than its dtype and the plain forward's own spread allow.
    """
    outputs = max(1, min(OUTPUT_TOKENS, case.context_tokens // 2))
    length = max(1, min(PROMPT_TOKENS, case.context_tokens - outputs))
    kinds = min(case.sequences, DISTINCT_PROMPTS)
    lengths = [max(1, length * (kinds - kind) // kinds) for kind in range(kinds)]
    prompts = random_prompts(case, runner.config.vocab_size, lengths, seed=1)
    known: dict[tuple[int, ...], Known] = {}
    apart: list[np.ndarray] = []
    for request, rows in run_requests(case, runner, prompts, outputs, num_pages).items():
        key = (request.id % kinds, *request.output_ids)
        if key not in known:
            known[key] = plain.look_up(prompts[key[0]], request.output_ids)
        assert len(rows) == len(known[key].exact)
        apart.append(np.asarray(differences(*_columns(rows), known[key].exact)))
    medians, others = np.median(apart, axis=1), np.quantile(apart, SHARES[1:])
    everywhere = np.concatenate([each.plain for each in known.values()])
    found = TokenCheck(np.array([medians.max(), *others]), np.quantile(everywhere, SHARES))
    allowed = np.maximum(ALLOWED[plain.dtype], SPREADS * found.plain)
    if plain.chooses_experts and plain.dtype != "float32":
        allowed[-1] = np.finfo(np.float32).max
    if not (found.engine <= allowed).all():  # also if one is no number
        raise CheckFailed(
            f"{case}: off by {_listed(found.engine)} from the whole-sequence forward in float32 "
            f"(median, 90%, worst), {_listed(allowed)} allowed"
        )
    return found


def _listed(values: np.ndarray) -> str:
    return " / ".join(f"{value:.4g}" for value in values)


def run_requests(
    case: Case, runner: ModelRunner, prompts: Sequence[np.ndarray], outputs: int, num_pages: int
) -> dict[Request, list[TokenRow]]:
    """One greedy request a row of the case, the prompts in turn, with what was reported of each token."""
    top = min(MAX_TOP_LOGPROBS, runner.config.vocab_size)
    params = SamplingParams(temperature=0, logprobs=top, max_output_tokens=outputs, ignore_stop=True)
    reported: dict[Request, list[TokenRow]] = {}
    engine = Engine(
        runner.view(**case.changes(runner.config)),
        context_length=case.max_context_tokens,
        cache_pages=num_pages,
        enable_metrics=False,
        policy=PATIENT,
    )
    with engine:
        for row in range(case.sequences):
            reported[engine.submit(prompts[row % len(prompts)], sampling_params=params)] = []
        while engine.has_work():
            for event in engine.step():
                if isinstance(event, TokensEvent):
                    for tokens in event:
                        reported[tokens.request].append(tokens)
    return reported


def _columns(rows: Sequence[TokenRow]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What was reported of one token each: logprobs and ids [N, k] of the most likely, and the tokens [N]."""
    tops = [row.top_logprobs[0] for row in rows if row.top_logprobs is not None]
    ids = [row.top_ids[0] for row in rows if row.top_ids is not None]
    assert len(tops) == len(ids) == len(rows)
    return np.stack(tops), np.stack(ids), np.stack([row.token_ids[0] for row in rows])


Array = jax.Array | np.ndarray


def differences(top: Array, top_ids: Array, chosen: Array, expected: Array) -> jax.Array:
    """How far tokens are from the distributions that are expected, in standard deviations of these.

    Args:
        top, top_ids: [N, k] logprobs of the most likely tokens, and their ids.
        chosen: int [N], the tokens.
        expected: float32 [N, V] logprobs.

    Returns:
        float32 [N]: the largest difference of a logprob, or how far the token trails the best one; NaN if one is none.
    """
    apart = jnp.abs(top - jnp.take_along_axis(expected, top_ids, axis=1)).max(axis=1)
    trailing = expected.max(axis=1) - jnp.take_along_axis(expected, chosen[:, None], axis=1)[:, 0]
    return jnp.maximum(apart, trailing) / jnp.maximum(expected.std(axis=1), 1e-6)


def check_repeatable(case: Case, runner: ModelRunner, plan: BatchPlan) -> None:
    """Runs a plan twice with logprobs, greedily and from fixed tokens and states, then as it is timed.

    Raises:
        CheckFailed: a logit is no finite number, or the tokens differ; those of the timed program may, by rounding, if
            they are among the most likely.
    """
    add = RowFlag(0)
    if any(isinstance(group, StateGroup) for group in runner.config.groups):
        # A state that is updated in place would differ the second time.
        add |= RowFlag.FRESH_STATE
    top = min(MAX_TOP_LOGPROBS, runner.config.vocab_size)
    fixed = with_flags(plan, runner.config, add=add | RowFlag.LOGPROBS, top_logprobs=top, is_greedy=True)
    first, second = runner.forward(fixed), runner.forward(fixed)
    timed = runner.forward(with_flags(plan, runner.config, add=add, is_greedy=True))
    assert first.logprobs is not None and first.top_ids is not None
    # The logprob of a row is its logit less the sum over all of them: one bad logit spoils it.
    if not np.isfinite(first.logprobs).all():
        raise CheckFailed(f"{case}: {np.isnan(first.logprobs).sum()} rows have logits that are no finite numbers")
    if not np.array_equal(first.token_ids, second.token_ids):
        raise CheckFailed(f"{case}: the same plan gave different tokens the second time")
    if not (first.top_ids == timed.token_ids[:, None]).any(axis=1).all():
        raise CheckFailed(f"{case}: the timed program chose a token that is not among the {top} most likely")
