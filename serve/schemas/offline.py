"""One line of `resin generate`'s input."""

from __future__ import annotations

from typing import Annotated

import msgspec

from serve.errors import invalid
from serve.schemas.chat import AnswerFields, ChatMessage


class OfflineRequest(AnswerFields, kw_only=True):
    """`id`, exactly one of `prompt_ids`, `prompt` and `messages`, and fields under Chat Completions' names."""

    id: str | int
    prompt_ids: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | bool | None = None

    @property
    def top_logprobs(self) -> int | None:
        """None for none, 0 for the chosen token alone."""
        if isinstance(self.logprobs, bool):
            return 0 if self.logprobs else None
        return self.logprobs

    def check(self) -> None:
        """Raises ApiError unless there is exactly one prompt, and nothing that it has no use for."""
        given = [name for name in ("prompt_ids", "prompt", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise invalid("prompt", f"expected exactly one of prompt_ids, prompt and messages, got {found}")
        if self.n not in (None, 1):
            raise invalid("n", f"n={self.n}: expected 1; repeat the line under another id instead")
        if self.messages is None:
            for name in ("tools", "tool_choice", "response_format", "reasoning_effort", "chat_template_kwargs"):
                if getattr(self, name):
                    raise invalid(name, f"{name}: needs messages")
