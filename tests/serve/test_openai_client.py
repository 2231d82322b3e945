"""The official client against the server."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.logprobs import completion_logprobs
from tests.serve.conftest import WORDS
from tests.serve.scripted_runner import CHOSEN_LOGPROB, OTHER_LOGPROB, PROMPT_LOGPROB, TOKENIZER

TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="scripted", messages=ask("[words]"))
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", WORDS, "stop")
    assert answer.usage is not None
    tokens = len(WORDS.encode()) + 1  # the end token counts
    assert answer.usage.completion_tokens == tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + tokens
    assert answer.usage.prompt_tokens_details is not None and answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="scripted", messages=ask("[words]"), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(WORDS.encode()) + 1
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert deltas[0].delta.role == "assistant"
    assert "".join(delta.delta.content or "" for delta in deltas) == WORDS
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert all("\ufffd" not in (delta.delta.content or "") for delta in deltas)


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.chat.completions.create(
        model="scripted", messages=ask("[words]"), stream=True, stream_options=options
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts) and counts[-1] == len(WORDS.encode()) + 1
    assert len(counts) > 2


def test_max_tokens_under_both_names(client: openai.OpenAI) -> None:
    for limit in ({"max_tokens": 5}, {"max_completion_tokens": 5}):
        answer = client.chat.completions.create(model="scripted", messages=ask("[words]"), **limit)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == WORDS[:5]
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 5


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_tokens(client: openai.OpenAI, stream: bool) -> None:
    # One token a byte: every stop string spans several.
    options: Any = {"model": "scripted", "messages": ask("[words]"), "stop": ["brown cow", "jumps", "over"]}
    if stream:
        chunks = list(client.chat.completions.create(stream=True, **options))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        answer = client.chat.completions.create(**options)
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert answer.usage.completion_tokens == len("The quick brown fox jumps")
    assert text == "The quick brown fox "
    assert finish == "stop"


def test_choices_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="scripted", messages=ask("[words]"), n=3, logprobs=True, top_logprobs=2, max_tokens=4, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None and answer.usage.completion_tokens == 12
    for choice in answer.choices:
        assert choice.message.content == "The "
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [entry.token for entry in choice.logprobs.content] == ["T", "h", "e", " "]
        first = choice.logprobs.content[0]
        assert first.logprob == pytest.approx(CHOSEN_LOGPROB) and first.bytes == [ord("T")]
        assert [top.logprob for top in first.top_logprobs] == pytest.approx([CHOSEN_LOGPROB, OTHER_LOGPROB])


def test_logprobs_while_streaming_cover_every_token(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="scripted", messages=ask("[words]"), logprobs=True, stream=True, n=2)
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for chunk in stream:
        for choice in chunk.choices:
            if choice.logprobs is not None and choice.logprobs.content is not None:
                for entry in choice.logprobs.content:
                    tokens[choice.index] += entry.bytes or []
    assert {index: bytes(data).decode() for index, data in tokens.items()} == {0: WORDS, 1: WORDS}


def test_reasoning(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="scripted", messages=ask("[think]"))
    message: Any = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me see.", "Forty-two.")
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("Let me see.") - 1 - 2 + 1
    stream: Any = client.chat.completions.create(model="scripted", messages=ask("[think]"), stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Let me see."
    assert "".join(delta.content or "" for delta in deltas) == "Forty-two."


def test_tool_calls(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="scripted", messages=ask("[call]"), tools=[TOOL])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Looking."
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Bonn"}')
    turns: Any = [
        *ask("[call]"),
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny [words]"},
    ]
    assert client.chat.completions.create(model="scripted", messages=turns).choices[0].message.content == WORDS


def test_tool_calls_while_streaming(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="scripted", messages=ask("[calls]"), tools=[TOOL], stream=True)
    chunks = list(stream)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls if call.function] == [
        (0, "weather", '{"city": "Bonn"}'),
        (1, "weather", '{"city": "Bonn"}'),
    ]
    assert calls[0].id != calls[1].id
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_completion_of_token_ids_with_echo_and_prompt_logprobs(client: openai.OpenAI) -> None:
    ids = TOKENIZER.encode("é[words]")
    answer = client.completions.create(model="scripted", prompt=ids, echo=True, logprobs=1, max_tokens=3, temperature=0)
    (choice,) = answer.choices
    assert choice.text == "é[words]The"
    logprobs = choice.logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert logprobs.tokens[:3] == ["bytes:\\xc3", "bytes:\\xa9", "["]
    expected: list[float | None] = [None, *[PROMPT_LOGPROB] * (len(ids) - 1), *[CHOSEN_LOGPROB] * 3]
    assert len(logprobs.token_logprobs) == len(ids) + 3
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(expected[1:])
    assert logprobs.top_logprobs is not None and logprobs.top_logprobs[-1] == {"e": pytest.approx(CHOSEN_LOGPROB)}


@given(text=st.text(alphabet="aé😀東½ ", min_size=1, max_size=8))
def test_text_offsets_say_where_each_token_begins(text: str) -> None:
    """Whatever characters are spread over several tokens: an offset is that of the character a token begins in."""
    ids = TOKENIZER.encode(text)
    offsets = completion_logprobs(ids, [0.0] * len(ids), [None] * len(ids), TOKENIZER, first_offset=7)["text_offset"]
    before = [b"".join(map(TOKENIZER.id_to_bytes, ids[:place])) for place in range(len(ids))]
    assert offsets == [7 + len(data.decode(errors="ignore")) for data in before]


def test_completion_that_only_scores_its_prompt(client: openai.OpenAI) -> None:
    ids = TOKENIZER.encode("abc")
    answer = client.completions.create(model="scripted", prompt=ids, echo=True, logprobs=0, max_tokens=0)
    assert answer.choices[0].text == "abc"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["a", "b", "c"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 0, 3)


@pytest.mark.parametrize("options", [{}, {"echo": True}, {"n": 3, "echo": True}, {"logprobs": 2}])
@pytest.mark.parametrize("prompt", ["[words]", ["[words]", "x"]])
def test_completion_of_no_tokens(client: openai.OpenAI, prompt: Any, options: Any) -> None:
    asked = {"model": "scripted", "prompt": prompt, "max_tokens": 0} | options
    texts = [text * bool(options.get("echo")) for text in ([prompt] if isinstance(prompt, str) else prompt)]
    answer = client.completions.create(**asked)
    assert [choice.text for choice in answer.choices] == [text for text in texts for _ in range(options.get("n", 1))]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
    assert chunks[-1].usage == answer.usage
    for choice in answer.choices:
        assert choice.text == "".join(c.text for chunk in chunks for c in chunk.choices if c.index == choice.index)


@pytest.mark.parametrize("seed", [2**64 - 1, -1, -(2**63), 0])
def test_every_seed_has_successors(client: openai.OpenAI, seed: int) -> None:
    chat = client.chat.completions.create(model="scripted", messages=ask("x"), seed=seed, n=3)
    text = client.completions.create(model="scripted", prompt="x", seed=seed, n=3)
    assert len(chat.choices) == len(text.choices) == 3


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_chat_of_no_tokens_is_refused(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=ask("x"), **{name: 0})
    assert caught.value.param == name


@pytest.mark.parametrize("stream", [False, True])
def test_completion_of_several_prompts(client: openai.OpenAI, stream: bool) -> None:
    options: Any = {"model": "scripted", "prompt": ["[words]", "x"], "max_tokens": 6, "n": 2, "stream": stream}
    texts = dict.fromkeys(range(4), "")
    result = client.completions.create(**options)
    for part in result if stream else [result]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "The qu", 1: "The qu", 2: "Hello!", 3: "Hello!"}


def test_null_and_unknown_fields_are_tolerated(client: openai.OpenAI) -> None:
    nothing: Any = None
    answer = client.chat.completions.create(
        model="scripted",
        messages=ask("x"),
        temperature=nothing,
        stop=nothing,
        tools=nothing,
        logit_bias=nothing,
        extra_body={"made_up": {"deep": [1]}, "top_k": -1, "routed_dp_rank": 0},
        extra_headers={"resin-routed-dp-rank": "0"},
    )
    assert answer.choices[0].message.content == "Hello!"


def test_sampling_fields_reach_the_engine(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="scripted",
        messages=ask("x"),
        temperature=0.5,
        top_p=0.9,
        seed=7,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"65": 1},
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [108]},
    )
    assert answer.choices[0].message.content == "Hel"
