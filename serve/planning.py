"""From a conversation request of any API to the choices that the engine generates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from resin.recipes import Goal, Message, Role, Text, Tool, ToolResult
from serve.errors import invalid
from serve.generation import Generation
from serve.schemas.chat import AnswerFields, ToolChoice
from serve.schemas.sampling import SamplingFields, build_params, seed_of_choice
from serve.service import Plan, Service, length_of, service_of
from serve.structured import is_bound
from serve.text_rows import TextRows

T = TypeVar("T")

MOST_TOOL_CHARACTERS = 24
"""For each token of the context: some formats write a sixth of a tool's JSON, and a token has about 4 characters."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools may, must or must not be called.

    Attributes:
        tools: what the prompt offers.
        required: at least one call.
        only: the name of the one tool that has to be called.
        is_parallel: several calls in one answer are fine.
        strict: names of the tools whose arguments must fit their schemas even where calling is free.
        is_forbidden: there are tools, none of which may be called.
    """

    tools: tuple[Tool, ...] = ()
    required: bool = False
    only: str | None = None
    is_parallel: bool = True
    strict: frozenset[str] = frozenset()
    is_forbidden: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """A conversation to be continued, in no API's own words.

    Attributes:
        messages: the turns.
        sampling: temperature and the like, n, seed.
        max_tokens: longest answer; None for what fits, 0 for none at all.
        names: fields of SamplingParams -> what the API calls them; "max_output_tokens" must be among them.
        use: tools.
        schema: JSON Schema that the answer must fit, and `schema_param`, the field that asked for it.
        options: for the recipe.
        stops: stop strings.
        logprobs: None for none, else how many alternatives.
        continues_last: the last message is the beginning of the answer.
    """

    messages: Sequence[Message]
    sampling: SamplingFields
    max_tokens: int | None
    names: Mapping[str, str]
    use: ToolUse = ToolUse()
    schema: Mapping[str, Any] | None = None
    schema_param: str = "response_format"
    options: Mapping[str, Any] = field(default_factory=dict)
    stops: Sequence[str] = ()
    logprobs: int | None = None
    continues_last: bool = False


async def plan_answer(request: web.Request, ask_of: Callable[[T], Ask], body: T) -> list[Plan]:
    """The prompt and policy of each choice, made aside if they may take long.

    Raises:
        ApiError: 400 naming the field at fault.
    """
    service = service_of(request)
    ask = await service.aside.run(length_of(request), ask_of, body)
    needs_grammar = goal_of(ask.use, ask.schema, ask.schema_param)[0] is not None
    length = max(length_of(request), sum(map(len, texts_of(ask.messages))))
    return await service.aside.run(math.inf if needs_grammar else length, _plan_choices, service, ask)


def texts_of(messages: Sequence[Message]) -> list[str]:
    """What stands in the prompt as it is in the conversation; formats leave reasoning out, and write calls anew."""
    blocks = [block for message in messages for block in message.blocks]
    return [block.text for block in blocks if isinstance(block, Text | ToolResult)]


def _check_length(service: Service, ask: Ask) -> None:
    service.check_length(texts_of(ask.messages), "messages")
    characters = sum(len(msgspec.json.encode(tool.to_function())) for tool in ask.use.tools)
    limit = service.engine.context_length * MOST_TOOL_CHARACTERS
    if characters > limit:
        message = (
            f"tools: {characters} characters of JSON, which is more than the context holds in any format ({limit})"
        )
        raise invalid("tools", message, code="context_length_exceeded")


def _plan_choices(service: Service, ask: Ask) -> list[Plan]:
    _check_length(service, ask)
    prompt_ids = render_prompt(service, ask)
    recipe = service.recipe
    assert recipe is not None
    # Without any token to generate, the prompt is still read, which takes one step.
    asked = None if ask.max_tokens is None else max(1, ask.max_tokens)
    limit = service.output_tokens(asked, len(prompt_ids), ask.names["max_output_tokens"])
    count = service.choices(ask.sampling.n)
    goal, param = goal_of(ask.use, ask.schema, ask.schema_param)
    masks = service.masks(goal if is_bound(recipe, goal) else None, prompt_ids, count, param)
    params = build_params(
        ask.sampling,
        defaults=service.sampling,
        max_output_tokens=limit,
        stop_token_ids=recipe.stop_token_ids,
        logprobs=ask.logprobs,
        names=dict(ask.names),
    )
    return [
        Plan(
            prompt_ids,
            dataclasses.replace(params, seed=seed_of_choice(params.seed, index), allowed_tokens=masks[index]),
            Generation(
                recipe.create_parser(prompt_ids, tools=ask.use.tools),
                stops=ask.stops,
                text_rows=None if ask.logprobs is None else TextRows(service.tokenizer),
                is_empty=ask.max_tokens == 0,
            ),
        )
        for index in range(count)
    ]


def render_prompt(service: Service, ask: Ask) -> list[int]:
    """The prompt of a conversation, the beginning of the answer included.

    Raises:
        ApiError: 400 if the model's format cannot say it, 501 if the server has no recipe.
    """
    options = {"current_date": date.today().isoformat(), **ask.options}
    continued = ask.messages[-1] if ask.continues_last and ask.messages else None
    if continued is None or continued.role is not Role.ASSISTANT:
        return service.render(ask.messages, ask.use.tools, options)
    return service.render(ask.messages[:-1], ask.use.tools, {**options, "answer_start": continued.text})


def tool_use_of(body: AnswerFields) -> ToolUse:
    """The tools of a request in Chat Completions' words."""
    return ToolUse(
        tuple(body.offered_tools()),
        required=body.tool_choice == "required",
        only=body.tool_choice.function.name if isinstance(body.tool_choice, ToolChoice) else None,
        is_parallel=body.parallel_tool_calls is not False,
        strict=frozenset(tool.function.name for tool in body.tools or [] if tool.function.strict),
        is_forbidden=bool(body.tools) and body.tool_choice == "none",
    )


def goal_of(
    use: ToolUse, schema: Mapping[str, Any] | None, schema_param: str = "response_format"
) -> tuple[Goal | None, str]:
    """What the response is bound to, and which field says so.

    Raises:
        ApiError: a tool choice without such a tool.
    """
    offered = tuple(tool if tool.name in use.strict else Tool(tool.name) for tool in use.tools)
    if use.only is not None:
        chosen = tuple(tool for tool in use.tools if tool.name == use.only)
        if not chosen:
            raise invalid("tool_choice", f"tool_choice: there is no tool named {use.only!r}")
        return Goal(tools=chosen, is_parallel=False), "tools"
    if use.required:
        if not use.tools:
            raise invalid("tool_choice", "tool_choice: a call cannot be required without tools")
        return Goal(tools=use.tools, is_parallel=use.is_parallel), "tools"
    if schema is not None:
        return Goal(schema=schema, tools=offered, is_parallel=use.is_parallel), schema_param
    if use.tools and (use.strict or not use.is_parallel):
        return Goal(tools=offered, is_parallel=use.is_parallel, allows_text=True), "tools"
    return (Goal(allows_text=True) if use.is_forbidden else None), "tool_choice"


def reasoning_options(effort: str | None, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """How much to think, in the recipes' words; `extra` goes through as it is."""
    options: dict[str, Any] = {}
    if effort is not None:
        options["reasoning_effort"] = effort
        if effort in ("none", "minimal"):
            options["enable_thinking"] = False
    reserved = ("self", "messages", "tools", "add_generation_prompt", "answer_start")
    return options | {key: value for key, value in (extra or {}).items() if key not in reserved}
