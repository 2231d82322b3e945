"""Text to token ids and back, built from what a checkpoint carries: GGUF metadata or Hugging Face files."""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import cast

import numpy as np
from tokenizers import AddedToken, Tokenizer

from resin.models.loading import CheckpointError
from resin.models.loading.gguf_header import parse_gguf_header
from resin.models.loading.mapped import map_file
from resin.recipes.tokenizer_files import read_directory
from resin.recipes.tokenizer_gguf import build_gguf_tokenizer

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_SHORT_CHARACTERS = 4096


class ChatTokenizer:
    """A model's tokenizer with its special tokens and chat template.

    Attributes:
        chat_template: Jinja source, or None when the checkpoint has none.
        tool_template: Jinja source for conversations with tools, or None where `chat_template` does both.
        named_tokens: spellings by the names that templates know them under, such as `eos_token`.
        bos_id: id that starts a sequence, or None.
        eos_ids: ids that end a turn or a sequence, those that the model's makers stop on first.
        special_ids: ids of control tokens.
        controls: ids by spelling of every token that no text may become: the special ones, those that the templates
            write, and others of the shape of a tag.
        vocab_size: one more than the largest id.
        location: where the tokenizer came from, for messages.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = None,
        tool_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        location: str = "tokenizer",
    ) -> None:
        """Raises CheckpointError when the library's tokenizer fails at once."""
        _try_out(tokenizer, location)
        self._tokenizer = tokenizer
        self.location = location
        self.chat_template = chat_template
        self.tool_template = tool_template
        self.named_tokens: Mapping[str, str] = dict(named_tokens or {})
        self.bos_id = bos_id
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_ids))
        self._added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in self._added.items() if token.special)
        self._is_byte_level = _is_byte_level(tokenizer)
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.controls: Mapping[str, int] = {
            token.content: index for index, token in self._added.items() if self._is_control(token)
        }

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Returns the ids of a text, in which strings such as `<|im_end|>` become the tokens that they spell.

        Args:
            text: any text; half a surrogate pair counts as U+FFFD.
            add_special: whether the tokens that the model wants around a text (such as bos) are added.
        """
        return _ids_of(self._tokenizer, _join_surrogates(text), add_special)

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Returns the ids of a text with tokens at given places, encoded as one whole.

        Args:
            parts: texts, which stay text whatever they spell, and ids of tokens.
        """
        return self._marked.encode([part if isinstance(part, int) else _join_surrogates(part) for part in parts])

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Returns the text of ids; bytes that are no UTF-8 become U+FFFD.

        The space that some vocabularies put in front of every text is taken away again.

        Raises:
            KeyError: an id outside the vocabulary.
        """
        kept = [index for index in ids if not (skip_special and index in self.special_ids)]
        text = b"".join(map(self.id_to_bytes, kept)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._adds_space else text

    def id_to_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token stands for: a character may be spread over several tokens.

        Special tokens give the UTF-8 of their own spelling. Ids are Python or NumPy integers.

        Raises:
            KeyError: an id outside the vocabulary.
        """
        return self._bytes_by_id[int(token_id)]

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of a token by its spelling in the vocabulary, or None."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def id_to_token(self, token_id: int) -> str | None:
        """Returns a token's spelling in the vocabulary (byte-level kinds spell bytes as letters), or None."""
        found: str | None = self._tokenizer.id_to_token(int(token_id))
        return found

    def save(self, directory: Path) -> None:
        """Writes the files that `load_tokenizer` reads from a directory."""
        self._tokenizer.save(str(directory / "tokenizer.json"))
        templates = {"default": self.chat_template, "tool_use": self.tool_template}
        listed = [{"name": name, "template": template} for name, template in templates.items() if template is not None]
        settings = {
            "bos_token": None if self.bos_id is None else self.id_to_token(self.bos_id),
            **self.named_tokens,
            "chat_template": self.chat_template if self.tool_template is None else listed,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": list(self.eos_ids)}), "utf-8")

    def _is_control(self, token: AddedToken) -> bool:
        content = token.content
        if token.special or content.isspace():
            return bool(token.special)
        # SentencePiece kinds have HTML tags among their ordinary pieces, but none with such a letter.
        if _TAG.fullmatch(content) and (self._is_byte_level or not _SIGNS.isdisjoint(content)):
            return True
        written = [template for template in (self.chat_template, self.tool_template) if template]
        return not content.isalnum() and any(content in template for template in written)

    @cached_property
    def _marked(self) -> _MarkedTokenizer:
        try:
            tokenizer = copy.deepcopy(self._tokenizer)
        except Exception as error:  # a merge whose result is no token: found only when the library writes it out
            raise CheckpointError(self.location, f"the tokenizer cannot be copied ({error})") from error
        return _MarkedTokenizer(tokenizer, self.controls, self._added, self.vocab_size)

    @cached_property
    def _adds_space(self) -> bool:
        return b"".join(map(self.id_to_bytes, self.encode("a"))) == b" a"

    @cached_property
    def _bytes_by_id(self) -> dict[int, bytes]:
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        return {index: self._piece_bytes(index, token) for token, index in vocabulary.items()}

    def _piece_bytes(self, index: int, token: str) -> bytes:
        if self._is_byte_level:
            if index in self._added:
                return token.encode()
            try:
                return bytes(map(_BYTE_OF_LETTER.__getitem__, token))
            except KeyError:
                return token.encode()  # a control token that the file does not mark as one
        if index in self.special_ids:
            return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace(_SPACE, " ").encode()


def _ids_of(tokenizer: Tokenizer, text: str, add_special: bool) -> list[int]:
    """The library lets other threads run only while it encodes a batch, and a long text takes seconds."""
    if len(text) <= _SHORT_CHARACTERS:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special).ids
    else:
        ids = tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
    return ids


