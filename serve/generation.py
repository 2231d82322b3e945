"""One choice: tokens from the engine become deltas, logprobs and an ending that clients understand."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from resin import FinishReason
from resin.events import TokensEvent
from resin.recipes import Delta, Parser, ReasoningDelta, TextDelta, Tokenizer, ToolCallDelta
from resin.recipes.characters import CharacterStream
from serve.stop_strings import StopMatcher
from serve.text_rows import ScoredText, TextRows, TokenLogprob


class Ending(enum.StrEnum):
    """Why a choice is over, before an API gives it its own word."""

    STOP = "stop"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(slots=True)
class Update:
    """What is new in a choice: neighbouring deltas of a kind are merged, and `logprobs` has a row for every token."""

    deltas: list[Delta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ending: Ending | None = None

    @property
    def text(self) -> str:
        """The text of all deltas that are text."""
        return "".join(delta.text for delta in self.deltas if isinstance(delta, TextDelta))

    @property
    def text_logprobs(self) -> list[TokenLogprob]:
        """The rows of the tokens that this text begins in."""
        return [row for delta in self.deltas if isinstance(delta, ScoredText) for row in delta.logprobs]

    def add(self, delta: Delta) -> None:
        self.add_all((delta,))

    def extend(self, later: Update) -> None:
        """Adds the update that follows this one."""
        self.add_all(later.deltas)
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.ending = later.ending

    def add_all(self, deltas: Sequence[Delta]) -> None:
        """Appends deltas, joining runs of text and of reasoning."""
        if not self.deltas and len(deltas) <= 1:
            self.deltas += deltas
            return
        if self.deltas and not isinstance(self.deltas[-1], ToolCallDelta):
            deltas = (self.deltas.pop(), *deltas)
        for _, run in groupby(deltas, type):
            same = list(run)
            if isinstance(same[0], ToolCallDelta):
                self.deltas += same
                continue
            text = "".join([delta.text for delta in same])  # type: ignore[union-attr]  # all of one kind
            if isinstance(same[0], ReasoningDelta):
                self.deltas.append(ReasoningDelta(text))
                continue
            is_incomplete = any(delta.is_incomplete for delta in same)  # type: ignore[union-attr]
            if isinstance(same[0], ScoredText):
                rows = tuple(row for delta in same for row in delta.logprobs)  # type: ignore[union-attr]
                self.deltas.append(ScoredText(text, is_incomplete, rows))
            else:
                self.deltas.append(TextDelta(text, is_incomplete))


class PlainParser:
    """Every token is text: what raw completions use instead of a recipe's parser."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._characters = CharacterStream(tokenizer)

    def push(self, token_ids: Iterable[int]) -> list[Delta]:
        text = "".join(map(self._characters.push, token_ids))
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        text = self._characters.flush()
        return [TextDelta(text)] if text else []


