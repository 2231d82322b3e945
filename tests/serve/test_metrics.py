"""Every limit is a gauge, and what a request does is counted."""

from __future__ import annotations

from dataclasses import fields

from serve import ServerConfig
from tests.serve.running import running_server
from tests.serve.scripted_runner import ScriptedRunner
from tests.serve.test_invalid_requests import MESSAGES, post
from tests.serve.test_limits_and_faults import metrics

NO_LIMITS = {"host", "port", "api_keys", "allowed_hosts", "allowed_origins"}


async def test_every_limit_is_a_gauge_with_its_value() -> None:
    # Values that no default has, so that none can stand for another.
    names = [field.name for field in fields(ServerConfig) if field.name not in NO_LIMITS | {"drain_timeout_s"}]
    values = {name: 200 + place for place, name in enumerate(names)}
    with running_server(ScriptedRunner(), **values) as server:
        found = await metrics(server)
    gauges = {name: value for name, value in found.items() if name.startswith("resin_http_limit{")}
    expected = {f'resin_http_limit{{name="{name}"}}': value for name, value in values.items()}
    assert gauges == expected | {'resin_http_limit{name="drain_timeout_s"}': 5}
    assert len(names) >= 12


async def test_a_limit_that_is_left_open_has_no_gauge() -> None:
    with running_server(ScriptedRunner()) as server:
        found = await metrics(server)
    assert 'resin_http_limit{name="max_output_tokens"}' not in found
    assert found['resin_http_limit{name="max_active_sessions"}'] == 256


async def test_requests_are_counted_by_path_and_status() -> None:
    with running_server(ScriptedRunner()) as server:
        assert (await post(server, "/v1/chat/completions", {"messages": MESSAGES}))[0] == 200
        assert (await post(server, "/v1/chat/completions", {"messages": []}))[0] == 400
        assert (await post(server, "/no/such/path/at/all", {}))[0] == 404
        found = await metrics(server)
    counts = {name: value for name, value in found.items() if name.startswith("resin_http_requests_total{")}
    assert counts == {
        'resin_http_requests_total{method="POST",path="/v1/chat/completions",status="200"}': 1,
        'resin_http_requests_total{method="POST",path="/v1/chat/completions",status="400"}': 1,
        'resin_http_requests_total{method="POST",path="unknown",status="404"}': 1,
    }
    assert found['resin_http_request_seconds_count{path="/v1/chat/completions"}'] == 2
