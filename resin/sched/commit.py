"""Commit: a collected output becomes tokens, finished requests and published pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from resin.plan import BatchPlan, ForwardOutput, Phase, RowFault, RowFlag
from resin.plan.output import DraftReport
from resin.sched.outputs import FAULTS, BadOutput, NoToken, check_output, check_runs
from resin.sched.replica import Replica
from resin.sched.request import FinishReason, PromptLogprobs, Request
from resin.sched.rows import LiveRows
from resin.sched.slots import COMMITTED, DISCARDED, SlotTable
from resin.sched.step import DecodePart, Part, PrefillPart


@dataclass(slots=True)
class Committed:
    """What one plan brought.

    Attributes:
        plan: the plan.
        output: what the runner returned of it.
        table: columns of its replica's slots.
        requests: R rows that emitted tokens, discarded rows left out.
        slots: their slots, as an index into the columns of the SlotTable (a finished request's may be free again).
        token_ids: int32 [N], row by row.
        rows: int64 [N], index of each token in the output's columns.
        indptr: int64 [R + 1], row i owns `token_ids[indptr[i]:indptr[i + 1]]`; None where each row has one token.
        together: the rows of a decode plan if all of them emitted.
        finished: requests that ended, with the reason.
        failed: requests of which no token could be chosen, with the error; their rows are discarded.
    """

    plan: BatchPlan
    output: ForwardOutput
    table: SlotTable
    requests: Sequence[Request]
    slots: slice | np.ndarray
    token_ids: np.ndarray
    rows: np.ndarray
    indptr: np.ndarray | None = None
    together: LiveRows | None = None
    finished: list[tuple[Request, FinishReason]] = field(default_factory=list)
    failed: list[tuple[Request, NoToken]] = field(default_factory=list)

    @property
    def last_together_s(self) -> float | None:
        """When all rows got the token before this one, None if not at the same time."""
        return self.table.together_s if self.together is not None and self.together is self.table.together else None

    def stamp(self, now: float) -> None:
        """Notes that the rows got their tokens now."""
        self.table.last_token_s[self.slots] = now
        if self.plan.phase is Phase.DECODE:
            self.table.together, self.table.together_s = self.together, now


def commit(replica: Replica, part: Part, plan: BatchPlan, output: ForwardOutput) -> Committed:
    """Applies a plan's output. Rows of requests that ended meanwhile are discarded and their pages returned.

    Args:
        part: what the plan was made of.

    Raises:
        BadOutput: the output does not fit the plan.
    """
    replica.in_flight -= 1
    _note_drafts(replica, plan, output)
    if isinstance(part, PrefillPart):
        return _commit_prefill(replica, part, plan, output)
    if plan.bucket.width > 1:
        return _commit_drafts(replica, part, plan, output)
    return _commit_decode(replica, part, plan, output)


def _note_drafts(replica: Replica, plan: BatchPlan, output: ForwardOutput) -> None:
    if not replica.draft_tokens or output.drafting is None:
        return
    if output.drafting.shape != (plan.num_sequences, len(DraftReport._fields)):
        raise BadOutput(f"drafting has shape {output.drafting.shape}: expected a DraftReport for each row")
    live = plan.emits
    slots, width = plan.slots[: len(live)][live], plan.bucket.width
    replica.drafts.note(replica.table, slots, output.drafting[live], width=width)


def _commit_decode(replica: Replica, part: DecodePart, plan: BatchPlan, output: ForwardOutput) -> Committed:
    table, placed = replica.table, part.rows
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
    committed = Committed(plan, output, table, requests, slots, tokens, rows, together=together, failed=failed)
    ending = part.ending
    if replica.draft_tokens:  # when it was planned, drafts in flight might have held that did not
        ending = np.flatnonzero(table.outputs[slots] >= table.max_outputs[slots]).tolist()
    elif live is not None and ending:
        kept = np.cumsum(live) - 1
        ending = [int(kept[row]) for row in ending if live[row]]
    _find_ends(committed, stop_ids, ending)
    cache = replica.cache
    if cache.prefixes.enabled:
        positions = table.committed[slots]
        due = cache.prefixes.due(positions, 1)
        _commit_cache(replica, [(requests[i], int(positions[i])) for i in due])
    return committed


def _commit_drafts(replica: Replica, part: DecodePart, plan: BatchPlan, output: ForwardOutput) -> Committed:
    """Rows of several tokens each: what a row tried and did not keep is taken back, what follows a stop is dropped."""
    table, placed, drafts = replica.table, part.rows, part.drafts_of_rows
    tokens, bounds = check_runs(plan, output, placed.emits, drafts, replica.vocab_size)
    committed = Committed(plan, output, table, [], np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int64))
    requests: list[Request] = []
    slots: list[int] = []
    counts: list[int] = []  # what each row has in the cache more
    rows: list[int] = []
    ends = [0]
    planned_rows = zip(placed.requests, placed.slots.tolist(), drafts.tolist(), strict=True)
    for i, (request, slot, tried) in enumerate(planned_rows):
        run = tokens[bounds[i] : bounds[i + 1]]
        held = len(run)
        replica.decode.take_back(request, 1 + tried - held)
        kept = _kept(table.stop_ids[slot].tolist(), run) if not request.is_finished else 0
        table.counts[slot] += (0, -held, -1, held, kept, kept, -tried)
        if request.is_finished:
            replica.release_closed(request)
            continue
        if run[-1] < 0:
            committed.failed.append((request, NoToken(FAULTS[RowFault(run[-1])])))
        if not kept:
            continue
        request.output_ids.extend(run[:kept])
        table.last_token[slot] = run[kept - 1]
        requests.append(request)
        slots.append(slot)
        rows += range(bounds[i], bounds[i] + kept)
        counts.append(held)
        if run[kept - 1] in table.stop_ids[slot]:
            committed.finished.append((request, FinishReason.STOP))
        elif table.outputs[slot] >= table.max_outputs[slot]:
            committed.finished.append((request, FinishReason.LENGTH))
        ends.append(len(rows))
    committed.requests, committed.slots = requests, np.array(slots, np.int32)
    committed.rows, committed.indptr = np.array(rows, np.int64), np.array(ends, np.int64)
    committed.token_ids = np.array([tokens[row] for row in rows], np.int32)
    cache = replica.cache
    if cache.prefixes.enabled and requests:
        # What followed a stop is in the cache, too, and nobody's.
        positions = np.minimum(table.committed, table.known)[committed.slots]
        due = cache.prefixes.due(positions, np.array(counts))
        _commit_cache(replica, [(requests[i], int(positions[i])) for i in due])
    return committed


def _kept(stop_ids: list[int], run: list[int]) -> int:
    """How many of a row's tokens count: those up to its first stop, without a fault."""
    stop = next((at for at, token in enumerate(run) if token >= 0 and token in stop_ids), len(run) - 1)
    return stop + 1 if run[stop] >= 0 else stop


def _commit_prefill(replica: Replica, part: PrefillPart, plan: BatchPlan, output: ForwardOutput) -> Committed:
    table, slots, chunks, emits = replica.table, part.slots, part.chunks, plan.emits
    tokens, rows, _ = check_output(plan, output, emits, replica.vocab_size)
    _collect_prompt_logprobs(part, plan, output)
    table.in_flight[slots] -= 1
    table.committed[slots] = [chunk.stop for chunk in chunks]
    table.pending[slots[emits]] -= 1
    sampled = np.zeros(len(chunks), np.int32)
    sampled[emits] = tokens
    live, failed = _live_rows(replica, part.requests, sampled)
    if live is not None:
        _release_closed(replica, part.requests, live)
        rows, tokens = rows[live[emits]], tokens[live[emits]]
        chunks = [chunk for chunk, goes_on in zip(chunks, live.tolist(), strict=True) if goes_on]
    requests = [chunk.request for chunk in chunks if chunk.emits]
    for request, token in zip(requests, tokens.tolist(), strict=True):
        request.output_ids.append(token)
    slots = np.fromiter((request.slot for request in requests), np.int32, len(requests))
    table.known[slots] += 1
    table.outputs[slots] += 1
    table.last_token[slots] = tokens
    committed = Committed(plan, output, table, requests, slots, tokens, rows, failed=failed)
    ending = np.flatnonzero(table.outputs[slots] >= table.max_outputs[slots]).tolist()
    _find_ends(committed, table.stop_ids[slots].T, ending)
    if replica.cache.prefixes.enabled:
        _commit_cache(replica, [(chunk.request, chunk.stop) for chunk in chunks])
    replica.note_room()  # who is done with a prompt promises to take less, and Window rows give a chunk's pages up
    return committed


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
        (requests[i], NoToken(FAULTS[RowFault(int(tokens[i]))]))
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


def _collect_prompt_logprobs(part: PrefillPart, plan: BatchPlan, output: ForwardOutput) -> None:
    indptr = plan.query_indptr
    for row, chunk in enumerate(part.chunks):
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