class _MarkedTokenizer:
    """A copy of a tokenizer that is blind to control tokens and knows a mark for each of them instead.

    A mark is a token that no text can spell, because part of it is random. The library so reads a conversation in one
    piece, with its own rules for what stands beside a control token, and text that spells one is text.
    """

    def __init__(
        self, tokenizer: Tokenizer, controls: Mapping[str, int], added: Mapping[int, AddedToken], vocab_size: int
    ) -> None:
        """Takes the tokenizer over."""
        tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in controls])
        tokenizer.encode_special_tokens = True
        secret = secrets.token_hex(16)
        # The library numbers new tokens by their count, so that in a vocabulary with gaps a mark would get the id of
        # a real token; fillers take such ids up.
        tokenizer.add_tokens([f"<{secret}>"])
        first = tokenizer.token_to_id(f"<{secret}>")
        assert first is not None
        tokenizer.add_tokens([f"<{secret}-{index}>" for index in range(first + 1, vocab_size)])
        self._mark_of = {index: f"<{secret}:{index}>" for index in controls.values()}
        tokenizer.add_tokens([_like(added[index], mark) for index, mark in self._mark_of.items()])
        self._id_of_mark = {tokenizer.token_to_id(mark): index for index, mark in self._mark_of.items()}
        self._tokenizer = tokenizer

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        ids: list[int] = []
        pending: list[str] = []
        for part in parts:
            spelled = part if isinstance(part, str) else self._mark_of.get(part)
            if spelled is not None:
                pending.append(spelled)
            else:  # a token that the library would not look for, either
                ids += [*self._encode("".join(pending)), cast(int, part)]
                pending.clear()
        return ids + self._encode("".join(pending))

    def _encode(self, text: str) -> list[int]:
        real = self._id_of_mark
        return [real.get(index, index) for index in _ids_of(self._tokenizer, text, False)]


