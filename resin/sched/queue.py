"""The waiting queue: rank order with lazy removal."""

from __future__ import annotations

import heapq
from itertools import chain

from resin.sched.request import Request, RequestState


class RequestQueue:
    """Requests that wait for admission, best rank first.

    The rank is `submitted_s / aging_s - priority`: one level of priority is worth `aging_s` seconds of waiting, so a
    request can be overtaken only by requests submitted less than (priority difference * aging_s) after it, and nothing
    starves. Ranks never change, and a retracted request comes back with the rank it had.

    Requests bound to a replica wait in a lane of their own, so that one whose replica is full holds up no other
    replica.
    """

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._lanes: dict[int | None, list[tuple[float, int, Request]]] = {}  # heaps
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, request: Request) -> None:
        request.rank = request.submitted_s / self._aging_s - request.priority
        request.state = RequestState.QUEUED
        lane = self._lanes.setdefault(request.replica, [])
        if len(lane) > 2 * self._size + 64:  # mostly requests that were taken out
            lane[:] = [entry for entry in lane if entry[2].state is RequestState.QUEUED]
            heapq.heapify(lane)
        heapq.heappush(lane, (request.rank, request.id, request))
        self._size += 1

    def heads(self) -> list[Request]:
        """The first request of each lane, best rank first."""
        heads: list[tuple[float, int, Request]] = []
        for lane in self._lanes.values():
            while lane and lane[0][2].state is not RequestState.QUEUED:
                heapq.heappop(lane)
            heads += lane[:1]
        heads.sort(key=lambda entry: entry[:2])
        return [request for _, _, request in heads]

    def pop(self, request: Request) -> None:
        """Takes out a head."""
        _, _, head = heapq.heappop(self._lanes[request.replica])
        assert head is request
        self._size -= 1

    def remove(self, request: Request, state: RequestState) -> None:
        """Takes a waiting request out by giving it another state; its heap entry is dropped when it surfaces."""
        assert request.state is RequestState.QUEUED and state is not RequestState.QUEUED
        request.state = state
        self._size -= 1

    def waiting(self) -> list[Request]:
        """Everything that waits, best rank first."""
        return [
            request
            for _, _, request in sorted(chain(*self._lanes.values()), key=lambda entry: entry[:2])
            if request.state is RequestState.QUEUED
        ]
