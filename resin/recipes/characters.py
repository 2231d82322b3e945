"""Bytes of tokens to whole characters, one token at a time."""

from __future__ import annotations

import codecs

from resin.recipes.recipe import Tokenizer


class CharacterStream:
    """Joins the bytes of successive tokens and hands out whole characters only.

    Bytes that cannot be part of UTF-8 come out as U+FFFD, as `bytes.decode(errors="replace")` gives them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.id_to_bytes
        self._specials = tokenizer.special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes; a special token ends a broken character and adds nothing."""
        if token_id in self._specials:
            return self.flush()
        try:
            data = self._bytes_of(token_id)
        except KeyError:  # an id that stands for nothing
            return ""
        if data.isascii() and not self._decoder.buffer:  # the usual case, for a fraction of the decoder's time
            return data.decode()
        return self._decoder.decode(data)

    def flush(self) -> str:
        """U+FFFD for an unfinished character, otherwise nothing."""
        return self._decoder.decode(b"", final=True)
