"""`resin chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from datetime import date

from resin import Engine, FinishedEvent, InvalidRequest, Request, SamplingParams, TokensEvent
from resin.models.registry import MODELS, ChatDefaults
from resin.recipes import Block, Delta, Message, Parser, Reasoning, ReasoningDelta, Recipe, Role, Text, TextDelta
from serve.commands.loading import add_model_arguments, load_model

_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser("chat", help="talk to a model in the terminal", description=__doc__)
    add_model_arguments(parser, max_sequences=1)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help=f"longest answer; default: {_default_of('max_output_tokens')}"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help=f"0 is greedy; default: {_default_of('temperature')}"
    )
    parser.add_argument("--top-p", type=float, metavar="P", help=f"default: {_default_of('top_p')}")
    parser.add_argument("--seed", type=int, metavar="N", help="repeatable answers")
    parser.set_defaults(run=run)


def _default_of(name: str) -> str:
    return f"the model's own, or {getattr(ChatDefaults(), name)}"


def run(args: argparse.Namespace) -> int:
    """Reads lines, streams answers, until the input ends."""
    loaded = load_model(args)
    if loaded.recipe is None:
        raise InvalidRequest("recipe", args.recipe, "a conversation format: this model's files carry none")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    conversation = Conversation(loaded.engine, loaded.recipe, args)
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        print(f"{loaded.name}: {_HELP}", file=sys.stderr)
    with loaded.engine:
        while True:
            try:
                line = input("> " if is_interactive else "").strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                print(file=sys.stderr)
                continue
            if line in ("/exit", "/quit"):
                return 0
            if line == "/reset":
                conversation.reset()
            elif line == "/help":
                print(_HELP, file=sys.stderr)
            elif line:
                conversation.answer(line)


class Conversation:
    """The turns so far, and the engine that continues them."""

    def __init__(self, engine: Engine, recipe: Recipe, args: argparse.Namespace) -> None:
        self._engine = engine
        self._recipe = recipe
        self._args = args
        self._defaults = MODELS[args.source].chat if args.source in MODELS else ChatDefaults()
        self._turns: list[Message] = []
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self._turns = [Message(Role.SYSTEM, [Text(self._args.system)])] if self._args.system else []

    def answer(self, text: str) -> None:
        """Streams the answer to a user's message to standard output, then says how fast it was."""
        self._turns.append(Message(Role.USER, [Text(text)]))
        prompt_ids = self._render()
        args, defaults = self._args, self._defaults
        room = self._engine.context_length - len(prompt_ids)
        request = self._engine.submit(
            prompt_ids,
            sampling_params=SamplingParams(
                max_output_tokens=min(defaults.max_output_tokens if args.max_tokens is None else args.max_tokens, room),
                stop_token_ids=self._recipe.stop_token_ids,
                temperature=defaults.temperature if args.temperature is None else args.temperature,
                top_p=defaults.top_p if args.top_p is None else args.top_p,
                seed=args.seed,
            ),
        )
        blocks = self._stream(request, self._recipe.create_parser(prompt_ids))
        self._turns.append(Message(Role.ASSISTANT, blocks))

    def _render(self) -> list[int]:
        """The prompt; the oldest turns go when the context is full."""
        date_text = date.today().isoformat()
        while True:
            prompt_ids = self._recipe.render(self._turns, current_date=date_text)
            if len(prompt_ids) < self._engine.context_length:
                return prompt_ids
            kept = 1 if self._turns[0].role is Role.SYSTEM else 0
            if len(self._turns) <= kept + 1:
                self._turns.pop()
                raise InvalidRequest("message", f"{len(prompt_ids)} tokens", f"under {self._engine.context_length}")
            del self._turns[kept : kept + 2]
            print("(the oldest turns no longer fit and are forgotten)", file=sys.stderr)

    def _stream(self, request: Request, parser: Parser) -> list[Block]:
        printer = _Printer()
        started = time.perf_counter()
        first: float | None = None
        count = 0
        try:
            while not request.is_finished or self._engine.has_work():
                for event in self._engine.step():
                    if isinstance(event, TokensEvent):
                        first = first or time.perf_counter()
                        count += len(event.token_ids)
                        printer.print(parser.push(event.token_ids.tolist()))
                    elif isinstance(event, FinishedEvent) and event.request.error is not None:
                        raise event.request.error
        except KeyboardInterrupt:
            self._engine.cancel(request)
            while self._engine.has_work():
                self._engine.step()
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
