"""Commit: a collected output becomes tokens, finished requests and published pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from resin.plan import BatchPlan, ForwardOutput, ResinError, RowFault, RowFlag
from resin.sched.replica import Replica
from resin.sched.request import FinishReason, PromptLogprobs, Request
from resin.sched.rows import LiveRows
from resin.sched.slots import COMMITTED, DISCARDED, SlotTable
from resin.sched.step import DecodeDraft, Draft, PrefillDraft

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class BadOutput(ResinError):
    """A runner returned something that does not match its plan."""


class NoToken(ResinError):
    """Nothing could be chosen as a request's next token."""


_FAULTS = {
    RowFault.NO_TOKEN: "allowed_tokens and logit_bias leave no token to choose",
    RowFault.NOT_FINITE: "the model's logits are not finite numbers",
}


@dataclass(slots=True)
class Committed:
    """What one plan brought.

    Attributes:
        plan: the plan.
        table: columns of its replica's slots.
        requests: rows that emitted a token, discarded rows left out.
        slots: their slots, as an index into the columns of the SlotTable (a finished request's may be free again).
        token_ids: int32 [R].
        rows: int64 [R], index of each token in the output's columns.
        together: the rows of a decode plan if all of them emitted.
        finished: requests that ended, with the reason.
        failed: requests of which no token could be chosen, with the error; their rows are discarded.
    """

    plan: BatchPlan
    table: SlotTable
    requests: Sequence[Request]
    slots: slice | np.ndarray
    token_ids: np.ndarray
    rows: np.ndarray
    together: LiveRows | None = None
    finished: list[tuple[Request, FinishReason]] = field(default_factory=list)
    failed: list[tuple[Request, NoToken]] = field(default_factory=list)

    def stamp(self, now: float) -> None:
        """Notes that the rows got their tokens now."""
        self.table.last_token_s[self.slots] = now
        if self.together is not None:
            self.together.last_commit_s = now


def commit(replica: Replica, draft: Draft, plan: BatchPlan, output: ForwardOutput) -> Committed:
    """Applies a plan's output. Rows of requests that ended meanwhile are discarded and their pages returned.

    Args:
        draft: what the plan was made of.

    Raises:
        BadOutput: the output does not fit the plan.
    """
    replica.in_flight -= 1
    if isinstance(draft, DecodeDraft):
        return _commit_decode(replica, draft, plan, output)
    return _commit_prefill(replica, draft, plan, output)


def _commit_decode(replica: Replica, draft: DecodeDraft, plan: BatchPlan, output: ForwardOutput) -> Committed:
    table, placed = replica.table, draft.rows
    slots = placed.index
    tokens, rows, has_faults = check_output(plan, output, placed.emits, replica.vocab_size)
    live, failed = _live_rows(replica, placed.requests, tokens if has_faults else None)
    requests, stop_ids = placed.requests, placed.stop_ids
    if live is None:
        table.add(placed.slots, placed.runs, COMMITTED)
        for append, token in zip(placed.append_output, tokens.tolist(), strict=True):
            append(token)
    else:
        table.counts[slots] += np.where(live[:, None], COMMITTED, DISCARDED)
        _release_closed(replica, placed.requests, live)
        rows, tokens, slots = rows[live], tokens[live], placed.slots[live]
        requests = tuple([request for request, goes_on in zip(requests, live.tolist(), strict=True) if goes_on])
        for request, token in zip(requests, tokens.tolist(), strict=True):
            request.output_ids.append(token)
        stop_ids = stop_ids[:, live]
    table.last_token[slots] = tokens
    together = placed if live is None else None
    committed = Committed(plan, table, requests, slots, tokens, rows, together, failed=failed)
    ending = draft.ending
    if live is not None and ending:
        kept = np.cumsum(live) - 1
        ending = [int(kept[row]) for row in ending if live[row]]
    _find_ends(committed, stop_ids, ending)
    cache = replica.cache
    if cache.prefixes.enabled:
        positions = table.committed[slots]
        due = cache.prefixes.due(positions)
        _commit_cache(replica, [(requests[i], int(positions[i])) for i in due])
    return committed