class Generation:
    """A choice in the making. Lives on the event loop's thread.

    Tokens are gathered as they come and read only when somebody asks for an update, so a client that lags costs no
    work. `completion_tokens` counts what was read: tokens after a stop string are not the client's.
    """

    def __init__(
        self,
        parser: Parser,
        *,
        stops: Sequence[str] = (),
        wants_logprobs: bool = False,
        text_rows: TextRows | None = None,
        is_empty: bool = False,
    ) -> None:
        """A choice that nothing has come of yet.

        Args:
            parser: makes deltas of tokens.
            stops: strings that end it.
            wants_logprobs: keep a row for every token.
            text_rows: if given, text comes as ScoredText; rows are kept then, too.
            is_empty: the client asked for no token at all; the one that the engine generates is dropped.
        """
        self._parser = parser
        self._matcher = StopMatcher(stops)
        self._has_stops = bool(stops)
        self._text_rows = text_rows
        self._wants_logprobs = wants_logprobs or text_rows is not None
        self._is_empty = is_empty
        self.on_stop: Callable[[], None] = lambda: None  # called when a stop string ends it before the engine does
        self._pending: list[int] = []
        self._pending_logprobs: list[TokenLogprob] = []
        self._reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.ending: Ending | None = None
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.tool_calls = 0

    def has_news(self, interval: int) -> bool:
        """True if an update is due: the first token, `interval` tokens after it, or the ending."""
        if self._pending and (len(self._pending) >= interval or not self.completion_tokens):
            return True
        return self._reason is not None and self.ending is None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the choice."""
        return self._matcher.matched

    def add_tokens(self, token_ids: list[int], event: TokensEvent, begin: int) -> None:
        """New tokens, whose logprobs are the event's rows from `begin` on."""
        if self.ending is not None or self._is_empty:
            return
        self._pending += token_ids
        if self._wants_logprobs and event.logprobs is not None:
            self._pending_logprobs += _logprobs(event, token_ids, begin)

    def finish(self, reason: FinishReason, error: BaseException | None) -> None:
        if self._reason is None:
            self._reason, self.error = reason, error

    def take_update(self) -> Update:
        """Reads everything that is pending; `ending` is set in the last update."""
        update = Update()
        if self.ending is not None:
            return update
        token_ids, self._pending = self._pending, []
        rows, self._pending_logprobs = self._pending_logprobs, []
        used = self._read(token_ids, rows, update)
        self.completion_tokens += used
        update.token_ids = token_ids[:used]
        update.logprobs = rows[:used]
        if self._matcher.matched is not None:
            self._end(update, Ending.STOP_STRING)
            if self._reason is None:
                self.on_stop()
        elif self._reason is not None:
            for delta in self._parser.finish():
                self._deliver(delta, update)
            self._release_held(update)
            self._end(update, self._ending_of(self._reason))
        return update

    def _read(self, token_ids: list[int], rows: list[TokenLogprob], update: Update) -> int:
        """Parses tokens and says how many were the client's."""
        if not self._has_stops and self._text_rows is None:
            deltas = self._parser.push(token_ids)
            for delta in deltas:
                if type(delta) is not TextDelta:
                    self.reasoning_tokens += type(delta) is ReasoningDelta
                    self.tool_calls += type(delta) is ToolCallDelta
            update.add_all(deltas)
            return len(token_ids)
        for index, token_id in enumerate(token_ids):
            if self._text_rows is not None:
                self._text_rows.add_token(rows[index])
            for delta in self._parser.push((token_id,)):
                self.reasoning_tokens += type(delta) is ReasoningDelta
                self._deliver(delta, update)
            if self._matcher.matched is not None:
                return index + 1
        return len(token_ids)

    def _deliver(self, delta: Delta, update: Update) -> None:
        if self._text_rows is not None:
            if isinstance(delta, TextDelta):
                self._text_rows.add_text(delta.text)
            elif isinstance(delta, ReasoningDelta):
                self._text_rows.add_reasoning(delta.text)
            else:
                self._text_rows.add_call()
        if isinstance(delta, TextDelta):
            if shown := self._matcher.push(delta.text):
                self._show(shown, update, is_incomplete=delta.is_incomplete)
        elif self._matcher.matched is None:
            if isinstance(delta, ToolCallDelta):
                self.tool_calls += 1
                self._release_held(update)
            update.add(delta)

    def _release_held(self, update: Update) -> None:
        """Shows what was held back in case it became a stop string."""
        if self._matcher.matched is None and (held := self._matcher.flush()):
            self._show(held, update)

    def _show(self, text: str, update: Update, *, is_incomplete: bool = False) -> None:
        if self._text_rows is None:
            update.add(TextDelta(text, is_incomplete))
        else:
            update.add(ScoredText(text, is_incomplete, self._text_rows.show(text)))

    def _end(self, update: Update, ending: Ending) -> None:
        self.ending = update.ending = ending

    def _ending_of(self, reason: FinishReason) -> Ending:
        if self._matcher.matched is not None:
            return Ending.STOP_STRING
        if self._is_empty and reason is FinishReason.STOP:
            return Ending.LENGTH
        if reason is FinishReason.STOP and self.tool_calls:
            return Ending.TOOL_CALLS
        return Ending(reason.value)


def _logprobs(event: TokensEvent, token_ids: list[int], begin: int) -> list[TokenLogprob]:
    assert event.logprobs is not None
    end = begin + len(token_ids)
    chosen = event.logprobs[begin:end].tolist()
    if event.top_ids is None or event.top_logprobs is None:
        return [TokenLogprob(token_id, logprob) for token_id, logprob in zip(token_ids, chosen, strict=True)]
    tops = zip(event.top_ids[begin:end].tolist(), event.top_logprobs[begin:end].tolist(), strict=True)
    return [
        TokenLogprob(token_id, logprob, tuple(zip(ids, values, strict=True)))
        for token_id, logprob, (ids, values) in zip(token_ids, chosen, tops, strict=True)
    ]
