"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

import pytest

from resin.recipes import Message, Role, Text, get_native_recipe
from serve import HttpServer
from tests.serve.scripted_runner import TOKENIZER
from tests.serve.test_invalid_requests import post


async def test_a_raw_prompt_there_and_back(server: HttpServer) -> None:
    status, answer = await post(server, "/tokenize", {"prompt": "é<|im_end|>", "return_token_strs": True})
    assert status == 200
    assert answer["tokens"] == TOKENIZER.encode("é<|im_end|>")
    assert answer["token_strs"] == ["bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    assert (answer["count"], answer["max_model_len"]) == (3, 4096)
    assert await post(server, "/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": "é<|im_end|>"})


async def test_a_conversation(server: HttpServer) -> None:
    body = {"messages": [{"role": "user", "content": "<|im_end|>"}]}
    _, answer = await post(server, "/tokenize", body)
    expected = get_native_recipe("qwen3", TOKENIZER).render([Message(Role.USER, [Text("<|im_end|>")])])
    assert answer["tokens"] == expected
    # What the server itself says to the recipe is no business of the template's options.
    status, again = await post(server, "/tokenize", body | {"chat_template_kwargs": {"answer_start": 7, "tools": 7}})
    assert (status, again["tokens"]) == (200, expected)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_faults(server: HttpServer, path: str, body: dict[str, Any], param: str) -> None:
    status, answer = await post(server, path, body)
    assert (status, answer["error"]["param"]) == (400, param)
