"""`/tokenize` and `/detokenize`: the request bodies."""

from __future__ import annotations

from typing import Annotated

import msgspec

from serve.schemas.body import JsonObject
from serve.schemas.chat import ChatMessage, ToolDefinition


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A raw prompt, or a conversation as Chat Completions would render it."""

    model: str = ""
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ToolDefinition] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None
    chat_template_kwargs: JsonObject | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str = ""
    tokens: list[Annotated[int, msgspec.Meta(ge=0)]]
