"""Small tokenizers of the kinds that chat models come with, built here, and the files that checkpoints keep them in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

WORDS = ["▁hello", "▁Hi", "Hi", "hello", "hell", "▁world", "INST", "▁[", "/", "▁the"]
LETTERS = "▁abcdefghijklmnopqrstuvwxyzHINST[]<>/|_"


def sentencepiece(scheme: str, controls: list[str], **flags: bool) -> Tokenizer:
    """A vocabulary of words and bytes whose first word gets a space sign: `scheme` says where.

    Args:
        scheme: "first" and "always" as the Metaspace pre-tokenizer knows them, or "legacy", where a normalizer puts
            the sign in front of every stretch of text.
        controls: control tokens, after `<unk>`.
        flags: of these tokens.
    """
    tokens = ["<unk>", *controls, *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS]
    tokens += [word[:end] for word in WORDS for end in range(2, len(word) + 1)]
    tokens = list(dict.fromkeys(tokens))
    pieces = tokens[len(controls) + 257 :]
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    model = models.BPE({token: index for index, token in enumerate(tokens)}, merges, unk_token="<unk>")
    model.byte_fallback = model.fuse_unk = True
    tokenizer = Tokenizer(model)
    if scheme == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, **flags) for token in ["<unk>", *controls]])
    return tokenizer


def byte_level(controls: list[str], *, gap: int = 0) -> Tokenizer:
    """Bytes and control tokens; `gap` ids stand for nothing between them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    vocabulary |= {token: len(alphabet) + gap + index for index, token in enumerate(controls)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(controls)
    return tokenizer


def write_files(directory: Path, tokenizer: Tokenizer | dict[str, Any], **files: Any) -> Path:
    """A checkpoint's directory; `tokenizer_config={...}` writes `tokenizer_config.json`."""
    content = tokenizer.to_str() if isinstance(tokenizer, Tokenizer) else json.dumps(tokenizer)
    (directory / "tokenizer.json").write_text(content, encoding="utf-8")
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return directory
