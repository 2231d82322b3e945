"""One request's life: what was asked, what was generated, where it stands."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from resin.plan import InvalidRequest, ResinError, SamplingParams
from resin.sched.keys import KEY_DTYPE

if TYPE_CHECKING:
    from resin.sched.lease import CacheLease
    from resin.sched.prefix import PrefixAudit


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class RequestState(enum.Enum):
    """QUEUED has no slot and no pages; PREFILL and DECODE have both; FINISHED may wait for a plan in flight."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class RequestFailed(ResinError):
    """`take_result` of a request that ended with an error."""


@dataclass(eq=False, slots=True)
class PromptLogprobs:
    """Logprobs of prompt tokens 1 to P - 1 under the raw logits.

    Attributes:
        logprobs: float32 [P - 1].
        top_ids, top_logprobs: int32 and float32 [P - 1, n], most likely first.
    """

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    filled: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """A submitted request. Users read it; only the Engine and its scheduler write it.

    Attributes:
        id: unique within the engine, in submission order.
        prompt_ids: int32 [P], read-only.
        params: the sampling policy.
        seed: the 64-bit seed in use, drawn at submission if the policy has none.
        prompt_keys: int64 [P], read-only, by which the prefix cache knows the prompt; None: by its ids.
        output_ids: tokens generated so far, a stop token included.
        replica: where it must run; None: wherever there is room.
        prefix_audit: what the prefix cache gave at the first admission, None before it or without a cache.
    """

    id: int
    prompt_ids: np.ndarray
    params: SamplingParams
    seed: int
    max_outputs: int  # params.max_output_tokens, cut to the room that the context leaves
    priority: float = 0.0
    cache_salt: str = ""
    prompt_keys: np.ndarray | None = None
    replica: int | None = None
    submitted_s: float = 0.0
    deadline_at_s: float | None = None
    state: RequestState = RequestState.QUEUED
    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    prefix_audit: PrefixAudit | None = None
    prompt_logprobs: PromptLogprobs | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0  # before the latest retraction
    finished_s: float | None = None
    retractions: int = 0
    rank: float = 0.0  # order in every queue, lowest first: see RequestQueue
    home: int = -1  # replica while it runs
    slot: int = -1  # its device slot there
    lease: CacheLease | None = None  # pages while it runs

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def prefix_hit_tokens(self) -> int:
        """Prompt tokens that the prefix cache supplied at the first admission."""
        return self.prefix_audit.hit_tokens if self.prefix_audit is not None else 0

    def all_ids(self) -> np.ndarray:
        """int32 [num_tokens], prompt and output."""
        if not self.output_ids:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, np.asarray(self.output_ids, np.int32)])

    def token_slice(self, start: int, stop: int) -> np.ndarray:
        """int32 tokens `[start, stop)` of prompt and output."""
        prompt = len(self.prompt_ids)
        if stop <= prompt:
            return self.prompt_ids[start:stop]
        output = np.asarray(self.output_ids[max(start - prompt, 0) : stop - prompt], np.int32)
        return output if start >= prompt else np.concatenate([self.prompt_ids[start:], output])

    def key_ids(self, start: int, stop: int) -> np.ndarray:
        """int64 keys of tokens `[start, stop)` of prompt and output: what the prefix cache compares."""
        keys = self.token_slice(start, stop).astype(KEY_DTYPE)
        if self.prompt_keys is not None:
            known = self.prompt_keys[start:stop]
            keys[: len(known)] = known
        return keys

    def take_result(self) -> list[int]:
        """The generated ids of a finished request.

        Raises:
            RuntimeError: the request still runs.
            RequestFailed: it ended with an error.
        """
        if self.finish_reason is None:
            raise RuntimeError(f"request {self.id} has not finished")
        if self.finish_reason is FinishReason.ERROR:
            raise RequestFailed(f"request {self.id} failed: {self.error}") from self.error
        return list(self.output_ids)


def check_prompt(token_ids: Sequence[int] | np.ndarray, *, vocab_size: int, context_length: int) -> np.ndarray:
    """A prompt as the scheduler wants it, read-only int32.

    Args:
        token_ids: what a user passed.
        vocab_size: ids are below it; 0 leaves them unchecked.
        context_length: tokens must be fewer.

    Raises:
        InvalidRequest: not a sequence of such ids.
    """
    try:
        array = np.asarray(token_ids)
    except ValueError:  # rows of different lengths
        array = np.empty((0, 0))
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise InvalidRequest("token_ids", token_ids, "a non-empty sequence of integers")
    top = vocab_size or 2**31
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= top:
        raise InvalidRequest("token_ids", low if low < 0 else high, f"ids in [0, {top - 1}]")
    if array.size >= context_length:
        raise InvalidRequest("token_ids", f"{array.size} tokens", f"1 to {context_length - 1} tokens")
    prompt = array.astype(np.int32)
    prompt.flags.writeable = False
    return prompt


def check_terms(priority: object, deadline_s: object, cache_salt: object) -> None:
    """Holds what `Engine.submit` was told beside prompt and sampling against what it can be.

    Raises:
        InvalidRequest: a priority or deadline that is no number of the allowed range, a salt that is no string.
    """
    if not math.isfinite(_real(priority)):
        raise InvalidRequest("priority", priority, "a finite number")
    if deadline_s is not None and not _real(deadline_s) > 0:
        raise InvalidRequest("deadline_s", deadline_s, "more than 0 seconds")
    if not isinstance(cache_salt, str):
        raise InvalidRequest("cache_salt", cache_salt, "a string")


def _real(value: object) -> float:
    """The value as a float, NaN if it is no number."""
    if not isinstance(value, int | float | np.integer | np.floating):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan
