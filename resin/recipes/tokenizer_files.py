"""Reads what a Hugging Face directory says about its tokenizer, which is spread over half a dozen files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from resin.models.loading import CheckpointError
from resin.models.loading.directory import read_json_object

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Attributes:
    tokenizer: the library's tokenizer, with every token that any of the files names.
    named_tokens: spellings by name, such as `eos_token`, as the files give them.
    templates: Jinja sources by name; "default" is the chat template.
    eos_ids: what the model's generation settings stop on.
    """

    tokenizer: Tokenizer
    named_tokens: dict[str, str]
    templates: dict[str, str]
    eos_ids: list[int]


def read_directory(directory: Path) -> TokenizerFiles:
    """Reads a directory with `tokenizer.json`.

    Raises:
        CheckpointError: no such file, or a damaged one.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(directory, "has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise CheckpointError(path, f"is not a tokenizer that can be used ({error})") from error
    _forget_training(tokenizer)
    settings = _read_json(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        # Older files; newer ones repeat what stands here.
        settings |= _read_json(directory / "special_tokens_map.json")
        _add_tokens(tokenizer, _listed_tokens(directory), path)
    else:
        _add_tokens(tokenizer, _declared_tokens(directory, settings), path)
    named = dict(_named_tokens(settings))
    _mark_special(tokenizer, [*named.values(), *_extra_tokens(settings)])
    _set_surroundings(tokenizer, settings, named)
    ends: list[int] = []
    for name in ("config.json", "generation_config.json"):
        listed = _read_json(directory / name).get("eos_token_id")
        ends = [*(end for end in (listed if isinstance(listed, list) else [listed]) if isinstance(end, int)), *ends]
    return TokenizerFiles(tokenizer, named, _read_templates(directory, settings), ends)


def _forget_training(tokenizer: Tokenizer) -> None:
    """What a tokenizer did in its training run (cut, pad, draw merges at random) is saved with it."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None) is not None:
        tokenizer.model.dropout = None


def _declared_tokens(directory: Path, settings: Mapping[str, Any]) -> Iterator[tuple[int, AddedToken]]:
    path = directory / "tokenizer_config.json"
    declared = settings["added_tokens_decoder"]
    if not isinstance(declared, dict):
        raise CheckpointError(path, "added_tokens_decoder is not an object")
    for index, fields in declared.items():
        content = fields.get("content") if isinstance(fields, dict) else None
        if not index.isdecimal() or not isinstance(content, str) or not content:
            raise CheckpointError(path, f"added_tokens_decoder[{index!r}] is not a token")
        flags = {name: bool(fields[name]) for name in _FLAGS if name in fields}
        yield int(index), AddedToken(content, **flags)


def _listed_tokens(directory: Path) -> Iterator[tuple[int, AddedToken]]:
    path = directory / "added_tokens.json"
    for content, index in _read_json(path).items():
        if not content or not isinstance(index, int) or isinstance(index, bool):
            raise CheckpointError(path, f"{content!r}: {index!r} is not a token and its id")
        yield index, AddedToken(content, normalized=False)


def _add_tokens(tokenizer: Tokenizer, tokens: Iterator[tuple[int, AddedToken]], path: Path) -> None:
    """Adds what tokenizer.json lacks. A token that it has keeps its id, and takes the flags given here."""
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for index, token in sorted(tokens, key=lambda item: item[0]):
        if repr(known.get(token.content)) == repr(token):
            continue
        is_new = tokenizer.token_to_id(token.content) is None
        tokenizer.add_tokens([token])
        found = tokenizer.token_to_id(token.content)
        if is_new and found != index:
            raise CheckpointError(
                path, f"has no place for the added token {token.content!r} at {index}: {found} is next"
            )


def _named_tokens(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    extra = settings.get("extra_special_tokens")
    for name, token in {**settings, **(extra if isinstance(extra, dict) else {})}.items():
        content = _content(token)
        if name.endswith("_token") and content is not None:
            yield name, content


def _extra_tokens(settings: Mapping[str, Any]) -> Iterator[str]:
    for name in ("additional_special_tokens", "extra_special_tokens"):
        listed = settings.get(name)
        for token in listed if isinstance(listed, list) else []:
            if (content := _content(token)) is not None:
                yield content


def _content(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content else None


def _mark_special(tokenizer: Tokenizer, contents: list[str]) -> None:
    """Makes control tokens of named pieces of the vocabulary; a name that is no piece has no row in the model."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for content in contents:
        if content not in known and tokenizer.token_to_id(content) is not None:
            tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False)])


def _set_surroundings(tokenizer: Tokenizer, settings: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """`add_bos_token` and `add_eos_token`, where given, say what stands around a text, whatever tokenizer.json says."""
    wanted = {side: settings.get(f"add_{side}_token") for side in ("bos", "eos")}
    if not any(isinstance(value, bool) for value in wanted.values()):
        return
    tokens = {side: named.get(f"{side}_token", "") for side, value in wanted.items() if value is True}
    ids = {side: index for side, token in tokens.items() if (index := tokenizer.token_to_id(token)) is not None}
    single = [*(tokens[side] for side in ids if side == "bos"), "$A", *(tokens[side] for side in ids if side == "eos")]
    special = [(tokens[side], index) for side, index in ids.items()]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


def _read_templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    files = {"default": directory / "chat_template.jinja"}
    files |= {path.stem: path for path in (directory / "additional_chat_templates").glob("*.jinja")}
    templates = {name: _read_text(path) for name, path in files.items() if path.is_file()}
    if templates:
        return templates
    template = _read_json(directory / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if template is None or isinstance(template, str):
        return {} if template is None else {"default": template}
    listed = template if isinstance(template, list) else []
    named = {entry.get("name"): entry.get("template") for entry in listed if isinstance(entry, dict)}
    if not isinstance(named.get("default"), str):
        raise CheckpointError(directory, "chat_template is neither a text nor a list with one named default")
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(path, f"cannot be read ({error})") from error


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
