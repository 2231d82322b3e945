"""`python -m bench replay FILE`: executes a plan recording again and reports the first difference.

`resin serve MODEL --record FILE` writes one, as do `resin generate`, `resin chat` and `Engine(runner, record=FILE)`. It
is complete when the engine is closed, and readable up to the last whole record before.

Without a runner it lists the requests of the recording, or with `--request ID` everything that happened to one of them.
With `--model` (or `--runner package.module:factory`, called with the recorded RunnerConfig) every plan runs again, in
order. `--only ID` runs just the rows of one request and of the requests whose pages it read, in the smallest buckets:
a bad request out of a long run comes back in seconds, and one that then turns out right was hurt by its neighbours.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.arguments import input_file
from resin import (
    BatchPlan,
    ForwardOutput,
    InvalidRequest,
    Phase,
    ResinError,
    RowFlag,
    RunnerConfig,
    SlotLoad,
    StateGroup,
)
from resin.plan import NOBODY, RunnerParts, StepPlan, build_plan, plan_layout, smallest_bucket
from resin.plan.cache import FP8_DTYPE, fp8_scales
from resin.plan.layout import SEQUENCE_FLOATS, SEQUENCE_INTS, Header
from resin.record import Recording, Step


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a replay left the recording."""

    step: int
    request_id: int
    what: str
    recorded: object
    replayed: object
    plan: BatchPlan

    def __str__(self) -> str:
        mates = [request for _, request in _rows(self.plan) if request != self.request_id]
        return (
            f"step {self.step}, request {self.request_id}: {self.what} was {self.recorded}, now {self.replayed}\n"
            f"  in {self.plan.bucket}, beside requests {mates or 'none'}"
        )


def replay(steps: Sequence[Step], runner: Any, *, logprob_tolerance: float) -> tuple[int, Difference | None]:
    """Runs the plans in order, those of all replicas of a step at once; the number of plans that agreed, and the first
    difference."""
    replicas = RunnerParts.of(runner).config.replicas
    for first in range(0, len(steps) - replicas + 1, replicas):
        together = steps[first : first + replicas]
        plans = tuple(step.plan for step in together)
        found = runner.forward(StepPlan(plans[0].bucket, plans)) if replicas > 1 else [runner.forward(plans[0])]
        for count, (step, again) in enumerate(zip(together, found, strict=True), first):
            if step.output is not None:
                difference = compare(step.plan, step.output, again, logprob_tolerance)
                if difference is not None:
                    return count, difference
    return len(steps), None


def compare(
    plan: BatchPlan, recorded: ForwardOutput, again: ForwardOutput, logprob_tolerance: float
) -> Difference | None:
    """The first row whose tokens differ, or whose logprobs differ by more than the tolerance."""
    for row in range(plan.num_sequences):
        before, after = row_tokens(recorded, row), row_tokens(again, row)
        if plan.row_flags[row] & RowFlag.EMIT and before != after:
            return Difference(plan.step, plan.request_ids[row], "token", before, after, plan)
    for name in ("logprobs", "prompt_logprobs"):
        before_column, after_column = getattr(recorded, name), getattr(again, name)
        if before_column is None or after_column is None:
            continue
        worst = int(np.argmax(np.abs(before_column - after_column))) if len(before_column) else -1
        if worst >= 0 and abs(float(before_column[worst] - after_column[worst])) > logprob_tolerance:
            indptr = recorded.token_indptr if name == "logprobs" else plan.query_indptr
            row = int(np.searchsorted(indptr, worst, side="right")) - 1
            values = float(before_column[worst]), float(after_column[worst])
            return Difference(plan.step, plan.request_ids[row], f"{name}[{worst}]", *values, plan)
    return None


def row_tokens(output: ForwardOutput, row: int) -> list[int]:
    first, stop = int(output.token_indptr[row]), int(output.token_indptr[row + 1])
    return [int(token) for token in output.token_ids[first:stop]]


# -- one request ------------------------------------------------------------------------------------------------------


def requests_read_by(recording: Recording, request_id: int) -> set[int]:
    """The request and all whose pages it read, directly or through others."""
    reads: dict[int, set[int]] = {}
    writer: dict[int, int] = {}
    for plan, _ in recording.steps:
        for row, request in _rows(plan):
            sources = reads.setdefault(request, set())
            for group in plan.groups:
                sources |= {writer[page] for page in _pages_read(group, plan, row) if page in writer}
        for row, request in _rows(plan):
            for group in plan.groups:
                writer |= dict.fromkeys(_pages_written(group, plan, row), request)
    wanted, fresh = {request_id}, [request_id]
    while fresh:
        found = reads.get(fresh.pop(), set()) - wanted
        wanted |= found
        fresh += found
    return wanted


