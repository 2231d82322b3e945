"""Addresses: mistakes are found before a model is loaded."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from resin import Engine, InvalidRequest
from serve import HttpServer, ServerConfig
from serve.cli import build_parser, main
from serve.commands import serving
from serve.listener import Listener
from tests.serve.scripted_runner import ScriptedRunner


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_a_free_port_is_found_and_given_back() -> None:
    with Listener("127.0.0.1", 0) as listener:
        assert listener.port > 0
        with pytest.raises(ConnectionRefusedError):  # it does not listen yet
            socket.create_connection(("127.0.0.1", listener.port))
    with Listener("127.0.0.1", listener.port) as again:
        assert again.port == listener.port


def test_a_name_with_several_addresses_gets_one_port_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(host: str, port: int, **options: Any) -> list[Any]:
        found = [(socket.AF_INET, ("127.0.0.1", port)), (socket.AF_INET, ("127.0.0.2", port))]
        return [(family, socket.SOCK_STREAM, 6, "", address) for family, address in [*found, *found]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with Listener("box", 0) as listener:
        names = [bound.getsockname() for bound in listener.sockets]
    assert names == [("127.0.0.1", listener.port), ("127.0.0.2", listener.port)]


def test_what_cannot_be_had_is_named(taken_port: int) -> None:
    cases = (
        ("127.0.0.1", taken_port, "port"),
        ("203.0.113.7", 0, "host"),
        ("no such host", 0, "host"),
        ("a" * 100 + ".example", 0, "host"),
    )
    for host, port, field in cases:
        with pytest.raises(InvalidRequest) as error:
            Listener(host, port)
        assert error.value.field == field, host


def test_a_port_that_needs_rights_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Guarded(socket.socket):
        def bind(self, address: Any) -> None:
            raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(socket, "socket", Guarded)
    with pytest.raises(InvalidRequest) as error:
        Listener("127.0.0.1", 80)
    assert error.value.field == "port"


def test_a_server_without_a_listener_finds_the_same(taken_port: int) -> None:
    server = HttpServer(Engine(ScriptedRunner()), model="m", config=ServerConfig(port=taken_port))
    with pytest.raises(InvalidRequest, match=f"port={taken_port}"):
        server.serve()
    assert not server.wait_ready(0)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--host", "203.0.113.7"], "host"),
        (["--port", "70000"], "port"),
        (["--stream-interval", "0"], "stream_interval"),
        (["--client-timeout-s", "-1"], "client_timeout_s"),
        (["--allowed-origin", "page.example"], "allowed_origins"),
        (["--allowed-host", "http://page.example"], "allowed_hosts"),
    ],
)
def test_the_command_finds_mistakes_before_it_loads(
    arguments: list[str], field: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "load_model", None)
    assert main(["serve", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"resin: {field}=")


def test_the_command_finds_a_taken_port_before_it_loads(
    taken_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "load_model", None)
    assert main(["serve", "--port", str(taken_port)]) == 1
    assert capsys.readouterr().err == f"resin: port={taken_port}: expected a port that is free on 127.0.0.1\n"


def test_every_limit_is_an_option() -> None:
    args = build_parser().parse_args(["serve"])
    for field in fields(ServerConfig):
        name = {"allowed_hosts": "allowed_host", "allowed_origins": "allowed_origin"}.get(field.name, field.name)
        if field.name != "api_keys":
            assert (getattr(args, name) or None) == (field.default or None), field.name
