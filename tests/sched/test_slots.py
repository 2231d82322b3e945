"""The slot table: a row is wholly the new request's, whatever the last one left."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from resin import Request, RowFlag, SamplingParams
from resin.plan.layout import SEQUENCE_FLOATS
from resin.sched.slots import SlotTable


def request(number: int = 0, **settings: Any) -> Request:
    prompt = np.arange(5, dtype=np.int32)
    return Request(number, prompt, SamplingParams(**settings), seed=settings.get("seed") or 0, max_outputs=7)


def test_slots_are_given_out_once_and_come_back() -> None:
    table = SlotTable(3, 1)
    sent = [request(number) for number in range(3)]
    for each in sent:
        table.take(each)
    assert sorted(each.slot for each in sent) == [0, 1, 2] and table.free == 0
    assert all(table.requests[each.slot] is each for each in sent)
    slot = sent[1].slot
    table.give_back(sent[1])
    assert (sent[1].slot, table.requests[slot], table.free) == (-1, None, 1)
    again = request(9)
    table.take(again)
    assert again.slot == slot and table.requests[3] is None, "the last row is scratch"


def test_only_penalised_requests_take_rows_of_counts() -> None:
    table = SlotTable(4, 2)
    plain, first, second, third = (
        request(),
        request(presence_penalty=1),
        request(repetition_penalty=2),
        request(min_p=1),
    )
    for each in (plain, first, second):
        assert table.has_room(each)
        table.take(each)
    assert table.count_row[plain.slot] == 2, "scratch"
    assert {int(table.count_row[first.slot]), int(table.count_row[second.slot])} == {0, 1}
    assert table.has_room(third) and not table.has_room(request(frequency_penalty=1))
    freed = int(table.count_row[first.slot])
    table.give_back(first)
    table.take(third)
    assert table.count_row[third.slot] == 2, "the slot's last request had counts"
    table.take(again := request(frequency_penalty=1))
    assert table.count_row[again.slot] == freed and not table.has_room(plain), "no slot"


def test_a_new_request_finds_nothing_of_the_old_one() -> None:
    table = SlotTable(1, 1)
    full = request(
        temperature=0.7, top_k=5, top_p=0.5, min_p=0.1, seed=2**40 + 7, logprobs=4, presence_penalty=1,
        frequency_penalty=0.5, repetition_penalty=2, logit_bias={1: 1.0}, min_output_tokens=3, stop_token_ids=(1, 2),
        allowed_tokens=lambda output: None,
    )  # fmt: skip
    full.output_ids = [1, 2]
    table.take(full)
    table.computed[0] = table.committed[0] = table.pending[0] = table.in_flight[0] = 9
    table.last_step[0], table.last_token_s[0] = 5, 2.0
    table.give_back(full)
    table.take(plain := request(temperature=0))
    fresh = SlotTable(1, 1)
    fresh.take(other := request(temperature=0))
    assert plain.slot == other.slot == 0
    for name, column in vars(fresh).items():
        if isinstance(column, np.ndarray) and name != "last_token":
            assert np.array_equal(column[0], getattr(table, name)[0]), name
    for name, column in fresh.sampling.items():
        assert np.array_equal(column[0], table.sampling[name][0]), name


def test_a_row_tells_what_was_asked() -> None:
    table = SlotTable(2, 1)
    each = request(seed=(3 << 32) + 2**31 + 5, top_k=4, stop_token_ids=(8, 9), min_output_tokens=2, logprobs=6)
    each.output_ids = [1, 2, 3]
    table.take(each)
    slot = each.slot
    assert (table.known[slot], table.outputs[slot], table.max_outputs[slot], table.min_outputs[slot]) == (8, 3, 7, 2)
    assert table.stop_ids[slot].tolist() == [8, 9] + [-1] * 14
    assert table.top_logprobs[slot] == 6 and table.sampling["top_k"][slot] == 4
    low, high = table.sampling["seed_low"][slot], table.sampling["seed_high"][slot]
    assert (int(low) & 0xFFFFFFFF, int(high)) == (2**31 + 5, 3)
    for name in SEQUENCE_FLOATS:
        assert table.sampling[name][slot] == np.float32(getattr(each.params, name))


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**63), 2**63, 2**64 - 1])
def test_seeds_travel_as_64_bits(seed: int) -> None:
    table = SlotTable(1, 1)
    each = dataclasses.replace(request(), seed=seed)
    table.take(each)
    low, high = (int(table.sampling[name][0]) & 0xFFFFFFFF for name in ("seed_low", "seed_high"))
    assert (high << 32 | low) == seed % 2**64


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.5}, RowFlag(0)),
        ({}, RowFlag(0)),
        ({"presence_penalty": 0.1}, RowFlag.PENALTIES),
        ({"frequency_penalty": -0.1}, RowFlag.PENALTIES),
        ({"repetition_penalty": 0.9}, RowFlag.PENALTIES),
        ({"logit_bias": {1: 0.0}}, RowFlag.BIAS),
        ({"allowed_tokens": lambda output: None}, RowFlag.MASK),
        ({"logprobs": 0}, RowFlag.LOGPROBS),
        ({"min_output_tokens": 3, "stop_token_ids": (1,), "prompt_logprobs": 1}, RowFlag(0)),
    ],
)
def test_flags_of_a_policy(settings: dict[str, Any], flags: RowFlag) -> None:
    table = SlotTable(1, 1)
    table.take(request(**settings))
    assert RowFlag(int(table.flags[0])) == flags


def test_stop_tokens_of_a_request_that_ignores_them_are_not_looked_for() -> None:
    table = SlotTable(1, 1)
    table.take(request(stop_token_ids=(8, 9), ignore_stop=True))
    assert (table.stop_ids[0] == -1).all()


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", 1e-300), ("temperature", 1e-40), ("top_p", 1e-300), ("top_p", 1e-40),
                         ("repetition_penalty", 1e-300), ("repetition_penalty", 1e-40)],
)  # fmt: skip
def test_values_too_small_for_float32_do_no_harm(field: str, value: float) -> None:
    """A division by zero or an empty set of tokens would choose any token."""
    table = SlotTable(1, 1)
    table.take(request(**{field: value}))
    column = table.sampling[field][0]
    smallest = np.finfo(np.float32).smallest_normal
    assert (column >= smallest and np.isfinite(np.float32(1e4) / column)) or (field == "temperature" and column == 0)
