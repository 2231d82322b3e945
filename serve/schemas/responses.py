"""OpenAI Responses: the request body."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from resin.recipes import Block, Message, Reasoning, Role, Text, Tool, ToolCall, ToolResult
from serve.errors import invalid
from serve.schemas.body import Hint, JsonObject, Refused
from serve.schemas.chat import ContentPart, content_text
from serve.schemas.sampling import Rank, StreamOptions


class SummaryPart(msgspec.Struct, kw_only=True):
    type: str = "summary_text"
    text: str = ""


class InputItem(msgspec.Struct, kw_only=True):
    """A message, a call, its output or reasoning; a message may leave out its type."""

    type: str = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None
    summary: list[SummaryPart] | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    type: str
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")] | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Refused | None = None
    is_async: Refused | None = msgspec.field(default=None, name="async")
    output_schema: Hint = None


class FunctionChoice(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: JsonObject | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Hint = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None
    summary: Hint = None
    generate_summary: Hint = None


Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",  # reasoning comes in the clear
    # Nothing of these kinds is ever in a response:
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponsesRequest(msgspec.Struct, kw_only=True):
    model: str = ""
    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    include: list[Includable] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["disabled"] | None = None
    access_programs: Refused | None = None
    background: Refused | None = None
    background_options: Refused | None = None
    context_management: Refused | None = None
    conversation: Refused | None = None
    image: Refused | None = None
    max_tool_calls: Refused | None = None
    moderation: Refused | None = None
    prompt: Refused | None = None
    prompt_cache_key: Hint = None
    prompt_cache_options: Hint = None
    prompt_cache_retention: Hint = None
    safety_identifier: Hint = None
    service_tier: Hint = None
    user: str | None = None
    # Beyond OpenAI:
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    routed_dp_rank: Rank | None = None

    @property
    def logprobs(self) -> int | None:
        """Alternatives a token, None if logprobs are not asked for."""
        wanted = "message.output_text.logprobs" in (self.include or []) or bool(self.top_logprobs)
        return (self.top_logprobs or 0) if wanted else None


def input_messages(body: ResponsesRequest) -> list[Message]:
    """The new turns; calls and reasoning that stand side by side make one assistant turn.

    Raises:
        ApiError: an item that is not supported, or lacks what its type needs.
    """
    if isinstance(body.input, str):
        return [Message(Role.USER, [Text(body.input)])]
    turns: list[tuple[Role, list[Block]]] = []
    names: dict[str, str] = {}
    for index, item in enumerate(body.input):
        role, blocks = _blocks_of(item, f"input[{index}]", names)
        joins = role is Role.ASSISTANT and turns and turns[-1][0] is Role.ASSISTANT
        if joins:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    return [Message(role, blocks) for role, blocks in turns]


def _blocks_of(item: InputItem, param: str, names: dict[str, str]) -> tuple[Role, list[Block]]:
    if item.type == "message":
        if item.role is None:
            raise invalid(f"{param}.role", f"{param}.role: a message needs a role")
        return Role(item.role), [Text(content_text(item.content, f"{param}.content"))]
    if item.type == "function_call":
        if not item.name or not item.call_id:
            raise invalid(param, f"{param}: a function_call needs call_id and name")
        names[item.call_id] = item.name
        return Role.ASSISTANT, [ToolCall(item.call_id, item.name, item.arguments or "{}")]
    if item.type == "function_call_output":
        if not item.call_id:
            raise invalid(f"{param}.call_id", f"{param}.call_id: a function_call_output needs the id of its call")
        text = content_text(item.output, f"{param}.output")
        return Role.TOOL, [ToolResult(item.call_id, text, names.get(item.call_id, ""))]
    if item.type == "reasoning":
        parts = item.content if isinstance(item.content, list) else []
        text = "".join(part.text or "" for part in parts) or "".join(part.text for part in item.summary or [])
        return Role.ASSISTANT, [Reasoning(text)] if text else []
    raise invalid(f"{param}.type", f"{param}.type: {item.type!r} is not supported")


def function_tools(body: ResponsesRequest) -> list[Tool]:
    """The functions on offer.

    Raises:
        ApiError: a tool that is not a function, or has no name.
    """
    tools = []
    for index, tool in enumerate(body.tools or []):
        if tool.type != "function":
            raise invalid(f"tools[{index}].type", f"tools[{index}].type: {tool.type!r} is not supported")
        if tool.name is None:
            raise invalid(f"tools[{index}].name", f"tools[{index}].name: a function needs a name")
        tools.append(Tool(tool.name, tool.description or "", tool.parameters or {}))
    return tools


def schema_of(body: ResponsesRequest) -> dict[str, Any] | None:
    """The JSON Schema that the answer must fit.

    Raises:
        ApiError: json_schema without a schema.
    """
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.schema is None:
        raise invalid("text.format.schema", "text.format: json_schema needs a schema")
    return wanted.schema
