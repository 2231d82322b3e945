"""Routing: which replicas a request tries, in which order."""

from __future__ import annotations

from collections.abc import Sequence

from resin.sched.policy import Routing
from resin.sched.replica import Replica
from resin.sched.request import Request

# Share of a replica's slots by which one with a longer cached prefix may be fuller than the emptiest.
MAX_SLOT_LEAD = 0.25


class Router:
    """Sends requests where the longest prefix of theirs is cached, unless much more runs there, else by a policy.

    Args:
        max_sequences: slots of a replica.
    """

    def __init__(self, replicas: Sequence[Replica], routing: Routing, max_sequences: int) -> None:
        self._replicas = replicas
        self._routing = routing
        self._max_lead = max(1, int(MAX_SLOT_LEAD * max_sequences))
        self._turn = 0

    def order(self, request: Request, replicas: Sequence[Replica]) -> Sequence[Replica]:
        """Those of the replicas that may run the request, best first.

        Args:
            replicas: those that take requests now, in their order.
        """
        if len(self._replicas) == 1:
            return replicas
        if request.replica is not None:
            return [replica for replica in replicas if replica.index == request.replica]
        most = min(replica.num_running for replica in self._replicas) + self._max_lead
        hits = {
            replica.index: replica.cache.prefixes.peek(request) if replica.num_running <= most else 0
            for replica in replicas
        }
        return sorted(replicas, key=lambda replica: (-hits[replica.index], self._key(replica)))

    def note(self, replica: Replica) -> None:
        """The replica got a request."""
        self._turn = replica.index + 1

    def _key(self, replica: Replica) -> tuple[int, int]:
        load = replica.num_running if self._routing is Routing.LEAST_LOADED else 0
        return load, (replica.index - self._turn) % len(self._replicas)
