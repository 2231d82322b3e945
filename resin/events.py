"""What `Engine.step()` returns: one columnar event of new tokens, and one event for each request that ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from resin.sched.request import FinishReason, Request


class TokenRow(NamedTuple):
    """One request's new tokens.

    Attributes:
        token_ids: int32 [n].
        logprobs: float32 [n] or None; natural logs under the raw logits.
        top_ids, top_logprobs: int32 and float32 [n, k] or None, most likely first.
    """

    request: Request
    token_ids: np.ndarray
    logprobs: np.ndarray | None
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None


@dataclass(frozen=True, slots=True, eq=False)
class TokensEvent:
    """New tokens of one step, in columns; iterate for one TokenRow a request.

    Attributes:
        requests: R requests that got tokens.
        token_ids: int32 [N], their tokens one after another.
        token_indptr: int64 [R + 1], request i owns `token_ids[token_indptr[i]:token_indptr[i + 1]]`.
        logprobs, top_ids, top_logprobs: [N], [N, k], [N, k]; None if no request of the step asked. A request that asked
            for fewer than k alternatives owns the first ones.
    """

    requests: tuple[Request, ...]
    token_ids: np.ndarray
    token_indptr: np.ndarray
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    def __iter__(self) -> Iterator[TokenRow]:
        for i, request in enumerate(self.requests):
            part = slice(int(self.token_indptr[i]), int(self.token_indptr[i + 1]))
            wanted = request.params.logprobs
            if wanted is None or self.logprobs is None:
                yield TokenRow(request, self.token_ids[part], None, None, None)
            elif not wanted or self.top_ids is None or self.top_logprobs is None:
                yield TokenRow(request, self.token_ids[part], self.logprobs[part], None, None)
            else:
                top = (self.top_ids[part, :wanted], self.top_logprobs[part, :wanted])
                yield TokenRow(request, self.token_ids[part], self.logprobs[part], *top)

    def __repr__(self) -> str:
        rows = ", ".join(f"{row.request.id}: {row.token_ids.tolist()}" for row in self)
        return f"TokensEvent({rows})"


@dataclass(frozen=True, slots=True, eq=False)
class FinishedEvent:
    """A request ended; it comes after the request's last tokens."""

    request: Request
    reason: FinishReason

    def __repr__(self) -> str:
        return f"FinishedEvent({self.request.id}, {self.reason.value})"


Event = TokensEvent | FinishedEvent
