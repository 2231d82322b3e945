"""Structured output: a recipe's grammar, run by llguidance, as the mask of each next token."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from resin.plan import InvalidRequest
from resin.recipes import Goal, GrammarRecipe, Recipe, Tokenizer
from serve.errors import ApiError, invalid

MAX_SCHEMA_CHARACTERS = 1 << 18
MAX_STRING_CHARACTERS = 1 << 15
"""Of one string. The mask of 200,000 given characters takes 1.8 s, and nobody gets a token meanwhile."""
MAX_OPTIONAL_PROPERTIES = 450
"""Of one object. llguidance keeps four items for each at once, and 2000 in all."""
LOWEST_NUMBER = -(2.0**63) + 1024
"""The double above the lowest 64-bit integer: for that one, llguidance 1.9 runs off the end of its stack."""
_TRIED_TOKENS = 8
_STRAY_TOKEN = "doesn't satisfy the grammar"  # how llguidance says that nothing is wrong with the grammar
_SCHEMAS = re.compile(r"^\w+: (%json .*)$", re.MULTILINE)


class GrammarFailed(Exception):
    """A token that the grammar does not allow: masks and tokens do not belong together."""


class GrammarMask:
    """The `allowed_tokens` hook of one request. Lives on the engine's thread."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, param: str) -> None:
        self._matcher = matcher
        self._param = param
        self._words = -(-vocab_size // 32)
        self._consumed = 0

    def __call__(self, output_ids: Sequence[int]) -> np.ndarray:
        """int32 [ceil(vocab / 32)], one bit a token.

        Raises:
            GrammarFailed: the last token was not allowed.
            InvalidRequest: the schema goes beyond the grammar engine's limits here.
        """
        if len(output_ids) < self._consumed:
            self._matcher.reset()
            self._consumed = 0
        new = list(output_ids[self._consumed :])
        if new and not self._matcher.consume_tokens(new):
            self._raise_error()
        self._consumed = len(output_ids)
        mask = np.zeros((1, self._words), np.int32)
        fill_next_token_bitmask(self._matcher, mask)
        if self._matcher.is_error():
            self._raise_error()
        words: np.ndarray = mask[0]
        return words

    def _raise_error(self) -> NoReturn:
        reason = _reason_of(self._matcher)
        if _STRAY_TOKEN in reason:
            raise GrammarFailed(reason)
        raise InvalidRequest(self._param, "schema", f"one that can be followed ({reason})")


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Building it reads the whole vocabulary; do it once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        """`vocab_size` is the model's: it may have rows that the tokenizer knows nothing about."""
        self._vocab_size = vocab_size
        wrapped = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, stop_token_ids[0]))
        self._vocabulary = llguidance.LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=list(stop_token_ids))

    def compile(self, grammar: str, count: int, param: str) -> list[GrammarMask]:
        """One mask for each of `count` choices.

        Raises:
            ApiError: 400 naming `param` if the grammar (in effect, its JSON Schema) is not supported.
        """
        vocabulary = self._vocabulary
        matcher = _compile(vocabulary, grammar, param)
        for schema in sorted(set(_SCHEMAS.findall(grammar))):
            _try_out(_compile(vocabulary, f"start: {schema}\n", param), vocabulary, param)
        return [GrammarMask(matcher.deep_copy(), self._vocab_size, param) for _ in range(count)]


def _compile(vocabulary: llguidance.LLTokenizer, grammar: str, param: str) -> llguidance.LLMatcher:
    source = llguidance.LLMatcher.grammar_from_lark(grammar)
    matcher = llguidance.LLMatcher(vocabulary, source, log_level=0)
    if matcher.is_error():
        raise _unsupported(param, _reason_of(matcher))
    return matcher


def _try_out(matcher: llguidance.LLMatcher, vocabulary: llguidance.LLTokenizer, param: str) -> None:
    """Goes a few tokens into a schema: some that compile let nothing begin, or exceed limits at their first brace."""
    for _ in range(_TRIED_TOKENS):
        matcher.compute_bitmask()
        if matcher.is_error():
            raise _unsupported(param, _reason_of(matcher))
        opening = (vocabulary.tokenize_str(brace) for brace in "{[")
        steps = [ids for ids in (matcher.compute_ff_tokens(), *opening) if ids and matcher.validate_tokens(ids)]
        if not steps or matcher.is_stopped():
            return
        matcher.consume_token(steps[0][0])


def _unsupported(param: str, reason: str) -> ApiError:
    return invalid(param, f"{param}: this schema is not supported: {reason}")


def _reason_of(matcher: llguidance.LLMatcher) -> str:
    reason: str = matcher.get_error().strip().splitlines()[0]
    return "no text fits it" if reason.startswith("NoExtension") else reason


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_id: int) -> None:
        self.eos_token_id = eos_id
        self.bos_token_id = tokenizer.bos_id
        controls = tokenizer.special_ids.union(tokenizer.controls.values())
        self.special_token_ids = sorted(token_id for token_id in controls if token_id < vocab_size)
        self.tokens = [_token_bytes(tokenizer, token_id, controls) for token_id in range(vocab_size)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        # Text that a schema gives word for word stays text, whatever it spells.
        return self._tokenizer.encode_parts([text.decode(errors="replace") if isinstance(text, bytes) else text])


def _token_bytes(tokenizer: Tokenizer, token_id: int, controls: frozenset[int]) -> bytes:
    try:
        data = tokenizer.id_to_bytes(token_id)
    except KeyError:
        return b""
    # The library's mark for tokens that are no text.
    return b"\xff" + data if token_id in controls else data


def is_bound(recipe: Recipe | None, goal: Goal | None) -> bool:
    """True if a goal needs a grammar. Text alone is also what a format without grammars is asked for."""
    return goal is not None and (isinstance(recipe, GrammarRecipe) or goal.schema is not None or bool(goal.tools))


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
    for schema in schemas:
        _check_limits(schema, param)
    return recipe.write_grammar(goal, prompt_ids)


def _check_limits(schema: Any, param: str) -> None:
    """Raises ApiError for what the grammar engine could not survive or follow."""
    if isinstance(schema, int | float) and schema <= LOWEST_NUMBER:
        raise _unsupported(param, f"it holds {schema}; numbers must be above {LOWEST_NUMBER:.0f}")
    if isinstance(schema, str) and len(schema) > MAX_STRING_CHARACTERS:
        raise _unsupported(param, f"it holds a string of {len(schema)} characters, at most {MAX_STRING_CHARACTERS}")
    if isinstance(schema, list):
        for item in schema:
            _check_limits(item, param)
    if not isinstance(schema, Mapping):
        return
    properties, required = schema.get("properties"), schema.get("required")
    names = set(properties) if isinstance(properties, Mapping) else set()
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    if (most := len(names - needed)) > MAX_OPTIONAL_PROPERTIES:
        limit = f"an object has {most} optional properties, at most {MAX_OPTIONAL_PROPERTIES} can be followed"
        raise _unsupported(param, limit)
    for name, value in schema.items():
        _check_limits(name, param)
        _check_limits(value, param)