def _commit_prefill(replica: Replica, draft: PrefillDraft, plan: BatchPlan, output: ForwardOutput) -> Committed:
    table, slots, chunks, emits = replica.table, draft.slots, draft.chunks, plan.emits
    tokens, rows, _ = check_output(plan, output, emits, replica.vocab_size)
    _collect_prompt_logprobs(draft, plan, output)
    table.in_flight[slots] -= 1
    table.committed[slots] = [chunk.stop for chunk in chunks]
    table.pending[slots[emits]] -= 1
    sampled = np.zeros(len(chunks), np.int32)
    sampled[emits] = tokens
    live, failed = _live_rows(replica, draft.requests, sampled)
    if live is not None:
        _release_closed(replica, draft.requests, live)
        rows, tokens = rows[live[emits]], tokens[live[emits]]
        chunks = [chunk for chunk, goes_on in zip(chunks, live.tolist(), strict=True) if goes_on]
    requests = [chunk.request for chunk in chunks if chunk.emits]
    for request, token in zip(requests, tokens.tolist(), strict=True):
        request.output_ids.append(token)
    slots = np.fromiter((request.slot for request in requests), np.int32, len(requests))
    table.known[slots] += 1
    table.outputs[slots] += 1
    table.last_token[slots] = tokens
    committed = Committed(plan, table, requests, slots, tokens, rows, failed=failed)
    ending = np.flatnonzero(table.outputs[slots] >= table.max_outputs[slots]).tolist()
    _find_ends(committed, table.stop_ids[slots].T, ending)
    if replica.cache.prefixes.enabled:
        _commit_cache(replica, [(chunk.request, chunk.stop) for chunk in chunks])
    replica.note_room()  # who is done with a prompt promises to take less, and Window rows give a chunk's pages up
    return committed


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
    indptr, tokens = np.asarray(output.token_indptr), np.asarray(output.token_ids)
    if indptr.shape != (plan.num_sequences + 1,):
        raise BadOutput(f"token_indptr has shape {indptr.shape}: expected ({plan.num_sequences + 1},)")
    if tokens.size and tokens.dtype.kind not in "iu":
        raise BadOutput(f"token_ids are {tokens.dtype}: expected integers")
    if tokens.ndim != 1 or indptr[0] != 0 or indptr[-1] != tokens.size:
        raise BadOutput(f"token_indptr spans {indptr[0]} to {indptr[-1]}: expected 0 to {tokens.size} token_ids")
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
    top = vocab_size or 1 << 31
    # Negative ids are the largest of all as unsigned numbers.
    has_faults = bool(chosen.size and np.maximum.reduce(chosen.view(_UNSIGNED[chosen.itemsize])) >= top)
    if has_faults and (chosen.max() >= top or chosen.min() < min(RowFault)):
        raise BadOutput(f"token_ids go from {chosen.min()} to {chosen.max()}: expected ids in [0, {top - 1}]")
    return chosen.astype(np.int32, copy=False), rows, has_faults


def _live_rows(
    replica: Replica, requests: Sequence[Request], tokens: np.ndarray | None
) -> tuple[np.ndarray | None, list[tuple[Request, NoToken]]]:
    """bool [n] with False for rows that bring nothing, None if all do; and the running requests without a token.

    Args:
        tokens: int32 [n], of each row, none negative but faults; None if there are no faults.
    """
    if not replica.closing and tokens is None:
        return None, []
    goes_on = np.array([not request.is_finished for request in requests], np.bool_)
    if tokens is None:
        return (None if goes_on.all() else goes_on), []
    failed = [
        (requests[i], NoToken(_FAULTS[RowFault(int(tokens[i]))]))
        for i in np.flatnonzero(goes_on & (tokens < 0)).tolist()
    ]
    live = goes_on & (tokens >= 0)
    return (None if live.all() else live), failed


def _release_closed(replica: Replica, requests: Sequence[Request], live: np.ndarray) -> None:
    """Frees the ended requests that waited for this plan alone."""
    for row in np.flatnonzero(~live).tolist():
        replica.release_closed(requests[row])


def _find_ends(committed: Committed, stop_ids: np.ndarray, ending: Sequence[int]) -> None:
    """Notes the requests that ended with their new token: a stop token, or the last one that they may have.

    Args:
        stop_ids: int32 [k, R].
        ending: rows that got the last one, rising.
    """
    stops = stop_ids == committed.token_ids
    stopped = set(np.flatnonzero(stops.any(axis=0)).tolist()) if np.count_nonzero(stops) else set()
    for i in sorted(stopped.union(ending)) if stopped else ending:
        reason = FinishReason.STOP if i in stopped else FinishReason.LENGTH
        committed.finished.append((committed.requests[i], reason))


def _commit_cache(replica: Replica, rows: list[tuple[Request, int]]) -> None:
    """Publishes and trims, before anything of the rows is released."""
    for request, position in rows:
        if replica.cache.commit(request, position, int(replica.table.computed[request.slot])):
            replica.decode.rows_changed(request)


def _collect_prompt_logprobs(draft: PrefillDraft, plan: BatchPlan, output: ForwardOutput) -> None:
    indptr = plan.query_indptr
    for row, chunk in enumerate(draft.chunks):
        wanted = chunk.request.prompt_logprobs
        if wanted is None or not plan.row_flags[row] & RowFlag.PROMPT_LOGPROBS:
            continue
        if output.prompt_logprobs is None:
            raise BadOutput("prompt_logprobs is missing")
        _copy_prompt_logprobs(wanted, chunk.start, chunk.stop, int(indptr[row]), output)


def _copy_prompt_logprobs(wanted: PromptLogprobs, start: int, stop: int, at: int, output: ForwardOutput) -> None:
    """Place p of the columns belongs to prompt token p + 1."""
    assert output.prompt_logprobs is not None
    stop = min(stop, len(wanted.logprobs))
    first = wanted.filled  # what an earlier, retracted run delivered stays
    if first >= stop:
        return
    source = slice(at + first - start, at + stop - start)
    wanted.logprobs[first:stop] = output.prompt_logprobs[source]
    width = wanted.top_ids.shape[1]
    if width:
        if output.prompt_top_ids is None or output.prompt_top_logprobs is None:
            raise BadOutput("prompt_top_ids and prompt_top_logprobs are missing")
        wanted.top_ids[first:stop] = output.prompt_top_ids[source, :width]
        wanted.top_logprobs[first:stop] = output.prompt_top_logprobs[source, :width]
    wanted.filled = stop
