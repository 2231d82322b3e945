"""What a runner returned, held against its plan."""

from __future__ import annotations

import numpy as np

from resin.plan import BatchPlan, ForwardOutput, ResinError, RowFault

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class BadOutput(ResinError):
    """A runner returned something that does not match its plan."""


class NoToken(ResinError):
    """Nothing could be chosen as a request's next token."""


FAULTS = {
    RowFault.NO_TOKEN: "allowed_tokens and logit_bias leave no token to choose",
    RowFault.NOT_FINITE: "the model's logits are not finite numbers",
}


def check_output(
    plan: BatchPlan, output: ForwardOutput, emits: np.ndarray | None, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, bool]:
    """The token (or RowFault) of each emitting row, and its index in the output's columns.

    Args:
        emits: bool [num_sequences], None if every row emits.

    Returns:
        int32 [R], int64 [R], and whether a fault is among them.

    Raises:
        BadOutput: wrong shapes or dtype, not exactly one token for an emitting row, or an id outside the vocabulary.
    """
    indptr, tokens = check_columns(plan, output)
    if emits is None:
        one_each = np.arange(plan.num_sequences + 1)
        rows, chosen, misfits = one_each[:-1], tokens, indptr != one_each
    else:
        bounds = indptr.astype(np.int64, copy=False)
        lengths = bounds[1:] - bounds[:-1]
        rows, misfits = indptr[:-1][emits], np.where(emits, lengths != 1, lengths < 0)
        chosen = tokens if misfits.any() else tokens[rows]
    if np.count_nonzero(misfits):
        raise BadOutput("token_indptr gives an emitting row other than one token")
    has_faults = check_ids(chosen, vocab_size)
    return chosen.astype(np.int32, copy=False), rows, has_faults


def check_columns(plan: BatchPlan, output: ForwardOutput) -> tuple[np.ndarray, np.ndarray]:
    """`token_indptr` and `token_ids`, of the right shapes and dtypes."""
    indptr, tokens = np.asarray(output.token_indptr), np.asarray(output.token_ids)
    if indptr.shape != (plan.num_sequences + 1,):
        raise BadOutput(f"token_indptr has shape {indptr.shape}: expected ({plan.num_sequences + 1},)")
    if tokens.size and tokens.dtype.kind not in "iu":
        raise BadOutput(f"token_ids are {tokens.dtype}: expected integers")
    if tokens.ndim != 1 or indptr[0] != 0 or indptr[-1] != tokens.size:
        raise BadOutput(f"token_indptr spans {indptr[0]} to {indptr[-1]}: expected 0 to {tokens.size} token_ids")
    return indptr, tokens


def check_ids(chosen: np.ndarray, vocab_size: int) -> bool:
    """Whether a RowFault is among them.

    Raises:
        BadOutput: an id that is neither of the vocabulary nor a fault.
    """
    top = vocab_size or 1 << 31
    # Negative ids are the largest of all as unsigned numbers.
    has_faults = bool(chosen.size and np.maximum.reduce(chosen.view(_UNSIGNED[chosen.itemsize])) >= top)
    if has_faults and (chosen.max() >= top or chosen.min() < min(RowFault)):
        raise BadOutput(f"token_ids go from {chosen.min()} to {chosen.max()}: expected ids in [0, {top - 1}]")
    return has_faults


def check_runs(
    plan: BatchPlan, output: ForwardOutput, emits: np.ndarray | None, drafts: np.ndarray, vocab_size: int
) -> tuple[list[int], list[int]]:
    """The tokens of a plan with drafts, and where each emitting row's begin in them; the last entry is their number.

    Args:
        emits: bool [num_sequences], None if every row emits.
        drafts: int32 [R], how many each emitting row may try.

    Raises:
        BadOutput: wrong shapes or dtype, tokens of a row that emits none, no token or more than may be for one that
            does, an id outside the vocabulary, or tokens after a fault.
    """
    indptr, tokens = check_columns(plan, output)
    bounds = indptr.astype(np.int64, copy=False)
    counts = bounds[1:] - bounds[:-1]
    if emits is not None:
        if counts[~emits].any():
            raise BadOutput("token_indptr gives tokens to an empty place")
        counts = counts[emits]
    if (counts < 1).any() or (counts > 1 + drafts).any():
        raise BadOutput("token_indptr gives a row other than one to one more token than it may try drafts")
    ends = np.cumsum(counts)
    if check_ids(tokens, vocab_size) and np.delete(tokens, ends - 1).min(initial=0) < 0:
        raise BadOutput("token_ids go on after a fault")
    return tokens.tolist(), [0, *ends.tolist()]
