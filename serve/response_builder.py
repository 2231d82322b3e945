"""Builds a Responses object from updates, and the stream of events that tells its making."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterator
from typing import Any

from resin.recipes import Block, Delta, Message, Reasoning, ReasoningDelta, Role, Text, TextDelta, Tokenizer, ToolCall
from serve.errors import ApiError
from serve.generation import Ending, Update
from serve.logprobs import chat_logprobs
from serve.text_rows import ScoredText

Event = dict[str, Any]


class ResponseBuilder:
    """Grows `response`; each method returns the events that say what changed, numbered without a gap."""

    def __init__(self, response: dict[str, Any], tokenizer: Tokenizer) -> None:
        """`tokenizer` spells the tokens of logprobs."""
        self.response = response
        self._tokenizer = tokenizer
        self._sequence = 0
        self._item: dict[str, Any] | None = None  # the reasoning or message item that is open

    def add(self, update: Update) -> list[Event]:
        """What an update adds; two events open the stream before the first."""
        opening = () if self._sequence else ("created", "in_progress")
        events = [self._event(f"response.{name}", response=self._snapshot()) for name in opening]
        for delta in update.deltas:
            events += self._add_delta(delta)
        return events

    def finish(self, ending: Ending, usage: dict[str, Any]) -> list[Event]:
        """Closes what is open and the response with it."""
        status = "incomplete" if ending is Ending.LENGTH else "completed"
        events = list(self._close_item(status))
        self.response["usage"] = usage
        self.response["status"] = status
        if ending is Ending.LENGTH:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._event(f"response.{status}", response=self._snapshot())]

    def fail(self, error: ApiError) -> list[Event]:
        """Ends the stream because of an error; an item that is open stays in part."""
        if self._item is not None:
            self._item["status"] = "incomplete"
        self.response["status"] = "failed"
        self.response["error"] = {"code": "server_error", "message": error.message}
        return [self._event("response.failed", response=self._snapshot())]

    def turn(self) -> Message:
        """The output as a turn of the conversation."""
        blocks: list[Block] = []
        for item in self.response["output"]:
            if item["type"] == "reasoning":
                blocks.append(Reasoning(item["content"][0]["text"]))
            elif item["type"] == "message":
                blocks.append(Text(item["content"][0]["text"]))
            else:
                blocks.append(ToolCall(item["call_id"], item["name"], item["arguments"]))
        return Message(Role.ASSISTANT, blocks)

    def _add_delta(self, delta: Delta) -> Iterator[Event]:
        if isinstance(delta, TextDelta):
            yield from self._open_item("message")
            part = self._part()
            part["text"] += delta.text
            rows = delta.logprobs if isinstance(delta, ScoredText) else ()
            logprobs = chat_logprobs(rows, self._tokenizer)["content"]
            part["logprobs"] += logprobs
            yield self._on_item("response.output_text.delta", delta=delta.text, logprobs=logprobs, content_index=0)
        elif isinstance(delta, ReasoningDelta):
            yield from self._open_item("reasoning")
            self._part()["text"] += delta.text
            yield self._on_item("response.reasoning_text.delta", delta=delta.text, content_index=0)
        else:
            yield from self._close_item()
            item = {
                "id": _new_id("fc"),
                "type": "function_call",
                "status": "in_progress",
                "call_id": delta.id,
                "name": delta.name,
                "arguments": "",
            }
            yield from self._begin(item)
            yield self._on_item("response.function_call_arguments.delta", delta=delta.arguments)
            item["arguments"] = delta.arguments
            yield self._on_item("response.function_call_arguments.done", name=delta.name, arguments=delta.arguments)
            yield from self._end()

    def _part(self) -> dict[str, Any]:
        assert self._item is not None
        part: dict[str, Any] = self._item["content"][0]
        return part

    def _open_item(self, kind: str) -> Iterator[Event]:
        if self._item is not None and self._item["type"] == kind:
            return
        yield from self._close_item()
        item: dict[str, Any]
        if kind == "message":
            item = {"id": _new_id("msg"), "type": kind, "status": "in_progress", "role": "assistant", "content": []}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"id": _new_id("rs"), "type": kind, "status": "in_progress", "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        yield from self._begin(item)
        item["content"] = [part]
        yield self._on_item("response.content_part.added", content_index=0, part=copy.deepcopy(part))

    def _close_item(self, status: str = "completed") -> Iterator[Event]:
        if self._item is None:
            return
        part = self._part()
        if self._item["type"] == "message":
            yield self._on_item(
                "response.output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"]
            )
        else:
            yield self._on_item("response.reasoning_text.done", content_index=0, text=part["text"])
        yield self._on_item("response.content_part.done", content_index=0, part=copy.deepcopy(part))
        yield from self._end(status)

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        self._item = item
        self.response["output"].append(item)
        yield self._event(
            "response.output_item.added", output_index=len(self.response["output"]) - 1, item=copy.deepcopy(item)
        )

    def _end(self, status: str = "completed") -> Iterator[Event]:
        assert self._item is not None
        self._item["status"] = status
        item, self._item = self._item, None
        yield self._event(
            "response.output_item.done", output_index=len(self.response["output"]) - 1, item=copy.deepcopy(item)
        )

    def _on_item(self, kind: str, **fields: Any) -> Event:
        assert self._item is not None
        place = {"item_id": self._item["id"], "output_index": len(self.response["output"]) - 1}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _snapshot(self) -> dict[str, Any]:
        return copy.deepcopy(self.response)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
