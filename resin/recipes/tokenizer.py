"""Text to token ids and back, built from what a checkpoint carries: GGUF metadata or Hugging Face files."""

import copy
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from resin.models.loading import CheckpointError
from resin.models.loading.directory import read_json_object
from resin.models.loading.gguf_header import parse_gguf_header
from resin.models.loading.mapped import map_file
from resin.recipes.tokenizer_gguf import build_gguf_tokenizer

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class ChatTokenizer:
    """A model's tokenizer with its special tokens and chat template.

    Attributes:
        chat_template: Jinja source, or None when the checkpoint has none.
        bos_id: id that starts a sequence, or None.
        eos_ids: ids that end a turn or a sequence.
        special_ids: ids of control tokens.
        vocab_size: one more than the largest id.
        location: where the tokenizer came from, for messages.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = None,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        location: str = "tokenizer",
    ) -> None:
        """Raises CheckpointError when the library's tokenizer fails at once."""
        _try_out(tokenizer, location)
        self._tokenizer = tokenizer
        self.location = location
        self.chat_template = chat_template
        self.bos_id = bos_id
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_ids))
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._added: dict[int, str] = {index: token.content for index, token in added.items()}
        self._is_byte_level = _is_byte_level(tokenizer)
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, add_special: bool = False, *, parse_special: bool = True) -> list[int]:
        """Returns the ids of a text.

        Args:
            text: any text; half a surrogate pair counts as U+FFFD.
            add_special: whether the tokens that the model wants around a text (such as bos) are added.
            parse_special: whether strings such as `<|im_end|>` become the control tokens that they spell. Pass False
                for text from users: it then stays text, whatever it spells.
        """
        tokenizer = self._tokenizer if parse_special else self._plain
        text = _join_surrogates(text)
        return list(tokenizer.encode(text, add_special_tokens=add_special).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Returns the text of ids; bytes that are no UTF-8 become U+FFFD.

        Raises:
            KeyError: an id outside the vocabulary.
        """
        kept = (index for index in ids if not (skip_special and index in self.special_ids))
        return b"".join(map(self.id_to_bytes, kept)).decode("utf-8", errors="replace")

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
        settings = {
            "bos_token": None if self.bos_id is None else self.id_to_token(self.bos_id),
            "eos_token": self.id_to_token(self.eos_ids[0]) if self.eos_ids else None,
            "chat_template": self.chat_template,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": list(self.eos_ids)}), "utf-8")

    @cached_property
    def _plain(self) -> Tokenizer:
        """The same tokenizer, blind to control tokens (and, in byte-level kinds, to every added token)."""
        try:
            plain = copy.deepcopy(self._tokenizer)
        except Exception as error:  # a merge whose result is no token: found only when the library writes it out
            raise CheckpointError(self.location, f"the tokenizer cannot be copied ({error})") from error
        if self._is_byte_level:
            plain.add_special_tokens(
                [AddedToken(content, special=True, normalized=False) for content in self._added.values()]
            )
        plain.encode_special_tokens = True
        return plain

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


def _load_gguf(path: Path) -> ChatTokenizer:
    metadata = parse_gguf_header(map_file(path), str(path)).metadata
    tokenizer = build_gguf_tokenizer(metadata, str(path))
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    template = metadata.get("tokenizer.chat_template")
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return ChatTokenizer(
        tokenizer,
        chat_template=template if isinstance(template, str) else None,
        bos_id=bos if isinstance(bos, int) else None,
        eos_ids=[end for end in ends if isinstance(end, int)],
        location=str(path),
    )


def _load_directory(directory: Path) -> ChatTokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(directory, "has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise CheckpointError(path, f"is not a tokenizer that can be used ({error})") from error
    settings = _read_json(directory / "tokenizer_config.json")
    bos = _token_id(tokenizer, settings.get("bos_token"))
    ends = [_token_id(tokenizer, settings.get("eos_token"))]
    # The generation settings are what the model's makers stop on; the tokenizer's own end comes last.
    for name in ("config.json", "generation_config.json"):
        listed = _read_json(directory / name).get("eos_token_id")
        ends = [*(listed if isinstance(listed, list) else [listed]), *ends]
    return ChatTokenizer(
        tokenizer,
        chat_template=_read_template(directory, settings),
        bos_id=bos,
        eos_ids=[end for end in ends if isinstance(end, int)],
        location=str(path),
    )


def _read_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        try:
            return jinja.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(jinja, f"cannot be read ({error})") from error
    template = _read_json(directory / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _token_id(tokenizer: Tokenizer, token: Any) -> int | None:
    content = token.get("content") if isinstance(token, dict) else token
    found: int | None = tokenizer.token_to_id(content) if isinstance(content, str) else None
    return found


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
