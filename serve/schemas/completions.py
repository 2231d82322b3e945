"""OpenAI Completions: the request body."""

from __future__ import annotations

from typing import Annotated

import msgspec

from serve.errors import invalid
from serve.schemas.body import Refused
from serve.schemas.sampling import SamplingFields


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    best_of: int | None = None
    suffix: Refused | None = None

    def prompts(self) -> list[str | list[int]]:
        """Each prompt as text or as token ids.

        Raises:
            ApiError: no prompt, or a list that mixes kinds.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise invalid("prompt", "prompt: at least one prompt")
        ids = [item for item in self.prompt if isinstance(item, int)]
        if ids:
            if len(ids) != len(self.prompt):
                raise invalid("prompt", "prompt: a list of token ids, or of texts, or of lists of token ids")
            return [ids]
        return [item for item in self.prompt if not isinstance(item, int)]
