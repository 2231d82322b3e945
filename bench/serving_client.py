"""The client of `python -m bench serving`, in a process of its own: many streams over one poll.

python -m bench.serving_client URL STREAMS TOKENS
"""

from __future__ import annotations

import gc
import json
import re
import select
import socket
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any
from urllib.parse import urlsplit

NAP_S = 0.0005
"""Between two turns of the client; part of the latency that it reports."""

_EVENT = re.compile(rb'data: (\{"id".*\})\n\n')


def run_client(url: str, streams: int, tokens: int) -> dict[str, Any]:
    """Opens all streams and reads them to their ends. What arrived is parsed afterwards, so that reading keeps pace."""
    place = urlsplit(url)
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": tokens, "stream": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    gc.disable()  # the parts pile up, and walking through them again and again would take the client's core
    sockets: dict[int, tuple[socket.socket, list[tuple[float, bytes]]]] = {}
    poll = select.epoll()
    for _ in range(streams):
        connection = socket.create_connection((place.hostname or "", place.port or 0))
        connection.sendall(head.encode() + body)
        sockets[connection.fileno()] = connection, []
        poll.register(connection, select.EPOLLIN)
    cpu_started_s = time.process_time()
    running = streams
    while running:
        for number, _ in poll.poll():
            connection, parts = sockets[number]
            if data := connection.recv(1 << 16):
                parts.append((time.perf_counter(), data))
            else:
                poll.unregister(number)
                connection.close()
                running -= 1
        # Many sockets a turn: woken for each, the client would cost the server's core as much as the server does.
        time.sleep(NAP_S)
    cpu_s = time.process_time() - cpu_started_s
    read = [read_parts(parts, tokens) for _, parts in sockets.values()]
    arrivals = [arrival for stream, _ in read for arrival in stream]
    # Rates count only while every stream runs: streams are let in four a step, and end one after another.
    begin_s, end_s = max(stream[0][1] for stream, _ in read), min(stream[-1][1] for stream, _ in read)
    steady = [arrival for arrival in arrivals if begin_s <= arrival[1] < end_s]
    if len(steady) < len(arrivals) / 2:  # too short for that: the whole time instead
        begin_s, end_s = min(stream[0][1] for stream, _ in read), max(stream[-1][1] for stream, _ in read)
        steady = arrivals
    return {
        "tokens": len(arrivals),
        "events": sum(events for _, events in read),
        "cpu_s": cpu_s,
        "tokens_per_s": len(steady) / (end_s - begin_s),
        "arrivals": steady[:: max(1, len(steady) // 100_000)],
    }


def read_parts(parts: Sequence[tuple[float, bytes]], tokens: int) -> tuple[list[tuple[int, float]], int]:
    """Step number and arrival of every token of a stream, and how many events brought them.

    Raises:
        RuntimeError: not all tokens came, or not in the order of their steps.
    """
    ends = list(accumulate(len(data) for _, data in parts))
    arrivals: list[tuple[int, float]] = []
    events = 0
    for event in _EVENT.finditer(b"".join(data for _, data in parts)):
        numbers = json.loads(event[1])["choices"][0]["delta"].get("content", "").split()
        events += bool(numbers)
        arrived_s = parts[bisect_left(ends, event.end())][0]
        arrivals += ((int(number), arrived_s) for number in numbers)
    if len(arrivals) != tokens or any(later[0] <= earlier[0] for earlier, later in pairwise(arrivals)):
        raise RuntimeError(f"a stream brought {len(arrivals)} tokens, expected {tokens} in order")
    return arrivals, events


if __name__ == "__main__":
    print(json.dumps(run_client(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
