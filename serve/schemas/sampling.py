"""The sampling fields that OpenAI's APIs share, and the extra ones that local servers commonly take."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from resin import InvalidRequest, SamplingParams
from resin.models.sampling_defaults import SamplingDefaults
from resin.plan.sampling import TokenMask
from serve.errors import from_invalid_request, invalid
from serve.schemas.body import Hint

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 4096

Rank = Annotated[int, msgspec.Meta(ge=0, description="Replica to run on; null for any.")]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: Hint = None
    # Beyond OpenAI:
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """Sampling under OpenAI's names; null means the default."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    user: Hint = None
    # Beyond OpenAI:
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    cache_salt: str | None = None
    routed_dp_rank: Rank | None = None

    def stop_strings(self) -> list[str]:
        """The stop strings.

        Raises:
            ApiError: too many, too long or empty.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOP_STRINGS:
            raise invalid("stop", f"stop: at most {MAX_STOP_STRINGS} strings, got {len(stops)}")
        if any(not 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
            raise invalid("stop", f"stop: strings of 1 to {MAX_STOP_CHARACTERS} characters")
        return stops


NAMES = {"max_output_tokens": "max_tokens", "min_output_tokens": "min_tokens", "token_ids": "prompt"}


def seed_of_choice(seed: int | None, index: int) -> int | None:
    """Each choice's own seed, within 64 bits."""
    return None if seed is None else (seed + index) % 2**64


def build_params(
    fields: SamplingFields,
    *,
    defaults: SamplingDefaults,
    max_output_tokens: int,
    stop_token_ids: tuple[int, ...],
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    allowed_tokens: TokenMask | None = None,
    names: dict[str, str] | None = None,
) -> SamplingParams:
    """The engine's policy; `defaults` say how to sample where the fields do not.

    Raises:
        ApiError: 400 naming the field that the engine does not take.
    """
    given: dict[str, Any] = {
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "top_k": max(0, fields.top_k) if fields.top_k is not None else None,  # some clients say -1 for "all"
        "min_p": fields.min_p,
        "seed": fields.seed,
        "presence_penalty": fields.presence_penalty,
        "frequency_penalty": fields.frequency_penalty,
        "repetition_penalty": fields.repetition_penalty,
        "logit_bias": fields.logit_bias,
        "min_output_tokens": min(fields.min_tokens, max_output_tokens) if fields.min_tokens is not None else None,
        "ignore_stop": fields.ignore_eos,
    }
    stops = tuple(dict.fromkeys([*stop_token_ids, *(fields.stop_token_ids or [])]))
    try:
        return SamplingParams(
            max_output_tokens=max_output_tokens,
            stop_token_ids=stops,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            allowed_tokens=allowed_tokens,
            **(defaults.params() | {name: value for name, value in given.items() if value is not None}),
        )
    except InvalidRequest as error:
        raise from_invalid_request(error, NAMES | (names or {})) from error
