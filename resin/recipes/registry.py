"""Native recipes by name, and the recipe that fits a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from resin.plan.errors import InvalidRequest
from resin.plan.extras import require
from resin.recipes.chatml import SMOLLM2_SYSTEM, ChatMLRecipe
from resin.recipes.gemma import GemmaRecipe
from resin.recipes.harmony import HarmonyRecipe
from resin.recipes.lfm2 import Lfm2Recipe
from resin.recipes.llama3 import Llama3Recipe
from resin.recipes.probes import PROBES, find_difference
from resin.recipes.qwen3 import Qwen3Recipe
from resin.recipes.recipe import Recipe, Tokenizer

if TYPE_CHECKING:
    from resin.recipes.jinja import JinjaRecipe


def _jinja_recipe(tokenizer: Tokenizer) -> JinjaRecipe:
    """The checkpoint's own chat template.

    Raises:
        MissingPackage: jinja2 is not installed.
    """
    require("serve", "jinja2")
    from resin.recipes.jinja import JinjaRecipe

    return JinjaRecipe(tokenizer)


NATIVE_RECIPES: Mapping[str, Callable[[Tokenizer], Recipe]] = MappingProxyType(
    {
        "jinja": _jinja_recipe,
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
    "gemma2": "gemma",
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


@dataclass(frozen=True, slots=True)
class RecipeChoice:
    """Which recipe a model gets, if any: its name among NATIVE_RECIPES, and why."""

    recipe: Recipe | None
    name: str
    reason: str


def choose_recipe(model_type: str, tokenizer: Tokenizer) -> RecipeChoice:
    """The recipe for a model: the checkpoint's own chat template, or a native recipe that renders the same.

    Args:
        model_type: `model_type` of the model's Hugging Face config.
        tokenizer: the model's tokenizer.

    Raises:
        InvalidRequest: its chat template is broken.
    """
    name, because = _native_name(model_type, tokenizer)
    native = None
    with suppress(InvalidRequest):  # the vocabulary lacks what the format needs
        native = get_native_recipe(name, tokenizer) if name else None
    if not tokenizer.chat_template:
        if native is None:
            return RecipeChoice(None, "none", "the checkpoint has no chat template, and no native recipe fits it")
        return RecipeChoice(native, name, f"the checkpoint has no chat template; {because}")
    template = _jinja_recipe(tokenizer)
    if native is None:
        return RecipeChoice(template, "jinja", f"the checkpoint's chat template; {template.traits.describe()}")
    difference = find_difference(native, template)
    if not difference:
        return RecipeChoice(native, name, f"renders {len(PROBES)} probes as the checkpoint's chat template does")
    reason = f"the checkpoint's chat template, from which {name} differs in {difference}; {template.traits.describe()}"
    return RecipeChoice(template, "jinja", reason)


def find_recipe(model_type: str, tokenizer: Tokenizer) -> Recipe:
    """The recipe that `choose_recipe` chooses.

    Raises:
        InvalidRequest: there is none, or the chat template is broken.
    """
    choice = choose_recipe(model_type, tokenizer)
    if choice.recipe is None:
        raise InvalidRequest("recipe", model_type, f"a recipe by name: {choice.reason}")
    return choice.recipe


def _native_name(model_type: str, tokenizer: Tokenizer) -> tuple[str, str]:
    """The native recipe that may fit, and what speaks for it."""
    if model_type in _RECIPE_OF_MODEL_TYPE:
        return _RECIPE_OF_MODEL_TYPE[model_type], f"its model_type is {model_type}"
    if "<|start_header_id|>" in tokenizer.controls:
        return "llama3", "its vocabulary has <|start_header_id|>"
    return "", ""
