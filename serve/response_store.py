"""Responses that later requests can build on, within a bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from resin.recipes import Message


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as its client saw it, and the conversation that it ends (instructions left out)."""

    response: dict[str, Any]
    messages: tuple[Message, ...]
    size_bytes: int


class ResponseStore:
    """The latest responses by id. Beyond either bound the oldest are forgotten."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response: dict[str, Any], messages: Sequence[Message]) -> None:
        """Keeps a response; one that is larger than the whole bound is not kept."""
        size_bytes = len(msgspec.json.encode(response)) + len(msgspec.json.encode(messages))
        self.delete(response["id"])
        self._entries[response["id"]] = StoredResponse(response, tuple(messages), size_bytes)
        self.total_bytes += size_bytes
        while len(self._entries) > self._max_entries or self.total_bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.total_bytes -= oldest.size_bytes

    def get(self, response_id: str) -> StoredResponse | None:
        return self._entries.get(response_id)

    def delete(self, response_id: str) -> bool:
        """True if it was there."""
        entry = self._entries.pop(response_id, None)
        if entry is not None:
            self.total_bytes -= entry.size_bytes
        return entry is not None
