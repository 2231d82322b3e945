"""Who may speak to the server: Host, Origin, content type and key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from resin import InvalidRequest
from serve import HttpServer, ServerConfig
from serve.origins import is_loopback
from tests.serve.running import running_server
from tests.serve.scripted_runner import ScriptedRunner

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "x"}]})
JSON = {"Content-Type": "application/json"}
POSTS = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize")
GETS = ("/", "/health", "/metrics", "/v1/models", "/openapi.json", "/nothing")


async def ask(
    server: HttpServer, path: str = CHAT, *, method: str = "POST", body: str | None = BODY, **headers: str
) -> tuple[int, Mapping[str, str], bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    sent = (JSON if body is not None else {}) | named
    async with (
        aiohttp.ClientSession(server.url) as session,
        session.request(method, path, data=body, headers=sent, skip_auto_headers=["Content-Type"]) as response,
    ):
        return response.status, response.headers, await response.read()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("127.9.9.9", 200),
        ("LocalHost:1", 200),
        ("me.localhost", 200),
        ("localhost.", 200),
        ("[::1]:80", 200),
        ("rebound.example", 403),
        ("localhost.rebound.example:8000", 403),
        ("0.0.0.0:8000", 403),
        ("192.168.1.4", 403),
        ("[2001:db8::1]", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
async def test_a_loopback_server_answers_under_loopback_names_alone(server: HttpServer, host: str, status: int) -> None:
    assert (await ask(server, Host=host))[0] == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8000", 200),
        ("http://localhost:8001", 403),
        ("http://127.0.0.1:8000", 403),
        ("https://page.example", 403),
        ("null", 403),
        ("", 403),
        ("http://localhost:8000.page.example", 403),
    ],
)
async def test_only_pages_of_this_server_may_post(server: HttpServer, origin: str, status: int) -> None:
    found, headers, _ = await ask(server, Host="localhost:8000", Origin=origin)
    assert found == status
    assert "Access-Control-Allow-Origin" not in headers


async def test_default_ports_may_be_left_out(server: HttpServer) -> None:
    assert (await ask(server, Host="localhost", Origin="http://localhost"))[0] == 200
    assert (await ask(server, Host="localhost", Origin="http://localhost:80"))[0] == 200
    assert (await ask(server, Host="localhost", Origin="http://localhost:81"))[0] == 403


async def test_every_path_is_guarded(server: HttpServer) -> None:
    for method, paths in (("POST", POSTS), ("GET", GETS)):
        for path in paths:
            body = BODY if method == "POST" else None
            status, _, data = await ask(server, path, method=method, body=body, Host="rebound.example")
            assert status == 403, path
            assert b"rebound.example" in data and b"--allowed-host" in data
            assert (await ask(server, path, method=method, body=body, Origin="https://page.example"))[0] == 403, path


async def test_what_is_configured_is_let_in() -> None:
    hosts, origin = ("Chat.example", "box"), "https://Page.example"
    with running_server(ScriptedRunner(), allowed_hosts=hosts, allowed_origins=(origin,)) as server:
        for host, status in (("chat.example:8000", 200), ("box", 200), ("127.0.0.1", 200), ("other.example", 403)):
            assert (await ask(server, Host=host))[0] == status
        status, headers, _ = await ask(server, Origin=origin.lower())
        assert status == 200 and headers["Access-Control-Allow-Origin"] == origin.lower()
        assert headers["Vary"] == "Origin" and "x-request-id" in headers
        assert (await ask(server, Origin="https://page.example:444"))[0] == 403
        asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "content-type"}
        status, headers, _ = await ask(server, method="OPTIONS", body=None, Origin=origin, **asked)
        assert status == 204
        assert headers["Access-Control-Allow-Headers"] == "content-type"
        assert "POST" in headers["Access-Control-Allow-Methods"]
        status, headers, _ = await ask(server, method="OPTIONS", body=None, Origin="https://x.example", **asked)
        assert status == 403 and "Access-Control-Allow-Origin" not in headers


async def test_a_key_stands_in_for_host_and_origin() -> None:
    with running_server(ScriptedRunner(), api_keys=("secret",), allowed_origins=("https://page.example",)) as server:
        key = {"Authorization": "Bearer secret"}
        assert (await ask(server, Host="chat.example", Origin="https://other.example", **key))[0] == 200
        assert (await ask(server, Host="chat.example", Origin="https://other.example"))[0] == 401
        # A browser asks first, and without the key.
        asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization"}
        status, headers, _ = await ask(server, method="OPTIONS", body=None, Origin="https://page.example", **asked)
        assert status == 204 and headers["Access-Control-Allow-Headers"] == "authorization"
        status, headers, _ = await ask(server, Origin="https://page.example")
        assert status == 401 and headers["Access-Control-Allow-Origin"] == "https://page.example"


@pytest.mark.parametrize("key", ["", "wrong", "gr\u00fc\u00df", "\udcff\udcfe", "s\udce4"])
@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
async def test_any_bytes_that_are_no_key_are_401(key: str, header: str) -> None:
    # Raw bytes, which no client library sends: half a surrogate pair stands for each.
    with running_server(ScriptedRunner(), api_keys=("secret", "s\u00e4")) as server:
        value = f"Bearer {key}" if header == "Authorization" else key
        assert await raw_status(server, f"{header}: {value}") == 401
        right = "Bearer s\u00e4" if header == "Authorization" else "s\u00e4"
        assert await raw_status(server, f"{header}: {right}") == 200


@pytest.mark.parametrize("header", ["Host", "Origin", "x-request-id", "resin-routed-dp-rank", "Content-Type"])
async def test_bytes_that_are_no_utf8_never_break_the_server(server: HttpServer, header: str) -> None:
    assert await raw_status(server, f"{header}: \udcff\udcfe") in (200, 400, 403, 415)


async def raw_status(server: HttpServer, line: str) -> int:
    given = line.partition(":")[0].lower()
    others = {"host": "localhost", "content-type": "application/json", "content-length": str(len(BODY))}
    lines = [line, *(f"{name}: {value}" for name, value in others.items() if name != given), "Connection: close"]
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = "\r\n".join([f"POST {CHAT} HTTP/1.1", *lines, "", ""])
    writer.write(head.encode("utf-8", "surrogateescape") + BODY.encode())
    answer = await reader.read()
    writer.close()
    return int(answer.split(maxsplit=2)[1])


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=UTF-8", 200),
        ("application/json; charset=utf-16", 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("text/plain; application/json", 415),
        (None, 415),
    ],
)
async def test_bodies_say_that_they_are_json(server: HttpServer, content_type: str | None, status: int) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    for path in POSTS:
        async with (
            aiohttp.ClientSession(server.url) as session,
            session.post(path, data=BODY.encode(), headers=headers, skip_auto_headers=["Content-Type"]) as response,
        ):
            assert (response.status == 415) == (status == 415), (path, await response.text())


async def test_health_and_the_page_are_open_and_the_rest_takes_the_key() -> None:
    with running_server(ScriptedRunner(), api_keys=("secret",)) as server:
        found = {path: (await ask(server, path, method="GET", body=None))[0] for path in GETS}
        assert found == dict.fromkeys(GETS, 401) | {"/": 200, "/health": 200}
        status, _, text = await ask(server, "/metrics", method="GET", body=None, Authorization="Bearer secret")
        assert status == 200 and b"resin_http_requests_total" in text


@pytest.mark.parametrize(
    "settings",
    [
        {"allowed_hosts": ("http://box",)},
        {"allowed_hosts": ("box:80",)},
        {"allowed_hosts": ("",)},
        {"allowed_origins": ("box",)},
        {"allowed_origins": ("https://box/path",)},
        {"allowed_origins": ("https://box/",)},
    ],
)
def test_what_can_never_match_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as error:
        ServerConfig(**settings)
    assert error.value.field == next(iter(settings))


def test_loopback_names() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost", "a.b.localhost")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "10.0.0.1", "notlocalhost", "localhost.example")))
