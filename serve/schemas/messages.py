"""Anthropic Messages: the request body."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from resin.recipes import Block, Message, Reasoning, Role, Text, Tool, ToolCall, ToolResult
from resin.recipes.calls import dump_json
from serve.errors import invalid
from serve.schemas.body import Hint, JsonObject, Refused
from serve.schemas.sampling import Rank


class ResultPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    cache_control: Hint = None
    citations: Hint = None


class MessageBlock(msgspec.Struct, kw_only=True):
    """Text, thinking, a tool's use or its result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: JsonObject | None = None
    tool_use_id: str | None = None
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None
    cache_control: Hint = None
    citations: Hint = None
    caller: Hint = None
    toolset_name: Hint = None


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[MessageBlock]


class SystemBlock(msgspec.Struct, kw_only=True):
    type: Literal["text"]
    text: str
    cache_control: Hint = None
    citations: Hint = None


class ClientTool(msgspec.Struct, kw_only=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
    type: str | None = None
    description: str | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Refused | None = None
    cache_control: Hint = None
    eager_input_streaming: Hint = None
    input_examples: Hint = None


class ToolUseChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Hint = None
    display: Literal["summarized"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: JsonObject


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """What decides the length of a prompt."""

    model: str = ""
    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1)]
    system: str | list[SystemBlock] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolUseChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: Refused | None = None
    mcp_servers: Refused | None = None
    output_format: Refused | None = None
    speed: Literal["standard"] | None = None
    cache_control: Hint = None
    user_profile_id: Hint = None
    workspace_id: Hint = None


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: Annotated[int, msgspec.Meta(ge=0)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    container: Refused | None = None
    diagnostics: Refused | None = None
    inference_geo: Refused | None = None
    metadata: Hint = None
    service_tier: Hint = None
    # Beyond Anthropic:
    seed: int | None = None
    cache_salt: str | None = None
    routed_dp_rank: Rank | None = None


def to_messages(body: CountRequest) -> list[Message]:
    """The conversation in the recipes' terms.

    Raises:
        ApiError: a block that is not supported, or lacks what its type needs.
    """
    system = body.system if isinstance(body.system, str) else "".join(block.text for block in body.system or [])
    turns = [Message(Role.SYSTEM, [Text(system)])] if system else []
    names: dict[str, str] = {}
    for index, message in enumerate(body.messages):
        if isinstance(message.content, str):
            blocks: list[Block] = [Text(message.content)]
        else:
            places = ((f"messages[{index}].content[{place}]", block) for place, block in enumerate(message.content))
            blocks = [block for param, item in places if (block := _block_of(item, param, names)) is not None]
        turns.append(Message(Role(message.role), blocks))
    return turns


def _block_of(item: MessageBlock, param: str, names: dict[str, str]) -> Block | None:
    if item.type == "text":
        return Text(item.text or "")
    if item.type == "thinking":
        return Reasoning(item.thinking or "")
    if item.type == "redacted_thinking":
        return None
    if item.type == "tool_use":
        if not item.id or not item.name:
            raise invalid(param, f"{param}: tool_use needs id and name")
        names[item.id] = item.name
        return ToolCall(item.id, item.name, dump_json(item.input or {}))
    if item.type == "tool_result":
        if not item.tool_use_id:
            raise invalid(f"{param}.tool_use_id", f"{param}.tool_use_id: tool_result needs the id of its tool_use")
        text = _result_text(item, param)
        return ToolResult(
            item.tool_use_id, f"Error: {text}" if item.is_error else text, names.get(item.tool_use_id, "")
        )
    raise invalid(f"{param}.type", f"{param}.type: {item.type!r} is not supported")


def _result_text(item: MessageBlock, param: str) -> str:
    if item.content is None or isinstance(item.content, str):
        return item.content or ""
    for place, part in enumerate(item.content):
        if part.type != "text":
            raise invalid(f"{param}.content[{place}].type", f"{param}.content[{place}].type: only text is supported")
    return "".join(part.text or "" for part in item.content)


def to_tools(body: CountRequest) -> list[Tool]:
    """The tools on offer.

    Raises:
        ApiError: a tool that the client cannot run itself.
    """
    if body.tool_choice is not None and body.tool_choice.type == "none":
        return []
    tools = []
    for index, tool in enumerate(body.tools or []):
        if tool.type not in (None, "custom"):
            raise invalid(f"tools[{index}].type", f"tools[{index}].type: {tool.type!r} is not supported")
        tools.append(Tool(tool.name, tool.description or "", tool.input_schema or {}))
    return tools
