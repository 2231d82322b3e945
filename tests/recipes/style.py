"""Chat templates in the styles of model families, with the control tokens that each needs.

The templates were written for these tests; what they write is what the families write.
"""

from __future__ import annotations

from pathlib import Path

from tests.recipes.byte_tokenizer import ByteTokenizer

FOLDER = Path(__file__).parent / "templates"
_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_MISTRAL = ("<s>", "</s>")
_MISTRAL_TOOLS = tuple(f"[{side}{name}]" for name in ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS") for side in ("", "/"))
_HEADERS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
_GEMMA = tuple(
    f"<{side}_{name}>" for name in ("of_turn", "function_call", "function_response") for side in ("start", "end")
)
_BARS = (
    "User",
    "Assistant",
    *(f"tool▁{name}▁{side}" for name in ("calls", "call", "output") for side in ("begin", "end")),
)

# The first token is bos, the second eos.
CONTROLS = {
    "mistral-v1": _MISTRAL,
    "mistral-v3": (*_MISTRAL, *_MISTRAL_TOOLS, "[TOOL_CALLS]"),
    "mistral-tekken": (*_MISTRAL, *_MISTRAL_TOOLS),
    "mistral-named": (*_MISTRAL, *_MISTRAL_TOOLS, "[TOOL_CALLS]", "[ARGS]"),
    "llama2": _MISTRAL,
    "zephyr": _MISTRAL,
    "tulu": ("<|begin_of_text|>", "<|end_of_text|>", *_HEADERS[1:]),
    "hermes": ("<|begin_of_text|>", "<|im_end|>", "<|im_start|>", *_HEADERS[1:]),
    "hermes-tools": ("<|begin_of_text|>", "<|im_end|>", "<|im_start|>", *_HEADERS[1:]),
    "thinking": (*_CHATML, *_TAGS),
    "coder": (*_CHATML, *_TAGS),
    "lfm25": ("<|startoftext|>", "<|im_end|>", *_CHATML[:2], "<|tool_call_start|>", "<|tool_call_end|>"),
    "lfm2": (
        "<|startoftext|>",
        "<|im_end|>",
        *_CHATML[:2],
        *(f"<|tool_{name}_{side}|>" for name in ("call", "list", "response") for side in ("start", "end")),
    ),
    "function-gemma": (
        "<bos>",
        "<eos>",
        *_GEMMA,
        "<escape>",
        "<start_function_declaration>",
        "<end_function_declaration>",
    ),
    "deepseek": ("<begin>", "<end>", *(f"<｜{name}｜>" for name in (*_BARS, "tool▁sep"))),  # noqa: RUF001
    "deepseek-short": ("<begin>", "<end>", *_TAGS[2:], *(f"<｜{name}｜>" for name in (*_BARS, "tool▁sep"))),  # noqa: RUF001
    "harmony": tuple(f"<|{name}|>" for name in "startoftext return start end message channel constrain call".split()),
    "llama3": _HEADERS,
}


def template(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def styled_tokenizer(name: str) -> ByteTokenizer:
    """One id a byte, the family's control tokens, its template, and for Hermes the one for tools."""
    tokenizer = ByteTokenizer(CONTROLS[name], chat_template=template(name))
    bos, eos = CONTROLS[name][:2]
    tokenizer.named_tokens = {"bos_token": bos, "eos_token": eos}
    tokenizer.eos_ids = (tokenizer.controls[eos],)
    if name == "hermes":
        tokenizer.tool_template = template("hermes-tools")
    return tokenizer
