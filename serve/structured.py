"""Structured output: a recipe's grammar, run by llguidance, as the mask of each next token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from resin.recipes import Goal, GrammarRecipe, Recipe, Tokenizer
from serve.errors import ApiError, invalid

MAX_SCHEMA_CHARACTERS = 1 << 18


class GrammarFailed(Exception):
    """The grammar engine gave up in the middle of a response (its own limits, or a token it did not allow)."""


class GrammarMask:
    """The `allowed_tokens` hook of one request. Lives on the engine's thread."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = -(-vocab_size // 32)
        self._consumed = 0

    def __call__(self, output_ids: Sequence[int]) -> np.ndarray:
        """int32 [ceil(vocab / 32)], one bit a token.

        Raises:
            GrammarFailed: the request cannot go on; others are not concerned.
        """
        if len(output_ids) < self._consumed:
            self._matcher.reset()
            self._consumed = 0
        new = list(output_ids[self._consumed :])
        if new and not self._matcher.consume_tokens(new):
            raise GrammarFailed(self._matcher.get_error() or "a token outside the grammar")
        self._consumed = len(output_ids)
        mask = np.zeros((1, self._words), np.int32)
        fill_next_token_bitmask(self._matcher, mask)
        if self._matcher.is_error():
            raise GrammarFailed(self._matcher.get_error())
        words: np.ndarray = mask[0]
        return words


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Building it reads the whole vocabulary; do it once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        """`vocab_size` is the model's: it may have rows that the tokenizer knows nothing about."""
        self._vocab_size = vocab_size
        wrapped = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, stop_token_ids[0]))
        self._tokenizer = llguidance.LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=list(stop_token_ids))

    def compile(self, grammar: str, count: int, param: str) -> list[GrammarMask]:
        """One mask for each of `count` choices.

        Raises:
            ApiError: 400 naming `param` if the grammar (in effect, its JSON Schema) is not supported.
        """
        matcher = llguidance.LLMatcher(self._tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().strip().splitlines()[0]
            raise invalid(param, f"{param}: this schema is not supported: {reason}")
        return [GrammarMask(matcher.deep_copy(), self._vocab_size) for _ in range(count)]


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_id: int) -> None:
        self.eos_token_id = eos_id
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
        specials = tokenizer.special_ids
        self.tokens = [_token_bytes(tokenizer, token_id, specials) for token_id in range(vocab_size)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode(errors="replace") if isinstance(text, bytes) else text)


def _token_bytes(tokenizer: Tokenizer, token_id: int, specials: frozenset[int]) -> bytes:
    try:
        data = tokenizer.id_to_bytes(token_id)
    except KeyError:
        return b""
    # The library's mark for tokens that are no text.
    return b"\xff" + data if token_id in specials else data


def write_grammar(recipe: Recipe | None, goal: Goal, prompt_ids: Sequence[int], param: str) -> str:
    """The grammar of a response that reaches the goal.

    Raises:
        ApiError: the schema is too large, or the model's format has no grammar.
    """
    if not isinstance(recipe, GrammarRecipe):
        raise ApiError(400, f"{param}: this model's format does not support structured output", param=param)
    schemas: list[Any] = [goal.schema, *(dict(tool.parameters) for tool in goal.tools)]
    if len(json.dumps(schemas)) > MAX_SCHEMA_CHARACTERS:
        raise invalid(param, f"{param}: schemas of at most {MAX_SCHEMA_CHARACTERS} characters")
    return recipe.write_grammar(goal, prompt_ids)
