"""Key ids: what stands for a token where prefixes are compared.

A text token's key is its id. A placeholder's names what it stands for, since all images of a prompt share one
placeholder id: a negative number from the content's digest and the placeholder's index within it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from resin.plan import InvalidRequest

KEY_DTYPE = np.dtype(np.int64)  # 63 bits name a placeholder's content, and no token id is negative
KEY_BYTES = KEY_DTYPE.itemsize
_MOST_DIGEST_BYTES = 1024


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Placeholders of a prompt that stand for one content, such as an image's.

    Attributes:
        start: position of the first placeholder.
        tokens: how many follow each other.
        digest: names the content and how it was prepared; equal digests share cached prefixes.
    """

    start: int
    tokens: int
    digest: bytes

    def keys(self) -> np.ndarray:
        """int64 [tokens], all negative."""
        names = b"".join(
            hashlib.blake2b(self.digest, digest_size=KEY_BYTES, salt=index.to_bytes(KEY_BYTES, "little")).digest()
            for index in range(self.tokens)
        )
        return np.frombuffer(names, "<i8").astype(KEY_DTYPE) | np.iinfo(KEY_DTYPE).min


def check_media(media: object, prompt_tokens: int) -> tuple[MediaSpan, ...]:
    """What `Engine.submit` was told of a prompt's media, in the order of the prompt.

    Raises:
        InvalidRequest: no spans, or spans that are empty, overlap or leave the prompt.
    """
    spans = tuple(media) if isinstance(media, Iterable) else (media,)
    end = 0
    for i, span in enumerate(spans):
        if not isinstance(span, MediaSpan):
            raise InvalidRequest(f"media[{i}]", span, "a MediaSpan")
        if not isinstance(span.digest, bytes) or not 0 < len(span.digest) <= _MOST_DIGEST_BYTES:
            raise InvalidRequest(f"media[{i}].digest", span.digest, f"1 to {_MOST_DIGEST_BYTES} bytes")
        if not isinstance(span.start, int) or not end <= span.start < prompt_tokens:
            raise InvalidRequest(f"media[{i}].start", span.start, f"{end} to {prompt_tokens - 1}, in rising order")
        room = prompt_tokens - span.start
        if not isinstance(span.tokens, int) or not 1 <= span.tokens <= room:
            raise InvalidRequest(f"media[{i}].tokens", span.tokens, f"1 to {room}")
        end = span.start + span.tokens
    return spans


def prompt_keys(prompt_ids: np.ndarray, media: Sequence[MediaSpan]) -> np.ndarray:
    """int64 [P], read-only: the keys of a prompt."""
    keys = prompt_ids.astype(KEY_DTYPE)
    for span in media:
        keys[span.start : span.start + span.tokens] = span.keys()
    keys.flags.writeable = False
    return keys
