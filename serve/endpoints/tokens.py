"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from datetime import date

from aiohttp import web

from serve.errors import invalid
from serve.logprobs import token_text
from serve.planning import reasoning_options, texts_of
from serve.replies import json_response, read_body
from serve.schemas.chat import to_messages, to_tools
from serve.schemas.tokens import DetokenizeRequest, TokenizeRequest
from serve.service import Service, length_of, service_of


async def tokenize(request: web.Request) -> web.Response:
    """Ids of a prompt or a conversation."""
    service = service_of(request)
    body = await read_body(request, TokenizeRequest)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "prompt: expected exactly one of prompt and messages")
    return await service.aside.run(length_of(request), _tokenize, service, body)


def _tokenize(service: Service, body: TokenizeRequest) -> web.Response:
    if body.messages is not None:
        options = {"current_date": date.today().isoformat(), **reasoning_options(None, body.chat_template_kwargs)}
        options["add_generation_prompt"] = body.add_generation_prompt
        messages, tools = to_messages(body.messages), to_tools(body.tools)
        service.check_countable(texts_of(messages), "messages")
        ids = service.render(messages, tools, options)
    else:
        service.check_countable([body.prompt or ""], "prompt")
        ids = service.tokenizer.encode(body.prompt or "", add_special=body.add_special_tokens)
    texts = [token_text(token_id, service.tokenizer) for token_id in ids] if body.return_token_strs else None
    return json_response(
        {"count": len(ids), "max_model_len": service.engine.context_length, "tokens": ids, "token_strs": texts}
    )


async def detokenize(request: web.Request) -> web.Response:
    """The text of ids, control tokens spelled out."""
    service = service_of(request)
    body = await read_body(request, DetokenizeRequest)
    service.check_model(body.model)
    try:
        return await service.aside.run(length_of(request), _detokenize, service, body)
    except KeyError as error:
        raise invalid("tokens", f"tokens: {error.args[0]} is not in the vocabulary") from error


def _detokenize(service: Service, body: DetokenizeRequest) -> web.Response:
    return json_response({"prompt": service.tokenizer.decode(body.tokens)})
