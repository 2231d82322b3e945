"""Clients choose a replica by field or header, and else the server spreads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from resin import ForwardOutput
from resin.plan import StepPlan
from serve import HttpServer
from tests.serve.running import running_server
from tests.serve.scripted_runner import ScriptedRunner
from tests.serve.test_invalid_requests import post
from tests.serve.test_limits_and_faults import metrics

HEADER = "resin-routed-dp-rank"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8},
}


class TwoReplicas(ScriptedRunner):
    """Two scripted runners that take their plans of a step; `ran` has who had rows in each."""

    def __init__(self) -> None:
        super().__init__()
        self.config = replace(self.config, replicas=2)
        self.ran: list[int] = []
        self._each = [ScriptedRunner(), ScriptedRunner()]

    def forward(self, step: StepPlan) -> list[ForwardOutput]:  # type: ignore[override]
        self.ran += [index for index, plan in enumerate(step.plans) if plan.num_sequences]
        return [runner.forward(plan) for runner, plan in zip(self._each, step.plans, strict=True)]


@pytest.fixture
def runner() -> TwoReplicas:
    return TwoReplicas()


@pytest.fixture
def server(runner: TwoReplicas) -> Iterator[HttpServer]:
    with running_server(runner) as server:
        yield server


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_runs_where_it_asks_to(runner: TwoReplicas, server: HttpServer, path: str) -> None:
    chosen: list[tuple[dict[str, Any], dict[str, str], int]] = [
        ({"routed_dp_rank": 1}, {}, 1),
        ({"routed_dp_rank": 0}, {}, 0),
        ({}, {HEADER: "1"}, 1),
        ({"routed_dp_rank": 0}, {HEADER: "1"}, 1),
    ]
    for fields, headers, replica in chosen:
        runner.ran.clear()
        status, answer = await post(server, path, BODIES[path] | fields, headers)
        assert status == 200, answer
        assert set(runner.ran) == {replica}


async def test_others_are_spread(runner: TwoReplicas, server: HttpServer) -> None:
    for _ in range(2):
        await post(server, "/v1/completions", BODIES["/v1/completions"])
    assert set(runner.ran) == {0, 1}
    found = await metrics(server)
    assert {f'resin_requests{{replica="{replica}",state="decode"}}' for replica in (0, 1)} <= found.keys()


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"routed_dp_rank": 2}, {}, "routed_dp_rank"),
        ({"routed_dp_rank": -1}, {}, "routed_dp_rank"),
        ({}, {HEADER: "2"}, HEADER),
        ({}, {HEADER: "one"}, HEADER),
        ({"routed_dp_rank": 0}, {HEADER: "2"}, HEADER),
    ],
)
async def test_unknown_replicas_are_refused(
    server: HttpServer, fields: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    status, answer = await post(server, "/v1/completions", BODIES["/v1/completions"] | fields, headers)
    assert (status, answer["error"]["param"]) == (400, param)
