"""Conversation formats: typed messages to token ids, and token ids to typed deltas."""

from resin.recipes.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from resin.recipes.grammar import Goal, GrammarRecipe
from resin.recipes.messages import Block, Message, Reasoning, Role, Text, Tool, ToolCall, ToolResult
from resin.recipes.recipe import Parser, Recipe, Tokenizer
from resin.recipes.registry import NATIVE_RECIPES, RecipeChoice, choose_recipe, find_recipe, get_native_recipe

__all__ = [
    "NATIVE_RECIPES",
    "Block",
    "Delta",
    "Goal",
    "GrammarRecipe",
    "Message",
    "Parser",
    "Reasoning",
    "ReasoningDelta",
    "Recipe",
    "RecipeChoice",
    "Role",
    "Text",
    "TextDelta",
    "Tokenizer",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolResult",
    "choose_recipe",
    "find_recipe",
    "get_native_recipe",
]
