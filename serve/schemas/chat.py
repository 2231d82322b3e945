"""OpenAI Chat Completions: the request body."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from resin.recipes import Block, Message, Reasoning, Role, Text, Tool, ToolCall, ToolResult
from serve.errors import invalid
from serve.schemas.body import Hint, JsonObject, Refused
from serve.schemas.sampling import SamplingFields


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message. Only text can be given to a text model."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    arguments: str = "{}"


class MessageToolCall(msgspec.Struct, kw_only=True):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    audio: Refused | None = None
    function_call: Refused | None = None


class FunctionDefinition(msgspec.Struct, kw_only=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: FunctionDefinition


class ToolChoiceFunction(msgspec.Struct, kw_only=True):
    name: str


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["function"] = "function"
    function: ToolChoiceFunction


class JsonSchema(msgspec.Struct, kw_only=True):
    name: str = "schema"
    description: str | None = None
    schema: JsonObject | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class AnswerFields(SamplingFields, kw_only=True):
    """What an answer in a conversation may and must hold."""

    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    function_call: Literal["none"] | None = None
    functions: Refused | None = None
    # Beyond OpenAI:
    chat_template_kwargs: JsonObject | None = None

    def offered_tools(self) -> list[Tool]:
        """The tools on offer in the recipes' terms."""
        return [] if self.tool_choice == "none" else to_tools(self.tools)

    def schema(self) -> dict[str, Any] | None:
        """The JSON Schema that the answer must fit.

        Raises:
            ApiError: a response format without its schema.
        """
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "object"}
        if wanted.json_schema is None or wanted.json_schema.schema is None:
            raise invalid("response_format.json_schema.schema", "response_format: json_schema needs a schema")
        return wanted.json_schema.schema


class ChatRequest(AnswerFields, kw_only=True):
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: Refused | None = None
    moderation: Refused | None = None
    web_search_options: Refused | None = None
    metadata: Hint = None
    prediction: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_options: Hint = None
    prompt_cache_retention: Hint = None
    safety_identifier: Hint = None
    service_tier: Hint = None
    store: Hint = None
    verbosity: Hint = None


def content_text(content: str | list[ContentPart] | None, param: str) -> str:
    """The text of a message's content.

    Raises:
        ApiError: a part that is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise invalid(f"{param}[{index}].type", f"{param}[{index}].type: {part.type!r} content is not supported")
        texts.append(part.text if part.text is not None else part.refusal or "")
    return "".join(texts)


def to_messages(messages: list[ChatMessage]) -> list[Message]:
    """The conversation in the recipes' terms."""
    turns = []
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        text = content_text(message.content, f"messages[{index}].content") or message.refusal or ""
        blocks: list[Block] = []
        if message.role in ("tool", "function"):
            call_id = message.tool_call_id or ""
            blocks.append(ToolResult(call_id, text, message.name or names.get(call_id, "")))
            turns.append(Message(Role.TOOL, blocks))
            continue
        if reasoning := message.reasoning_content or message.reasoning:
            blocks.append(Reasoning(reasoning))
        if text or not message.tool_calls:
            blocks.append(Text(text))
        for call in message.tool_calls or []:
            names[call.id] = call.function.name
            blocks.append(ToolCall(call.id, call.function.name, call.function.arguments))
        turns.append(Message(Role(message.role), blocks))
    return turns


def to_tools(definitions: list[ToolDefinition] | None) -> list[Tool]:
    """The tools on offer in the recipes' terms."""
    return [
        Tool(item.function.name, item.function.description or "", item.function.parameters or {})
        for item in definitions or []
    ]