def _rows(plan: BatchPlan) -> list[tuple[int, int]]:
    """Row and request of every live row."""
    return [(row, request) for row, request in enumerate(plan.request_ids) if request != NOBODY]


def _pages_read(group: Any, plan: BatchPlan, row: int) -> list[int]:
    if group.input_pages is not None:
        fresh = plan.row_flags[row] & RowFlag.FRESH_STATE
        return [] if fresh else group.input_pages[row].tolist()
    return group.page_ids[group.page_indptr[row] : group.page_indptr[row + 1]].tolist()


def _pages_written(group: Any, plan: BatchPlan, row: int) -> list[int]:
    if group.output_pages is not None:
        return group.output_pages[row].tolist()
    pages, _ = plan.append_places(group.name)
    return pages[plan.query_indptr[row] : plan.query_indptr[row + 1]].tolist()


def select_requests(recording: Recording, wanted: set[int]) -> Iterator[Step]:
    """The recorded steps with only the rows of some requests, in the smallest buckets that hold them."""
    for plan, output in recording.steps:
        rows = [row for row, request in enumerate(plan.request_ids) if request in wanted]
        if rows:
            selected = select_rows(recording.config, plan, rows)
            yield Step(selected, None if output is None else _select_output(plan, output, rows))


def select_rows(config: RunnerConfig, plan: BatchPlan, rows: Sequence[int]) -> BatchPlan:
    """The plan with only some of its rows.

    Raises:
        InvalidRequest: no bucket holds them (cannot happen with the buckets that the plan was made for).
    """
    tokens = np.concatenate([np.arange(plan.query_indptr[row], plan.query_indptr[row + 1]) for row in rows])
    needs = [
        0 if group.page_indptr is None else sum(int(np.diff(group.page_indptr[row : row + 2])[0]) for row in rows)
        for group in plan.groups
    ]
    bucket = smallest_bucket(config.buckets, plan.phase, len(rows), len(tokens), needs, width=plan.bucket.width)
    if bucket is None:
        raise InvalidRequest("rows", rows, "rows that fit a bucket")
    layout = plan_layout(bucket, config.groups, config.geometry)
    buffer = np.zeros(layout.words, np.int32)
    columns = layout.views(buffer)
    count = len(rows)
    columns["slots"][:] = config.max_sequences
    columns["next_token"][:] = -1
    columns["token_ids"][: len(tokens)] = plan.token_ids[tokens]
    _fill_indptr(columns["query_indptr"], plan.query_indptr, rows)
    drafts = ("drafts",) if bucket.width > 1 else ()
    for name in (*SEQUENCE_INTS, *SEQUENCE_FLOATS, *drafts):
        columns[name][:count] = plan.column(name)[list(rows)]
    for spec, fill in plan.group_specs:
        if isinstance(spec, StateGroup):
            width = fill.pages_per_state
            for side in ("input", "output"):
                name = f"{side}_pages:{spec.name}"
                columns[name][: count * width] = plan.column(name).reshape(-1, width)[list(rows)].reshape(-1)
            continue
        old = plan.column(f"page_indptr:{spec.name}")
        pages = [plan.column(f"page_ids:{spec.name}")[old[row] : old[row + 1]] for row in rows]
        _fill_indptr(columns[f"page_indptr:{spec.name}"], old, rows)
        columns[f"page_ids:{spec.name}"][: sum(map(len, pages))] = np.concatenate(pages)
        columns[f"first_position:{spec.name}"][:count] = plan.column(f"first_position:{spec.name}")[list(rows)]
    flags = int(np.bitwise_or.reduce(columns["row_flags"]))
    columns["header"][:] = Header(count, len(tokens), flags, plan.top_logprobs)
    masks = None
    if plan.allowed_masks is not None and flags & RowFlag.MASK:
        masks = plan.allowed_masks[np.isin(plan.masked_rows, rows)]
    slots = set(columns["slots"][:count].tolist())
    loads: tuple[SlotLoad, ...] = tuple(load for load in plan.slot_loads if load.slot in slots)
    ids = tuple(plan.request_ids[row] for row in rows)
    return build_plan(config, bucket, buffer, step=plan.step, slot_loads=loads, allowed_masks=masks, request_ids=ids)


def _fill_indptr(target: np.ndarray, source: np.ndarray, rows: Sequence[int]) -> None:
    lengths = np.array([source[row + 1] - source[row] for row in rows])
    target[1 : len(rows) + 1] = np.cumsum(lengths)
    target[len(rows) + 1 :] = target[len(rows)]


def _select_output(plan: BatchPlan, output: ForwardOutput, rows: Sequence[int]) -> ForwardOutput:
    tokens = [row_tokens(output, row) for row in rows]
    flat = [token for row in tokens for token in row]
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in tokens])])
    return ForwardOutput(np.asarray(flat, np.int64), indptr)


