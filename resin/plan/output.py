"""ForwardOutput: what a runner returns for a plan."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class RowFault(enum.IntEnum):
    """What a runner returns in place of a token where none can be chosen: that request alone ends, with an error."""

    NO_TOKEN = -1
    """Masks and biases leave no token."""
    NOT_FINITE = -2
    """The row's largest logit is infinite, or one is NaN."""


class DraftReport(NamedTuple):
    """What became of a row's drafts, or a column of each.

    Attributes:
        tried: drafts that were compared with the tokens chosen. Where a plan had no place for them, the first draft is
            compared all the same.
        agreed: how many of them, from the first on, were the tokens chosen.
        ready: drafts that the row has for its next plan.
    """

    tried: Any
    agreed: Any
    ready: Any


DRAFT_REPORT = DraftReport(*range(len(DraftReport._fields)))  # where each number lies


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOutput:
    """Flat token ids and row offsets, with optional logprob columns.

    Attributes:
        token_ids: integer [N], tokens of all live rows one after another. Rows without EMIT may hold none, or tokens
            that the Engine ignores; a RowFault stands where a row has none to choose.
        token_indptr: integer [num_sequences + 1], row b owns `token_ids[token_indptr[b]:token_indptr[b + 1]]`: one
            token, or in a plan with drafts up to one more than it may try.
        logprobs: float32 [N], natural log probability of each token under the raw logits.
        top_ids, top_logprobs: int32 and float32 [N, n], the n most likely tokens at each place, best first.
        prompt_logprobs: float32 [num_tokens], logprob of the token that follows token t in its sequence (undefined for
            the last known token of a sequence).
        prompt_top_ids, prompt_top_logprobs: [num_tokens, n], likewise.
        drafting: int32 [num_sequences, 3], a DraftReport's fields for each row; None from a runner that drafts nothing.
    """

    token_ids: np.ndarray
    token_indptr: np.ndarray
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    prompt_logprobs: np.ndarray | None = None
    prompt_top_ids: np.ndarray | None = None
    prompt_top_logprobs: np.ndarray | None = None
    drafting: np.ndarray | None = None
