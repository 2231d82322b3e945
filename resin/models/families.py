"""Which model file computes a checkpoint: a table of model types, and "package.module:Name" for everything else."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from resin.models.config import HARMLESS, NEUTRAL, DecoderConfig, check_quantisation
from resin.models.config_reader import ConfigReader
from resin.models.declare import Placement
from resin.models.forward import Pass, dense_pass
from resin.models.loading.checkpoint import Checkpoint
from resin.models.loading.text_part import text_config
from resin.models.tying import settle_head
from resin.plan import CacheGroup, InvalidRequest

FAMILIES = {
    "cohere": "resin.models.cohere:Cohere",
    "cohere2": "resin.models.cohere2:Cohere2",
    "exaone4": "resin.models.exaone4:Exaone4",
    "gemma2": "resin.models.gemma2:Gemma2",
    "gemma3_text": "resin.models.gemma3:Gemma3",
    "gpt_oss": "resin.models.gpt_oss:GptOss",
    "glm": "resin.models.glm:Glm",
    "glm4": "resin.models.glm:Glm4",
    "glm4_moe": "resin.models.glm4_moe:Glm4Moe",
    "granite": "resin.models.granite:Granite",
    "granitemoe": "resin.models.granite_moe:GraniteMoe",
    "lfm2": "resin.models.lfm2:Lfm2",
    "lfm2_moe": "resin.models.lfm2_moe:Lfm2Moe",
    "llama": "resin.models.llama:Llama",
    "ministral": "resin.models.llama:Mistral",
    "mistral": "resin.models.llama:Mistral",
    "mixtral": "resin.models.mixtral:Mixtral",
    "olmo2": "resin.models.olmo2:Olmo2",
    "olmo3": "resin.models.olmo3:Olmo3",
    "phi3": "resin.models.phi3:Phi3",
    "qwen2": "resin.models.qwen2:Qwen2",
    "qwen2_moe": "resin.models.qwen2_moe:Qwen2Moe",
    "qwen3": "resin.models.qwen3:Qwen3",
    "qwen3_moe": "resin.models.qwen3_moe:Qwen3Moe",
    "smollm3": "resin.models.smollm3:SmolLM3",
}


class ModelConfig(Protocol):
    """What every model's Config offers to the rest of the library."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context_tokens(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class Model(Protocol):
    """A built model. The class also has `Config` (with `from_hf`), `cache_groups` and takes `(config, placement)`."""

    def __call__(self, run: Pass) -> jax.Array:
        """Final hidden states `[T, hidden]`."""
        ...

    def logits(self, run: Pass, hidden: jax.Array) -> jax.Array:
        """float32 `[..., vocab]` of `[..., hidden]`."""
        ...


class ModelClass(Protocol):
    """The class behind a model."""

    Config: Any

    def __call__(self, config: Any, placement: Placement) -> Any: ...

    def cache_groups(self, config: Any, placement: Placement) -> tuple[CacheGroup, ...]:
        """What the model keeps per token or sequence, as one device sees it."""
        ...


def find_model_class(config: Mapping[str, Any], name: str | None = None) -> ModelClass:
    """The class for a checkpoint's config.

    Args:
        config: Hugging Face config with `model_type`.
        name: "package.module:Name" overrides the table.

    Raises:
        InvalidRequest: no such module or class, one that is no model, or no family for the model type.
    """
    if name is None:
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise InvalidRequest("model_type", model_type, f"one of {sorted(FAMILIES)}, or a model given by name")
        name = FAMILIES[model_type]
    module_name, _, class_name = name.partition(":")
    if not class_name:
        raise InvalidRequest("model", name, "package.module:Name")
    try:
        found: ModelClass = getattr(importlib.import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise InvalidRequest("model", name, "an importable module") from error
    except AttributeError as error:
        raise InvalidRequest("model", name, f"a class of {module_name}") from error
    _refuse_lacks(name, found, ("Config", "cache_groups", "logits"))
    _refuse_lacks(f"{name}.Config", found.Config, ("from_hf",))
    return found


def _refuse_lacks(name: str, found: object, members: Sequence[str]) -> None:
    """Names what a model file has forgotten, where it is opened."""
    lacks = [member for member in members if not hasattr(found, member)]
    if lacks:
        raise InvalidRequest("model", name, f"one with {' and '.join(lacks)} (docs/adding-a-model.md)")


def read_config(config: Mapping[str, Any], name: str | None = None) -> tuple[ModelClass, ModelConfig]:
    """The class for a checkpoint's config, and its own Config: every setting is understood or known to be harmless.

    Args:
        config: Hugging Face config.
        name: "package.module:Name" of a model class; None finds it by `model_type`.

    Raises:
        InvalidRequest: no such class, or a setting that is missing, bad, not supported or unknown.
    """
    config = text_config(config)
    model_class, given = find_model_class(config, name), ConfigReader(config)
    own: Any = model_class.Config
    check_quantisation(given, getattr(own, "quantised_as", DecoderConfig.quantised_as))
    parsed: ModelConfig = own.from_hf(given)
    _refuse_lacks(own.__name__, parsed, ("vocab_size", "max_context_tokens", "eos_token_ids"))
    given.refuse_unread(own.__name__, HARMLESS, NEUTRAL)
    return model_class, parsed


def read_model(checkpoint: Checkpoint, name: str | None = None) -> tuple[ModelClass, ModelConfig]:
    """The same for a checkpoint, whose tensors have the last word on whether the head is tied to the embedding.

    Raises:
        InvalidRequest: as `read_config`.
    """
    model_class, config = read_config(checkpoint.config, name)
    return model_class, settle_head(config, checkpoint)


def sequence_logits(model: Model, token_ids: jax.Array) -> jax.Array:
    """float32 `[T, vocab]` of one whole sequence `[T]`, without a cache: what a trainer computes."""
    run = dense_pass(token_ids)
    return model.logits(run, model(run))
