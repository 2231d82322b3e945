"""LoadedModel: a warm engine and what turns its tokens into conversation."""

from __future__ import annotations

from dataclasses import dataclass

from resin import Engine
from resin.models.sampling_defaults import SamplingDefaults
from resin.recipes import Recipe
from resin.recipes.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine that is ready to step, and what turns its tokens into conversation.

    Attributes:
        name: what clients call the model.
        recipe: None if the model has no chat format.
        sampling: how to sample where a request does not say.
    """

    name: str
    engine: Engine
    tokenizer: ChatTokenizer
    recipe: Recipe | None
    sampling: SamplingDefaults

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end raw text, by the checkpoint's own account."""
        return tuple(dict.fromkeys([*self.engine.parts.eos_token_ids, *self.tokenizer.eos_ids]))
