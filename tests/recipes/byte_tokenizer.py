"""A tokenizer for tests: one id a byte, a few longer pieces, and the control tokens that a test names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

PIECES = (b"<th", b"ink>", b"tool", b'"name"', "é".encode(), "😀".encode()[:2], "😀".encode()[2:], b" the", b"\n\n")

CONTROLS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<|startoftext|>",
    "<|tool_list_start|>",
    "<|tool_list_end|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|tool_response_start|>",
    "<|tool_response_end|>",
    "<bos>",
    "<eos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
)


class ByteTokenizer:
    """Ids: 0 to 255 bytes, then PIECES (which `encode` never uses), then the controls, all of them special."""

    def __init__(self, controls: Iterable[str] = CONTROLS, *, chat_template: str | None = None) -> None:
        self._bytes = [bytes([value]) for value in range(256)] + list(PIECES)
        self.first_control = len(self._bytes)
        self._controls = {token: self.first_control + index for index, token in enumerate(controls)}
        self._names = {token_id: token for token, token_id in self._controls.items()}
        alternatives = "|".join(re.escape(token) for token in sorted(self._controls, key=len, reverse=True))
        self._pattern = re.compile(f"({alternatives})") if alternatives else None
        self.vocab_size = self.first_control + len(self._controls)
        self.special_ids = frozenset(self._names)
        self.bos_id: int | None = self._controls.get("<bos>")
        ends = (self._controls.get("<|im_end|>"), self._controls.get("<eos>"))
        self.eos_ids = tuple(token_id for token_id in ends if token_id is not None)
        self.controls = dict(self._controls)
        self.chat_template = chat_template
        self.tool_template: str | None = None
        self.named_tokens = {"bos_token": "<bos>"} if "<bos>" in self._controls else {}
        if self.eos_ids:
            self.named_tokens["eos_token"] = self._names[self.eos_ids[0]]

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        ids: list[int] = []
        for piece in self._pattern.split(text) if self._pattern else [text]:
            ids += [self._controls[piece]] if piece in self._controls else piece.encode("utf-8", "replace")
        return ids

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        ids: list[int] = []
        for part in parts:
            ids += [part] if isinstance(part, int) else part.encode("utf-8", "replace")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.id_to_bytes, ids)).decode(errors="replace")

    def token_to_id(self, token: str) -> int | None:
        return self._controls.get(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self._names.get(token_id)

    def id_to_bytes(self, token_id: int) -> bytes:
        if token_id in self._names:
            return self._names[token_id].encode()
        if not 0 <= token_id < self.first_control:
            raise KeyError(token_id)
        return self._bytes[token_id]
