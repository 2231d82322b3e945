"""What a row of a plan asks for."""

from __future__ import annotations

import enum


class RowFlag(enum.IntFlag):
    """Bits of `BatchPlan.row_flags`."""

    EMIT = 1
    """The row ends at the sequence's last token: sample one token."""
    FROM_SLOT = 2
    """The row goes on where the latest plan of its slot ended: with the last token that the slot emitted and at the
    slot's length, not with `token_ids` and at `computed`. In decode plans alone."""
    PENALTIES = 4
    """Apply presence, frequency and repetition penalties from the slot's token counts."""
    BIAS = 8
    """Add the slot's logit bias."""
    SUPPRESS_STOP = 16
    """The slot's stop tokens cannot be chosen, unless nothing else is left."""
    MASK = 32
    """Only tokens of the row's `allowed_masks` bits can be chosen."""
    LOGPROBS = 64
    """Report the chosen token's logprob (and the `top_logprobs` most likely)."""
    PROMPT_LOGPROBS = 128
    """Report the logprob of every next token within the row's chunk."""
    FRESH_STATE = 256
    """The row starts its sequence: State groups begin at zero instead of `input_pages`."""


# Rows whose logits are changed before the draw or reported after it. Plain integers: arithmetic with flags is slow.
SPECIAL = int(RowFlag.PENALTIES | RowFlag.BIAS | RowFlag.SUPPRESS_STOP | RowFlag.MASK | RowFlag.LOGPROBS)
