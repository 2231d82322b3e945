"""Commit: a collected output becomes tokens, finished requests and published pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from resin.plan import BatchPlan, ForwardOutput, ResinError, RowFlag
from resin.sched.request import FinishReason, PromptLogprobs, Request
from resin.sched.scheduler import PlannedStep, Scheduler


class BadOutput(ResinError):
    """A runner returned something that does not match its plan."""


@dataclass(slots=True)
class Committed:
    """What one plan brought.

    Attributes:
        requests: rows that emitted a token, discarded rows left out.
        slots: int32 [R], their slots (a finished request's slot may be free again).
        token_ids: int32 [R].
        rows: int64 [R], index of each token in the output's columns.
        finished: requests that ended, with the reason.
    """

    requests: list[Request]
    slots: np.ndarray
    token_ids: np.ndarray
    rows: np.ndarray
    finished: list[tuple[Request, FinishReason]] = field(default_factory=list)


def commit(scheduler: Scheduler, planned: PlannedStep, output: ForwardOutput) -> Committed:
    """Applies a plan's output. Rows of requests that ended meanwhile are discarded and their pages returned.

    Raises:
        BadOutput: the output does not fit the plan.
    """
    emits = planned.plan.emits
    rows = check_output(planned.plan, output, emits, scheduler.config.vocab_size)
    table, slots = scheduler.table, planned.slots
    table.in_flight[slots] -= 1
    if planned.chunks is None:
        table.committed[slots] += 1
    else:
        table.committed[slots] = [chunk.stop for chunk in planned.chunks]
        _collect_prompt_logprobs(planned, output)
    emitting = slots if emits.all() else slots[emits]
    table.pending[emitting] -= 1
    live = _live_rows(scheduler, planned)
    tokens = np.asarray(output.token_ids)[rows].astype(np.int32, copy=False)
    if live is not None:
        keep = live[emits]
        rows, tokens, emitting = rows[keep], tokens[keep], emitting[keep]
    committed = _append(scheduler, planned, emits if live is None else emits & live, emitting, tokens, rows)
    _commit_cache(scheduler, planned, live)
    return committed


def check_output(plan: BatchPlan, output: ForwardOutput, emits: np.ndarray, vocab_size: int) -> np.ndarray:
    """The index of each emitting row's token in the output.

    Raises:
        BadOutput: wrong shapes, not exactly one token for an emitting row, or an id outside the vocabulary.
    """
    indptr, tokens = np.asarray(output.token_indptr), np.asarray(output.token_ids)
    if indptr.shape != (plan.num_sequences + 1,):
        raise BadOutput(f"token_indptr has shape {indptr.shape}: expected ({plan.num_sequences + 1},)")
    indptr = indptr.astype(np.int64)
    if indptr[0] != 0 or indptr[-1] != tokens.size or tokens.ndim != 1:
        raise BadOutput(f"token_indptr spans {indptr[0]} to {indptr[-1]}: expected 0 to {tokens.size} token_ids")
    lengths = np.diff(indptr)
    if (lengths[emits] != 1).any() or (lengths < 0).any():
        raise BadOutput("token_indptr gives an emitting row other than one token")
    rows = indptr[:-1] if emits.all() else indptr[:-1][emits]
    chosen = tokens[rows]
    if vocab_size and chosen.size and (int(chosen.max()) >= vocab_size or int(chosen.min()) < 0):
        raise BadOutput(f"token_ids reach {int(chosen.max())}: expected ids in [0, {vocab_size - 1}]")
    return rows


def _live_rows(scheduler: Scheduler, planned: PlannedStep) -> np.ndarray | None:
    """bool [n] with False for rows whose request ended, None if all go on; frees what waited for this plan."""
    if not scheduler.closing:
        return None
    live = np.array([not request.is_finished for request in planned.requests], np.bool_)
    for row in np.flatnonzero(~live).tolist():
        scheduler.release_closed(planned.requests[row])
    return None if live.all() else live


def _append(
    scheduler: Scheduler,
    planned: PlannedStep,
    emitted: np.ndarray,
    slots: np.ndarray,
    tokens: np.ndarray,
    rows: np.ndarray,
) -> Committed:
    table, cohort = scheduler.table, planned.cohort
    table.known[slots] += 1
    table.outputs[slots] += 1
    table.last_token[slots] = tokens
    whole = cohort is not None and len(tokens) == len(cohort)
    if cohort is not None and whole:
        requests = cohort.requests
        for append, token in zip(cohort.append_output, tokens.tolist(), strict=True):
            append(token)
    else:
        requests = [planned.requests[row] for row in np.flatnonzero(emitted).tolist()]
        for request, token in zip(requests, tokens.tolist(), strict=True):
            request.output_ids.append(token)
    full = table.outputs[slots] >= table.max_outputs[slots]
    stopped = (table.stop_ids[slots] == tokens[:, None]).any(axis=1) if cohort is None or cohort.has_stops else None
    ended = full if stopped is None else full | stopped
    committed = Committed(requests, slots, tokens, rows)
    for i in np.flatnonzero(ended).tolist():
        reason = FinishReason.STOP if stopped is not None and stopped[i] else FinishReason.LENGTH
        committed.finished.append((requests[i], reason))
    return committed


def _commit_cache(scheduler: Scheduler, planned: PlannedStep, live: np.ndarray | None) -> None:
    """Publishes and trims the rows whose position calls for it, before anything of them is released."""
    cache, table, slots = scheduler.cache, scheduler.table, planned.slots
    if not cache.needs_commits:
        return
    positions = table.committed[slots]
    due = np.ones(len(slots), np.bool_) if planned.chunks is not None else cache.commits_at(positions)
    if live is not None:
        due &= live
    for row in np.flatnonzero(due).tolist():
        request = planned.requests[row]
        cache.commit(request, int(positions[row]), int(table.computed[slots[row]]))
        scheduler.rows_changed(request)


def _collect_prompt_logprobs(planned: PlannedStep, output: ForwardOutput) -> None:
    assert planned.chunks is not None
    indptr = planned.plan.query_indptr
    for row, chunk in enumerate(planned.chunks):
        wanted = chunk.request.prompt_logprobs
        if wanted is None or not planned.plan.row_flags[row] & RowFlag.PROMPT_LOGPROBS:
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
