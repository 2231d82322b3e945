"""Intake: a user's arguments become a Request, or an error that names the argument."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

from resin.plan import InvalidRequest, RunnerConfig, SamplingParams
from resin.sched.keys import MediaSpan, check_media, prompt_keys
from resin.sched.request import PromptLogprobs, Request, check_prompt, check_terms


class Intake:
    """Makes requests, and numbers those that are taken.

    Attributes:
        taken: how many were.
    """

    def __init__(self, config: RunnerConfig, context_length: int) -> None:
        self.taken = 0
        self._vocab_size = config.vocab_size
        self._context_length = context_length

    def make(
        self,
        token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        now: float,
        terms: tuple[float, float | None, str, Sequence[MediaSpan], int | None],
    ) -> Request:
        """A request with the next number, which is taken once `taken` counts it.

        Args:
            terms: priority, deadline_s, cache_salt, media and replica.

        Raises:
            InvalidRequest: with the field, the value and the allowed range.
        """
        priority, deadline_s, cache_salt, media, replica = terms
        if not isinstance(params, SamplingParams):
            raise InvalidRequest("sampling_params", params, "a SamplingParams or None")
        prompt = check_prompt(token_ids, vocab_size=self._vocab_size, context_length=self._context_length)
        if self._vocab_size:
            params.check_vocab(self._vocab_size)
        elif params.allowed_tokens is not None:
            raise InvalidRequest("allowed_tokens", params.allowed_tokens, "None: the runner declares no vocab_size")
        check_terms(priority, deadline_s, cache_salt)
        spans = check_media(media, len(prompt))
        return Request(
            id=self.taken,
            prompt_ids=prompt,
            params=params,
            seed=params.seed if params.seed is not None else secrets.randbits(64),
            max_outputs=min(params.max_output_tokens, self._context_length - len(prompt)),
            priority=float(priority),
            cache_salt=cache_salt,
            prompt_keys=prompt_keys(prompt, spans) if spans else None,
            prompt_logprobs=_room_for_logprobs(params.prompt_logprobs, len(prompt) - 1),
            replica=replica,
            submitted_s=now,
            deadline_at_s=None if deadline_s is None else now + deadline_s,
        )


def _room_for_logprobs(width: int | None, places: int) -> PromptLogprobs | None:
    if width is None:
        return None
    return PromptLogprobs(
        np.zeros(places, np.float32), np.zeros((places, width), np.int32), np.zeros((places, width), np.float32)
    )
