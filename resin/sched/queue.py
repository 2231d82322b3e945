"""The waiting queue: rank order with lazy removal."""

from __future__ import annotations

import heapq

from resin.sched.request import Request, RequestState


class RequestQueue:
    """Requests that wait for admission, best rank first.

    The rank is `submitted_s / aging_s - priority`: one level of priority is worth `aging_s` seconds of waiting, so a
    request can be overtaken only by requests submitted less than (priority difference * aging_s) after it, and nothing
    starves. Ranks never change, and a retracted request comes back with the rank it had.
    """

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._heap: list[tuple[float, int, Request]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, request: Request) -> None:
        request.rank = request.submitted_s / self._aging_s - request.priority
        request.state = RequestState.QUEUED
        if len(self._heap) > 2 * self._size + 64:  # mostly requests that were taken out
            self._heap = [entry for entry in self._heap if entry[2].state is RequestState.QUEUED]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (request.rank, request.id, request))
        self._size += 1

    def peek(self) -> Request | None:
        """The request to admit next, None if the queue is empty."""
        while self._heap and self._heap[0][2].state is not RequestState.QUEUED:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Request:
        request = self.peek()
        assert request is not None
        heapq.heappop(self._heap)
        self._size -= 1
        return request

    def remove(self, request: Request, state: RequestState) -> None:
        """Takes a waiting request out by giving it another state; its heap entry is dropped when it surfaces."""
        assert request.state is RequestState.QUEUED and state is not RequestState.QUEUED
        request.state = state
        self._size -= 1

    def waiting(self) -> list[Request]:
        """Everything that waits, best rank first."""
        return [
            request
            for _, _, request in sorted(self._heap, key=lambda entry: entry[:2])
            if request.state is RequestState.QUEUED
        ]