def _like(token: AddedToken, content: str) -> AddedToken:
    """A token that takes space and word boundaries around it as another one does."""
    flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word", "normalized")}
    return AddedToken(content, **flags)


_TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_SIGNS = frozenset("_|[\N{FULLWIDTH VERTICAL LINE}")


def load_tokenizer(path: str | PathLike[str]) -> ChatTokenizer:
    """Loads the tokenizer and chat template of a checkpoint.

    Args:
        path: a GGUF file, or a directory (or a file in one) with `tokenizer.json`.

    Raises:
        CheckpointError: no tokenizer there, a damaged file, or a kind that is not supported.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        return _load_gguf(path)
    return _load_directory(path if path.is_dir() else path.parent)


def find_tokenizer(path: str | PathLike[str]) -> ChatTokenizer | None:
    """The same, None if the checkpoint has no tokenizer: its model runs from token ids.

    Raises:
        CheckpointError: it has one that is damaged, or of a kind that is not supported.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        has_one = "tokenizer.ggml.model" in parse_gguf_header(map_file(path), str(path)).metadata
    else:
        directory = path if path.is_dir() else path.parent
        has_one = any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    return load_tokenizer(path) if has_one else None


def _load_gguf(path: Path) -> ChatTokenizer:
    metadata = parse_gguf_header(map_file(path), str(path)).metadata
    tokenizer = build_gguf_tokenizer(metadata, str(path))
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    templates = [metadata.get(f"tokenizer.chat_template{name}") for name in ("", ".tool_use")]
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    named = {
        f"{name}_token": tokenizer.id_to_token(index)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if isinstance(index := metadata.get(f"tokenizer.ggml.{key}_token_id"), int) and index >= 0
    }
    default, tool_use = (template if isinstance(template, str) else None for template in templates)
    return ChatTokenizer(
        tokenizer,
        chat_template=default,
        tool_template=tool_use,
        named_tokens={name: token for name, token in named.items() if token is not None},
        bos_id=bos if isinstance(bos, int) else None,
        eos_ids=[end for end in ends if isinstance(end, int)],
        location=str(path),
    )


def _load_directory(directory: Path) -> ChatTokenizer:
    files = read_directory(directory)
    bos = files.named_tokens.get("bos_token")
    # The generation settings are what the model's makers stop on; the tokenizer's own end comes last.
    own = files.tokenizer.token_to_id(files.named_tokens.get("eos_token", ""))
    return ChatTokenizer(
        files.tokenizer,
        chat_template=files.templates.get("default"),
        tool_template=files.templates.get("tool_use"),
        named_tokens=files.named_tokens,
        bos_id=None if bos is None else files.tokenizer.token_to_id(bos),
        eos_ids=[*files.eos_ids, *([] if own is None else [own])],
        location=str(directory / "tokenizer.json"),
    )


def _try_out(tokenizer: Tokenizer, location: str) -> None:
    """Some damage shows at the first text or the first unknown letter, even as a panic, which is no `Exception`."""
    try:
        tokenizer.encode("a\U0010ffff", add_special_tokens=True)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise CheckpointError(location, f"is not a tokenizer that can be used ({error})") from error


def _join_surrogates(text: str) -> str:
    """JSON may hold characters as surrogate pairs, whole or halved; the library takes neither."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    return "ByteLevel" in str(tokenizer.decoder) or "ByteLevel" in str(tokenizer.pre_tokenizer)


def _byte_letters() -> dict[str, int]:
    """Byte-level vocabularies spell printable Latin-1 bytes as themselves and the others from U+0100 on."""
    printable = np.zeros(256, bool)
    for first, last in (("!", "~"), ("¡", "¬"), ("®", "ÿ")):
        printable[ord(first) : ord(last) + 1] = True
    others = iter(range(0x100, 0x200))
    return {chr(byte if printable[byte] else next(others)): byte for byte in range(256)}


_BYTE_OF_LETTER = _byte_letters()
