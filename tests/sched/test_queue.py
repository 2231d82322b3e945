"""The waiting queue: rank, ageing, and requests that leave from the middle."""

from __future__ import annotations

import random

import numpy as np
import pytest

from resin import Request, SamplingParams
from resin.sched.queue import RequestQueue
from resin.sched.request import RequestState


def request(number: int, *, submitted_s: float = 0.0, priority: float = 0.0) -> Request:
    return Request(
        id=number,
        prompt_ids=np.zeros(1, np.int32),
        params=SamplingParams(),
        seed=0,
        max_outputs=1,
        priority=priority,
        submitted_s=submitted_s,
        state=RequestState.PREFILL,
    )


def drained(queue: RequestQueue) -> list[int]:
    numbers = []
    while queue.heads():
        (best,) = queue.heads()
        queue.pop(best)
        numbers.append(best.id)
    assert len(queue) == 0
    return numbers


def test_first_come_first_served_among_equals() -> None:
    queue = RequestQueue(aging_s=10)
    for number in (3, 1, 2):
        queue.push(request(number, submitted_s=number))
    assert len(queue) == 3 and [waiting.id for waiting in queue.waiting()] == [1, 2, 3]
    assert drained(queue) == [1, 2, 3]


def test_equal_ranks_go_by_id() -> None:
    queue = RequestQueue(aging_s=10)
    for number in (3, 1, 2):
        queue.push(request(number))
    assert drained(queue) == [1, 2, 3]


def test_a_level_of_priority_is_worth_the_ageing_time() -> None:
    queue = RequestQueue(aging_s=10)
    queue.push(request(1, submitted_s=0, priority=0))
    queue.push(request(2, submitted_s=9.9, priority=1))
    queue.push(request(3, submitted_s=10.1, priority=1))
    queue.push(request(4, submitted_s=25, priority=3))
    assert drained(queue) == [4, 2, 1, 3]


def test_nothing_is_overtaken_by_what_comes_later_than_the_bound() -> None:
    """An old request of the lowest priority: whatever is submitted (difference * aging_s) later goes behind it."""
    queue, aging_s = RequestQueue(aging_s=4), 4
    queue.push(request(0, submitted_s=0, priority=-2))
    draw = random.Random(2)
    late = []
    for number in range(1, 300):
        priority = draw.randrange(-2, 6)
        submitted_s = draw.uniform(0, 60)
        if submitted_s > (priority + 2) * aging_s:
            late.append(number)
        queue.push(request(number, submitted_s=submitted_s, priority=priority))
    order = drained(queue)
    assert late and all(order.index(0) < order.index(number) for number in late)


def test_requests_leave_from_anywhere() -> None:
    queue = RequestQueue(aging_s=10)
    sent = [request(number, submitted_s=number) for number in range(6)]
    for each in sent:
        queue.push(each)
    for number in (0, 3, 5):
        queue.remove(sent[number], RequestState.FINISHED)
    assert len(queue) == 3 and [waiting.id for waiting in queue.waiting()] == [1, 2, 4]
    assert all(sent[number].state is RequestState.FINISHED for number in (0, 3, 5))
    assert drained(queue) == [1, 2, 4]
    with pytest.raises(AssertionError):
        queue.remove(sent[0], RequestState.FINISHED)


def test_a_request_that_comes_back_keeps_its_rank() -> None:
    queue = RequestQueue(aging_s=10)
    first, second = request(1, submitted_s=1), request(2, submitted_s=2)
    queue.push(first)
    queue.push(second)
    rank = first.rank
    (popped,) = queue.heads()
    queue.pop(popped)
    assert popped is first
    popped.state = RequestState.DECODE
    queue.push(first)
    assert first.rank == rank and first.state is RequestState.QUEUED and drained(queue) == [1, 2]


def test_random_use_against_a_sorted_list() -> None:
    draw = random.Random(8)
    queue = RequestQueue(aging_s=3)
    plain: list[Request] = []
    for number in range(3000):
        choice = draw.random()
        if choice < 0.5:
            each = request(number, submitted_s=draw.randrange(5), priority=draw.randrange(3))
            queue.push(each)
            plain.append(each)
            assert len(queue._lanes[None]) <= 2 * len(plain) + 64, "those that left pile up"
        elif plain and choice < 0.85:
            each = draw.choice(plain)
            queue.remove(each, RequestState.FINISHED)
            plain.remove(each)
        elif plain:
            best = min(plain, key=lambda each: (each.submitted_s / 3 - each.priority, each.id))
            assert queue.heads() == [best]
            queue.pop(best)
            best.state = RequestState.PREFILL
            plain.remove(best)
        assert len(queue) == len(plain)
    assert {each.id for each in queue.waiting()} == {each.id for each in plain}
