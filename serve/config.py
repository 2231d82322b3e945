"""What an operator may set about the server, frozen."""

from __future__ import annotations

from dataclasses import dataclass, fields

from resin.plan import InvalidRequest


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Addresses and limits. Every limit is also a gauge, `resin_http_limit{name=...}`.

    Attributes:
        host: address to listen on; loopback unless told otherwise.
        port: TCP port; 0 lets the system choose.
        api_keys: if any, requests under /v1 need one of them as `Authorization: Bearer KEY` or `x-api-key: KEY`.
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
        retry_after_s: what a 429 tells the client.
        drain_timeout_s: how long a shutdown waits for running requests.
        stored_responses: Responses kept for `previous_response_id`; the oldest go first.
        stored_response_bytes: bytes that they may take together.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    request_queue_capacity: int = 1024
    max_active_sessions: int = 128
    admissions_per_step: int = 4
    client_buffer_events: int = 64
    stream_interval: int = 1
    max_body_bytes: int = 16 << 20
    max_output_tokens: int | None = None
    max_choices: int = 16
    request_timeout_s: float = 600.0
    retry_after_s: int = 1
    drain_timeout_s: float = 30.0
    stored_responses: int = 1024
    stored_response_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidRequest("port", self.port, "0 to 65535")
        for name in (field.name for field in fields(self) if field.name not in ("host", "port", "api_keys")):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidRequest(name, value, "more than 0")
        if any(not key for key in self.api_keys):
            raise InvalidRequest("api_keys", "", "keys that are not empty")

    def limits(self) -> dict[str, float]:
        """The numeric limits by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "port"}
        return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
