"""The frozen policy of one request, and the one table of what plans say of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from resin.plan.errors import InvalidRequest
from resin.plan.flags import RowFlag
from resin.plan.mapping import FrozenMapping

TokenMask = Callable[[Sequence[int]], np.ndarray | None]
"""Maps the tokens generated so far to a bool `[vocab]` array of allowed ids (None: all allowed)."""

MAX_STOP_TOKENS = 16
MAX_LOGIT_BIAS = 320
MAX_TOP_LOGPROBS = 20
# Columns travel as float32, where smaller values would vanish or blow up: a greedy row, the most likely token alone and
# an overwhelming penalty are what they mean.
MIN_TEMPERATURE, MIN_TOP_P, MIN_REPETITION_PENALTY = 1e-6, 1e-10, 1e-30


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request generates.

    A step turns the float32 logits of a row into a token in this order:
    penalties, `logit_bias`, `allowed_tokens`, stop suppression (`min_output_tokens`), then
    `temperature`, `top_k`, `top_p`, `min_p`, and a draw with Gumbel noise that depends only on
    (`seed`, position). Equal logits rank by token id, lowest first, in greedy choice and in every cut.
    Reported logprobs are those of the raw logits, before any of these. A request ends with an
    error where masks and biases leave no token, or where its logits are no finite numbers.

    Attributes:
        max_output_tokens: tokens to generate at most, at least 1.
        stop_token_ids: ids that end the request; the stop token is part of the result. At most 16.
        temperature: 0 (and all below 1e-6) is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches it, in (0, 1].
        min_p: keep tokens with at least this share of the most likely token's probability, in [0, 1].
        seed: reproducible sampling whatever else is in the batch; None draws one at submission.
        logprobs: None for none, 0 for the chosen token, n for the n most likely as well (at most 20).
        prompt_logprobs: the same for every prompt token but the first.
        presence_penalty: subtracted once from tokens that the output holds already, in [-2, 2].
        frequency_penalty: subtracted once per occurrence in the output, in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt
            or output (Keskar et al. 2019, CTRL), in (0, 10].
        logit_bias: token id -> value added to its logit. At most 320 ids.
        min_output_tokens: stop tokens cannot be chosen before this many tokens, unless masks and
            biases leave nothing else.
        ignore_stop: generate past stop tokens.
        allowed_tokens: hook for structured output, called before each token of this request.
    """

    max_output_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_output_tokens: int = 0
    ignore_stop: bool = False
    allowed_tokens: TokenMask | None = None

    def __post_init__(self) -> None:
        _integer("max_output_tokens", self.max_output_tokens, 1, 2**31 - 1)
        _integer("min_output_tokens", self.min_output_tokens, 0, self.max_output_tokens)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _real("temperature", self.temperature, 0.0, 100.0)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_TOP_LOGPROBS)
        try:
            stops = tuple(self.stop_token_ids)
        except TypeError:
            raise InvalidRequest("stop_token_ids", self.stop_token_ids, "a sequence of ids") from None
        if len(stops) > MAX_STOP_TOKENS:
            raise InvalidRequest("stop_token_ids", stops, f"at most {MAX_STOP_TOKENS} ids")
        for token in stops:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        object.__setattr__(self, "stop_token_ids", tuple(int(token) for token in stops))
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest("logit_bias", self.logit_bias, "a mapping from token id to value")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest("logit_bias", len(self.logit_bias), f"at most {MAX_LOGIT_BIAS} entries")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31 - 1)
            _real(f"logit_bias[{token}]", bias, -math.inf, 1e9)
        frozen = FrozenMapping({int(token): float(bias) for token, bias in self.logit_bias.items()})
        object.__setattr__(self, "logit_bias", frozen)
        if not isinstance(self.ignore_stop, bool):
            raise InvalidRequest("ignore_stop", self.ignore_stop, "True or False")
        if self.allowed_tokens is not None and not callable(self.allowed_tokens):
            raise InvalidRequest("allowed_tokens", self.allowed_tokens, "a callable or None")

    @property
    def is_sampled(self) -> bool:
        """False if the row is greedy."""
        return self.temperature >= MIN_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """True if the row needs token counts on the device."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def needs_slot_load(self) -> bool:
        """True if the device slot must be prepared before the first sampled token."""
        return self.has_penalties or bool(self.logit_bias) or self.min_output_tokens > 0

    def check_vocab(self, vocab_size: int) -> None:
        """Raises InvalidRequest if a token id of this policy lies outside `[0, vocab_size)`."""
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, vocab_size - 1)
        for token in self.logit_bias:
            _integer("logit_bias", token, 0, vocab_size - 1)


class SamplingColumn(NamedTuple):
    """A column of every plan, one number a sequence; 0 in padding, which is greedy and asks for nothing.

    Layout, slots, planner and decode image take their columns from SAMPLING_COLUMNS, and programs find them by name.
    """

    name: str
    dtype: str  # "int32" or "float32"
    value: Callable[[SamplingParams, int], float]
    """Of a request's policy and the seed that it drew."""


SAMPLING_COLUMNS = (
    SamplingColumn("top_k", "int32", lambda params, seed: params.top_k),
    SamplingColumn("seed_low", "int32", lambda params, seed: _signed(seed)),
    SamplingColumn("seed_high", "int32", lambda params, seed: _signed(seed >> 32)),
    SamplingColumn("temperature", "float32", lambda params, seed: params.temperature * params.is_sampled),
    SamplingColumn("top_p", "float32", lambda params, seed: max(params.top_p, MIN_TOP_P)),
    SamplingColumn("min_p", "float32", lambda params, seed: params.min_p),
    SamplingColumn("presence_penalty", "float32", lambda params, seed: params.presence_penalty),
    SamplingColumn("frequency_penalty", "float32", lambda params, seed: params.frequency_penalty),
    SamplingColumn(
        "repetition_penalty", "float32", lambda params, seed: max(params.repetition_penalty, MIN_REPETITION_PENALTY)
    ),
)


def policy_flags(params: SamplingParams) -> int:
    """Flags that every emitting row of a request has."""
    flags = RowFlag.PENALTIES if params.has_penalties else RowFlag(0)
    if params.logit_bias:
        flags |= RowFlag.BIAS
    if params.allowed_tokens is not None:
        flags |= RowFlag.MASK
    if params.logprobs is not None:
        flags |= RowFlag.LOGPROBS
    return int(flags)


def _signed(word: int) -> int:
    """The low 32 bits as an int32."""
    return (word + 2**31) % 2**32 - 2**31


def _integer(name: str, value: object, low: int, high: int) -> None:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or not low <= value <= high:  # type: ignore[operator]
        raise InvalidRequest(name, value, f"an integer in [{low}, {high}]")


def _real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    number = isinstance(value, int | float | np.floating | np.integer) and not isinstance(value, bool)
    if not number or not (low < value if open_low else low <= value) or not value <= high:  # type: ignore[operator]
        bracket = "(" if open_low else "["
        raise InvalidRequest(name, value, f"a number in {bracket}{low:g}, {high:g}]")
