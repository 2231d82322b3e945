"""Native recipes by name, and the recipe that fits a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from resin.plan.errors import InvalidRequest
from resin.recipes.chatml import SMOLLM2_SYSTEM, ChatMLRecipe
from resin.recipes.gemma import GemmaRecipe
from resin.recipes.harmony import HarmonyRecipe
from resin.recipes.jinja import JinjaRecipe
from resin.recipes.lfm2 import Lfm2Recipe
from resin.recipes.llama3 import Llama3Recipe
from resin.recipes.qwen3 import Qwen3Recipe
from resin.recipes.recipe import Recipe, Tokenizer

NATIVE_RECIPES: Mapping[str, Callable[[Tokenizer], Recipe]] = MappingProxyType(
    {
        "jinja": JinjaRecipe,
        "chatml": ChatMLRecipe,
        "smollm2": lambda tokenizer: ChatMLRecipe(tokenizer, default_system=SMOLLM2_SYSTEM),
        "qwen3": Qwen3Recipe,
        "lfm2": Lfm2Recipe,
        "gemma": GemmaRecipe,
        "gpt_oss": HarmonyRecipe,
        "llama3": Llama3Recipe,
    }
)

_RECIPE_OF_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2",
    "gemma3_text": "gemma",
    "gemma3": "gemma",
    "gpt_oss": "gpt_oss",
}


def get_native_recipe(name: str, tokenizer: Tokenizer) -> Recipe:
    """The recipe of that name for a tokenizer.

    Raises:
        InvalidRequest: no such recipe, or the tokenizer lacks what the format needs.
    """
    build = NATIVE_RECIPES.get(name)
    if build is None:
        raise InvalidRequest("recipe", name, f"one of {', '.join(NATIVE_RECIPES)}")
    return build(tokenizer)


def find_recipe(model_type: str, tokenizer: Tokenizer) -> Recipe:
    """The recipe for a model: native where its family has one, else the tokenizer's own template.

    Args:
        model_type: `model_type` of the model's Hugging Face config.
        tokenizer: the model's tokenizer.

    Raises:
        InvalidRequest: neither fits.
    """
    native = _RECIPE_OF_MODEL_TYPE.get(model_type)
    if native is None and tokenizer.token_to_id("<|start_header_id|>") is not None:
        native = "llama3"
    if native is not None:
        try:
            return get_native_recipe(native, tokenizer)
        except InvalidRequest:
            if not tokenizer.chat_template:
                raise
    return JinjaRecipe(tokenizer)
