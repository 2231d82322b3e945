"""Resident plans are the planner's own, exact for their bucket, on scattered pages."""

from __future__ import annotations

import numpy as np
import pytest

from bench.cases import Case, resident_plan, scatter_pages, with_flags
from bench.driven import growth_tokens, slack_tokens
from resin import Phase, RowFlag, SamplingParams
from tests.bench.tiny_setup import tiny_spec

PARAMS = SamplingParams(temperature=0.8, top_p=0.9)
CASES = [Case(Phase.DECODE, 3, 40), Case(Phase.DECODE, 1, 2), Case(Phase.PREFILL, 2, 24), Case(Phase.PREFILL, 1, 1)]


@pytest.mark.parametrize("family", ["llama", "lfm2", "gemma3_text"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_plans_are_exact(family: str, case: Case) -> None:
    config = tiny_spec(family, [case]).config
    num_pages = 1 + case.pages(config)
    plan = resident_plan(case, config, num_pages, PARAMS)
    tokens = case.sequences * (case.context_tokens if case.phase is Phase.PREFILL else 1)
    assert plan.bucket == case.bucket(config)
    assert (plan.num_sequences, plan.num_tokens) == (plan.bucket.sequences, plan.bucket.tokens)
    assert (plan.num_sequences, plan.num_tokens) == (case.sequences, tokens)
    assert plan.seq_lens.tolist() == [case.context_tokens] * case.sequences
    flags = RowFlag.EMIT
    assert ((plan.row_flags & flags) == flags).all()
    if case.phase is Phase.DECODE:
        # Beside an engine the plan leaves the lengths of its sequences, which are in their slots.
        assert (plan.slots == config.max_sequences).all()
    assert len(set(plan.sampling["seed_low"].tolist())) == case.sequences
    for group in plan.groups:
        pages = group.output_pages if group.page_ids is None else group.page_ids[: group.page_indptr[-1]]
        used = np.unique(pages)
        assert used.size == np.size(pages)
        assert 1 <= used[0] and used[-1] < num_pages


def test_scattered_pages_keep_the_plan_and_lose_their_order() -> None:
    case = Case(Phase.DECODE, 4, 400)
    config = tiny_spec("llama", [case]).config
    num_pages = 1 + case.pages(config)
    plan = resident_plan(case, config, num_pages, PARAMS)
    (group,) = plan.groups
    assert (np.diff(group.page_ids) != 1).mean() > 0.9
    # A token is appended to the last page of its own row.
    last = group.page_ids[group.page_indptr[1:] - 1]
    assert plan.append_places(group.name)[0].tolist() == last.tolist()
    again = scatter_pages(plan, config, num_pages, seed=1)
    assert again.positions.tolist() == plan.positions.tolist()
    assert again.groups[0].page_ids.tolist() != group.page_ids.tolist()


def test_flags_change_on_live_rows_and_in_the_header() -> None:
    case = Case(Phase.DECODE, 2, 20)
    config = tiny_spec("llama", [case]).config
    plan = resident_plan(case, config, 1 + case.pages(config), PARAMS)
    changed = with_flags(plan, config, add=RowFlag.LOGPROBS, drop=RowFlag.EMIT, is_greedy=True)
    assert changed.wants_logprobs and not plan.wants_logprobs
    assert not (changed.row_flags & RowFlag.EMIT).any()
    assert not changed.header.any_flags & RowFlag.EMIT
    assert (plan.row_flags & RowFlag.EMIT).all() and not (plan.row_flags & RowFlag.FROM_SLOT).any()
    assert plan.sampling["temperature"].all() and not changed.sampling["temperature"].any()


@pytest.mark.parametrize("context", [1, 10, 1000])
def test_slack_holds_what_driving_adds(context: int) -> None:
    growth = growth_tokens(5, 32)
    start = max(1, context - growth // 2)
    assert start + growth <= context + slack_tokens(context, 5, 32)