def timeline(recording: Recording, request_id: int) -> Iterator[str]:
    """One line for each step that held the request."""
    for plan, output in recording.steps:
        if request_id not in plan.request_ids:
            continue
        row = plan.request_ids.index(request_id)
        first, stop = int(plan.query_indptr[row]), int(plan.query_indptr[row + 1])
        flags = RowFlag(int(plan.row_flags[row]))
        pages = {group.name: _describe_pages(group, plan, row) for group in plan.groups}
        emitted = row_tokens(output, row) if output is not None else "never collected"
        yield (
            f"step {plan.step:6} {plan.phase.name.lower():7} row {row}/{plan.num_sequences} of {plan.bucket}  "
            f"positions {int(plan.positions[first])}..{int(plan.positions[stop - 1])}  slot {int(plan.slots[row])}  "
            f"{flags.name or 0}  {pages}  -> {emitted}"
        )


def _describe_pages(group: Any, plan: BatchPlan, row: int) -> str:
    if group.input_pages is not None:
        return f"{group.input_pages[row].tolist()} -> {group.output_pages[row].tolist()}"
    pages = _pages_read(group, plan, row)
    return f"{len(pages)} pages, last {pages[-1]}"


def summary(recording: Recording) -> Iterator[str]:
    """One line for each request."""
    steps: dict[int, list[BatchPlan]] = {}
    for plan, _ in recording.steps:
        for _, request in _rows(plan):
            steps.setdefault(request, []).append(plan)
    yield f"{len(recording.steps)} steps, {len(steps)} requests, arena of {recording.arena.num_pages} pages"
    for request, plans in sorted(steps.items()):
        decode = sum(plan.phase is Phase.DECODE for plan in plans)
        span = f"steps {plans[0].step} to {plans[-1].step}"
        yield f"request {request}: {span}, {len(plans) - decode} prefill, {decode} decode"


# -- command ----------------------------------------------------------------------------------------------------------


def build_runner(args: argparse.Namespace, recording: Recording) -> Any:
    """The runner to replay on, with the recorded arena.

    Raises:
        InvalidRequest: its cache groups or slots differ from the recording's.
    """
    if args.runner:
        module, _, name = args.runner.partition(":")
        runner = getattr(importlib.import_module(module), name)(recording.config)
    else:
        from resin.runtime import RunnerOptions, load_runner

        config = recording.config
        scales = list(fp8_scales(config.groups).values())
        options = RunnerOptions(
            max_sequences=config.max_sequences,
            max_context_tokens=config.max_context_tokens,
            decode_sequences=config.bucket_sizes(Phase.DECODE),
            prefill_tokens=config.bucket_sizes(Phase.PREFILL),
            cache_dtype=config.arena_dtype,
            dp=config.replicas,
            kv_dtype=FP8_DTYPE if scales else None,
            kv_scale=scales[0] if scales else 1.0,
        )
        runner = load_runner(args.model, options)
    parts = RunnerParts.of(runner)
    for name in ("groups", "geometry", "max_sequences", "replicas"):
        mine, theirs = getattr(parts.config, name), getattr(recording.config, name)
        if mine != theirs:
            raise InvalidRequest(f"runner.config.{name}", mine, f"the recording's {theirs}")
    if parts.bind is not None:
        parts.bind(recording.arena)
    return runner


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recording", type=input_file, help="file of resin serve --record, or of Engine(record=...)")
    parser.add_argument("--model", help="registered name, path or hub id of the model to run the plans on")
    parser.add_argument("--runner", help="package.module:factory instead of a model")
    parser.add_argument("--request", type=int, metavar="ID", help="list what happened to one request")
    parser.add_argument("--only", type=int, metavar="ID", help="replay one request and those whose pages it read")
    parser.add_argument("--logprob-tolerance", type=float, default=1e-3, help="nats (default 0.001)")
    args = parser.parse_args(argv)
    try:
        recording = Recording(args.recording)
        if not (args.model or args.runner):
            lines = summary(recording) if args.request is None else timeline(recording, args.request)
            print("\n".join(lines))
            return 0
        runner = build_runner(args, recording)
    except (ResinError, OSError) as error:
        print(f"error: {error}")
        return 2
    steps: Sequence[Step] = recording.steps
    if args.only is not None and recording.config.replicas > 1:
        print("error: --only replays recordings of one replica")
        return 2
    if args.only is not None:
        wanted = requests_read_by(recording, args.only)
        print(f"requests {sorted(wanted)}")
        steps = list(select_requests(recording, wanted))
    started = time.perf_counter()
    agreed, difference = replay(steps, runner, logprob_tolerance=args.logprob_tolerance)
    print(f"{agreed} of {len(steps)} steps agree ({time.perf_counter() - started:.1f} s)")
    if difference is not None:
        print(difference)
        return 1
    return 0
