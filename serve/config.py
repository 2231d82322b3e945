"""What an operator may set about the server, frozen."""

from __future__ import annotations

from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from resin.plan import InvalidRequest


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Addresses and limits. Every limit is also a gauge, `resin_http_limit{name=...}`.

    Attributes:
        host: address to listen on; loopback unless told otherwise.
        port: TCP port; 0 lets the system choose.
        api_keys: if any, requests for anything but the chat page and `/health` need one of them as
            `Authorization: Bearer KEY` or `x-api-key: KEY`.
        allowed_hosts: names beside loopback ones under which clients may reach a keyless server on a loopback address;
            with any given, every server checks.
        allowed_origins: origins (`https://host:port`) whose pages may use the server.
        request_queue_capacity: choices that wait for admission; one more is answered with 429.
        max_active_sessions: choices that the engine holds at once; the next one waits in the queue.
        admissions_per_step: choices handed to the engine before each step.
        client_buffer_events: engine steps whose tokens may wait for a socket that does not drain; one more and the
            client is cancelled as too slow.
        stream_interval: tokens a streamed event carries at least, but for the first and the last.
        max_body_bytes: largest request body.
        max_output_tokens: most tokens a request may ask for, and what it gets if it does not say; None leaves it to
            the context length.
        max_choices: most choices (`n`) of one request.
        request_timeout_s: a request that takes longer ends with an error.
        client_timeout_s: how long a client may take to send a request's headers, and then its body, and how long it may
            take nothing of what is sent to it; an idle connection is closed as late.
        retry_after_s: what a 429 tells the client.
        stall_timeout_s: a step that takes longer makes `/health` answer 503.
        drain_timeout_s: how long a shutdown waits for running requests.
        stored_responses: Responses kept for `previous_response_id`; the oldest go first.
        stored_response_bytes: bytes that they may take together.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    request_queue_capacity: int = 1024
    max_active_sessions: int = 256
    admissions_per_step: int = 4
    client_buffer_events: int = 64
    stream_interval: int = 1
    max_body_bytes: int = 16 << 20
    max_output_tokens: int | None = None
    max_choices: int = 16
    request_timeout_s: float = 600.0
    client_timeout_s: float = 60.0
    retry_after_s: int = 1
    stall_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    stored_responses: int = 1024
    stored_response_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidRequest("port", self.port, "0 to 65535")
        for name, value in self._limits().items():
            if value is not None and not value > 0:
                raise InvalidRequest(name, value, "more than 0")
        if any(not key for key in self.api_keys):
            raise InvalidRequest("api_keys", "", "keys that are not empty")
        for host in self.allowed_hosts:
            if not host or not set(host).isdisjoint(":/ "):
                raise InvalidRequest("allowed_hosts", host, "names without scheme and port")
        for origin in self.allowed_origins:
            parts = urlsplit(origin)
            if not parts.scheme or not parts.netloc or parts.path:
                raise InvalidRequest("allowed_origins", origin, "origins such as https://host:port")

    def limits(self) -> dict[str, float]:
        """The numeric limits by name, but for those that are left open."""
        return {name: float(value) for name, value in self._limits().items() if value is not None}

    def _limits(self) -> dict[str, float | None]:
        others = ("host", "port", "api_keys", "allowed_hosts", "allowed_origins")
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in others}
