"""Structured output: a recipe's grammar, run by llguidance, as the mask of each next token."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from resin.recipes import Goal, GrammarRecipe, Recipe, Tokenizer
from serve.errors import ApiError, invalid

MAX_SCHEMA_CHARACTERS = 1 << 18
_CONTROLS = re.compile(r"^controls: (.*)$", re.MULTILINE)


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
    """Compiles grammars for one tokenizer. The first grammar takes longest: the whole vocabulary is read for it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        """`vocab_size` is the model's: it may have rows that the tokenizer knows nothing about."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_token_ids = list(stop_token_ids)
        self._lock = threading.Lock()
        self._controls = frozenset(tokenizer.special_ids)
        self._vocabulary: llguidance.LLTokenizer | None = None

    def compile(self, grammar: str, count: int, param: str) -> list[GrammarMask]:
        """One mask for each of `count` choices.

        Raises:
            ApiError: 400 naming `param` if the grammar (in effect, its JSON Schema) is not supported.
        """
        vocabulary = self._vocabulary_for(grammar)
        matcher = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().strip().splitlines()[0]
            raise invalid(param, f"{param}: this schema is not supported: {reason}")
        return [GrammarMask(matcher.deep_copy(), self._vocab_size) for _ in range(count)]

    def _vocabulary_for(self, grammar: str) -> llguidance.LLTokenizer:
        """The vocabulary in which no control token of the grammar is text; read again when a format brings new ones."""
        found = _CONTROLS.search(grammar)
        controls = {int(token_id) for token_id in re.findall(r"\d+", found[1])} if found else set()
        with self._lock:
            if self._vocabulary is None or not controls <= self._controls:
                self._controls |= controls
                source = _Vocabulary(self._tokenizer, self._vocab_size, self._stop_token_ids[0], self._controls)
                self._vocabulary = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(source), n_vocab=self._vocab_size, eos_token=self._stop_token_ids
                )
            return self._vocabulary


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_id: int, controls: frozenset[int]) -> None:
        self.eos_token_id = eos_id
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(token_id for token_id in controls if token_id < vocab_size)
        self.tokens = [_token_bytes(tokenizer, token_id, controls) for token_id in range(vocab_size)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode(errors="replace") if isinstance(text, bytes) else text)


def _token_bytes(tokenizer: Tokenizer, token_id: int, controls: frozenset[int]) -> bytes:
    try:
        data = tokenizer.id_to_bytes(token_id)
    except KeyError:
        return b""
    # The library's mark for tokens that are no text.
    return b"\xff" + data if token_id in controls else data


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
