"""`resin chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from datetime import date

from resin import Engine, FinishedEvent, InvalidRequest, Request, SamplingParams, TokensEvent
from resin.interrupts import Uninterrupted
from resin.models.sampling_defaults import SamplingDefaults
from resin.recipes import Block, Delta, Message, Parser, Reasoning, ReasoningDelta, Recipe, Role, Text, TextDelta
from serve.commands.loading import load_model
from serve.commands.message_reader import MessageReader
from serve.commands.options import add_model_arguments, add_sampling_arguments

_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser("chat", help="talk to a model in the terminal", description=__doc__)
    add_model_arguments(parser, max_sequences=1)
    parser.add_argument("--system", metavar="TEXT", help="system message; default: none but the model's own")
    parser.add_argument(
        "--max-tokens",
        dest="max_output_tokens",
        type=int,
        metavar="N",
        help="longest answer, reasoning included; default: the model's own, or 4096",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="repeatable answers; default: a new one each time")
    add_sampling_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Reads messages, streams answers, until the input ends; returns 1 if a message could not be answered."""
    loaded = load_model(args)
    if loaded.recipe is None:
        raise InvalidRequest("recipe", args.recipe, "a conversation format: this model's files carry none")
    conversation = Conversation(loaded.engine, loaded.recipe, loaded.sampling, args.system, args.seed)
    reader = MessageReader()
    if reader.is_interactive:
        print(f"{loaded.name}: {_HELP}", file=sys.stderr)
    status = 0
    with loaded.engine:
        while True:
            try:
                message = reader.read()
                if message in ("/exit", "/quit"):
                    return status
                if message == "/reset":
                    conversation.reset()
                elif message == "/help":
                    print(_HELP, file=sys.stderr)
                elif message:
                    conversation.answer(message)
            except EOFError:
                return status
            except KeyboardInterrupt:
                if conversation.is_broken or not reader.is_interactive:
                    raise
                print(file=sys.stderr)
            except InvalidRequest as error:
                print(f"resin: {error}", file=sys.stderr)
                status = 1


class Conversation:
    """The turns so far, and the engine that continues them.

    Attributes:
        is_broken: an answer was cut short at a moment that nothing can go on from.

    Raises:
        InvalidRequest: a seed out of its range.
    """

    def __init__(
        self, engine: Engine, recipe: Recipe, sampling: SamplingDefaults, system: str | None, seed: int | None
    ) -> None:
        self._engine = engine
        self._recipe = recipe
        self._longest_answer = sampling.max_output_tokens
        self._params = SamplingParams(stop_token_ids=recipe.stop_token_ids, seed=seed, **sampling.params())
        self._opening = [Message(Role.SYSTEM, [Text(system)])] if system else []
        self._turns: list[Message] = []
        self.is_broken = False

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self._turns = []

    def answer(self, text: str) -> None:
        """Streams the answer to a user's message to standard output, then says how fast it was. Ctrl-C stops it.

        Raises:
            InvalidRequest: the message cannot be answered; the conversation is as it was.
            KeyboardInterrupt: a second Ctrl-C, before the first was obeyed.
        """
        with Uninterrupted() as press:
            try:
                self._answer(text, press)
                press.is_requested = False
            except KeyboardInterrupt:
                self.is_broken = True
                raise

    def _answer(self, text: str, press: Uninterrupted) -> None:
        turns, prompt_ids = self._fit([*self._turns, Message(Role.USER, [Text(text)])])
        room = self._engine.context_length - len(prompt_ids)
        request = self._engine.submit(
            prompt_ids,
            sampling_params=dataclasses.replace(self._params, max_output_tokens=min(self._longest_answer, room)),
        )
        self._turns = turns
        blocks = self._stream(request, self._recipe.create_parser(prompt_ids), press)
        self._turns.append(Message(Role.ASSISTANT, blocks))

    def _fit(self, turns: list[Message]) -> tuple[list[Message], list[int]]:
        """The turns without the oldest ones that the context has no room for, and their prompt."""
        for first in range(0, len(turns), 2):
            kept = turns[first:]
            prompt_ids = self._recipe.render([*self._opening, *kept], current_date=date.today().isoformat())
            if len(prompt_ids) < self._engine.context_length:
                if first:
                    print("(the oldest turns no longer fit and are forgotten)", file=sys.stderr)
                return kept, prompt_ids
        raise InvalidRequest(
            "message", f"{len(prompt_ids)} tokens", f"fewer than the context's {self._engine.context_length}"
        )

    def _stream(self, request: Request, parser: Parser, press: Uninterrupted) -> list[Block]:
        printer = _Printer()
        started = time.perf_counter()
        first: float | None = None
        count = 0
        while self._engine.has_work():
            if press.is_requested:
                self._engine.cancel(request)
            for event in self._engine.step():
                if isinstance(event, TokensEvent):
                    first = first or time.perf_counter()
                    count += len(event.token_ids)
                    printer.print(parser.push(event.token_ids.tolist()))
                elif isinstance(event, FinishedEvent) and event.request.error is not None:
                    raise event.request.error
        printer.print(parser.finish())
        ended = time.perf_counter()
        printer.close()
        first = first or ended
        speed = f"{(count - 1) / (ended - first):.1f} tokens/s, " if count > 1 and ended > first else ""
        print(f"[{count} tokens, {speed}first after {first - started:.2f} s]", file=sys.stderr)
        return printer.blocks()


class _Printer:
    """Writes deltas as they come: reasoning dimmed where colours work, tool calls as a line."""

    def __init__(self) -> None:
        self._styled = sys.stdout.isatty()
        self._is_dim = False
        self._texts: list[str] = []
        self._reasoning: list[str] = []

    def print(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                self._reasoning.append(delta.text)
                self._write(delta.text, dim=True)
            elif isinstance(delta, TextDelta):
                self._texts.append(delta.text)
                self._write(delta.text, dim=False)
            else:
                self._write(f"\n{delta.name}({delta.arguments})\n", dim=False)
        sys.stdout.flush()

    def close(self) -> None:
        self._write("\n", dim=False)
        sys.stdout.flush()

    def blocks(self) -> list[Block]:
        """The assistant's turn."""
        reasoning: list[Block] = [Reasoning("".join(self._reasoning))] if self._reasoning else []
        return [*reasoning, Text("".join(self._texts))]

    def _write(self, text: str, *, dim: bool) -> None:
        if dim != self._is_dim:
            self._is_dim = dim
            style = (_DIM if dim else _PLAIN) if self._styled else ""
            sys.stdout.write(style + ("" if dim else "\n\n"))
        sys.stdout.write(text)
