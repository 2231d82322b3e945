"""Which of a response's tokens made the text that a client sees, so that logprobs are reported for those alone."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from resin.recipes import TextDelta, Tokenizer


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One generated token; `top` holds (id, logprob) of the most likely ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ScoredText(TextDelta):
    """Text with the rows of the tokens that it begins in."""

    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class _Token:
    row: TokenLogprob | None  # None once it is reported
    start: int
    end: int


class TextRows:
    """Follows a parser and a stop matcher: rows go in with their tokens and come out with the text that is shown.

    Tokens of tags, reasoning, calls, dropped white space and stop strings never come out. A token belongs to a text if
    some of its bytes do. Positions are bytes of what tokens spelled and no delta has used yet, so text is looked for
    where the newest token lets it end: what was held back before it comes out late.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._spelled = b""
        self._tokens: list[_Token] = []
        self._newest = 0
        self._text_rows: deque[tuple[int, TokenLogprob]] = deque()  # with where each starts in all text
        self._text_bytes = 0
        self._shown_bytes = 0

    def add_token(self, row: TokenLogprob) -> None:
        """The next token; the deltas that it brings follow."""
        self._newest = len(self._spelled)
        if row.token_id not in self._tokenizer.special_ids:
            self._spelled += token_bytes(self._tokenizer, row.token_id)
        self._tokens.append(_Token(row, self._newest, len(self._spelled)))

    def add_text(self, text: str) -> None:
        """The parser took this for text."""
        spans = self._spans_of(text.encode())
        for begin, end in spans:
            for token in self._tokens:
                if token.row is not None and max(token.start, begin) < min(token.end, end):
                    self._text_rows.append((self._text_bytes + max(0, token.start - begin), token.row))
                    token.row = None
            self._text_bytes += end - begin
        self._use_up(spans[-1][1])

    def add_reasoning(self, text: str) -> None:
        """The parser took this for reasoning."""
        self._use_up(self._spans_of(text.encode())[-1][1])

    def add_call(self) -> None:
        """A call ends in the newest token."""
        self._use_up(self._newest)

    def show(self, text: str) -> tuple[TokenLogprob, ...]:
        """The rows of text that was added, now that the client sees it."""
        self._shown_bytes += len(text.encode())
        rows = []
        while self._text_rows and self._text_rows[0][0] < self._shown_bytes:
            rows.append(self._text_rows.popleft()[1])
        return tuple(rows)

    def _spans_of(self, data: bytes) -> list[tuple[int, int]]:
        begin = self._spelled.find(data, max(0, self._newest - len(data)))
        if begin < 0:
            begin = self._spelled.rfind(data)  # the newest token only closed it
        if begin >= 0:
            return [(begin, begin + len(data))]
        # Tags that meant nothing stood between: the tokens, from the last, that spell it together.
        spans: list[tuple[int, int]] = []
        rest = data
        for token in reversed(self._tokens):
            piece = self._spelled[token.start : token.end]
            if piece and rest.endswith(piece):
                rest = rest[: -len(piece)]
                spans.insert(0, (token.start, token.end))
        # What is still not found are bytes that are no characters and came out as U+FFFD.
        return [(0, len(self._spelled))] if rest else spans

    def _use_up(self, end: int) -> None:
        self._spelled = self._spelled[end:]
        self._newest = max(0, self._newest - end)
        kept = [token for token in self._tokens if token.end > end]
        self._tokens = [_Token(token.row, max(0, token.start - end), token.end - end) for token in kept]


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """What a token spells; nothing for a padded row of the head."""
    try:
        return tokenizer.id_to_bytes(token_id)
    except KeyError:
        return b""
